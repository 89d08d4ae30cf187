"""What the threads of a training process take of its cores, from Linux's per-thread scheduler statistics."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

_NONE = (0, 0)
#: Steps whose CPU time a capture's is held against.
_CPU_STEPS = 10
#: A thread that runs for more of the time than this computes; one that only keeps in touch sleeps between rounds. (How
#: long a thread waits for a core says nothing: on a busy one each of those rounds waits for its turn.)
_COMPUTES = 0.5


class HostLoad:
    """CPU time of this process's threads.

    ``since()`` gives ns since construction: ``main_cpu_ns`` the calling thread on a core,
    ``main_delay_ns`` the calling thread runnable but without one, ``others_cpu_ns`` all other
    threads (communication mostly), ``wall_ns``; ``cores`` this process may run on. Empty where the system has
    no such figures.
    """

    def __init__(self) -> None:
        self._main = threading.get_native_id()
        self._start = _read()
        self._wall = time.monotonic_ns()

    def since(self) -> dict[str, float]:
        now = _read()
        if not now or not self._start:
            return {}
        main, was = now.get(self._main, _NONE), self._start.get(self._main, _NONE)
        others = sum(cpu - self._start.get(tid, _NONE)[0] for tid, (cpu, _) in now.items() if tid != self._main)
        return {
            "main_cpu_ns": float(main[0] - was[0]),
            "main_delay_ns": float(main[1] - was[1]),
            "others_cpu_ns": float(others),
            "wall_ns": float(time.monotonic_ns() - self._wall),
            "cores": float(len(os.sched_getaffinity(0))),
        }


class IdleLoad:
    """What communication threads take while they have nothing to move, over several stretches of time.

    ``begin()`` and ``end()`` are called by the training thread, around a stretch in which no gradient was handed in.
    """

    def __init__(self) -> None:
        self._main = threading.get_native_id()
        self._was: tuple[int, dict[int, tuple[int, int]]] | None = None
        self._wall_ns = self._cpu_ns = 0

    def begin(self) -> None:
        self._was = time.monotonic_ns(), _read()

    def end(self) -> None:
        """Does nothing where no stretch was begun."""
        if self._was is None:
            return
        (at, before), self._was = self._was, None
        now, wall_ns = _read(), time.monotonic_ns() - at
        took = (cpu - before[tid][0] for tid, (cpu, _) in now.items() if tid in before and tid != self._main)
        self._cpu_ns += sum(ns for ns in took if ns < _COMPUTES * wall_ns)
        self._wall_ns += wall_ns

    def share(self) -> float:
        """Of one core, 0 to below 1; 0 where nothing is known."""
        return min(self._cpu_ns / self._wall_ns, 0.99) if self._wall_ns else 0.0


class StepCpu:
    """CPU time of each step, or of the part of it in which nothing spins: what a capture adds to it.

    An adapter calls :meth:`begin` and :meth:`end` around it in every step, a capture says when it runs.

    Args:
        clock: CPU time, ns, of the process, or of the thread that trains.
    """

    def __init__(self, clock: Callable[[], int] = time.process_time_ns) -> None:
        self._clock = clock
        #: of the last steps without a capture, and of those of the latest one, ns
        self.usual_ns: deque[int] = deque(maxlen=_CPU_STEPS)
        self.captured_ns: list[int] = []
        self._capturing = False
        self._at: int | None = None

    def begin(self) -> None:
        self._at = self._clock()

    def end(self) -> None:
        """Counts only after a :meth:`begin`."""
        if self._at is None:
            return
        took, self._at = self._clock() - self._at, None
        (self.captured_ns.append if self._capturing else self.usual_ns.append)(took)

    def capture(self, runs: bool) -> None:
        """A capture begins, with the next step, or ends: the step that is under way counts for neither."""
        if runs:
            self.captured_ns.clear()
        self._capturing = runs
        self._at = self._clock() if runs else None

    def per_event_ns(self, events: float, least_ns: float, most_ns: float) -> float:
        """What recording an event costs, within bounds, where a step has ``events``: what the captured steps took more.

        Without steps to compare, the least.
        """
        if not self.usual_ns or not self.captured_ns:
            return least_ns
        grown_ns = statistics.median(self.captured_ns) - statistics.median(self.usual_ns)
        return min(max(grown_ns / max(1.0, events), least_ns), most_ns)


def _read() -> dict[int, tuple[int, int]]:
    """By thread id: ns on a core, ns runnable without one. Empty where the system does not say."""
    found: dict[int, tuple[int, int]] = {}
    try:
        for tid in os.listdir("/proc/self/task"):
            try:
                cpu, delay = Path(f"/proc/self/task/{tid}/schedstat").read_text().split()[:2]
                found[int(tid)] = (int(cpu), int(delay))
            except (OSError, ValueError):
                continue  # the thread ended while we looked
    except OSError:
        return {}
    return found
