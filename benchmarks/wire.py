"""What the wire tracer sees, and what it costs: bytes sent against bytes seen, messages matched, time while attached.

``exact``: collectives from 4 B to 64 MiB, one capture each; what ranks must send for each is arithmetic, what they
were seen to send is counted in gloo's frames. ``matched``: whole training steps under DDP and Horovod on hosts with
links of their own; bytes of payload whose SEND and RECV found each other. ``slowdown``: all-reduces of 16 MiB over
loopback, where nothing but the processor limits them, in short windows with the tracer on and off in turn.

``python -m benchmarks.wire --json``: keys ``bytes_sent, bytes_seen, matched_pct`` (of the worst case),
``slowdown_pct`` (median of the ratios of adjacent windows; ``slowdown_low_pct, slowdown_high_pct``: the middle half),
``slowdown_cpu_pct`` (the same of all threads' CPU time, which is all that the tracer takes, and scatters less),
``slowdown_error_pct, slowdown_cpu_error_pct`` (standard errors of the two), and ``cases`` with the detail. Horovod's
cases need a Python that has it (``make backends``); without one they are left out and ``missing`` says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.testbed import Interrupted, Testbed, TestbedError, horovod, interruptible
from dpro.clock.messages import match_messages
from dpro.trace import gloo, wire
from dpro.trace.model import EventKind, Meta, RankTrace, TraceBuilder

ROOT = Path(__file__).resolve().parent.parent
EXACT, MATCHED, SLOWDOWN = "exact", "matched", "slowdown"
SIZES = (4, 1000, 65536, 1 << 20, 64 << 20)
#: Bytes of payload that all of n ranks together send, per byte of the tensor: a ring all-reduce sends 2 (n - 1) / n
#: of it from every rank, a broadcast brings it to n - 1 ranks, an all-gather brings every rank's to n - 1 others.
MUST_SEND: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1),
    "broadcast": lambda ranks: ranks - 1,
    "all_gather": lambda ranks: ranks * (ranks - 1),
}
_STEPS = 10
_WINDOW_BYTES, _OPS = 16 << 20, 3
_SETTLE_S = 0.1  # the last bytes of a collective are read by a thread of their own


# -- in the ranks ----------------------------------------------------------------------------------


class Ranks:
    """The job of one rank, under either library."""

    def __init__(self, comm: str) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.torch, self.comm = torch, comm
        self.model: Any = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])  # 8 MiB
        if comm == "horovod":
            import horovod.torch as hvd

            hvd.init()
            self.rank, self.size, self.barrier = hvd.rank(), hvd.size(), hvd.barrier
            plain = torch.optim.SGD(self.model.parameters(), 1e-3)
            self._optimizer = hvd.DistributedOptimizer(plain, self.model.named_parameters())
        else:
            import torch.distributed as dist

            dist.init_process_group("gloo")
            self.rank, self.size, self.barrier = dist.get_rank(), dist.get_world_size(), dist.barrier
            self.model = torch.nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=2)
            self._optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def step(self) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        self.model(self.torch.ones(8, 512)).square().mean().backward()
        self._optimizer.step()

    def collective(self, operation: str, nbytes: int) -> None:
        """One collective of ``torch.distributed`` on a tensor of ``nbytes``."""
        dist = self.torch.distributed
        tensor = self.torch.zeros(nbytes // 4)
        if operation == "all_reduce":
            dist.all_reduce(tensor)
        elif operation == "broadcast":
            dist.broadcast(tensor, 0)
        else:
            dist.all_gather([self.torch.empty_like(tensor) for _ in range(self.size)], tensor)

    @contextmanager
    def captured(self) -> Iterator[wire.Seen]:
        """A capture that begins before any rank acts and ends when all bytes have arrived."""
        self.barrier()
        time.sleep(_SETTLE_S)
        with wire.capture() as seen:
            time.sleep(_SETTLE_S)
            self.barrier()
            yield seen
            self.barrier()
            time.sleep(_SETTLE_S)


def exact(ranks: Ranks, folder: Path) -> None:
    """Per collective and size, the payload bytes this rank was seen to send and to receive."""
    ranks.collective("all_reduce", 4)  # connects
    found = []
    for operation in MUST_SEND:
        for nbytes in SIZES:
            with ranks.captured() as seen:
                ranks.collective(operation, nbytes)
            sent, received = (_payload(seen.events, kind) for kind in (EventKind.SEND, EventKind.RECV))
            found.append({"operation": operation, "nbytes": nbytes, "sent": sent, "received": received})
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(found))


def _payload(events: wire.Events, kind: EventKind) -> int:
    """Bytes of payload in the frames that calls of ``kind`` moved."""
    total = 0
    for stream in np.unique(events.resource):
        mine = np.flatnonzero((events.resource == stream) & (events.kind == kind))
        frames = gloo.parse(events.offset[mine], events.nbytes[mine], events.head[mine], events.head_bytes[mine])
        total += int(frames.length.sum())
    return total


def matched(ranks: Ranks, folder: Path) -> None:
    """A trace of whole training steps with nothing in it but messages."""
    for _ in range(3):
        ranks.step()
    with ranks.captured() as seen:
        begin = time.monotonic_ns()
        for _ in range(_STEPS):
            ranks.step()
        end = time.monotonic_ns()
    trace = TraceBuilder(Meta(rank=ranks.rank, world_size=ranks.size)).freeze([(begin, end)])
    trace = wire.append(trace, seen.events)
    trace.meta.extra["dropped"] = seen.dropped
    trace.save(folder / f"rank{ranks.rank}.npz")


def slowdown(ranks: Ranks, folder: Path, windows: int) -> None:
    """Wall and CPU time per all-reduce in windows without and with the tracer, in the order A B B A, ms.

    Rank 0 writes them. The barriers in between are in the CPU time.
    """
    tensor = ranks.torch.ones(_WINDOW_BYTES // 4)
    all_reduce = ranks.torch.distributed.all_reduce

    def window() -> tuple[float, float]:
        all_reduce(tensor)  # after a pause
        times, cpu = [], time.process_time()
        for _ in range(_OPS):
            ranks.barrier()
            begin = time.perf_counter()
            all_reduce(tensor)
            times.append((time.perf_counter() - begin) * 1e3)
        return min(times), (time.process_time() - cpu) * 1e3 / _OPS

    def traced_window() -> tuple[float, float]:
        with wire.capture() as seen:
            taken = window()
        if not len(seen.events):
            raise RuntimeError(f"nothing was traced: {seen.why}")
        return taken

    pairs = []
    for turn in range(windows):
        order = (window, traced_window) if turn % 2 == 0 else (traced_window, window)
        first, second = (run() for run in order)
        pairs.append((first, second) if turn % 2 == 0 else (second, first))
    if ranks.rank == 0:
        (folder / "rank0.json").write_text(json.dumps(pairs))


def job(args: argparse.Namespace) -> None:
    """One rank of one job."""
    ranks = Ranks(args.comm)
    if args.job == EXACT:
        exact(ranks, args.folder)
    elif args.job == MATCHED:
        matched(ranks, args.folder)
    else:
        slowdown(ranks, args.folder, args.windows)
    ranks.barrier()


# -- beside them -----------------------------------------------------------------------------------


def run_job(what: str, bed: Testbed, comm: str, args: argparse.Namespace, folder: Path) -> None:
    """Run one job to its end; its ranks leave files in ``folder``.

    Raises:
        RuntimeError: it failed.
    """
    python = horovod.find_python() if comm == "horovod" else sys.executable
    command = [python, "-m", "benchmarks.wire", "--job", what, "--comm", comm, "--folder", str(folder)]
    command += ["--windows", str(args.windows)]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if comm == "horovod":
        started = horovod.start(bed, command, quiet, str(ROOT), python=python)
    else:
        started = bed.start(command, quiet, str(ROOT))
    if code := started.wait(args.timeout_s):
        raise RuntimeError(f"the job {what} of {comm} on {bed.hosts} hosts ended with exit code {code}")


def exact_case(bed: Testbed, args: argparse.Namespace) -> dict[str, Any]:
    """What was sent by arithmetic, and seen; per operation and in all."""
    with tempfile.TemporaryDirectory() as scratch:
        run_job(EXACT, bed, "ddp", args, Path(scratch))
        by_rank = [json.loads((Path(scratch) / f"rank{rank}.json").read_text()) for rank in range(bed.hosts)]
    rows = []
    for of_ranks in zip(*by_rank, strict=True):
        operation, nbytes = of_ranks[0]["operation"], of_ranks[0]["nbytes"]
        must = MUST_SEND[operation](bed.hosts) * nbytes
        sums = {key: sum(one[key] for one in of_ranks) for key in ("sent", "received")}
        # each capture has two barriers in it, which carry no payload
        rows.append({"operation": operation, "nbytes": nbytes, "bytes_sent": must, "bytes_seen": sums["sent"]})
        rows[-1]["bytes_seen_received"] = sums["received"]
    totals = {key: sum(row[key] for row in rows) for key in ("bytes_sent", "bytes_seen", "bytes_seen_received")}
    return {"case": EXACT, "hosts": bed.hosts, "comm": "ddp", "mode": bed.mode, "operations": rows, **totals}


def matched_case(bed: Testbed, comm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Share of the payload bytes of whole steps that were matched, and what else there was."""
    with tempfile.TemporaryDirectory() as scratch:
        run_job(MATCHED, bed, comm, args, Path(scratch))
        traces = [RankTrace.load(Path(scratch) / f"rank{rank}.npz") for rank in range(bed.hosts)]
    messages = match_messages(traces)
    payload = [trace.nbytes[_named(trace, "payload") & (trace.kind == EventKind.SEND)].sum() for trace in traces]
    return {
        "case": MATCHED,
        "hosts": bed.hosts,
        "comm": comm,
        "mode": bed.mode,
        "matched_pct": 100 * messages.matched_share(payload_only=True),
        "matched_of_all_pct": 100 * messages.matched_share(payload_only=False),
        "payload_bytes": int(sum(payload)),
        "calls": sum(len(trace) for trace in traces),
        "dropped": sum(trace.meta.extra["dropped"] for trace in traces),
    }


