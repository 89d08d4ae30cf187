"""Mixed precision as a what-if: the same step with its arithmetic in 16 bit.

Knows ops by name and kind, and two factors; not the machine. How much faster 16 bit arithmetic is no capture in
float32 tells (a CPU without it is slower), so no plan carries this and the search never proposes it: it answers what
it would be worth, and says what it assumed. The factors unless given are Daydream's (Zhu et al., USENIX ATC 2020, its
what-if for automatic mixed precision): ops bound by arithmetic, matrix products and convolutions, take a third of
their time, ops bound by memory half of it, as they move half of the bytes. Unlike there, what automatic mixed precision
leaves in float32 stays as it is: the optimizer, norms over features, softmax and losses; so does every op whose name
says neither. Where a rank computes on device streams only these are faster, not the host that launches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from dpro.adapter import Knob
from dpro.graph.graph import Graph, OpKind
from dpro.passes.compression import DTYPES, halve, reduces_wide

COMPUTE_FACTOR, MEMORY_FACTOR = 1 / 3, 1 / 2
#: Beyond these a factor is a slip of the keyboard.
MAX_FACTOR = 100.0
#: As people write them.
_SHORT = {"bf16": "bfloat16", "fp16": "float16"}

_find = partial(re.compile, flags=re.IGNORECASE)
#: Matrix products and convolutions, as torch, cuDNN, cuBLAS, oneDNN, TensorFlow and MXNet call them.
_COMPUTE = _find(
    r"(?:^|[:_ ])(?:add|b|badd|addb)?mm(?:backward|_|\d|$)|mat_?mul|gemm|gemv|conv(?!ert)|cutlass|xmma"
    r"|scudnn|cudnn.*grad|(?<![a-z])linear|fully_?connected|dense\d*_fwd|einsum|attention|fmha"
)
_MEMORY = _find(
    r"elementwise|batch_?norm|::bn_|relu|gelu|silu|sigmoid|tanh|threshold|dropout|pool|bias_?add|activation"
    r"|(?:^|[:_ /])(?:add|sub|mul|div|copy|cat|clone)(?:v\d|backward|_|\d|$)"
)
_FLOAT32 = _find(r"softmax|layer_?norm|group_?norm|loss|cross_?entropy|reducer")
_ALREADY = _find(r"half|float16|fp16|bf16|hgemm|hcudnn|h\d+(?:gemm|cudnn)")


@dataclass(frozen=True)
class Precision:
    """``gradients``: they are 16 bit as well (a model that is 16 bit throughout), so half the bytes are reduced."""

    dtype: str
    compute: float = COMPUTE_FACTOR
    memory: float = MEMORY_FACTOR
    gradients: bool = False


class MixedPrecision:
    """A candidate is a :class:`Precision`."""

    name = "mixed_precision"
    knobs: frozenset[Knob] = frozenset()

    def candidates(self, graph: Graph) -> Iterator[Precision]:
        both = (Precision(dtype, gradients=gradients) for gradients in (False, True) for dtype in DTYPES)
        return (candidate for candidate in both if self.legal(graph, candidate))

    def legal(self, graph: Graph, candidate: Precision) -> bool:
        """Whether there is something to compute in 16 bit and, where gradients are to be, float32 ones in buckets."""
        able = candidate.dtype in DTYPES and len(_ops(graph)[0]) > 0
        return able and (reduces_wide(graph) or not candidate.gradients)

    def apply(self, graph: Graph, candidate: Precision) -> int:
        """Scale durations; returns the mark that undoes it."""
        mark = graph.mark()
        for ops, factor in zip(_ops(graph), (candidate.compute, candidate.memory), strict=True):
            graph.scale(ops, factor)
        if candidate.gradients:
            halve(graph)
        return mark

    def cost(self, graph: Graph, candidate: Precision) -> float:
        """What it adds to the time of all ops of all ranks together, ns; negative where it saves."""
        before = float(graph.column("duration")[graph.column("alive")].sum())
        mark = self.apply(graph, candidate)
        after = float(graph.column("duration")[graph.column("alive")].sum())
        graph.undo(mark)
        return after - before

    def assumed(self, graph: Graph, candidate: Precision) -> str:
        """In one line, what :meth:`apply` counts with."""
        compute, memory = _ops(graph)
        gradients = "16 bit as well, half the bytes" if candidate.gradients else "reduced as they are"
        return (
            f"{candidate.dtype}: {len(compute)} matrix products and convolutions take {candidate.compute:.3g}× their "
            f"time, {len(memory)} ops bound by memory {candidate.memory:.3g}×; all others stay; "
            f"gradients {gradients}; factors given or Daydream's, not measured here; the training's result changes"
        )


def parse(text: str) -> Precision:
    """``bf16``, ``fp16=0.4``, ``bf16+gradients=0.4``: format, whether gradients too, factor of compute-bound ops.

    Raises:
        ValueError: it is none of these; the text says what is wanted.
    """
    found = re.fullmatch(r"(\w+?)(\+gradients)?(?:=([0-9.e+-]+))?", text.strip().lower())
    wanted = f"{text!r} is not bf16 or fp16, with +gradients or not, and =FACTOR of up to {MAX_FACTOR:g}: bf16=0.4"
    if found is None or (dtype := dtype_of(found[1])) is None:
        raise ValueError(wanted)
    try:
        factor = float(found[3]) if found[3] else COMPUTE_FACTOR
    except ValueError:
        raise ValueError(wanted) from None
    if not 0 <= factor <= MAX_FACTOR:
        raise ValueError(wanted)
    return Precision(dtype, factor, gradients=bool(found[2]))


def dtype_of(text: str) -> str | None:
    """One of :data:`~dpro.passes.compression.DTYPES`, from it or its short name; None for anything else."""
    name = _SHORT.get(text, text)
    return name if name in DTYPES else None


def _ops(graph: Graph) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ops bound by arithmetic, and ops bound by memory."""
    devices = {name.split("/")[0] for name in graph.resource_names if "/stream/" in name}
    computes = [
        "/stream/" in name if name.split("/")[0] in devices else "/cpu/" in name for name in graph.resource_names
    ]
    resource = graph.column("resource")
    where = np.array([*computes, False], dtype=bool)[resource]  # an op on no resource has the last one's number, -1
    kinds = np.isin(graph.column("kind"), (OpKind.FORWARD, OpKind.BACKWARD))
    kind_of = np.array([_kind(name) for name in graph.name_table], dtype=np.int8)[graph.column("name")]
    able = where & kinds & graph.column("alive")
    return np.flatnonzero(able & (kind_of == 1)), np.flatnonzero(able & (kind_of == 2))


def _kind(name: str) -> int:
    """1: bound by arithmetic, 2: by memory, 0: stays as it is."""
    # a TensorFlow node by its own name, not by its layer's
    name = name.rpartition("/")[2]
    if _ALREADY.search(name) or _FLOAT32.search(name):
        return 0
    return 1 if _COMPUTE.search(name) else 2 if _MEMORY.search(name) else 0
