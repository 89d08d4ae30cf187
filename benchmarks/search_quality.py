"""How near searches come to the optimum, on random steps small enough to try everything.

Knows made-up steps and the replay, no real job: what is compared are two step times of the same replay. An instance
follows from its family and number alone.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any
from unittest.mock import patch

from benchmarks.cells import place, say
from benchmarks.optimum import best_runs
from dpro.adapter import Knob
from dpro.cost.sync import SyncModel
from dpro.graph.graph import Graph
from dpro.passes.fused_partition import Fused
from dpro.passes.op_fusion import Fusion, OpFusion
from dpro.passes.tensor_fusion import Grouping, TensorFusion, captured
from dpro.replay.engine import replay
from dpro.search import critical_path, fused_partition
from dpro.search.critical_path import optimize
from dpro.search.fused_partition import Steps, worth_merging
from dpro.search.judge import Judge
from dpro.search.op_fusion import Times, best_fusion
from dpro.search.tensor_fusion import Cuts, Timeline, neighbours
from dpro.search.view import ALL
from dpro.trace.byteps import DEFAULT_PARTITION_BYTES
from dpro.trace.regions import REGIONS, Region, RegionTime
from tests.graph.ps_jobs import layout, model, ps_graph
from tests.passes.regions import keras_graph
from tests.search.graphs import ddp_graph

#: Instances by family.
COUNTS = {"fusion": 250, "fusion+partition": 200, "op fusion": 100}
MS = 1_000_000
#: A rejected candidate that makes the step shorter by more than this share was a miss.
MISSED = 0.001
#: Nobody waits in a test of quality.
_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """One instance. ``misses``: candidates that a filter rejected and that are better by more than 0.1 %."""

    family: str
    number: int
    size: int
    optimum_ns: int
    found_ns: int
    rejected: int = 0
    misses: list[str] = field(default_factory=list)

    @property
    def beyond_pct(self) -> float:
        return 100.0 * (self.found_ns - self.optimum_ns) / self.optimum_ns


def groupings(n: int) -> Iterator[Grouping]:
    """All ways to cut 0..n-1 into runs."""
    for count in range(n):
        for inner in combinations(range(1, n), count):
            yield _groups((*inner, n))


def _groups(cuts: Cuts) -> Grouping:
    return tuple(tuple(range(a, b)) for a, b in zip((0, *cuts), cuts, strict=False))


def _spread(rng: random.Random, low: float, high: float) -> float:
    """Between two bounds, all orders of magnitude alike."""
    return float(low * (high / low) ** rng.random())


def fusion_graph(rng: random.Random) -> Graph:
    """A DDP step of 2 to 10 gradients, with host contention or launches or neither, one or two buckets in flight."""
    n = rng.randint(2, 10)
    sizes = [round(_spread(rng, 1 << 14, 1 << 25)) for _ in range(n)]
    backward_ns = [round(_spread(rng, 0.1, 10) * MS) for _ in range(n)]
    pace = _spread(rng, 0.2, 5) * sum(backward_ns) / sum(sizes)
    steal = rng.uniform(0, 0.5) * pace if rng.random() < 0.4 else 0.0
    graph = ddp_graph(
        sizes,
        round(rng.uniform(0, 1) * sum(backward_ns)),
        backward_ns,
        groups=_groups((*sorted(rng.sample(range(1, n), rng.randint(0, n - 1))), n)),
        skew_ns=round(rng.uniform(0, 2) * MS),
        copy_ns=[round(rng.uniform(0, 0.1) * pace * size) for size in sizes],
        update_ns=round(rng.uniform(0, 5) * MS),
        launch_ns=round(_spread(rng, 0.01, 1) * MS) if rng.random() < 0.5 else 0,
        sync=SyncModel(_spread(rng, 0.01, 5) * MS, pace, steal_ns_per_byte=steal),
    )
    graph.info["in_flight"] = rng.choice((1, 2))
    return graph


def fusion(number: int) -> Outcome:
    """The search for buckets, without its own trying of everything, against all runs of the ready order."""
    graph = fusion_graph(random.Random(f"fusion {number}"))
    rejected: dict[tuple[Cuts, Cuts], None] = {}

    def watched(timeline: Timeline, cuts: Cuts) -> list[Cuts]:
        ways = neighbours(timeline, cuts)
        merged = (tuple(c for c in cuts if c != gone) for gone in cuts[:-1])
        rejected.update(dict.fromkeys((cuts, one) for one in merged if one not in ways))
        return ways

    knobs = {Knob.BUCKET_LIST, Knob.BUCKET_CAP}
    with patch.object(critical_path, "EXHAUSTIVE", 0), patch.object(critical_path, "neighbours", watched):
        result = optimize(graph, knobs=knobs, time_budget_s=_SECONDS)
    judge = Judge(graph, float("inf"))
    best = result.candidates[0].groups if result.candidates else captured(graph)
    misses = []
    for cuts, merged in rejected:
        before, after = (judge.step_ns(_groups(one)) for one in (cuts, merged))
        if after * (1 + MISSED) < before:
            misses.append(f"{cuts} -> {merged}: {before / MS:.3f} -> {after / MS:.3f} ms")
    n = len(graph.tensors)
    optimum_ns = min(judge.step_ns(groups) for groups in groupings(n))
    return Outcome("fusion", number, n, optimum_ns, judge.step_ns(best), len(rejected), misses)


def partition_graph(rng: random.Random, n: int, workers: int = 1, orderly: bool = False) -> Graph:
    """A step of ``n`` gradients that go to one server, cut as BytePS cuts them."""
    sizes = [round(_spread(rng, 1 << 16, 1 << 25)) for _ in range(n)]
    backward_ns = [round(_spread(rng, 0.1, 10) * MS) for _ in range(n)]
    pace = _spread(rng, 0.2, 5) * sum(backward_ns) / sum(sizes)
    where = layout(workers, 1, orderly=orderly)
    costs = model(
        where,
        SyncModel(_spread(rng, 0.01, 2) * MS, pace),
        copy=SyncModel(_spread(rng, 0.001, 0.2) * MS, rng.uniform(0, 0.8) * pace),
        add=SyncModel(_spread(rng, 0.001, 0.2) * MS, rng.uniform(0, 0.8) * pace / workers),
        lags={what: rng.uniform(0, 0.5) * MS for what in ("out", "push", "acknowledge", "ask", "sum", "pull", "in")},
    )
    return ps_graph(
        sizes,
        DEFAULT_PARTITION_BYTES,
        where,
        costs,
        fwd_ns=round(rng.uniform(0, 1) * sum(backward_ns)),
        bwd_ns=backward_ns,
        update_ns=round(rng.uniform(0, 5) * MS),
        skew_ns=round(rng.uniform(0, 2) * MS),
    )


def partition(number: int) -> Outcome:
    """The search for groups and parts. Of one worker whose messages do not wait for others' against the exact optimum,
    which the replay has to confirm; each fourth instance, of one or two workers, against all that there is."""
    rng = random.Random(f"partition {number}")
    everything = number % 4 == 3
    counts = (1, 2, 4) if everything else (1, 2, 4, 8)
    if everything:
        graph = partition_graph(rng, rng.randint(2, 4), rng.randint(1, 2), rng.random() < 0.5)
    else:
        graph = partition_graph(rng, rng.randint(2, 10))
    rejected: dict[tuple[Fused, Fused], None] = {}

    def watched(steps: Steps, here: Fused, low: int, merged: Fused) -> bool:
        worth = worth_merging(steps, here, low, merged)
        if not worth:
            rejected[here, merged] = None
        return worth

    with patch.object(fused_partition, "worth_merging", watched):
        result = fused_partition.search(graph, time_budget_s=_SECONDS, counts=counts)
    steps = Steps(graph, float("inf"), ALL, counts)
    misses = []
    for here, merged in rejected:
        before, after = steps.step_ns(here), steps.step_ns(merged)
        if after * (1 + MISSED) < before:
            misses.append(f"{here} -> {merged}: {before / MS:.3f} -> {after / MS:.3f} ms")
    n = len(graph.tensors)
    if everything:
        optimum_ns = min(
            steps.step_ns(tuple(zip(groups, bounds, strict=True)))
            for groups in groupings(n)
            for bounds in product(*map(steps.bounds, groups))
        )
    else:
        optimum_ns = _exact_ns(steps, n)
    found_ns = round((result.candidates[0].predicted_ms if result.candidates else result.baseline_ms) * MS)
    return Outcome("fusion+partition", number, n, optimum_ns, found_ns, len(rejected), misses)


def _exact_ns(steps: Steps, n: int) -> int:
    runs, _ = best_runs(
        steps.line,
        [steps.ready_ns[t] for t in range(n)],
        lambda first, end: steps.bounds(tuple(range(first, end))),
        lambda first, end, bound: steps.sizes(tuple(range(first, end)), bound),
    )
    best: Fused = tuple((tuple(range(first, end)), bound) for first, end, bound in runs)
    step_ns, told_ns = steps.step_ns(best), steps.estimate_ns(best)
    if step_ns != told_ns:
        raise AssertionError(f"the optimum is {told_ns} ns on the line and {step_ns} ns replayed")
    return step_ns


def regions_graph(rng: random.Random) -> Graph:
    """A Horovod step of 2 to 7 layers with a weight each, and some runs of them that were timed compiled: half to 1.4
    times what they take without, forward and backward apart."""
    n = rng.randint(2, 7)
    layers = [f"l{i}" for i in range(n)]
    forward, backward = ({layer: _spread(rng, 0.2, 5) for layer in layers} for _ in range(2))
    regions = {}
    for _ in range(rng.randint(1, 6)):
        first = rng.randrange(n)
        run = tuple(layers[first : first + rng.randint(1, 4)])
        plain = [sum(took[layer] for layer in run) * MS for took in (forward, backward)]
        fused = [took * rng.uniform(0.5, 1.4) for took in plain]
        time_ns = RegionTime(*(round(ns) for ns in (*plain, *fused)))
        regions[run] = Region(run, tuple(f"{layer}/kernel" for layer in run), " ".join(run), time_ns)
    sizes = {layer: round(_spread(rng, 1 << 14, 1 << 24)) for layer in layers}
    graph = keras_graph(forward, backward, sizes, [*regions.values()], ranks=2)
    pace = _spread(rng, 0.2, 5) * sum(backward.values()) * MS / sum(sizes.values())
    graph.info["sync"] = SyncModel(_spread(rng, 0.01, 2) * MS, pace)
    TensorFusion().apply(graph, _groups((*sorted(rng.sample(range(1, n), rng.randint(0, n - 1))), n)))
    return graph


def op_fusion(number: int) -> Outcome:
    """The search for regions and buckets together, against all sets of regions that share no layer with all runs."""
    graph = regions_graph(random.Random(f"op fusion {number}"))
    misses: dict[str, None] = {}
    rejected = 0

    def seen(what: str, before: int, after: int) -> None:
        nonlocal rejected
        rejected += 1
        if after * (1 + MISSED) < before:
            misses[f"{what}: {before / MS:.3f} -> {after / MS:.3f} ms"] = None

    def chosen(graph: Graph, judge: Times, groups: Grouping, start: Fusion = ()) -> tuple[Fusion, int]:
        fusion, step_ns = best_fusion(graph, judge, groups, start)
        offered = {region for more in OpFusion().candidates(graph) for region in more}
        for region in graph.info[REGIONS]:
            for state in {start, fusion}:
                if region not in offered and OpFusion().legal(graph, (*state, region)):
                    before, after = (_fused_ns(graph, one, groups) for one in (state, (*state, region)))
                    seen(f"{state} and {region.layers}", before, after)
        return fusion, step_ns

    def climb(judge: Judge, timeline: Timeline) -> None:
        def watched(timeline: Timeline, cuts: Cuts) -> list[Cuts]:
            ways = neighbours(timeline, cuts)
            for merged in (tuple(c for c in cuts if c != gone) for gone in cuts[:-1]):
                if merged not in ways:
                    seen(f"{cuts} -> {merged}", judge.step_ns(_groups(cuts)), judge.step_ns(_groups(merged)))
            return ways

        with patch.object(critical_path, "neighbours", watched):
            real_climb(judge, timeline)

    real_climb = critical_path._climb
    with (
        patch.object(critical_path, "EXHAUSTIVE", 0),
        patch.object(critical_path, "best_fusion", chosen),
        patch.object(critical_path, "_climb", climb),
    ):
        result = optimize(graph, knobs={Knob.GROUPS, Knob.COMPILE_REGIONS}, time_budget_s=_SECONDS)
    best = next(iter(result.candidates), None)
    fusions: tuple[Fusion, ...] = tuple(fusion for _, fusion in best.edits) if best is not None else ()
    found_ns = _fused_ns(graph, fusions[0] if fusions else (), captured(graph) if best is None else best.groups)
    n = len(graph.tensors)
    optimum_ns = min(_fused_ns(graph, fusion, groups) for fusion in _fusions(graph) for groups in groupings(n))
    return Outcome("op fusion", number, n, optimum_ns, found_ns, rejected, [*misses])


def _fusions(graph: Graph) -> Iterator[Fusion]:
    regions = graph.info[REGIONS]
    for count in range(len(regions) + 1):
        for some in combinations(regions, count):
            if not some or OpFusion().legal(graph, some):
                yield some


def _fused_ns(graph: Graph, fusion: Fusion, groups: Grouping) -> int:
    """The step with these regions compiled and these buckets."""
    mark = TensorFusion().apply(graph, groups)
    try:
        OpFusion().apply(graph, fusion)
        return replay(graph).makespan_ns
    finally:
        graph.undo(mark)


FAMILIES = {"fusion": fusion, "fusion+partition": partition, "op fusion": op_fusion}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """``within_1pct``: the share of them, in percent."""
    beyond = [one.beyond_pct for one in outcomes]
    return {
        "instances": len(outcomes),
        "within_1pct": round(100 * sum(pct <= 1 for pct in beyond) / len(beyond), 2),
        "worst_pct": round(max(beyond), 3),
        "rejected": sum(one.rejected for one in outcomes),
        "filter_misses": sum(len(one.misses) for one in outcomes),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the instances (default all)")
    parser.add_argument("--first", type=int, default=0, help="number of the first instance of each family")
    parser.add_argument("--family", choices=[*FAMILIES], action="append", help="only this one (may be repeated)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    families = {}
    for name in args.family or FAMILIES:
        since = time.monotonic()
        numbers = range(args.first, args.first + max(1, round(COUNTS[name] * args.share)))
        mine = [FAMILIES[name](number) for number in numbers]
        outcomes += mine
        families[name] = {**summary(mine), "seconds": round(time.monotonic() - since, 1)}
        say(f"{name}: {families[name]}")
        for one in mine:
            if one.beyond_pct > 1 or one.misses:
                say(f"  {name} {one.number}, {one.size}: {one.beyond_pct:.3f} % beyond; {'; '.join(one.misses)}")
    where = {**place(), "seconds": round(time.monotonic() - began)}
    found = {**summary(outcomes), "families": families, "place": where}
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{key:16} {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
