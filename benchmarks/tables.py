"""Results as the Markdown tables of ``docs/benchmarks.md``; a table there is never typed by hand.

A table lies between ``<!-- NAME -->`` and ``<!-- /NAME -->``; what is between them is replaced. ``python -m
benchmarks.tables KIND RESULT.json DOCUMENT.md`` writes the table of a result printed earlier with ``--json``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Table:
    """Markdown under a name."""

    name: str
    text: str

    def into(self, document: Path) -> None:
        """Put it between its markers in ``document``.

        Raises:
            ValueError: the document has no such markers.
        """
        begin, end = f"<!-- {self.name} -->", f"<!-- /{self.name} -->"
        whole = document.read_text()
        if not re.search(f"{re.escape(begin)}.*{re.escape(end)}", whole, re.DOTALL):
            raise ValueError(f"{document}: no markers {begin} … {end}")
        head, _, rest = whole.partition(begin)
        document.write_text(f"{head}{begin}\n{self.text}\n{end}{rest.partition(end)[2]}")


def accuracy_table(result: dict[str, Any]) -> Table:
    """Of ``benchmarks.accuracy``."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        **_IDENTITY,
        "measured ms": lambda c: _ms(c["measured_ms"]),
        "middle half": lambda c: "–".join(map(_ms, c["measured_middle_half_ms"])),
        "replayed ms": lambda c: _ms(c["replayed_ms"]),
        "error": lambda c: _pct(c["error_pct"]),
        "Daydream's": lambda c: _pct(c["daydream_error_pct"]),
        "clocks not aligned": lambda c: _pct(c["unaligned_error_pct"]),
        "noise floor": lambda c: _pct(c["noise_floor_pct"], ""),
        "runs": lambda c: str(c["runs"]),
        "while capturing": lambda c: _pct(c["capture_overhead_pct"]),
        "after": lambda c: _pct(c["after_overhead_pct"]),
    }
    total = result["summary"]
    words = f"{total['cells']} cells, {total['failed']} failed"
    if total["cells"]:
        words += (
            f"; absolute error: mean {total['mean_error_pct']:.1f} %, worst {total['worst_error_pct']:.1f} %; "
            f"Daydream's: mean {total['mean_daydream_error_pct']:.1f} %, worst "
            f"{total['worst_daydream_error_pct']:.1f} %; clocks not aligned: mean "
            f"{total['mean_unaligned_error_pct']:.1f} %, worst {total['worst_unaligned_error_pct']:.1f} %"
        )
    return Table("accuracy", _document(result, columns, result["cells"], words))


def plans_table(result: dict[str, Any]) -> Table:
    """Of ``benchmarks.accuracy --plans``."""
    rows = [{**cell, **row} for cell in result["cells"] for row in cell.get("plans", [])]
    rows += [cell for cell in result["cells"] if "error" in cell]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        **_IDENTITY,
        "plan": lambda r: f"{r['plan']} ({r['groups']})",
        "predicted ms": lambda r: _ms(r["predicted_ms"]),
        "measured ms": lambda r: _ms(r["measured_ms"]),
        "error": lambda r: _pct(r["error_pct"]),
        "drift included": lambda r: _pct(r["raw_error_pct"]),
        "default ms": lambda r: _ms(r["default_ms"]),
        "noise": lambda r: _pct(r["noise_pct"], ""),
        "Spearman": lambda r: "all level" if r["spearman"] is None else f"{r['spearman']:.2f}",
    }
    total = result["summary"]
    words = f"{total['plans']} plans, {total['failed']} jobs failed"
    if total["plans"]:
        words += f"; worst error {total['worst_error_pct']:.1f} %, lowest Spearman {total['lowest_spearman']}"
    return Table("plans", _document(result, columns, rows, words))


