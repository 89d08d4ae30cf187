"""Models for placement: the public ones (PipeDream's profiles, ``../shared/graphs``), made-up large ones, small tasks.

Knows graphs only. What is made up follows from a seed.
"""

from __future__ import annotations

import random
from pathlib import Path

from dpro.graph.graph import OpKind
from dpro.graph.tasks import Tasks, TasksBuilder
from dpro.passes.replicate import replicate
from dpro.trace import pipedream
from dpro.trace.model_graph import ModelGraph, read

GRAPHS = Path(__file__).resolve().parents[2] / "shared" / "graphs"
PIPEDREAM = ("vgg16", "resnet50", "inception_v3", "alexnet")
US = 1_000


def public(name: str) -> ModelGraph:
    """A PipeDream profile.

    Raises:
        TraceError: the public graphs are not here.
    """
    return read(GRAPHS / "pipedream" / f"{name}.graph.txt")


def branching(ops: int, seed: int = 0) -> ModelGraph:
    """At least ``ops`` ops: blocks of one to four branches of convolutions that are put together again."""
    rng = random.Random(seed)
    lines: list[str] = []
    edges: list[str] = []
    count = 0

    def layer(words: str, before: list[str], parameters: int = 0) -> str:
        nonlocal count
        name = f"node{len(lines) + 1}"
        forward_ms = rng.uniform(0.1, 3.0) if parameters else rng.uniform(0.02, 0.3)
        lines.append(
            f"{name} -- {words} -- forward_compute_time={forward_ms:.3f}, backward_compute_time={2 * forward_ms:.3f}, "
            f"activation_size={rng.randint(1, 50) * 1e6:.1f}, parameter_size={parameters:.1f}"
        )
        edges.extend(f"\t{one} -- {name}" for one in before)
        count += 4 if parameters else 2
        return name

    last = layer("Conv2d(3, 64)", [], 10_000)
    while count < ops:
        ends = []
        for _ in range(rng.randint(1, 4)):
            end = last
            for _ in range(rng.randint(1, 3)):
                end = layer("ReLU()", [layer("Conv2d(64, 64)", [end], rng.randint(10_000, 8_000_000))])
            ends.append(end)
        last = layer("Concat(1)", ends) if len(ends) > 1 else ends[0]
    return pipedream.parse("\n".join([*lines, *edges]), Path("branching"))


def small_tasks(number: int) -> tuple[Tasks, int, float]:
    """(tasks, devices, GB/s) of the ``number``-th instance: up to 60 ops, 2 and 4 devices in turn.

    Odd ones are data-parallel graphs of small models, even ones random graphs whose tensors take from a tenth to once
    and a half of what an op takes; every tenth is large for a proof. Times are whole microseconds.
    """
    rng = random.Random(f"small tasks {number}")
    devices = 2 if number % 4 < 2 else 4
    tasks = _replicated(rng, devices) if number % 2 else _random(rng, 28 if number % 10 else 60)
    return tasks, devices, 10.0


def _random(rng: random.Random, most: int) -> Tasks:
    build = TasksBuilder()
    n = rng.randint(10, most)
    width = rng.randint(2, 6)
    ratio = rng.uniform(0.1, 1.5)
    for i in range(n):
        build.task(f"op{i}", "Op", OpKind.FORWARD, rng.randint(50, 500) * US)
    for i in range(n):
        # readers among the next few: neither a chain nor a bag
        near = range(i + 1, min(n, i + 1 + 2 * width))
        readers = sorted(rng.sample(near, min(len(near), rng.randint(1, 2))))
        if readers:
            build.tensor(i, round(rng.uniform(0.2, 1.8) * ratio * 275) * 10_000, readers)
    return build.build()


def _replicated(rng: random.Random, devices: int) -> Tasks:
    layers = rng.randint(2, 8 if devices == 2 else 5)
    lines, edges = [], []
    for i in range(layers):
        forward_us = rng.randint(100, 600) * devices
        size = rng.randint(1, 60) * 100_000
        parameters = rng.choice([0, rng.randint(1, 60) * 100_000])
        lines.append(
            f"node{i} -- Linear(8, 8) -- forward_compute_time={forward_us / 1e3}, "
            f"backward_compute_time={2 * forward_us / 1e3}, activation_size={size * devices}, "
            f"parameter_size={parameters}"
        )
        if i:
            edges.append(f"\tnode{i - 1} -- node{i}")
    return replicate(pipedream.parse("\n".join([*lines, *edges]), Path("small")), devices)
