"""``dpro align`` as scripts use it, on traffic between clocks that are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.traffic import Link, clock, ring, traffic
from dpro.trace.store import RunFolder
from tests.cli.kineto_files import step_of_100_us
from tests.cli.test_cli import TRACES, ask, needs_traces, run


def run_folder(path: Path, links: list[Link]) -> RunFolder:
    folder = RunFolder(path)
    clocks = [clock(0), clock(5_000_000, 20.0), clock(-500_000_000)]
    for rank, trace in enumerate(traffic(clocks, links)):
        folder.save_trace(rank, trace)
    return folder


def test_offsets_drifts_and_how_sure_they_are(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", ring(3))
    answer = ask("align", folder.path)
    assert set(answer) == {"ranks", "residual_us", "warnings"}
    first, second, third = answer["ranks"]
    assert {"rank", "host", "offset_us", "drift_ppm", "uncertainty_us"} <= set(first)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1, 2]
    assert (first["host"], first["offset_us"], first["drift_ppm"], first["uncertainty_us"]) == ("host0", 0, 0, 0)
    # offsets are given for the middle of the second's steps: half a second of 20 ppm is 10 us
    assert second["offset_us"] == pytest.approx(5_010, abs=5) and second["drift_ppm"] == pytest.approx(20, abs=5)
    assert third["offset_us"] == pytest.approx(-500_000, abs=5) and 0 < third["uncertainty_us"] < 100
    assert answer["residual_us"] is None and answer["warnings"] == []  # no collectives
    out, err = run("align", folder.path)
    assert "host1" in out and "messages" in out and "5,0" in out and err == ""


def test_a_clock_that_nothing_pins_is_null_and_a_warning(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [link for link in ring(3) if link.receiver != 0])
    answer = ask("align", folder.path)
    assert [rank["uncertainty_us"] for rank in answer["ranks"]] == [0, None, None]
    assert sum("not pinned" in warning for warning in answer["warnings"]) == 2
    out, err = run("align", folder.path)
    assert "—" in out and err.count("not pinned") == 2


def test_one_rank_is_its_own_clock(tmp_path: Path) -> None:
    answer = ask("align", step_of_100_us(tmp_path / "rank0.json"))
    assert [(rank["offset_us"], rank["uncertainty_us"]) for rank in answer["ranks"]] == [(0, 0)]


@needs_traces
def test_ranks_of_a_public_trace_agree_by_the_ends_of_their_collectives() -> None:
    answer = ask("align", TRACES / "dlrm8")
    assert len(answer["ranks"]) == 8 and answer["residual_us"] <= 10
    assert all(abs(rank["offset_us"]) <= 7 for rank in answer["ranks"])  # what their ends are apart at most
