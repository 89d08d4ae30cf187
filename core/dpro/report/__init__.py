"""What a person sees: terminal tables, the Perfetto trace, the HTML page, differences, the doctor."""
