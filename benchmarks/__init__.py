"""Benchmarks: each module runs with ``python -m benchmarks.<name>`` and prints JSON with ``--json``."""
