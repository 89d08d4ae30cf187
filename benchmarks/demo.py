"""``make demo``: a real two-process Lightning DDP job on CPU, tuned by dpro while it runs.

As root the two processes sit on two network namespaces with a 1 Gbit link, else on loopback; the first line says
which. Exit code 0 when the job ended and dpro came to a verdict, whatever the verdict is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.testbed import Interrupted, Testbed, TestbedError, interruptible
from benchmarks.testbed.throughput import measure

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Build the testbed, run the job, say where the files lie."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="egress of each host (default 1gbit)")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, even where they are possible")
    parser.add_argument("--sweep-s", type=float, default=160, help="time for the sweep after the verdict; 0: none")
    parser.add_argument("--timeout-s", type=float, default=900, help="end the job after this time")
    parser.add_argument("--runs-dir", type=Path, default=Path("dpro_runs"))
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on the last line")
    args, passed_on = parser.parse_known_args()
    try:
        with interruptible(), tempfile.TemporaryDirectory() as scratch:
            return _demo(args, passed_on, Path(scratch) / "demo.json")
    except Interrupted as interrupt:
        return 128 + interrupt.signum
    except (TestbedError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def _demo(args: argparse.Namespace, passed_on: list[str], out: Path) -> int:
    begin_s = time.monotonic()
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    before = set(args.runs_dir.iterdir())
    command = [sys.executable, "-m", "benchmarks.demo_job", "--out", str(out), "--sweep-s", str(args.sweep_s)]
    command += ["--runs-dir", str(args.runs_dir.resolve()), *passed_on]
    # The frameworks' own chatter is not what the demo is about.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99", "PYTHONWARNINGS": "ignore"}
    with Testbed(hosts=2, rate=args.rate, pin=True, loopback=args.loopback) as bed:
        where = bed.describe()
        carried = f", measured {measure(bed):.0f} MB/s" if bed.mode == "namespaces" else ""
        print(f"demo: two-process Lightning DDP job on CPU, {where}{carried}", flush=True)
        code = bed.run(command, env=quiet, cwd=str(ROOT), timeout_s=args.timeout_s)
        found = {"mode": bed.mode, "rate": args.rate if bed.mode == "namespaces" else None}
    if code or not out.exists():
        print(f"demo: the job ended with exit code {code} and without a verdict", file=sys.stderr)
        return code or 1
    found |= json.loads(out.read_text()) | {"seconds": round(time.monotonic() - begin_s, 1)}
    made = sorted(set(args.runs_dir.iterdir()) - before)
    folder = made[-1] if made else args.runs_dir
    (folder / "demo.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"\ndemo: {found['verdict']} ({found['reason']}) on {where}, {found['seconds']:.0f} s")
    for name, what in (
        ("report.html", "report"),
        ("timeline.json", "trace for ui.perfetto.dev"),
        ("demo.json", "figures"),
    ):
        if (folder / name).exists():
            print(f"demo: {what}: {folder / name}")
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
