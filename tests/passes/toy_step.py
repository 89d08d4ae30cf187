"""A small training step with its numbers, and an interpreter of compiled tasks in numpy: what a strategy computes.

The model is an MLP with a residual branch and a weight that two layers share. Each op is a function of whole tensors or
of some of their rows, so that a compiled graph can be run as it stands: rows go where Split, Concat and AddN send them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dpro.graph.tasks import Tasks
from dpro.passes.forms import MODEL_TENSOR, Strategy
from dpro.passes.replicate import REPLICA
from dpro.trace.model_graph import ModelGraph, ModelOp, Role, Tensor

Values = npt.NDArray[np.float64]
#: Can be cut into 2, 3, 4, 6, 8 and 12 parts.
ROWS = 24
WIDE = 5


class Toy:
    """``model``, and what its ops do: ``run[op]`` takes values by tensor and gives values by tensor."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.source = {"x": rng.normal(size=(ROWS, 3)), "t": rng.normal(size=(ROWS, 2))}
        self.weights = {
            "w1": rng.normal(size=(3, WIDE)), "w2": rng.normal(size=(WIDE, WIDE)), "w3": rng.normal(size=(WIDE, 2)),
        }  # fmt: skip
        self.ops: list[ModelOp] = []
        self.run: list[Callable[[dict[str, Values]], dict[str, Values]]] = []
        self._made: dict[str, tuple[int, bool]] = {}
        self._read: dict[str, list[int]] = {}
        place = {}
        for name in self.weights:
            place[name] = self._op(name, "Variable", Role.VARIABLE, [], [name], lambda v, n=name: {n: self.weights[n]})
        for name in self.source:
            self._op(name, "Input", Role.FORWARD, [], [name], lambda v, n=name: {n: self.source[n]})
        self._matmul("h1", "x", "w1")
        self._op("relu", "ReLU", Role.FORWARD, ["h1"], ["a1"], lambda v: {"a1": np.maximum(v["h1"], 0)})
        self._matmul("h2", "a1", "w2")
        self._op("residual", "Add", Role.FORWARD, ["h2", "a1"], ["r"], lambda v: {"r": v["h2"] + v["a1"]})
        self._matmul("s", "r", "w2")
        self._matmul("y", "s", "w3")
        self._op("loss", "MSE", Role.BACKWARD, ["y", "t"], ["gy"], lambda v: {"gy": v["y"] - v["t"]})
        self._matmul_grad("gs", "gw3", "gy", "s", "w3")
        self._matmul_grad("gr", "gw2b", "gs", "r", "w2")
        self._matmul_grad("ga", "gw2a", "gr", "a1", "w2")
        both = ["ga", "gr", "h1"]
        self._op(
            "relu/grad", "ReLU", Role.BACKWARD, both, ["gh1"], lambda v: {"gh1": (v["ga"] + v["gr"]) * (v["h1"] > 0)}
        )
        self._op("h1/grad", "MatMul", Role.BACKWARD, ["gh1", "x"], ["gw1"], lambda v: {"gw1": v["x"].T @ v["gh1"]})
        for name, grads in {"w1": ["gw1"], "w2": ["gw2a", "gw2b"], "w3": ["gw3"]}.items():
            self._op(
                f"{name}/update", "Update", Role.UPDATE, [name, *grads], [],
                lambda v, g=grads: {"applied": sum((v[one] for one in g), np.zeros(()))}, place[name],
            )  # fmt: skip
        self.alone = self._alone()
        self.tensors = list(self._made)
        self.model = ModelGraph("toy", self.ops, [
            Tensor(self._made[name][0], self.alone[name].nbytes, tuple(self._read.get(name, ())), self._made[name][1])
            for name in self.tensors
        ])  # fmt: skip

    def _op(self, name, kind, role, reads, makes, run, partner=-1) -> int:  # type: ignore[no-untyped-def]
        number = len(self.ops)
        kept = self.weights[name].nbytes if role is Role.VARIABLE else 0
        time_ns = 0 if role in (Role.VARIABLE, Role.UPDATE) else 1_000_000 + 1000 * number
        self.ops.append(ModelOp(name, kind, role, time_ns, kept, partner))
        self.run.append(run)
        for tensor in makes:
            self._made[tensor] = number, role is not Role.VARIABLE and not tensor.startswith("gw")
        for tensor in reads:
            self._read.setdefault(tensor, []).append(number)
        return number

    def _matmul(self, out: str, rows: str, weight: str) -> None:
        self._op(out, "MatMul", Role.FORWARD, [rows, weight], [out], lambda v: {out: v[rows] @ v[weight]})

    def _matmul_grad(self, down: str, grad: str, up: str, rows: str, weight: str) -> None:
        self._op(
            f"{up}/grad", "MatMul", Role.BACKWARD, [up, rows, weight], [down, grad],
            lambda v: {down: v[up] @ v[weight].T, grad: v[rows].T @ v[up]},
        )  # fmt: skip

    def _alone(self) -> dict[str, Values]:
        """Every tensor of the step on one device, and what each update applies under its op's name."""
        values: dict[str, Values] = {}
        for op, run in zip(self.ops, self.run, strict=True):
            made = run(values)
            values |= {op.name if name == "applied" else name: value for name, value in made.items()}
        return values

    def interpret(self, tasks: Tasks, strategy: Strategy) -> list[tuple[int, Values]]:
        """(task, gradient that it applies) of every update; all bytes on the way are checked against ``tasks``."""
        reads: list[list[int]] = [[] for _ in range(len(tasks))]
        for tensor, task in zip(tasks.use_tensor.tolist(), tasks.use_task.tolist(), strict=True):
            reads[task].append(tensor)
        makes: list[list[int]] = [[] for _ in range(len(tasks))]
        for tensor, task in enumerate(tasks.tensor_of.tolist()):
            makes[task].append(tensor)
        of = [self.tensors[t] for t in tasks.info[MODEL_TENSOR]]
        replicas = np.bincount(tasks.origin[tasks.origin >= 0], minlength=len(self.ops))
        values: dict[int, Values] = {}
        applied, left = [], list(range(len(tasks)))
        while left:
            waiting = [task for task in left if any(t not in values for t in reads[task])]
            assert len(waiting) < len(left), "tasks wait for themselves"
            for task in (task for task in left if task not in waiting):
                got = [values[t] for t in reads[task]]
                op = int(tasks.origin[task])
                if op < 0:
                    made = self._put_in(tasks.types[task], got, len(makes[task]))
                else:
                    out = self.run[op]({of[t]: values[t] for t in reads[task]})
                    form = strategy.forms[strategy.form[op]]
                    if self.ops[op].type == "Input" and form.part:
                        k = int(tasks.info[REPLICA][task])
                        out = {name: np.split(value, replicas[op])[k] for name, value in out.items()}
                    made = [out[of[t]] for t in makes[task]]
                    if self.ops[op].role is Role.UPDATE:
                        applied.append((task, out["applied"]))
                for tensor, value in zip(makes[task], made, strict=True):
                    assert value.nbytes == tasks.tensor_bytes[tensor], (tasks.names[task], of[tensor])
                    values[tensor] = value
            left = waiting
        return applied

    @staticmethod
    def _put_in(kind: str, got: list[Values], parts: int) -> list[Values]:
        if kind == "Split":
            return list(np.split(got[0], parts))
        if kind == "Concat":
            return [np.concatenate(got)]
        assert kind in ("AddN", "AllReduce"), kind
        return [sum(got[1:], got[0])]
