"""Layers on the devices that a plan gives them, in one process: real Keras jobs on three logical devices of the CPU.

The same jobs run with Keras 2 and with Keras 3, in the environments of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.backends.build import VENV
from tests.frameworks.launch import ROOT, Ranks, Result

JOBS = "tests.frameworks.keras_placement.jobs"
#: All short forms; ``own`` is a layer of the user's with a gradient function of its own and a ``tf.function``.
PLACEMENT = {"norm": "CPU:1", "loop": "CPU:1", "convl": "/CPU:1", "act": "/device:CPU:1", "own": "cpu:2",
             "convr": "/job:localhost/replica:0/task:0/device:CPU:2"}  # fmt: skip
ON = {"norm": "CPU:1", "convl": "CPU:1", "act": "CPU:1", "own": "CPU:2", "convr": "CPU:2", "head": "CPU:0"}

Run = Callable[..., Result]


@pytest.fixture(scope="module", params=["keras 2", "keras 3"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a job's function in a process that has imported TensorFlow."""
    python = VENV / "bin" / "python" if request.param == "keras 2" else ROOT / ".venv-keras3" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python.parents[1].name} here: `make test` makes it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "core"))
        ranks = Ranks(JOBS, python=str(python))
        folders = (tmp_path_factory.mktemp("job") for _ in range(1000))
        yield lambda target, **given: ranks.run(f"{JOBS}:{target}", next(folders), ranks=1, **given).ok()
        ranks.close()


@pytest.fixture(scope="module")
def plain(run: Run) -> Callable[..., Any]:
    """Values of jobs without a plan."""

    @cache
    def found(target: str) -> Any:
        given: dict[str, Any] = {"plans": [{}, {}]} if target == "placed" else {"settings": None}
        return run(target, **given).values[0]

    return found


def same(found: Any, other: Any) -> None:
    """Weights and momenta are, after each plan. With Keras 2 to the last bit; what Keras 3 makes of a norm TensorFlow's
    optimiser rewrites otherwise across devices."""
    for after, without in zip(found["weights"], other["weights"], strict=False):
        for mine, theirs in zip(after, without, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6 if found["keras"] == 3 else 0)


def test_layers_run_where_the_plan_has_them_and_train_to_the_same_weights(run: Run, plain: Callable[..., Any]) -> None:
    """Forward and backward, as TensorFlow's executor got them; nothing runs elsewhere for want of a kernel there."""
    pairs = [["convr", "head"], ["convl", "convr"]]
    (value,) = run("placed", plans=[{"placement": PLACEMENT}], look=[*ON], pairs=pairs).values
    (under,) = value["under"]
    assert "placement" in value["knobs"] and under["graphs"] == 1
    assert under["forward"] == {name: [device] for name, device in ON.items()}
    assert under["backward"] == {name: [device] for name, device in ON.items() if name != "act"} | {"act": []}
    # gradient functions of their own (swish has one, too), which TensorFlow calls without saying whose they are
    assert under["ops"] == {
        "Sinh": ["CPU:2"], "Digamma": ["CPU:2"], "Conv2DBackpropFilter": ["CPU:1", "CPU:2"],
        "Elu": ["CPU:1"], "EluGrad": ["CPU:1"],  # in a loop
    }  # fmt: skip
    assert under["waits"] == [False, False]
    assert under["another"] and under["on"] == ["act", "convl", "convr", "loop", "norm", "own", "model"]
    same(value, plain("placed"))
    assert value["left"] == [] and value["own again"]


def test_layers_of_one_device_run_in_the_plans_order(run: Run, plain: Callable[..., Any]) -> None:
    """Also against the order in which Keras calls them; what waits for nothing across devices still does not."""
    order = ["convr", "dense", "convl", "norm", "nothing", "own", "head"]
    pairs = [["convl", "convr"], ["dense", "convr"], ["convl", "dense"], ["convr", "convl"]]
    plans = [
        # all on the first device; the head's data are of the others, so that it can't be first
        {"order": ["head", *order[::-1][1:]]},
        {
            "order": order,
            "placement": dict.fromkeys(("convl", "convr", "norm", "own"), "CPU:1") | {"dense": "CPU:2"},
        },
    ]
    (value,) = run("placed", plans=plans, look=["convl", "convr", "dense"], pairs=pairs).values
    waits, edges = ([under[key] for under in value["under"]] for key in ("waits", "edges"))
    assert waits == [[False, False, False, True], [True, False, False, False]]
    # from the op that makes a layer's result to those that take what the next one is given
    norm = "norm: FusedBatchNormV3" if value["keras"] == 2 else "norm: AddV2"
    assert sorted(edges[0]) == [["convr: Conv2D", ["own: Mul"]], ["dense: MatMul", [norm]]]
    assert edges[1].pop(0) == ["convl: Conv2D", ["convr: BiasAdd"]]
    assert {(op.partition(":")[0], *before) for op, before in edges[1]} == {("own", norm)}
    assert value["under"][1]["forward"] == {"convl": ["CPU:1"], "convr": ["CPU:1"], "dense": ["CPU:2"]}
    assert value["left"] == [] and value["own again"]
    same(value, plain("placed"))


