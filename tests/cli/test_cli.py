"""The command as scripts use it: exit codes, one line of error, one JSON document, right figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpro import cli, cli_output
from dpro.passes import ddp_buckets
from dpro.plan import Plan
from dpro.search import question
from dpro.trace import kineto
from dpro.trace.store import RunFolder
from tests.cli.kineto_files import USELESS, step_of_100_us
from tests.report import perfetto_check
from tests.search.graphs import ddp_graph, horovod_graph
from tests.trace import synthetic as syn

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.exists(), reason="public traces (../shared/traces) are not here")


def run(*words: object, code: int = 0) -> tuple[str, str]:
    """In this process, through Typer's runner: stdout and stderr."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words], prog_name="dpro")
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result.stdout, result.stderr


def ask(*words: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*words, "--json")[0], parse_constant=refuse)
    assert isinstance(document["warnings"], list)
    return document


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def shell(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a user runs it: a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "core"), **environment}
    command = [sys.executable, "-m", "dpro", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=ROOT)


def one_line(text: str) -> str:
    assert text.endswith("\n") and text.count("\n") == 1, text
    assert "Traceback" not in text
    return text


# -- figures known beforehand --------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return step_of_100_us(tmp_path / "rank0.json")


def test_replay_of_a_step_known_by_heart(trace: Path) -> None:
    answer = ask("replay", trace)
    assert {"ranks", "steps", "ops", "measured_ms", "replayed_ms", "error_pct", "daydream_ms", "critical_path"} <= set(
        answer
    )
    assert (answer["ranks"], answer["steps"]) == (1, 1)
    assert answer["measured_ms"] == answer["replayed_ms"] == answer["reference_ms"] == 0.1
    assert answer["reference"] == "measured"
    assert answer["error_pct"] == 0
    path = [(s["name"], s["start_ms"], s["ms"]) for s in answer["critical_path"] if s["ms"]]
    assert path == [("aten::first", 0.0, 0.04), ("aten::second", 0.05, 0.05)]
    assert set(answer["critical_path"][0]) == {"name", "kind", "rank", "start_ms", "ms"}
    assert answer["breakdown_ms"] == {"compute": 0.09, "communication": 0, "wait": 0, "gap": 0.01}


def test_whatif_scales_the_ops_named(trace: Path) -> None:
    answer = ask("whatif", trace, "--scale", "second=0.5")
    assert (answer["baseline_ms"], answer["predicted_ms"]) == (0.1, 0.075)
    answer = ask("whatif", trace, "--scale", "first=2", "--scale", "a.*second=0")
    assert answer["predicted_ms"] == 0.09  # 80 + 10 + 0 µs
    assert len(answer["assumptions"]) == 2
    out, _ = run("whatif", trace, "--scale", "second=0.5")
    assert "0.10 ms" in out and "1.333×" in out


def test_diff_of_a_step_with_itself_and_with_a_slower_one(tmp_path: Path, trace: Path) -> None:
    same = ask("diff", trace, trace)
    assert same["change_ms"] == same["change_pct"] == 0
    assert all(row["change_ms"] == 0 for row in same["ops"])
    slower = ask("diff", trace, step_of_100_us(tmp_path / "slow.json", second_us=80))
    assert (slower["a_ms"], slower["b_ms"]) == (0.1, 0.13)
    assert (slower["change_ms"], slower["change_pct"]) == (pytest.approx(0.03), pytest.approx(30))
    assert slower["ops"][0] == {
        "name": "aten::second",
        "a_ms": 0.05,
        "b_ms": 0.08,
        "change_ms": pytest.approx(0.03),
        "a_count": 1,
        "b_count": 1,
    }
    assert [row["change_ms"] for row in slower["ops"][1:]] == [0] * (len(slower["ops"]) - 1)
    out, _ = run("diff", trace, tmp_path / "slow.json", "--top", 1)
    assert "aten::second" in out and "aten::first" not in out and "unchanged" in out
    assert "aten" not in run("diff", trace, trace)[0]


