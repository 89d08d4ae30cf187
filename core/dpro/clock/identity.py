"""Which clock a process reads: what a capture writes down, so that nobody has to guess it from a host's name.

Containers may share a host name, and time namespaces give processes of one kernel different monotonic
clocks; a boot id with the inode of the time namespace names the clock itself.
"""

from __future__ import annotations

import os
from pathlib import Path

#: key of ``RankTrace.meta.extra``
CLOCK_ID = "clock_id"


def clock_id() -> str:
    """Name of this process's ``CLOCK_MONOTONIC``, the same for all who read the same clock; "" where not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    try:
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # a kernel before 5.6 has no time namespaces: one clock
        return boot
