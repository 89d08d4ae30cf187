"""Where the servers of a BytePS job are, as its worker's own connections say: BytePS tells nobody.

A worker connects to its scheduler, to every server, and to itself (ps-lite's ``van.cc``); who connects to it comes by
the port that it listens at.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_ESTABLISHED, _LISTENS = "01", "0A"

#: IPv4 address and port.
Address = tuple[str, int]
#: Own end, the other end, state, inode: a line of ``/proc/net/tcp``.
_Connection = tuple[Address, Address, str, str]


@functools.cache
def nodes() -> tuple[str, tuple[str, ...]]:
    """The address of this worker's host, and those of the servers' hosts, one for each server; ("", ()) if not told.

    To be asked when BytePS has started, and before dpro opens connections of its own; from then on it is remembered.
    """
    try:
        scheduler = socket.gethostbyname(os.environ["DMLC_PS_ROOT_URI"]), int(os.environ["DMLC_PS_ROOT_PORT"])
        servers = int(os.environ.get("DMLC_NUM_SERVER", "1"))
        return of_connections(_connections(Path("/proc/self")), scheduler, servers)
    except (KeyError, OSError, ValueError):
        return "", ()


def of_connections(connections: Iterable[_Connection], scheduler: Address, servers: int) -> tuple[str, tuple[str, ...]]:
    """:func:`nodes` of a process with these connections; ("", ()) where they are not those of ``servers`` servers."""
    known = list(connections)
    listens = {own[1] for own, _, state, _ in known if state == _LISTENS}
    made = {
        (own[0], other)
        for own, other, state, _ in known
        if state == _ESTABLISHED and own[1] not in listens and not (other[0] == own[0] and other[1] in listens)
    }
    hosts = {own for own, other in made if other != scheduler}  # a scheduler may be reached over another interface
    found = {other for _, other in made if other != scheduler}
    if len(hosts) != 1 or len(found) != servers:
        return "", ()
    return hosts.pop(), tuple(sorted(address for address, _ in found))


def _connections(process: Path) -> Iterator[_Connection]:
    """The process's own, of all that its network namespace has."""
    own = set()
    for entry in (process / "fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
    for line in (process / "net" / "tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in own:
            yield _address(fields[1]), _address(fields[2]), fields[3], fields[9]


def _address(text: str) -> Address:
    """Of ``0100007F:1F90``: the address as the machine has it in memory, the port as people write it."""
    address, _, port = text.partition(":")
    return socket.inet_ntoa(struct.pack("=I", int(address, 16))), int(port, 16)
