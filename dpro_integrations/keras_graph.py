"""What a distributed Keras train step is made of: which gradients it reduces, and the graph that runs.

Both are seen when TensorFlow traces the step, not while it runs: the library's function that reduces the gradients is
replaced for that one call by one that notes what it is given, and TensorFlow keeps the graphs that it makes of
functions (``RunMetadata.function_graphs``). Those are optimised graphs: their nodes are called as in a profile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import summary_ops_v2

from dpro_integrations.keras_version import closed_over, traced_step

#: Ops that reduce dense gradients, one or a group, and those that gather sparse ones.
PUSH_PULL = "BytepsPushPull"
REDUCE = frozenset({"HorovodAllreduce", "HorovodGroupedAllreduce", PUSH_PULL})
GATHER = frozenset({"HorovodAllgather", "HorovodGroupedAllgather"})
#: Horovod makes a ``tf.cond`` for every gradient or group; TensorFlow numbers them in the order in which they are made.
_PLACE = re.compile(r"_Allreduce/cond(?:_(\d+))?/")


def distributed_optimizer(model: Any) -> Any | None:
    """The optimizer of ``model`` that a ``DistributedOptimizer`` made, if under one that scales the loss; None: there
    is none, and nobody reduces anything."""
    optimizer: Any = getattr(model, "optimizer", None)
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer if library_of(optimizer) else None


def library_of(optimizer: Any) -> str:
    """``horovod`` or ``byteps``, whose ``DistributedOptimizer`` made the optimizer; "" for any other."""
    if hasattr(optimizer, "_allreduce_grads"):
        return "horovod"
    # BytePS copies the methods of its class into one that is called as the job's
    made_by = getattr(getattr(type(optimizer), "_push_pull", None), "__module__", "")
    return "byteps" if made_by == "byteps._keras" else ""


def reduction(optimizer: Any) -> Any:
    """What reduces the gradients when the step is traced; None: what the optimizer's class has."""
    if library_of(optimizer) == "horovod":
        return optimizer._allreduce_grads
    return vars(optimizer).get("_aggregate_gradients") if optimizer is not None else None


def set_reduction(optimizer: Any, function: Callable[..., Any] | None) -> None:
    """Have ``function`` reduce the gradients when the step is traced next. What it is called with is the library's."""
    if library_of(optimizer) == "byteps":
        if function is not None:
            vars(optimizer)["_aggregate_gradients"] = function
        else:
            vars(optimizer).pop("_aggregate_gradients", None)
        return
    if optimizer is None:
        return
    optimizer._allreduce_grads = function
    if optimizer._agg_helper is not None:  # backward_passes_per_step
        optimizer._agg_helper.allreduce_grads = function


@dataclass(frozen=True)
class Gradient:
    """What came to be reduced for one variable: ``kind`` is "dense", "sparse" or "none"."""

    variable: Any
    kind: str


class Recorder:
    """Stands in for an optimizer's reduction until the step is traced, or :meth:`remove` is called."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._replaced = reduction(optimizer)
        #: of the latest call, in the library's order
        self.gradients: list[Gradient] = []
        set_reduction(optimizer, self)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Any, vars: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Horovod's are gradients and variables, BytePS' one list of pairs."""
        self.remove()
        if library_of(self._optimizer) == "byteps":
            pairs = list(grads)
            dense = self._optimizer._sparse_as_dense
            self.gradients = [Gradient(variable, "dense" if dense else _kind(grad)) for grad, variable in pairs]
            return (self._replaced or self._optimizer._aggregate_gradients)(pairs)
        given = list(grads), list(vars or ())
        original = self.original
        made = closed_over(getattr(original, "python_function", original))
        dense = made.get("sparse_as_dense", False)  # before it reduces them
        kinds = [_kind(grad) for grad in given[0]]
        kinds = ["dense" if dense and kind == "sparse" else kind for kind in kinds]
        self.gradients = [Gradient(variable, kind) for kind, variable in zip(kinds, given[1], strict=False)]
        return self._replaced(grads, vars, *args, **kwargs)

    @property
    def original(self) -> Any:
        """What there was before, see :func:`reduction`."""
        return self._replaced.original if isinstance(self._replaced, Recorder) else self._replaced

    def remove(self) -> None:
        """Does nothing the second time, nor where the job has put another function there."""
        if reduction(self._optimizer) is self:
            set_reduction(self._optimizer, self._replaced)


