"""What the tuner says and writes: one line at each turn, one table and a run folder at the end.

Rank 0 speaks for all. Output goes to stderr through rich; files go to the run folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpro import __version__
from dpro.errors import TraceError
from dpro.outcome import Outcome, Verdict
from dpro.settings import Settings
from dpro.trace.store import RunFolder
from dpro.verdict import timing

if TYPE_CHECKING:
    from rich.table import Table

    from dpro.report.table import ArmRow


class Session:
    """The voice of one tuner; silent on every rank but 0."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings = settings
        self._rank = rank

    @cached_property
    def folder(self) -> RunFolder:
        """The run folder; made when the first file is written to it."""
        return RunFolder.new(Path(self._settings.runs_dir))

    def keep_traces(self, blobs: dict[int, bytes]) -> None:
        """Into the run folder, by rank. A disk that is full or read-only costs the files, not the tuning."""
        try:
            for rank, blob in blobs.items():
                self.folder.save_trace(rank, blob)
        except (OSError, TraceError) as error:
            self.say(f"traces not kept: {error}")

    def say(self, text: str, everywhere: bool = False) -> None:
        """One line, on rank 0 (or on the rank that is alone with its trouble)."""
        if self._rank == 0 or everywhere:
            who = "dpro" if self._rank == 0 else f"dpro (rank {self._rank})"
            _write(f"{who}: {text}\n")

    def debug(self) -> None:
        """The stack of the error at hand, only where it was asked for."""
        if os.environ.get("DPRO_DEBUG"):
            traceback.print_exc()

    def conclude(self, outcome: Outcome, everywhere: bool) -> None:
        """The last word: a line if nothing was measured, else the table and the files."""
        if outcome.verdict is Verdict.STEPPED_ASIDE:
            self.say(f"stepped aside: {outcome.reason}", everywhere)
        if self._rank != 0 or outcome.baseline_ms is None:
            return
        from rich.console import Console

        from dpro.report.table import to_text

        table, notes = outcome_table(outcome), "".join(f"{note}\n" for note in outcome_notes(outcome))
        console = Console(stderr=True)
        with console.capture() as printed:
            console.print(table)
        _write(printed.get() + notes)
        try:
            files = self._write(outcome, to_text(table) + notes)
            self.say("wrote " + ", ".join(str(path) for path in files))
        except OSError as error:
            self.say(f"report not written: {error}")

    def _write(self, outcome: Outcome, text: str) -> list[Path]:
        """The run folder's files; returns those a person will open."""
        folder = self.folder
        folder.path.mkdir(parents=True, exist_ok=True)
        report, timeline = folder.report_file, folder.timeline_file
        report.write_text(text)
        facts: dict[str, Any] = {"verdict": outcome.verdict.value, "reason": outcome.reason, **outcome.metrics()}
        facts["rows"] = [asdict(row) for row in outcome_rows(outcome)]
        facts["arms"] = [
            {"name": arm.name, "predicted_ms": arm.predicted_ms, "times_ms": arm.times_ms()} for arm in outcome.arms
        ]
        folder.outcome_file.write_text(json.dumps(facts, indent=1))
        files = [report]
        if outcome.plan is not None and outcome.verdict in (Verdict.KEPT, Verdict.SUGGESTED):
            outcome.plan.save(folder.plan_file)
            files.append(folder.plan_file)
        planned = outcome.planned
        if (start := outcome.at_start()) is not None:
            start[1].save(folder.start_plan_file)
            files.append(folder.start_plan_file)
        told = {"verdict": outcome.verdict.value, "dpro": __version__, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        folder.save_meta(told | (planned.job if planned else {}))
        if planned is None or planned.graph is None or planned.replay is None:
            return files
        from dpro.report import html, perfetto
        from dpro.report.summary import summarise

        page = folder.page_file
        summary = summarise(planned.graph, "dpro", planned.warnings)
        html.write(page, summary, outcome_rows(outcome), outcome.verdict.value)
        perfetto.export(planned.graph, planned.replay, timeline)
        return [*files, page, timeline]


def _write(text: str) -> None:
    """To stderr; a job without one, or with a broken one, goes on without our lines."""
    stream = sys.stderr
    if stream is None:  # print() would take stdout
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
        file = getattr(getattr(stream, "buffer", None), "raw", None)
        if type(stream) is not io.TextIOWrapper or not isinstance(file, io.FileIO):
            print(text, end="", file=stream, flush=True)
            return
        # past the buffers: what a full disk leaves in them would fail Python's own flush at the job's end
        left = text.encode(stream.encoding, "backslashreplace")
        while left and (written := file.write(left)):
            left = left[written:]


def outcome_rows(outcome: Outcome) -> list[ArmRow]:
    """Every arm that was measured or predicted."""
    from dpro.report.table import ArmRow

    base_ms = outcome.baseline_ms or 0.0
    in_force = outcome.plan if outcome.verdict is Verdict.KEPT else None
    rows = []
    # predictions are ratios of two replays times what was measured before capture: so is the first row's
    before_ms = timing(outcome.arms[0].windows[0].times_ms).median_ms if outcome.arms[0].windows else None
    for arm in outcome.arms:
        timed = timing(arm.times_ms())
        measured = timed.median_ms if timed.steps else None
        ratio = base_ms / measured if measured else None
        mark = "in force" if arm.plan == in_force and outcome.verdict is not Verdict.STEPPED_ASIDE else ""
        if outcome.comparison is not None and arm.plan is not None and arm.plan == outcome.plan:
            ratio = 1 / outcome.comparison.ratio  # against the baseline of its own time
            mark = mark or "judged"
        elif arm.plan is None:
            ratio = 1.0 if measured else None
        rows.append(
            ArmRow(
                name=arm.name,
                predicted_ms=before_ms if arm.plan is None else arm.predicted_ms,
                measured_ms=measured,
                spread_ms=timed.error_ms if timed.steps else None,
                ratio=ratio,
                mark=mark,
            )
        )
    return rows


def outcome_table(outcome: Outcome) -> Table:
    """The arms under the verdict."""
    from dpro.report.table import verdict_table

    return verdict_table(outcome_rows(outcome), outcome.verdict.value)


def outcome_notes(outcome: Outcome) -> list[str]:
    """What the table means, a line each."""
    notes = [outcome.reason]
    if outcome.replayed_ms and outcome.planned and outcome.planned.unprofiled_ms:
        error = 100 * (outcome.replayed_ms / timing(outcome.planned.unprofiled_ms).median_ms - 1)
        notes.append(f"replay of your settings {error:+.1f} % of the time measured before capture")
    if outcome.predicted_ms and outcome.measured_ms:
        error = 100 * (outcome.predicted_ms / outcome.measured_ms - 1)
        notes.append(f"predicted step time of the judged plan {error:+.1f} % of the measured one")
    if outcome.capture_overhead_pct is not None:
        notes.append(f"steps took {outcome.capture_overhead_pct:+.1f} % while they were captured")
    if outcome.planned and outcome.planned.peak_bytes is not None:
        notes.append(f"a rank has {outcome.planned.peak_bytes / 1e6:.1f} MB at most under your settings, as replayed")
    if (start := outcome.at_start()) is not None:
        name, plan = start
        notes.append(
            f"started anew with {name} the job is predicted to take {plan.predicted_ms:.1f} ms a step "
            "(DPRO=apply DPRO_PLAN=<its at_start.json>)"
        )
    if outcome.planned:
        notes += outcome.planned.warnings[:5]
    return notes
