"""The matrices' own arithmetic and models: what a figure is made of must be right before any figure is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.accuracy import figures, links_of
from benchmarks.cells import Jobs, JobSet
from benchmarks.comms import COMMS
from benchmarks.matrix import cuts
from benchmarks.models import CUTS, NAMES, gradient_mb, make
from benchmarks.models.emulated import BACKWARD_S, FORWARD_S
from benchmarks.predict import Replayed, load, replayed, spearman
from benchmarks.speedup import uniform_plan
from benchmarks.tables import Table, accuracy_table
from benchmarks.testbed import TestbedError
from benchmarks.testbed.horovod import find_python

ROOT = Path(__file__).resolve().parents[2]
#: Parameter tensors of the originals: 53 convolutions and norms with 2 each, and the classifier; 16 layers with weight
#: and bias; 94 convolutions and norms, and the classifier; 2 + 2 embedding and norm, 6 x 12, pooler, classifier.
TENSORS = {"resnet50": 53 * 3 + 2, "vgg16": 32, "inceptionv3": 94 * 3 + 2, "bert-base": 4 + 6 * 12 + 4}
#: Elsewhere the same, but: Keras keeps queries, keys and values apart, with a weight and a bias each, and Gluon's
#: bottlenecks have a bias in two of three convolutions.
TENSORS_IN = {
    "keras": {**TENSORS, "bert-base": 4 + 6 * 16 + 4},
    "mxnet": {**TENSORS, "resnet50": 53 * 3 + 2 + 16 * 2},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_model_keeps_its_layers(name: str) -> None:
    model = make(name).model
    assert len(list(model.parameters())) == TENSORS[name]
    assert 6 < gradient_mb(model) < 16
    assert CUTS[name].startswith({"resnet50": "ResNet50", "vgg16": "VGG16"}.get(name, CUTS[name][:4]))


@pytest.fixture(scope="module", params=["keras", "mxnet"])
def told(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The framework, and what ``cut_models`` tells of its models."""
    try:
        python = find_python()
    except TestbedError as error:
        pytest.skip(str(error))
    command = [python, "-m", "tests.testbed.cut_models", request.param]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet}, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return request.param, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
def test_models_of_other_frameworks_are_cut_alike(told: tuple[str, dict[str, Any]]) -> None:
    framework, models = told
    assert sorted(models) == sorted(NAMES)
    for name, model in models.items():
        assert len(model["bytes"]) == TENSORS_IN[framework][name], name
        assert sum(model["bytes"]) / 1e6 == pytest.approx(gradient_mb(make(name).model), rel=0.05), name
        assert model["same_weights"] and model["own_noise"] and model["finite"] and model["shapes"], name


@pytest.mark.timeout(300)
def test_the_words_for_a_cut_are_its_sizes(told: tuple[str, dict[str, Any]]) -> None:
    framework, models = told
    words = cuts(NAMES, [f"horovod-{framework}"])
    for name, model in models.items():
        cut, sizes = words[f"{name}, {framework}"], model["sizes"]
        assert f"batch {sizes['BATCH']}" in cut
        for key, form in (("IMAGE", "{0}x{0} images"), ("LENGTH", "sequences of {0}"), ("HIDDEN", "{0} of")):
            assert key not in sizes or form.format(sizes[key]) in cut, (name, key)


def test_cuts_are_told_for_every_framework_of_a_run() -> None:
    assert cuts(["vgg16"], ["ddp", "horovod"]) == {"vgg16": CUTS["vgg16"]}
    assert list(cuts(["vgg16"], ["ddp", "horovod-keras"])) == ["vgg16", "vgg16, keras"]


def test_nothing_of_a_framework_before_its_loop_is_asked_for() -> None:
    """The driver and what all ranks share."""
    code = (
        "import benchmarks.cells, benchmarks.matrix_job, sys; print({'torch', 'tensorflow', 'mxnet'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_cells_of_the_matrix() -> None:
    assert links_of("ddp", 2) == ("1gbit", "200mbit", "loopback")
    assert links_of("horovod", 8) == ("200mbit",)
    assert links_of("horovod-keras", 2) == ("1gbit", "200mbit")
    assert links_of("horovod-mxnet", 4) == ()
    assert links_of("horovod-mxnet", 2, plans=True) == ("1gbit",)
    with pytest.raises(ValueError, match="no emulated compute"):
        Jobs("vgg16", "horovod-keras", 4)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("comm", [name for name, comm in COMMS.items() if comm.framework != "torch"])
def test_a_cell_on_two_hosts(comm: str) -> None:
    """Every order but tuning: the gradients by name, a capture that replays, the settings of a plan and back."""
    try:
        find_python()
    except TestbedError as error:
        pytest.skip(str(error))
    with JobSet(Jobs("vgg16", comm, 2), timeout_s=180) as job:
        orders = [[(name, size) for name, size in answer["ready"]] for answer in job.ask("ready")]
        assert len(dict(orders[0])) == TENSORS["vgg16"]
        assert dict(orders[0]) == dict(orders[1])
        assert sum(dict(orders[0]).values()) / 1e6 == pytest.approx(gradient_mb(make("vgg16").model))
        answers = job.ask("measure", warmup=1, steps=2, rounds=1, prefix="test")
        assert [len(answer["plain_ns"]) for answer in answers] == [3, 3]
        traces = load(answer["traces"][0] for answer in answers)
        assert [trace.steps for trace in traces] == [2, 2]
        assert replayed(traces).replayed_ms > 0
        plan = uniform_plan(comm, orders[0], 2)
        answers = job.ask("arms", plans=[None, plan.dumps()], rounds=2, steps=1, settle=2, budget_s=120)
        assert [[len(arm) for arm in answer["times_ns"]] for answer in answers] == [[2, 2], [2, 2]]


def test_a_fully_connected_layer_holds_most_of_vgg() -> None:
    sizes = [p.numel() for p in make("vgg16").model.parameters()]
    assert max(sizes) > 0.5 * sum(sizes)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_start_alike(name: str) -> None:
    torch.manual_seed(1)
    one = make(name)
    torch.manual_seed(2)
    other = make(name)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert not torch.equal(one.inputs, other.inputs)


@pytest.mark.parametrize("name", ["vgg16", "bert-base"])
def test_emulated_layers_sleep_and_give_every_gradient(name: str) -> None:
    """The same names and shapes as the model; a step is at least as long as the table says."""
    real, emulated = make(name).model, make(name, emulated=True)
    shapes = {key: p.shape for key, p in real.named_parameters()}
    assert {key: p.shape for key, p in emulated.model.named_parameters()} == shapes
    ready: list[str] = []
    for key, p in emulated.model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, key=key: ready.append(key))
    begin_s = time.monotonic()
    emulated.loss(emulated.model).backward()
    assert time.monotonic() - begin_s >= FORWARD_S + BACKWARD_S
    assert sorted(ready) == sorted(shapes)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in emulated.model.parameters())
    first, last = {"vgg16": ("37.", "0."), "bert-base": ("classifier.", "words.")}[name]
    assert ready[0].startswith(first)
    assert ready[-1].startswith(last)


