"""How the ranks of a Horovod job agree: a key-value store at rank 0, found through Horovod's own rendezvous.

No collective: Horovod's would wait for ever for a rank that does not call it. Rank 0 opens the store and
leaves its address, and a secret without which nobody is let in, at the launcher's rendezvous server (plain HTTP, the
one where gloo's ranks met). Knows none of the frameworks that Horovod serves.
"""

from __future__ import annotations

import os
import socket
import time
import urllib.error
import urllib.request
from typing import Any

from dpro.errors import DproError
from dpro_integrations.base import before_the_meeting
from dpro_integrations.exchange import StoreExchange
from dpro_integrations.horovod_settings import patient
from dpro_integrations.horovod_start import switched_on
from dpro_integrations.store import Client, Server

_POLL_S = 0.02
_HTTP_TIMEOUT_S = 5.0
#: Stores opened by this process. They live as long as it does: others may still be reading the last decision.
_opened: list[Server] = []
# the rendezvous is in the cluster; a proxy that the job has for the world outside does not know it
_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def place(hvd: Any) -> tuple[int, int]:
    """Rank and number of ranks.

    Args:
        hvd: ``horovod.tensorflow``, ``horovod.mxnet`` or their like.

    Raises:
        DproError: Horovod is not there yet, or the ranks may change.
    """
    if not hvd.is_initialized():
        raise DproError("hvd.init() comes first")
    if switched_on("HOROVOD_ELASTIC"):
        raise DproError("the job is elastic: its ranks may change while dpro measures")
    return hvd.rank(), hvd.size()


def meet(hvd: Any, tag: str) -> StoreExchange:
    """The other ranks, as :func:`join_exchange`, with the patience that the environment gives."""
    return join_exchange(hvd.rank(), hvd.size(), tag, patient(before_the_meeting()).timeout_s)


def join_exchange(rank: int, world_size: int, tag: str, timeout_s: float) -> StoreExchange:
    """Meet the other ranks under ``tag``, which is used once; returns within about ``timeout_s``.

    Raises:
        DproError: the job has no rendezvous server, or rank 0 is not to be found.
    """
    host, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if not host or not port:
        raise DproError("this Horovod job has no gloo rendezvous (started by MPI?), where dpro's ranks would meet")
    url = f"http://{host}:{port}/dpro/{tag}"
    try:
        if rank == 0:
            server = Server(_own_address(host, int(port)))
            _opened.append(server)
            found = server.host, server.port, server.secret
            request = urllib.request.Request(url, data=" ".join(map(str, found)).encode(), method="PUT")
            _http.open(request, timeout=_HTTP_TIMEOUT_S).close()
        else:
            found = _ask(url, timeout_s)
        store = Client(*found, timeout_s)
    except (OSError, RuntimeError, ValueError) as error:
        raise DproError(f"the ranks can't meet for tuning: {error}") from error
    return StoreExchange(store, rank, world_size, tag)


def _own_address(host: str, port: int) -> str:
    """Where the other ranks reach this one: gloo's interface, else the one that leads to the rendezvous."""
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    if interface:
        import psutil  # type: ignore[import-untyped]  # Horovod needs it, so it is there

        for address in psutil.net_if_addrs().get(interface, []):
            if address.family == socket.AF_INET:
                return str(address.address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def _ask(url: str, timeout_s: float) -> tuple[str, int, str]:
    """Rank 0's address and the secret, as soon as they are known."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with _http.open(url, timeout=_HTTP_TIMEOUT_S) as answer:
                address, port, secret = answer.read(200).decode().split()
                return address, int(port), secret
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            error.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not come within {timeout_s:g} s")
        time.sleep(_POLL_S)
