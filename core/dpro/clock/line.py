"""From one clock to another: an offset and a drift, a line. Nothing here estimates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Line:
    """``t`` of one clock is ``t + offset_ns + drift · (t - reference_ns)`` of the other."""

    offset_ns: int
    drift: float
    reference_ns: int

    def __call__(self, t: int) -> int:
        return t + self.offset_ns + round(self.drift * (t - self.reference_ns))

    def apply(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        moved: npt.NDArray[np.int64] = times + self.offset_ns
        if self.drift:  # ns since the epoch don't fit into a float, those since the reference do
            moved += np.rint(self.drift * (times - self.reference_ns)).astype(np.int64)
        return moved

    def inverse(self) -> Line:
        return Line(-self.offset_ns, -self.drift / (1 + self.drift), self.reference_ns + self.offset_ns)

    def after(self, first: Line) -> Line:
        """This line applied to what ``first`` gives."""
        there = first(first.reference_ns)
        drift = first.drift + self.drift * (1 + first.drift)
        return Line(self(there) - first.reference_ns, drift, first.reference_ns)

    def about(self, reference_ns: int) -> Line:
        """The same line with another reference."""
        return Line(self(reference_ns) - reference_ns, self.drift, reference_ns)


IDENTITY = Line(0, 0.0, 0)