def test_export_and_report_write_what_they_say(tmp_path: Path, trace: Path) -> None:
    out, _ = run("export", trace, "--perfetto", tmp_path / "out.json")
    events = perfetto_check.load(tmp_path / "out.json")
    assert str(tmp_path / "out.json") in out
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"critical path", "replayed · cpu/1", "measured · cpu/1", "measured · steps"}
    shown = {(e["cat"].split(",")[0], e["ts"], e["dur"]) for e in events if e["name"] == "aten::second"}
    assert shown == {("critical", 50, 50), ("replayed", 50, 50), ("measured", 50, 50)}
    out, _ = run("report", trace, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert out.strip() == str(tmp_path / "page.html") and "aten::second" in page and "rank0.json" in page


def test_report_of_a_run_folder(tmp_path: Path, trace: Path) -> None:
    rows = [{"name": "your settings", "measured_ms": 100.0, "ratio": 1.0}, {"name": "given plan", "measured_ms": 80.0}]
    folder = RunFolder(tmp_path / "run")
    folder.save_meta({"verdict": "KEPT"})
    folder.outcome_file.write_text(json.dumps({"verdict": "KEPT", "reason": "20 % faster", "rows": rows}))
    out, err = run("report", folder.path)  # the run of a given plan: nothing was captured
    assert "KEPT" in out and "given plan" in out and "80.0" in out and "20 % faster" in out
    assert one_line(err) == f"warning: {folder.path}: no traces in it, so no page is written\n"
    assert not folder.page_file.exists()
    for command, more in COMMANDS.items():
        _, err = run(command, folder.path, *more, code=2)
        assert one_line(err) == f"{folder.path}: no traces in it: the job of this run folder was not captured\n"
    folder.save_trace(0, kineto.read(trace))
    out, _ = run("report", folder.path)
    assert out.strip() == str(folder.page_file)
    page = folder.page_file.read_text(encoding="utf-8")
    assert "Verdict" in page and "KEPT" in page and "given plan" in page and "aten::second" in page


def test_workers_of_traces_that_do_not_know_their_number(tmp_path: Path) -> None:
    for rank in range(2):
        kernel = syn.launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 10, 20, 120, 1)
        syn.write(
            tmp_path / f"rank{rank}.json", [syn.mark("ProfilerStep#0", 0, 120), syn.op("aten::a", 0, 10), *kernel]
        )
    answer = ask("whatif", tmp_path, "--workers", 4)
    assert answer["assumptions"][0].startswith("2 → 4 workers")
    # 2(N-1)/N goes from 1 to 1.5: 100 µs become 150
    assert answer["predicted_ms"] - answer["baseline_ms"] == pytest.approx(0.05)
    for words, said in (
        (["--workers", 10**23], "16,777,216 are the most"),
        (["--workers", 1], "2 or more"),
        (["--bandwidth", "1e-320x"], "1e-06× to 1e+06×"),
        (["--bandwidth", "1e9x"], "1e-06× to 1e+06×"),
    ):
        assert said in one_line(run("whatif", tmp_path, *words, code=2)[1])


def test_optimize_of_a_job_without_gradients_says_so(tmp_path: Path, trace: Path) -> None:
    answer = ask("optimize", trace, "-o", tmp_path / "plan.json")
    assert {"baseline_ms", "predicted_ms", "evaluations", "seconds", "plan"} <= set(answer)
    assert answer["plan"] is None and answer["candidates"] == []
    assert answer["baseline_ms"] == answer["predicted_ms"] == 0.1
    assert any("no plan is faster" in warning for warning in answer["warnings"])
    assert not (tmp_path / "plan.json").exists()
    assert "no plan is faster" in one_line(run("optimize", trace)[1])


