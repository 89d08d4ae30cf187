"""What is said of a fused op: by hand, and learnt from kernels whose rule is known."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from dpro.cost.fused import (
    Estimator,
    Kernel,
    Roofline,
    Sample,
    SavedTraffic,
    SumOfOps,
    Trust,
    errors,
    is_heavy,
    loops,
    trust_of,
)
from dpro.cost.fused_choice import DEFAULT, estimator
from dpro.cost.fused_gnn import Gnn
from dpro.cost.fused_trees import Trees, features
from dpro.errors import DproError

#: Of the rule that samples follow.
LAUNCH_NS, SAVED = 500.0, 0.8


def chain(times: list[float], nbytes: list[float], types: list[str] | None = None, exported: int = -1) -> Kernel:
    """Each op reads what the one before makes, the first reads ``nbytes[0]`` from outside; then what each makes."""
    n = len(times)
    last = np.arange(n) == n - 1
    return Kernel(
        tuple(types or ["add"] * n), np.array(times), np.array(nbytes[:-1]), np.array(nbytes[1:]), np.array(nbytes[1:]),
        np.arange(n - 1), np.arange(1, n), np.array(nbytes[1:-1]), last | (np.arange(n) == exported), 1, nbytes[0],
    )  # fmt: skip


def samples(count: int, seed: int) -> list[Sample]:
    """Chains that take what :class:`SavedTraffic` says, of ops that take 1 ns a byte and ``dear`` ones 2."""
    rng = np.random.default_rng(seed)
    rule = SavedTraffic(LAUNCH_NS, SAVED)
    out = []
    for k in range(count):
        n = int(rng.integers(2, 7))
        nbytes = rng.uniform(2e3, 2e4, n + 1)
        types = [str(rng.choice(["add", "exp"])) for _ in range(n)]
        times = [LAUNCH_NS + (nbytes[i] + nbytes[i + 1]) * (2 if types[i] == "exp" else 1) for i in range(n)]
        kernel = chain(times, nbytes.tolist(), types, int(rng.integers(n)))
        out.append(Sample(kernel, f"m{k % 3}", rule.time_ns(kernel)))
    return out


def judged(estimator: Estimator, held_out: list[Sample]) -> Trust:
    return trust_of(errors(estimator, held_out))


def test_kinds_that_compute_much() -> None:
    heavy = ["Conv2d", "ConvGrad", "MatMul2", "Gemm", "Linear", "dot_general", "MaxPool2d", "LSTM", "GatherGrad"]
    assert all(map(is_heavy, heavy))
    light = [
        "ReLU",
        "Add1",
        "BatchNorm2d",
        "Softmax1",
        "LayerNormalization3",
        "reduce_sum",
        "AccumulateGrad",
        "convert_element_type",
    ]
    assert not any(map(is_heavy, [*light, "convert_element_type"]))


def test_what_a_compiler_makes_loops_of() -> None:
    # 0 mul -> 1 exp -> 2 add, 3 reduce; exp is dear and read twice: it is written; mul goes into it
    kernel = Kernel(
        ("mul", "exp", "add", "reduce_sum"), np.array([4.0, 9.0, 5.0, 3.0]), np.array([8.0, 8, 8, 8]),
        np.array([8.0, 8, 8, 1]), np.zeros(4), np.array([0, 1, 1]), np.array([1, 2, 3]), np.array([8.0, 8, 8]),
        np.array([False, False, True, True]), 1, 8.0,
    )  # fmt: skip
    inside = loops(kernel)
    assert inside == {1: [0, 1], 2: [2], 3: [3]}
    # were it cheap, both would compute it again
    cheap = dataclasses.replace(kernel, types=("mul", "add", "add", "reduce_sum"))
    assert loops(cheap) == {2: [0, 1, 2], 3: [0, 1, 3]}
    # a matrix product reads what is written, and is a library's call of its own
    dot = dataclasses.replace(kernel, types=("mul", "dot_general", "add", "reduce_sum"))
    assert loops(dot) == {0: [0], 1: [1], 2: [2], 3: [3]}


def test_the_sum_of_its_ops_launched_once() -> None:
    kernel = chain([30, 50, 8], [100, 100, 100, 100])
    assert SumOfOps().time_ns(kernel) == 88
    assert SumOfOps(10).time_ns(kernel) == 10 + 20 + 40  # the third is shorter than a launch: nothing is left of it


def test_what_stays_inside_is_not_moved() -> None:
    # the first op reads 100 and writes 300 that stay: 3/4; the second reads them and writes 100: 3/4
    kernel = chain([110, 210], [100, 300, 100])
    assert kernel.kept_share().tolist() == [0.75, 0.75]
    assert SavedTraffic(10, 0.8).time_ns(kernel) == pytest.approx(10 + 100 * 0.4 + 200 * 0.4)
    # read by others too, it is written: only reading it is spared
    assert chain([110, 210], [100, 300, 100], exported=0).kept_share().tolist() == [0, 0.75]
    # a convolution saves its own part
    kernel = chain([110, 210], [100, 300, 100], ["Conv2d", "add"])
    assert SavedTraffic(10, 0.8, 0.2).time_ns(kernel) == pytest.approx(10 + 100 * 0.85 + 200 * 0.4)


def test_the_slower_of_bytes_and_flops() -> None:
    kernel = chain([1, 1], [100, 300, 50])  # reads 100, writes 50, 350 flops
    assert Roofline(7, 0.5, 0.1).time_ns(kernel) == 7 + 75
    assert Roofline(7, 0.5, 0.3).time_ns(kernel) == pytest.approx(7 + 105)


def test_trust_is_what_unseen_kernels_say() -> None:
    kernel = chain([60, 40], [1, 1, 1])
    held_out = [Sample(kernel, "m", taken) for taken in (100, 110, 130, 200)]
    # 100 of 100, 110, 130, 200: off by 0, 9, 23 and 50 %
    trust = judged(SumOfOps(), held_out)
    assert trust == Trust(0.5, pytest.approx((1 / 11 + 3 / 13) / 2), pytest.approx(3 / 13 * 0.3 + 0.5 * 0.7), 4)
    with pytest.raises(ValueError, match="no kernel"):
        judged(SumOfOps(), [])


def test_saved_traffic_finds_the_share() -> None:
    fitted = SavedTraffic.fit(samples(60, 0), LAUNCH_NS)
    assert fitted.saved == SAVED
    assert judged(fitted, samples(20, 1)).median_error < 1e-9


def test_roofline_finds_the_rate() -> None:
    rng = np.random.default_rng(0)
    known = []
    for _ in range(40):
        kernel = chain([1.0, 1.0], rng.uniform(1e3, 1e5, 3).tolist())
        known.append(Sample(kernel, "m", 500 + 0.25 * (kernel.read_bytes + kernel.written_bytes)))
    fitted = Roofline.fit(known, 500)
    assert fitted.ns_per_byte == pytest.approx(0.25, rel=0.05)
    assert judged(fitted, known).within == 1


@pytest.mark.parametrize("kind", [Trees, Gnn])
def test_nothing_is_learnt_of_nothing(kind: type[Trees] | type[Gnn]) -> None:
    with pytest.raises(DproError, match="at least 50 timed kernels, not 3"):
        kind.fit(samples(3, 0), LAUNCH_NS)


@pytest.mark.parametrize(("kind", "library"), [(Trees, "sklearn.ensemble"), (Gnn, "torch_geometric.loader")])
def test_a_library_that_is_not_there_is_named(
    kind: type[Trees] | type[Gnn], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DproError, match="pip install"):
        kind.fit(samples(50, 0), LAUNCH_NS)


@pytest.mark.timeout(300)  # the libraries alone take a while to import on a busy machine
def test_trees_know_more_than_the_sum_of_ops() -> None:
    pytest.importorskip("sklearn")
    learnt, held_out = samples(150, 0), samples(25, 1)
    trees = Trees.fit(learnt, LAUNCH_NS)
    assert judged(trees, held_out).median_error < judged(SumOfOps(LAUNCH_NS), held_out).median_error / 3
    assert np.isfinite(features(held_out[0].kernel, SumOfOps(LAUNCH_NS), ["add", "exp"])).all()
    # an op of a type that was never seen
    assert trees.time_ns(chain([900, 800], [1e3, 2e3, 1e3], ["tan", "erf"])) > 0


@pytest.mark.timeout(300)
def test_a_network_knows_more_than_the_sum_of_ops() -> None:
    pytest.importorskip("torch_geometric")
    learnt, held_out = samples(120, 0), samples(25, 1)
    net = Gnn.fit(learnt, LAUNCH_NS, epochs=12)
    assert net.epochs == 12
    assert judged(net, held_out).median_error < judged(SumOfOps(LAUNCH_NS), held_out).median_error / 2
    once = Gnn.fit(learnt[:60], LAUNCH_NS, epochs=1)
    assert once.time_ns(held_out[0].kernel) == Gnn.fit(learnt[:60], LAUNCH_NS, epochs=1).time_ns(held_out[0].kernel)


def test_what_is_used_when_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(estimator(), SumOfOps)
    few = estimator(samples(20, 0), LAUNCH_NS)
    assert isinstance(few, SavedTraffic) and few.saved == SAVED
    # the models are m0, m1, m2; the first is held out, and the rule is known exactly
    assert few.trust is not None and (few.trust.within, few.trust.count) == (1, 7)
    # trees of 60 kernels; three fourths of them are too few for trees, and another kind's errors say nothing
    some = estimator(samples(60, 0), LAUNCH_NS)
    assert isinstance(some, Trees) and some.trust is None
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    assert isinstance(estimator(samples(70, 0), LAUNCH_NS), SavedTraffic)
    assert Trees.name == DEFAULT
