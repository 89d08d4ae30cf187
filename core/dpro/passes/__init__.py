"""Undoable graph edits, one file each, in a registry."""
