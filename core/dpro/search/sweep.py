"""Many what-if questions about one capture, asked on all cores: by Ray where it is installed, else by processes.

Knows a file of questions, workers, and what to do when one of them dies; what a question means is
:mod:`dpro.search.question`'s. Every worker assembles the graph once, from the same path, and takes each question back
before the next, so that answers do not depend on who gave them nor on how many workers there are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from dpro.errors import DproError, TraceError
from dpro.graph.graph import Graph
from dpro.search.question import KEYS, ask

#: A product of more is a mistake.
MAX_QUESTIONS = 100_000
DIED = "the worker that was asked died"

Question = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """``predicted_ms`` is None where there is no answer; ``error`` then says why, in a line."""

    question: Question
    predicted_ms: float | None = None
    assumptions: Sequence[str] = ()
    error: str = ""


@dataclass(frozen=True)
class Sweep:
    """``on``: "ray" or "processes"; ``answers`` in the order of the questions."""

    answers: list[Answer]
    on: str
    warnings: list[str] = field(default_factory=list)


def read(file: Path) -> list[dict[str, Any]]:
    """The questions of a JSON file: a list of objects with :data:`~dpro.search.question.KEYS`, or one object of lists,
    which stands for all combinations, the last key's values changing fastest. ``null`` leaves a thing as it is.

    Raises:
        TraceError: naming the file and what is wrong with it.
    """
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        raise TraceError(file, error.strerror or "cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(file, f"not JSON ({error})") from error
    if isinstance(raw, dict):
        many = {key: value if isinstance(value, list) else [value] for key, value in raw.items()}
        count = 1
        for values in many.values():
            count *= len(values)
        _few_enough(file, count)
        raw = [dict(zip(many, values, strict=True)) for values in product(*many.values())] if many else []
    if not isinstance(raw, list):
        raise TraceError(file, "neither a list of questions nor an object of lists")
    if not raw:
        raise TraceError(file, "no question in it")
    _few_enough(file, len(raw))
    return [_question(file, number, item) for number, item in enumerate(raw, 1)]


def sweep(path: Path, questions: Sequence[Question], workers: int | None = None, ray: bool | None = None) -> Sweep:
    """Ask them all of the capture at ``path``, which every worker must see.

    Args:
        workers: how many (None: one for a core, and none without a question).
        ray: on Ray or not (None: where it is installed; if it does not start, on processes).
    """
    count = workers or max(1, min(os.cpu_count() or 1, len(questions)))
    notes = []
    if find_spec("ray") is not None if ray is None else ray:
        try:
            return Sweep(_on_ray(str(path.resolve()), questions, count), "ray")
        except _NoRay as error:
            if ray:
                raise
            notes.append(f"Ray did not start, so it went on processes: {error}")
    return Sweep(_on_processes(str(path.resolve()), questions, count), "processes", notes)


def words(question: Question) -> str:
    """A question as a person reads it."""
    said = ((key, ", ".join(map(str, value)) if isinstance(value, list) else value) for key, value in question.items())
    return "; ".join(f"{key} {value}" for key, value in said) or "as it is"


class _NoRay(DproError):
    """Ray is there and cannot be used."""


def _question(file: Path, number: int, item: Any) -> dict[str, Any]:
    """One question, checked for form; what it asks for is checked when it is asked."""
    if not isinstance(item, dict):
        raise TraceError(file, f"question {number} is no object")
    found = {}
    for key, value in item.items():
        if key not in KEYS:
            raise TraceError(file, f"question {number}: unknown key {key!r}; there are {', '.join(KEYS)}")
        if value is None:
            continue
        if key == "scale":
            value = [value] if isinstance(value, str) else value
            good = isinstance(value, list) and all(isinstance(part, str) for part in value)
        elif key == "workers":
            good = type(value) is int
        else:
            value = str(value) if key == "bandwidth" and type(value) in (int, float) else value
            good = isinstance(value, str)
        if not good:
            raise TraceError(file, f"question {number}: bad value for {key!r}: {str(value)[:60]}")
        found[key] = value
    return found


def _few_enough(file: Path, count: int) -> None:
    if count > MAX_QUESTIONS:
        raise TraceError(file, f"{count:,} questions; {MAX_QUESTIONS:,} are the most that can be asked")


# -- in a worker -----------------------------------------------------------------------------------


def _quiet() -> None:
    """What a person must know is in the answers; an interrupt is for who asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")


