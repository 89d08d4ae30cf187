"""A job without a framework: ranks are threads, time is simulated, the exchange is a dictionary.

The job checks what a real one would hang on: at every step all ranks must have the same plan in
force, as if each step ended in an all-reduce. No test that uses it waits for real time: a rank
that ended without a word is a time-out at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dpro.adapter import Knob, RankLeft
from dpro.errors import PlanError
from dpro.plan import Plan
from dpro.planning import Planned
from dpro.session import Session
from dpro.settings import Settings
from dpro.trace.model import EventKind, Meta, RankTrace, TraceBuilder
from dpro.tuner import Outcome, Tuner

#: No test may hang: far longer than any of them takes.
_PATIENCE_S = 20.0


class Board:
    """What the ranks of one job share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.posts: dict[tuple[str, int], bytes] = {}
        self.agreed: dict[str, str] = {}
        self.left: set[int] = set()
        self.gone: set[int] = set()  # threads that ended
        self.arrived: dict[int, int] = dict.fromkeys(range(world_size), 0)  # all-reduces by rank
        self.changed = threading.Condition()

    def tell(self, change: Callable[[], object]) -> None:
        with self.changed:
            change()
            self.changed.notify_all()

    def all_reduce(self, rank: int) -> None:
        """Wait for every rank's next all-reduce; ConnectionError if one is gone, as with gloo."""
        with self.changed:
            self.arrived[rank] += 1
            self.changed.notify_all()
            while behind := {r for r, count in self.arrived.items() if count < self.arrived[rank]}:
                if behind & self.gone:
                    raise ConnectionError(f"rank {min(behind & self.gone)} is gone")
                assert self.changed.wait(_PATIENCE_S), f"rank {rank} hangs in an all-reduce"


class MemoryExchange:
    """:class:`dpro.adapter.Exchange` in one process."""

    def __init__(self, board: Board, rank: int) -> None:
        self.rank = rank
        self.world_size = board.world_size
        self._board = board

    def post(self, key: str, blob: bytes) -> None:
        self._board.tell(lambda: self._board.posts.__setitem__((key, self.rank), blob))

    def collect(self, key: str, timeout_s: float) -> list[bytes]:
        return [self._await(lambda r=rank: self._board.posts.get((key, r)), rank) for rank in range(self.world_size)]

    def agree(self, key: str, proposal: str) -> str:
        with self._board.changed:
            winner = self._board.agreed.setdefault(key, proposal)
            self._board.changed.notify_all()
            return winner

    def wait(self, key: str, timeout_s: float) -> str:
        return self._await(lambda: self._board.agreed.get(key), 0)

    def leave(self) -> None:
        self._board.tell(lambda: self._board.left.add(self.rank))

    def _await(self, look: Callable[[], object], rank: int) -> object:
        board = self._board
        with board.changed:
            while (found := look()) is None:
                if rank in board.left:
                    raise RankLeft(f"rank {rank} left the tuning")
                if rank in board.gone:
                    raise TimeoutError(f"rank {rank} did not answer")
                assert board.changed.wait(_PATIENCE_S), f"rank {self.rank} hangs on rank {rank}"
            return found


def fake_trace(rank: int, steps: int = 1) -> RankTrace:
    """Steps of 1 ms with one op each."""
    builder = TraceBuilder(Meta(rank=rank))
    bounds = [(k * 1_000_000, (k + 1) * 1_000_000) for k in range(steps)]
    for start, end in bounds:
        builder.add("op", EventKind.CPU_OP, "main", start, end)
    return builder.freeze(bounds)


class FakeAdapter:
    """:class:`dpro.adapter.Adapter` whose methods can be told to fail; keeps a log of its calls."""

    name = "fake"

    def __init__(self, board: Board, rank: int, knobs: set[Knob] | None = None) -> None:
        self.exchange = MemoryExchange(board, rank)
        self.in_force: Plan | None = None
        self.capturing = False
        self.calls: list[str] = []
        self.weights = "w"
        self.before: Callable[[str], None] = lambda name: None
        self._knobs = {Knob.BUCKET_LIST} if knobs is None else knobs

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.before(name)

    def capabilities(self) -> set[Knob]:
        return self._knobs

    def why_not(self) -> str:
        return "" if self._knobs else "a communication hook is registered"

    def obstacle(self) -> str:
        return ""

    def fingerprint(self) -> dict[str, str]:
        return {"model": "m"}

    def start_capture(self) -> None:
        self._called("start_capture")
        self.capturing = True

    def mark_step(self) -> None:
        self._called("mark_step")

    def stop_capture(self) -> RankTrace:
        self._called("stop_capture")
        self.capturing = False
        return fake_trace(self.exchange.rank, steps=2)

    def abort_capture(self) -> None:
        self.calls.append("abort_capture")
        self.capturing = False

    def prepare(self, plan: Plan) -> None:
        self._called("prepare")
        if plan.fingerprint.get("model", "m") != "m":
            raise PlanError("the plan is for another job")

    def apply(self, plan: Plan) -> None:
        self._called("apply")
        self.in_force = plan

    def revert(self) -> None:
        self._called("revert")
        self.in_force = None

    def checksum(self) -> str:
        self._called("checksum")
        return self.weights

    def close(self) -> None:
        self.calls.append("close")
        self.capturing = False


