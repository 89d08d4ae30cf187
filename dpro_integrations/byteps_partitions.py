"""BytePS' bound on partitions in a running job, and the names that come with another one. Knows no framework.

BytePS reads one bound, a global of its library, when a name is first pushed and again at every push; it ends the
process where the two cuts differ in number. So a bound that is put in force comes with names of its own for the
gradients, which end as :class:`Bounds` says, and have numbers in the upper half of the 65,536 that there are: those of
the job's own tensors are what they would be without. The first push under a new name waits for all workers.

A name's buffers, on workers and servers, are never freed: :data:`MOST_BOUNDS` bounds per process, each of which may
be put in and out of force as often as one likes.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from dpro.errors import PlanError
from dpro.plan import Plan
from dpro.trace.byteps import DEFAULT_PARTITION_BYTES, FIRST_NUMBER, MAX_PARTS, MOST_NAMES, PAGE_BYTES, aligned, cut
from dpro_integrations import byteps_nodes
from dpro_integrations.byteps_trace import MOST_PARTS

#: Bounds that a process may try. Each costs as much memory as all gradients together: once in every worker, and once
#: per worker's share in the servers.
MOST_BOUNDS = 5
#: ``uint32_t BytePSGlobal::_partition_bytes``
_SYMBOL = "_ZN6byteps6common12BytePSGlobal16_partition_bytesE"
#: ``unsigned int next_key_``
_COUNTER = "_ZN6byteps6common9next_key_E"
#: Names of dpro's have numbers from :data:`FIRST_NUMBER` on: those of gradients, by bound, then those of meetings.
MOST_GRADIENTS = MOST_NAMES
MEETING_NUMBER = FIRST_NUMBER + MOST_BOUNDS * MOST_GRADIENTS
_MODULES = {"byteps.mxnet", "byteps.tensorflow", "byteps.torch"}
_made = 0


def job_bound(local_size: int) -> int:
    """The bound that BytePS took from the environment when it started, bytes.

    Raises:
        ValueError: the environment's is no number.
    """
    told = int(os.environ.get("BYTEPS_PARTITION_BYTES", "") or DEFAULT_PARTITION_BYTES)
    return aligned(told, local_size)


def credit() -> int:
    """How many partitions may go at once; 0: no limit."""
    return int(os.environ.get("BYTEPS_SCHEDULING_CREDIT", "") or 0)


class Bounds:
    """The bounds of one library of BytePS', and of one set of gradients.

    What has names of its own is a bound, bytes, or whatever else gradients are cut by.

    Args:
        library: the plugin's.
        declare: declares a name to it.
        local_size: processes that share a worker.
    """

    def __init__(self, library: ctypes.CDLL, declare: Callable[[str], None], local_size: int) -> None:
        self._library, self._declare, self._local_size = library, declare, local_size
        self._suffixes: dict[Hashable, str] = {}  # bound -> what its names end with
        self._firsts: dict[Hashable, int] = {}  # bound -> number of its first name
        #: by bound: rounds that its names have made
        self.rounds: dict[Hashable, int] = {}

    @property
    def own(self) -> int:
        """The job's, bytes."""
        return job_bound(self._local_size)

    @property
    def most_bytes(self) -> int:
        """No part may be larger: BytePS would never send it (0: no limit)."""
        return self.own * credit()

    @property
    def now(self) -> int:
        """What BytePS cuts by. Raises ValueError where the library does not export it."""
        return int(self._global().value)

    @now.setter
    def now(self, nbytes: int) -> None:
        self._global().value = nbytes

    def why_not(self, module: str) -> str:
        """One clause: why bounds can't be changed in this process, whose plugin is ``module`` ('' if they can)."""
        if others := sorted(_MODULES - {module} & sys.modules.keys()):
            return f"{others[0]} is loaded as well, and it can't be told which of the two has the bound"
        if os.environ.get("BYTEPS_ENABLE_ASYNC", "0") not in ("", "0"):
            return "the job is asynchronous"
        if self._local_size > 1:
            return "several processes share a worker"
        try:
            now, expected = self.now, self.own
            counted = int(self._counter().value)
        except ValueError as error:
            return str(error)
        if counted > FIRST_NUMBER:
            return f"the job has more than {FIRST_NUMBER} tensors"
        if now != expected:
            return f"BytePS' bound reads {now}, not {expected} as its environment says"
        return ""

    def suffix(self, bound: Hashable) -> str:
        """What names under ``bound`` end with; "" for the job's own names."""
        return self._suffixes.get(bound, "")

    def room(self, bound: Hashable) -> bool:
        """Whether ``bound`` may still be tried."""
        return bound in self._suffixes or _made < MOST_BOUNDS

    def reserve(self, bound: Hashable) -> bool:
        """Give ``bound`` names and numbers; whether it is new. On all workers in the same order."""
        global _made
        if bound in self._suffixes:
            return False
        _made += 1
        self._suffixes[bound] = f"~{_made}"
        self._firsts[bound] = FIRST_NUMBER + (_made - 1) * MOST_GRADIENTS
        self.rounds[bound] = 0
        return True

    def name(self, bound: Hashable, name: str, place: int) -> str:
        """Declare the ``place``-th gradient, ``name`` to the job, under ``bound``; its name there."""
        renamed = name + self._suffixes[bound]
        self.declare(renamed, self._firsts[bound] + place)
        return renamed

    def declare(self, name: str, number: int) -> None:
        """Declare ``name`` with a number of dpro's own, from :data:`FIRST_NUMBER` on; those of the job go on.

        Workers know a tensor by its number, which BytePS counts up: one that declares less than the others would mix up
        all that are declared later. So nothing of dpro's is counted.

        Raises:
            ValueError: this build of BytePS does not export what counts, or the job has as many tensors.
        """
        counter = self._counter()
        if counter.value >= FIRST_NUMBER:
            raise ValueError(f"the job has more than {FIRST_NUMBER} tensors")
        own, counter.value = counter.value, number
        self._declare(name)
        counter.value = own

    def of(self, plan: Plan, known: Mapping[str, int]) -> int:
        """The one bound that cuts all gradients (``known``: bytes by name) as ``plan`` says, bytes.

        Raises:
            PlanError: there is none, or BytePS could not work with it.
        """
        if not plan.partitions:
            raise PlanError("the plan has no partitions")
        for name, nbytes in plan.partitions.items():
            if name not in known:
                raise PlanError(f"the job reduces no gradient of {name!r}")
            if nbytes % PAGE_BYTES:
                raise PlanError(f"partitions of {nbytes} bytes are no whole pages of {PAGE_BYTES}")
        wanted = {name: plan.partitions.get(name, self.own) for name in known}
        for bound in sorted(set(wanted.values())):
            if all(cut(known[name], bound) == cut(known[name], own) for name, own in wanted.items()):
                break
        else:
            raise PlanError("BytePS has one bound for all gradients, the plan several")
        bound = min(bound, aligned(max(known.values(), default=bound)))  # cuts alike: names that there are will do
        if (parts := _most_parts(known.values(), bound)) > MAX_PARTS:
            raise PlanError(f"partitions of {bound} bytes make {parts} parts of a gradient")
        if 0 < (most := self.most_bytes) < bound:
            raise PlanError(f"BYTEPS_SCHEDULING_CREDIT lets no more than {most} bytes go at once")
        if not self.room(bound):
            raise PlanError(f"{MOST_BOUNDS} partition sizes were tried: BytePS frees no memory of any")
        return bound

    def _global(self) -> Any:
        return ctypes.c_uint32.in_dll(self._library, _SYMBOL)

    def _counter(self) -> Any:
        return ctypes.c_uint32.in_dll(self._library, _COUNTER)


