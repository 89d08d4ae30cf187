"""Which op waits for which, in a framework's own words: TensorFlow's GraphDef and MXNet's symbol JSON.

Knows how the two write a graph down; not when an op ran, and not what it costs. Everything is given by node names, as
traces have them (:func:`normalise`), and may hold nodes that never run as ops of their own (variables, constants,
function calls that TensorFlow puts the body in place of): what depends on those depends on what they depend on.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from dpro.errors import TraceError
from dpro.trace.protowire import Damage, Schema, message

#: node -> the nodes it depends on, each once, control inputs too
Dataflow: TypeAlias = dict[str, list[str]]
#: a message as :func:`dpro.trace.protowire.message` gives it
Parsed: TypeAlias = dict[str, list[Any]]

# tensorflow/core/framework: graph.proto, function.proto, op_def.proto, node_def.proto, attr_value.proto
_NAMED: Schema = {1: ("name", None)}
_ATTRIBUTE: Schema = {1: ("key", None), 2: ("value", {10: ("func", _NAMED)})}
_NODE: Schema = {1: ("name", None), 2: ("op", None), 3: ("input", None), 5: ("attr", _ATTRIBUTE)}
_SIGNATURE: Schema = {1: ("name", None), 2: ("input_arg", _NAMED), 3: ("output_arg", _NAMED)}
_ENTRY: Schema = {1: ("key", None), 2: ("value", None)}
_FUNCTION: Schema = {
    1: ("signature", _SIGNATURE),
    3: ("node_def", _NODE),
    4: ("ret", _ENTRY),
    6: ("control_ret", _ENTRY),
}
_GRAPH: Schema = {1: ("node", _NODE), 2: ("library", {1: ("function", _FUNCTION)})}

_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
#: A function that calls itself is put in its own place this often, then its call stays a node.
_MAX_DEPTH = 32
#: No graph has more calls or nodes; one of functions that call each other twice over would grow without end.
_MAX_CALLS, _MAX_NODES = 5_000, 500_000
#: A chain of functions that hand on what they are given is followed this far.
_MAX_HOPS = 1_000
_TEXT_START = re.compile(rb"\s*(?:#[^\n]*\n\s*)*(?:node|library|versions?)\s*[{:<]")
_TEXT_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<word>[\w.+\-/]+)|(?P<mark>.)"""
)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


class Node(NamedTuple):
    """A node of a symbol: ``inputs`` are names of nodes."""

    name: str
    op: str
    inputs: list[str]


def normalise(name: str) -> str:
    """The node in the name of an input: ``^a/b`` (control), ``a/b:0``, ``a/b:output:0`` are all ``a/b``."""
    return name.lstrip("^").partition(":")[0]


def inputs_of(nodes: list[Node]) -> Dataflow:
    return {node.name: node.inputs for node in nodes}


# -- TensorFlow ----------------------------------------------------------------------------------


def graph_def(data: bytes | str, source: object = "graph") -> Dataflow:
    """Read a GraphDef, serialised or as text (``.pbtxt``), with the bodies of called functions in place of the calls.

    A node of a body is called as TensorFlow's own inlining calls it: call, ``/``, node. What the runtime's optimiser
    then makes of it (fused, folded, renamed nodes) only the optimised graph says:
    ``RunMetadata.function_graphs[].partition_graphs`` are GraphDefs too, and their names are those of the trace.

    Raises:
        TraceError: no graph in it.
    """
    damage = Damage()
    if isinstance(data, str) or _TEXT_START.match(data):
        parsed = _text_graph(data if isinstance(data, str) else data.decode("utf-8", "replace"))
    else:
        parsed = message(data, 0, len(data), _GRAPH, damage)
    functions = {}
    for library in _messages(parsed, "library"):
        for function in _messages(library, "function"):
            functions[_one(_inner(function, "signature"), "name")] = function
    out: Dataflow = {}
    _Frame(functions, _nodes(parsed, "node"), out).write()
    if not out:
        raise TraceError(source, "; ".join(["no node of a TensorFlow graph in it", *damage.warnings()]))
    return out


def _messages(parsed: Parsed, key: str) -> list[Parsed]:
    return [value for value in parsed.get(key, []) if isinstance(value, dict)]


def _texts(parsed: Parsed, key: str) -> list[str]:
    return [value for value in parsed.get(key, []) if isinstance(value, str)]


def _inner(parsed: Parsed, key: str) -> Parsed:
    return next(reversed(_messages(parsed, key)), {})


def _one(parsed: Parsed, key: str) -> str:
    return next(reversed(_texts(parsed, key)), "")


def _nodes(parsed: Parsed, key: str) -> list[Parsed]:
    return [node for node in _messages(parsed, key) if _one(node, "name")]


def _entries(function: Parsed, key: str) -> dict[str, str]:
    return {_one(entry, "key"): _one(entry, "value") for entry in _messages(function, key)}


