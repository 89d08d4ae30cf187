"""One rank of a cell of the matrices: trains, and measures what the driver asks for.

Started on every host by :class:`benchmarks.cells.JobSet`. Orders come as files (``order-0.json``, ``order-1.json``, …)
in a folder that all ranks see, so that links can change between two of them; rank r answers order k with
``answer-k-r.json``. Every rank times its own steps; the driver takes the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.comms import COMMS
from benchmarks.loops import Loop, put, rehearse, settle_capture
from dpro.plan import Plan

_POLL_S = 0.005
_LOST_S = 600.0  # a rank that waits longer for an order has lost the driver
#: Memory that a rank has touched before it begins, in pieces that the allocator keeps (``cells.KEEP_MEMORY``): what a
#: capture holds scatters free memory, and a step that then takes fresh pages is longer for that alone.
_HEAP_PIECES, _HEAP_PIECE_BYTES = 48, 16 << 20
#: Steps before a window that are not timed: caches and connections are another window's.
_FIRST = 1


class Rank:
    """Carries out orders; each method is one kind, its arguments are the order's fields."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        self._loop, self._folder = loop, folder
        self._agreements = 0

    def measure(self, warmup: int, steps: int, rounds: int, prefix: str) -> dict[str, Any]:
        """Un-profiled windows and captures in turn, U U C U C … U: ``rounds`` captures of ``steps`` steps.

        Answers ``plain_ns`` [rounds + 2][steps] (the first two before any capture of this order), ``captured_ns``
        [rounds][steps], and ``traces``, one file per capture.
        """
        self._train(warmup)
        rehearse(self._loop.adapter, self._step, steps)
        plain = [self._window(steps), self._window(steps)]
        captured, files = [], []
        for number in range(rounds):
            times, file = self._capture(steps, plain[-1], f"{prefix}-{number}-{self._loop.rank}.npz")
            captured.append(times)
            files.append(file)
            plain.append(self._window(steps))
        return {"plain_ns": plain, "captured_ns": captured, "traces": files}

    def arms(self, plans: list[str | None], rounds: int, steps: int, settle: int, budget_s: float) -> dict[str, Any]:
        """Time every plan (None: the job's own settings) ``rounds`` times, forwards and backwards in turn.

        Rank 0 says after each round whether there is time for another. Answers ``times_ns`` [arm][rounds * steps].
        """
        made = [None if plan is None else Plan.loads(plan) for plan in plans]
        times: list[list[int]] = [[] for _ in made]
        self._loop.prepare([plan for plan in made if plan is not None])
        begin_s = time.monotonic()
        for number in range(rounds):
            for arm in list(range(len(made)))[:: -1 if number % 2 else 1]:
                put(self._loop.adapter, made[arm])
                self._train(settle - _FIRST)
                times[arm] += self._window(steps)
            spent_s = time.monotonic() - begin_s
            if self._agreed(spent_s * (number + 2) / (number + 1) > budget_s):
                break
        put(self._loop.adapter, None)
        return {"times_ns": times}

    def tune(self, settings: dict[str, Any], most_steps: int) -> dict[str, Any]:
        """Let dpro tune the job to its verdict, then give the job's own settings back.

        Answers the outcome's figures, ``plan`` and ``at_start`` (JSON, None unless there is one) and ``steps`` that
        tuning took.
        """
        tuner = self._loop.autotune(settings)
        if tuner is None:
            raise RuntimeError("dpro has nothing to tune here")
        for _ in range(most_steps):
            if tuner.outcome is not None:
                break
            self._loop.step()
        tuner.close()
        outcome = tuner.outcome
        if outcome is None:
            raise RuntimeError("dpro came to no outcome")
        # the judge has settings of its own; what the tuner left in force goes first
        tuner.adapter.revert()
        self._train(_FIRST)
        plan = outcome.plan
        return {
            "verdict": outcome.verdict.name, "reason": outcome.reason, "steps": tuner.steps,
            "predicted_ms": outcome.predicted_ms, "baseline_ms": outcome.baseline_ms,
            "measured_ms": outcome.measured_ms, "plan": plan.dumps() if plan else None,
            "at_start": start[1].dumps() if (start := outcome.at_start()) else None,
        }  # fmt: skip

    def hold(self, plan: str | None) -> dict[str, Any]:
        """Put ``plan`` in force and leave it."""
        put(self._loop.adapter, None if plan is None else Plan.loads(plan))
        return {}

    def ready(self) -> dict[str, Any]:
        """Answers ``ready``: (name, bytes) of every gradient, in the order in which a step makes them ready."""
        return {"ready": self._loop.ready()}

    def layers(self) -> dict[str, Any]:
        """Answers ``layers``: what a compiler can have, in a framework that has one."""
        return {"layers": getattr(self._loop, "layers", list)()}

    def gradients(self, shares: list[int]) -> dict[str, Any]:
        """Answers ``off``: how far the ranks' gradient of a batch dealt out like this is from one device's."""
        return {"off": getattr(self._loop, "gradients_off")(shares)}  # noqa: B009  (loops of shared batches have it)

    def train(self, steps: int, window: int) -> dict[str, Any]:
        """Train ``steps`` steps, then time ``window``. Answers ``times_ns``."""
        self._train(steps)
        return {"times_ns": self._window(window)}

    # -- parts -----------------------------------------------------------------------------------

    def _step(self) -> None:
        self._loop.step()
        if obstacle := self._loop.adapter.obstacle():  # asked after every step, as the tuner does
            raise RuntimeError(obstacle)

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _window(self, steps: int) -> list[int]:
        """Durations of ``steps`` steps, ns, after one that is not counted."""
        self._train(_FIRST)
        times = []
        for _ in range(steps):
            begin_ns = time.perf_counter_ns()
            self._step()
            times.append(time.perf_counter_ns() - begin_ns)
        return times

    def _capture(self, steps: int, plain_ns: list[int], name: str) -> tuple[list[int], str]:
        """One capture as the tuner makes it; step times and the trace's file."""
        adapter, times = self._loop.adapter, []
        self._train(_FIRST)
        settled = settle_capture(adapter, self._step)
        adapter.start_capture()
        for _ in range(steps):
            begin_ns = time.perf_counter_ns()
            self._step()
            times.append(time.perf_counter_ns() - begin_ns)
            adapter.mark_step()
        trace = adapter.stop_capture()
        if settled:
            put(adapter, None)
        if self._loop.runs_behind:
            times = trace.step_ns().tolist()
        trace.meta.unprofiled_step_ns = plain_ns
        trace.meta.extra["profiled_step_ns"] = times
        file = self._folder / name
        trace.save(file)
        self._loop.barrier()  # who is done sooner does not train meanwhile
        return times, str(file)

    def _agreed(self, own: bool) -> bool:
        """Rank 0's answer, on all ranks, through a file."""
        self._agreements += 1
        told = self._folder / f"agreed-{self._agreements}"
        if self._loop.rank == 0:
            _write(told, own)
        return bool(_wait(told))


def _write(file: Path, content: Any) -> None:
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(json.dumps(content))
    fresh.replace(file)


def _wait(file: Path) -> Any:
    deadline = time.monotonic() + _LOST_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} did not come within {_LOST_S:g} s")
        time.sleep(_POLL_S)
    return json.loads(file.read_text())


def main() -> None:
    """Serve orders until one says ``end``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix_job", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--comm", choices=sorted(COMMS), required=True)
    parser.add_argument("--emulated", action="store_true")
    args = parser.parse_args()
    os.dup2(2, 1)  # the driver's stdout is its result: what libraries print (BytePS) does not belong there
    loop_class = COMMS[args.comm].loop_class()
    if not args.emulated:
        [b"\x01" * _HEAP_PIECE_BYTES for _ in range(_HEAP_PIECES)]
    loop: Loop = loop_class(args.model, 1 + int(os.environ["RANK"]), args.emulated)
    rank = Rank(loop, args.folder)
    number = 0
    while (order := _wait(args.folder / f"order-{number}.json"))["do"] != "end":
        answer = getattr(rank, order.pop("do"))(**order)
        _write(args.folder / f"answer-{number}-{loop.rank}.json", answer)
        number += 1
    loop.close()


if __name__ == "__main__":
    main()