class Voice(Session):
    """A session that keeps its lines instead of printing them, and writes no file."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self.lines: list[str] = []

    def say(self, text: str, everywhere: bool = False) -> None:
        if self._rank == 0 or everywhere:
            self.lines.append(text)

    def conclude(self, outcome: Outcome, everywhere: bool) -> None:
        if outcome.verdict.name == "STEPPED_ASIDE":
            self.say(f"stepped aside: {outcome.reason}", everywhere)


@dataclass
class Rank:
    """One rank's part in a simulated job."""

    number: int
    adapter: FakeAdapter
    tuner: Tuner
    voice: Voice
    clock_ns: int = 0
    steps: int = 0
    #: sha of the plan in force at every step ("" the user's settings)
    in_force: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        assert self.tuner.outcome is not None
        return self.tuner.outcome

    @property
    def decision(self) -> tuple[str, str, str]:
        """What must be equal on all ranks."""
        sha = self.adapter.in_force.sha256 if self.adapter.in_force else ""
        return self.outcome.verdict.name, self.outcome.reason, sha


class Killed(BaseException):
    """Raised in a rank to end it without a word, as SIGKILL does."""


#: ms of one step: (rank, step, plan in force or None)
StepTime = Callable[[int, int, "Plan | None"], float]
QUICK = Settings(warmup_steps=3, baseline_steps=4, capture_steps=2, settle_steps=2, verify_steps=4, trials=3)


def plan(*caps: float, predicted_ms: float = 5.0) -> Plan:
    return Plan(fingerprint={"model": "m"}, bucket_caps=list(caps), predicted_ms=predicted_ms)


def planner(*plans: Plan) -> Callable[..., Planned]:
    """A planner that knows its answer."""

    def make(blobs: list[bytes], *_: object) -> Planned:
        assert len(blobs) >= 2
        assert all(blobs)
        offers = [(f"plan {number}", plan) for number, plan in enumerate(plans)]
        return Planned(unprofiled_ms=[10.0] * 4, replayed_ms=10.0, capture_overhead_pct=3.0, plans=offers)

    return make


@dataclass
class Job:
    """A job of ``world_size`` ranks and ``steps`` steps; :meth:`run` gives the ranks at its end."""

    step_ms: StepTime = lambda rank, step, plan: 10.0
    settings: Settings = QUICK
    plans: Callable[..., Planned] = field(default_factory=lambda: planner(plan(1.0)))
    given: Callable[[int], Plan | None] = lambda rank: None
    world_size: int = 2
    steps: int = 80
    knobs: set[Knob] | None = None
    #: called per rank before the job starts
    arrange: Callable[[Rank], None] = lambda rank: None
    #: called in a rank after its step, may raise Killed or use the tuner
    after_step: Callable[[Rank], None] = lambda rank: None

    def run(self) -> list[Rank]:
        board = Board(self.world_size)
        ranks = [self._rank(board, number) for number in range(self.world_size)]
        for rank in ranks:
            self.arrange(rank)
        threads = [threading.Thread(target=self._train, args=(board, rank), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE_S)
            assert not thread.is_alive(), "the job hangs"
        for step in range(min(rank.steps for rank in ranks)):
            assert len({rank.in_force[step] for rank in ranks}) == 1, (
                f"plans differ at step {step}: a real job would hang"
            )
        return ranks

    def _rank(self, board: Board, number: int) -> Rank:
        adapter, voice = FakeAdapter(board, number, self.knobs), Voice(self.settings, number)
        rank: Rank
        tuner = Tuner(
            adapter,
            self.settings,
            plan=self.given(number),
            clock=lambda: rank.clock_ns,
            planner=self.plans,
            session=voice,
        )
        rank = Rank(number, adapter, tuner, voice)
        return rank

    def _train(self, board: Board, rank: Rank) -> None:
        try:
            for step in range(self.steps):
                in_force = rank.adapter.in_force
                rank.in_force.append(in_force.sha256 if in_force else "")
                rank.clock_ns += round(self.step_ms(rank.number, step, in_force) * 1e6)
                board.all_reduce(rank.number)
                rank.steps += 1
                rank.tuner.step()
                self.after_step(rank)
            rank.tuner.close()
        except ConnectionError:
            rank.tuner.close()  # the user's script dies of it, as it would without dpro
        except Killed:
            pass
        finally:
            board.tell(lambda: board.gone.add(rank.number))