def test_optimize_writes_the_plan_it_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trace: Path) -> None:
    """Four gradients of 2 MB in one bucket: nothing of its 8.1 ms is hidden behind 12 ms of backward."""
    monkeypatch.setattr(
        "dpro.graph.assemble.assemble", lambda traces, **_: ddp_graph([2_000_000] * 4, 1_000_000, [3_000_000] * 4)
    )
    answer = ask("optimize", trace, "-o", tmp_path / "plan.json")
    assert answer["baseline_ms"] == pytest.approx(1 + 12 + 8.1)
    assert answer["predicted_ms"] == pytest.approx(1 + 12 + 2.1)
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.bucket_caps and answer["plan"]["bucket_caps"] == plan.bucket_caps
    caps = [int(cap * 2**20) for cap in plan.bucket_caps]  # one bucket per gradient
    assert ddp_buckets.assign([2_000_000] * 4, ["float32"] * 4, caps) == [[0], [1], [2], [3]]
    assert plan.tensor_groups == [["p0"], ["p1"], ["p2"], ["p3"]]
    assert answer["candidates"][0]["predicted_ms"] == answer["predicted_ms"] and answer["evaluations"] >= 1
    done = main("optimize", str(trace), "-o", str(tmp_path / "no" / "such" / "plan.json"))
    assert done[0] == 2 and "No such file" in one_line(done[2])
    assert "21.10" in run("optimize", trace)[0] and "15.10" in run("optimize", trace)[0]


def test_optimize_of_horovod_gives_groups_and_what_takes_effect_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trace: Path
) -> None:
    monkeypatch.setattr("dpro.graph.assemble.assemble", lambda traces, **_: horovod_graph(0.2))
    monkeypatch.setattr("dpro.planning.inform", lambda graph, traces: None)  # the graph knows all
    answer = ask("optimize", trace)
    plans = [candidate["plan"] for candidate in answer["candidates"]]
    assert plans and all(plan["tensor_groups"] and not plan["bucket_caps"] for plan in plans)
    answer = ask("optimize", trace, "--passes", "cycle_time", "-o", tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").cycle_time == answer["at_start"][0]["plan"]["cycle_time"]
    assert not answer["warnings"]


def test_tables_are_for_people_and_warnings_for_stderr(trace: Path) -> None:
    text = json.loads(trace.read_text())
    text["traceEvents"].append({"ph": "X", "cat": "cpu_op", "name": "aten::bad", "tid": 1, "ts": 1095, "dur": -3})
    trace.write_text(json.dumps(text))
    out, err = run("replay", trace)
    assert "Critical path" in out and "warning" not in out and "\x1b" not in out
    assert one_line(err).startswith("warning: ") and "1 " in err
    assert len(ask("replay", trace)["warnings"]) == 1


def test_a_name_may_hold_anything(tmp_path: Path) -> None:
    hostile = "aten::\x1b[31m[bold]\n\u202e</script>\ud800é"
    document = {
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": hostile, "pid": 1, "tid": 1, "ts": 1000, "dur": 50},
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 1000, "dur": 50},
        ]
    }
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(document))
    for words in (["replay", path], ["report", path, "-o", tmp_path / "x.html"], ["diff", path, path]):
        done = shell(*words, PYTHONIOENCODING="ascii")
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
    run("export", path, "--perfetto", tmp_path / "x.json")
    perfetto_check.load(tmp_path / "x.json")


# -- bad input -----------------------------------------------------------------------------------

COMMANDS: dict[str, list[str]] = {
    "replay": [],
    "align": [],
    "optimize": [],
    "whatif": ["--bandwidth", "2x"],
    "export": ["--perfetto", os.devnull],
    "report": ["-o", os.devnull],
}


