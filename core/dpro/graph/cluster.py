"""The devices and links that a model can be spread over, from YAML or made here.

Knows speeds, bytes and names; not what runs where. ``docs/cluster.md`` has the file's form. Times of ops are on a
reference device of speed 1; a device type has a speed for each type of op, or one for all (``default``). Links are
resources: each ordered pair of devices of a machine has one of its own, each ordered pair of machines one that all
their devices share, or (``shared: true``) all machines one together, as HeteroG's simulator has it (CoNEXT 2020,
section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro.errors import TraceError
from dpro.trace.model_graph import ModelOp

DEFAULT = "default"
SHARED_LINK = "link/between"
MAX_DEVICES = 1024
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Device:
    """``memory_bytes`` 0: no limit."""

    name: str
    type: str
    machine: str
    memory_bytes: int = 0


@dataclass(frozen=True)
class Line:
    """What one link takes for a tensor: ``latency_ns + ns_per_byte · bytes``."""

    latency_ns: float
    ns_per_byte: float

    @classmethod
    def of(cls, gb_per_s: float, latency_us: float) -> Line:
        """Of 10^9 bytes a second."""
        return cls(latency_us * 1e3, 1.0 / gb_per_s)


class Cluster:
    """See the module text.

    Args:
        speeds: device type -> op type -> speed relative to the reference; without an entry ``default``, else 1.
        within: between devices of a machine; ``between``: between machines; ``pairs``: (source, destination) ->
            exceptions, by device number, each with a link of its own.
        shared: one link for all traffic between machines.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        within: Line,
        between: Line | None = None,
        *,
        speeds: dict[str, dict[str, float]] | None = None,
        machines: dict[str, Line] | None = None,
        pairs: dict[tuple[int, int], Line] | None = None,
        shared: bool = False,
    ) -> None:
        self.devices = tuple(devices)
        self.speeds = speeds or {}
        self.within, self.between, self.shared = within, between or within, shared
        n = len(self.devices)
        #: [n, n] the number of the link from one to the other in :attr:`links`, -1 on the diagonal.
        self.link = np.full((n, n), -1, dtype=np.int32)
        #: [n, n]
        self.latency_ns, self.ns_per_byte = np.zeros((n, n)), np.zeros((n, n))
        self.links: list[str] = []
        numbers: dict[str, int] = {}
        for a, one in enumerate(self.devices):
            for b, other in enumerate(self.devices):
                if a == b:
                    continue
                name, line = self._between(one, other, machines or {})
                if pairs and (a, b) in pairs:
                    name, line = f"link/{one.name}>{other.name}", pairs[a, b]
                self.link[a, b] = numbers.setdefault(name, len(numbers))
                self.latency_ns[a, b], self.ns_per_byte[a, b] = line.latency_ns, line.ns_per_byte
        self.links = list(numbers)

    def _between(self, one: Device, other: Device, machines: dict[str, Line]) -> tuple[str, Line]:
        if one.machine == other.machine:
            return f"link/{one.name}>{other.name}", self.within
        ends = [machines.get(device.machine, self.between) for device in (one, other)]
        line = Line(max(e.latency_ns for e in ends), max(e.ns_per_byte for e in ends))
        return SHARED_LINK if self.shared else f"link/{one.machine}>{other.machine}", line

    def __len__(self) -> int:
        return len(self.devices)

    @classmethod
    def uniform(cls, count: int, gb_per_s: float, latency_us: float = 20.0, memory_bytes: int = 0) -> Cluster:
        """``count`` reference devices in one machine."""
        return cls(
            [Device(f"gpu{i}", "gpu", "host", memory_bytes) for i in range(count)], Line.of(gb_per_s, latency_us)
        )

    def speed(self, device: int, op_type: str = DEFAULT) -> float:
        """Relative to the reference device."""
        table = self.speeds.get(self.devices[device].type, {})
        return table.get(op_type, table.get(DEFAULT, 1.0))

    def times_ns(self, types: Sequence[str], time_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[ops, devices]: what ops of these types, of ``time_ns`` [ops] on the reference, take on each device."""
        speed, number = self._speeds_of(types)
        times: npt.NDArray[np.int64] = np.rint(time_ns[:, None] / speed[number]).astype(np.int64)
        return times

    def op_times_ns(self, ops: Sequence[ModelOp]) -> npt.NDArray[np.int64]:
        """[ops, devices]: as :meth:`times_ns`, of a model's ops."""
        return self.times_ns([op.type for op in ops], np.array([op.time_ns for op in ops], dtype=np.int64))

    def time_on_ns(
        self, types: Sequence[str], time_ns: npt.NDArray[np.int64], device: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """[ops]: as :meth:`times_ns`, each on its ``device`` [ops]."""
        speed, number = self._speeds_of(types)
        times: npt.NDArray[np.int64] = np.rint(time_ns / speed[number, device]).astype(np.int64)
        return times

    def _speeds_of(self, types: Sequence[str]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """[kinds, devices], and [ops] the kind of each."""
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys([DEFAULT, *types]))}
        number = np.fromiter(map(kinds.__getitem__, types), np.int64, len(types))
        return np.array([[self.speed(d, kind) for d in range(len(self))] for kind in kinds]), number

    def transfer_ns(self, nbytes: int, source: int, destination: int) -> int:
        """0 on one device."""
        if source == destination:
            return 0
        return round(float(self.latency_ns[source, destination] + self.ns_per_byte[source, destination] * nbytes))

    def memory_bytes(self) -> npt.NDArray[np.int64]:
        """[devices]; 0: no limit."""
        return np.array([device.memory_bytes for device in self.devices], dtype=np.int64)

    def all_reduce_ns(self, nbytes: int, devices: Sequence[int]) -> int:
        """A ring over ``devices``, or one in each machine, one over a device of each, and a broadcast in each; the
        faster, as HeteroG chooses (section 3.3).

        A ring of n sends ``2 (n-1)`` times ``bytes / n``, each step as slow as its slowest link.
        """
        ring = sorted(set(devices), key=lambda d: (self.devices[d].machine, d))
        flat_ns = self._ring_ns(nbytes, ring)
        by_machine: dict[str, list[int]] = {}
        for device in ring:
            by_machine.setdefault(self.devices[device].machine, []).append(device)
        if len(by_machine) < 2 or len(by_machine) == len(ring):
            return round(flat_ns)
        inside = max(self._ring_ns(nbytes, one) for one in by_machine.values())
        copies = max(self.transfer_ns(nbytes, one[0], d) for one in by_machine.values() for d in one)
        return round(min(flat_ns, inside + self._ring_ns(nbytes, [one[0] for one in by_machine.values()]) + copies))

    def _ring_ns(self, nbytes: int, ring: Sequence[int]) -> float:
        n = len(ring)
        if n < 2:
            return 0.0
        hops = list(zip(ring, [*ring[1:], ring[0]], strict=True))
        # on a link that several hops share they take turns
        busy: dict[int, float] = {}
        for a, b in hops:
            link = int(self.link[a, b])
            busy[link] = busy.get(link, 0.0) + self.latency_ns[a, b] + self.ns_per_byte[a, b] * nbytes / n
        return 2 * (n - 1) * max(busy.values())


def load(path: Path) -> Cluster:
    """The cluster that a YAML file describes.

    Raises:
        TraceError: it cannot be read, or does not describe one.
    """
    import yaml

    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise TraceError(path, "larger than 1 MiB: no cluster's description")
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(path, getattr(error, "strerror", None) or "not text") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that there is not
        mark = getattr(error, "problem_mark", None)
        raise TraceError(path, f"not YAML{f' (line {mark.line + 1})' if mark else ''}") from error
    try:
        return _cluster(raw)
    except _Bad as error:
        raise TraceError(path, str(error)) from error


class _Bad(ValueError):
    pass


def _cluster(raw: Any) -> Cluster:
    top = _mapping(raw, "the file", {"devices", "types", "links", "machines", "pairs", "shared"})
    devices = _devices(top.get("devices"))
    links = _mapping(top.get("links"), "links", {"within", "between"})
    links = {key: line for key, line in links.items() if line is not None}
    if not links:
        raise _Bad("links: there must be 'within' or 'between'")
    within = _line(links.get("within", links.get("between")), "links.within")
    between = _line(links["between"], "links.between") if "between" in links else within
    speeds = {
        str(kind): {
            str(op): _number(value, f"types.{kind}.{op}", 1e-6, 1e6)
            for op, value in _mapping(table, f"types.{kind}", None).items()
        }
        for kind, table in _mapping(top.get("types"), "types", None).items()
    }
    machines = {str(m): _line(v, f"machines.{m}") for m, v in _mapping(top.get("machines"), "machines", None).items()}
    number = {device.name: i for i, device in enumerate(devices)}
    pairs = {}
    listed = top.get("pairs") or []
    if not isinstance(listed, list):
        raise _Bad("pairs: a list")
    for i, pair in enumerate(listed):
        fields = _mapping(pair, f"pairs[{i}]", {"from", "to", "gb_per_s", "latency_us"})
        ends = [number.get(str(fields.get(key))) for key in ("from", "to")]
        if ends[0] is None or ends[1] is None:
            raise _Bad(f"pairs[{i}]: 'from' and 'to' name devices")
        pairs[ends[0], ends[1]] = _line({k: fields[k] for k in fields if k not in ("from", "to")}, f"pairs[{i}]")
    for machine in machines:
        if all(device.machine != machine for device in devices):
            raise _Bad(f"machines.{machine[:40]}: no device is there")
    shared = top.get("shared", False)
    if type(shared) is not bool:
        raise _Bad("shared: true or false")
    return Cluster(devices, within, between, speeds=speeds, machines=machines, pairs=pairs, shared=shared)


def _devices(raw: Any) -> list[Device]:
    if not isinstance(raw, list) or not raw:
        raise _Bad("devices: a list of at least one")
    out: list[Device] = []
    for i, item in enumerate(raw):
        what = f"devices[{i}]"
        fields = _mapping(item, what, {"type", "count", "machine", "memory_gb", "name"})
        count = fields.get("count", 1)
        if type(count) is not int or not 1 <= count <= MAX_DEVICES - len(out):
            raise _Bad(f"{what}.count: 1 to {MAX_DEVICES} devices in all")
        kind, machine = str(fields.get("type", "gpu")), str(fields.get("machine", "host"))
        if count > 1 and "name" in fields:
            raise _Bad(f"{what}: one name for {count} devices")
        memory = round(_number(fields.get("memory_gb", 0), f"{what}.memory_gb", 0, 1e6) * 1e9)
        for _ in range(count):
            name = str(fields["name"]) if count == 1 and "name" in fields else f"{kind.lower()}-{len(out)}"
            out.append(Device(name, kind, machine, memory))
    if len({device.name for device in out}) < len(out):
        raise _Bad("devices: two have one name")
    return out


def _line(raw: Any, what: str) -> Line:
    fields = _mapping(raw, what, {"gb_per_s", "latency_us"})
    speed = _number(fields.get("gb_per_s"), f"{what}.gb_per_s", 1e-6, 1e6)
    return Line.of(speed, _number(fields.get("latency_us", 0), f"{what}.latency_us", 0, 1e9))


def _mapping(raw: Any, what: str, keys: set[str] | None) -> dict[Any, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise _Bad(f"{what}: {str(raw)[:40]!r} where keys and values should be")
    for key in raw:
        if keys is not None and key not in keys:
            raise _Bad(f"{what}: unknown key {str(key)[:40]!r}; there are {', '.join(sorted(keys))}")
    return raw


def _number(value: Any, what: str, least: float, most: float) -> float:
    if type(value) not in (int, float) or not least <= value <= most:
        raise _Bad(f"{what}: {str(value)[:40]!r} is no number from {least:g} to {most:g}")
    return float(value)
