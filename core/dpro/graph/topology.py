"""What an all-reduce sends over which links: flat ring, two-level ring, double binary tree, parameter server.

Knows the messages of one all-reduce among N workers that are all alike, and what each costs: ``latency_ns`` before it
can go, a gap, which costs nothing while the link carries others, then its bytes at the link's pace. Not when workers
are ready, nor what else they do. A message holds one link direction: its sender's way out, or the parameter servers'
ways where these carry more.

With ``whole=False`` it makes only what one worker (two-level: one host) sends; what it receives from others it sends
itself at the same time, since they are alike. So 1,024 workers cost what one does. A tree's nodes are not alike: of it
all messages are made, but of it alone.

Sources: ring, Patarasuk and Yuan 2009; double binary tree, Sanders, Speck and Träff 2009, laid out as NCCL's
(``trees.cc``); servers on the workers' hosts, BytePS (OSDI 2020) section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro.errors import DproError

Ints = npt.NDArray[np.int64]

TOPOLOGIES = ("ring", "two-level", "tree", "ps")
#: A tree's messages are of about this many bytes, in trees of up to MAX_TREE_MESSAGES for one all-reduce.
TREE_BYTES = 1 << 19
MAX_TREE_MESSAGES = 60_000
MAX_WORKERS = 1 << 14
#: Beyond these nobody trains: a minute, and 10 kB/s.
MAX_LATENCY_NS, MAX_NS_PER_BYTE = 6e10, 1e5
MAX_TOTAL_NS = 1 << 61


class TopologyError(DproError, ValueError):
    """A network that cannot be; the text says why."""


@dataclass(frozen=True)
class Link:
    """A link direction: a message of s bytes takes ``latency_ns + ns_per_byte · s`` on an idle one."""

    latency_ns: float
    ns_per_byte: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_ns <= MAX_LATENCY_NS and 0 <= self.ns_per_byte <= MAX_NS_PER_BYTE):
            raise TopologyError(
                f"a link of {self.latency_ns:.3g} ns and {self.ns_per_byte:.3g} ns per byte: at most "
                f"{MAX_LATENCY_NS:.0e} and {MAX_NS_PER_BYTE:.0e}, and nothing negative"
            )


@dataclass(frozen=True)
class Network:
    """``workers`` and how they are joined, one of :data:`TOPOLOGIES`.

    ``link``: between workers; of "two-level": between hosts, each with one for all its ``gpus_per_host`` workers,
    ``inner`` being each worker's inside its host. ``servers`` of "ps": on hosts of their own, each with a ``link``; 0:
    one on each worker's host, which shares its link.

    Raises:
        TopologyError: fewer than 2 workers or too many, an unknown topology, hosts that are not full.
    """

    topology: str
    workers: int
    link: Link
    inner: Link | None = None
    gpus_per_host: int = 1
    servers: int = 0

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise TopologyError(f"topology {self.topology!r}: there are {', '.join(TOPOLOGIES)}")
        if not 2 <= self.workers <= MAX_WORKERS:
            raise TopologyError(f"{self.workers} workers: a network joins 2 to {MAX_WORKERS:,}")
        if self.topology == "two-level" and (self.gpus_per_host < 1 or self.workers % self.gpus_per_host):
            raise TopologyError(f"{self.workers} workers on hosts of {self.gpus_per_host}: not all hosts would be full")
        if not 0 <= self.servers <= MAX_WORKERS:
            raise TopologyError(f"{self.servers} servers: there are 0 to {MAX_WORKERS:,}")

    @property
    def in_turn(self) -> bool:
        """Whether an all-reduce begins when the one before it is over; with servers their messages overlap."""
        return self.topology != "ps"

    @property
    def assumption(self) -> str:
        """How the all-reduce goes, in words."""
        if self.topology == "two-level":
            return (
                f"reduce-scatter within hosts of {self.gpus_per_host}, for each share a ring of all hosts over one "
                "link per host, then all-gather within hosts"
            )
        if self.topology == "tree":
            return "a double binary tree (as NCCL's), pipelined in pieces of about 512 KiB"
        if self.topology == "ps" and self.servers:
            held = "held up by the servers' links or the workers', whichever carry more"
            return f"{self.servers} server{'s' * (self.servers > 1)} on hosts of their own, {held}"
        if self.topology == "ps":
            return "a server on each worker's host, over the worker's link"
        return "one flat ring of 2(N-1) steps"


@dataclass(frozen=True)
class Messages:
    """One all-reduce. Columns by message; ``edges`` [m, 2]: the second goes when the first has been received.

    ``arrivals`` [a, 2]: worker, and a message that it cannot send before it is there itself. ``link`` -1: no message,
    but a server that has all it waits for.
    """

    link: Ints
    duration: Ints
    gap: Ints
    priority: Ints
    edges: Ints
    arrivals: Ints
    links: list[str]

    def __len__(self) -> int:
        return len(self.link)


def messages(network: Network, nbytes: int, whole: bool = True) -> Messages:
    """The messages of one all-reduce of ``nbytes`` bytes; see the module text for ``whole``.

    Raises:
        TopologyError: it would last for years.
    """
    links = (network.link, network.inner or network.link)
    if 2 * network.workers * sum(link.latency_ns + nbytes * link.ns_per_byte for link in links) >= MAX_TOTAL_NS:
        raise TopologyError(f"an all-reduce of {nbytes:,} bytes would last for years: ask for less")
    make = {"ring": _ring, "two-level": _two_level, "tree": _tree, "ps": _servers}[network.topology]
    return make(network, nbytes, whole)


def _spread(count: int, each_ns: float) -> Ints:
    """``count`` durations of ``each_ns``, in whole ns that add up."""
    return np.asarray(np.diff(np.rint(np.arange(count + 1) * each_ns)), dtype=np.int64)


def _pairs(*columns: tuple[Ints, Ints]) -> Ints:
    rows = [np.stack([np.ravel(a), np.ravel(b)], axis=1) for a, b in columns]
    return np.concatenate(rows) if rows else np.zeros((0, 2), np.int64)


def _messages(link: Ints, duration: Ints, latency_ns: float | Ints, edges: Ints, arrivals: Ints, links: list[str],
              priority: Ints | None = None) -> Messages:  # fmt: skip
    gap = np.broadcast_to(np.rint(latency_ns).astype(np.int64), link.shape).copy()
    zero = np.zeros(len(link), np.int64)
    return Messages(link, duration, gap, zero if priority is None else priority, edges, arrivals, links)


def _ring(network: Network, nbytes: int, whole: bool) -> Messages:
    n, made = network.workers, network.workers if whole else 1
    steps = 2 * (n - 1)
    number = np.arange(steps * made, dtype=np.int64).reshape(steps, made)
    duration = np.repeat(_spread(steps, nbytes / n * network.link.ns_per_byte), made)
    edges = _pairs((number[:-1], np.roll(number[1:], -1, axis=1)))  # to the next worker, who sends it on
    arrivals = _pairs((np.tile(number[0], n), number[:n]))  # with what it adds itself
    names = [f"link/{i}>*" for i in range(made)]
    return _messages(np.tile(number[0], steps), duration, network.link.latency_ns, edges, arrivals, names)


def _two_level(network: Network, nbytes: int, whole: bool) -> Messages:
    """Phases: within the host (G-1 steps), between hosts (2 (H-1)), within the host (G-1)."""
    inner, outer, gpus = network.inner or network.link, network.link, network.gpus_per_host
    hosts = network.workers // gpus
    made = hosts if whole else 1
    worker = np.arange(made * gpus, dtype=np.int64).reshape(made, gpus)
    inside, between = gpus - 1, 2 * (hosts - 1)
    steps = inside + between + inside
    number = np.arange(steps * made * gpus, dtype=np.int64).reshape(steps, made, gpus)
    phase = np.repeat([0, 1, 2], [inside, between, inside])
    axis = np.where(phase == 1, 0, 1)  # to the next host, or to the next worker of the host
    edges = [(number[s], np.roll(number[s + 1], -1, axis=int(axis[s]))) for s in range(steps - 1)]
    # What a worker, and its host, adds to what it passes on: the former to each of the first messages it sends, too.
    summed = number[inside + 1 : inside + hosts]
    arrivals = [
        (np.tile(worker.ravel(), inside + 1), number[: inside + 1]),
        (np.broadcast_to(worker, summed.shape), summed),
    ]
    if inside:
        edges.append((np.broadcast_to(np.roll(number[inside - 1], 1, axis=1), summed.shape), summed))
    own = np.where(phase[:, None, None] == 1, made * gpus + np.arange(made)[:, None], worker)
    duration = np.concatenate([
        _spread(inside, nbytes / gpus * inner.ns_per_byte),
        _spread(between, nbytes / network.workers * outer.ns_per_byte),
        _spread(inside, nbytes / gpus * inner.ns_per_byte),
    ])  # fmt: skip
    latency = np.where(phase == 1, outer.latency_ns, inner.latency_ns)
    each = made * gpus
    return _messages(
        own.ravel(), np.repeat(duration, each), np.repeat(latency, each), _pairs(*edges),
        _pairs(*arrivals), [*(f"link/{i}>*" for i in range(each)), *(f"link/host{h}>*" for h in range(made))],
    )  # fmt: skip


def _tree(network: Network, nbytes: int, whole: bool) -> Messages:
    """Each tree takes half of the bytes; who adds up in one is a leaf of the other. Links go piece by piece."""
    n = network.workers
    pieces = max(1, min(-(-nbytes // (2 * TREE_BYTES)), MAX_TREE_MESSAGES // (4 * (n - 1))))
    parent = _parents(n)
    # The other tree has the workers in the opposite order (of an odd number: one further): its leaves are others.
    other = (np.roll(parent, 1) + 1) % n if n % 2 else n - 1 - parent[::-1]
    count = 4 * (n - 1)  # of a piece: up and down, in two trees
    edges, arrivals, links = [], [], []
    for tree, up_to in enumerate((parent, other)):
        root = int(np.flatnonzero(up_to == np.arange(n))[0])
        node = np.delete(np.arange(n, dtype=np.int64), root)
        above = up_to[node]
        up = np.zeros(n, np.int64)
        up[node] = tree * 2 * (n - 1) + np.arange(n - 1)
        down = up + (n - 1)
        inner = above != root
        edges.append(_pairs(
            (up[node[inner]], up[above[inner]]),  # summed, then sent on
            (down[above[inner]], down[node[inner]]),
        ))  # fmt: skip
        top = node[~inner]
        edges.append(_pairs(*((np.full(len(top), up[t]), down[top]) for t in top)))  # what the root has, all get
        arrivals.append(_pairs((node, up[node]), (np.full(len(top), root), down[top])))
        links += [node, above]
    shift = count * np.arange(pieces, dtype=np.int64)
    one, there = np.concatenate(edges), np.concatenate(arrivals)
    return _messages(
        np.tile(np.concatenate(links), pieces),
        np.repeat(_spread(pieces, nbytes / 2 / pieces * network.link.ns_per_byte), count),
        network.link.latency_ns,
        (one[None] + shift[:, None, None]).reshape(-1, 2),
        _pairs((np.tile(there[:, 0], pieces), there[:, 1] + shift[:, None])),
        [f"link/{i}>*" for i in range(n)],
        priority=np.repeat(np.arange(pieces, dtype=np.int64), count),
    )


def _parents(n: int) -> Ints:
    """By worker, the one above it in a binary tree whose leaves are the odd ones; the root, 0, is above itself."""
    rank = np.arange(n, dtype=np.int64)
    low = rank & -rank
    above = (rank ^ low) | (low << 1)
    return np.where(above < n, above, rank ^ low)


def _servers(network: Network, nbytes: int, whole: bool) -> Messages:
    """Every worker pushes a share to each server, and pulls the sum when the server has all workers' shares."""
    if not network.servers:
        return _servers_on_workers(network, nbytes, whole)
    n, servers, link = network.workers, network.servers, network.link
    each_ns = nbytes / servers * link.ns_per_byte
    made = n if whole else 1
    if servers <= n:  # more bytes pass a server's link than a worker's: the shares of all workers, one after the other
        ends = servers if whole else 1
        worker, server = (a.ravel() for a in np.meshgrid(np.arange(made), np.arange(ends), indexing="ij"))
        queue = _spread(n, each_ns)
        holder, duration = server, queue[worker] if whole else queue.sum(keepdims=True)
        links = [f"link/*>server{j}" for j in range(ends)] + [f"link/server{j}>*" for j in range(ends)]
    else:
        ends = servers
        worker, server = (a.ravel() for a in np.meshgrid(np.arange(made), np.arange(ends), indexing="ij"))
        holder, duration = worker, _spread(servers, each_ns)[server]
        links = [f"link/{i}>*" for i in range(made)] + [f"link/*>{i}" for i in range(made)]
    push = np.arange(made * ends, dtype=np.int64)
    full = push.size + np.arange(ends, dtype=np.int64)  # a server has all
    pull = push.size + ends + push
    edges = _pairs((push, full[server]), (full[server], pull))
    back = holder + len(links) // 2
    return _both_ways(holder, back, duration, ends, link, edges, _pairs((worker, push)), links)


