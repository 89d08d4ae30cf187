"""PipeDream's layer profiles (``profiler/image_classification/profiles/*/graph.txt``): layers with measured times.

A line is ``node4 -- Conv2d(3, 64, …) -- forward_compute_time=…, backward_compute_time=…, activation_size=…,
parameter_size=…`` (ms, ms, bytes of a whole batch, bytes), or, indented, ``node4 -- node5``. The file has layers only:
a backward op for each, the other way round, variables and updates are made here, and :attr:`ModelGraph.said` says so.
"""

from __future__ import annotations

import re
from pathlib import Path

from dpro.errors import TraceError
from dpro.trace.model_graph import MAX_OP_MS, MAX_OPS, ModelGraph, ModelOp, Role, Tensor, in_order, stem

_NODE = re.compile(r"(\S+) -- (.*) -- (\w+=.*)")
_EDGE = re.compile(r"\s+(\S+) -- (\S+)\s*$")
_TYPE = re.compile(r"\w+")
_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_MAX_BYTES = 1e15


def parse(text: str, path: Path) -> ModelGraph:
    """The training step of the layers in ``text``.

    Raises:
        TraceError: there is no layer in it, or layers wait for themselves.
    """
    layers: dict[str, tuple[str, dict[str, float]]] = {}
    edges: list[tuple[str, str]] = []
    bad = 0
    for line in text.splitlines():
        if not line.strip():
            continue
        if edge := _EDGE.match(line):
            edges.append((edge[1], edge[2]))
        elif (node := _NODE.match(line)) and (values := _values(node[3])) is not None and len(layers) < MAX_OPS:
            layers[node[1]] = (node[2], values)
        else:
            bad += 1
    if not layers:
        raise TraceError(path, "no layer of PipeDream's in it")
    known = [(a, b) for a, b in edges if a in layers and b in layers]
    said = []
    if bad or len(known) < len(edges):
        said.append(f"{bad} lines and {len(edges) - len(known)} edges of {path.name} are of no known form: left out")
    return _training(layers, known, path, said)


def _values(text: str) -> dict[str, float] | None:
    """The four numbers of a layer; None where one is missing or no number."""
    found = {}
    for key in _KEYS:
        match = re.search(rf"\b{key}=(\[[^\]]*\]|[^,\s]+)", text)
        if match is None:
            return None
        try:
            found[key] = sum(float(part) for part in match[1].strip("[]").split(";"))
        except ValueError:
            return None
        if not 0 <= found[key] <= (MAX_OP_MS if key.endswith("time") else _MAX_BYTES):
            return None
    return found


def _training(
    layers: dict[str, tuple[str, dict[str, float]]], edges: list[tuple[str, str]], path: Path, said: list[str]
) -> ModelGraph:
    keys = list(layers)
    place = {key: i for i, key in enumerate(keys)}
    pairs = [(place[a], place[b]) for a, b in dict.fromkeys(edges)]
    order = in_order(len(keys), pairs, path, keys)
    after: list[list[int]] = [[] for _ in keys]
    for a, b in pairs:
        after[a].append(b)

    ops: list[ModelOp] = []
    tensors: list[Tensor] = []
    forward, backward, variable = {}, {}, {}
    for i in order:
        words, values = layers[keys[i]]
        kind = match[0] if (match := _TYPE.match(words)) else words
        if values["parameter_size"]:
            variable[i] = len(ops)
            ops.append(ModelOp(f"{keys[i]}/variable", kind, Role.VARIABLE, 0, round(values["parameter_size"])))
        forward[i] = len(ops)
        # to load a batch is the host's work, whatever the file says that it took
        time_ns = 0 if kind == "Input" else round(values["forward_compute_time"] * 1e6)
        ops.append(ModelOp(keys[i], kind, Role.FORWARD, time_ns))
    for i in reversed(order):
        words, values = layers[keys[i]]
        if ops[forward[i]].type == "Input":
            continue
        backward[i] = len(ops)
        time_ns = round(values["backward_compute_time"] * 1e6)
        ops.append(ModelOp(f"{keys[i]}/backward", ops[forward[i]].type, Role.BACKWARD, time_ns, 0, forward[i]))
        if i in variable:
            ops.append(ModelOp(f"{keys[i]}/update", "Update", Role.UPDATE, 0, 0, variable[i]))
            nbytes = ops[variable[i]].kept_bytes
            tensors.append(Tensor(backward[i], nbytes, (len(ops) - 1,), batched=False))
            tensors.append(Tensor(variable[i], nbytes, (forward[i], backward[i], len(ops) - 1), batched=False))
    for i in order:
        nbytes = round(layers[keys[i]][1]["activation_size"])
        users = [forward[j] for j in after[i]] + [backward[j] for j in (i, *after[i]) if j in backward]
        tensors.append(Tensor(forward[i], nbytes, tuple(users)))
    before: list[list[int]] = [[] for _ in keys]
    for j in order:
        for i in after[j]:
            before[i].append(j)
    for i in backward:  # the gradient of what a layer took in, to the layers that it came from
        for j in (j for j in before[i] if j in backward):
            tensors.append(Tensor(backward[i], round(layers[keys[j]][1]["activation_size"]), (backward[j],)))
    said.append(f"{path.name} has layers only: {len(backward)} backward ops, joined to the forward ones, were added")
    said.append("updates take no time")
    return ModelGraph(stem(path), ops, tensors, said)
