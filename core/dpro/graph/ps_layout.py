"""Who is where in a parameter server job, and over which link directions its messages go.

A link direction between two hosts is one resource whatever goes over it. Where there are more than two hosts, a message
passes the sender's interface and the receiver's; it is put down to the one that carries more bytes, as an op holds one
resource. A server on a worker's own host is reached over a loopback of their own, each way. Where hosts are not known,
each worker has a link of its own to each server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dpro.trace import byteps
from dpro.trace.model import RankTrace

#: Bytes by tensor and partition.
Sizes = Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class Layout:
    """``ranks`` are the workers'; ``declared`` the tensors' declared indices, by number.

    ``links``: names of link directions by (worker, server), workers by their place in ``ranks``; there and back.
    ``orderly``: a worker's messages to one server keep their order. ``credit`` other than 0: what is handed in goes by
    declared index, the lowest first, not first come, first served.
    """

    ranks: tuple[int, ...]
    servers: int
    hash_fn: str
    declared: Mapping[int, int]
    links: Mapping[tuple[int, int], tuple[str, str]]
    credit: int = 0
    orderly: bool = True

    def server(self, tensor: int, number: int) -> int:
        """Which server has a tensor's partition."""
        if self.servers == 1:
            return 0
        key = self.declared.get(tensor, tensor) << byteps.PART_BITS | number
        return byteps.server_of(key, self.servers, self.hash_fn)

    def there(self, worker: int, server: int) -> str:
        return self.links[worker, server][0]

    def back(self, worker: int, server: int) -> str:
        return self.links[worker, server][1]

    def priority(self, tensor: int) -> int:
        return self.declared.get(tensor, tensor) if self.credit else 0

    def disorderly(self) -> Layout:
        return replace(self, orderly=False)


def layout_of(traces: Sequence[RankTrace], ranks: Sequence[int], sizes: Sizes) -> Layout:
    """What the workers' adapters said. ``sizes`` say which interface carries how much."""
    told = [byteps.settings(trace) for trace in traces]
    first = told[0]
    numbers = {tensor.name: number for number, tensor in enumerate(traces[0].tensors)}
    made = Layout(
        ranks=tuple(ranks),
        servers=first.servers,
        hash_fn=first.hash_fn,
        declared={numbers[name]: index for name, index in first.declared.items() if name in numbers},
        links={},
        credit=first.credit,
    )
    hosts = [each.node for each in told]
    # the scheduler numbers servers by address, the last one first (ps-lite's van.cc)
    server_hosts = sorted(next((t.server_nodes for t in told if len(t.server_nodes) == made.servers), ()), reverse=True)
    if not all(hosts) or not all(server_hosts) or not server_hosts:
        return replace(made, links=_apart(made))
    return replace(made, links=_links(made, hosts, server_hosts, sizes))


def _apart(layout: Layout) -> dict[tuple[int, int], tuple[str, str]]:
    return {
        (worker, server): _pair(f"worker{rank}", f"server{server}")
        for worker, rank in enumerate(layout.ranks)
        for server in range(layout.servers)
    }


def _pair(worker: str, server: str) -> tuple[str, str]:
    return f"link/{worker}>{server}", f"link/{server}>{worker}"


def _links(
    layout: Layout, hosts: Sequence[str], server_hosts: Sequence[str], sizes: Sizes
) -> dict[tuple[int, int], tuple[str, str]]:
    sent = dict.fromkeys([*hosts, *server_hosts], 0)
    received = dict(sent)
    for (tensor, number), nbytes in sizes.items():
        there = server_hosts[layout.server(tensor, number)]
        for host in hosts:
            if host != there:  # what is pushed is pulled as well
                for a, b in ((host, there), (there, host)):
                    sent[a] += nbytes
                    received[b] += nbytes

    def way(a: str, b: str) -> str:
        if len(sent) == 2:
            return f"link/{a}>{b}"
        return f"link/{a}>*" if sent[a] >= received[b] else f"link/*>{b}"

    out = _apart(layout)
    for worker, server in out:
        a, b = hosts[worker], server_hosts[server]
        if a != b:
            out[worker, server] = way(a, b), way(b, a)
    return out
