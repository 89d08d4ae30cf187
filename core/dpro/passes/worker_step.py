"""One data-parallel worker's training step with its AllReduces: what DisCo fuses (TPDS 2022, section 3).

Knows ops, gradients and the tensors between them; not what is fused with what. All workers are alike, so one stands for
all; variables are not part of the step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from dpro.cost.fused import Floats, Ints
from dpro.graph.graph import OpKind
from dpro.passes.replicate import KIND, shared_ns
from dpro.trace.model_graph import ModelGraph, ModelOp, Role

#: What loads the batch, and control flow (section 3.2); variables are not there.
_NEVER_FUSED = {
    "input", "placeholder", "while", "switch", "merge", "enter", "exit", "nextiteration", "cond", "if", "case",
}  # fmt: skip


@dataclass
class Step:
    """n ops and, after them, m AllReduces: N = n + m nodes; e edges, t tensors. Ops come after what they need.

    ``time_ns`` [N] alone (AllReduces 0), ``reduce_bytes`` [N] (ops 0), ``fusible`` [N]; ``source``, ``target``,
    ``tensor`` [e]; ``tensor_bytes`` [t]; ``own_bytes`` [n] what an op reads that no op makes (parameters).
    """

    names: list[str]
    types: list[str]
    kind: Ints
    time_ns: Floats
    reduce_bytes: Ints
    fusible: list[bool]
    source: Ints
    target: Ints
    tensor: Ints
    tensor_bytes: Ints
    own_bytes: Ints
    n: int
    users: list[list[int]] = field(default_factory=list)
    #: By node: (node, tensor) that it reads.
    reads: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.users = [[] for _ in self.names]
        self.reads = [[] for _ in self.names]
        for a, b, t in zip(self.source.tolist(), self.target.tolist(), self.tensor.tolist(), strict=True):
            self.users[a].append(b)
            self.reads[b].append((a, t))

    @classmethod
    def of(cls, model: ModelGraph, batch: float = 1.0) -> Step:
        """A worker's step with ``batch`` times the model's batch.

        Every gradient that an update reads is reduced first. Updates take as long whatever the batch.
        """
        ops = [i for i, op in enumerate(model.ops) if op.role is not Role.VARIABLE]
        place = {op: i for i, op in enumerate(ops)}
        n = len(ops)
        names, types = [model.ops[i].name for i in ops], [model.ops[i].type for i in ops]
        kind = [int(KIND[model.ops[i].role]) for i in ops]
        times = [_time_ns(model.ops[i], batch) for i in ops]
        reduce_bytes, own = [0] * n, [0] * n
        edges: list[tuple[int, int, int]] = []
        tensor_bytes: list[int] = []
        for tensor in model.tensors:
            nbytes = round(tensor.nbytes * batch) if tensor.batched else tensor.nbytes
            if tensor.producer not in place:
                for user in tensor.consumers:
                    own[place[user]] += nbytes
                continue
            number, producer = len(tensor_bytes), place[tensor.producer]
            tensor_bytes.append(nbytes)
            updates = [] if tensor.batched else [u for u in tensor.consumers if model.ops[u].role is Role.UPDATE]
            edges += [(producer, place[user], number) for user in tensor.consumers if user not in updates]
            if updates:
                reduce = len(names)
                names.append(f"{names[producer]}/all-reduce")
                types.append("AllReduce")
                kind.append(int(OpKind.COLLECTIVE))
                times.append(0)
                reduce_bytes.append(nbytes)
                tensor_bytes.append(nbytes)
                edges.append((producer, reduce, number))
                edges += [(reduce, place[user], number + 1) for user in updates]
        table = np.array(edges, dtype=np.int64).reshape(-1, 3)
        return cls(
            names, types, np.array(kind), np.array(times, dtype=np.float64), np.array(reduce_bytes, dtype=np.int64),
            [kind_of.lower() not in _NEVER_FUSED for kind_of in types], table[:, 0], table[:, 1], table[:, 2],
            np.array(tensor_bytes, dtype=np.int64), np.array(own, dtype=np.int64), n,
        )  # fmt: skip

    def in_order(self) -> list[int]:
        """All nodes, each after what it needs, the first op first and an AllReduce right behind its gradient."""
        waits = [len(read) for read in self.reads]
        ready = [(node, node) for node, count in enumerate(waits) if not count]
        heapq.heapify(ready)
        out: list[int] = []
        while ready:
            _, node = heapq.heappop(ready)
            out.append(node)
            for user in self.users[node]:
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, (node if user >= self.n else user, user))
        return out


def _time_ns(op: ModelOp, batch: float) -> int:
    return op.time_ns if op.role is Role.UPDATE else shared_ns(op.time_ns, batch)
