"""Terminal tables as plain text: figures where they belong, nothing a trace says is obeyed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dpro.graph.assemble import assemble
from dpro.report import html, table
from dpro.report.summary import summarise
from dpro.report.table import ArmRow
from tests.graph.ring_traces import job, two_ranks


def cells(text: str) -> list[list[str]]:
    """Words of each line, lines of rules and blanks left out."""
    return [line.split() for line in text.splitlines() if line.strip(" ─")]


def test_verdict_shows_every_figure_once() -> None:
    rows = [
        ArmRow("DDP default", 148.71, 149.2, 0.84, 1.0),
        ArmRow("plan", 9.8765, 12.3456, 0.1, 1.0864, "in force"),
        ArmRow("not tried", 1.23456),
    ]
    text = table.to_text(table.verdict_table(rows, "ROLLED_BACK", ["report: a/b.html"]))
    assert cells(text) == [
        ["dpro", "ROLLED", "BACK"],
        ["ms/step", "predicted", "measured", "speed"],
        ["DDP", "default", "148.7", "149.2", "±", "0.8", "1.000×"],
        ["plan", "9.877", "12.35", "±", "0.10", "1.086×", "in", "force"],
        ["not", "tried", "1.235"],
        ["report:", "a/b.html"],
    ]
    text = table.to_text(table.verdict_table([ArmRow("as captured", 10.0)], "PREDICTED"))
    assert cells(text)[1:] == [["ms/step", "predicted"], ["as", "captured", "10.00"]]  # no column for what is not known
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_markup_and_control_characters_of_a_trace_are_not_obeyed() -> None:
    text = table.to_text(table.ops_table([("[red]x[/red]\x1b[2J\n", "LOCAL", 1, 1.0, 0.5)]))
    assert "[red]x[/red]\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}" in text
    assert "\x1b" not in text
    text = table.to_text(table.verdict_table([ArmRow("[bold]arm[/]")], "KEPT", ["[/] at dpro_runs/[x]"]))
    assert "[bold]arm[/]" in text and "[/] at dpro_runs/[x]" in text


def test_breakdown_bar_is_in_proportion() -> None:
    lines = table.to_text(
        table.breakdown_bar({"compute": 30.0, "communication": 20.0, "wait": 0.0, "gap": 10.0}, width=60)
    ).splitlines()
    assert lines[0].strip() == "█" * 30 + "▓" * 20 + "░" * 10
    assert "compute 30.00 ms (50 %)" in lines[1] and "wait 0.000 ms (0 %)" in lines[2]
    assert table.to_text(table.breakdown_bar({"compute": 0.0})).splitlines()[0].strip() == ""


def test_importing_the_module_imports_no_rich() -> None:
    code = "import sys, dpro.report.table; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_links_say_what_they_carried() -> None:
    # 110 µs of 1,000 busy with 2,000 bytes, nothing queued; rank 1 was there at 160 and rank 0 sent at 170
    traces = job(two_ranks(), used=[325, 318], end=1_000)
    there, back = summarise(assemble(traces), "job").links
    assert (there.link, there.messages, there.nbytes, there.busy_share) == ("0 → 1", 2, 2_000, 0.11)
    assert there.mbit_s == pytest.approx(8 * 2_000 / 110)
    assert (there.queue_us, there.late_share, back.late_share) == (0, 0.01, 0.045)
    text = cells(table.to_text(table.links_table([there, back])))
    assert text[1] == ["0", "→", "1", "2", "0.0", "11", "%", "145", "0", "1", "%"]
    page = html.render(summarise(assemble(traces), "job"))
    assert "<h2>Links</h2>" in page and "0 → 1" in page
