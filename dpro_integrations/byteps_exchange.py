"""How the ranks of a BytePS job agree: a key-value store at rank 0, whose address and secret BytePS itself carries.

BytePS has no rendezvous that others could use, and what its scheduler knows it tells nobody. So there is one sum, of a
few hundred bytes under a name of its own, to which rank 0 contributes where its store is, and each rank a byte of its
own; it is waited for in a thread, with a time-out. Afterwards the ranks meet at the store, and BytePS is asked no more.
Knows none of the frameworks that BytePS serves.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from types import ModuleType

from dpro.errors import DproError
from dpro_integrations import byteps_nodes, byteps_partitions
from dpro_integrations.base import before_the_meeting
from dpro_integrations.byteps_partitions import MEETING_NUMBER, Bounds
from dpro_integrations.exchange import StoreExchange
from dpro_integrations.store import Client, Server

#: What rank 0 has to say fits in here; a byte of each rank follows.
_ADDRESS_BYTES = 256
#: Stores opened by this process. They live as long as it does: others may still be reading the last decision.
_opened: list[Server] = []


def place(bps: ModuleType) -> tuple[int, int]:
    """Rank and number of ranks, as ``bps``, BytePS for one framework, has them.

    Raises:
        DproError: it is no job of several workers that BytePS' launcher started.
    """
    if "DMLC_PS_ROOT_URI" not in os.environ:
        raise DproError("the job has no BytePS scheduler")
    return bps.rank(), bps.size()


def meet(
    bps: ModuleType, framework: str, tag: str, bounds: Bounds, summed: Callable[[str, bytes], bytes]
) -> StoreExchange:
    """The other ranks of a tuner, as :func:`join_exchange`. Every rank calls it, with the same number as ``tag``.

    Args:
        summed: adds up, byte by byte, what all ranks give under the name that it is called with.

    Raises:
        DproError: the ranks did not come, or this BytePS keeps its settings elsewhere than dpro knows.
    """
    timeout_s = before_the_meeting().timeout_s
    byteps_nodes.nodes()
    name = f"dpro_meet_{tag}"
    try:
        bounds.declare(name, MEETING_NUMBER + int(tag))
    except ValueError as error:
        raise DproError(str(error)) from error
    exchange, told = join_exchange(
        *place(bps), f"{framework}-{tag}", timeout_s, lambda own: summed(name, own), byteps_partitions.made()
    )
    byteps_partitions.agree_on_made(max(told))
    return exchange


def join_exchange(
    rank: int, world_size: int, tag: str, timeout_s: float, summed: Callable[[bytes], bytes], told: int = 0
) -> tuple[StoreExchange, list[int]]:
    """Meet the other ranks under ``tag``, which is used once; returns within about ``timeout_s``.

    Args:
        summed: adds up, byte by byte, what all ranks give (as many each); called in a thread of its own.
        told: a number below 256 that all are to hear.

    Returns the exchange, and what each rank told.

    Raises:
        DproError: the ranks did not come, or rank 0 is not to be found.
    """
    try:
        address = " ".join(map(str, _open())) if rank == 0 else ""
    except OSError:
        address = "-"  # the others wait for a word
    own = address.encode().ljust(_ADDRESS_BYTES + rank, b"\0") + bytes([told])
    try:
        heard = _within(timeout_s, lambda: summed(own.ljust(_ADDRESS_BYTES + world_size, b"\0")))
        fields = heard[:_ADDRESS_BYTES].rstrip(b"\0").decode().split()
        if len(fields) != 3:
            raise OSError("rank 0 can't open a store")
        store = Client(fields[0], int(fields[1]), fields[2], timeout_s)
    except (OSError, RuntimeError, ValueError) as error:
        raise DproError(f"the ranks can't meet for tuning: {error}") from error
    return StoreExchange(store, rank, world_size, tag), list(heard[_ADDRESS_BYTES:])


def _open() -> tuple[str, int, str]:
    server = Server(_own_address())
    _opened.append(server)
    return server.host, server.port, server.secret


def _own_address() -> str:
    """Where the other ranks reach this one: as BytePS was told, else the interface that leads to its scheduler."""
    if told := os.environ.get("DMLC_NODE_HOST"):
        return told
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"])))  # sends nothing
        return str(probe.getsockname()[0])


def _within(timeout_s: float, call: Callable[[], bytes]) -> bytes:
    """What ``call`` gives. A rank that does not come would have it wait for good: it is left alone then."""
    results: list[bytes] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="dpro-meet", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise RuntimeError(str(errors[0]))
    if not results:
        raise TimeoutError(f"not all ranks came within {timeout_s:g} s")
    return results[0]
