"""``python -m benchmarks.testbed run|check|clean``: the testbed from the shell."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys

from benchmarks.testbed import byteps, horovod
from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.job import Interrupted, Job, interruptible
from benchmarks.testbed.network import TestbedError, available, clean_stale, install, parse_rate
from benchmarks.testbed.throughput import measure


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.testbed", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a command once per host, as torchrun would")
    run.add_argument("--hosts", type=int, default=2)
    run.add_argument("--rate", default="1gbit", help="egress of each host: 200mbit, 1gbit, ..., none (default 1gbit)")
    run.add_argument("--pin", action="store_true", help="one core per host")
    run.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds (exit code 124)")
    run.add_argument("--keep-going", action="store_true", help="do not end the other ranks when one fails")
    run.add_argument("--loopback", action="store_true", help="no namespaces, even where they are possible")
    run.add_argument(
        "--clocks-ms", type=float, nargs="+", metavar="MS", help="own clock per host, so far ahead of the machine's"
    )
    run.add_argument("--horovod", metavar="PYTHON", help="start it as a Horovod job; PYTHON has Horovod")
    run.add_argument("--byteps", metavar="PYTHON", help="with a scheduler and a server of BytePS; PYTHON has it")
    run.add_argument("--install", action="store_true", help="install iproute2 by apt when it is missing (root)")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD ...")
    check = commands.add_parser("check", help="what this machine allows, and what a link really carries")
    check.add_argument("--rate", default="1gbit")
    check.add_argument("--json", action="store_true")
    check.add_argument("--install", action="store_true", help="install iproute2 by apt when it is missing (root)")
    check.add_argument("--brief", action="store_true", help="one line, no measurement")
    commands.add_parser("clean", help="take down what killed testbeds left behind")
    return parser


def _run(args: argparse.Namespace) -> int:
    command = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not command:
        raise TestbedError("no command given (python -m benchmarks.testbed run -- CMD ...)")
    if args.install:
        install()
    clocks = [round(ms * 1e6) for ms in args.clocks_ms] if args.clocks_ms else None
    with Testbed(args.hosts, args.rate, args.pin, args.loopback, clocks) as bed:
        job: Job | byteps.BytePSJob
        if args.horovod:
            job = horovod.start(bed, command, python=args.horovod)
        elif args.byteps:
            job = byteps.start(bed, command, python=args.byteps)
        else:
            job = bed.start(command)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda received, _frame: job.send_signal(received))
        return job.wait(args.timeout, args.keep_going)


def _check(args: argparse.Namespace) -> int:
    if args.install:
        install()
    possible, reason = available()
    if args.brief:
        print(f"[testbed] {'network namespaces' if possible else f'loopback only: {reason}'}")
        return 0
    found = {
        "mode": "namespaces" if possible else "loopback",
        "reason": reason,
        "root": os.geteuid() == 0,
        "ip": shutil.which("ip"),
        "tc": shutil.which("tc"),
        "cores": len(os.sched_getaffinity(0)),
        "rate_mb_per_s": parse_rate(args.rate) / 8e6 if possible else None,
        "measured_mb_per_s": None,
    }
    if possible:
        with Testbed(2, args.rate) as bed:
            found["measured_mb_per_s"] = round(measure(bed), 1)
    if args.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(f"{key:18} {value}")
    return 0


def main() -> int:
    """Parse and run; the exit code."""
    args = _parser().parse_args()
    try:
        with interruptible():
            if args.command == "run":
                return _run(args)
            if args.command == "check":
                return _check(args)
            print(f"{len(clean_stale())} stale namespaces removed")
            return 0
    except Interrupted as interrupt:
        return 128 + interrupt.signum
    except (TestbedError, ValueError, OSError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
