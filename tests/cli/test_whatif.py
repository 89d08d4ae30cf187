"""`dpro whatif` on worker counts and topologies: figures by hand, one assumption for a curve, one line for a slip."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_cli import ask, main, one_line, run
from tests.trace import synthetic as syn

MB = 1_000_000


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    """From 40 µs on two all-reduces in a row, of 1 MB in 210 µs and of 3 MB in 610 µs; the host is done at 50."""
    for rank in range(2):
        events = [syn.mark("ProfilerStep#0", 0, 50), syn.op("aten::a", 0, 30)]
        begin = 40
        for number, (mb, us) in enumerate([(1, 210), (3, 610)]):
            said = {"In msg nelems": mb * MB // 4, "dtype": "Float"}
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
            events += syn.launched(name, 30 + number * 10, begin, begin + us, number + 1, **said)
            begin += us
        syn.write(tmp_path / f"rank{rank}.json", events)
    return tmp_path


def test_one_number_is_answered_as_ever(two_ranks: Path) -> None:
    answer = ask("whatif", two_ranks, "--workers", "4")
    assert set(answer) == {"baseline_ms", "predicted_ms", "assumptions", "warnings"}
    assert [text.split(":")[0] for text in answer["assumptions"]] == ["2 → 4 workers"]


def test_several_are_a_curve(two_ranks: Path) -> None:
    answer = ask("whatif", two_ranks, "--workers", "2,4,8")
    alone_ms = ask("whatif", two_ranks, "--scale", "AllReduce=0")["predicted_ms"]
    assert 0.04 <= alone_ms <= 0.05
    assert [point["workers"] for point in answer["curve"]] == [2, 4, 8]
    assert answer["curve"][0]["predicted_ms"] == pytest.approx(answer["baseline_ms"])
    assert answer["predicted_ms"] == answer["curve"][-1]["predicted_ms"]
    assert [text.split(":")[0] for text in answer["assumptions"]] == ["2 → 2, 4, 8 workers", "efficiency"]
    for point in answer["curve"]:
        alone = ask("whatif", two_ranks, "--workers", point["workers"])
        assert alone["predicted_ms"] == point["predicted_ms"]
        assert point["efficiency_pct"] == pytest.approx(100 * alone_ms / point["predicted_ms"])
    out, _ = run("whatif", two_ranks, "--workers", "2,4,8")
    assert "8 workers" in out and "% efficient" in out and out.count("assumed:") == 2


@pytest.mark.parametrize(
    ("words", "transfers_us"),
    [
        # All of the time is taken for bandwidth where two sizes alone tell: 0.205 ns per byte, a link of 2 ranks
        # carries each byte once. Ring of 4: 1.5 times the bytes.
        (["--topology", "ring"], 1.5 * 820),
        (["--topology", "ring", "--bandwidth", "2x"], 0.75 * 820),
        # 2 hosts of 2: half of the bytes in the host, at 10 times the bandwidth, all of them between, half again
        (["--topology", "two-level", "--gpus-per-host", "2", "--inner-bandwidth", "10x"], 1.1 * 820),
        (["--topology", "ps"], 1.5 * 820),
        # 4 workers' bytes at one server, there and back; the first is pulled while the second is pushed
        (["--topology", "ps", "--servers", "1"], None),
    ],
)
def test_a_topology(two_ranks: Path, words: list[str], transfers_us: float | None) -> None:
    answer = ask("whatif", two_ranks, "--workers", "4", *words)
    compute_ms = answer["baseline_ms"] - 0.82
    if transfers_us is None:
        # kernels of one stream: the second is handed in when the first is over, so nothing overlaps
        transfers_us = 2 * 4 * 820
    assert answer["predicted_ms"] - compute_ms == pytest.approx(transfers_us / 1e3, rel=1e-3)
    [said] = answer["assumptions"]
    assert said.startswith("2 → 4 workers: ") and ("39 Gbit/s" in said or "78 Gbit/s (2x)" in said)


def test_a_tree_beats_a_ring_of_many(two_ranks: Path) -> None:
    ring, tree = (
        ask("whatif", two_ranks, "--workers", "8,1024", "--topology", topology)["curve"]
        for topology in ("ring", "tree")
    )
    assert [p["workers"] for p in ring] == [p["workers"] for p in tree] == [8, 1024]
    assert 0 < tree[1]["efficiency_pct"] < 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "4,"], "--workers"),
        (["--workers", "4;8"], "--workers"),
        (["--workers", "4,1"], "2 or more"),
        (["--workers", "4,1", "--topology", "ring"], "1 workers"),
        (["--workers", "4", "--topology", "star"], "there are ring, two-level, tree, ps"),
        (["--bandwidth", "2x", "--topology", "ring"], "--workers"),
        (["--workers", "4", "--topology", "two-level"], "--gpus-per-host"),
        (["--workers", "4", "--topology", "two-level", "--gpus-per-host", "3"], "not all hosts"),
        (["--workers", "4", "--servers", "2"], "--topology ps"),
        (["--workers", "4", "--topology", "ps", "--servers", "0"], "--servers"),
        (["--workers", "4", "--topology", "ring", "--inner-bandwidth", "2x"], "--topology two-level"),
        (["--workers", "4", "--topology", "ring", "--bandwidth", "fast"], "bandwidth 'fast'"),
        (["--workers", "4", "--topology", "ring", "--bandwidth", "1e-12x"], "a link of"),
    ],
)
def test_a_slip_is_one_line(two_ranks: Path, words: list[str], said: str) -> None:
    code, out, err = main("whatif", str(two_ranks), *words)
    assert (code, out) == (2, "")
    assert said in one_line(err)


def test_no_sizes_no_topology(tmp_path: Path) -> None:
    for rank in range(2):
        kernel = syn.launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 10, 20, 120, 1)
        syn.write(tmp_path / f"rank{rank}.json", [syn.mark("ProfilerStep#0", 0, 120), *kernel])
    _, err = run("whatif", tmp_path, "--workers", "4", "--topology", "tree", code=2)
    assert "no sizes of collectives" in one_line(err)
