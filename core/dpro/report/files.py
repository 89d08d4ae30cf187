"""Where an answer is written to: never over what was asked about, and told before the work if it cannot be.

Knows paths only, not what is written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpro.errors import TraceError
from dpro.trace.store import input_files


def claim(output: Path, source: Path) -> None:
    """Refuse ``output`` where it is one of the trace files at ``source`` or cannot be written.

    Raises:
        TraceError: it is an input. OSError: no such folder, a folder itself, or not permitted; names the file.
    """
    if output.is_dir():
        raise _refusal(errno.EISDIR, output)
    if output.exists():
        if any(output.samefile(file) for file in input_files(source)):
            raise TraceError(output, "is a trace that was asked about: not written over")
    elif not output.parent.is_dir():
        raise _refusal(errno.ENOTDIR if output.parent.exists() else errno.ENOENT, output)
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise _refusal(errno.EACCES, output)


@contextmanager
def naming(output: Path) -> Iterator[None]:
    """An error of writing names its file (that of a full disk, which is raised late, does not by itself)."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise _refusal(error.errno, output) from error


def _refusal(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
