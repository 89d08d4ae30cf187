"""What a placement is worth: the replayed step, and the most that each device has allocated at once.

Knows placed tasks and the replayer; not who placed them. A buffer is there for each tensor on each device that has it:
from when its producer (or the transfer to the device) starts, until the last of its readers there, transfers of it to
elsewhere among them, has ended (HeteroG, CoNEXT 2020, section 5). What tasks keep (parameters) is there all the time,
and what such a task makes is what it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.graph.cluster import Cluster
from dpro.graph.graph import OpKind
from dpro.graph.tasks import CHANNEL, Ints, Placed, Tasks, lower
from dpro.replay.engine import Replay, replay


@dataclass(frozen=True)
class Judged:
    """``peak_bytes`` [devices]; ``fits``: no device needs more than it has."""

    placed: Placed
    played: Replay
    peak_bytes: npt.NDArray[np.int64]
    fits: bool

    @property
    def makespan_ns(self) -> int:
        return self.played.makespan_ns


def judge(tasks: Tasks, device: Ints, cluster: Cluster, priority: Ints | None = None) -> Judged:
    """Replay ``tasks`` [n] on ``device`` [n], by ``priority`` (None: first come, first served; see :func:`lower`).

    Raises:
        CycleError: some tasks wait for themselves.
    """
    placed = lower(tasks, device, cluster, priority)
    played = replay(placed.graph)
    peak = peak_bytes(placed, played, len(cluster))
    limit = cluster.memory_bytes()
    return Judged(placed, played, peak, bool(np.all((limit == 0) | (peak <= limit))))


def peak_bytes(placed: Placed, played: Replay, devices: int) -> npt.NDArray[np.int64]:
    """[devices]; what collectives work on is counted where it was made."""
    tasks, device = placed.tasks, placed.device
    start, end = played.start, played.end
    count = len(tasks.tensor_of)
    kept = np.zeros(devices, np.int64)
    here = device != CHANNEL
    np.add.at(kept, device[here], tasks.kept_bytes[here])

    home = device[tasks.tensor_of]
    # buffers: the tensors where they are made, then each transfer's where it arrives
    owner = np.concatenate([home, placed.sent_to])
    # what is kept is there already: a variable's tensor is no second copy of it
    variable = (tasks.kept_bytes > 0) & (tasks.kind == OpKind.LOCAL)
    own = np.where(variable[tasks.tensor_of], 0, tasks.tensor_bytes)
    nbytes = np.concatenate([own, tasks.tensor_bytes[placed.sent_tensor]])
    made = np.concatenate([start[tasks.tensor_of], start[placed.sent_op]])
    freed = np.concatenate([end[tasks.tensor_of], end[placed.sent_op]]).astype(np.int64)
    reader = device[tasks.use_task]
    local = (reader == home[tasks.use_tensor]) | (reader == CHANNEL) | (home[tasks.use_tensor] == CHANNEL)
    np.maximum.at(freed, tasks.use_tensor[local], end[tasks.use_task[local]])
    np.maximum.at(freed, placed.sent_tensor, end[placed.sent_op])
    key = placed.sent_tensor * devices + placed.sent_to
    # keys are sorted: lower() made them so
    at = np.searchsorted(key, tasks.use_tensor[~local] * devices + reader[~local])
    np.maximum.at(freed, count + at, end[tasks.use_task[~local]])

    peak: npt.NDArray[np.int64] = kept.copy()
    for d in range(devices):
        mine = owner == d
        if not mine.any():
            continue
        times = np.concatenate([made[mine], freed[mine]])
        change = np.concatenate([nbytes[mine], -nbytes[mine]])
        order = np.argsort(2 * times + (change > 0))  # at one instant what ends is freed before what begins is made
        peak[d] += max(0, int(np.cumsum(change[order]).max()))
    return peak
