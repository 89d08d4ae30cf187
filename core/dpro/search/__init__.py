"""Who chooses the edits."""
