"""How long compiled things take on this machine, beside neighbours: windows on a core that is as fast as ever.

Knows things to call, not what they are. :mod:`benchmarks.fused_kernels` uses it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_WINDOW_NS = 3e5
#: Of a thing's windows, the share that may have been shorter than its time.
_QUIET = 0.2
#: As the yardstick's least: the core is not slow.
_AS_FAST = 1.12


def _cpu_ns(call: Callable[[], Any], times: int) -> float:
    """Of the thread, so that whoever takes the core in between is not counted; all runs on it."""
    began = time.thread_time_ns()
    for _ in range(times):
        call()
    return (time.thread_time_ns() - began) / times


class Yardstick:
    """Something that always does the same: how long it takes says whether the core is slow at the moment."""

    def __init__(self) -> None:
        self._numbers = np.full(20_000, 0.5, np.float32)
        self._out = np.empty_like(self._numbers)
        self._least_ns = float(np.median([self._ns() for _ in range(300)]))

    def _ns(self) -> float:
        return min(_cpu_ns(lambda: np.exp(self._numbers, out=self._out), 1) for _ in range(3))

    def fast(self) -> bool:
        took = self._ns()
        if self._least_ns / 2 < took < self._least_ns:  # a clock that was set in between says anything
            self._least_ns = took
        return took <= _AS_FAST * self._least_ns


@dataclass
class Timed:
    """Something that is called again and again; ``taken``: ns a call, by window."""

    call: Callable[[], Any]
    taken: list[float] = field(default_factory=list)

    def window(self, yard: Yardstick, until: float) -> bool:
        """Timed while the core is as fast as ever; False: it was not, until then."""
        while time.monotonic() < until:
            if not yard.fast():
                continue
            self.call()  # what it reads is in the cache, as when it is called often
            first = _cpu_ns(self.call, 1)
            took = _cpu_ns(self.call, max(1, min(30, int(_WINDOW_NS / max(first, 1.0)))))
            if yard.fast():
                self.taken.append(min(first, took))
                return True
        return False

    def ns(self, part: slice = slice(None)) -> float:
        """Of the windows, one that few were shorter than: a neighbour makes calls longer, never shorter."""
        return float(np.quantile(self.taken[part], _QUIET))


class Arrays:
    """Random numbers; the same arrays for all that read a shape, in the order in which they read it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._made: dict[tuple[Any, int], Any] = {}

    def of(self, shapes: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
        out, count = [], Counter[Any]()
        for shape, dtype in shapes:
            key = (shape, dtype.str), count[shape, dtype.str]
            if key not in self._made:
                self._made[key] = _random(shape, dtype, self._rng)
            out.append(self._made[key])
            count[shape, dtype.str] += 1
        return out


def _random(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
    import jax.numpy as jnp

    if dtype.kind == "f":
        return jnp.asarray(rng.uniform(0.1, 1.0, shape).astype(dtype))
    return jnp.asarray(rng.integers(0, 2, shape).astype(dtype))


def launch() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    one = jnp.float32(1)
    function = jax.jit(lambda x: x + 1)
    return lambda: jax.block_until_ready(function(one))
