"""The plan: every setting dpro may change, as one small JSON document.

Ground floor: knows no graph and no framework. A plan says *what* to set; an adapter knows *how*.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dpro.errors import PlanError

PLAN_VERSION = 1
#: A bucket larger than this (1 TiB) is a mistake.
MAX_CAP_MIB = 1 << 20
#: Nor does a gradient wait longer than this, ms, on purpose.
MAX_CYCLE_MS = 1000


@dataclass(frozen=True)
class Plan:
    """Settings for one job. A field that is ``None`` is left as the user has it.

    Sizes are in MiB where the stock setting is (``bucket_caps``), else in bytes; times in ms.
    """

    version: int = PLAN_VERSION
    #: Whom the plan fits: model (hash of tensor names, shapes, dtypes), world_size, framework, …
    fingerprint: dict[str, str] = field(default_factory=dict)
    #: Names of tensors per group, in the order they are synchronised.
    tensor_groups: list[list[str]] | None = None
    #: Bytes per partition, by tensor name.
    partitions: dict[str, int] | None = None
    #: BytePS: one bound for all of them, when the job is started.
    partition_bytes: int | None = None
    #: BytePS: bytes of gradients on their way to the servers and back at once, at most. Then each partition goes by a
    #: name of its own, and gradients in this order.
    in_flight_bytes: int | None = None
    push_order: list[str] | None = None
    fusion_threshold: int | None = None
    cycle_time: float | None = None
    #: DDP: one number = uniform ``bucket_cap_mb``; more = ``bucket_cap_mb_list``.
    bucket_caps: list[float] | None = None
    #: DDP: further constructor switches, e.g. {"gradient_as_bucket_view": True}.
    ddp_options: dict[str, bool] | None = None
    #: What gradients are cast to on the wire; lossy, so that whoever applies it must be allowed to.
    gradient_dtype: str | None = None
    compile_regions: list[str] | None = None
    recompute: list[str] | None = None
    accumulate: int | None = None
    #: Samples of each rank, by rank, of every global batch.
    batch_shares: list[int] | None = None
    placement: dict[str, str] | None = None
    order: list[str] | None = None
    predicted_ms: float | None = None
    baseline_ms: float | None = None
    #: The most that a rank has allocated at once, where the plan is there to make the job fit into its memory.
    predicted_bytes: int | None = None

    def __post_init__(self) -> None:
        if type(self.version) is not int:
            raise PlanError(f"plan version {str(self.version)[:20]!r} must be a whole number, such as {PLAN_VERSION}")
        if self.version != PLAN_VERSION:
            raise PlanError(f"plan version {self.version!r}, this dpro reads {PLAN_VERSION}")
        _check("fingerprint", self.fingerprint, _is_str_map)
        _check("tensor_groups", self.tensor_groups, _is_groups)
        _check("partitions", self.partitions, lambda v: _is_map(v) and all(_is_count(n) for n in v.values()))
        _check("partition_bytes", self.partition_bytes, _is_count)
        _check("in_flight_bytes", self.in_flight_bytes, _is_count)
        _check("push_order", self.push_order, _is_names)
        _check("fusion_threshold", self.fusion_threshold, lambda v: type(v) is int and v >= 0)
        _check("cycle_time", self.cycle_time, lambda v: _is_number(v) and 0 < v <= MAX_CYCLE_MS)
        _check("bucket_caps", self.bucket_caps, _is_caps)
        _check("ddp_options", self.ddp_options, lambda v: _is_map(v) and all(type(b) is bool for b in v.values()))
        _check("gradient_dtype", self.gradient_dtype, lambda v: v in ("bfloat16", "float16"))
        _check("compile_regions", self.compile_regions, _is_names)
        _check("recompute", self.recompute, _is_names)
        _check("accumulate", self.accumulate, _is_count)
        _check("batch_shares", self.batch_shares, lambda v: isinstance(v, list) and bool(v) and all(map(_is_count, v)))
        _check("placement", self.placement, _is_str_map)
        _check("order", self.order, _is_names)
        _check("predicted_ms", self.predicted_ms, lambda v: _is_number(v) and v >= 0)
        _check("predicted_bytes", self.predicted_bytes, lambda v: type(v) is int and v >= 0)
        _check("baseline_ms", self.baseline_ms, lambda v: _is_number(v) and v >= 0)

    @property
    def sha256(self) -> str:
        """Hash of the canonical JSON; equal on every rank before anything is applied."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()

    def settings(self) -> dict[str, Any]:
        """What the plan changes: the fields that are set, less identity and predictions."""
        aside = {"version", "fingerprint", "predicted_ms", "baseline_ms", "predicted_bytes"}
        return {k: v for k, v in asdict(self).items() if v is not None and k not in aside}

    def dumps(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False) + "\n")

    @classmethod
    def loads(cls, text: str) -> Plan:
        """Parse and validate.

        Raises:
            PlanError: not JSON, not an object, an unknown key, or a value of the wrong type or range.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"not JSON ({error})") from error
        if not isinstance(raw, dict):
            raise PlanError("a plan is a JSON object")
        unknown = sorted(set(raw) - {f.name for f in fields(cls)})
        if unknown:
            raise PlanError(f"unknown key {unknown[0]!r}")
        return cls(**raw)

    @classmethod
    def load(cls, path: Path) -> Plan:
        try:
            return cls.loads(path.read_text())
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{path}: {getattr(error, 'strerror', None) or 'not text'}") from error


def _check(key: str, value: Any, good: Any) -> None:
    if value is not None and not good(value):
        raise PlanError(f"bad value for {key!r}: {str(value)[:60]}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value == value and abs(value) != float("inf")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) for k in value)


def _is_str_map(value: Any) -> bool:
    return _is_map(value) and all(isinstance(v, str) for v in value.values())


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _is_groups(value: Any) -> bool:
    if not (isinstance(value, list) and value and all(_is_names(g) and g for g in value)):
        return False
    names = [name for group in value for name in group]
    return len(names) == len(set(names))


def _is_caps(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_number(v) and 0 < v <= MAX_CAP_MIB for v in value)
