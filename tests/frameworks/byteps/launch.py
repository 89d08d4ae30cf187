"""How the BytePS tests run a job: real scheduler, server and two workers, on this machine, and what they wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed import Testbed
from benchmarks.testbed.byteps import BytePSJob, start
from tests.backends.build import PYTHON
from tests.frameworks.byteps.sums import PARTITION_BYTES
from tests.frameworks.launch import clean_environment


@dataclass
class Ended:
    """What came of a job."""

    code: int
    values: list[Any]  #: what each rank wrote, None for one that wrote nothing
    folder: Path


def begin(bed: Testbed, module: str, folder: Path, *arguments: str, **places: Sequence[int]) -> BytePSJob:
    """Start ``tests.frameworks.byteps.<module> FOLDER ARGUMENTS`` on every worker, in ``folder``."""
    command = [str(PYTHON), "-m", f"tests.frameworks.byteps.{module}", str(folder), *arguments]
    env = clean_environment(BYTEPS_PARTITION_BYTES=str(PARTITION_BYTES), TF_CPP_MIN_LOG_LEVEL="2")
    return start(bed, command, env, str(folder), python=str(PYTHON), **places)


def run(module: str, folder: Path, *arguments: str, timeout_s: float = 100.0) -> Ended:
    """Run it to its end, on loopback."""
    with Testbed(2, loopback=True) as bed:
        code = begin(bed, module, folder, *arguments).wait(timeout_s)
    files = [folder / f"{rank}.json" for rank in range(2)]
    return Ended(code, [json.loads(file.read_text()) if file.exists() else None for file in files], folder)


def alive(pid: int) -> bool:
    """Running, not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
