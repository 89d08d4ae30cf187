"""What the ranks' contributions to a meeting come to, and how what a tuner does is kept from the job.

Knows no job and no phase.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dpro.adapter import RankLeft
from dpro.errors import DproError, PlanError
from dpro.plan import Plan
from dpro.verdict import slowest_rank


def slowest_of_each_step(blobs: list[bytes]) -> dict[str, Any]:
    """The slowest rank's ms per step, from every rank's JSON list."""
    return {"ms": slowest_rank([json.loads(blob) for blob in blobs]).tolist()}


def largest_peak(blobs: list[bytes]) -> dict[str, Any]:
    """The largest rank's peak; None where a rank could not tell."""
    peaks = [json.loads(blob) for blob in blobs]
    return {"peak": None if None in peaks else max(peaks)}


def same_plan(blobs: list[bytes]) -> dict[str, Any]:
    """Refuse ranks that hold different plans; say whether their parameters agree."""
    seen = [json.loads(blob) for blob in blobs]
    for rank, entry in enumerate(seen):
        if entry["sha"] != seen[0]["sha"]:
            raise PlanError(f"rank {rank} holds another plan than rank 0 (hashes differ)")
    return {"sound": len({entry.get("checksum") for entry in seen}) == 1}


def offer_given(plan: Plan, blobs: list[bytes]) -> dict[str, Any]:
    """A given plan, which all ranks must hold, as what there is to try; with the slowest rank's ms per step."""
    same_plan(blobs)
    offer = {"plan": plan.dumps(), "name": "given plan", "predicted_ms": plan.predicted_ms}
    ms = slowest_rank([json.loads(blob)["ms"] for blob in blobs]).tolist()
    return {"plans": [offer], "ms": ms, "must_fit": plan.predicted_bytes is not None}


@contextmanager
def seed_kept() -> Iterator[None]:
    """What we import on the way may draw from the generator that the job has seeded."""
    drawn = random.getstate()
    try:
        yield
    finally:
        random.setstate(drawn)


def describe(error: BaseException) -> str:
    """One line for a person: dpro's own errors speak for themselves, others carry their type."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (DproError, TimeoutError, RankLeft)):
        return text
    return f"{type(error).__name__}: {text}"


def quietly(call: Callable[[], Any]) -> None:
    """For clean-up on the way out: nothing that happens there may reach the job."""
    try:
        call()
    except Exception:
        return
