"""Passes that the search does not turn, third parties' and those that no plan can carry: each replayed as a what-if.

Knows the Pass protocol and nothing of what a pass does, so it trusts none: whatever one raises is a line, and the graph
is taken back to where it was by a mark of its own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from dpro.adapter import Knob
from dpro.errors import PlanError
from dpro.graph.graph import Graph
from dpro.passes.registry import Pass
from dpro.plan import Plan
from dpro.replay.engine import replay
from dpro.search.critical_path import LEVEL, Candidate, SearchResult

#: Candidates of one pass that are looked at, and those that are replayed.
LOOKED_AT, REPLAYED = 1000, 16


@dataclass
class Tried:
    """``candidates``: the search's, and what can be set and replays faster, first where it is the fastest.
    ``whatifs``: the rest, (name, predicted ms).
    """

    candidates: list[Candidate]
    whatifs: list[tuple[str, float]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def try_out(
    graph: Graph, edits: Iterable[Pass], found: SearchResult, *, knobs: set[Knob], fingerprint: dict[str, str]
) -> Tried:
    """Replay the cheapest candidates of each pass on the captured settings, alone; leaves the graph as it was.

    Predictions are ``found.baseline_ms`` times the ratio of two replays.

    Args:
        knobs: what a plan can carry here; a pass with one of them and a method ``settings(candidate)``, which gives
            fields of a plan, has plans.
    """
    tried, plans, baseline_ms = Tried(found.candidates), [], found.baseline_ms
    captured_ns = replay(graph).makespan_ns
    base = Plan(fingerprint=dict(fingerprint), baseline_ms=baseline_ms)
    for edit in edits:
        mark = graph.mark()
        try:
            legal = [c for c in islice(edit.candidates(graph), LOOKED_AT) if edit.legal(graph, c)]
            if not legal:
                tried.warnings.append(f"pass {edit.name!r}: nothing to do here")
            costs = [float(edit.cost(graph, candidate)) for candidate in legal]
            if not all(map(math.isfinite, costs)):
                raise ValueError(f"a cost that is no number: {costs}")
            graph.undo(mark)
            cheapest = heapq.nsmallest(REPLAYED, range(len(legal)), key=costs.__getitem__)
            for candidate in (legal[number] for number in cheapest):
                edit.apply(graph, candidate)
                step_ms = baseline_ms * replay(graph).makespan_ns / captured_ns if captured_ns else baseline_ms
                graph.undo(mark)
                name = f"{edit.name} {candidate}"[:60]
                fields = _settings(edit, candidate) if edit.knobs & knobs else None
                if fields and step_ms * (1 + LEVEL) < baseline_ms:
                    plan = replace(base, **fields, predicted_ms=step_ms)
                    plans.append(Candidate(name, plan, step_ms, ()))
                else:
                    tried.whatifs.append((name, step_ms))
        except Exception as error:  # whatever a third party's code does must not end the search
            tried.warnings.append(f"pass {edit.name!r}: {type(error).__name__}: {' '.join(str(error).split())}")
        finally:
            graph.undo(mark)
    plans.sort(key=lambda candidate: candidate.predicted_ms)
    best_ms = min((candidate.predicted_ms for candidate in found.candidates), default=baseline_ms)
    first = bool(plans) and plans[0].predicted_ms < best_ms
    tried.candidates = [*plans, *found.candidates] if first else [*found.candidates, *plans]
    return tried


def _settings(edit: Pass, candidate: Any) -> dict[str, Any] | None:
    """What the plan is to set; None of a pass that has no such method."""
    told = getattr(edit, "settings", None)
    if told is None:
        return None
    fields = dict(told(candidate))
    if aside := {"version", "fingerprint", "predicted_ms", "baseline_ms"} & fields.keys():
        raise PlanError(f"settings() gives {min(aside)!r}, which is not for a pass to say")
    return fields
