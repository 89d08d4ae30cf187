"""One rank of the test jobs: imports the framework once, then runs one job after another.

Run as ``python -m tests.frameworks.worker MODULE…`` by :class:`tests.frameworks.launch.Ranks`. Each
line on stdin is a JSON request, each answer a JSON line; what a job prints goes to its own log.
Importing torch costs seconds, so jobs share processes; a job that kills a rank, or looks at how a
process ends, asks to be the process's last.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.frameworks import patches


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing a framework prints may get between the answers
    for name in sys.argv[1:]:
        importlib.import_module(name)
    faulthandler.register(signal.SIGUSR1)  # a job that hangs is asked where
    print("ready", file=answers, flush=True)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        print(json.dumps(_run(request)), file=answers, flush=True)
        if request["last"]:
            return  # through the interpreter's own shutdown, so that exit handlers run


def _run(request: dict[str, Any]) -> dict[str, Any]:
    before = dict(os.environ)
    os.environ.update(request["env"])
    os.chdir(Path(request["log"]).parent)
    module, _, function = request["target"].partition(":")
    try:
        return {"value": getattr(importlib.import_module(module), function)(**request["arguments"])}
    except Exception:
        if request["last"]:
            raise  # the process ends as a script's does
        traceback.print_exc()
        return {"failed": True}
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        if not request["last"]:
            patches.undo()
            os.environ.clear()
            os.environ.update(before)


if __name__ == "__main__":
    serve()
