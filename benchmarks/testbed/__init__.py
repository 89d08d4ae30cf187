"""Real distributed jobs on one machine: hosts are network namespaces, links are held to a rate.

``python -m benchmarks.testbed run --hosts 2 --rate 1gbit -- CMD`` from the shell, :class:`Testbed` from Python.
"""

from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.job import Interrupted, Job, interruptible
from benchmarks.testbed.network import TestbedError, available, clean_stale, install, namespaces

__all__ = [
    "Interrupted",
    "Job",
    "Testbed",
    "TestbedError",
    "available",
    "clean_stale",
    "install",
    "interruptible",
    "namespaces",
]