def plan_to_record(fingerprint: dict[str, str], known: Mapping[str, int], bounds: Bounds) -> Plan:
    """The job's own bound, or the next larger one that makes no more parts of a gradient than can be recorded.

    Args:
        known: bytes of every gradient by name.

    Raises:
        RuntimeError: there is none that BytePS could work with.
    """
    own = bounds.own
    bound = max(own, aligned(-(-max(known.values(), default=1) // MOST_PARTS)))
    plan = Plan(fingerprint=fingerprint, partitions=dict.fromkeys(known, bound))
    try:
        bounds.of(plan, known)
    except PlanError as error:
        raise RuntimeError(f"BytePS' stages can't be recorded here: {error}") from error
    return plan


def told(bounds: Bounds, in_force: int) -> dict[str, Any]:
    """:class:`dpro.trace.byteps.Settings` of the job, as JSON. ``in_force``: the bound, 0 the job's own."""
    own = bounds.own
    node, server_nodes = byteps_nodes.nodes()
    return {
        "node": node,
        "server_nodes": list(server_nodes),
        "workers": int(os.environ["DMLC_NUM_WORKER"]),
        "servers": int(os.environ.get("DMLC_NUM_SERVER", "1")),
        "partition_bytes": in_force or own,
        "job_bytes": own,
        "credit": credit(),
        "hash_fn": os.environ.get("BYTEPS_KEY_HASH_FN", "djb2"),
    }


def agree_on_made(told: int) -> None:
    """Bounds that any rank has names for, whichever they were: the next one has the same numbers everywhere."""
    global _made
    _made = max(_made, told)


def made() -> int:
    """Bounds that this process has names for."""
    return _made


def _most_parts(known: Collection[int], bound: int) -> int:
    return max((len(cut(nbytes, bound)) for nbytes in known), default=0)
