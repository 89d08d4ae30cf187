"""One rank of a job that sums without end. ``<folder>/<rank>`` says that it got going; rank 1 may end by the way."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import byteps.mxnet as bps
import mxnet as mx
from byteps.mxnet.ops import byteps_declare_tensor, byteps_push_pull


def main() -> None:
    folder, ending = Path(sys.argv[1]), sys.argv[2]
    bps.init()
    array = mx.nd.ones(1000)
    byteps_declare_tensor("sum")
    for round_ in range(10**9):
        if round_ == 5:
            (folder / str(bps.rank())).touch()
            if ending == "killed" and bps.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        byteps_push_pull(array, name="sum")
        array.wait_to_read()


if __name__ == "__main__":
    main()
