"""How right dpro's clock alignment is, on hosts whose clocks are known.

Real jobs: gloo on a testbed whose hosts are in time namespaces, so that truth is what was asked for. A drift is made
by Debian's ``faketime`` in the processes of every second host (truth is then what the kernel says, read beside it),
or, where that is not installed, by stretching the captured times; the case's name says which. ``dlrm8``: the public
trace of eight ranks with offsets added (its ranks share a clock: found is then their ends' agreement).
``synthetic``: made-up traffic, and the same with one pair that contradicts the others, which is what the solver is
for; ``seconds`` is then without the import of CVXPY, given beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clocks_job import READINGS
from benchmarks.testbed import Testbed
from benchmarks.testbed.job import interruptible
from benchmarks.traffic import clock, ring, traffic
from dpro.clock.align import align
from dpro.clock.line import IDENTITY, Line
from dpro.clock.messages import match_messages
from dpro.trace.model import RankTrace
from dpro.trace.store import load

DLRM8 = Path(__file__).resolve().parents[2] / "shared" / "traces" / "dlrm8"
MS = 1_000_000
#: per case what each host's clock is ahead of the machine's, ms
REAL_MS: tuple[tuple[float, ...], ...] = (
    (0, 0), (0, 5), (0, -5), (0, 500), (0, -500), (0, 5, -5, 500), (0, -500, 500, 5),
)  # fmt: skip
DRIFT_PPM = 20.0
#: under /usr/lib
FAKETIME = "*/faketime/libfaketimeMT.so.1"


def measure(name: str, traces: Sequence[RankTrace], truth: Sequence[Line], **more: Any) -> dict[str, Any]:
    """Align ``traces``, and hold every rank's clock against ``truth``, its time to the first rank's.

    The error of a rank is the worst at the beginning, the middle and the end of its steps.
    """
    began = time.perf_counter()
    found = align(list(traces))
    seconds = time.perf_counter() - began
    errors = []
    for k, trace in enumerate(traces):
        first, last = int(trace.step_bounds.min()), int(trace.step_bounds.max())
        errors.append(max(abs(found.line(k)(t) - truth[k](t)) for t in (first, (first + last) // 2, last)))
    others = [error / 1e3 for error in errors[1:]]
    return {
        "case": name,
        "ranks": len(traces),
        "offset_error_us_median": statistics.median(others),
        "offset_error_us_max": max(others),
        "covered": all(error <= sure for error, sure in zip(errors, found.uncertainty_ns, strict=True)),
        "uncertainty_us_max": max(found.uncertainty_ns) / 1e3,
        "drift_ppm": [round(drift, 2) for drift in found.drift_ppm],
        "source": sorted(set(found.source) - {"itself"}),
        "payload_matched_pct": 100 * match_messages(traces).matched_share(),
        "seconds": seconds,
        "warnings": found.warnings,
        **more,
    }


def real(offsets_ms: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Two jobs on hosts with these offsets: with their clocks as they are, and every second host's made to drift."""
    offsets = [round(offset * MS) for offset in offsets_ms]
    name = f"{len(offsets)} hosts, {', '.join(f'{offset:+g}' for offset in offsets_ms)} ms"
    with Testbed(len(offsets), "1gbit", pin=True, clock_offsets_ns=offsets) as bed:
        if bed.mode != "namespaces":
            return
        traces = run_job(bed)
        # from a host's time to the machine's to the first host's
        truth = [Line(offsets[0] - offset, 0.0, 0) for offset in offsets]
        yield measure(name, traces, truth)
        library = next(iter(sorted(Path("/usr/lib").glob(FAKETIME))), None)
        if library is not None:
            traces = run_job(bed, {"LD_PRELOAD": str(library), "FAKETIME": f"+0 x{1 + DRIFT_PPM / 1e6:.6f}"})
            for k in range(1, len(traces), 2):
                truth[k] = truth[k].after(_as_the_kernel_says(traces[k]))
            yield measure(f"{name}, {DRIFT_PPM:g} ppm by faketime", traces, truth)
        else:
            for k in range(1, len(traces), 2):
                slower = Line(0, DRIFT_PPM / 1e6, int(traces[k].step_bounds.mean()))
                stretch(traces[k], slower)
                truth[k] = truth[k].after(slower.inverse())
            yield measure(f"{name}, {DRIFT_PPM:g} ppm by stretching the captured times", traces, truth)


