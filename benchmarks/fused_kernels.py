"""What kernels take that do the work of several ops, timed on this machine: what DisCo's estimators are fitted to.

The training steps of :mod:`benchmarks.fused_models` are taken apart into XLA's ops (jaxpr equations). As in DisCo (TPDS
2022, section 5.2) a sample is an op, fused with a predecessor again and again; XLA compiles just these ops, for one
core without its thread pool, and without the library (YNNPACK) that TensorFlow 2.15's XLA does not have. All kernels
and all their ops are called in turn, each for a window of a third of a millisecond, again and again, so that those of
one are spread over minutes; a window counts where a yardstick before and after it says that the core is as fast as
ever. Its time is the core's own, one that few windows were shorter than (:meth:`Timed.ns`). How far a kernel is off in
every other window from what it is in the rest, relative to its ops, is what no estimator can know. No sample is
measured of two models.

``python -m benchmarks.fused_kernels --json [--seconds 600]`` prints ``{kernels, ops, windows, launch_ns,
windows_within_14pct, models, seconds}`` and keeps the samples in the user's cache folder, for ``benchmarks.disco``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fused_timing import Arrays, Timed, Yardstick, launch
from dpro.cost.fused import WITHIN, Floats, Kernel, Sample

CACHE = Path.home() / ".cache" / "dpro" / "fused_kernels.json"
#: One thread, and memory that is not given back between runs: a page taken anew costs more than what is written to it.
ENV = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_cpu_experimental_ynn_fusion_type= "
                 "intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_ARENA_MAX": "1",
}  # fmt: skip
MOST_OPS = 24
#: Of a model: what is compiled takes some 8 of the 65,530 mappings that Linux allows a process.
_MOST_KERNELS = 250
#: They share the models, compile at once and time at once, each on a core.
_PROCESSES = 2
#: Of the time, for compiling; the rest is for windows.
_COMPILING = 0.7
_LEAST_WINDOWS = 4
_ODD, _EVEN = slice(0, None, 2), slice(1, None, 2)
#: Never in a sample: not ops of a fused kernel in any compiler.
_NEVER = ("conv_general", "reduce_window", "select_and_scatter", "custom_", "while", "scan", "pjit")


@dataclass
class Op:
    """One equation. ``reads``: numbers of values, or literals; ``writes``: numbers of values."""

    name: str
    bind: Callable[..., Any]
    reads: list[Any]
    writes: list[int]
    shapes: str
    flops: float
    users: set[int] = field(default_factory=set)
    #: Of the ops, those that make what it reads.
    needs: set[int] = field(default_factory=set)


class Literal:
    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Steps:
    """A model's ops and values: ``shape`` and ``dtype`` by value; ``made``: value -> op."""

    model: str
    ops: list[Op]
    shapes: dict[int, tuple[tuple[int, ...], Any]]
    made: dict[int, int]
    results: set[int]

    def nbytes(self, value: int) -> int:
        shape, dtype = self.shapes[value]
        return int(np.prod(shape, dtype=np.int64) * dtype.itemsize)


