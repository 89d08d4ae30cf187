"""Which device holds a variable that is in one place: the one where its gradient's sum is done first, by estimate.

Knows links and bytes; not when ops run. HeteroG (CoNEXT 2020, section 3): the parameter server is the replica's device
that minimises the time at which aggregation ends. Estimated from what each link has been given so far: gradients come
in the order of the backward pass, each is pushed to the server and the variable pulled from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro.graph.cluster import Cluster
from dpro.graph.tasks import Ints

Floats = npt.NDArray[np.float64]
_OTHERS = 1e-6


@dataclass(frozen=True)
class _Paths:
    """What a push to and a pull from each candidate takes of each link, [candidates, links] ns and ns a byte."""

    candidates: Ints
    latency_ns: Floats
    ns_per_byte: Floats
    used: npt.NDArray[np.bool_]
    links: int


class Servers:
    """For one model on one cluster.

    Args:
        gradients: (variable, bytes, ops that make its gradient or read it), in the order in which they are made.
    """

    def __init__(self, cluster: Cluster, gradients: list[tuple[int, int, tuple[int, ...]]]) -> None:
        self._cluster = cluster
        self._gradients = [(variable, nbytes, np.array(ops)) for variable, nbytes, ops in gradients]
        self._paths: dict[tuple[bytes, bytes], _Paths] = {}
        self._known: dict[tuple[int, int, bytes], _Paths] = {}

    def choose(self, form: Ints, devices: npt.NDArray[np.bool_], alone: npt.NDArray[np.bool_]) -> Ints:
        """[ops] the device of each variable that is ``alone`` [ops]; of others the first one of its form.

        Args:
            form: [ops] as a row of ``devices`` [forms, devices].
        """
        at: Ints = devices.argmax(axis=1)[form]
        load = np.zeros(len(self._cluster.links))
        for variable, nbytes, ops in self._gradients:
            if not alone[variable]:
                continue
            forms = form[ops]
            key = variable, int(form[variable]), forms.tobytes()
            paths = self._known.get(key)
            if paths is None:
                paths = self._known[key] = self._paths_of(devices[key[1]], devices[forms].any(axis=0))
            if not paths.links:
                at[variable] = paths.candidates[0]
                continue
            after = (load + paths.latency_ns + paths.ns_per_byte * nbytes) * paths.used
            # of equals the one that the other links are freest for
            best = int((after.max(axis=1) + _OTHERS * after.sum(axis=1)).argmin())
            at[variable] = paths.candidates[best]
            load = np.maximum(load, after[best])
        return at

    def _paths_of(self, mine: npt.NDArray[Any], touched: npt.NDArray[Any]) -> _Paths:
        key = mine.tobytes(), touched.tobytes()
        if key not in self._paths:
            cluster = self._cluster
            candidates, others = np.flatnonzero(mine), np.flatnonzero(touched)
            latency, per_byte = np.zeros((2, len(candidates), len(cluster.links)))
            for row, d in enumerate(candidates.tolist()):
                for other in others[others != d].tolist():
                    for a, b in ((other, d), (d, other)):
                        latency[row, cluster.link[a, b]] += cluster.latency_ns[a, b]
                        per_byte[row, cluster.link[a, b]] += cluster.ns_per_byte[a, b]
            used = (latency > 0) | (per_byte > 0)
            self._paths[key] = _Paths(candidates, latency, per_byte, used, int(np.count_nonzero(used)))
        return self._paths[key]