@pytest.mark.parametrize("name", USELESS)
@pytest.mark.parametrize("command", COMMANDS)
def test_useless_file_is_exit_2_with_one_line_that_names_it(tmp_path: Path, command: str, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(USELESS[name])
    out, err = run(command, path, *COMMANDS[command], code=2)
    assert out == ""
    line = one_line(err)
    assert line.startswith(f"{path}: ") and len(line) > len(f"{path}: ") + 5


@pytest.mark.parametrize("make", ["missing", "empty folder", "folder of other things", "locked", "pipe"])
def test_path_that_holds_no_trace(tmp_path: Path, request: pytest.FixtureRequest, make: str) -> None:
    path = tmp_path / "in"
    if make == "empty folder":
        path.mkdir()
    elif make == "folder of other things":
        path.mkdir()
        (path / "notes.txt").write_text("hello")
        (path / "config.json").write_text('{"lr": 0.1}')
    elif make == "locked":
        path.write_text("{}")
        path.chmod(0)
        if os.geteuid() == 0:  # root reads everything: be nobody for a while
            os.seteuid(65534)
            request.addfinalizer(lambda: os.seteuid(0))
    elif make == "pipe":
        os.mkfifo(path)
    for command, more in COMMANDS.items():
        out, err = run(command, path, *more, code=2)
        assert out == "" and str(path) in one_line(err)


def test_diff_names_the_one_that_is_bad(tmp_path: Path, trace: Path) -> None:
    for words in ((trace, tmp_path / "gone.json"), (tmp_path / "gone.json", trace)):
        assert one_line(run("diff", *words, code=2)[1]).startswith(f"{tmp_path / 'gone.json'}: ")


@needs_traces
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_cut_file_is_read_as_far_as_it_goes(tmp_path: Path, packed: bool) -> None:
    import gzip

    whole = (TRACES / "hta" / "simple_add.json.gz").read_bytes()
    whole = whole if packed else gzip.decompress(whole)
    path = tmp_path / ("cut.json.gz" if packed else "cut.json")
    path.write_bytes(whole[: 2 * len(whole) // 3])
    answer = ask("replay", path)
    assert answer["ops"] > 0
    assert any(character.isdigit() for warning in answer["warnings"] for character in warning)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["whatif", "{trace}"], "ask something: --bandwidth, --scale, --workers"),
        (["whatif", "{trace}", "--precision", "fp8"], "'fp8' is not bf16 or fp16"),
        (["whatif", "{trace}", "--precision", "bf16"], "no matrix product"),
        (["whatif", "{trace}", "--compress", "int8"], "there is bf16 and fp16"),
        (["whatif", "{trace}", "--compress", "fp16"], "no float32 gradients are known"),
        (["whatif", "{trace}", "--scale", "(=2"], "not a regular expression"),
        (["whatif", "{trace}", "--scale", "conv=2"], "no op's name matches 'conv'"),
        (["whatif", "{trace}", "--scale", "aten"], "is not REGEX=FACTOR"),
        (["whatif", "{trace}", "--scale", "aten=fast"], "is not REGEX=FACTOR"),
        (["whatif", "{trace}", "--scale", "aten=-1"], "finite number, 0 or more"),
        (["whatif", "{trace}", "--scale", "aten=nan"], "finite number, 0 or more"),
        (["whatif", "{trace}", "--scale", ".*=1e18"], "1,000,000 at most"),
        (["whatif", "{trace}", "--scale", ".*=1e308"], "1,000,000 at most"),
        (["whatif", "{trace}", "--scale", "aten=1e6", "--scale", "aten=1e6", "--scale", "aten=1e6"], "last for years"),
        (["whatif", "{trace}", "--scale", "a{{99999999999}}=2"], "not a regular expression"),
        (["whatif", "{trace}", "--bandwidth", "fast"], "bandwidth"),
        (["whatif", "{trace}", "--bandwidth", "2x"], "no collective"),
        (["whatif", "{trace}", "--workers", "8"], "1 worker"),
        (["whatif", "{trace}", "--workers", "many"], "--workers"),
        (["optimize", "{trace}", "--strategy", "magic"], "there are fastt"),
        (["optimize", "{trace}", "--passes", "magic"], "no pass named 'magic'; there are: "),
        (["export", "{trace}", "--perfetto", "{tmp}/no/such/out.json"], "{tmp}/no/such/out.json: No such file"),
        (["optimize", "{trace}", "-o", "{tmp}/no/such/plan.json"], "{tmp}/no/such/plan.json: No such file"),
        (["export", "{trace}", "--perfetto", "{trace}"], "{trace}: is a trace that was asked about"),
        (["export", "{tmp}", "--perfetto", "{trace}"], "{trace}: is a trace that was asked about"),
        (["report", "{trace}", "-o", "{trace}"], "{trace}: is a trace that was asked about"),
        (["optimize", "{trace}", "-o", "{trace}"], "{trace}: is a trace that was asked about"),
        (["report", "{trace}", "-o", "{tmp}"], "directory"),
        (["export", "{trace}"], "--perfetto"),
        (["replay"], "PATH"),
        (["replay", "{trace}", "--loud"], "--loud"),
        (["magic"], "magic"),
    ],
)
def test_bad_question_is_one_line(tmp_path: Path, trace: Path, words: list[str], said: str) -> None:
    done = main(*(word.format(trace=trace, tmp=tmp_path) for word in words))
    assert done[0] == 2
    assert said.format(trace=trace, tmp=tmp_path) in one_line(done[2])
    assert done[1] == ""
    assert ask("replay", trace)["replayed_ms"] == 0.1  # and the trace is as it was


