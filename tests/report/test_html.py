"""The HTML page: well formed, self-contained, escaped, and with the figures it was given."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from dpro.graph.graph import Graph, OpKind
from dpro.report import html
from dpro.report.summary import Summary, summarise, top_ops
from dpro.report.table import ArmRow
from tests.report.hand_graph import two_ranks

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects text, checks that tags close in order, notes everything that could reach outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.outside += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href") or key.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parse(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def summary(**changes: object) -> Summary:
    figures: dict[str, object] = {
        "title": "run <1>",
        "ranks": 2,
        "steps": 3,
        "ops": 1234,
        "measured_ms": 50.0,
        "replayed_ms": 45.0,
        "daydream_ms": 40.0,
        "reference_ms": 48.0,
        "reference": "un-profiled",
        "breakdown_ms": {"compute": 36.0, "communication": 8.0, "wait": 0.0, "gap": 1.0},
        "top": [("LinearBackward", "BACKWARD", 1, 20.0, 20 / 45), ("<script>x</script>\x1b", "LOCAL", 2, 1.0, 1 / 45)],
        "warnings": ["3 <events> lost"],
    }
    return Summary(**{**figures, **changes})  # type: ignore[arg-type]


def test_page_is_self_contained_and_escapes_what_it_was_given(tmp_path: Path) -> None:
    html.write(tmp_path / "r.html", summary(), [ArmRow("<b>plan</b>", 45.0, 46.0, 0.5, 1.1, "in force")], "KEPT")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = parse(text)
    assert page.outside == [] and "script" not in page.tags and "http" not in text and "url(" not in text
    words = " ".join(page.words)
    for expected in ("run <1>", "<script>x</script>\N{REPLACEMENT CHARACTER}", "3 <events> lost", "<b>plan</b>"):
        assert expected in words
    for figure in ("50.00 ms", "45.00 ms", "40.00 ms", "48.00 ms", "6.2 %", "1,234 ops", "KEPT", "1.100×", "± 0.50"):
        assert figure in words, figure
    assert "prefers-color-scheme:dark" in text
    assert len(text) < 20_000


def test_page_of_nothing() -> None:
    page = parse(html.render(summary(breakdown_ms={}, top=[], warnings=[], reference_ms=0.0, reference="measured")))
    words = " ".join(page.words)
    assert "Nothing ran" in words and "–" in words and "Warnings" not in words and "Verdict" not in words


def test_error_is_against_the_reference_and_unsigned() -> None:
    assert summary().error_pct == pytest.approx(100 * 3 / 48)
    assert summary(replayed_ms=51.0).error_pct == pytest.approx(100 * 3 / 48)
    assert summary(reference_ms=0.0).error_pct is None


@pytest.mark.parametrize(
    ("breakdown", "word"),
    [
        ({"compute": 80.0, "communication": 20.0, "wait": 0.0, "gap": 0.0}, "20% of the step waits for the network"),
        (
            {"compute": 80.0, "communication": 2.0, "wait": 18.0, "gap": 0.0},
            "18% of the step goes by in ops that hold no thread, stream or link",
        ),
        ({"compute": 60.0, "communication": 5.0, "wait": 5.0, "gap": 30.0}, "30% of the step is host work"),
        ({"compute": 90.0, "communication": 5.0, "wait": 0.0, "gap": 5.0}, "Compute bound (90% of the step)"),
    ],
)
def test_advice_names_the_largest_part_one_can_change(breakdown: dict[str, float], word: str) -> None:
    assert word in summary(breakdown_ms=breakdown).advice


def test_host_ops_beside_a_device_are_host_work_not_compute() -> None:
    busy = {"compute": 90.0, "communication": 0.0, "wait": 0.0, "gap": 10.0}
    assert "50% of the step is host work" in summary(breakdown_ms=busy, launching_ms=40.0).advice
    graph = Graph()
    graph.ranks, last = 1, []
    for resource, duration in (("rank0/cpu/1", 3), ("rank0/stream/7", 5), ("rank0/cpu/1", 2)):
        last = [
            graph.add_op("x", OpKind.FORWARD, resource=graph.resource(resource), duration=duration, rank=0, after=last)
        ]
    assert summarise(graph, "").launching_ms == 5e-6
    graph.set(1, "resource", 0)
    graph.resource_names.pop()
    assert summarise(graph, "").launching_ms == 0  # no device: the host is where the computing is done


def test_top_ops_adds_up_by_name_and_kind() -> None:
    steps = [
        {"name": "mm", "kind": "FORWARD", "rank": 0, "start_ms": 1.0, "ms": 2.0},
        {"name": "mm", "kind": "BACKWARD", "rank": 0, "start_ms": 3.0, "ms": 4.0},
        {"name": "mm", "kind": "FORWARD", "rank": 0, "start_ms": 7.0, "ms": 3.0},
    ]
    assert top_ops(steps) == [("mm", "FORWARD", 2, 5.0, 0.5), ("mm", "BACKWARD", 1, 4.0, 0.4)]
    assert top_ops(steps, limit=1) == [("mm", "FORWARD", 2, 5.0, 0.5)]
    assert top_ops([]) == []


def test_summary_of_a_step_worked_out_by_hand() -> None:
    graph = two_ranks()
    graph.info.update(measured_ns=46e6, unprofiled_ns=44e6, steps=1)
    got = summarise(graph, "t", warnings=["w", "w"])
    assert (got.ranks, got.steps, got.ops, got.replayed_ms, got.measured_ms) == (2, 1, 7, 45.0, 46.0)
    assert got.error_pct == pytest.approx(100 / 44) and got.reference == "un-profiled"
    assert got.breakdown_ms == {"compute": 36.0, "communication": 8.0, "wait": 0.0, "gap": 1.0}
    assert got.daydream_ms == 1 + 10 + 20 + 8 + 2  # rank 0 alone: it waits for nobody
    assert [row[0] for row in got.top] == ["LinearBackward", "linear", "all_reduce", "Adam"]
    assert got.warnings == ["w"]
