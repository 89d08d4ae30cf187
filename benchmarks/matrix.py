"""What every matrix does once its arguments are read: measure its cells, sum up, print, write its table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.cells import place
from benchmarks.comms import COMMS
from benchmarks.tables import Table
from benchmarks.testbed import Interrupted, TestbedError, interruptible


def run_matrix(
    name: str,
    args: argparse.Namespace,
    cells: Callable[[argparse.Namespace], Iterator[dict[str, Any]]],
    summarise: Callable[[list[dict[str, Any]]], dict[str, Any]],
    table: Callable[[dict[str, Any]], Table],
) -> int:
    """The exit code. ``args`` has ``models``, ``comms``, ``json`` and ``table``."""
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
        "cuts": cuts(args.models, args.comms),
        "cells": found,
        "summary": summarise(found),
    }
    shown = table(result)
    if args.table:
        shown.into(args.table)
    print(json.dumps(result) if args.json else shown.text)
    return 0 if all("error" not in cell for cell in found) else 1


def cuts(models: Iterable[str], comms: Iterable[str]) -> dict[str, str]:
    """How the models are cut, by model; those in Keras and MXNet by model and framework."""
    told = {COMMS[comm].framework: COMMS[comm].cuts() for comm in comms}
    return {
        model if framework == "torch" else f"{model}, {framework}": words[model]
        for framework, words in told.items()
        for model in models
    }
