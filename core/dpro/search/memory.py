"""What makes a job fit into its memory: dPRO's Algorithm 1, first line.

While the replayed peak is above the budget: re-computation of some blocks, gradient accumulation, or both. Each way to
cut a model into blocks is filled by bytes saved per time until it fits, then thinned out; the replay says what fits and
what it takes. Knows the memory passes; synchronisation stays as captured. Leaves the graph as it found it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from dpro.adapter import Knob
from dpro.graph.graph import Graph
from dpro.passes.accumulate import Accumulate
from dpro.passes.recompute import Blocks, Recompute, families, saved_bytes
from dpro.plan import Plan
from dpro.replay.engine import replay
from dpro.replay.memory import peak_bytes
from dpro.trace.memory import MEMORY


@dataclass(frozen=True)
class Fit:
    """``blocks`` recomputed, ``micro_batches`` (1: none), and what the replay says of it: the slowest rank's step, the
    largest rank's peak."""

    blocks: Blocks
    micro_batches: int
    step_ns: int
    peak: int

    @property
    def name(self) -> str:
        """For people."""
        parts = [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        count = len(self.blocks)
        parts += [f"{count} block{'s' * (count > 1)} recomputed"] if count else []
        return ", ".join(parts) or "your settings"

    def plan(self, fingerprint: dict[str, str], scale: float, baseline_ms: float) -> Plan:
        """``scale``: measured ms per replayed ns."""
        return Plan(
            fingerprint=dict(fingerprint),
            recompute=list(self.blocks) or None,
            accumulate=self.micro_batches if self.micro_batches > 1 else None,
            predicted_ms=self.step_ns * scale,
            predicted_bytes=self.peak,
            baseline_ms=baseline_ms,
        )


class MemorySearch:
    """See the module text.

    Args:
        graph: with ``info["memory"]``.
        knobs: what the job lets be changed.
        time_budget_s: for the search; what was found by then counts.
    """

    def __init__(self, graph: Graph, knobs: set[Knob], time_budget_s: float) -> None:
        self._graph, self._knobs = graph, knobs
        self._deadline_s = time.monotonic() + time_budget_s
        self._recompute, self._accumulate = Recompute(), Accumulate()
        self._known: dict[tuple[Blocks, int], Fit] = {}
        self.plain = self.judge((), 1)

    @property
    def evaluations(self) -> int:
        """Replays so far."""
        return len(self._known)

    def judge(self, blocks: Blocks, micro_batches: int) -> Fit:
        """Replay it; asked once, remembered. Blocks in any order are the same."""
        key = tuple(sorted(blocks)), micro_batches
        if key not in self._known:
            graph, mark = self._graph, self._graph.mark()
            try:
                if micro_batches > 1:
                    self._accumulate.apply(graph, micro_batches)
                if blocks:
                    self._recompute.apply(graph, key[0])
                played = replay(graph)
                peak = max(peak_bytes(graph, played).values(), default=0)
            finally:
                graph.undo(mark)
            self._known[key] = Fit(*key, played.makespan_ns, peak)
        return self._known[key]

    def fitting(self, budget_bytes: int) -> list[Fit]:
        """What fits, fastest first, one for each number of micro-batches; empty where nothing does."""
        counts = [1]
        if Knob.ACCUMULATE in self._knobs:
            counts += self._accumulate.candidates(self._graph)
        found = []
        for count in counts:
            fits = [fit for fit in self._ways(count, budget_bytes) if fit.peak <= budget_bytes]
            found += [min(fits, key=lambda fit: (fit.step_ns, len(fit.blocks)))] if fits else []
        return sorted(found, key=lambda fit: (fit.step_ns, fit.micro_batches))

    def smallest(self) -> Fit:
        """The least peak that was seen."""
        return min(self._known.values(), key=lambda fit: (fit.peak, fit.step_ns))

    def _ways(self, count: int, budget_bytes: int) -> list[Fit]:
        plain = self.judge((), count)
        if plain.peak <= budget_bytes or Knob.RECOMPUTE not in self._knobs:
            return [plain]
        memory = next(iter(self._graph.info[MEMORY].values()))
        return [
            self._thinned(self._filled(names, count, budget_bytes), budget_bytes)
            for names in families(memory.profile)
            if time.monotonic() < self._deadline_s
        ]

    def _filled(self, names: list[str], count: int, budget_bytes: int) -> Fit:
        """Blocks of one way to cut the model, most bytes for their time first, until it fits or nothing is left."""
        graph = self._graph
        profile = next(iter(graph.info[MEMORY].values())).profile
        worth = {
            name: saved_bytes(profile, name) / (1 + self._recompute.cost(graph, (name,)))
            for name in names
            if self._recompute.legal(graph, (name,))
        }
        chosen: list[str] = []
        fit = self.judge((), count)
        for name in sorted(worth, key=lambda name: (-worth[name], name)):
            if fit.peak <= budget_bytes or time.monotonic() >= self._deadline_s:
                break
            chosen.append(name)
            fit = self.judge(tuple(chosen), count)
        return fit

    def _thinned(self, fit: Fit, budget_bytes: int) -> Fit:
        """Without the blocks that it fits without, the costliest first."""
        if fit.peak > budget_bytes:
            return fit
        for name in sorted(fit.blocks, key=lambda name: -self._recompute.cost(self._graph, (name,))):
            if time.monotonic() >= self._deadline_s:
                break
            fewer = self.judge(tuple(one for one in fit.blocks if one != name), fit.micro_batches)
            fit = fewer if fewer.peak <= budget_bytes else fit
        return fit