def _servers_on_workers(network: Network, nbytes: int, whole: bool) -> Messages:
    """Workers begin with the next one's host, so that all links are in use; what stays on a host costs nothing."""
    n, made = network.workers, network.workers if whole else 1
    slots, here = n - 1, np.arange(made, dtype=np.int64)
    push = np.arange(slots * made, dtype=np.int64).reshape(slots, made)
    got = np.stack([np.roll(row, slot + 1) for slot, row in enumerate(push)])  # by slot, what comes to a server
    full = push.size + here
    pull = push.size + made + push
    holder, everywhere = np.tile(here, slots), np.broadcast_to(full, push.shape)
    duration = np.repeat(_spread(slots, nbytes / n * network.link.ns_per_byte), made)
    edges = _pairs((got, everywhere), (everywhere, pull))
    arrivals = _pairs((holder, push), (here, full))
    links = [f"link/{i}>*" for i in range(made)]
    return _both_ways(holder, holder, duration, made, network.link, edges, arrivals, links)


def _both_ways(
    there: Ints, back: Ints, duration: Ints, servers: int, link: Link, edges: Ints, arrivals: Ints, links: list[str]
) -> Messages:
    """What is pushed, then ``servers`` that have all, then what is pulled."""
    none = np.zeros(servers, np.int64)
    latency = np.full(2 * len(there) + servers, link.latency_ns)
    latency[len(there) : len(there) + servers] = 0
    holder, durations = np.concatenate([there, none - 1, back]), np.concatenate([duration, none, duration])
    return _messages(holder, durations, latency, edges, arrivals, links)
