"""The ways to synchronise that the matrices know: one more is one more line of :data:`COMMS`.

Read by the driver and by the ranks, so it imports no framework: a loop is named here, and imported by the rank that
runs it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Comm:
    """One library in one framework.

    Attributes:
        framework: ``torch``, ``keras`` or ``mxnet``: whose models.
        loop: ``module:class`` of the :class:`benchmarks.loops.Loop`.
        launcher: what starts the ranks; ``horovod`` and ``byteps`` are modules of the testbed.
        sets: what a plan sets in it: DDP's ``buckets``, Horovod's ``groups`` or BytePS's ``partitions``.
        shared: its ranks share each batch, in what shares a plan says (:mod:`benchmarks.hetero`); in no matrix.
    """

    framework: Literal["torch", "keras", "mxnet"]
    loop: str
    launcher: Literal["torchrun", "horovod", "byteps"]
    sets: Literal["buckets", "groups", "partitions"]
    shared: bool = False

    @property
    def emulates(self) -> bool:
        """Whether its models can sleep instead of computing: that is how there are more hosts than cores."""
        return self.framework == "torch"

    @property
    def compiles(self) -> bool:
        """Whether a plan can have layers compiled in it."""
        return (self.framework, self.launcher) in (("keras", "horovod"), ("torch", "torchrun"))

    def cuts(self) -> dict[str, str]:
        """How each model is cut in this framework, in words."""
        found: dict[str, str] = importlib.import_module(_MODELS[self.framework]).CUTS
        return found

    def loop_class(self) -> Any:
        """The class of the loop; imports the framework."""
        module, _, name = self.loop.partition(":")
        return getattr(importlib.import_module(module), name)


_MODELS = {"torch": "benchmarks.models", "keras": "benchmarks.models_keras", "mxnet": "benchmarks.models_mxnet"}
COMMS = {
    "ddp": Comm("torch", "benchmarks.loops_torch:DDPLoop", "torchrun", "buckets"),
    "horovod": Comm("torch", "benchmarks.loops_torch:HorovodLoop", "horovod", "groups"),
    "horovod-keras": Comm("keras", "benchmarks.loops_keras:HorovodLoop", "horovod", "groups"),
    "horovod-mxnet": Comm("mxnet", "benchmarks.loops_mxnet:HorovodLoop", "horovod", "groups"),
    "byteps-keras": Comm("keras", "benchmarks.loops_keras:BytePSLoop", "byteps", "partitions"),
    "ddp-shared": Comm("torch", "benchmarks.loops_shared:SharedDDPLoop", "torchrun", "buckets", True),
    "horovod-shared": Comm("torch", "benchmarks.loops_shared:SharedHorovodLoop", "horovod", "groups", True),
    "byteps-mxnet": Comm("mxnet", "benchmarks.loops_mxnet:BytePSLoop", "byteps", "partitions"),
}
