"""What every matrix does once its arguments are read: measure its cells, sum up, print, write its table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.cells import place
from benchmarks.models import CUTS
from benchmarks.tables import Table
from benchmarks.testbed import Interrupted, TestbedError, interruptible


def run_matrix(
    name: str,
    args: argparse.Namespace,
    cells: Callable[[argparse.Namespace], Iterator[dict[str, Any]]],
    summarise: Callable[[list[dict[str, Any]]], dict[str, Any]],
    table: Callable[[dict[str, Any]], Table],
) -> int:
    """The exit code. ``args`` has ``models``, ``json`` and ``table``."""
    begin_s = time.monotonic()
    try:
        with interruptible():
            found = list(cells(args))
    except Interrupted as interrupt:
        return 128 + interrupt.signum
    except (TestbedError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "place": place() | {"seconds": round(time.monotonic() - begin_s)},
        "cuts": {model: CUTS[model] for model in args.models},
        "cells": found,
        "summary": summarise(found),
    }
    shown = table(result)
    if args.table:
        shown.into(args.table)
    print(json.dumps(result) if args.json else shown.text)
    return 0 if all("error" not in cell for cell in found) else 1
