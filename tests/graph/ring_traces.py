"""Traces of a gloo DDP job with its messages, by hand: one step, any number of all-reduces, times in µs.

Every rank's messages are given as (sender, receiver, called, received, bytes), one SEND and one RECV call each,
in the order of their bytes on the stream of that direction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dpro.trace.model import Collective, EventKind, Meta, RankTrace, TraceBuilder

US = 1_000
Message = tuple[int, int, float, float, int]


@dataclass
class AllReduce:
    """``launched[r]`` is when rank r's enqueueing call (10 µs long) returns, ``left[r]`` when its worker is done."""

    nbytes: int
    launched: list[float]
    left: list[float]
    messages: list[Message] = field(default_factory=list)
    tag: int = -1


def job(reduces: list[AllReduce], used: list[float], end: float, clocks: list[float] | None = None) -> list[RankTrace]:
    """``used[r]``: when rank r begins to copy the gradients back. ``clocks[r]``: what rank r's clock is ahead."""
    ranks = len(used)
    clocks = clocks or [0.0] * ranks
    traces = []
    for r in range(ranks):
        ahead = clocks[r]
        builder = TraceBuilder(Meta(rank=r, world_size=ranks, host=f"host{r if any(clocks) else 0}"))

        def add(
            name: str, kind: EventKind, resource: str, start: float, end: float,
            collective: Collective | None = None, *, builder: TraceBuilder = builder, ahead: float = ahead, **more: int,
        ) -> None:  # fmt: skip
            builder.add(
                name, kind, resource, round((start + ahead) * US), round((end + ahead) * US), collective, **more
            )

        add("ProfilerStep#0", EventKind.ANNOTATION, "cpu/1", 0, end)
        for reduce in reduces:
            at = reduce.launched[r]
            evaluate = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
            add(evaluate, EventKind.CPU_OP, "cpu/1", at - 20, at)
            add("c10d::allreduce_", EventKind.CPU_OP, "cpu/1", at - 10, at)
            facts = Collective("all_reduce")
            add("gloo:all_reduce", EventKind.COLLECTIVE, "cpu/2", at, reduce.left[r], facts, nbytes=reduce.nbytes)
        copy = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
        for k in range(len(reduces)):
            add(copy, EventKind.CPU_OP, "cpu/1", used[r] + 10 * k, used[r] + 10 * k + 10)
        sent: dict[str, int] = {}
        for reduce in reduces:
            for sender, receiver, called, received, nbytes in reduce.messages:
                stream = f"wire/10.0.0.{sender}:7>10.0.0.{receiver}:9"
                offset = sent.get(stream, 0)
                sent[stream] = offset + nbytes
                more = {"nbytes": nbytes, "offset": offset, "flow": reduce.tag}
                if r == sender:
                    add("payload", EventKind.SEND, stream, called, called + 1, **more)
                if r == receiver:
                    add("payload", EventKind.RECV, stream, received - 2, received, **more)
        traces.append(builder.freeze([(round(ahead * US), round((end + ahead) * US))]))
    return traces


def two_ranks(tag: int = 5) -> list[AllReduce]:
    """Rank 0 hands over at 120, rank 1 at 160. Step 0: 170-220 and 165-225; step 1: 240-300 and 230-310."""
    messages = [(0, 1, 170, 220, 1_000), (1, 0, 165, 225, 1_000), (0, 1, 240, 300, 1_000), (1, 0, 230, 310, 1_000)]
    return [AllReduce(2_000, [120, 160], [320, 315], messages, tag)]