def run_job(bed: Testbed, on_every_second: Mapping[str, str] | None = None) -> list[RankTrace]:
    """The traces of :mod:`benchmarks.clocks_job`; every second host with the environment given."""
    with tempfile.TemporaryDirectory(prefix="dpro-clocks-") as folder:
        command = [sys.executable, "-m", "benchmarks.clocks_job", folder]
        job = bed.start(command, quiet=True, each=lambda host: (on_every_second or {}) if host % 2 else {})
        if code := job.wait(120):
            raise RuntimeError(f"the job ended with exit code {code}")
        return load(Path(folder))


def _as_the_kernel_says(trace: RankTrace) -> Line:
    """From what the process read to what the kernel says, by two readings of both."""
    (read, kernel), (read_after, kernel_after) = trace.meta.extra[READINGS]
    return Line(kernel - read, (kernel_after - kernel) / (read_after - read) - 1, read)


def stretch(trace: RankTrace, by: Line) -> None:
    """Read all times of a trace on another clock, in place."""
    for key in ("start", "end"):
        trace.columns[key] = by.apply(trace.columns[key])
    trace.step_bounds = by.apply(trace.step_bounds)


def public() -> dict[str, Any]:
    """The ranks of dlrm8, moved."""
    traces = load(DLRM8)
    offsets = [round(offset * MS) for offset in (0, 5, -5, 500, -500, 0.1, -0.01, 3_600_000)]
    for trace, offset in zip(traces, offsets, strict=True):
        trace.shift(offset)
    return measure("dlrm8, injected offsets", traces, [Line(-offset, 0.0, 0) for offset in offsets])


def synthetic(hosts: int = 16) -> Iterator[dict[str, Any]]:
    """Ten seconds (iterations) of a ring, clocks up to 500 ms apart that drift by 20 ppm; then with a contradiction."""
    clocks = [IDENTITY.about(clock(0).reference_ns)]
    clocks += [clock((-1) ** k * k * 500 * MS // hosts, (-1) ** k * DRIFT_PPM) for k in range(1, hosts)]
    links = ring(hosts)
    traces = traffic(clocks, links, seconds=10)
    name = f"synthetic, {hosts} hosts in a ring, 10 iterations"
    yield measure(name, traces, clocks)
    began = time.perf_counter()
    import cvxpy  # noqa: F401  (what it takes is not the alignment's)

    imported = time.perf_counter() - began
    # What rank 5 and rank 4 say to each other, rank 5 puts 100 us too late: the other pairs of the ring know better.
    with_4 = [number for number, stream in enumerate(traces[5].resources) if "10.0.0.4:" in stream]
    wrong = np.isin(traces[5].resource, with_4)
    for key in ("start", "end"):
        traces[5].columns[key] = traces[5].columns[key] + 100_000 * wrong
    yield measure(f"{name}, one pair wrong by 100 us", traces, clocks, import_seconds=imported)


def cases() -> Iterator[dict[str, Any]]:
    """All of them, the quick ones first."""
    yield from synthetic()
    if DLRM8.exists():
        yield public()
    for offsets_ms in REAL_MS:
        yield from real(offsets_ms)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    args = parser.parse_args(argv)
    rows = []
    with interruptible():
        for row in cases():
            rows.append(row)
            if not args.json:
                error = f"{row['offset_error_us_median']:6.1f} us, worst {row['offset_error_us_max']:6.1f}"
                sure = f"{'inside' if row['covered'] else 'OUTSIDE'} ± {row['uncertainty_us_max']:.1f}"
                print(f"{row['case']:70} {error}  {sure}  {row['seconds']:.2f} s")
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