def taken_apart(model: str, make: Callable[[], Any]) -> Steps:
    """The ops of a model's loss and its gradient."""
    import jax

    loss, arguments = make()
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(*arguments)
    steps = Steps(model, [], {}, {}, set())

    def value(aval: Any) -> int:
        steps.shapes[len(steps.shapes)] = (tuple(aval.shape), np.dtype(aval.dtype))
        return len(steps.shapes) - 1

    def walk(inner: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(inner.constvars, map(Literal, consts), strict=True))
        env |= dict(zip(inner.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return Literal(atom.val) if hasattr(atom, "val") else env[atom]

        for eqn in inner.eqns:
            reads = [read(atom) for atom in eqn.invars]
            nested = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if nested is not None:
                closed = hasattr(nested, "consts")
                body, held = (nested.jaxpr, nested.consts) if closed else (nested, [])
                outs = walk(body, held, reads)
                env |= dict(zip(eqn.outvars, outs, strict=True))
                continue
            writes = [value(var.aval) for var in eqn.outvars]
            env |= dict(zip(eqn.outvars, writes, strict=True))
            number = len(steps.ops)
            shapes = f"{[str(getattr(a, 'aval', a)) for a in eqn.invars]}{sorted(map(str, eqn.params.items()))}"
            op = Op(eqn.primitive.name, _binder(eqn), reads, writes, shapes, _flops(eqn))
            for v in reads:
                if isinstance(v, int) and v in steps.made:
                    steps.ops[steps.made[v]].users.add(number)
                    op.needs.add(steps.made[v])
            steps.made |= dict.fromkeys(writes, number)
            steps.ops.append(op)
        return [read(atom) for atom in inner.outvars]

    given = [value(var.aval) for var in jaxpr.jaxpr.invars]
    steps.results = {v for v in walk(jaxpr.jaxpr, jaxpr.consts, given) if isinstance(v, int)}
    return steps


def _binder(eqn: Any) -> Callable[..., Any]:
    params = eqn.primitive.get_bind_params(eqn.params)
    return lambda *args: eqn.primitive.bind(*args, **params)


def _flops(eqn: Any) -> float:
    out = float(sum(np.prod(var.aval.shape) for var in eqn.outvars))
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * float(np.prod([eqn.invars[0].aval.shape[d] for d in contracted]))
    if eqn.primitive.name.startswith(("reduce", "arg", "cum")):
        return float(np.prod(eqn.invars[0].aval.shape))
    return out


def sampled(steps: Steps, rng: np.random.Generator) -> tuple[tuple[int, ...], set[int]] | None:
    """Ops of a random fused kernel and, of those, the ones whose values others read; None where nothing came of it."""
    able = [not op.name.startswith(_NEVER) for op in steps.ops]
    last = int(rng.integers(len(steps.ops)))
    if not able[last]:
        return None
    duplicate = bool(rng.integers(2))
    target = round(2 * (MOST_OPS / 2) ** rng.random())
    inside = {last}
    heavy = steps.ops[last].name == "dot_general"
    while len(inside) < target:
        near = sorted({p for op in inside for p in steps.ops[op].needs} - inside)
        near = [p for p in near if able[p] and not (heavy and steps.ops[p].name == "dot_general")]
        near = [p for p in near if duplicate or not _leads_back(steps, p, inside)]
        if not near:
            break
        new = near[int(rng.integers(len(near)))]
        inside.add(new)
        heavy |= steps.ops[new].name == "dot_general"
    if len(inside) < 2:
        return None
    exported = {last}
    if not duplicate:
        exported |= {
            op for op in inside
            if steps.ops[op].users - inside or any(v in steps.results for v in steps.ops[op].writes)
        }  # fmt: skip
    return tuple(sorted(inside)), exported


def _leads_back(steps: Steps, op: int, inside: set[int]) -> bool:
    """Whether what ``op`` makes goes outside and comes back into ``inside``: fused they would wait for themselves."""
    most = max(inside)
    seen: set[int] = set()
    waiting = [user for user in steps.ops[op].users if user not in inside]
    while waiting:
        user = waiting.pop()
        if user in inside:
            return True
        if user < most and user not in seen:
            seen.add(user)
            waiting += steps.ops[user].users
    return False


def compiled(steps: Steps, ops: Sequence[int], exported: set[int], arrays: Arrays) -> Timed:
    """XLA's kernel of ``ops``."""
    import jax

    made = {v for op in ops for v in steps.ops[op].writes}
    inputs = [v for op in ops for v in steps.ops[op].reads if isinstance(v, int) and v not in made]
    inputs = list(dict.fromkeys(inputs))
    outputs = [v for op in ops if op in exported for v in steps.ops[op].writes]

    def run(*args: Any) -> Any:
        env: dict[int, Any] = dict(zip(inputs, args, strict=True))
        for number in ops:
            op = steps.ops[number]
            out = op.bind(*[env[v] if isinstance(v, int) else v.value for v in op.reads])
            env |= dict(zip(op.writes, out if isinstance(out, (list, tuple)) else [out], strict=True))
        return [env[v] for v in outputs]

    given = arrays.of([steps.shapes[v] for v in inputs])
    function = jax.jit(run)

    def call() -> Any:
        return jax.block_until_ready(function(*given))

    call()
    return Timed(call)


def kernel_of(steps: Steps, ops: Sequence[int], exported: set[int], alone_ns: Sequence[float]) -> Kernel:
    """What an estimator is told of a sample."""
    at = {op: i for i, op in enumerate(ops)}
    inside, outside = [], set()
    for number in ops:
        for v in {v for v in steps.ops[number].reads if isinstance(v, int)}:
            maker = steps.made.get(v, -1)
            if maker in at:
                inside.append((at[maker], at[number], steps.nbytes(v)))
            else:
                outside.add(v)
    table = np.array(inside, dtype=np.int64).reshape(-1, 3)

    def total(values: Sequence[Any]) -> float:
        return float(sum(steps.nbytes(v) for v in dict.fromkeys(v for v in values if isinstance(v, int))))

    return Kernel(
        tuple(steps.ops[op].name for op in ops), np.array(alone_ns, dtype=np.float64),
        np.array([total(steps.ops[op].reads) for op in ops]), np.array([total(steps.ops[op].writes) for op in ops]),
        np.array([steps.ops[op].flops for op in ops]), table[:, 0], table[:, 1], table[:, 2].astype(np.float64),
        np.array([op in exported for op in ops]), len(outside), total(sorted(outside)),
    )  # fmt: skip


@dataclass
class Found:
    """A kernel that was compiled, of ``ops`` of a model; ``alone``: each of them; ``text``: see :func:`_text`."""

    steps: Steps
    ops: tuple[int, ...]
    exported: set[int]
    text: str
    alone: list[Timed]
    whole: Timed

    def least_windows(self) -> int:
        return min(len(one.taken) for one in (self.whole, *self.alone))

    def row(self) -> dict[str, Any]:
        kernel = kernel_of(self.steps, self.ops, self.exported, [one.ns() for one in self.alone])
        odd, even = (self.whole.ns(half) / sum(one.ns(half) for one in self.alone) for half in (_ODD, _EVEN))
        return {"model": self.steps.model, "took_ns": self.whole.ns(), "again": even / odd, **_row(kernel)}


class Compiler:
    """Compiles kernels and, once for each name and shapes, the ops in them."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._arrays = Arrays(self._rng)
        self._seen: set[str] = set()
        self.alone: dict[str, Timed] = {}
        self.found: list[Found] = []

    def sample(self, steps: Steps, until: float) -> None:
        """Kernels of a model, until then."""
        end = len(self.found) + _MOST_KERNELS
        misses = 0
        while time.monotonic() < until and misses < 300 and len(self.found) < end:
            picked = sampled(steps, self._rng)
            text = "" if picked is None else _text(steps, *picked)
            if picked is None or text in self._seen:
                misses += 1
                continue
            misses = 0
            self._seen.add(text)
            alone = [self._op(steps, op) for op in picked[0]]
            self.found.append(Found(steps, *picked, text, alone, compiled(steps, *picked, self._arrays)))

    def _op(self, steps: Steps, op: int) -> Timed:
        key = steps.ops[op].name + steps.ops[op].shapes
        if key not in self.alone:
            self.alone[key] = compiled(steps, [op], {op}, self._arrays)
        return self.alone[key]


def measure(seconds: float) -> dict[str, Any]:
    """Samples of all models, taken and timed by several processes, each on a core; see the module text."""
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    count = min(_PROCESSES, len(cores))
    barrier = context.Barrier(count)
    with concurrent.futures.ProcessPoolExecutor(count, context, _enter, (barrier,)) as pool:
        parts = [one.result() for one in [pool.submit(_part, seconds, k, cores[:count]) for k in range(count)]]
    rows: dict[str, Any] = {}
    for text, row in itertools.chain.from_iterable(part["rows"] for part in parts):
        rows.setdefault(text, row)
    return {
        "launch_ns": min(part["launch_ns"] for part in parts), "seconds": max(part["seconds"] for part in parts),
        "windows": min(part["windows"] for part in parts), "ops": sum(part["ops"] for part in parts),
        "samples": list(rows.values()),
    }  # fmt: skip


def _enter(barrier: Any) -> None:
    global _all_compiled
    _all_compiled = barrier


_all_compiled: Any = None


def _part(seconds: float, part: int, cores: Sequence[int]) -> dict[str, Any]:
    """What one of the processes does."""
    began = time.monotonic()
    os.sched_setaffinity(0, {cores[part]})
    import jax

    from benchmarks.fused_models import FOLDS

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    compiler = Compiler(part)
    models = [pair for fold in FOLDS for pair in fold.items()][part :: len(cores)]
    for k, (name, make) in enumerate(models):
        compiler.sample(taken_apart(name, make), began + _COMPILING * seconds * (k + 1) / len(models))
        print(f"  {name}: {len(compiler.found)} kernels so far", file=sys.stderr, flush=True)
    gc.collect()
    gc.freeze()  # so many objects of the compiler's: looking through them would fall into windows
    empty = Timed(launch())
    circle = itertools.cycle([empty, *compiler.alone.values(), *(one.whole for one in compiler.found)])
    yard = Yardstick()
    left = began + seconds - time.monotonic()
    _all_compiled.wait(seconds)
    until = time.monotonic() + left
    while next(circle).window(yard, until):
        pass
    enough = [one for one in compiler.found if one.least_windows() >= _LEAST_WINDOWS]
    if not enough or len(empty.taken) < _LEAST_WINDOWS:
        raise SystemExit(f"the cores were never free for long enough in {left:.0f} s: try again, or for longer")
    return {
        "launch_ns": empty.ns(), "seconds": time.monotonic() - began, "ops": len(compiler.alone),
        "windows": min(one.least_windows() for one in enough), "rows": [(one.text, one.row()) for one in enough],
    }  # fmt: skip


def _text(steps: Steps, ops: tuple[int, ...], exported: set[int]) -> str:
    """Equal for kernels that compile to the same."""
    number: dict[int, int] = {}
    parts = []
    for op in ops:
        reads = [number.setdefault(v, len(number)) if isinstance(v, int) else "c" for v in steps.ops[op].reads]
        writes = [number.setdefault(v, len(number)) for v in steps.ops[op].writes]
        parts.append(f"{steps.ops[op].name}{steps.ops[op].shapes}{reads}{writes}{op in exported}")
    return ";".join(parts)


_ARRAYS = ("time_ns", "in_bytes", "out_bytes", "flops", "source", "target", "edge_bytes", "exported")


def _row(kernel: Kernel) -> dict[str, Any]:
    row: dict[str, Any] = {f"op_{key}": getattr(kernel, key).tolist() for key in _ARRAYS}
    return {**row, "types": list(kernel.types), "inputs": kernel.inputs, "read_bytes": kernel.read_bytes}


def load(path: Path = CACHE) -> tuple[list[Sample], dict[str, Any]]:
    """The samples kept there, and what else was said of them.

    Raises:
        OSError, ValueError, KeyError: there are none.
    """
    kept = json.loads(path.read_text(encoding="utf-8"))
    kept["windows"]  # older ones were not timed in windows
    kinds = {"source": np.int64, "target": np.int64, "exported": np.bool_}
    out = []
    for row in kept.pop("samples"):
        columns: Any = {key: np.array(row[f"op_{key}"], dtype=kinds.get(key, np.float64)) for key in _ARRAYS}
        kernel = Kernel(types=tuple(row["types"]), inputs=row["inputs"], read_bytes=row["read_bytes"], **columns)
        out.append(Sample(kernel, row["model"], row["took_ns"]))
        kept.setdefault("again", []).append(row["again"])
    return out, kept


def timed_again(kept: dict[str, Any]) -> Floats:
    """How far each kernel, relative to its ops, is off in every other window from what it is in the rest."""
    off: Floats = np.abs(np.array(kept["again"]) - 1)
    return off


def said(samples: Sequence[Sample], kept: dict[str, Any]) -> dict[str, Any]:
    """What is printed of a measurement."""
    same = timed_again(kept) <= WITHIN
    models = sorted({s.model for s in samples})
    return {
        "kernels": len(samples), "ops": kept["ops"], "windows": kept["windows"], "launch_ns": round(kept["launch_ns"]),
        "windows_within_14pct": round(float(same.mean()), 4),
        "models": {m: sum(s.model == m for s in samples) for m in models}, "seconds": round(kept["seconds"], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document last")
    parser.add_argument("--seconds", type=float, default=600.0, help="to measure")
    arguments = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in ENV.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.fused_kernels", *sys.argv[1:]], os.environ | ENV)
    kept = measure(arguments.seconds)
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    CACHE.write_text(json.dumps(kept), encoding="utf-8")
    summary = said(*load())
    if arguments.json:
        print(json.dumps(summary, indent=1))
    else:
        print("\n".join(f"{key}: {value}" for key, value in summary.items()))


if __name__ == "__main__":
    main()
