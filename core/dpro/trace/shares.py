"""What a capture tells of a batch that ranks share, for ranks that are not alike (HeteroG, CoNEXT 2020, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Key of ``Meta.extra``, and of a graph's ``info`` (rank -> :class:`Share`).
SHARES = "shares"
_MOST = 1 << 40


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch of ``total`` samples: ``samples`` of them, and what a forward and backward pass
    takes, ``fixed_ns + ns_per_sample · samples``, as timed on that rank.
    """

    samples: int
    total: int
    fixed_ns: float
    ns_per_sample: float

    def time_ns(self, samples: int) -> float:
        """Of a pass over so many."""
        return self.fixed_ns + self.ns_per_sample * samples


def told(samples: int, total: int, parts_ns: dict[int, int]) -> dict[str, float] | None:
    """For ``Meta.extra``; None where too little was timed.

    Args:
        parts_ns: parts per batch -> ns of a pass over one; 1, the whole, among them.
    """
    if len(parts_ns) < 2 or not 0 < samples < total:
        return None
    points = sorted((samples / parts, ns) for parts, ns in parts_ns.items())
    mean = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    spread = sum((x - mean[0]) ** 2 for x, _ in points)
    slope = sum((x - mean[0]) * (y - mean[1]) for x, y in points) / spread
    slope = min(max(slope, 0.0), points[-1][1] / samples)  # no pass takes less than nothing for its start
    # through the whole batch, the size that is trained with
    return {
        "samples": samples, "total": total, "fixed_ns": points[-1][1] - slope * samples, "ns_per_sample": slope,
    }  # fmt: skip


def load_share(raw: Any) -> Share | None:
    """Of a stored trace; None where it has none that can be true."""
    keys = ("samples", "total", "fixed_ns", "ns_per_sample")
    if not isinstance(raw, dict) or not all(type(raw.get(key)) in (int, float) for key in keys):
        return None
    samples, total, fixed_ns, slope = (raw[key] for key in keys)
    good = type(samples) is int and type(total) is int and 0 < samples < total < _MOST
    if not good or not 0 <= fixed_ns < _MOST or not 0 <= slope < _MOST or not fixed_ns + slope:
        return None
    return Share(samples, total, float(fixed_ns), float(slope))