def _kind(grad: Any) -> str:
    if grad is None:
        return "none"
    return "sparse" if isinstance(grad, tf.IndexedSlices) else "dense"


@dataclass
class StepGraph:
    """The graph of a train step as TensorFlow's executor has it; names are those of nodes."""

    inputs: dict[str, list[str]] = field(default_factory=dict)
    ops: dict[str, str] = field(default_factory=dict)
    #: BytePS' node -> name of what it pushes
    pushed: dict[str, str] = field(default_factory=dict)
    #: a node that draws random numbers from a seed, and goes on from where it was at every step; "" none
    seeded: str = ""

    def reductions(self, names: Sequence[str] = ()) -> dict[str, int]:
        """Node -> its place among the gradients, or groups of them, that are reduced; -1 unknown.

        ``names``: BytePS' for the gradients.
        """
        if self.pushed:
            places = {name: place for place, name in enumerate(names)}
            return {node: places.get(name, -1) for node, name in self.pushed.items()}
        found = {name: _PLACE.search(name) for name, op in self.ops.items() if op in REDUCE}
        return {name: int(place[1] or 0) if place else -1 for name, place in found.items()}

    def gathers(self) -> bool:
        return not GATHER.isdisjoint(self.ops.values())


def seeded_in(nodes: Iterable[Any]) -> str:
    """The first of ``nodes`` (NodeDef) with a seed of the job's; "" none. Else TensorFlow draws a seed itself."""
    for node in nodes:
        if "seed" in node.attr and "seed2" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i):
            return str(node.name)
    return ""


def nodes_of(graph: Any) -> Iterable[Any]:
    """All nodes of a GraphDef, those of its functions too."""
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


class Collection:
    """Keeps the graphs that TensorFlow makes ready to run, from construction to :meth:`stop`.

    Args:
        ops: graphs without any of these are none of those that are looked for; none: all are.
    """

    def __init__(self, ops: frozenset[str] = REDUCE | GATHER) -> None:
        #: the latest last
        self.graphs: list[StepGraph] = []
        self._ops = ops
        # the job's tf.summary.trace_on() has the same switch
        self._on = summary_ops_v2._current_trace_context is None
        if self._on:
            context.context().enable_graph_collection()

    def stop(self) -> bool:
        """Whether it was on, and is no more; safe to call twice."""
        if not self._on:
            return False
        self._on = False
        if summary_ops_v2._current_trace_context is not None:  # begun meanwhile: what there is is theirs
            return False
        metadata = context.context().export_run_metadata()
        context.context().disable_graph_collection()
        for made in metadata.function_graphs if metadata is not None else ():
            graph = StepGraph()
            for part in made.partition_graphs:
                graph.seeded = graph.seeded or seeded_in(nodes_of(part))
                graph.inputs.update((node.name, list(node.input)) for node in part.node)
                graph.ops.update((node.name, node.op) for node in part.node)
                pushing = (node for node in part.node if node.op == PUSH_PULL)
                graph.pushed.update((node.name, node.attr["input_name"].s.decode()) for node in pushing)
            if not self._ops or not self._ops.isdisjoint(graph.ops.values()):
                self.graphs.append(graph)
        return True


class Tracing:
    """Looks on while a model's train step is traced: from construction, before the first step, to :meth:`stop`.

    Args:
        model: compiled.
        optimizer: the one in it that a ``DistributedOptimizer`` made; None: nothing is reduced.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.recorder = Recorder(optimizer)
        self._collection = Collection() if optimizer is not None else Collection(frozenset())

    @property
    def gradients(self) -> list[Gradient]:
        return self.recorder.gradients

    @property
    def graphs(self) -> list[StepGraph]:
        return self._collection.graphs

    def stop(self) -> None:
        """A step has been made: what there was to see has been seen."""
        self.recorder.remove()
        self._collection.stop()


def traced_functions(function: Any) -> list[Any]:
    """The concrete functions of a ``tf.function`` (or train function), as they were traced; none of anything else."""
    found = getattr(traced_step(function), "_list_all_concrete_functions", list)
    return list(found())