@pytest.mark.parametrize("run", ["keras 2"], indirect=True)
def test_bad_placements_change_nothing(run: Run, plain: Callable[..., Any]) -> None:
    asked = [
        ({"placement": {"nowhere": "CPU:1"}}, "the model has no layer 'nowhere'"),
        ({"order": ["head", "nowhere"]}, "the model has no layer 'nowhere'"),
        ({"placement": {"head": "CPU:3"}}, "this process has no device 'CPU:3', but /device:CPU:0, /device:CPU:1, "),
        ({"placement": {"head": "GPU:0"}}, "this process has no device 'GPU:0'"),
        ({"placement": {"head": "the fast one"}}, "this process has no device 'the fast one'"),
        ({"placement": {"head": "/job:worker/task:1/CPU:0"}}, "this process has no device '/job:worker"),
        ({"order": ["head", "dense", "head"]}, "layer 'head' is ordered twice"),
        ({"placement": {"head": "CPU:1"}, "compile_regions": ["head"]}, "layer 'head' is placed, and compiled by XLA"),
        ({"order": ["own/inner"], "compile_regions": ["own"]}, "layer 'own/inner' is ordered, and compiled by XLA"),
        ({"placement": {"head": "CPU:1"}, "recompute": ["head"]}, "or recomputed, not both"),
        ({"placement": {"loop/each": "CPU:1"}}, "layer 'loop/each' is called in a loop or function"),
        ({"order": ["head", "loop/never"]}, "layer 'loop/never' is not called on its own in training"),
        ({"placement": {}, "order": []}, "the plan has none of compile_regions, recompute, placement, order"),
    ]
    (value,) = run("refused", plans=[settings for settings, _ in asked]).values
    for said, (_, says) in zip(value["said"], [*asked, ({}, "this process computes on one device")], strict=True):
        assert says in said
    same(value, plain("placed"))


@pytest.mark.parametrize("run", ["keras 2"], indirect=True)
def test_layers_compiled_beside_placed_ones(run: Run, plain: Callable[..., Any]) -> None:
    """Another compiler rounds otherwise."""
    plans = [{"placement": {"own": "CPU:2", "convr": "CPU:1"}, "compile_regions": ["act"]}]
    (value,) = run("placed", plans=plans, look=["convr"], pairs=[]).values
    assert value["under"][0]["ops"]["Sinh"] == ["CPU:2"] and value["under"][0]["forward"]["convr"] == ["CPU:1"]
    assert value["left"] == [] and value["own again"]
    for mine, theirs in zip(value["weights"][0], plain("placed")["weights"][0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_placement_from_a_file_is_verified_in_the_running_job(run: Run, plain: Callable[..., Any]) -> None:
    """To the verdict, in the midst of an epoch; what is traced later is traced under it."""
    verified(True, run, plain)


@pytest.mark.parametrize("run", ["keras 2"], indirect=True)
def test_a_placement_that_is_not_faster_is_taken_back(run: Run, plain: Callable[..., Any]) -> None:
    verified(False, run, plain)


def verified(kept: bool, run: Run, plain: Callable[..., Any]) -> None:
    settings = {"placement": PLACEMENT, "order": ["convr", "own"]}
    result = run("whole_way", settings=settings, kept=kept)
    (value,) = result.values
    assert value["verdict"] == ("KEPT" if kept else "ROLLED_BACK"), result.logs
    assert value["states"][:2] == ["WARMUP", "BASELINE"]  # no capture, no search
    assert value["states"][2:-1] == ["APPLY", "VERIFY"] * 4  # in turns with the job's own
    assert value["on"] == (["act", "convl", "convr", "loop", "norm", "own", "model"] if kept else [])
    assert value["traced"] == (["/device:CPU:2"] if kept else [""])
    assert value["times"] >= 2 or value["keras"] == 3  # that has another function for train_on_batch
    same(value, plain("whole_way"))


def test_a_model_that_is_one_xla_program_is_left_alone(run: Run) -> None:
    result = run("one_program")
    (line,) = result.lines()
    assert "stepped aside: the whole step is one XLA program" in line and result.values == [False]