def _named(trace: RankTrace, name: str) -> Any:
    return trace.name == (trace.names.index(name) if name in trace.names else -1)


def slowdown_case(args: argparse.Namespace) -> dict[str, Any]:
    """Ratios of adjacent windows, with the tracer over without."""
    with Testbed(2, pin=True, loopback=True) as bed, tempfile.TemporaryDirectory() as scratch:
        run_job(SLOWDOWN, bed, "ddp", args, Path(scratch))
        pairs = json.loads((Path(scratch) / "rank0.json").read_text())
    wall, cpu = ([(off[i], on[i]) for off, on in pairs] for i in range(2))
    low, middle, high = _growth_pct(wall)
    cpu_low, cpu_middle, cpu_high = _growth_pct(cpu)
    return {
        "case": SLOWDOWN,
        "hosts": 2,
        "comm": "ddp",
        "windows": len(pairs),
        "slowdown_pct": middle,
        "slowdown_low_pct": low,
        "slowdown_high_pct": high,
        "off_ms": statistics.median(off for off, _ in wall),
        "on_ms": statistics.median(on for _, on in wall),
        "slowdown_error_pct": _error(low, high, len(pairs)),
        "slowdown_cpu_pct": cpu_middle,
        "slowdown_cpu_error_pct": _error(cpu_low, cpu_high, len(pairs)),
    }


