"""How the ranks of a Horovod job agree: a key-value store at rank 0, found through Horovod's own rendezvous.

No collective: Horovod's would wait for ever for a rank that does not call it. Rank 0 opens the store and
leaves its address at the launcher's rendezvous server (plain HTTP, the one where gloo's ranks met).
"""

from __future__ import annotations

import os
import socket
import time
import urllib.error
import urllib.request
from datetime import timedelta

import torch.distributed as dist

from dpro.errors import DproError
from dpro_integrations.torch_exchange import StoreExchange

_POLL_S = 0.02
_HTTP_TIMEOUT_S = 5.0
#: Stores opened by this process. They live as long as it does: others may still be reading the last decision.
_opened: list[dist.TCPStore] = []
# the rendezvous is in the cluster; a proxy that the job has for the world outside does not know it
_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def join_exchange(rank: int, world_size: int, tag: str, timeout_s: float) -> StoreExchange:
    """Meet the other ranks under ``tag``, which is used once; returns within about ``timeout_s``.

    Raises:
        DproError: the job has no rendezvous server, or rank 0 is not to be found.
    """
    host, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if not host or not port:
        raise DproError("this Horovod job has no gloo rendezvous (started by MPI?), where dpro's ranks would meet")
    if not dist.is_available():
        raise DproError("this torch has no torch.distributed, whose store dpro's ranks need")
    url = f"http://{host}:{port}/dpro/{tag}"
    try:
        if rank == 0:
            store = _open(_own_address(host, int(port)), timeout_s)
            _opened.append(store)
            request = urllib.request.Request(url, data=f"{store.host} {store.port}".encode(), method="PUT")
            _http.open(request, timeout=_HTTP_TIMEOUT_S).close()
        else:
            address, place = _ask(url, timeout_s)
            store = dist.TCPStore(address, place, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except (OSError, RuntimeError, ValueError) as error:
        raise DproError(f"the ranks can't meet for tuning: {error}") from error
    return StoreExchange(store, rank, world_size, tag)


def _open(address: str, timeout_s: float) -> dist.TCPStore:
    """A store that listens at ``address`` only, not at every interface of the host."""
    with socket.create_server((address, 0)) as listening:
        return dist.TCPStore(
            address,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),
        )


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


def _ask(url: str, timeout_s: float) -> tuple[str, int]:
    """Rank 0's address, as soon as it is known."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with _http.open(url, timeout=_HTTP_TIMEOUT_S) as answer:
                address, port = answer.read(200).decode().split()
                return address, int(port)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            error.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not come within {timeout_s:g} s")
        time.sleep(_POLL_S)
