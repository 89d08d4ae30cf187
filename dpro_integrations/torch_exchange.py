"""How the ranks of a torch.distributed job agree: through the job's own key-value store.

The store is where ranks met at start-up; using it needs no collective, so a rank that has left,
died or is late can neither hang the others nor be matched against DDP's own all-reduces.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist

from dpro.adapter import RankLeft

_POLL_S = 0.004
_PART_BYTES = 4 << 20


class StoreExchange:
    """:class:`dpro.adapter.Exchange` over a ``torch.distributed`` store, under a prefix of its own.

    Args:
        store: the default group's store, or any other that all ranks share.
        tag: tells several tuners of one job apart; equal on all ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, tag: str = "") -> None:
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.rank = rank
        self.world_size = world_size
        self._store = dist.PrefixStore(f"dpro/{restart}/{tag}", store)

    @classmethod
    def of_job(cls, tag: str = "") -> StoreExchange:
        """Over the store of the default process group."""
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), tag)

    def post(self, key: str, blob: bytes) -> None:
        # in parts: a TCP store drops a client whose message is over 8 MiB
        parts = range(0, len(blob), _PART_BYTES)
        for number, at in enumerate(parts):
            self._store.set(f"{key}/{self.rank}/{number}", blob[at : at + _PART_BYTES])
        self._store.set(f"{key}/{self.rank}", str(len(parts)))

    def collect(self, key: str, timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        blobs: list[bytes] = []
        for rank in range(self.world_size):
            self._wait(f"{key}/{rank}", rank, deadline, timeout_s)
            names = [f"{key}/{rank}/{number}" for number in range(int(self._store.get(f"{key}/{rank}")))]
            blobs.append(b"".join(self._store.get(name) for name in names))
            for name in (*names, f"{key}/{rank}"):
                self._store.delete_key(name)
        return blobs

    def agree(self, key: str, proposal: str) -> str:
        return str(self._store.compare_set(f"{key}/agreed", "", proposal).decode())

    def wait(self, key: str, timeout_s: float) -> str:
        self._wait(f"{key}/agreed", 0, time.monotonic() + timeout_s, timeout_s)
        return str(self._store.get(f"{key}/agreed").decode())

    def leave(self) -> None:
        self._store.set(f"left/{self.rank}", b"1")

    def _wait(self, key: str, rank: int, deadline: float, timeout_s: float) -> None:
        while not self._store.check([key]):
            # looked at in this order: what a rank posted before it left still counts
            if self._store.check([f"left/{rank}"]) and not self._store.check([key]):
                raise RankLeft(f"rank {rank} left the tuning")
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not answer within {timeout_s:g} s")
            time.sleep(_POLL_S)
