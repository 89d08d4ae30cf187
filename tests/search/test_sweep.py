"""Many questions about the step of 100 µs that is known by heart, on processes and, where it is installed, on Ray."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dpro.errors import TraceError
from dpro.search import sweep as module
from dpro.search.sweep import DIED, Answer, read, sweep, words
from tests.cli.kineto_files import step_of_100_us
from tests.search import mortal

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS: list[dict[str, Any]] = [
    {"scale": ["second=0.5"]},
    {"bandwidth": "2x"},
    {},
    {"scale": ["first=2", "second=0"]},
    {"scale": ["third=2"]},
]
#: 40 µs, 10 of nothing, 50
EXPECTED_MS = [0.075, None, 0.1, 0.09, None]
#: (on Ray, workers)
WAYS = [
    pytest.param(False, 1, id="one process"),
    pytest.param(False, 2, id="two processes"),
    pytest.param(True, 2, id="ray", marks=pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not here")),
]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'core'}:{ROOT}")  # of workers that Ray starts
    return step_of_100_us(tmp_path / "rank0.json")


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "questions.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("ray", "workers"), WAYS)
def test_the_same_answers_in_the_order_of_the_questions(trace: Path, ray: bool, workers: int) -> None:
    found = sweep(trace, QUESTIONS, workers, ray)
    assert (found.on, found.warnings) == ("ray" if ray else "processes", [])
    assert [answer.question for answer in found.answers] == QUESTIONS
    assert [answer.predicted_ms for answer in found.answers] == EXPECTED_MS
    assert [len(answer.assumptions) for answer in found.answers] == [1, 0, 0, 2, 0]
    assert "no collective" in found.answers[1].error and "no op's name matches 'third'" in found.answers[4].error


@pytest.mark.parametrize(("ray", "workers"), WAYS)
def test_a_worker_that_dies_costs_its_question_alone(
    trace: Path, monkeypatch: pytest.MonkeyPatch, ray: bool, workers: int
) -> None:
    monkeypatch.setattr(module, "_answer", mortal.answer)
    death = {"scale": ["die=1"]}
    asked = [QUESTIONS[0], death, *QUESTIONS[2:4], death, QUESTIONS[0]]
    found = sweep(trace, asked, workers, ray).answers
    assert [answer.predicted_ms for answer in found] == [0.075, None, 0.1, 0.09, None, 0.075]
    assert found[1] == found[4] == Answer(death, error=DIED)


def test_ray_that_does_not_start_leaves_it_to_processes(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (trace.parent / "ray.py").write_text("raise OSError('no room\\nfor a store')")
    monkeypatch.syspath_prepend(trace.parent)
    monkeypatch.delitem(__import__("sys").modules, "ray", raising=False)
    found = sweep(trace, QUESTIONS[:1], 1)
    assert (found.on, found.answers[0].predicted_ms) == ("processes", 0.075)
    assert found.warnings == ["Ray did not start, so it went on processes: no room for a store"]


def test_a_list_and_a_product(tmp_path: Path) -> None:
    given = [{"workers": 8, "bandwidth": 2}, {"scale": "gemm=0.5", "compress": None}, {}]
    assert read(file_of(tmp_path, json.dumps(given))) == [
        {"workers": 8, "bandwidth": "2"},
        {"scale": ["gemm=0.5"]},
        {},
    ]
    given_product = {"bandwidth": [None, "2x"], "scale": [["a=1", "b=2"], "c=3"], "precision": "bf16"}
    assert read(file_of(tmp_path, json.dumps(given_product))) == [
        {"scale": ["a=1", "b=2"], "precision": "bf16"},
        {"scale": ["c=3"], "precision": "bf16"},
        {"bandwidth": "2x", "scale": ["a=1", "b=2"], "precision": "bf16"},
        {"bandwidth": "2x", "scale": ["c=3"], "precision": "bf16"},
    ]
    assert words({"scale": ["a=1", "b=2"], "workers": 8}) == "scale a=1, b=2; workers 8"
    assert words({}) == "as it is"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("\x00", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no question in it"),
        ("{}", "no question in it"),
        ('{"workers": []}', "no question in it"),
        ("7", "neither a list of questions nor an object of lists"),
        ("[7]", "question 1 is no object"),
        ('[{}, {"worker": 2}]', "question 2: unknown key 'worker'; there are scale, "),
        ('{"worker": [2, 4]}', "question 1: unknown key 'worker'"),
        ('[{"workers": "8"}]', "question 1: bad value for 'workers': 8"),
        ('[{"workers": true}]', "bad value for 'workers'"),
        ('[{"scale": [1]}]', "bad value for 'scale'"),
        ('[{"bandwidth": ["2x"]}]', "bad value for 'bandwidth'"),
        ('[{"precision": 16}]', "bad value for 'precision'"),
        (json.dumps({key: [None] * 50 for key in ("scale", "bandwidth", "workers")}), "125,000 questions; 100,000 are"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str, said: str) -> None:
    path = file_of(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.json: No such file"):
        read(tmp_path / "gone.json")
