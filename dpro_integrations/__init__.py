"""One module per framework or library; none is imported before the user imported it."""
