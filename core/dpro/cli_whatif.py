"""What ``dpro whatif`` asks of a graph, and how it says what came of it: one step, or a curve over worker counts.

Knows words and the answers' form. What an edit does is :mod:`dpro.replay.whatif`'s, what a job of another size is
:mod:`dpro.replay.scale`'s to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from dpro.cli_output import console, print_json, print_sweep, print_warnings
from dpro.errors import TraceError
from dpro.graph.graph import Graph
from dpro.graph.topology import TOPOLOGIES, Link, Network, TopologyError
from dpro.replay import whatif
from dpro.replay.engine import replay
from dpro.replay.scale import Point, compute_only_ns, curve
from dpro.replay.symmetry import SymmetryError
from dpro.search.question import ask, network_of
from dpro.search.sweep import read, sweep


@dataclass(frozen=True)
class Question:
    """The options of the command, as they were given."""

    bandwidth: str | None
    scale: Sequence[str]
    workers: str | None
    topology: str | None
    gpus_per_host: int | None
    inner_bandwidth: str | None
    servers: int | None
    precision: str | None
    compress: str | None

    @property
    def empty(self) -> bool:
        """Whether nothing is asked."""
        return not any(self.__dict__.values())

    def counts(self) -> list[int]:
        """Worker counts asked for.

        Raises:
            BadParameter: options that contradict each other, or say nothing.
        """
        if self.topology is not None and self.topology not in TOPOLOGIES:
            raise typer.BadParameter(f"{self.topology!r}: there are {', '.join(TOPOLOGIES)}", param_hint="--topology")
        if self.topology is not None and self.workers is None:
            raise typer.BadParameter("say among how many: --workers", param_hint="--topology")
        if self.topology == "two-level" and self.gpus_per_host is None:
            raise typer.BadParameter("say how many workers share a host: --gpus-per-host", param_hint="--topology")
        for name, needs in (("gpus_per_host", "two-level"), ("inner_bandwidth", "two-level"), ("servers", "ps")):
            if getattr(self, name) is not None and self.topology != needs:
                option = "--" + name.replace("_", "-")
                raise typer.BadParameter(f"needs --topology {needs}", param_hint=option)
        if self.servers is not None and self.servers < 1:
            raise typer.BadParameter("1 or more; without it there is one on each worker's host", param_hint="--servers")
        try:
            return [int(word) for word in self.workers.split(",")] if self.workers is not None else []
        except ValueError:
            message = f"{self.workers!r}: give a number, or several with commas between"
            raise typer.BadParameter(message, param_hint="--workers") from None


@dataclass
class _Answer:
    """``curve``: empty unless more than one worker count was asked for; ``predicted_ns`` is its last point's."""

    baseline_ns: int
    predicted_ns: int
    assumptions: list[str]
    curve: list[Point]


def answer(path: Path, load: Callable[[], Graph], asked: Question, json: bool) -> None:
    """Print what the step of the trace at ``path`` would take.

    Raises:
        TraceError: the question cannot be asked of this trace.
        BadParameter: the options make no question.
    """
    counts = asked.counts()
    graph = load()
    try:
        found = _answer(graph, asked, counts)
    except (whatif.WhatIfError, TopologyError, SymmetryError) as error:
        raise TraceError(path, str(error)) from error
    baseline_ms, predicted_ms = found.baseline_ns / 1e6, found.predicted_ns / 1e6
    points = [
        {"workers": p.workers, "predicted_ms": p.predicted_ns / 1e6, "efficiency_pct": 100 * p.efficiency}
        for p in found.curve
    ]
    if json:
        told: dict[str, Any] = {"curve": points} if points else {}
        told |= {"baseline_ms": baseline_ms, "predicted_ms": predicted_ms, "assumptions": found.assumptions}
        print_json({**told, "warnings": graph.warnings})
        return
    from dpro.report import table

    speed = f"{baseline_ms / predicted_ms:.3f}× the speed" if predicted_ms else ""
    rows = [("now", f"{baseline_ms:.2f} ms", "replayed")]
    if points:
        rows += [
            (f"{p['workers']:,} workers", f"{p['predicted_ms']:.2f} ms", f"{p['efficiency_pct']:.1f} % efficient")
            for p in points
        ]
    else:
        rows.append(("then", f"{predicted_ms:.2f} ms", speed))
    out = console()
    out.print(table.numbers_table(rows, title=f"What if  ·  {path.name}"))
    for assumption in found.assumptions:
        out.print(f"assumed: {table.plain(assumption)}", style="dim", soft_wrap=True)
    print_warnings(graph.warnings)