def _growth_pct(pairs: list[tuple[float, float]]) -> list[float]:
    """Quartiles of the second over the first."""
    return statistics.quantiles([100 * (on / off - 1) for off, on in pairs], n=4)


def _error(low: float, high: float, count: int) -> float:
    """What the noise of the machine lets be told apart: the standard error of a median, from the middle half."""
    return 1.25 * (high - low) / 1.35 / float(count**0.5)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cases, and the keys that sum them up."""
    cases, missing = [], ""
    for hosts in args.hosts:
        with Testbed(hosts, args.rate, pin=True, loopback=args.loopback) as bed:
            if hosts == min(args.hosts):
                cases.append(exact_case(bed, args))
            for comm in args.comms:
                try:
                    cases.append(matched_case(bed, comm, args))
                except TestbedError as error:
                    if comm != "horovod":
                        raise
                    missing = str(error)
    cases.append(slowdown_case(args))
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "rate": args.rate, "missing": missing}
    for case in cases:
        found |= {key: case[key] for key in case if key.startswith("slowdown_") or key in ("bytes_sent", "bytes_seen")}
    found["matched_pct"] = min(case["matched_pct"] for case in cases if case["case"] == MATCHED)
    return found | {"cases": cases}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--comms", nargs="+", default=["ddp", "horovod"], choices=["ddp", "horovod"])
    parser.add_argument("--rate", default="10gbit", help="of each host's link where bytes are counted")
    parser.add_argument("--windows", type=int, default=300, help="pairs of windows of the slow-down")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=300)
    parser.add_argument("--job", choices=[EXACT, MATCHED, SLOWDOWN], help=argparse.SUPPRESS)
    parser.add_argument("--comm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args)
        return 0
    os.environ.pop("DPRO", None)
    try:
        with interruptible():
            found = measure(args)
    except Interrupted as interrupt:
        return 128 + interrupt.signum
    except (TestbedError, RuntimeError, ValueError) as error:
        print(f"wire: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(found))
        return 0
    for case in found["cases"]:
        said = {key: value for key, value in case.items() if not isinstance(value, list)}
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in said.items()
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
