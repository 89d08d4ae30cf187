"""Contiguous groupings of gradients that are worth a replay, from dynamic programming on a timeline.

Knows one step as a timeline of few numbers per tensor (:class:`Timeline`), not the graph's ops: what it
says is approximate and cheap, and the replay is the judge. A grouping is written as its *cuts*: the
positions after which a bucket ends, increasing, the last one being the number of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpro.cost.sync import SyncModel

Cuts = tuple[int, ...]

#: More tensors than this are joined to units of about equal size before the O(units² · buckets) search.
MAX_UNITS = 192
MAX_BUCKETS = 64


@dataclass(frozen=True)
class Timeline:
    """One step without synchronisation, and what synchronisation adds. All times ns from the step's start.

    ``ready_ns[j]``: tensor j's gradient is ready on the last rank. ``cum_bytes``, ``cum_copy_ns`` [n + 1]:
    bytes, and host time to hand the reduced gradients on, of the first j tensors. ``host_ns``: the host
    starts to wait for the first bucket; ``rest_ns``: from the last gradient handed on to the step's end.
    ``in_flight``: collectives that may be under way (here each has the channel to itself, latency and all).
    """

    ready_ns: npt.NDArray[np.int64]
    cum_bytes: npt.NDArray[np.int64]
    cum_copy_ns: npt.NDArray[np.int64]
    host_ns: float
    rest_ns: float
    launch_ns: float
    model: SyncModel
    in_flight: int = 1

    def __len__(self) -> int:
        return len(self.ready_ns)

    def buckets(self, cuts: Cuts) -> list[tuple[float, float]]:
        """(ready, end of the collective) per bucket, ns.

        Bucket m starts when its last gradient is ready and bucket m-1 has ended. Launches delay everything
        after them, and so does contention: if the channel has gone idle all earlier bytes have been paid
        for by the host, and if it has not, its own end is the later of the two anyway.
        """
        out = []
        end, begin = 0.0, 0
        for m, cut in enumerate(cuts):
            paid = self.model.steal_ns_per_byte * float(self.cum_bytes[begin])
            ready = float(self.ready_ns[cut - 1]) + (m + 1) * self.launch_ns + paid
            nbytes = float(self.cum_bytes[cut] - self.cum_bytes[begin])
            end = max(ready, end) + self.model.latency_ns + self.model.ns_per_byte * nbytes
            out.append((ready, end))
            begin = cut
        return out

    def estimate_ns(self, cuts: Cuts) -> float:
        """Length of the step, ns."""
        host, begin = self.host_ns + len(cuts) * self.launch_ns, 0
        for cut, (_, end) in zip(cuts, self.buckets(cuts), strict=True):
            host = max(host, end) + float(self.cum_copy_ns[cut] - self.cum_copy_ns[begin])
            begin = cut
        return host + self.rest_ns


def best_cuts(timeline: Timeline) -> list[Cuts]:
    """For every number of buckets (up to 64) the cuts that end the step first, under 1, 2 and 4 times the
    fitted latency: overlap and contention make small buckets dearer than the fit says.

    Dynamic programming over (buckets so far m, tensors so far j), vectorised over j and the cut before it:
    ``F_m(j) = min_i max(ready_j + m·launch + stolen_i, F_{m-1}(i)) + t_sync(i, j)``. Exact for the timeline,
    since an earlier end of the channel is never worse; the last layer adds the last bucket's copies.
    O(units² · buckets) time.
    """
    edges = np.concatenate([[0], _units(timeline)])
    found: dict[Cuts, None] = {}
    for factor in (1.0, 2.0, 4.0):
        model = replace(timeline.model, latency_ns=timeline.model.latency_ns * factor)
        found.update(dict.fromkeys(_layers(replace(timeline, model=model), edges)))
        if not model.latency_ns:
            break
    return list(found)


def _layers(timeline: Timeline, edges: npt.NDArray[np.int64]) -> list[Cuts]:
    model, n = timeline.model, len(edges) - 1
    size = timeline.cum_bytes[edges].astype(np.float64)
    copy = timeline.cum_copy_ns[edges].astype(np.float64)
    ready = np.concatenate([[0.0], timeline.ready_ns[edges[1:] - 1]])
    # [i, j]: a bucket of the units i..j-1; impossible unless i < j.
    start = ready[None, :] + model.steal_ns_per_byte * size[:, None]
    sync = model.latency_ns + model.ns_per_byte * (size[None, :] - size[:, None])
    sync[np.tril_indices(n + 1)] = np.inf
    tail = copy[n] - copy

    end = np.full(n + 1, np.inf)
    end[0] = 0.0
    chosen: list[npt.NDArray[np.int64]] = []
    out: list[Cuts] = []
    for m in range(1, min(n, MAX_BUCKETS) + 1):
        total = np.maximum(start + m * timeline.launch_ns, end[:, None]) + sync
        at = int(np.argmin(total[:, n] + tail))
        if np.isfinite(total[at, n]):
            cuts = [n, at]
            for layer in reversed(chosen):
                cuts.append(int(layer[cuts[-1]]))
            out.append(tuple(int(edges[c]) for c in reversed(cuts[:-1])))
        chosen.append(np.argmin(total, axis=0))
        end = np.min(total, axis=0)
    return out


def _units(timeline: Timeline) -> npt.NDArray[np.int64]:
    """Cuts the search may use: all, or those nearest to equal shares of the bytes."""
    n = len(timeline)
    if n <= MAX_UNITS:
        return np.arange(1, n + 1)
    shares = np.linspace(0, timeline.cum_bytes[-1], MAX_UNITS + 1)[1:]
    cuts = np.searchsorted(timeline.cum_bytes, shares, side="left")
    return np.unique(np.append(np.clip(cuts, 1, n), n))


def neighbours(timeline: Timeline, cuts: Cuts) -> list[Cuts]:
    """Cuts one move away: a cut moved by 1, 2, 4, … tensors, two buckets merged, one split.

    Merges that :func:`fusion_pays` refuses are left out, unless a launch less is worth more to the buckets after them
    than a later end costs these; splits are where half the bytes, and half the waiting for the last gradient, lie.
    """
    found: list[Cuts] = []
    bounds = (0, *cuts)
    times = timeline.buckets(cuts)
    for k in range(1, len(bounds)):
        before, low, cut, after = cuts[: k - 1], bounds[k - 1], bounds[k], cuts[k:]
        if after:
            step = 1
            while step < after[0] - low:
                found += [(*before, moved, *after) for moved in (cut - step, cut + step) if low < moved < after[0]]
                step *= 2
            merged = (*before, *after)
            if _merge_pays(timeline, low, cut, after[0], times[max(0, k - 2) : k + 1]) or (
                timeline.launch_ns and timeline.estimate_ns(merged) < timeline.estimate_ns(cuts)
            ):
                found.append(merged)
        half_bytes = (timeline.cum_bytes[low] + timeline.cum_bytes[cut]) / 2
        half_time = (timeline.ready_ns[low] + timeline.ready_ns[cut - 1]) / 2
        middles = (
            int(np.searchsorted(timeline.cum_bytes, half_bytes)),
            int(np.searchsorted(timeline.ready_ns, half_time, side="right")),
            low + 1,
            cut - 1,
        )
        found += [(*before, at, cut, *after) for at in middles if low < at < cut]
    return [moved for moved in dict.fromkeys(found) if moved != cuts]


def _merge_pays(timeline: Timeline, low: int, cut: int, high: int, times: list[tuple[float, float]]) -> bool:
    """Theorem 2 for two adjacent buckets; ``times`` of up to three, ending with the second of them.

    The theorem is one of a channel that takes one after another and time from nobody. Where the latency of one passes
    beside another's bytes, or transfers take time from the host, it says nothing.
    """
    if timeline.in_flight > 1 or timeline.model.steal_ns_per_byte:
        return True
    first, second = (float(timeline.cum_bytes[b] - timeline.cum_bytes[a]) for a, b in ((low, cut), (cut, high)))
    return fusion_pays(
        ready_ns=times[-1][0] - timeline.launch_ns,
        end_before_last_ns=times[-3][1] if len(times) == 3 else 0.0,
        end_last_ns=times[-2][1],
        sync_ns=timeline.model.time_ns(second),
        fused_sync_ns=timeline.model.time_ns(first + second),
        slack_ns=2 * timeline.launch_ns,
    )


def fusion_pays(
    *,
    ready_ns: float,
    end_before_last_ns: float,
    end_last_ns: float,
    sync_ns: float,
    fused_sync_ns: float,
    slack_ns: float = 0.0,
) -> bool:
    """dPRO's Theorem 2 in its general form: whether to fuse tensors n-1 and n, by when the second ends.

    ``max(p_n, q_{n-1}) + t_sync(s_n) > max(p_n, q_{n-2}) + t_sync(s_{n-1} + s_n)``, with p_n when gradient n
    is ready, q_k when tensor k's synchronisation ends. (The paper's form assumes the channel is busy when n
    becomes ready.) ``slack_ns``: what else fusing saves, a launch.
    """
    apart = max(ready_ns, end_last_ns) + sync_ns
    return apart + slack_ns > max(ready_ns, end_before_last_ns) + fused_sync_ns
