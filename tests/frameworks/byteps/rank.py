"""One worker of a BytePS job: calls ``module:function(**arguments)`` after ``bps.init()``, writes what it returns.

``python -m tests.frameworks.byteps.rank FOLDER TARGET ARGUMENTS``, arguments in JSON; to ``<folder>/<rank>.json``.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def call(rank: int) -> None:
    """As the command line says."""
    folder, target, arguments = sys.argv[1:]
    module, _, function = target.partition(":")
    value = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    file = Path(folder) / f"{rank}.json"
    file.with_suffix(".part").write_text(json.dumps(value))
    file.with_suffix(".part").rename(file)  # who waits for it finds it whole


def main() -> None:
    import byteps.mxnet as bps

    bps.init()
    call(bps.rank())


if __name__ == "__main__":
    main()