@lru_cache(maxsize=1)
def _graph(path: str) -> Graph:
    from dpro.graph.assemble import assemble
    from dpro.trace.store import load

    return assemble(load(Path(path)))


def _answer(path: str, question: Question) -> Answer:
    from dpro.replay.engine import replay

    try:
        graph = _graph(path)
        mark = graph.mark()
        try:
            said = ask(graph, question)
            return Answer(question, replay(graph).makespan_ns / 1e6, said)
        finally:
            graph.undo(mark)
    except DproError as error:
        return Answer(question, error=str(error))
    except Exception as error:  # one question must not cost the others
        return Answer(question, error=" ".join(f"internal error: {type(error).__name__}: {error}".split()))


# -- who asks --------------------------------------------------------------------------------------


def _on_processes(path: str, questions: Sequence[Question], workers: int) -> list[Answer]:
    """A worker that dies takes its pool with it: those that were asked then are asked again, each of a worker of its
    own, and whoever dies of that is known; then all go on.
    """
    answers: dict[int, Answer] = {}
    waiting = [*range(len(questions))]
    while waiting:
        _ask_pool(path, questions, waiting, workers, answers)
        waiting = [number for number in waiting if number not in answers]
        for number in waiting[: workers + 1]:  # a pool takes them in order, and one more than it has workers
            _ask_pool(path, questions, [number], 1, answers)
            answers.setdefault(number, Answer(questions[number], error=DIED))
        waiting = waiting[workers + 1 :]
    return [answers[number] for number in range(len(questions))]


def _ask_pool(
    path: str, questions: Sequence[Question], numbers: Sequence[int], workers: int, answers: dict[int, Answer]
) -> None:
    """Fill ``answers`` as far as the pool lives."""
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    pool = ProcessPoolExecutor(min(workers, len(numbers)), mp_context=spawn, initializer=_quiet)
    try:
        asked: dict[int, Future[Answer]] = {}
        try:
            for number in numbers:
                asked[number] = pool.submit(_answer, path, questions[number])
        except BrokenExecutor:
            pass  # what was not asked has no answer; the caller sees to it
        for number, future in asked.items():
            try:
                answers[number] = future.result()
            except BrokenExecutor:
                continue
    finally:
        pool.shutdown(cancel_futures=True)


def _on_ray(path: str, questions: Sequence[Question], workers: int) -> list[Answer]:
    """Raises :class:`_NoRay` where it cannot be started. A cluster that the process is in already is used as it is."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing of this is anybody's business
    try:
        import ray

        ours = not ray.is_initialized()
        if ours:
            local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": workers, "include_dashboard": False}
            ray.init(**local, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # a broken installation, no memory for its store, a cluster that is not there, …
        raise _NoRay(" ".join(str(error).split())[:200]) from error
    try:
        remote = ray.remote(max_retries=0)(_answer)
        asked = [remote.remote(path, question) for question in questions]
        answers = []
        for question, reference in zip(questions, asked, strict=True):
            try:
                answers.append(ray.get(reference))
            except ray.exceptions.WorkerCrashedError:
                answers.append(Answer(question, error=DIED))
            except ray.exceptions.RayError as error:  # a node that is gone, or does not have dpro
                answers.append(Answer(question, error=" ".join(str(error).split())[:200]))
        return answers
    finally:
        if ours:
            ray.shutdown()
