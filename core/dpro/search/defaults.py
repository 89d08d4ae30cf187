"""What the libraries do when nobody tunes them: where a search starts, and what it must beat."""

from __future__ import annotations

from dpro.graph.graph import Graph
from dpro.passes.ddp_buckets import DEFAULT_LIMITS, MIB, limits_bytes
from dpro.passes.tensor_fusion import Grouping, ddp_grouping

#: The uniform caps, MiB, that people try by hand (25 is DDP's default for all but the first bucket).
HAND_TRIED_CAPS_MIB = (1, 2, 4, 8, 16, 25, 50)


def ddp_default(graph: Graph) -> Grouping:
    """PyTorch DDP without arguments: a first bucket of 1 MiB, then 25 MiB."""
    return ddp_grouping(graph, DEFAULT_LIMITS)


def ddp_uniform(graph: Graph, cap_bytes: int) -> Grouping:
    """PyTorch DDP with ``bucket_cap_mb = cap_bytes / 2**20``."""
    return ddp_grouping(graph, uniform_limits(graph, cap_bytes))


def uniform_limits(graph: Graph, cap_bytes: int) -> tuple[int, ...]:
    """The limits that DDP makes of it.

    ``graph.info["ddp_first_bucket_bytes"]`` is there where an older torch keeps a first bucket of its own.
    """
    return limits_bytes([cap_bytes / MIB], graph.info.get("ddp_first_bucket_bytes"))
