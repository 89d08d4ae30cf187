"""What ``dpro place`` and ``dpro optimize --strategy`` ask of a strategy, and how they say what came of it.

Knows words and the answers' form; who decides is :mod:`dpro.search.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from dpro.cli_output import console, print_json, print_warnings
from dpro.errors import DproError
from dpro.graph.cluster import Cluster, load
from dpro.graph.graph import Graph
from dpro.graph.model_of import model_of, parameters_of
from dpro.search.strategies import DISCO, HETEROG, STRATEGIES, Answer, ask
from dpro.trace.model_graph import ModelGraph, Role, read

#: Times a model's batch.
MOST_BATCH = 1e6
#: Placements that the table shows; the JSON has all.
_SHOWN = 12


def known(strategy: str) -> str:
    """Raises BadParameter: nobody is called so."""
    if strategy not in STRATEGIES:
        raise typer.BadParameter(f"{strategy!r}: there are {', '.join(STRATEGIES)}", param_hint="--strategy")
    return strategy


def place(
    path: Path, cluster: Path, strategy: str, batch: float, seed: int, seconds: float, perfetto: Path | None, json: bool
) -> None:
    """``dpro place``."""
    if not 0 < batch <= MOST_BATCH or not seconds > 0 or seed < 0:
        raise typer.BadParameter(
            f"--batch is above 0 and at most {MOST_BATCH:g}, --seconds above 0, --seed not below 0"
        )
    if perfetto is not None:
        from dpro.report import files

        files.claim(perfetto, path)
    model, devices = read(path), load(cluster)
    found = ask(known(strategy), model, devices, batch=batch, seed=seed, seconds=seconds)
    if perfetto is not None:
        _draw(found, perfetto)
    _say(found, model, devices, json)


def optimize(
    path: Path,
    capture: Callable[[], Graph],
    strategy: str,
    cluster: Path | None,
    output: Path | None,
    json: bool,
) -> None:
    """``dpro optimize --strategy``: of a model's graph, or of what a job's capture tells of its model.

    Args:
        capture: reads ``path`` as a capture.
    """
    from dpro.plan import Plan

    if cluster is None:
        raise typer.BadParameter(f"{strategy} places on devices: say which", param_hint="--cluster")
    devices = load(cluster)
    if output is not None:
        from dpro.report import files

        files.claim(output, path)
    graph = None if _is_graph(path) else capture()
    model = read(path) if graph is None else model_of(graph, path.resolve().name)
    if output is not None and (strategy == HETEROG or (strategy == DISCO and graph is None)):
        raise DproError(f"{path}: what {strategy} finds is nothing that a job can be set to")
    # a running job has one copy of its model in a process, whose layers a plan can spread over devices
    found = ask(strategy, model, devices, by_layer=True)
    if output is not None and not found.fits:
        raise DproError(f"{path}: nothing that was tried fits the memory of {cluster.name}'s devices")
    baseline_ms = found.best_baseline_ms or found.makespan_ms
    fields = settings_of(found, model, graph) if strategy != HETEROG else {}
    plan = Plan(predicted_ms=found.makespan_ms, baseline_ms=baseline_ms, **fields)
    if output is not None:
        with files.naming(output):
            plan.save(output)
    if json:
        from dataclasses import asdict

        print_json(
            {
                "baseline_ms": baseline_ms, "predicted_ms": found.makespan_ms, "evaluations": found.evaluations,
                "seconds": found.seconds, "plan": asdict(plan), "warnings": model.said,
            }
        )  # fmt: skip
        return
    _say(found, model, devices, False)


def settings_of(found: Answer, model: ModelGraph, graph: Graph | None) -> dict[str, Any]:
    """Fields of a plan: where layers run and in what order, or what of a captured model is compiled and reduced
    together."""
    forward = [op.name for op in model.ops if op.role is Role.FORWARD]
    if found.placement:
        place = {name: found.placement[name] for name in forward if name in found.placement}
        return {"placement": place, "order": [name for name in found.order if name in place]}
    if graph is None:
        return {}
    of_unit = {name: [t.name for t in parameters_of(graph, name)] for name in forward}
    owner = {f"{name}/backward/all-reduce": name for name in forward}
    groups = [[t for one in some if one in owner for t in of_unit[owner[one]]] for some in found.fusions["reduces"]]
    compiled = [name for some in found.fusions["ops"] for name in some if name in of_unit]
    return {"tensor_groups": [group for group in groups if group] or None, "compile_regions": compiled or None}


def _is_graph(path: Path) -> bool:
    """Whether the file is a model's graph and no trace."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(4096)
    return b"forward_compute_time=" in begin or b'"fpgaLatency"' in begin or b'"maxFPGAs"' in begin


def _draw(found: Answer, path: Path) -> None:
    from dpro.replay.path import critical_path
    from dpro.report import files
    from dpro.report.perfetto import export

    with files.naming(path):
        export(found.graph, found.played, path, critical=critical_path(found.graph, found.played))


def _say(found: Answer, model: ModelGraph, cluster: Cluster, json: bool) -> None:
    if json:
        document: dict[str, Any] = {
            "makespan_ms": found.makespan_ms, "baselines": found.baselines, "chosen": found.chosen,
            "placement": found.placement, "order": found.order, "splits": found.splits, "fusions": found.fusions,
            "peak_bytes": found.peak_bytes, "fits": found.fits, "evaluations": found.evaluations,
            "seconds": found.seconds, "warnings": model.said,
        }  # fmt: skip
        print_json(document)
        return
    from dpro.report import table

    rows = []
    for name, ms in found.baselines.items():
        rows.append((name, "–" if ms is None else f"{ms:.2f} ms", "does not fit the memory" if ms is None else ""))
    best = found.best_baseline_ms
    about = f"{best / found.makespan_ms:.3f}× the speed of the best of these" if best else ""
    rows.append((table.plain(found.chosen), f"{found.makespan_ms:.2f} ms", about))
    out = console()
    title = f"{table.plain(model.name)} on {len(cluster)} devices, replayed"
    out.print(table.numbers_table(rows, title=title))
    if not found.fits:
        out.print("nothing that was tried fits the memory: this lacks least", style="red")
    for device, peak in found.peak_bytes.items():
        used = sum(where == device for where in found.placement.values())
        out.print(f"{table.plain(device)}: {peak / 1e9:.2f} GB at most, {used} ops alone on it", style="dim")
    for cut in found.splits[:_SHOWN]:
        out.print(f"cut: {table.plain(cut['op'])} in {cut['parts']} by {cut['dimension']}", style="dim")
    for kind, groups in found.fusions.items():
        shown = [" + ".join(group) for group in groups if len(group) > 1][:_SHOWN]
        if shown:
            out.print(f"{kind}: {table.plain('; '.join(shown))}", style="dim", soft_wrap=True)
    out.print(f"{found.evaluations} plans looked at in {found.seconds:.1f} s; --json has the placement", style="dim")
    print_warnings(model.said)
