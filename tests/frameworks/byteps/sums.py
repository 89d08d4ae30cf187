"""What the sum tests push, and how a result is judged: numpy alone, the same for every framework.

In round i rank r pushes 4 i + r + 1 on top of a pattern that says which element it is. So a rank's own value, the
other's, the other's next one, the right sum and the sum of the round before are all different, and a result that
stands at a wrong place is seen, too. All values are integers below 2^24: exact in float32.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 40
PARTITION_BYTES = 65536
#: Elements of 4 bytes: one; less than a page; below, at and above one partition; several, the last of them partial.
ELEMENTS = (1, 1000, 16383, 16384, 16385, 60000)


def pattern(elements: int) -> np.ndarray:
    return (np.arange(elements) % 1021 * 16).astype(np.float32)


def pushed(elements: int, round_: int, rank: int) -> np.ndarray:
    return pattern(elements) + np.float32(4 * round_ + rank + 1)


def expected(elements: int, round_: int, ranks: int) -> np.ndarray:
    return ranks * pattern(elements) + np.float32(ranks * 4 * round_ + ranks * (ranks + 1) // 2)


def judge(result: np.ndarray, round_: int, ranks: int) -> str:
    """ "" if every element is right; else what is wrong, in a line."""
    want = expected(result.size, round_, ranks)
    wrong = np.flatnonzero(result != want)
    if not wrong.size:
        return ""
    first = int(wrong[0])
    left = float(result[first] - ranks * pattern(result.size)[first])
    return f"round {round_}, {result.size} elements: {wrong.size} wrong, from {first}: {left} over the pattern"
