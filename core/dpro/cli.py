"""The ``dpro`` command: replay, align, optimize, place, whatif, export, report, diff, doctor.

Turns words into calls of the floors below and their answers into a table or one JSON document;
computes nothing itself. Everything heavy is imported inside the command that needs it. Exit codes:
0 fine, 2 bad input, 3 a bug of dpro; an error is one line on stderr, whatever happened.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from dpro.cli_output import console, fail, failed_output, print_json, print_warnings, say
from dpro.errors import DproError, TraceError

if TYPE_CHECKING:
    from dpro.graph.graph import Graph
    from dpro.report.summary import Summary
    from dpro.trace.model import RankTrace

app = typer.Typer(
    name="dpro",
    help="Profile, replay and tune distributed training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A run folder, a trace file, or a folder of them.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
F = TypeVar("F", bound=Callable[..., None])


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script. ``arguments`` default to ``sys.argv[1:]``."""
    import warnings

    if not os.environ.get("DPRO_DEBUG"):
        warnings.simplefilter("ignore")  # what concerns the reader is in `warnings` of the answer
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`): as Python's print, say nothing there
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (and the next file must not take its number)
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a name no terminal can show must not end a command
    try:
        code = app(list(sys.argv[1:] if arguments is None else arguments), prog_name="dpro", standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:  # of --version and --help, which no command guards
        code = failed_output(error)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # Typer's own complaints about the command line, which it would show in a box of many lines.
        # Where no command is named it has printed the help by now and there is nothing to add.
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "dpro"
        message = error.format_message()
        if message and type(error).__name__ != "NoArgsIsHelpError":
            say(f"{where}: {message} (see `{where} --help`)")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        say("dpro: interrupted")
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def command(function: F) -> F:
    """Register a command whose every failure is one line on stderr and an exit code."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except DproError as error:
            fail(str(error), 2)
        except OSError as error:
            raise typer.Exit(failed_output(error)) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if hasattr(error, "format_message"):
                raise
            if os.environ.get("DPRO_DEBUG"):
                raise
            fail(f"dpro: internal error: {type(error).__name__}: {error} (DPRO_DEBUG=1 shows where)", 3)

    app.command(name=function.__name__.rstrip("_"))(guarded)
    return function


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from dpro import __version__

        typer.echo(f"dpro {__version__}")
        raise typer.Exit


@command
def replay(path: PathArgument, json: Json = False) -> None:
    """Replay a captured step: how well it fits, and where its time goes."""
    summary = _summary(path)
    error = summary.error_pct
    if json:
        print_json(
            {
                "ranks": summary.ranks,
                "steps": summary.steps,
                "ops": summary.ops,
                "measured_ms": summary.measured_ms,
                "reference_ms": summary.reference_ms,
                "reference": summary.reference,
                "replayed_ms": summary.replayed_ms,
                "error_pct": error,
                "daydream_ms": summary.daydream_ms,
                "critical_path": summary.critical,
                "breakdown_ms": summary.breakdown_ms,
                "links": [asdict(row) for row in summary.links],
                "attributed_share": summary.attributed_share,
                "warnings": summary.warnings,
            }
        )
        return
    from dpro.report import table

    out = console()
    against = "" if error is None else f"{error:.1f} % from {summary.reference}"
    rows = [
        ("measured", f"{summary.measured_ms:.2f} ms", "mean step, under the profiler"),
        ("replayed", f"{summary.replayed_ms:.2f} ms", against),
        ("Daydream", f"{summary.daydream_ms:.2f} ms", "the same step by the estimate of Daydream (ATC '20)"),
    ]
    if summary.reference != "measured":
        rows.insert(1, ("un-profiled", f"{summary.reference_ms:.2f} ms", "median step with nothing attached"))
    title = f"{summary.title}  ·  {summary.size}"
    out.print(table.numbers_table(rows, title=title))
    out.print(table.breakdown_bar(summary.breakdown_ms))
    out.print(table.ops_table(summary.top, title="Critical path"))
    if summary.links:
        known = f"Links, {100 * (summary.attributed_share or 0):.1f} % of their payload told to which collective"
        out.print(table.links_table(summary.links, title=known))
    out.print(f"{summary.advice}\n", soft_wrap=True)
    print_warnings(summary.warnings)


@command
def align(path: PathArgument, json: Json = False) -> None:
    """How far the clocks of the ranks are apart, and how sure that is."""
    from dpro.clock.align import align as find

    traces = _load(path)
    found = find(traces)
    warnings = [*dict.fromkeys(line for trace in traces for line in trace.warnings), *found.warnings]
    ranks = [
        {
            "rank": trace.meta.rank if trace.meta.rank >= 0 else index,
            "host": trace.meta.host,
            "offset_us": found.offset_ns[index] / 1e3,
            "drift_ppm": found.drift_ppm[index],
            "uncertainty_us": _us(found.uncertainty_ns[index]),
            "residual_us": _us(found.residual_ns[index]),
            "source": found.source[index],
        }
        for index, trace in enumerate(traces)
    ]
    residual_us = max((rank["residual_us"] for rank in ranks if rank["residual_us"] is not None), default=None)
    if json:
        print_json({"ranks": ranks, "residual_us": residual_us, "warnings": warnings})
        return
    from dpro.report import table

    left = "" if residual_us is None else f"ends of collectives then differ by {residual_us:.1f} us"
    console().print(table.clocks_table(ranks, f"Clocks  ·  {path.resolve().name}", left))
    print_warnings(warnings)


@command
def optimize(
    path: PathArgument,
    passes: Annotated[
        str, typer.Option(help="Passes to use, by name, with commas between.")
    ] = "tensor_fusion,op_fusion,cycle_time,tensor_partition,in_flight",
    strategy: Annotated[str, typer.Option(help="Who chooses: dpro, or fastt, heterog, disco with --cluster.")] = "dpro",
    cluster: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Devices and links.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the best plan here.")] = None,
    json: Json = False,
) -> None:
    """Search for a faster plan, judged by replay."""
    from dpro.adapter import Knob
    from dpro.passes import registry
    from dpro.passes.fused_partition import FusedPartition
    from dpro.planning import inform
    from dpro.report import files
    from dpro.search import fused_partition
    from dpro.search.critical_path import optimize as search
    from dpro.search.others import try_out

    if strategy != "dpro":
        from dpro.cli_place import known, optimize

        return optimize(path, lambda: _assemble(path, _load(path)), known(strategy), cluster, output, json)
    if output is not None:
        files.claim(output, path)
    named = {name: registry.find(name) for name in filter(None, (part.strip() for part in passes.split(",")))}
    others = [edit for name, edit in named.items() if not (registry.built_in(name) and edit.knobs)]
    knobs = {knob for edit in named.values() if edit not in others for knob in edit.knobs}
    what_if = FusedPartition.name in named
    if what_if and (len(named) > 1 or output is not None):
        raise typer.BadParameter(f"{FusedPartition.name} is a what-if: alone, and without -o", param_hint="--passes")
    traces = _load(path)
    graph = _assemble(path, traces)
    # what a plan for the library that was seen can hold
    horovods = {Knob.GROUPS, Knob.CYCLE_TIME, Knob.COMPILE_REGIONS}
    able = horovods if graph.info.get("negotiated") else set(Knob) - horovods
    able.discard(Knob.PARTITIONS)  # BytePS has one bound for all gradients
    inform(graph, traces)
    if what_if:  # with a search of its own
        found, others = fused_partition.search(graph), []
    else:
        found = search(graph, knobs=knobs & able, fingerprint=_fingerprint(traces))
    tried = try_out(graph, others, found, knobs=able, fingerprint=_fingerprint(traces))
    best = next(iter([*tried.candidates, *found.at_start]), None)
    warnings = [*graph.warnings, *tried.warnings]
    if best is None:
        warnings.append(f"no plan is faster than the settings captured ({found.stopped})")
    elif output is not None:
        with files.naming(output):
            best.plan.save(output)
    if json:
        plans, at_start = (
            [
                {
                    "name": c.name,
                    "predicted_ms": c.predicted_ms,
                    "plan": asdict(c.plan) if c.plan.settings() else None,
                    "groups": [[graph.tensors[t].name for t in group] for group in c.groups],
                }
                for c in some
            ]
            for some in (tried.candidates, found.at_start)
        )
        print_json(
            {
                "baseline_ms": found.baseline_ms,
                "predicted_ms": best.predicted_ms if best else found.baseline_ms,
                "evaluations": found.evaluations,
                "seconds": found.seconds,
                "plan": asdict(best.plan) if best and best.plan.settings() else None,
                "candidates": plans,
                "at_start": at_start,
                "whatifs": [{"name": name, "predicted_ms": ms} for name, ms in tried.whatifs],
                "stopped": found.stopped,
                "warnings": warnings,
            }
        )
        return
    from dpro.report import table

    rows = [table.ArmRow("as captured", found.baseline_ms, ratio=1.0)]
    shown = [(c.name, c.predicted_ms) for c in tried.candidates]
    shown += [(f"{c.name}, if started so", c.predicted_ms) for c in found.at_start]
    shown += [(f"{name}, a what-if", ms) for name, ms in tried.whatifs]
    rows += [table.ArmRow(name, ms, ratio=found.baseline_ms / ms if ms else None) for name, ms in shown]
    notes = [f"{found.evaluations} replays in {found.seconds:.1f} s; {found.stopped}"]
    if what_if:
        notes.append("a what-if: no library fuses what goes to servers")
    elif best is not None:
        notes.append(f"plan: {output}" if output else "-o plan.json writes the first of these plans")
    console().print(table.verdict_table(rows, "PREDICTED", notes))
    print_warnings(warnings)


@command
def place(
    graph: Annotated[Path, typer.Argument(metavar="GRAPH", help="A model's layers or operators, with their times.")],
    cluster: Annotated[Path, typer.Option(metavar="FILE.yaml", help="Devices and links.")],
    strategy: Annotated[str, typer.Option(help="fastt, heterog or disco.")] = "fastt",
    batch: Annotated[float, typer.Option(help="Of the batch that the graph was profiled with.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of a search that draws.")] = 0,
    seconds: Annotated[float, typer.Option(help="For a search that ends when its time is up.")] = 30.0,
    perfetto: Annotated[Path | None, typer.Option(metavar="OUT", help="The schedule, for ui.perfetto.dev.")] = None,
    json: Json = False,
) -> None:
    """Where each op of a model runs, in which order, judged by replay."""
    from dpro.cli_place import place as answer

    answer(graph, cluster, strategy, batch, seed, seconds, perfetto, json)


@command
def whatif(
    path: PathArgument,
    bandwidth: Annotated[str | None, typer.Option(help="A factor (2x) or a speed (10gbit, 800mbit).")] = None,
    scale: Annotated[
        list[str] | None, typer.Option(metavar="REGEX=F", help="Ops so named take F times as long.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Collectives among this many ranks; of several, a curve.")
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="How the workers are joined: ring, two-level, tree or ps.")
    ] = None,
    gpus_per_host: Annotated[int | None, typer.Option(help="Of two-level: workers on a host.")] = None,
    inner_bandwidth: Annotated[
        str | None, typer.Option(help="Of two-level: as --bandwidth, inside a host; else as measured.")
    ] = None,
    servers: Annotated[
        int | None, typer.Option(help="Of ps: servers on hosts of their own; else one on each worker's host.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="bf16[+gradients][=F]", help="Arithmetic in 16 bit (or fp16).")
    ] = None,
    compress: Annotated[str | None, typer.Option(metavar="bf16", help="Gradients reduced in 16 bit (or fp16).")] = None,
    sweep: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Many questions: a list, or a product of lists.")
    ] = None,
    json: Json = False,
) -> None:
    """Predict a step with another network, faster ops, more workers or 16 bit."""
    from dpro.cli_whatif import Question, answer, answer_all

    asked = Question(
        bandwidth, scale or [], workers, topology, gpus_per_host, inner_bandwidth, servers, precision, compress
    )
    if (sweep is None) == asked.empty:
        raise typer.BadParameter(
            "ask something: --bandwidth, --scale, --workers, --precision or --compress, or else --sweep alone"
        )

    def load() -> Graph:
        return _assemble(path, _load(path))

    if sweep is not None:
        answer_all(path, load, sweep, json)
    else:
        answer(path, load, asked, json)


@command
def export(
    path: PathArgument,
    perfetto: Annotated[Path, typer.Option(metavar="OUT", help="Trace for ui.perfetto.dev (.json or .json.gz).")],
) -> None:
    """Write the replayed and the measured schedule as one trace for Perfetto."""
    from dpro.replay.engine import replay as run
    from dpro.replay.path import critical_path
    from dpro.report import files
    from dpro.report.perfetto import export as write

    files.claim(perfetto, path)
    traces = _load(path)
    graph = _assemble(path, traces, messages=True)
    result = run(graph)
    with files.naming(perfetto):
        events = write(graph, result, perfetto, critical=critical_path(graph, result), measured=traces)
    typer.echo(f"{perfetto}: {events:,} events of {graph.ranks} ranks; open it at ui.perfetto.dev")
    print_warnings(graph.warnings)


@command
def report(
    path: PathArgument,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="OUT.html", help="Where to.")] = None,
) -> None:
    """Write one HTML page that needs no network: figures, breakdown, top ops, warnings."""
    from dpro.report import files, html, table
    from dpro.report.outcome import read_outcome
    from dpro.trace.store import RunFolder

    folder, outcome = RunFolder(path), read_outcome(path)
    ours = bool(folder.trace_files())
    if outcome is not None and not ours and output is None:
        # The run of a given plan: nothing was captured that a page could show, but there is a verdict.
        reason = table.printable(outcome.reason)
        if outcome.rows:
            console().print(table.verdict_table(outcome.rows, outcome.verdict, [reason]))
        else:
            typer.echo(f"{table.printable(outcome.verdict)}: {reason}")
        print_warnings([f"{path}: no traces in it, so no page is written"])
        return
    if output is None:  # a run folder keeps its own report
        output = folder.page_file if ours else Path(path.resolve().name.split(".")[0] + ".html")
    files.claim(output, path)
    summary = _summary(path)
    with files.naming(output):
        html.write(output, summary, outcome.rows if outcome else (), outcome.verdict if outcome else "")
    typer.echo(f"{output}")


@command
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run folder or traces: before.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same: after.")],
    top: Annotated[int, typer.Option(help="Op names to show in the table (the JSON has all).")] = 20,
    json: Json = False,
) -> None:
    """Compare two captures: step time, and time by op name."""
    from dpro.report.diff import compare

    graphs = [_assemble(path, _load(path)) for path in (a, b)]
    before, after = (graph.info["measured_ns"] / 1e6 for graph in graphs)
    rows = compare(*graphs)
    warnings = [f"{name}: {text}" for name, graph in zip("AB", graphs, strict=True) for text in graph.warnings]
    if json:
        print_json(
            {
                "a_ms": before,
                "b_ms": after,
                "change_ms": after - before,
                "change_pct": 100 * (after - before) / before if before else None,
                "ops": rows,
                "warnings": warnings,
            }
        )
        return
    from dpro.report import table

    change = f"{after - before:+.2f} ms" + (f", {100 * (after - before) / before:+.1f} %" if before else "")
    out = console()
    out.print(
        table.numbers_table([("A", f"{before:.2f} ms", str(a)), ("B", f"{after:.2f} ms", f"{b}  ({change})")], "Step")
    )
    changed = [row for row in rows if row["change_ms"] or row["a_count"] != row["b_count"]]
    if changed:
        title = "Ops, per rank and step, largest change first"
        out.print(table.diff_table(changed[:top], "A ms", "B ms", title=title))
    left = [f"{len(changed) - top:,} more changed"] if len(changed) > top else []
    out.print("; ".join([*left, f"{len(rows) - len(changed):,} op names unchanged"]), style="dim")
    print_warnings(warnings)


@command
def doctor(json: Json = False) -> None:
    """What this environment allows, and what to do about the rest."""
    from dpro.report.doctor import examine

    findings = examine()
    if json:
        rows = [{"what": f.what, "status": f.status, "found": f.found, "todo": f.todo} for f in findings]
        print_json({"findings": rows, "warnings": [f"{f.what}: {f.found}" for f in findings if f.status == "warn"]})
        return
    from dpro.report import table

    console().print(table.findings_table([(f.status, f.what, f.found, f.todo) for f in findings], "dpro doctor"))


# -- between words and floors ------------------------------------------------------------------


def _load(path: Path) -> list[RankTrace]:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TraceError(path, "neither a file nor a folder")  # a pipe would hang until someone writes
    from dpro.trace.store import load

    traces: list[RankTrace] = load(path)
    return traces


def _assemble(path: Path, traces: list[RankTrace], messages: bool = False) -> Graph:
    """The median step, alone: a replay of the very window it is compared with could not be wrong."""
    from dpro.graph.assemble import assemble
    from dpro.replay.whatif import MAX_TOTAL_NS, total_ns

    graph = assemble(traces, messages=messages)
    if not len(graph):
        raise TraceError(path, "no op in its steps: nothing to replay")
    if total_ns(graph) >= MAX_TOTAL_NS:
        raise TraceError(path, "its step would last for years: its times cannot be right")
    graph.warnings = list(dict.fromkeys(graph.warnings))
    return graph


def _us(ns: float) -> float | None:
    """None for what is not known."""
    return ns / 1e3 if math.isfinite(ns) else None


def _summary(path: Path) -> Summary:
    from dpro.report.summary import summarise

    return summarise(_assemble(path, _load(path)), path.resolve().name)


def _fingerprint(traces: list[RankTrace]) -> dict[str, str]:
    """Whom a plan fits, as the adapter that captured the traces said; empty for imported ones."""
    told = traces[0].meta.extra.get("fingerprint", {})
    return {str(key): str(value) for key, value in told.items()} if isinstance(told, dict) else {}
