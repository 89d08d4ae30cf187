"""What frameworks fuse without a search: the states that DisCo's search starts from and is held against.

Knows XLA's rules as far as they matter here. Op fusion puts an op that only passes over its bytes into who reads it,
again into each where that is cheap and spares writing it; all AllReduces are combined in the order of their gradients
up to 30 MB (the combiner's default threshold). The four are the paper's baselines (TPDS 2022, section 6.1):
JAX_no_fusion, JAX_op_fusion, JAX_AllReduce_fusion, JAX_default.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dpro.cost.fused import is_heavy
from dpro.passes.joint_fusion import Fusion, JointFusion

COMBINE_BYTES = 30 << 20
#: More passes over the tensor than one, or a sum over all of it: not computed again for another reader.
_NOT_CHEAP = re.compile(r"norm|softmax|reduce|sum|mean|entropy|loss|input", re.I)


def no_fusion(fusion: JointFusion) -> Fusion:
    return fusion.start()


def op_fusion(fusion: JointFusion) -> Fusion:
    """The first op first; XLA's ``InstructionFusion`` goes the other way, which is the same for chains."""
    state = fusion.start()
    _fuse_ops(fusion, state)
    return state


def tensor_fusion(fusion: JointFusion) -> Fusion:
    state = fusion.start()
    _combine(fusion, state, COMBINE_BYTES)
    return state


def default(fusion: JointFusion) -> Fusion:
    state = fusion.start()
    _fuse_ops(fusion, state)
    _combine(fusion, state, COMBINE_BYTES)
    return state


DEFAULTS: dict[str, Callable[[JointFusion], Fusion]] = {
    "no fusion": no_fusion, "op fusion": op_fusion, "tensor fusion": tensor_fusion, "default": default,
}  # fmt: skip


def _fuse_ops(fusion: JointFusion, state: Fusion) -> None:
    step = fusion.step
    for op in range(step.n):
        users = step.users[op]
        if not users or max(users) >= step.n or not _passes_over(fusion, [op, *users]):
            continue
        group = state.home[op]
        readers = sorted({state.home[user] for user in users} - {group})
        if len(readers) == 1:
            fusion.join(state, group, readers[0])
        elif _NOT_CHEAP.search(step.types[op]) is None and all(fusion.may_fuse(state, group, r) for r in readers):
            for user in users:
                fusion.duplicate(state, state.home[op], state.home[user])


def _passes_over(fusion: JointFusion, ops: list[int]) -> bool:
    """Whether none of the ops computes much."""
    return not any(is_heavy(fusion.step.types[op]) or not fusion.step.fusible[op] for op in ops)


def _combine(fusion: JointFusion, state: Fusion, most_bytes: int) -> None:
    last, held = -1, 0
    for reduce in fusion.reduces(state):
        nbytes = int(fusion.step.reduce_bytes[reduce])
        if last >= 0 and held + nbytes <= most_bytes and fusion.join(state, last, reduce):
            last, held = state.home[reduce], held + nbytes
        else:
            last, held = reduce, nbytes
