"""The life cycle of one tuned job: warm up, measure, capture, plan, try, keep or undo.

Knows the job only through :class:`dpro.adapter.Adapter`. The phases are one generator that is
resumed at every optimizer step, so they read top to bottom. Two rules keep the job safe:

* Every rank is at the same phase at the same step, because phases are counted in optimizer steps.
  Whatever fails on a rank is said at the next *meeting*, and all ranks leave together.
* What is decided at a meeting is decided once (first proposal wins) for all ranks. Settings that
  the ranks must share are undone only when every rank was at the meeting; if one is missing, they
  stay as they are (*freeze*), since undoing them on some ranks only would hang the job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator
from enum import Enum
from typing import TYPE_CHECKING, Any

from dpro.adapter import Adapter, MemoryMeter, RankLeft, RecordsUnderPlan, RegionTimer, Rehearses
from dpro.errors import PlanError
from dpro.meeting import describe, largest_peak, offer_given, quietly, same_plan, seed_kept, slowest_of_each_step
from dpro.outcome import Arm, Outcome, Verdict
from dpro.plan import Plan
from dpro.planning import Planned, make_plans, pack_trace, without_steps
from dpro.session import Session
from dpro.settings import Settings
from dpro.trace.memory import MEMORY, load
from dpro.trace.model import RankTrace
from dpro.trace.regions import REGIONS, dump
from dpro.verdict import Comparison, Window, compare, timing

if TYPE_CHECKING:
    from dpro.search.team import Team

#: Turns of plan and baseline before the verdict, where the machine is noisy.
_MOST_ROUNDS = 3
#: More steps that are not timed where layers are compiled: XLA waits for the third run of a cluster.
_COMPILE_STEPS = 2


class State(Enum):
    WARMUP = "warm-up"
    BASELINE = "baseline"
    CAPTURE = "capture"
    PLAN = "plan"
    APPLY = "apply"
    VERIFY = "verify"
    DONE = "done"


class _StepAside(Exception):
    def __init__(self, reason: str, freeze: bool = False) -> None:
        super().__init__(reason)
        self.freeze = freeze


_Steps = Generator[None, "int | None", None]


class Tuner:
    """Drives one job. Call :meth:`step` after every optimizer step, :meth:`close` at the end.

    Args:
        adapter: the job.
        settings: how long the phases are and what may be done.
        plan: a plan to verify at once, instead of capture and search.
        on_done: called once with the :class:`Outcome`, on every rank.
        clock: ns, monotonic; tests give their own.
        planner: traces to plans, on rank 0, in place of :func:`dpro.planning.make_plans`; tests give their own.
    """

    def __init__(
        self,
        adapter: Adapter,
        settings: Settings,
        *,
        plan: Plan | None = None,
        on_done: Callable[[Outcome], None] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        planner: Callable[..., Planned] | None = None,
        session: Session | None = None,
    ) -> None:
        self.adapter = adapter
        self.settings = settings
        self.state = State.WARMUP
        self.outcome: Outcome | None = None
        self.steps = 0
        self.owner_pid = os.getpid()
        self._given = plan
        self._on_done = on_done
        self._clock = clock
        self._planner = planner
        self._rank = adapter.exchange.rank
        self._session = session or Session(settings, self._rank)
        self._failure = ""
        self._team: Team | None = None
        self._meetings = 0
        self._in_force: Plan | None = None
        self._touched = False
        self._sound = True
        self._baseline = Arm(None, "your settings")
        self._outcome = Outcome(Verdict.STEPPED_ASIDE, "", 0, arms=[self._baseline])
        self._last: int | None = None
        self._skipped = False
        self._life: _Steps | None = self._live()
        next(self._life)

    # -- what the job calls ------------------------------------------------------------------

    def step(self) -> None:
        """An optimizer step has just ended. Raises nothing but an interrupt that comes meanwhile."""
        if self._life is None:
            return
        now = self._clock()
        took = None if self._last is None else now - self._last
        self.steps += 1
        with seed_kept():
            try:
                self._life.send(took)
            except StopIteration:
                self._life = None
            except KeyboardInterrupt:  # in the midst of our work: a job that lives on does so without us
                self.close()
                raise
        self._last = self._clock()

    def skip(self) -> None:
        """Time since the last step was not training (validation, a checkpoint): do not count it."""
        self._last = None
        self._skipped = True

    def fail(self, reason: str) -> None:
        """Something went wrong outside :meth:`step`: all ranks step aside at the next meeting."""
        self._failure = self._failure or reason

    def close(self) -> None:
        """Training ends. Detaches everything; says so if the tuning was not finished. Never raises."""
        life, self._life = self._life, None
        if life is not None:
            life.close()
            quietly(self.adapter.exchange.leave)
            quietly(self.adapter.abort_capture)
            where = f"after {self.steps} steps, in the {self.state.value} phase"
            with seed_kept():
                self._end(Verdict.STEPPED_ASIDE, f"training ended {where}; {self._held()}")
        quietly(self.adapter.close)

    # -- the phases --------------------------------------------------------------------------

    def _live(self) -> _Steps:
        try:
            yield from self._phases()
        except _StepAside as aside:
            quietly(self.adapter.abort_capture)
            if self._touched and not aside.freeze:
                # also after a failed revert: it does nothing where it had worked
                quietly(self.adapter.revert)
                self._in_force = None
            self._end(Verdict.STEPPED_ASIDE, f"{aside}; {self._held()}")
        except Exception as error:  # the job comes first, whatever this is
            quietly(self.adapter.abort_capture)
            self._end(Verdict.STEPPED_ASIDE, f"{describe(error)}; training goes on", everywhere=True)
            quietly(self.adapter.exchange.leave)
        quietly(self.adapter.close)

    def _phases(self) -> _Steps:
        settings = self.settings
        if settings.memory_bytes and isinstance(self.adapter, MemoryMeter):
            self.adapter.meter_memory()
        yield from self._pass(settings.warmup_steps)

        self.state = State.BASELINE
        base_ms = yield from self._timed(settings.baseline_steps)
        middle = self.steps - settings.baseline_steps / 2
        if self._given is None:
            captured = yield from self._capture(base_ms)
            self.state = State.PLAN
            # rank 0 alone times regions: the others wait for its plans a little longer, and never for its compiler
            blob = self._guard(lambda: pack_trace(self._with_regions(captured))) if captured is not None else None
            patience_s = 3 * settings.search_s + 2 * settings.regions_s + settings.timeout_s
            decision = self._meet("plan", blob or b"", self._plan, extra_s=patience_s, assisted=True)
            self._switch(None)
        else:
            given = self._given
            own = json.dumps({"ms": base_ms, "sha": self._hash(given)}).encode()
            decision = self._meet("given", own, lambda blobs: offer_given(given, blobs))
        self._baseline.windows.append(Window(middle, decision["ms"]))
        self._outcome.baseline_ms = timing(decision["ms"]).median_ms
        arms = [Arm(Plan.loads(p["plan"]), p["name"], p["predicted_ms"]) for p in decision["plans"]]
        if self._given is not None and arms[0].predicted_ms and self._given.baseline_ms:
            # it was predicted for a faster or slower day
            arms[0].predicted_ms *= self._outcome.baseline_ms / self._given.baseline_ms
        if settings.mode == "observe":
            self._end(Verdict.OBSERVED, "mode is observe")
            return
        if not arms:
            self._end(Verdict.NO_BETTER_PLAN, self.adapter.why_not() or decision["why"])
            return
        self._outcome.plan, self._outcome.predicted_ms = arms[0].plan, arms[0].predicted_ms
        self._outcome.arms += arms
        if settings.mode == "suggest":
            self._end(Verdict.SUGGESTED, "nothing was changed; DPRO_PLAN=<its plan.json> tries the first plan")
            return

        if decision["must_fit"] and settings.memory_bytes:
            yield from self._make_fit(arms)
            return
        for arm in arms:
            yield from self._try(arm)
        timed = [arm for arm in arms if arm.times_ms()]
        if not timed:
            self._switch(None)
            self._end(Verdict.ROLLED_BACK, "no step under a plan could be timed; your settings are back")
            return
        best = min(timed, key=lambda arm: timing(arm.times_ms()).median_ms)
        yield from self._measure(self._baseline)
        # the window that made it the best of several was a lucky one: it is no evidence
        luck = len(timed) > 1
        for _ in range(_MOST_ROUNDS):
            yield from self._measure(best)
            yield from self._measure(self._baseline)
            outcome = compare(self._baseline.windows, best.windows[luck:], settings.min_gain)
            if outcome.faster or outcome.ratio > 1 - settings.min_gain:
                break  # clear enough either way; else the machine was too noisy to tell: once more
        self._conclude(best, outcome)

    def _try(self, arm: Arm) -> _Steps:
        predicted = f", predicted {arm.predicted_ms:.1f} ms/step" if arm.predicted_ms else ""
        self._session.say(f"trying {arm.name}{predicted}")
        yield from self._measure(arm)

    def _make_fit(self, arms: list[Arm]) -> _Steps:
        """Keep the fastest plan whose measured peak is within the budget, also one that is slower than what is not.

        The job's own settings are not measured between: they are above the budget.
        """
        budget = 0
        for arm in arms:
            yield from self._try(arm)
            arm.peak_bytes, budget = yield from self._peak()
        fitting = [arm for arm in arms if arm.times_ms() and arm.peak_bytes is not None and arm.peak_bytes <= budget]
        best = min(fitting or arms, key=lambda arm: timing(arm.times_ms()).median_ms or float("inf"))
        self._outcome.plan, self._outcome.predicted_ms = best.plan, best.predicted_ms
        self._outcome.measured_ms = timing(best.times_ms()).median_ms or None
        self._switch(best.plan if fitting else None)
        now = {"sha": "", "checksum": self._guard(self.adapter.checksum) or ""}
        if not self._meet("fits", json.dumps(now).encode(), same_plan)["sound"] and self._sound:
            raise _StepAside("parameters differ between ranks under the plan")
        told = f"{(best.peak_bytes or 0) / 1e6:.1f} MB at most on a rank, of {budget / 1e6:.1f} MB"
        good = Verdict.KEPT, f"it fits: {told}"
        self._end(*good if fitting else (Verdict.ROLLED_BACK, f"not measured to fit: {told}; your settings are back"))

    def _peak(self) -> Generator[None, int | None, tuple[int | None, int]]:
        """The most that any rank has allocated at once, bytes, over two steps under the settings in force; and rank 0's
        budget, which is all ranks'."""
        self._guard(self.adapter.start_capture)
        for _ in range(2):
            yield from self._one_step()
            if not self._failure:
                self._guard(self.adapter.mark_step)
        trace: RankTrace | None = None if self._failure else self._guard(self.adapter.stop_capture)
        self.adapter.abort_capture()
        measured = load(trace.meta.extra.get(MEMORY)) if trace is not None else None
        own = json.dumps(measured and measured.peak).encode()
        budget = self.settings.memory_bytes
        met = self._meet("peak", own, lambda blobs: largest_peak(blobs) | {"budget": budget})
        return met["peak"], met["budget"]

    def _conclude(self, best: Arm, comparison: Comparison) -> None:
        outcome = self._outcome
        outcome.comparison = comparison
        outcome.baseline_ms = timing(self._baseline.times_ms()).median_ms
        outcome.measured_ms = timing(best.times_ms()).median_ms
        outcome.plan, outcome.predicted_ms = best.plan, best.predicted_ms
        gain = f"{1 / comparison.ratio:.3f}x, noise {100 * comparison.noise:.1f} %"
        if comparison.faster:
            self._switch(best.plan)
            self._end(Verdict.KEPT, f"faster: {gain}")
        else:
            self._end(Verdict.ROLLED_BACK, f"{best.name}: not clearly faster, {gain}; your settings are back")

    def _capture(self, base_ms: list[float]) -> Generator[None, int | None, RankTrace | None]:
        """Profile a few steps; a failure is kept for the meeting that follows."""
        steps = self.settings.capture_steps
        if self.settings.memory_bytes:
            steps = max(2, steps)  # what the first one frees was allocated unseen
        if isinstance(self.adapter, Rehearses):
            yield from self._rehearse(self.adapter, steps)
        if isinstance(self.adapter, RecordsUnderPlan):
            plan = self._guard(self.adapter.plan_to_record)
            self._meet("record", json.dumps({"sha": self._hash(plan)}).encode(), same_plan)
            if plan is not None:
                self._switch(plan)
                yield from self._pass(self.settings.settle_steps)
        self.state = State.CAPTURE
        self._session.say(
            f"profiling steps {self.steps + 1} to {self.steps + steps} of {self.adapter.exchange.world_size} ranks"
        )
        times: list[int] = []
        interrupted: list[int] = []
        self._guard(self.adapter.start_capture)
        self._last = None
        for step in range(steps):
            before = self._clock()
            self._skipped = False
            yield from self._one_step()
            if self._skipped:
                interrupted.append(step)
            else:
                times.append(self._clock() - before)
            if not self._failure:
                self._guard(self.adapter.mark_step)
        trace: RankTrace | None = None
        if not self._failure:
            trace = self._guard(lambda: without_steps(self.adapter.stop_capture(), interrupted))
        if trace is None:
            self.adapter.abort_capture()
            return None
        trace.meta.unprofiled_step_ns = [round(ms * 1e6) for ms in base_ms]
        trace.meta.extra["profiled_step_ns"] = times
        trace.meta.extra["fingerprint"] = self._guard(self.adapter.fingerprint) or {}
        return trace

    def _rehearse(self, adapter: Rehearses, steps: int) -> _Steps:
        self._session.say(f"profiling steps {self.steps + 1} to {self.steps + steps}, a rehearsal")
        self._guard(adapter.start_rehearsal)
        for _ in range(steps):
            yield from self._one_step()
            if not self._failure:
                self._guard(self.adapter.mark_step)
        self.adapter.abort_capture()

    def _with_regions(self, trace: RankTrace) -> RankTrace:
        """Rank 0: with what compiling layers would be worth, where the job can do that; else as it is."""
        budget_s = self.settings.regions_s if self._rank == 0 and self.settings.mode != "observe" else 0
        if budget_s and isinstance(self.adapter, RegionTimer):
            try:
                trace.meta.extra[REGIONS] = dump(self.adapter.time_regions(trace, budget_s))
            except Exception as error:  # there are other things to tune
                self._session.say(f"layers that could be compiled not timed: {describe(error)}")
        return trace

    def _plan(self, blobs: list[bytes]) -> dict[str, Any]:
        """Rank 0: traces to plans, and the report."""
        adapter = self.adapter
        given = (blobs, adapter.capabilities(), adapter.fingerprint(), self.settings, self._session)
        planned = self._planner(*given) if self._planner is not None else make_plans(*given, team=self._team)
        self._outcome.planned = planned
        self._outcome.replayed_ms = planned.replayed_ms
        self._outcome.capture_overhead_pct = planned.capture_overhead_pct
        limit = self.settings.trials
        plans = [
            {"plan": plan.dumps(), "name": name, "predicted_ms": plan.predicted_ms}
            for name, plan in planned.plans[:limit]
        ]
        return {"plans": plans, "ms": planned.unprofiled_ms, "why": planned.why_none, "must_fit": planned.must_fit}

    def _measure(self, arm: Arm) -> _Steps:
        """Put ``arm`` in force and time a window of it; every rank gets the slowest rank's times."""
        self._switch(arm.plan)
        compiles = arm.plan is not None and arm.plan.compile_regions
        yield from self._pass(self.settings.settle_steps + (_COMPILE_STEPS if compiles else 0))
        self.state = State.VERIFY
        own = yield from self._timed(self.settings.verify_steps)
        met = self._meet("times", json.dumps(own).encode(), slowest_of_each_step)
        arm.windows.append(Window(self.steps - self.settings.verify_steps / 2, met["ms"]))

    def _switch(self, plan: Plan | None) -> None:
        """Same change on every rank, between the same two steps; else none at all."""
        if plan == self._in_force:
            return
        self.state = State.APPLY
        if plan is not None:  # also after a failure: the others prepare, and all must revert alike
            (quietly if self._failure else self._guard)(lambda: self._prepare(plan))
        ready = {"sha": self._hash(plan), "checksum": self._guard(self.adapter.checksum) or ""}
        self._sound &= self._meet("ready", json.dumps(ready).encode(), same_plan)["sound"]
        self._in_force, self._touched = plan, True  # from here on an abort must undo it
        if plan is None:
            self._guard(self.adapter.revert)
        else:
            self._guard(lambda: self.adapter.apply(plan))
        now = {"sha": "", "checksum": self._guard(self.adapter.checksum) or ""}
        if not self._meet("applied", json.dumps(now).encode(), same_plan)["sound"] and self._sound:
            raise _StepAside("parameters differ between ranks after the change")

    def _prepare(self, plan: Plan) -> None:
        if plan.gradient_dtype and not self.settings.lossy:
            raise PlanError("the plan's gradient_dtype changes the training's result: DPRO_LOSSY=1 allows that")
        self.adapter.prepare(plan)

    def _hash(self, plan: Plan | None) -> str:
        return "" if plan is None else plan.sha256

    # -- steps and meetings --------------------------------------------------------------------

    def _one_step(self) -> Generator[None, int | None, int | None]:
        """Wait for the next step; its duration in ns, None if it was interrupted."""
        took = yield
        if obstacle := self.adapter.obstacle():
            self.adapter.exchange.leave()
            raise _StepAside(obstacle, freeze=True)
        return took

    def _pass(self, steps: int) -> _Steps:
        for _ in range(steps):
            yield from self._one_step()

    def _timed(self, steps: int) -> Generator[None, int | None, list[float]]:
        """Durations, ms, of the next ``steps`` steps, less those that were interrupted."""
        times: list[float] = []
        for _ in range(steps):
            took = yield from self._one_step()
            if took is not None:
                times.append(took / 1e6)
        return times

    def _guard(self, call: Callable[[], Any]) -> Any:
        """Run a step that may fail on this rank alone; the failure waits for the next meeting."""
        if self._failure:
            return None
        try:
            return call()
        except Exception as error:
            self._failure = describe(error)
            return None

    def _meet(
        self,
        topic: str,
        blob: bytes,
        decide: Callable[[list[bytes]], dict[str, Any]],
        extra_s: float = 0.0,
        assisted: bool = False,
    ) -> dict[str, Any]:
        """All ranks hand in ``blob``, rank 0 decides, all get the decision. ``assisted``: the others help it meanwhile.

        Raises:
            _StepAside: on every rank alike, if a rank failed, is missing, or ``decide`` raised.
        """
        exchange, timeout_s = self.adapter.exchange, self.settings.timeout_s
        key = f"{self._meetings}/{topic}"
        self._meetings += 1
        exchange.post(key, b"-" + self._failure.encode() if self._failure else b"+" + blob)
        if assisted:  # what it needs takes a while to import
            from dpro.search.team import Team, assist
        if self._rank == 0:
            self._team = Team(exchange, f"{key}/search") if assisted else None
            proposal = self._propose(key, decide)
            if self._team is not None:
                self._team.end()
        else:
            patience_s, began = 2 * timeout_s + extra_s, time.monotonic()
            if assisted:
                quietly(lambda: assist(exchange, f"{key}/search", patience_s))
            try:
                proposal = exchange.wait(key, max(0.0, patience_s - (time.monotonic() - began)))
            except (TimeoutError, RankLeft) as error:
                left = isinstance(error, RankLeft)
                why = describe(error) if left else f"rank 0 did not answer within {patience_s:g} s"
                proposal = json.dumps({"stop": why, "freeze": True})
        decision: dict[str, Any] = json.loads(exchange.agree(key, proposal))
        if "stop" in decision:
            raise _StepAside(decision["stop"], decision["freeze"])
        return decision

    def _propose(self, key: str, decide: Callable[[list[bytes]], dict[str, Any]]) -> str:
        try:
            blobs = self.adapter.exchange.collect(key, self.settings.timeout_s)
        except (TimeoutError, RankLeft) as error:
            return json.dumps({"stop": describe(error), "freeze": True})
        for rank, blob in enumerate(blobs):
            if blob[:1] != b"+":
                return json.dumps({"stop": f"rank {rank}: {blob[1:].decode(errors='replace')}", "freeze": False})
        try:
            return json.dumps(decide([blob[1:] for blob in blobs]))
        except Exception as error:
            self._session.debug()
            return json.dumps({"stop": describe(error), "freeze": False})

    # -- the end -------------------------------------------------------------------------------

    def _end(self, verdict: Verdict, reason: str, everywhere: bool = False) -> None:
        self.state = State.DONE
        outcome = self._outcome
        outcome.verdict, outcome.reason, outcome.steps = verdict, reason, self.steps
        self.outcome = outcome
        quietly(lambda: self._session.conclude(outcome, everywhere))
        if outcome.planned is not None:  # megabytes that the job need not carry on
            outcome.planned.graph = outcome.planned.replay = None
        if (done := self._on_done) is not None:
            quietly(lambda: done(outcome))

    def _held(self) -> str:
        """What is in force, for a person."""
        if self._in_force is not None:
            return "the plan under trial stays in force"
        return "your settings are back" if self._touched else "nothing was changed"
