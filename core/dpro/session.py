"""What the tuner says and writes: one line at each turn, one table and a run folder at the end.

Rank 0 speaks for all. Output goes to stderr through rich; files go to the run folder.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dpro.settings import Settings

if TYPE_CHECKING:
    from dpro.tuner import Outcome


class Session:
    """The voice of one tuner; silent on every rank but 0."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings = settings
        self._rank = rank

    @cached_property
    def folder(self) -> Path:
        """The run folder, made on first use."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        base = Path(self._settings.runs_dir)
        for attempt in range(1000):
            path = base / (stamp if attempt == 0 else f"{stamp}-{attempt}")
            try:
                path.mkdir(parents=True)
                return path
            except FileExistsError:
                continue
        raise FileExistsError(base / stamp)

    @property
    def plan_file(self) -> Path:
        return self.folder / "plan.json"

    def say(self, text: str, everywhere: bool = False) -> None:
        """One line, on rank 0 (or on the rank that is alone with its trouble)."""
        if self._rank == 0 or everywhere:
            who = "dpro" if self._rank == 0 else f"dpro (rank {self._rank})"
            print(f"{who}: {text}", file=sys.stderr, flush=True)

    def debug(self) -> None:
        """The stack of the error at hand, only where it was asked for."""
        if os.environ.get("DPRO_DEBUG"):
            traceback.print_exc()

    def conclude(self, outcome: Outcome, everywhere: bool) -> None:
        """The last word: a line if nothing was measured, else the table and the files."""
        if outcome.verdict.name == "STEPPED_ASIDE":
            self.say(f"stepped aside: {outcome.reason}", everywhere)
        if self._rank != 0 or outcome.planned is None:
            return
        from dpro.report.outcome import write_outcome

        text = write_outcome(outcome, self.folder)
        print(text, file=sys.stderr, flush=True)