@dataclass
class _Frame:
    """The nodes of a graph, or of one call of a function, with the way to what is around them."""

    functions: dict[str, Parsed]
    nodes: list[Parsed]
    out: Dataflow
    scope: str = ""
    depth: int = 0
    parent: _Frame | None = None
    #: argument -> what the caller gives for it
    given: dict[str, str] = field(default_factory=dict)
    returned: list[str] = field(default_factory=list)  # by number of the result: a reference inside
    result: dict[str, str] = field(default_factory=dict)  # by its name
    kept: list[str] = field(default_factory=list)  # what must run besides: references inside
    controls: list[str] = field(default_factory=list)  # what the call as a whole waits for
    calls: dict[str, _Frame] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)  # scopes of the calls of all frames

    def __post_init__(self) -> None:
        self.out.update((self.scope + _one(node, "name"), []) for node in self.nodes)
        for node in self.nodes:
            function = self._called(node)
            full = self.depth >= _MAX_DEPTH or len(self.out) > _MAX_NODES or len(self.made) >= _MAX_CALLS
            if function is not None and not full:
                self.calls[_one(node, "name")] = self._call(node, function)

    def _called(self, node: Parsed) -> Parsed | None:
        op = _one(node, "op")
        if op not in _CALLS:
            return self.functions.get(op)
        for attribute in _messages(node, "attr"):
            if _one(attribute, "key") == "f":
                return self.functions.get(_one(_inner(_inner(attribute, "value"), "func"), "name"))
        return None

    def _call(self, node: Parsed, function: Parsed) -> _Frame:
        signature, result = _inner(function, "signature"), _entries(function, "ret")
        arguments = [_one(argument, "name") for argument in _messages(signature, "input_arg")]
        inputs = [i for i in _texts(node, "input") if not i.startswith("^")]
        self.made.append(self.scope)
        return _Frame(
            self.functions,
            _nodes(function, "node_def"),
            self.out,
            scope=f"{self.scope}{_one(node, 'name')}/",
            depth=self.depth + 1,
            parent=self,
            given=dict(zip(arguments, inputs, strict=False)),
            returned=[result.get(_one(r, "name"), "") for r in _messages(signature, "output_arg")],
            result=result,
            kept=list(_entries(function, "control_ret").values()),
            made=self.made,
        )

    def write(self) -> None:
        """Put every node of here, and of the calls in it, into ``out``."""
        for node in self.nodes:
            name, inputs = _one(node, "name"), _texts(node, "input")
            # With nothing of the same body to wait for, a node waits for what its call as a whole does.
            waits = self.controls if all(normalise(i) in self.given for i in inputs) else []
            call = self.calls.get(name)
            if call is not None:
                controls = [self.resolve(i) for i in inputs if i.startswith("^")]
                call.controls = list(dict.fromkeys([*waits, *controls]))
                call.write()
                ends = [call.resolve(i) for i in [*call.returned, *call.kept] if i]
                waits = ends or [*waits, *(self.resolve(i) for i in inputs)]
            else:
                waits = [*waits, *(self.resolve(i) for i in inputs)]
            self.out[self.scope + name] = list(dict.fromkeys(waits))

    def resolve(self, reference: str) -> str:
        """The node that an input of a node here stands for."""
        frame: _Frame = self
        for _ in range(_MAX_HOPS):
            name = normalise(reference)
            call = frame.calls.get(name)
            if name in frame.given and frame.parent is not None:
                frame, reference = frame.parent, frame.given[name]
            elif call is not None and not reference.startswith("^") and (inside := call.output(reference)):
                frame, reference = call, inside
            else:
                break
        return frame.scope + normalise(reference)

    def output(self, reference: str) -> str:
        """What of this call's body ``call``, ``call:1`` or ``call:result:0`` is; "" where the body does not say."""
        _, *place = reference.split(":")
        if len(place) > 1 and place[0] in self.result:
            return self.result[place[0]]
        number = int(place[-1]) if place and place[-1].isdecimal() and len(place[-1]) < 8 else 0
        return self.returned[number] if number < len(self.returned) else ""


def _text_graph(text: str) -> Parsed:
    """Text format as the wire reader gives a message: lists by field name. What can't be is skipped."""
    root: Parsed = {}
    stack = [root]
    key = ""
    for kind, token in _tokens(text):
        if kind == "mark" and token in "{<":
            inner: Parsed = {}
            if key:
                stack[-1].setdefault(key, []).append(inner)
            stack.append(inner)
            key = ""
        elif kind == "mark" and token in "}>":
            if len(stack) > 1:
                stack.pop()
            key = ""
        elif kind == "string":
            if key:
                stack[-1].setdefault(key, []).append(_unquoted(token))
        elif kind == "word":
            key = token
    return root


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    for match in _TEXT_TOKEN.finditer(text):
        if match.lastgroup:
            yield match.lastgroup, match.group()


def _unquoted(token: str) -> str:
    if "\\" not in token:
        return token[1:-1]

    def plain(match: re.Match[str]) -> str:
        octal, hexadecimal, letter = match.groups()
        if letter:
            return _ESCAPED.get(letter, letter)
        return chr(int(octal, 8) if octal else int(hexadecimal, 16))

    return _ESCAPE.sub(plain, token[1:-1]).encode("latin-1", "replace").decode("utf-8", "replace")


