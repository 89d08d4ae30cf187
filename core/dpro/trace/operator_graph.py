"""Operator graphs of "Efficient algorithms for device placement of DNN graph operators" (``OperatorGraphs/*.json``).

``nodes`` have an ``id``, a ``name``, ``fpgaLatency`` (ms on the accelerator), ``size`` (bytes that stay with it),
``isBackwardNode``; ``edges`` ``sourceId``, ``destId``, ``size`` (bytes) and ``cost`` (ms, of that work's own link: not
used). A node without time or predecessors that others read is a variable or an input; one called ``…Optimizer_NAME``
updates the variable NAME.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpro.errors import TraceError
from dpro.trace.model_graph import MAX_OP_MS, MAX_OPS, ModelGraph, ModelOp, Role, Tensor, in_order, stem

_OPTIMIZER = re.compile(r"\w*Optimizer_(.+)")
_TYPE = re.compile(r"[A-Za-z]+(?:\d[A-Za-z]+)?")
_MAX_BYTES = 1e15


def parse(text: str, path: Path) -> ModelGraph:
    """The graph in ``text``.

    Raises:
        TraceError: not JSON, no operator in it, or operators wait for themselves.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, f"not JSON ({error})") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("nodes"), list) or not isinstance(raw.get("edges"), list):
        raise TraceError(path, "no operator graph: it has no lists 'nodes' and 'edges'")
    nodes: dict[Any, dict[str, Any]] = {n["id"]: n for n in raw["nodes"][:MAX_OPS] if _is_node(n)}
    edges = [(e["sourceId"], e["destId"], e["size"]) for e in raw["edges"] if _is_edge(e, nodes)]
    if not nodes:
        raise TraceError(path, "no operator in it")
    said = []
    lost = len(raw["nodes"]) - len(nodes), len(raw["edges"]) - len(edges)
    if any(lost):
        said.append(f"{lost[0]} nodes and {lost[1]} edges of {path.name} are of no known form: left out")
    return _graph(nodes, edges, path, said)


def _is_node(node: Any) -> bool:
    return (
        isinstance(node, dict)
        and isinstance(node.get("id"), (int, str))
        and isinstance(node.get("name"), str)
        and _is_number(node.get("fpgaLatency"), MAX_OP_MS)
        and _is_number(node.get("size"), _MAX_BYTES)
    )


def _is_edge(edge: Any, nodes: dict[Any, Any]) -> bool:
    return (
        isinstance(edge, dict)
        and all(isinstance(edge.get(key), (int, str)) and edge[key] in nodes for key in ("sourceId", "destId"))
        and edge["sourceId"] != edge["destId"]
        and _is_number(edge.get("size"), _MAX_BYTES)
    )


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


def _graph(
    nodes: dict[Any, dict[str, Any]], edges: list[tuple[Any, Any, float]], path: Path, said: list[str]
) -> ModelGraph:
    ids = list(nodes)
    place = {key: i for i, key in enumerate(ids)}
    names = [nodes[key]["name"] for key in ids]
    sizes: dict[tuple[int, int], int] = {(place[a], place[b]): round(size) for a, b, size in edges}
    fed, users = {b for _, b in sizes}, {a for a, _ in sizes}
    idle = [i for i, key in enumerate(ids) if not nodes[key]["fpgaLatency"] and i not in fed]
    variables = {names[i]: i for i in idle if nodes[ids[i]]["size"]}
    updated = {i: variables.get(m[1], -1) for i, name in enumerate(names) if (m := _OPTIMIZER.fullmatch(name))}

    def role(i: int) -> Role:
        if i in updated:
            return Role.UPDATE
        if nodes[ids[i]].get("isBackwardNode") is True:
            return Role.BACKWARD
        return Role.VARIABLE if names[i] in variables and variables[names[i]] == i else Role.FORWARD

    roles = [role(i) for i in range(len(ids))]
    joined = _joined(roles, sizes, users, fed)
    if joined:
        sizes |= dict.fromkeys(joined, 0)
        said.append(f"no edge of {path.name} leads from the forward to the backward pass: {len(joined)} were added")
    order = in_order(len(ids), list(sizes), path, names)
    new = {i: n for n, i in enumerate(order)}
    ops = []
    for i in order:
        kind = "Variable" if roles[i] is Role.VARIABLE else "Update" if i in updated else _type_of(names[i])
        # what an op makes is counted with its tensors; only parameters stay
        kept = round(nodes[ids[i]]["size"]) if roles[i] is Role.VARIABLE else 0
        partner = new[updated[i]] if updated.get(i, -1) >= 0 else -1
        ops.append(ModelOp(names[i], kind, roles[i], round(nodes[ids[i]]["fpgaLatency"] * 1e6), kept, partner))
    by_tensor: dict[tuple[int, int, bool], list[int]] = {}
    for (a, b), size in sizes.items():
        batched = roles[a] is not Role.VARIABLE and roles[b] is not Role.UPDATE
        by_tensor.setdefault((new[a], size, batched), []).append(new[b])
    tensors = [Tensor(a, size, tuple(sorted(to)), batched) for (a, size, batched), to in sorted(by_tensor.items())]
    return ModelGraph(stem(path), ops, tensors, said)


def _joined(
    roles: list[Role], sizes: dict[tuple[int, int], int], users: set[int], fed: set[int]
) -> list[tuple[int, int]]:
    """From the last forward ops to the first backward ones, where a file has both and nothing between them."""
    if any(roles[a] is Role.FORWARD and roles[b] is Role.BACKWARD for a, b in sizes):
        return []
    last = [i for i, role in enumerate(roles) if role is Role.FORWARD and i not in users]
    first: Iterable[int] = [i for i, role in enumerate(roles) if role is Role.BACKWARD and i not in fed]
    return [(a, b) for b in first for a in last]


def _type_of(name: str) -> str:
    """``ConvGrad`` of ``Conv19_Grad/ConvGrad_0``, ``MatMul`` of ``MatMul13``."""
    match = _TYPE.match(name.rsplit("/", 1)[-1])
    return match[0] if match else name