def speedup_table(result: dict[str, Any]) -> Table:
    """Of ``benchmarks.speedup``."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        **_IDENTITY,
        "default ms": lambda c: _ms(c["default_ms"]),
        "tuned ms": lambda c: _ms(c["tuned_ms"]) + (f" ({_start(c)})" if c.get("start_plan") else ""),
        "speed-up": lambda c: f"{c['default_ms'] / c['tuned_ms']:.3f}×",
        "noise": lambda c: _pct(c["noise_pct"], ""),
        "possible, about": lambda c: f"{c['possible_speedup']:.3f}×",
        "best of the sweep ms": lambda c: f"{_ms(c['sweep_best_ms'])} ({c['sweep_best']})",
        "against it": lambda c: f"{c['sweep_best_ms'] / c['tuned_ms']:.3f}×",
        "Horovod's autotune": lambda c: "–" if c["autotune_speedup"] is None else f"{c['autotune_speedup']:.3f}×",
        "predicted ms": _predicted,
        "verdict in the job": lambda c: str(c["verdict"]).replace("_", " ").lower(),
    }
    total = result["summary"]
    words = f"{total['cells']} cells, {total['failed']} failed"
    if total["cells"]:
        words += (
            f"; speed-up: median {total['median_speedup']:.3f}×, lowest {total['lowest_speedup']:.3f}×; against the "
            f"best of the sweep: median {total['median_vs_sweep']:.3f}×, lowest {total['lowest_vs_sweep']:.3f}×"
        )
    return Table("speedup", _document(result, columns, result["cells"], words))


def fusions_table(result: dict[str, Any]) -> Table:
    """Of ``benchmarks.speedup --fusions``: buckets or groups, layers, and both."""

    def arm(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda c: f"{_ms(c['fusions_ms'][name])} ({c['fusions_ms']['default'] / c['fusions_ms'][name]:.3f}×)"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        **_IDENTITY,
        "default ms": lambda c: _ms(c["fusions_ms"]["default"]),
        "all compiled": arm("everything"),
        "tensors": arm("tensor fusion"),
        "ops": arm("op fusion"),
        "both": arm("both"),
        "noise": lambda c: _pct(c["fusions_noise_pct"], ""),
        "both sets": lambda c: ", ".join(c["fusions_set"]["both"]) or "nothing",
    }
    total = result["summary"]
    return Table(
        "fusions", _document(result, columns, result["cells"], f"{total['cells']} cells, {total['failed']} failed")
    )


def clusters_table(result: dict[str, Any]) -> Table:
    """Of ``benchmarks.speedup``: what compiling is worth in the cells where it can be had."""

    def arm(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda c: f"{_ms(c['clusters_ms'][name])} ({_ms(c['clusters_unshaped_ms'][name])})"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        **_IDENTITY,
        "nothing compiled ms (link free)": arm("nothing"),
        "everything compiled": arm("everything"),
        "dpro's plan": arm("dpro"),
        "layers compiled": lambda c: str(c["compiled_layers"]),
        "against nothing": lambda c: f"{c['clusters_ms']['nothing'] / c['clusters_ms']['dpro']:.3f}×",
        "against everything": lambda c: f"{c['clusters_ms']['everything'] / c['clusters_ms']['dpro']:.3f}×",
        "noise": lambda c: _pct(c["noise_pct"], ""),
    }
    rows = [cell for cell in result["cells"] if "error" in cell or "clusters_ms" in cell]
    return Table("clusters", _document(result, columns, rows, f"{len(rows)} cells"))


def _start(cell: dict[str, Any]) -> str:
    """How a job is started that follows the plan."""
    return f"started with cycle time {cell['start_plan']['cycle_time']:g} ms; in the job {_ms(cell['in_job_ms'])}"


def _predicted(cell: dict[str, Any]) -> str:
    """Of the plan that was followed."""
    told = cell["start_predicted_ms"] if cell.get("start_plan") else cell["predicted_ms"]
    return "–" if told is None else _ms(told)


_IDENTITY: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda c: str(c["model"]),
    "by": lambda c: str(c["comm"]),
    "link": lambda c: str(c["link"]),
    "hosts": lambda c: f"{c['hosts']}, emulated compute" if c["emulated"] else str(c["hosts"]),
}


def search_table(result: dict[str, Any]) -> Table:
    """Of ``benchmarks.search_quality``."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "search for": lambda r: str(r["family"]),
        "instances": lambda r: str(r["instances"]),
        "within 1 % of the optimum": lambda r: _pct(r["within_1pct"], ""),
        "worst": lambda r: f"{r['worst_pct']:.2f} %",
        "candidates a theorem rejected": lambda r: str(r["rejected"]),
        "of these better by more than 0.1 %": lambda r: str(r["filter_misses"]),
        "s": lambda r: f"{r['seconds']:.0f}",
    }
    words = (
        f"{result['instances']} instances, {result['within_1pct']:.1f} % within 1 % of the optimum, "
        f"worst {result['worst_pct']:.2f} %; {result['filter_misses']} of {result['rejected']} rejections wrong"
    )
    rows = [{"family": name, **row} for name, row in result["families"].items()]
    return Table("search", _document({**result, "cuts": {}}, columns, rows, words))


