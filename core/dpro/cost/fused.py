"""What one kernel takes that does the work of several ops: DisCo's cost of op fusion (TPDS 2022, section 4.3).

Knows a fused op as the ops in it, what each takes alone, and the bytes that they move; not whose ops they are. An
estimator says :meth:`Estimator.time_ns` of a :class:`Kernel` and how far that can be trusted (:class:`Trust`, on
kernels of models that it was not fitted to). What must be fitted is fitted to :class:`Sample`, kernels that were timed
(``benchmarks/fused_kernels.py`` times them on this machine); no fitted model is stored anywhere.
:mod:`dpro.cost.fused_trees` and :mod:`dpro.cost.fused_gnn` are the two that need a library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: DisCo's measure (section 6.5): over 90 % of unseen fused ops within this.
WITHIN = 0.14
#: Types of ops that compute much for each byte, or are a library's: their time does not follow from their bytes.
_HEAVY = re.compile(
    r"conv(?!ert)|matmul|gemm|linear|dot_|lstm|gru|rnn|attention|pool|sort|gather|scatter|embedding|cumsum", re.I
)

#: Types of ops that no compiler computes twice to spare writing them (XLA's ``IsExpensive``).
_DEAR = re.compile(r"exp|log|tanh|pow|sqrt|sin|cos|erf|reduce|arg|softmax|norm|gelu", re.I)


def is_heavy(op_type: str) -> bool:
    """Whether ops of a type are more than a pass over their bytes (``Conv2d``, ``dot_general``)."""
    return _HEAVY.search(op_type) is not None


@dataclass(frozen=True)
class Kernel:
    """A fused op of n ops, in an order in which each comes after what it needs.

    ``time_ns``, ``in_bytes``, ``out_bytes``, ``flops`` [n]: of each op alone (flops 0: not known). ``source``,
    ``target``, ``edge_bytes`` [e]: what one op in it reads of another. ``exported`` [n]: others read it too, so it is
    written. ``inputs``, ``read_bytes``: the tensors that it reads from elsewhere, each once.
    """

    types: tuple[str, ...]
    time_ns: Floats
    in_bytes: Floats
    out_bytes: Floats
    flops: Floats
    source: Ints
    target: Ints
    edge_bytes: Floats
    exported: npt.NDArray[np.bool_]
    inputs: int
    read_bytes: float

    def __len__(self) -> int:
        return len(self.types)

    @property
    def outputs(self) -> int:
        return int(self.exported.sum())

    @property
    def written_bytes(self) -> float:
        return float(self.out_bytes[self.exported].sum())

    def heavy(self) -> npt.NDArray[np.bool_]:
        """[n]; see :func:`is_heavy`."""
        return np.array([is_heavy(kind) for kind in self.types])

    def kept_share(self) -> Floats:
        """[n]: of the bytes that each op moves alone, the share that stays inside the kernel."""
        stays = np.bincount(self.target, self.edge_bytes, len(self)) + np.where(self.exported, 0.0, self.out_bytes)
        share: Floats = np.minimum(stays / np.maximum(self.in_bytes + self.out_bytes, 1.0), 1.0)
        return share


def loops(kernel: Kernel) -> dict[int, list[int]]:
    """The loops that a compiler makes of a kernel, by the op that each writes: the ops computed in it, ascending.

    XLA's rule in short: what computes much runs alone, on what was written before it; what others read, and what is
    dear and read more than once, is written; the rest is computed in whatever reads it, again in each.
    """
    n = len(kernel)
    reads: list[list[int]] = [[] for _ in range(n)]
    readers: list[list[int]] = [[] for _ in range(n)]
    for a, b in zip(kernel.source.tolist(), kernel.target.tolist(), strict=True):
        reads[b].append(a)
        readers[a].append(b)
    heavy = kernel.heavy()
    written = [
        bool(kernel.exported[i] or heavy[i] or not readers[i])
        or (len(set(readers[i])) > 1 and _DEAR.search(kernel.types[i]) is not None)
        or any(heavy[r] for r in readers[i])
        for i in range(n)
    ]
    out: dict[int, list[int]] = {}
    for root in range(n):
        if written[root]:
            inside, waiting = {root}, [root]
            while waiting:
                new = {a for a in reads[waiting.pop()] if not written[a]} - inside
                inside |= new
                waiting += new
            out[root] = sorted(inside)
    return out


@dataclass(frozen=True)
class Sample:
    """A kernel of ``model`` and what it took."""

    kernel: Kernel
    model: str
    time_ns: float


@dataclass(frozen=True)
class Trust:
    """On ``count`` kernels that it was not fitted to: the share within :data:`WITHIN`, relative errors."""

    within: float
    median_error: float
    p90_error: float
    count: int


class Estimator(Protocol):
    """``trust`` None: never held against anything measured."""

    name: str
    trust: Trust | None

    def time_ns(self, kernel: Kernel) -> float: ...


def errors(estimator: Estimator, samples: Sequence[Sample]) -> Floats:
    """[samples]: how far ``estimator`` is off, relative to what was timed."""
    guess = np.array([estimator.time_ns(s.kernel) for s in samples])
    off: Floats = np.abs(guess / np.array([s.time_ns for s in samples]) - 1)
    return off


def trust_of(off: Floats) -> Trust:
    """
    Raises:
        ValueError: nothing was held against anything.
    """
    if not len(off):
        raise ValueError("no kernel to hold an estimator against")
    return Trust(float((off <= WITHIN).mean()), float(np.median(off)), float(np.quantile(off, 0.9)), len(off))


class SumOfOps:
    """As long as its ops, which are launched once: what is said of a kernel when nothing better is known."""

    name = "sum of ops"
    trust: Trust | None = None

    def __init__(self, launch_ns: float = 0.0) -> None:
        self.launch_ns = launch_ns

    def time_ns(self, kernel: Kernel) -> float:
        launches = np.minimum(kernel.time_ns, self.launch_ns)
        return float((kernel.time_ns - launches).sum() + launches.max())


class SavedTraffic:
    """As :class:`SumOfOps`, but what stays inside is neither written nor read.

    An op that only passes over its bytes takes as long as they; of the share of them that stays inside the kernel it
    saves the part ``saved`` (``heavy_saved`` of an op that computes much). So it needs no rate of the device's: the
    ops' own times say it, and constants fitted on one machine are shares that hold on another as far as both are bound
    by memory.
    """

    name = "saved traffic"
    trust: Trust | None = None

    def __init__(self, launch_ns: float, saved: float, heavy_saved: float = 0.0) -> None:
        self.launch_ns, self.saved, self.heavy_saved = launch_ns, saved, heavy_saved

    def time_ns(self, kernel: Kernel) -> float:
        launches = np.minimum(kernel.time_ns, self.launch_ns)
        saved = np.where(kernel.heavy(), self.heavy_saved, self.saved) * kernel.kept_share()
        return float(((kernel.time_ns - launches) * (1 - saved)).sum() + launches.max())

    @classmethod
    def fit(cls, samples: Sequence[Sample], launch_ns: float) -> SavedTraffic:
        """The two shares of least absolute error in log time, to a hundredth.

        Raises:
            ValueError: no sample.
        """
        if not samples:
            raise ValueError("no kernel to fit shares to")
        taken = np.log([s.time_ns for s in samples])
        parts = np.array([_parts(s.kernel, launch_ns) for s in samples])  # [samples, (whole, light, heavy)]

        def error(saved: float, heavy_saved: float) -> float:
            left = parts[:, 0] - saved * parts[:, 1] - heavy_saved * parts[:, 2]
            return float(np.abs(np.log(np.maximum(left, 1.0)) - taken).mean())

        grid = [(i / 20, j / 20) for i in range(21) for j in range(21)]
        saved, heavy = min(grid, key=lambda pair: error(*pair))
        near = [(saved + i / 100, heavy + j / 100) for i in range(-4, 5) for j in range(-4, 5)]
        saved, heavy = min((p for p in near if min(p) >= 0 and max(p) <= 1), key=lambda pair: error(*pair))
        return cls(launch_ns, round(saved, 2), round(heavy, 2))


def _parts(kernel: Kernel, launch_ns: float) -> tuple[float, float, float]:
    """What a kernel takes with nothing saved, and of that what is spent on bytes that stay inside, light and heavy."""
    launches = np.minimum(kernel.time_ns, launch_ns)
    work = kernel.time_ns - launches
    inside, heavy = work * kernel.kept_share(), kernel.heavy()
    return float(work.sum() + launches.max()), float(inside[~heavy].sum()), float(inside[heavy].sum())


class Roofline:
    """A launch, and the slower of its bytes and its flops at two fitted rates (Williams et al., CACM 2009)."""

    name = "roofline"
    trust: Trust | None = None

    def __init__(self, launch_ns: float, ns_per_byte: float, ns_per_flop: float) -> None:
        self.launch_ns, self.ns_per_byte, self.ns_per_flop = launch_ns, ns_per_byte, ns_per_flop

    def time_ns(self, kernel: Kernel) -> float:
        moved = kernel.read_bytes + kernel.written_bytes
        return self.launch_ns + max(self.ns_per_byte * moved, self.ns_per_flop * float(kernel.flops.sum()))

    @classmethod
    def fit(cls, samples: Sequence[Sample], launch_ns: float) -> Roofline:
        """The two rates of least absolute error in log time, to 5 %.

        Raises:
            ValueError: no sample.
        """
        if not samples:
            raise ValueError("no kernel to fit rates to")
        taken = np.log([s.time_ns for s in samples])
        moved = np.array([s.kernel.read_bytes + s.kernel.written_bytes for s in samples])
        flops = np.array([s.kernel.flops.sum() for s in samples])
        rates = 1.05 ** np.arange(-140, 60)  # 1e-3 to 18 ns

        def error(byte: float, flop: float) -> float:
            return float(np.abs(np.log(launch_ns + np.maximum(byte * moved, flop * flops)) - taken).mean())

        byte = flop = 0.1
        for _ in range(8):  # one after the other until neither moves
            was = byte, flop
            byte = min(rates, key=lambda rate: error(float(rate), flop))
            flop = min(rates, key=lambda rate: error(byte, float(rate)))
            if was == (byte, flop):
                break
        return cls(launch_ns, float(byte), float(flop))
