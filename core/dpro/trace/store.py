"""Where traces live: dpro's own run folder, and whatever PATH a user gives.

Knows names and kinds of files, not their meaning. A run folder is ``dpro_runs/<time>/`` with
``meta.json``, ``outcome.json``, ``plan.json``, ``report.txt`` and, where the job was captured,
``rank<r>/trace.npz``, ``report.html`` and ``timeline.json``. Any other folder is taken as one trace
file per rank, as other tools write them.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from dpro.errors import TraceError
from dpro.trace import byteps, horovod, kineto, mxnet, xplane
from dpro.trace.model import RankTrace

#: A run folder never grows past this; a trace that would is refused.
SIZE_CAP_BYTES = 2 << 30
_CHAKRA = re.compile(r"^et[_\-.]?rank", re.IGNORECASE)
_SUFFIXES = (".json", ".json.gz", ".npz", ".xplane.pb")
#: What Gluon's ``export`` calls a network: it says which node of it an op of an MXNet profile ran.
_SYMBOL = "-symbol.json"
#: dpro's own files beside traces
_OWN_FILES = frozenset({"meta.json", "outcome.json", "plan.json", "timeline.json", "demo.json"})


class RunFolder:
    """One run's files. Made on first write, so that a run without results leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def new(cls, base: Path = Path("dpro_runs")) -> RunFolder:
        """A folder named by the time, with a number where that is taken."""
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        names = [stamp, *(f"{stamp}_{n}" for n in range(2, 1000))]
        return cls(next(base / name for name in names if not (base / name).exists()))

    def trace_file(self, rank: int) -> Path:
        return self.path / f"rank{rank}" / "trace.npz"

    def trace_files(self) -> list[Path]:
        """The traces that are there; none of a job that was not captured."""
        return sorted(self.path.glob("rank*/trace.npz"))

    @property
    def meta_file(self) -> Path:
        return self.path / "meta.json"

    @property
    def outcome_file(self) -> Path:
        return self.path / "outcome.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def start_plan_file(self) -> Path:
        """A plan that takes effect only when a job is started."""
        return self.path / "at_start.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.txt"

    @property
    def page_file(self) -> Path:
        return self.path / "report.html"

    @property
    def timeline_file(self) -> Path:
        return self.path / "timeline.json"

    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def save_trace(self, rank: int, trace: RankTrace | bytes) -> Path:
        """Store one rank's trace (or what :meth:`RankTrace.save` wrote, as bytes).

        Raises:
            TraceError: the folder would grow past :data:`SIZE_CAP_BYTES`; nothing is left of the trace.
        """
        file = self.trace_file(rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(trace, RankTrace):
            trace.save(file)
        else:
            file.write_bytes(trace)
        if self.size_bytes() > SIZE_CAP_BYTES:
            file.unlink()
            raise TraceError(file, f"the run folder would grow past {SIZE_CAP_BYTES >> 20} MiB")
        return file

    def save_meta(self, meta: dict[str, Any]) -> None:
        """Store what the run was (job, framework, verdict, …; JSON values only), for people and their scripts."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.meta_file.write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")


def load(path: Path) -> list[RankTrace]:
    """The ranks' traces at ``path``, by rank: a run folder, a folder of trace files, or one file.

    An MXNet symbol (``*-symbol.json``) in a folder gives the ops of the MXNet profiles in it their nodes' names.
    In a folder one unusable file among usable ones is skipped with a warning (on the first trace); a
    rank that nothing tells is given the lowest free number, by order of file names.

    Raises:
        TraceError: nothing usable there; the text names the file and the reason.
    """
    path = Path(path)
    if not path.exists():
        raise TraceError(path, "no such file or directory")
    if not path.is_dir():
        return _ranked([_read(path)], [])
    stored = RunFolder(path).trace_files()
    if stored:
        return _ranked([RankTrace.load(file) for file in stored], [])
    return _load_folder(path)


def input_files(path: Path) -> list[Path]:
    """The files that :func:`load` may read at ``path``; none where there is nothing."""
    if not path.is_dir():
        return [path] if path.exists() else []
    found = RunFolder(path).trace_files() or [f for f in path.iterdir() if f.is_file() and _plausible(f)]
    return found or _comm_files(path)


def _plausible(file: Path) -> bool:
    return file.name.endswith(_SUFFIXES) and file.name not in _OWN_FILES


def _comm_files(path: Path) -> list[Path]:
    """Of BytePS: in a folder named by the local rank, and that in one for each worker where the launcher made it so."""
    found = [*path.glob("[0-9]*/comm.json"), *path.glob("*/[0-9]*/comm.json")]
    return sorted(found, key=lambda file: _natural(str(file)))


def _load_folder(path: Path) -> list[RankTrace]:
    try:
        files = sorted((f for f in path.iterdir() if f.is_file()), key=lambda f: _natural(f.name))
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror})") from error
    notes = []
    plausible = [f for f in files if _plausible(f)] or _comm_files(path)
    chakra = [f for f in plausible if _CHAKRA.match(f.name)]
    plausible = [f for f in plausible if f not in chakra]
    if chakra:
        notes.append(f"{len(chakra)} Chakra execution trace(s) beside the Kineto traces skipped")
    symbols = [f for f in plausible if f.name.endswith(_SYMBOL)]
    plausible = [f for f in plausible if f not in symbols]
    known = {*plausible, *chakra, *symbols}
    others = sum(f.name not in _OWN_FILES and f not in known for f in files)
    if others and plausible:
        notes.append(f"{others} file(s) that are no traces skipped")
    if not plausible:
        if RunFolder(path).outcome_file in files:
            raise TraceError(path, "no traces in it: the job of this run folder was not captured")
        raise TraceError(path, f"no trace files in it ({', '.join('*' + suffix for suffix in _SUFFIXES)})")
    traces, failures = [], []
    for file in plausible:
        try:
            traces.append(_read(file))
        except TraceError as error:
            failures.append(error)
    if not traces:
        if len(failures) == 1:
            raise failures[0]
        raise TraceError(path, f"none of {len(failures)} files is a usable trace, first: {failures[0]}")
    notes += [f"skipped {Path(error.path).name}: {error.reason}" for error in failures]
    return _ranked(_with_nodes(traces, symbols, notes), notes)


def _with_nodes(traces: list[RankTrace], symbols: list[Path], notes: list[str]) -> list[RankTrace]:
    """MXNet's ops by the names of the nodes of the one symbol beside them."""
    if len(symbols) > 1:
        notes.append(f"{len(symbols)} symbols: nobody says which one ran, so none is used")
    if len(symbols) != 1:
        return traces
    try:
        symbol = symbols[0].read_bytes()
        return [mxnet.named(t, symbol, symbols[0]) if t.meta.framework == mxnet.FRAMEWORK else t for t in traces]
    except OSError as error:
        notes.append(f"skipped {symbols[0].name}: cannot be read ({error.strerror})")
    except TraceError as error:
        notes.append(f"skipped {symbols[0].name}: {error.reason}")
    return traces


def _read(file: Path) -> RankTrace:
    if file.name.endswith(".npz"):
        return RankTrace.load(file)
    if file.name.endswith(".pb"):
        return xplane.read(file)
    if horovod.is_timeline(file):
        return horovod.read_trace(file)
    if byteps.is_comm(file):
        return byteps.read_trace(file)
    return mxnet.read(file) if mxnet.is_profile(file) else kineto.read(file)


def _ranked(traces: list[RankTrace], notes: list[str]) -> list[RankTrace]:
    """Settle the ranks, sort by them, and put the notes where they will be seen."""
    taken: dict[int, RankTrace] = {}
    homeless = []
    for trace in traces:
        rank = trace.meta.rank
        if rank >= 0 and rank in taken:
            first = Path(taken[rank].meta.source).name
            notes.append(f"rank {rank} twice: {Path(trace.meta.source).name} is numbered anew, {first} keeps it")
        if rank < 0 or rank in taken:
            homeless.append(trace)
        else:
            taken[rank] = trace
    for trace in homeless:
        rank = next(r for r in range(len(taken) + 1) if r not in taken)
        if trace.meta.rank < 0:
            trace.warnings.append(f"no rank in the file or its name: taken as {rank} by order")
        trace.meta.rank = rank
        taken[rank] = trace
    out = [taken[rank] for rank in sorted(taken)]
    worlds = {trace.meta.world_size for trace in out if trace.meta.world_size > 0}
    if len(worlds) == 1 and len(out) > 1 and len(out) < min(worlds):
        notes.append(f"{len(out)} of {min(worlds)} ranks are here")
    out[0].warnings[:0] = notes
    return out


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key: rank10 after rank9."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name)]