def speed_table(result: dict[str, Any]) -> Table:
    """Of ``benchmarks.search_speed``: a row for each job, a column for each step of its ablation."""
    jobs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in result["searches"]:
        jobs.setdefault((row["model"], row["comm"]), {})[row["step"]] = row
    steps = list(dict.fromkeys(row["step"] for row in result["searches"]))

    def shown(step: str) -> Callable[[dict[str, Any]], str]:
        return lambda job: f"{job[step]['seconds']:.1f} s, {_ms(job[step]['predicted_ms'])}" if step in job else ""

    def shared(job: dict[str, dict[str, Any]]) -> str:
        model, comm = job[steps[0]]["model"], job[steps[0]]["comm"]
        told = [row for row in result["ranks"] if row["model"] == model and comm == "ddp"]
        plan = "" if all(row["same_plan"] for row in told) else ", NOT THE SAME PLAN"
        return ", ".join(f"{row['ranks']}: {row['seconds']:.1f} s ({row['speedup']:.2f}×)" for row in told) + plan

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "model": lambda job: str(job[steps[0]]["model"]),
        "with": lambda job: str(job[steps[0]]["comm"]),
        "ops": lambda job: f"{job[steps[0]]['ops']:,}",
        "now ms": lambda job: _ms(job[steps[0]]["baseline_ms"]),
        **{step: shown(step) for step in steps},
        "on ranks": shared,
    }
    delta = result["delta"]
    words = (
        f"16 workers; seconds, and the step in ms under the plan found. Delta replay of {delta['ops']:,} ops after "
        f"{delta['edits']} edits of a bucket: {delta['median_ratio']:.0f} times as fast as a whole one in the median, "
        f"{delta['least_ratio']:.1f} at least ({delta['median_ratio_with_arrays']:.0f} and "
        f"{delta['least_ratio_with_arrays']:.1f} with the arrays that an edit costs that), "
        f"{'all equal' if delta['equal'] else 'NOT EQUAL'}. On ranks: the search without accelerations, others "
        "helping: medians of seconds, and of the ratios of each round"
    )
    return Table("search-speed", _document({**result, "cuts": {}}, columns, list(jobs.values()), words))


def _document(
    result: dict[str, Any],
    columns: dict[str, Callable[[dict[str, Any]], str]],
    rows: Sequence[dict[str, Any]],
    words: str,
) -> str:
    place = result["place"]
    lines = [f"{place['date']}, commit {place['commit']}, {place['machine']}, {place['seconds']} s. {words}.", ""]
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['model']} | {row['comm']} | failed: {row['error']} |")
        else:
            lines.append(f"| {' | '.join(show(row) for show in columns.values())} |")
    lines += ["", *(f"* {cut}." for cut in result["cuts"].values())]
    return "\n".join(lines)


def _ms(value: float) -> str:
    return f"{value:.1f}"


def _pct(value: float, sign: str = "+") -> str:
    return f"{value:{sign}.1f} %"


def main() -> int:
    """Write the table of a stored result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument(
        "kind", choices=["accuracy", "plans", "speedup", "clusters", "fusions", "search", "search-speed"]
    )
    parser.add_argument("result", type=Path, help="what the benchmark printed with --json")
    parser.add_argument("document", type=Path)
    parser.add_argument("--name", help="of the markers, if not that of the kind: a table of some cells only")
    args = parser.parse_args()
    make = {
        "accuracy": accuracy_table, "plans": plans_table, "speedup": speedup_table, "clusters": clusters_table,
        "fusions": fusions_table, "search": search_table, "search-speed": speed_table,
    }[args.kind]  # fmt: skip
    try:
        table = make(json.loads(args.result.read_text()))
        (Table(args.name, table.text) if args.name else table).into(args.document)
    except (OSError, ValueError) as error:
        print(f"tables: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
