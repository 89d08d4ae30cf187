from typing import Any

import numpy as np
import numpy.typing as npt

def replay(
    resource: npt.NDArray[np.int32],
    duration: npt.NDArray[np.int64],
    gap: npt.NDArray[np.int64],
    priority: npt.NDArray[np.int32],
    indptr: npt.NDArray[np.int64],
    indices: npt.NDArray[np.int32],
    resources: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32], int, int, int]:
    """Start, end, cause [ops] of every op, makespan (ns), ops that ran, peak working bytes.

    Raises:
        ValueError: lengths disagree, an index is out of range, a time is negative or too long.
        TypeError: an array has another dtype than named, or is not contiguous.
    """

class Delta:
    """The schedule of a graph, ready for edits; each is taken back before the next.

    Arrays as for :func:`replay`, which gave ``start``, ``end`` and ``cause`` of these very ones.
    """

    def __init__(
        self,
        resource: npt.NDArray[np.int32],
        duration: npt.NDArray[np.int64],
        gap: npt.NDArray[np.int64],
        priority: npt.NDArray[np.int32],
        indptr: npt.NDArray[np.int64],
        indices: npt.NDArray[np.int32],
        resources: int,
        start: npt.NDArray[np.int64],
        end: npt.NDArray[np.int64],
        cause: npt.NDArray[np.int32],
    ) -> None: ...
    def run(
        self,
        changed: npt.NDArray[np.int32],
        resource: npt.NDArray[np.int32],
        duration: npt.NDArray[np.int64],
        gap: npt.NDArray[np.int64],
        priority: npt.NDArray[np.int32],
        removed: npt.NDArray[np.int32],
        src: npt.NDArray[np.int32],
        dst: npt.NDArray[np.int32],
        limit: int,
    ) -> bool:
        """Whether the edited schedule could be told from the base's by looking at no more than ``limit`` ops.

        ``resource`` and the others: of the ``changed`` rows, then of new ones, which follow the base's rows.

        Raises:
            ValueError: lengths disagree, or the edit does not fit the base.
        """

    def times(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Rows that may differ from the base, with start, end and cause of each."""

    makespan: int
    looked_at: int

def topological(begin: npt.NDArray[np.int64], reader: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], int]:
    """Tasks, each after what it reads from, and how many could be ordered. ``reader[begin[i]:begin[i+1]]`` read of i.

    Raises:
        ValueError: an index is out of range.
    """

def upward_rank(
    begin: npt.NDArray[np.int64],
    reader: npt.NDArray[np.int32],
    order: npt.NDArray[np.int32],
    task_ns: npt.NDArray[np.int64],
    use_ns: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """[tasks] the longest way from the begin of each task to the end; ``use_ns`` belongs to ``reader``."""

def downward_rank(
    begin: npt.NDArray[np.int64],
    reader: npt.NDArray[np.int32],
    order: npt.NDArray[np.int32],
    task_ns: npt.NDArray[np.int64],
    use_ns: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """[tasks] the longest way to the begin of each task."""

def schedule(
    order: npt.NDArray[np.int32],
    time: npt.NDArray[np.int64],
    need: npt.NDArray[np.int64],
    together: npt.NDArray[np.int32],
    pinned: npt.NDArray[np.int32],
    read_begin: npt.NDArray[np.int64],
    read: npt.NDArray[np.int32],
    producer: npt.NDArray[np.int32],
    taken: npt.NDArray[np.int64],
    line: npt.NDArray[np.int32],
    link: npt.NDArray[np.int32],
    capacity: npt.NDArray[np.int64],
    preference: npt.NDArray[np.int32],
    links: int,
    groups: int,
    insertion: bool,
    contention: bool,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], bool]:
    """Device, start, end [tasks] of every task, transfers [sent, 4] (tensor, device, start, end), and whether all
    found room. The arrays are those of ``ScheduleInput`` in core/native/schedule.hpp.

    Raises:
        ValueError: lengths disagree, an index is out of range, or the order puts a task before one it reads from.
        TypeError: an array has another dtype than named, or is not contiguous.
    """

def wire_unsupported() -> str:
    """Empty where the wire can be traced, else why not."""

def wire_slots(libraries: list[str]) -> list[tuple[str, str, int, int]]:
    """(library, symbol, address, value now) of every slot of a traced call in the loaded ``libraries``."""

def wire_attach(libraries: list[str]) -> int:
    """Patch the slots of the loaded ``libraries`` (parts of file names) and record; how many were patched.

    Raises:
        RuntimeError: attached already, no memory, or this platform cannot be patched.
    """

def wire_detach() -> dict[str, Any]:
    """Restore the slots and hand over what was seen.

    Columns [events]: ``stream`` i4 (index into ``streams``), ``direction`` u1 (0 sent, 1 received), ``start`` and
    ``end`` i8 ns, ``offset`` and ``nbytes`` i8, ``head_bytes`` u1, ``head`` u1 [events, 48]. ``streams``: (local ip,
    port, peer ip, port, the kernel's number of the socket, whether its send offsets may be one too high).
    ``dropped``: calls there was no room for.
    """
