"""Horovod's own rendezvous server for the tests' jobs: what ``horovodrun`` starts beside its ranks.

Prints its port. A number on stdin begins a new job of so many ranks on this host, answered by "ready".
"""

from __future__ import annotations

import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer


def serve() -> None:
    server = RendezvousServer()
    print(server.start(), flush=True)
    for line in iter(sys.stdin.readline, ""):
        ranks = int(line)
        server.init(get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks))
        print("ready", flush=True)


if __name__ == "__main__":
    serve()
