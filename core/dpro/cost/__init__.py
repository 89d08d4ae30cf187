"""Time of things that were not measured."""