def answer_all(path: Path, load: Callable[[], Graph], file: Path, json: bool) -> None:
    """:func:`answer` for every question in ``file``."""
    questions = read(file)
    graph = load()
    print_sweep(path.name, replay(graph).makespan_ns / 1e6, sweep(path, questions), graph.warnings, json)


def _answer(graph: Graph, asked: Question, counts: Sequence[int]) -> _Answer:
    measured = network_of(graph)
    baseline_ns = replay(graph).makespan_ns
    question = {"scale": asked.scale, "precision": asked.precision, "compress": asked.compress}
    if asked.topology is None:  # else it is that of the network's links
        question["bandwidth"] = asked.bandwidth
    assumptions = ask(graph, question)
    if asked.topology is not None:
        networks, said = _networks(graph, asked, counts, measured)
        points = curve(graph, networks)
        assumptions.append(said)
    else:
        points = []
        for count in counts:
            alone_ns, mark = compute_only_ns(graph), graph.mark()
            said = whatif.set_workers(graph, count, latency_ns=measured.get("latency_ns", 0.0)).assumption
            ns = replay(graph).makespan_ns
            points.append(Point(count, ns, alone_ns / ns if ns else 1.0))
            graph.undo(mark)
            if count == counts[-1]:
                assumptions.append(said.replace(f"→ {count} ", f"→ {', '.join(map(str, counts))} ", 1))
    predicted_ns = points[-1].predicted_ns if points else replay(graph).makespan_ns
    if len(points) < 2:
        return _Answer(baseline_ns, predicted_ns, assumptions, [])
    alone_ms = points[0].efficiency * points[0].predicted_ns / 1e6
    assumptions.append(f"efficiency: the step without any transfer, {alone_ms:.2f} ms, over the predicted one")
    return _Answer(baseline_ns, predicted_ns, assumptions, points)


def _networks(
    graph: Graph, asked: Question, counts: Sequence[int], measured: dict[str, float]
) -> tuple[list[Network], str]:
    """A network for each worker count, and what they assume."""
    link = _measured_link(graph, measured)
    between, inner = _at_bandwidth(link, asked.bandwidth), _at_bandwidth(link, asked.inner_bandwidth)
    networks = [
        Network(asked.topology or "ring", count, between, inner, asked.gpus_per_host or 1, asked.servers or 0)
        for count in counts
    ]
    figures = _figures(between, asked.bandwidth)
    if asked.topology == "two-level":
        figures += f" between hosts, {_figures(inner, asked.inner_bandwidth)} inside"
    now = whatif.workers_of(graph)
    return networks, (
        f"{now} → {', '.join(map(str, counts))} workers: {networks[0].assumption}; a message takes {figures}; "
        "same work per worker, none slower than those measured"
    )


def _figures(link: Link, given: str | None) -> str:
    rate = f"its bytes at {8 / link.ns_per_byte:.3g} Gbit/s" if link.ns_per_byte else "no time for its bytes"
    return f"{link.latency_ns / 1e3:.3g} µs and {rate} ({'as measured' if given is None else given})"


def _measured_link(graph: Graph, measured: dict[str, float]) -> Link:
    """A link of the captured ring, from what its all-reduces took: 2 (n-1) steps, 2 (n-1)/n of the bytes."""
    workers = whatif.workers_of(graph)
    if workers < 2:
        raise whatif.WhatIfError("the trace is of 1 worker: it holds no transfer to scale to more")
    if not measured:
        raise whatif.WhatIfError("this trace has no sizes of collectives to fit a link's latency and bandwidth from")
    steps = 2 * (workers - 1)
    return Link(measured.get("latency_ns", 0.0) / steps, measured["ns_per_byte"] * workers / steps)


def _at_bandwidth(link: Link, text: str | None) -> Link:
    if text is None:
        return link
    factor = whatif.parse_bandwidth(text, 8 / link.ns_per_byte if link.ns_per_byte else None)
    return replace(link, ns_per_byte=link.ns_per_byte / factor)