def main(*words: str) -> tuple[int, str, str]:
    """Through ``main``, which is what also tames Typer's own complaints; without a process each."""
    import contextlib
    import io

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as leaving:
        cli.main(words)
    return int(leaving.value.code or 0), out.getvalue(), err.getvalue()


# -- the process ---------------------------------------------------------------------------------


def test_as_a_process(tmp_path: Path, trace: Path) -> None:
    done = shell("replay", trace, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout, parse_constant=refuse)["replayed_ms"] == 0.1
    (tmp_path / "photo.json").write_bytes(USELESS["photo.json"])
    done = shell("replay", tmp_path / "photo.json", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(done.stderr).startswith(f"{tmp_path / 'photo.json'}: ")
    done = shell("replay", tmp_path / "gone.json", DPRO_DEBUG="1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_pattern_that_takes_for_ever_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "a" * 40 + "!"  # (a+)+$ tries 2**40 ways to read it
    path = syn.write(tmp_path / "rank0.json", [syn.mark("ProfilerStep#0", 0, 100), syn.op(name, 1, 99)])
    monkeypatch.setattr(question, "PATTERN_SECONDS", 0.2)
    done = main("whatif", str(path), "--scale", "(a+)+$=2")
    assert done[0] == 2 and one_line(done[2]) == f"{path}: pattern '(a+)+$' takes too long to match\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_an_output_that_takes_nothing_is_one_line(tmp_path: Path, trace: Path) -> None:
    out, err = run("report", trace, "-o", "/dev/full", code=2)
    assert (out, one_line(err)) == ("", "/dev/full: No space left on device\n")
    assert one_line(run("export", trace, "--perfetto", "/dev/full", code=2)[1]).startswith("/dev/full: No space")
    dpro = f"{sys.executable} -m dpro"
    full = "standard output: No space left on device\n"
    for words, code, said in (
        ("--version >/dev/full", 2, full),
        ("--help >/dev/full", 2, full),
        (f"replay {trace} --json >/dev/full", 2, full),
        (f"replay {trace} >&-", 0, ""),
        (f"replay {trace}.gone 2>/dev/full", 2, ""),
        (f"replay {trace}.gone 2>&-", 2, ""),
    ):
        env = {**os.environ, "PYTHONPATH": str(ROOT / "core")}
        done = subprocess.run(["sh", "-c", f"{dpro} {words}"], capture_output=True, text=True, timeout=60, env=env)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", said), words


def test_times_of_years_are_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    ends = ({"ph": "X", "cat": "cpu_op", "name": "a", "tid": 1, "ts": ts, "dur": 9} for ts in (100, 4 * 10**15))
    path.write_text(json.dumps({"traceEvents": list(ends)}))
    for command, more in COMMANDS.items():
        if command == "align":  # asks nothing about steps
            continue
        assert "last for years" in one_line(run(command, path, *more, code=2)[1])


def test_a_bug_is_exit_3_with_one_line(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    import dpro.trace.store

    def broken(path: Path) -> None:
        raise RuntimeError(f"two\nlines about {path.name}")

    monkeypatch.setattr(dpro.trace.store, "load", broken)
    _, err = run("replay", trace, code=3)
    assert one_line(err) == (
        "dpro: internal error: RuntimeError: two lines about rank0.json (DPRO_DEBUG=1 shows where)\n"
    )
    monkeypatch.setenv("DPRO_DEBUG", "1")
    assert isinstance(CliRunner().invoke(cli.app, ["replay", str(trace)]).exception, RuntimeError)


def test_numbers_that_are_not_finite_become_null_and_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    cli_output.print_json({"a": float("nan"), "b": [1.5, {"c": float("inf")}], "warnings": ["w"]})
    answer = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert answer["a"] is None and answer["b"] == [1.5, {"c": None}]
    assert answer["warnings"] == ["w", "not a finite number, shown as null: a, b.c"]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, dpro.cli\n"
        "print(*{'numpy', 'torch', 'networkx', 'cvxpy', 'dpro._native', 'dpro.graph'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "")
    assert shell("--help").returncode == 0
    assert shell("--version").stdout.startswith("dpro 0.")


def test_every_word_of_the_design_is_there() -> None:
    done = shell("--help")
    assert all(
        word in done.stdout for word in ("replay", "align", "optimize", "whatif", "export", "report", "diff", "doctor")
    )


def test_doctor_always_ends_well() -> None:
    answer = ask("doctor")
    assert {"what", "status", "found", "todo"} == set(answer["findings"][0])
    assert run("doctor")[0].count("python") >= 1


# -- public traces -------------------------------------------------------------------------------


@needs_traces
@pytest.mark.parametrize(
    ("name", "ranks", "steps", "limit_pct"),
    [("hta/ddp_rank0_ns_resolution.json.gz", 1, 5, 3), ("hta/ddp_rank0_of2_a100.json.gz", 1, 3, 3), ("dlrm8", 8, 1, 5)],
)
def test_public_traces_replay_as_measured(name: str, ranks: int, steps: int, limit_pct: float) -> None:
    answer = ask("replay", TRACES / name)
    assert (answer["ranks"], answer["steps"]) == (ranks, steps)
    assert answer["error_pct"] <= limit_pct
    assert answer["replayed_ms"] == pytest.approx(answer["measured_ms"], rel=limit_pct / 100)
    assert sum(answer["breakdown_ms"].values()) == pytest.approx(answer["replayed_ms"], abs=1e-4)


@needs_traces
def test_public_trace_exports_for_perfetto(tmp_path: Path) -> None:
    out = tmp_path / "dlrm.json.gz"
    run("export", TRACES / "dlrm8", "--perfetto", out)
    events = perfetto_check.load(out)
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {f"rank {rank}" for rank in range(8)}
    # 8 collectives; each one has an arrow from the last rank to each of the 7 others
    flows = [e for e in events if e["ph"] == "s" and e["cat"] == "collective"]
    assert len(flows) == 8 * 7
    first = min(e["ts"] for e in events if e["ph"] == "X")
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert abs(first) < 1000 and last < 25_000  # µs: one step of about 20 ms
