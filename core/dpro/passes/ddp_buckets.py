"""Which gradients PyTorch DDP puts together, exactly, given its size caps.

Knows the bucketing rule of ``torch.distributed._compute_bucket_assignment_by_size`` (C++ in
``torch/csrc/distributed/c10d/reducer.cpp``) and how ``bucket_cap_mb`` and ``bucket_cap_mb_list`` become its
limits; imports no torch. All orders are gradient-ready orders: the ones that count from the second
iteration on, when DDP rebuilds its buckets. With ``find_unused_parameters=True`` (and no static graph) DDP
never rebuilds and this module does not apply.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

MIB = 2**20
#: DDP without arguments: a small first bucket, so that communication starts early.
DEFAULT_LIMITS = (1 * MIB, 25 * MIB)
#: See :func:`running_totals`.
Totals = list[tuple[list[int], list[int]]]


def assign(nbytes: Sequence[int], dtypes: Sequence[str], caps: Sequence[int]) -> list[list[int]]:
    """Buckets of positions 0..n-1 for tensors of ``nbytes[i]`` bytes, ready in this order.

    Every dtype fills a bucket of its own. A bucket closes as soon as its size reaches the dtype's current
    cap (bytes), and the dtype moves on to the next cap, the last one staying. Closed buckets come in the
    order they closed, then the unfinished ones, latest dtype first (the order of a hash map in DDP, seen
    with libstdc++).

    Raises:
        ValueError: no caps, or columns of different length.
    """
    return assigned(running_totals(nbytes, dtypes), caps)


def running_totals(nbytes: Sequence[int], dtypes: Sequence[str]) -> Totals:
    """By dtype: its places, and the bytes up to each; errors as :func:`assign`."""
    if len(nbytes) != len(dtypes):
        raise ValueError("bucketing needs one dtype per tensor")
    places: dict[str, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        places.setdefault(dtype, []).append(i)
    return [(mine, [*accumulate(nbytes[i] for i in mine)]) for mine in places.values()]


def assigned(totals: Totals, caps: Sequence[int]) -> list[list[int]]:
    """:func:`assign` for who asks of the same tensors again and again."""
    if not caps:
        raise ValueError("bucketing needs at least one cap")
    done: list[tuple[int, list[int]]] = []  # with the place that closed it
    unfinished: list[list[int]] = []
    for mine, total in totals:
        begin = before = turn = 0
        while begin < len(mine):
            end = bisect_left(total, before + caps[min(turn, len(caps) - 1)], lo=begin)
            if end == len(mine):
                unfinished.append(mine[begin:])
                break
            done.append((mine[end], mine[begin : end + 1]))
            begin, before, turn = end + 1, total[end], turn + 1
    return [bucket for _, bucket in sorted(done)] + unfinished[::-1]


def limits_bytes(caps_mib: Sequence[float] | None, first_bytes: int | None = None) -> tuple[int, ...]:
    """The limits DDP derives from its arguments.

    ``caps_mib``: None for defaults, one number for ``bucket_cap_mb``, more for ``bucket_cap_mb_list``.
    ``first_bytes``: the limit of the first bucket under ``bucket_cap_mb`` where torch fixes it (1 MiB,
    whatever was asked, in older releases); None where the cap holds for the first bucket too.
    """
    if caps_mib is None:
        return DEFAULT_LIMITS
    caps = tuple(int(cap * MIB) for cap in caps_mib)
    return (first_bytes, *caps) if len(caps) == 1 and first_bytes is not None else caps


def caps_for(groups: Sequence[Sequence[int]], nbytes: Sequence[int], dtypes: Sequence[str]) -> list[float] | None:
    """Caps in MiB that make DDP build exactly ``groups`` (lists of positions), or None.

    The j-th cap must close the j-th bucket of every dtype: larger than the bucket without its last tensor,
    at most the whole; only a dtype's last bucket may stay open. The caps are exact: ``int(cap * 2**20)`` is
    a whole number of bytes, without rounding. Not expressible: mixed dtypes in a bucket, tensors skipped or
    reordered, dtypes whose bucket sizes contradict each other, buckets of zero bytes.
    """
    wanted = [list(group) for group in groups]
    if not all(wanted):
        return None
    sizes: dict[str, list[int]] = {}
    for group in wanted:
        sizes.setdefault(dtypes[group[0]], []).append(sum(nbytes[i] for i in group))
    for last_open in (False, True):
        # The largest cap that closes all it must: if it comes too late for none of them, no smaller one helps.
        columns: list[list[int]] = []
        for per_dtype in sizes.values():
            closing = per_dtype[:-1] if last_open else per_dtype
            columns += [[] for _ in range(len(per_dtype) - len(columns))]
            for column, whole in zip(columns, closing, strict=False):
                column.append(whole)
        caps = [min(column) if column else sum(nbytes) + 1 for column in columns]
        if caps and min(caps) > 0 and assign(nbytes, dtypes, caps) == wanted:
            return [cap / MIB for cap in caps]
    return None
