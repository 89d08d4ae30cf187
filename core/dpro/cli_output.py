"""What the ``dpro`` command says, and how: one JSON document, a table, or one line on stderr.

Knows no command and nothing of traces.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dpro.search.sweep import Sweep


def print_json(document: dict[str, Any]) -> None:
    """One document on stdout, finite numbers only: what is not one becomes null and a warning."""
    import json

    lost: list[str] = []
    clean = _finite(document, "", lost)
    if lost:
        clean["warnings"] = [*clean.get("warnings", []), f"not a finite number, shown as null: {', '.join(lost)}"]
    typer.echo(json.dumps(clean, indent=1, allow_nan=False))


def _finite(value: Any, where: str, lost: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item, f"{where}.{key}".lstrip("."), lost) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, where, lost) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(where)
        return None
    return value


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def print_warnings(warnings: Sequence[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}")


def failed_output(error: OSError) -> int:
    """Say what the system refused, if anybody is there to hear it; the exit code."""
    if error.filename:
        say(f"{error.filename}: {error.strerror}")
        return 2
    with suppress(OSError, ValueError):  # what is still in the buffer must not fail again at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # `dpro … | head`: the reader has seen enough
        return 141
    say(f"standard output: {error.strerror or error}")
    return 2


def say(text: str) -> None:
    """One line on stderr, whatever is in it."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    with suppress(OSError):
        typer.echo(line, err=True)


def fail(text: str, code: int) -> NoReturn:
    say(text)
    raise typer.Exit(code)


def print_sweep(name: str, baseline_ms: float, found: Sweep, warnings: Sequence[str], json: bool) -> None:
    """The answers to many what-ifs about the capture called ``name``: a table, or one document."""
    from dpro.report import table
    from dpro.search.sweep import words

    warnings = [*warnings, *found.warnings]
    if json:
        answers = [asdict(answer) for answer in found.answers]
        print_json({"baseline_ms": baseline_ms, "answers": answers, "on": found.on, "warnings": warnings})
        return
    rows = [("now", f"{baseline_ms:.2f} ms", "replayed")]
    for answer in found.answers:
        then_ms, about = answer.predicted_ms, answer.error
        if then_ms:
            about = f"{baseline_ms / then_ms:.3f}× the speed"
        rows.append((words(answer.question), "" if then_ms is None else f"{then_ms:.2f} ms", about))
    out = console()
    out.print(table.numbers_table(rows, title=f"What if  ·  {name}  ·  {len(found.answers)} questions"))
    for line in dict.fromkeys(line for answer in found.answers for line in answer.assumptions):
        out.print(f"assumed: {table.plain(line)}", style="dim", soft_wrap=True)
    print_warnings(warnings)
