import numpy as np
import numpy.typing as npt

def replay(
    resource: npt.NDArray[np.int32],
    duration: npt.NDArray[np.int64],
    gap: npt.NDArray[np.int64],
    priority: npt.NDArray[np.int32],
    indptr: npt.NDArray[np.int64],
    indices: npt.NDArray[np.int32],
    resources: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32], int, int, int]:
    """Start, end, cause [ops] of every op, makespan (ns), ops that ran, peak working bytes.

    Raises:
        ValueError: lengths disagree, an index is out of range, a time is negative or too long.
        TypeError: an array has another dtype than named, or is not contiguous.
    """
