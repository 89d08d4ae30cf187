"""Simulate a graph: engine, critical path, baselines."""
