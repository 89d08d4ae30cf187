"""``DPRO=apply torchrun … train.py``: the real launcher, the real .pth file, a script that knows nothing."""

from __future__ import annotations

import re
from pathlib import Path

from tests.frameworks.launch import ROOT, torchrun

SCRIPT = ROOT / "tests" / "frameworks" / "scripts" / "unchanged.py"


def weights(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d trained to [0-9a-f]{64}", output))


def test_an_unchanged_script_is_tuned_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    places = tmp_path / "without", tmp_path / "with"
    for place in places:
        place.mkdir()
    without = torchrun(SCRIPT, places[0])
    found = torchrun(SCRIPT, places[1], DPRO="apply", DPRO_CAPTURE_STEPS="3", DPRO_MIN_GAIN="0")
    assert without.returncode == 0, without.stdout
    assert found.returncode == 0, found.stdout
    assert len(weights(without.stdout)) == 2
    assert weights(found.stdout) == weights(without.stdout)
    assert "dpro" not in without.stdout
    assert "dpro: profiling steps 7 to 9 of 2 ranks" in found.stdout
    assert len(list((places[1] / "runs").iterdir())) == 1
