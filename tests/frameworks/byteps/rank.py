"""One worker of a BytePS job: calls ``module:function(**arguments)`` after ``bps.init()``, writes what it returns.

``python -m tests.frameworks.byteps.rank FOLDER TARGET ARGUMENTS``, arguments in JSON; to ``<folder>/<rank>.json``.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import byteps.mxnet as bps


def main() -> None:
    folder, target, arguments = sys.argv[1:]
    bps.init()
    module, _, function = target.partition(":")
    value = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    (Path(folder) / f"{bps.rank()}.json").write_text(json.dumps(value))


if __name__ == "__main__":
    main()
