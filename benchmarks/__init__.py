"""Measurements of dpro on real jobs and graphs; each prints JSON with ``--json``."""