# -- MXNet ---------------------------------------------------------------------------------------


def symbol(text: str | bytes, source: object = "symbol") -> Dataflow:
    """Read a symbol's JSON (``net-symbol.json``, ``Symbol.tojson()``); see :func:`symbol_nodes`."""
    return inputs_of(symbol_nodes(text, source))


def symbol_nodes(text: str | bytes, source: object = "symbol") -> list[Node]:
    """The nodes of a symbol's JSON in its own (topological) order; variables have the op ``null``.

    Names are unique: what a layer that is used twice made the second time is ``<name>#2``.

    Raises:
        TraceError: no such JSON, or its nodes do not come after their inputs.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(source, "not a symbol: no JSON") from error
    listed = document.get("nodes") if isinstance(document, dict) else None
    if not isinstance(listed, list) or not listed:
        raise TraceError(source, "not a symbol: no nodes in it")
    nodes: list[Node] = []
    uses: Counter[str] = Counter()
    for number, entry in enumerate(listed):
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("name"), str)
            or not isinstance(entry.get("op"), str)
        ):
            raise TraceError(source, f"not a symbol: node {number} has no name or no op")
        before = [i[0] if isinstance(i, list) and i else i for i in _list(entry.get("inputs"))]
        before += _list(entry.get("control_deps"))
        if not all(type(i) is int and 0 <= i < number for i in before):
            raise TraceError(source, f"not a symbol: an input of node {number} is no node before it")
        inputs = dict.fromkeys(nodes[i].name for i in before)
        name = normalise(entry["name"])
        uses[name] += 1
        nodes.append(Node(name if uses[name] == 1 else f"{name}#{uses[name]}", entry["op"], list(inputs)))
    return nodes


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def with_backward(nodes: list[Node]) -> list[Node]:
    """A symbol's nodes and behind them those of its gradient, in an order in which they may run.

    MXNet calls the gradient of ``conv0`` ``conv0_backward`` (nnvm's Gradient pass). It waits for the gradients of
    what ``conv0`` feeds and for ``conv0``; its op is ``_backward_`` and the op, but for the few that have another.
    Variables have none, and what is made of the network's data alone.
    """
    consumers: dict[str, list[Node]] = {}
    trained: set[str] = set()
    for node in nodes:
        if any(name in trained for name in node.inputs) or (node.op == "null" and not _DATA.fullmatch(node.name)):
            trained.add(node.name)
        for name in node.inputs:
            consumers.setdefault(name, []).append(node)
    out = list(nodes)
    made: dict[str, list[str]] = {}
    for node in reversed(nodes):
        if node.op == "null" or node.name not in trained:
            continue
        waits = []
        for user in consumers.get(node.name, []):
            pieces = made.get(user.name, [])  # one, or one for each input
            waits += pieces[user.inputs.index(node.name) :][:1] if len(pieces) > 1 else pieces
        for suffix, op in _GRADIENTS.get(node.op, {"": f"_backward_{node.op.removeprefix('_')}"}).items():
            made.setdefault(node.name, []).append(node.name + _GRADIENT + suffix)
            out.append(Node(made[node.name][-1], op, [*waits, node.name]))
    return out


_GRADIENT = "_backward"
_INTERLEAVED = [f"interleaved_matmul_{a}_{b}" for a in ("selfatt", "encdec") for b in ("qk", "valatt")]
#: What Gluon calls a network's inputs in the symbol it exports.
_DATA = re.compile(r"data\d*")
#: Ops whose gradient is of another op, or of one for each input: what is behind ``_backward`` in its name, and the op;
#: "" where it is handed on as it is. Seen with 1.9.1, an op at a time, as the rule for the others was.
_GRADIENTS: dict[str, dict[str, str]] = {
    "Cast": {"": "_backward_cast"},
    "Flatten": {"": "_backward_copy"},
    "Reshape": {"": "_backward_reshape"},
    "expand_dims": {"": "_backward_reshape"},
    "transpose": {"": "transpose"},
    "batch_dot": {"_lhs": "batch_dot", "_rhs": "batch_dot"},
    "broadcast_like": {"": "_broadcast_backward"},
    "elemwise_add": {"": ""},
    "elemwise_sub": {"": "_backward_sub"},
    "elemwise_mul": {"": "_backward_mul"},
    "elemwise_div": {"": "_backward_div"},
    "add_n": {"": ""},
    "_plus_scalar": {"": ""},
    "_minus_scalar": {"": ""},
    "_rminus_scalar": {"": "negative"},
    "negative": {"": "negative"},
    "exp": {"": "elemwise_mul"},
    "_copy": {"": "_copy"},
    "_contrib_div_sqrt_dim": {"": "_contrib_div_sqrt_dim"},
    **{f"_contrib_{op}": {"": f"_backward_{op}"} for op in _INTERLEAVED},
}
