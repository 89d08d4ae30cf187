"""Processes with Horovod for all tests of this folder, from the environment that ``make backends`` makes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.build import PYTHON, VENV
from tests.frameworks.launch import ROOT, Ranks, Result, clean_environment


class HorovodRanks(Ranks):
    """:class:`Ranks` that meet at a rendezvous server of Horovod's."""

    def __init__(self, *modules: str) -> None:
        super().__init__(*modules, python=str(PYTHON))
        self._server = subprocess.Popen(
            [str(PYTHON), "-m", "tests.frameworks.horovod_torch.rendezvous"],
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        self._port = self._server.stdout.readline().strip()

    def run(
        self, target: str, folder: Path, *, ranks: int = 2, env: dict[str, str] | None = None, **rest: Any
    ) -> Result:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(f"{ranks}\n")
        self._server.stdin.flush()
        assert self._server.stdout.readline() == "ready\n"
        place = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": self._port}
        return super().run(target, folder, ranks=ranks, env=place | (env or {}), **rest)

    def close(self) -> None:
        super().close()
        self._server.kill()
        self._server.communicate()


@pytest.fixture(scope="session")
def ranks() -> Iterator[HorovodRanks]:
    if not (VENV / ".made").exists():
        pytest.skip(f"no {VENV.name} with Horovod here: `make backends` makes it")
    made = HorovodRanks("torch", "horovod.torch", "torch.profiler", "tests.frameworks.horovod_torch.jobs")
    yield made
    made.close()
