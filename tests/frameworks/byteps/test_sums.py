"""Real BytePS sums, and what is trained on them: every element on every rank in every round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.frameworks.byteps import sums
from tests.frameworks.byteps.launch import run


def test_the_judge_knows_what_a_race_leaves_behind() -> None:
    """Own, other's, other's next, the sum of the round before, and a part at another place: none passes."""
    n, i = 16385, 3
    right = sums.pushed(n, i, 0) + sums.pushed(n, i, 1)
    assert sums.judge(right, i, 2) == ""
    for wrong in (sums.pushed(n, i, 0), sums.pushed(n, i, 1), sums.pushed(n, i + 1, 0)):
        mixed = right.copy()
        mixed[-1] = wrong[-1]
        assert sums.judge(mixed, i, 2) and sums.judge(wrong, i, 2)
    assert sums.judge(sums.expected(n, i - 1, 2), i, 2)
    assert sums.judge(np.roll(right, 16384), i, 2)


@pytest.mark.parametrize("module", ["mxnet_job", "keras_job"])
def test_sums_and_training(module: str, tmp_path: Path) -> None:
    """Sums are right; weights are bit-equal on both ranks, and those of one process with the whole batch.

    Gluon's DistributedTrainer, and Keras' ``model.fit`` with BytePS' optimizer and callback. 40 steps; in float32 the
    sum of two halves is not that of the whole to the last bit.
    """
    ended = run(module, tmp_path, str(sums.ROUNDS), "train")
    assert ended.code == 0
    for told in ended.values:
        assert told["sums"] == {"checks": sums.ROUNDS * len(sums.ELEMENTS), "wrong": []}
    with np.load(tmp_path / "0.npz") as mine, np.load(tmp_path / "1.npz") as other:
        assert mine.files == other.files and len(mine.files) == 4
        assert all(mine[name].tobytes() == other[name].tobytes() for name in mine.files)
    assert ended.values[0]["off"] < 1e-6 < 0.01 < ended.values[0]["moved"]
