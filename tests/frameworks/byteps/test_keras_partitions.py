"""Partitions of gradients, recorded and changed in a running Keras job of BytePS: real workers, a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.testbed import Testbed
from tests.frameworks.byteps import sums
from tests.frameworks.byteps.launch import begin

JOBS = "tests.frameworks.byteps.keras_partition_jobs"


def run(function: str, folder: Path, **arguments: Any) -> list[Any]:
    """What each rank returned."""
    folder.mkdir(parents=True, exist_ok=True)
    with Testbed(2, loopback=True) as bed:
        code = begin(bed, "keras_rank", folder, f"{JOBS}:{function}", json.dumps(arguments)).wait(100)
    assert code == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_sums_are_right_and_what_is_kept_trains_to_the_same_bits(tmp_path: Path) -> None:
    """Every element on every rank in every round; plans that don't fit change nothing. Then :func:`judged`."""
    calls = [("sums_under_plans", {"rounds": 4}), *tunings(tmp_path, kept=True)]
    calls += tunings(tmp_path, kept=True, flow=True)[1:]
    told = run("several", tmp_path, calls=calls)
    for one, *_ in told:
        assert one["wrong"] == []
        assert one["checks"] == 4 * 11 * len(sums.ELEMENTS)
        seen = dict(one["seen"])
        assert seen["after"] == seen["before"]
        assert seen["small"][2] == 16384 and seen["large"][2] == 131072
        assert seen["flow1"][2] == seen["flow3"][2] == sums.PARTITION_BYTES and seen["flow1"][-1]
        assert len(one["foreign"]) == 6 and "accepted" not in one["foreign"]
        assert one["error"] == ""
    judged([results[1:3] for results in told], kept=True)
    judged([[results[1], results[3]] for results in told], kept=True, flow=True)


def test_what_is_rolled_back_with_fp16_trains_to_the_same_bits(tmp_path: Path) -> None:
    """See :func:`judged`."""
    calls = tunings(tmp_path, kept=False, fp16=True) + tunings(tmp_path, kept=False, fp16=True, flow=True)[1:]
    told = run("several", tmp_path, calls=calls)
    judged([results[:2] for results in told], kept=False)
    judged([[results[0], results[2]] for results in told], kept=False, flow=True)


def tunings(folder: Path, **given: Any) -> list[tuple[str, dict[str, Any]]]:
    """``fit`` without dpro, then with it: what is kept stays in force."""
    return [("tuned", {**given, "dpro": dpro, "runs": str(folder / "runs")}) for dpro in (False, True)]


def judged(told: list[list[Any]], kept: bool, flow: bool = False) -> None:
    """Weights are those of a job without dpro, on both ranks; a bound that is kept can be set when the next starts."""
    (alone, _), (other_alone, _) = told
    assert alone["weights"] == other_alone["weights"]
    for without, tuned in told:
        assert tuned["verdict"] == ("KEPT" if kept else "ROLLED_BACK"), tuned["reason"]
        assert tuned["weights"] == without["weights"]
        assert tuned["shutdown"]
        assert bool(tuned["start"]) == (kept and not flow)
        assert any("at once" in name for name in tuned["tried"]) == flow
