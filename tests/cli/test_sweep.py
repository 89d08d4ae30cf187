"""``dpro whatif --sweep`` as scripts use it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.kineto_files import step_of_100_us
from tests.cli.test_cli import main, one_line, refuse, run, shell


def test_a_table_and_a_list(tmp_path: Path) -> None:
    trace, file = step_of_100_us(tmp_path / "rank0.json"), tmp_path / "questions.json"
    file.write_text(json.dumps({"scale": ["second=0.5", "third=2"]}))
    done = shell("whatif", trace, "--sweep", file, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout, parse_constant=refuse)
    assert document["baseline_ms"] == 0.1
    assert document["on"] in ("ray", "processes") and document["warnings"] == []
    assert document["answers"] == [
        {
            "question": {"scale": ["second=0.5"]},
            "predicted_ms": 0.075,
            "assumptions": ["1 ops matching 'second' take 0.5× their time"],
            "error": "",
        },
        {
            "question": {"scale": ["third=2"]},
            "predicted_ms": None,
            "assumptions": [],
            "error": "no op's name matches 'third'",
        },
    ]
    out, err = run("whatif", trace, "--sweep", file)
    assert "scale second=0.5" in out and "1.333×" in out and "no op's name matches 'third'" in out
    assert out.count("assumed: ") == 1 and err == ""


def test_bad_questions(tmp_path: Path) -> None:
    trace, file = step_of_100_us(tmp_path / "rank0.json"), tmp_path / "questions.json"
    file.write_text('[{"speed": 2}]')
    for words, said in (
        (["--sweep", str(file)], f"{file}: question 1: unknown key 'speed'"),
        (["--sweep", str(file), "--workers", "2"], "or else --sweep alone"),
        (["--sweep", str(tmp_path / "gone")], f"{tmp_path / 'gone'}: No such file"),
    ):
        code, out, err = main("whatif", str(trace), *words)
        assert (code, out) == (2, "") and said in one_line(err)
