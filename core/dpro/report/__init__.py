"""Results for people: terminal table, Perfetto trace, HTML."""