@pytest.mark.parametrize(
    ("predicted", "measured", "noise", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 0.0, 1.0),
        ([4, 3, 2, 1], [10, 20, 30, 40], 0.0, -1.0),
        # ranks 1 2 3 4 against 2 1 3 4: 1 - 6 (1 + 1) / (4 * 15)
        ([2, 1, 3, 4], [10, 20, 30, 40], 0.0, 0.8),
        # the same, but the first two can't be told apart
        ([2, 1, 3, 4], [10, 10.1, 30, 40], 0.02, 1.0),
        ([2, 1, 3], [10, 10.1, 10.2], 0.02, None),
        ([1, 3, 2], [10, 10.1, 30], 0.02, 0.0),
    ],
)
def test_order_of_plans(predicted: list[float], measured: list[float], noise: float, expected: float | None) -> None:
    assert spearman(predicted, measured, noise) == pytest.approx(expected)


def test_uniform_groups_close_when_they_reach_the_cap() -> None:
    ready = [("d", 1 << 19), ("c", 1 << 19), ("b", 1 << 21), ("a", 4)]
    assert uniform_plan("horovod", ready, 1).tensor_groups == [["d", "c"], ["b"], ["a"]]
    assert uniform_plan("horovod", ready, 100).tensor_groups == [["d", "c", "b", "a"]]
    assert uniform_plan("horovod-mxnet", ready, 1) == uniform_plan("horovod", ready, 1)
    assert uniform_plan("ddp", ready, 1).bucket_caps == [1]


def test_figures_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, three un-profiled windows of two steps, one capture; the slowest rank's steps count."""
    replays = iter([Replayed(108.0, 81.0, 120.0, ["odd"])])
    monkeypatch.setattr("benchmarks.accuracy.load", list)
    monkeypatch.setattr("benchmarks.accuracy.replayed", lambda traces: next(replays))
    ms = 1_000_000
    answers = [
        {"plain_ns": [[90 * ms] * 2, [101 * ms] * 2, [99 * ms] * 2], "captured_ns": [[103 * ms] * 2], "traces": ["a"]},
        {"plain_ns": [[97 * ms] * 2, [80 * ms] * 2, [99 * ms] * 2], "captured_ns": [[104 * ms] * 2], "traces": ["b"]},
    ]
    found = figures([answers])
    assert found["measured_ms"] == 99  # 97 97 101 101 99 99
    # against the two windows beside the capture, 101 101 99 99
    assert (found["replayed_ms"], found["error_pct"]) == (108, 8.0)
    assert (found["daydream_error_pct"], found["unaligned_error_pct"]) == (-19.0, 20.0)
    assert found["noise_floor_pct"] == 2.97  # the first and third window's 98 against the second's 101
    assert found["capture_overhead_pct"] == 4.0
    assert found["after_overhead_pct"] == 0.0  # 99 against the median of 97 97 101 101


def test_a_table_replaces_what_is_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    Table("x", "| new |").into(page)
    Table("x", "| newer |").into(page)
    assert page.read_text() == "a\n<!-- x -->\n| newer |\n<!-- /x -->\nb\n"
    with pytest.raises(ValueError, match="no markers <!-- y -->"):
        Table("y", "").into(page)


def test_a_failed_cell_is_in_the_table() -> None:
    result = {
        "place": {"date": "today", "commit": "abc", "machine": "2 cores", "seconds": 3},
        "cuts": {"vgg16": "cut"},
        "cells": [{"model": "vgg16", "comm": "ddp", "hosts": 2, "links": ["1gbit"], "error": "rank 1 died"}],
        "summary": {"cells": 0, "failed": 1},
    }
    text = accuracy_table(result).text
    assert "0 cells, 1 failed" in text
    assert "| vgg16 | ddp | failed: rank 1 died |" in text


def test_the_page_has_a_place_for_every_table(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
    copy = tmp_path / "page.md"
    copy.write_text(page.read_text())
    for name in ("accuracy", "plans", "speedup"):
        Table(name, "here").into(copy)
