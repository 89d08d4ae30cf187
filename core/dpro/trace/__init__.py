"""What was measured: columns of events, one reader per file format, the run folder."""
