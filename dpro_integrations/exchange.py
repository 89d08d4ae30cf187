"""How the ranks of a job agree: through a key-value store that all of them reach.

Using a store needs no collective, so a rank that has left, died or is late can neither hang the others nor be
matched against the job's own all-reduces. Knows no framework and no store: torch has one
(``torch_exchange``), other jobs get one of dpro's (``store``, ``horovod_exchange``).
"""

from __future__ import annotations

import time
from typing import Protocol

from dpro.adapter import RankLeft

#: Between two looks, s: soon at first, seldom where it takes long anyhow (looking costs rank 0 as well).
_POLL_S, _LONGEST_POLL_S = 0.0005, 0.05
_POLL_SHARE = 0.02
_PART_BYTES = 4 << 20


class Store(Protocol):
    """What an exchange needs of a store; ``torch.distributed`` has it, and so has :class:`.store.Client`."""

    def set(self, key: str, value: bytes | str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


class Alone:
    """:class:`dpro.adapter.Exchange` of a job of one process, which agrees with itself."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self._posted: dict[str, bytes] = {}
        self._agreed: dict[str, str] = {}

    def post(self, key: str, blob: bytes) -> None:
        self._posted[key] = blob

    def collect(self, key: str, timeout_s: float) -> list[bytes]:
        return [self._posted.pop(key)]

    def agree(self, key: str, proposal: str) -> str:
        return self._agreed.setdefault(key, proposal)

    def wait(self, key: str, timeout_s: float) -> str:
        return self._agreed[key]

    def leave(self) -> None:
        pass


class StoreExchange:
    """:class:`dpro.adapter.Exchange` over a store, under a prefix of its own.

    Args:
        store: shared by all ranks.
        prefix: tells several tuners of one job apart; equal on all ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int, prefix: str = "") -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._prefix = f"dpro/{prefix}"

    def post(self, key: str, blob: bytes) -> None:
        # in parts: a TCP store drops a client whose message is over 8 MiB
        parts = range(0, len(blob), _PART_BYTES)
        for number, at in enumerate(parts):
            self._store.set(self._name(f"{key}/{self.rank}/{number}"), blob[at : at + _PART_BYTES])
        self._store.set(self._name(f"{key}/{self.rank}"), str(len(parts)))

    def collect(self, key: str, timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        blobs: list[bytes] = []
        for rank in range(self.world_size):
            head = self._name(f"{key}/{rank}")
            self._wait(head, rank, deadline, timeout_s)
            names = [f"{head}/{number}" for number in range(int(self._store.get(head)))]
            blobs.append(b"".join(self._store.get(name) for name in names))
            for name in (*names, head):
                self._store.delete_key(name)
        return blobs

    def agree(self, key: str, proposal: str) -> str:
        return str(self._store.compare_set(self._name(f"{key}/agreed"), "", proposal).decode())

    def wait(self, key: str, timeout_s: float) -> str:
        name = self._name(f"{key}/agreed")
        self._wait(name, 0, time.monotonic() + timeout_s, timeout_s)
        return str(self._store.get(name).decode())

    def leave(self) -> None:
        self._store.set(self._name(f"left/{self.rank}"), b"1")

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _wait(self, name: str, rank: int, deadline: float, timeout_s: float) -> None:
        start = time.monotonic()
        left = self._name(f"left/{rank}")
        while not self._store.check([name]):
            # looked at in this order: what a rank posted before it left still counts
            if self._store.check([left]) and not self._store.check([name]):
                raise RankLeft(f"rank {rank} left the tuning")
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"rank {rank} did not answer within {timeout_s:g} s")
            time.sleep(min(max(_POLL_S, _POLL_SHARE * (now - start)), _LONGEST_POLL_S))
