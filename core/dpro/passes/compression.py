"""Gradient compression: gradients cross the wire in 16 bit and are added up in 16 bit; weights stay as they are.

Knows bytes, buckets and OUT ops; not how a framework casts. It is lossy: the training's result is another one, so
that a plan may carry it only where the user allows that. What it counts with:

* a transfer keeps its latency (``graph.info["sync"]``, if there) and sends half of its bytes;
* each float32 gradient is cast, divided and cast back. That touches 16 bytes a value where DDP's copy into the
  bucket touches 8: two such copies, as captured, else :data:`ASSUMED_CAST_NS_PER_BYTE`. All of it is charged to the
  host thread where the gradient is ready. Gradients on a device are cast there, which takes none of the host's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dpro.adapter import Knob
from dpro.cost.sync import fit
from dpro.graph.graph import Bucket, Graph, OpKind
from dpro.graph.ps_ops import INFO
from dpro.passes.batched_copy import copies_in
from dpro.trace.model import GRADIENT_DTYPES

#: Two copies' worth, ns per byte of float32, where no copy was captured: torch 2.13 on one x86 core takes 0.25 each.
ASSUMED_CAST_NS_PER_BYTE = 0.5
#: 16 bit formats of a gradient on the wire, the one with float32's range first.
DTYPES = ("bfloat16", "float16")
#: Only these are made smaller.
WIDE = "float32"


class Compression:
    """A candidate is one of :data:`DTYPES`."""

    name = "compression"
    knobs = frozenset({Knob.COMPRESSION})

    def candidates(self, graph: Graph) -> Iterator[str]:
        """What the job's library can reduce, as its adapter said; both formats where nobody said."""
        return (dtype for dtype in graph.info.get(GRADIENT_DTYPES) or DTYPES if self.legal(graph, dtype))

    def legal(self, graph: Graph, candidate: str) -> bool:
        """Whether there are buckets, and float32 in them."""
        return candidate in DTYPES and reduces_wide(graph)

    def apply(self, graph: Graph, candidate: str) -> int:
        """Cast, and send half; returns the mark that undoes it. Buckets made later are of the smaller gradients."""
        mark = graph.mark()
        cast_ns = cast_ns_per_byte(graph)
        casts: dict[int, float] = {}
        for (_, t), op in graph.out_op.items():
            if graph.tensors[t].dtype == WIDE:
                casts[op] = casts.get(op, 0.0) + cast_ns * graph.tensors[t].nbytes
        duration = graph.column("duration")
        for op, ns in casts.items():
            graph.set(op, "duration", int(duration[op]) + round(ns))
        halve(graph)
        return mark

    def cost(self, graph: Graph, candidate: str) -> float:
        """What it adds to host and channel time of all ranks together, ns; negative where it saves."""
        before = float(graph.column("duration")[graph.column("alive")].sum())
        mark = self.apply(graph, candidate)
        after = float(graph.column("duration")[graph.column("alive")].sum())
        graph.undo(mark)
        return after - before

    def assumed(self, graph: Graph, candidate: str) -> str:
        """In one line, what :meth:`apply` counts with."""
        sent = sum(bucket.nbytes for bucket in graph.buckets)
        wide = sum(graph.tensors[t].nbytes for b in graph.buckets for t in b.tensors if graph.tensors[t].dtype == WIDE)
        source = "on the device" if on_device(graph) else "as captured copies" if copies_in(graph) else "assumed"
        return (
            f"gradients reduced in {candidate}: {sent / 1e6:.3g} MB become {(sent - wide / 2) / 1e6:.3g} MB; "
            f"casts take {cast_ns_per_byte(graph):.3g} ns a byte of the host ({source}); the training's result changes"
        )

    def settings(self, candidate: str) -> dict[str, str]:
        """Fields of a plan."""
        return {"gradient_dtype": candidate}


def reduces_wide(graph: Graph) -> bool:
    """Whether float32 gradients are reduced in buckets; what servers add up (BytePS) has no model here."""
    return INFO not in graph.info and any(graph.tensors[t].dtype == WIDE for b in graph.buckets for t in b.tensors)


def halve(graph: Graph) -> None:
    """Float32 gradients of half the bytes, and the buckets there are with them. Journalled."""
    graph.set_tensors([replace(t, nbytes=t.nbytes // 2) if t.dtype == WIDE else t for t in graph.tensors])
    latency_ns = graph.info["sync"].latency_ns if "sync" in graph.info else 0.0
    kind, duration, nbytes = graph.column("kind"), graph.column("duration"), graph.column("nbytes")
    buckets = []
    for bucket in graph.buckets:
        now = sum(graph.tensors[t].nbytes for t in bucket.tensors)
        share = now / bucket.nbytes if bucket.nbytes else 1.0
        fixed_ns = latency_ns  # once for a bucket, however many pieces it goes in
        for op in bucket.ops:
            kept_ns = 0.0 if kind[op] == OpKind.LOCAL else min(fixed_ns, float(duration[op]))
            fixed_ns -= kept_ns
            graph.set(op, "duration", round(kept_ns + (int(duration[op]) - kept_ns) * share))
            if nbytes[op] > 0:
                graph.set(op, "nbytes", round(int(nbytes[op]) * share))
        buckets.append(Bucket(bucket.tensors, now, bucket.ops))
    graph.set_buckets(buckets)


def cast_ns_per_byte(graph: Graph) -> float:
    """Host time of all casts of one byte of float32, ns."""
    if on_device(graph):
        return 0.0
    copies = copies_in(graph)
    duration = graph.column("duration")
    sizes = [graph.tensors[t].nbytes for rank in copies for t in rank]
    times = [int(duration[op]) for rank in copies for op in rank.values()]
    if not any(ns > 0 for ns in times):
        return ASSUMED_CAST_NS_PER_BYTE
    return 2 * fit(sizes, times).ns_per_byte


def on_device(graph: Graph) -> bool:
    """Whether the job computes on device streams."""
    return any("/stream/" in name for name in graph.resource_names)
