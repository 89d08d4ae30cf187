"""Chrome/Perfetto trace JSON: the replayed schedule beside the measured one.

One process per rank. In it: a ``critical path`` track on top, then ``replayed`` tracks (one per
resource) and ``measured`` tracks. Times are µs from the start of the step. Flow arrows go from the
rank that arrived last at a collective to every other rank, from every SEND to its RECV, and along
the critical path wherever it changes rank. A link direction is a track of its sender. Perfetto
demands that the slices of one track nest; what merely overlaps is moved to a further lane of its
resource. Knows no command line; writes one file.

Format: "Trace Event Format" (Chromium), events X (complete), M (metadata), s and f (flow).
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpro.clock.messages import PAYLOAD, match_messages
from dpro.graph.graph import NO_RESOURCE, Graph, OpKind
from dpro.graph.spans import OneClock, common_steps, one_clock
from dpro.replay.engine import Replay
from dpro.trace.model import DEVICE_KINDS, EventKind, RankTrace
from dpro.trace.steps import step_finish_ns

if TYPE_CHECKING:
    from dpro.replay.path import CriticalPath

Event = dict[str, Any]
#: (phase, number) of arrows by op or event row
Arrows = dict[int, list[tuple[str, int]]]


@dataclass
class Slice:
    """One bar to draw; ``flows`` are (phase, number) of the arrows that leave (s) or end (f) at its start."""

    name: str
    start_ns: int
    end_ns: int
    category: str
    args: dict[str, Any] = field(default_factory=dict)
    flows: list[tuple[str, int]] = field(default_factory=list)


def export(
    graph: Graph,
    replay: Replay,
    path: Path,
    *,
    critical: CriticalPath | None = None,
    measured: Sequence[RankTrace] = (),
) -> int:
    """Write the trace (gzipped if ``path`` ends in ``.gz``). Returns the number of events.

    ``measured`` are the traces the graph was made from; their steps that can be averaged are shown.

    Raises:
        OSError: the file cannot be written.
    """
    ranks = sorted({*range(graph.ranks), *(trace.meta.rank for trace in measured if trace.meta.rank >= 0)})
    tracks = _Tracks(ranks or [0])
    events = list(_replayed(graph, replay, tracks, critical))
    if measured:
        steps, _ = common_steps(list(measured))
        clock = one_clock(list(measured))
        zeros, arrows = _zeros_ns(clock, steps), _arrows(clock.traces, len(graph.column("kind")))
        for index, trace in enumerate(clock.traces):
            events += _measured(trace, index, tracks, steps, zeros[index], arrows[index])
    write(path, [*tracks.metadata(), *sorted(events, key=_file_order)])
    return len(events)


def write(path: Path, events: Iterable[Event]) -> None:
    """Write events one per line: a cut file can still be read as far as it goes.

    ``json`` escapes control characters; ``allow_nan=False`` refuses what Perfetto cannot read. Text
    is written as UTF-8, since Perfetto shows ``\\u`` escapes of track names as they are; half a
    surrogate pair, which UTF-8 lacks, stays an escape.
    """
    text = {"mode": "wt", "encoding": "utf-8", "errors": "backslashreplace"}
    with gzip.open(path, **text) if path.suffix == ".gz" else path.open(**text) as out:  # type: ignore[call-overload]
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in events:
            out.write(separator + json.dumps(event, separators=(",", ":"), allow_nan=False, ensure_ascii=False))
            separator = ",\n"
        out.write("\n]}\n")


class _Tracks:
    """Hands out process and thread ids, and describes them to the viewer."""

    #: sort index of a thread = its group's rank here, then order of first use
    GROUPS = ("critical path", "replayed", "measured")

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._threads: dict[tuple[int, str, str], int] = {}

    def thread(self, rank: int, group: str, label: str = "") -> tuple[int, int]:
        """(pid, tid) of a track; pid 0 means "no process" to Perfetto, so rank 0 is pid 1."""
        key = (rank, group, label)
        return rank + 1, self._threads.setdefault(key, len(self._threads) + 1)

    def metadata(self) -> Iterator[Event]:
        for rank in self.ranks:
            yield _meta("process_name", rank + 1, 0, {"name": f"rank {rank}"})
            yield _meta("process_sort_index", rank + 1, 0, {"sort_index": rank})
        for (rank, group, label), tid in self._threads.items():
            name = f"{group} · {label}" if label else group
            yield _meta("thread_name", rank + 1, tid, {"name": name})
            yield _meta("thread_sort_index", rank + 1, tid, {"sort_index": self.GROUPS.index(group) * 100_000 + tid})


def _replayed(graph: Graph, replay: Replay, tracks: _Tracks, critical: CriticalPath | None) -> Iterator[Event]:
    start, end = replay.start.tolist(), replay.end.tolist()
    row_of = {op: row for row, op in enumerate(graph.arrays().ids.tolist())}
    on_path = {step.op for step in critical.steps} if critical else set()
    predecessors = _predecessors(graph, row_of)
    columns = {key: graph.column(key).tolist() for key in ("kind", "rank", "resource", "gap", "nbytes")}
    everyone = list(range(graph.ranks)) or [0]
    messages = _messages(graph, row_of)
    lanes: dict[tuple[int, str], list[Slice]] = {}
    flow = 0
    for op, row in row_of.items():
        kind = OpKind(columns["kind"][op]).name
        args: dict[str, Any] = {"kind": kind, "gap_us": columns["gap"][op] / 1e3}
        if columns["nbytes"][op] >= 0:
            args["bytes"] = columns["nbytes"][op]
        category = f"replayed,{kind.lower()}"
        if op in on_path:
            args["critical"] = True
            category += ",critical"
        flows: Arrows = {}
        ranks = [columns["rank"][op]]
        if ranks[0] < 0:  # shared by ranks: shown in each that arrives, or in all
            arrivals = [p for p in predecessors.get(op, ()) if columns["rank"][p] >= 0]
            ranks = sorted({columns["rank"][p] for p in arrivals}) or everyone
            if arrivals:
                last = columns["rank"][max(arrivals, key=lambda p: (end[row_of[p]], p))]
                args["last_rank"] = last
                for rank in ranks:
                    if rank != last:
                        flow += 1
                        flows.setdefault(last, []).append(("s", flow))
                        flows.setdefault(rank, []).append(("f", flow))
        elif op in messages:
            flows[ranks[0]] = messages[op]
        resource = columns["resource"][op]
        label = "other" if resource == NO_RESOURCE else graph.resource_names[resource]
        if resource == NO_RESOURCE and kind == OpKind.RECV.name:
            label = "received"
        for rank in ranks:
            # "rank3/cpu/1" is just "cpu/1" inside the process of rank 3
            lanes.setdefault((rank, label.removeprefix(f"rank{rank}/")), []).append(
                Slice(graph.name_of(op), start[row], end[row], category, args, flows.get(rank, []))
            )
    for (rank, label), slices in sorted(lanes.items()):
        yield from _lay_out(slices, tracks, rank, "replayed", label)
    if critical is not None:
        yield from _critical(critical, tracks, everyone[0])


def _messages(graph: Graph, row_of: dict[int, int]) -> Arrows:
    """Arrows by op, from each SEND to what received it, numbered by the SEND."""
    out: Arrows = {}
    edges, kind = graph.edges(), graph.column("kind")
    for src, dst in edges[(kind[edges[:, 0]] == OpKind.SEND) & (kind[edges[:, 1]] == OpKind.RECV)].tolist():
        if src in row_of and dst in row_of:
            out.setdefault(src, []).append(("s", src))
            out.setdefault(dst, []).append(("f", src))
    return out


def _critical(critical: CriticalPath, tracks: _Tracks, first_rank: int) -> Iterator[Event]:
    """The path on its own track; an op shared by ranks stays where the path came from."""
    rank = first_rank
    slices: list[tuple[int, Slice]] = []
    for number, step in enumerate(critical.steps):
        kind = OpKind(step.kind).name
        args = {"kind": kind, "gap_us": step.gap_ns / 1e3, "wait_us": step.wait_ns / 1e3, "op": int(step.op)}
        one = Slice(step.name, int(step.start_ns), int(step.end_ns), "critical", args)
        if step.rank not in (-1, rank):
            if slices:
                slices[-1][1].flows.append(("s", number))
                one.flows.append(("f", number))
            rank = int(step.rank)
        slices.append((rank, one))
    for where, one in slices:
        yield from _events(one, tracks.thread(where, "critical path"))


def _measured(
    trace: RankTrace,
    index: int,
    tracks: _Tracks,
    steps: Sequence[int],
    zero_ns: int,
    arrows: Arrows,
) -> Iterator[Event]:
    """Events of the steps, and their device work that ran on after them (the host runs ahead of it)."""
    rank = trace.meta.rank if trace.meta.rank >= 0 else index
    bounds = trace.step_bounds[list(steps)]
    for number, (begin, finish) in zip(steps, bounds.tolist(), strict=True):
        one = Slice(f"step {number}", begin - zero_ns, finish - zero_ns, "measured,step")
        yield from _events(one, tracks.thread(rank, "measured", "steps"))
    first, last = bounds[0, 0], bounds[-1, 1]
    device = np.isin(trace.kind, DEVICE_KINDS)
    until = np.where(device, step_finish_ns(trace)[steps[-1]], last)
    keep = (trace.start >= first) & (trace.start < until)
    keep &= (trace.end >= trace.start) & (trace.kind != EventKind.ANNOTATION)
    lanes: dict[int, list[Slice]] = {}
    for row in np.flatnonzero(keep).tolist():
        kind = EventKind(trace.kind[row]).name
        args: dict[str, Any] = {"kind": kind}
        if trace.nbytes[row] >= 0:
            args["bytes"] = trace.nbytes[row].item()
        begin, finish = trace.start[row].item() - zero_ns, trace.end[row].item() - zero_ns
        lanes.setdefault(int(trace.resource[row]), []).append(
            Slice(trace.names[trace.name[row]], begin, finish, f"measured,{kind.lower()}", args, arrows.get(row, []))
        )
    for resource, slices in sorted(lanes.items()):
        yield from _lay_out(slices, tracks, rank, "measured", trace.resources[resource])


def _lay_out(slices: list[Slice], tracks: _Tracks, rank: int, group: str, label: str) -> Iterator[Event]:
    """Events of one resource, over as many lanes as proper nesting takes (one, as a rule)."""
    open_ends: list[list[int]] = []  # per lane: ends of the slices still open, outermost first
    for one in sorted(slices, key=lambda s: (s.start_ns, -s.end_ns)):
        lane = next((number for number, ends in enumerate(open_ends) if _fits(one, ends)), len(open_ends))
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(one.end_ns)
        yield from _events(one, tracks.thread(rank, group, f"{label} ({lane + 1})" if lane else label))


def _fits(one: Slice, ends: list[int]) -> bool:
    while ends and ends[-1] <= one.start_ns:
        ends.pop()
    return not ends or one.end_ns <= ends[-1]


def _predecessors(graph: Graph, row_of: dict[int, int]) -> dict[int, list[int]]:
    """Predecessors of ops shared by ranks; nobody asks for the others."""
    shared = graph.column("rank") < 0
    out: dict[int, list[int]] = {}
    edges = graph.edges()
    for src, dst in edges[shared[edges[:, 1]]].tolist():
        if src in row_of:
            out.setdefault(dst, []).append(src)
    return out


def _zeros_ns(clock: OneClock, steps: Sequence[int]) -> list[int]:
    """Where the first step begins, on each trace.

    A rank whose clock nothing pins begins at its own step, if that is further from the first one's than ten of
    its lengths: then their clocks are not one.
    """
    starts = [int(trace.step_bounds[steps[0], 0]) for trace in clock.traces]
    near = 10 * max(int(trace.step_ns().max()) for trace in clock.traces)
    pinned = [math.isfinite(fact["uncertainty_ns"]) for fact in clock.facts]
    together = [known or abs(start - starts[0]) <= near for start, known in zip(starts, pinned, strict=True)]
    zero = min(start for start, one in zip(starts, together, strict=True) if one)
    return [zero if one else start for start, one in zip(starts, together, strict=True)]


def _arrows(traces: Sequence[RankTrace], first: int) -> list[Arrows]:
    """Per trace, the arrows of its SEND and RECV rows: from every SEND with payload to the RECV of its first byte."""
    out: list[Arrows] = [{} for _ in traces]
    found = match_messages(traces)
    sends = np.stack([found.send_trace, found.send_row])
    for number, at in enumerate(np.unique(sends, axis=1, return_index=True)[1].tolist(), first):
        sender, receiver = int(found.send_trace[at]), int(found.recv_trace[at])
        send, recv = int(found.send_row[at]), int(found.recv_row[at])
        if traces[sender].names[traces[sender].name[send]] == PAYLOAD:
            out[sender].setdefault(send, []).append(("s", number))
            out[receiver].setdefault(recv, []).append(("f", number))
    return out


def _events(one: Slice, track: tuple[int, int]) -> Iterator[Event]:
    where = {"ts": one.start_ns / 1e3, "pid": track[0], "tid": track[1]}
    more = {"dur": (one.end_ns - one.start_ns) / 1e3, "args": one.args}
    yield {"ph": "X", "name": one.name, "cat": one.category, **where, **more}
    is_message = one.category.split(",")[1:2] in (["send"], ["recv"])
    cause = "critical path" if one.category == "critical" else "message" if is_message else "collective"
    for phase, number in one.flows:
        yield {"ph": phase, "id": number, "name": cause, "cat": cause, "bp": "e", **where}


def _file_order(event: Event) -> tuple[float, int, float]:
    """By time; a slice before what it encloses and the arrows that bind to it, an arrow's start before its end."""
    return event["ts"], "Xsf".index(event["ph"]), -event.get("dur", 0.0)


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}
