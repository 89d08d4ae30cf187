"""How long each phase of the tuner lasts and what it may do; from arguments or the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from dpro.errors import DproError

Mode = Literal["observe", "suggest", "apply"]
MODES: tuple[str, ...] = get_args(Mode)
_OTHER_VARIABLES = {"DPRO_DEBUG", "DPRO_BUILD_JOBS", "DPRO_CACHE"}
_ON = ("1", "on", "true", "yes")
_OFF = ("", "0", "off", "false", "no")


@dataclass(frozen=True)
class Settings:
    """Phases are counted in optimizer steps; accumulation micro-steps do not count.

    Every field can be set from the environment as ``DPRO_<FIELD>`` (``DPRO`` itself is the mode).
    """

    mode: Mode = "apply"
    warmup_steps: int = 5
    baseline_steps: int = 10
    capture_steps: int = 5
    #: after a change of settings, steps that are not timed (DDP rebuilds its buckets in them)
    settle_steps: int = 2
    verify_steps: int = 8
    #: how many plans are measured in the job before the best one is kept
    trials: int = 3
    #: a plan must beat the baseline by at least this share, and by more than the noise
    min_gain: float = 0.005
    #: budget of the search on rank 0
    search_s: float = 10.0
    #: budget of rank 0 for timing layers that could be compiled (Keras, DDP); 0: none are compiled. Compiled layers
    #: round otherwise, so that they are yours to allow
    regions_s: float = 0.0
    #: how many bytes a rank may have allocated at once; above it dpro makes the job fit. 0: no budget
    memory_bytes: int = 0
    #: how long a rank waits for the others at a meeting point
    timeout_s: float = 30.0
    #: also try DDP's gradient_as_bucket_view: faster where copies count, but code that keeps, detaches or
    #: replaces ``.grad`` sees the difference, so it is yours to allow
    bucket_views: bool = False
    #: also reduce gradients in 16 bit, searched or by a given plan: the training's result is another one, so that it is
    #: yours to allow
    lossy: bool = False
    runs_dir: str = "dpro_runs"
    #: a plan file: skips capture and search
    plan: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise DproError(f"mode {self.mode!r} is not one of {', '.join(MODES)}")
        least = {"warmup_steps": 3, "baseline_steps": 3, "capture_steps": 1, "settle_steps": 2, "verify_steps": 3}
        least["trials"] = 1
        for key, low in least.items():
            if getattr(self, key) < low:
                raise DproError(f"{key} is {getattr(self, key)}, must be at least {low}")
        for key in ("min_gain", "search_s", "regions_s", "memory_bytes", "timeout_s"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise DproError(f"{key} is {getattr(self, key)}, must be a finite number of at least 0")

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ, **given: Any) -> Settings:
        """Arguments win over the environment, the environment over the defaults.

        Raises:
            DproError: a variable that is not of its field's type, or out of range.
        """
        values: dict[str, Any] = {}
        mode = env.get("DPRO", "")
        if active(env) and mode.lower() not in _ON:
            values["mode"] = cast(Mode, mode)
        known = {f"DPRO_{item.name.upper()}" for item in fields(cls)} | _OTHER_VARIABLES
        for name in env:
            if name.startswith("DPRO_") and name not in known:
                raise DproError(f"{name} is no setting of dpro")
        kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _switch}
        for item in fields(cls):
            text = env.get(f"DPRO_{item.name.upper()}")
            if text is None:
                continue
            try:
                values[item.name] = kinds.get(str(item.type), str)(text)
            except ValueError:
                wanted = "on or off" if item.type == "bool" else "a number"
                raise DproError(f"DPRO_{item.name.upper()}={text!r} is not {wanted}") from None
        values.update({key: value for key, value in given.items() if value is not None})
        return cls(**values)


def _switch(text: str) -> bool:
    if text.lower() not in (*_ON, *_OFF):
        raise ValueError(text)
    return text.lower() in _ON


def active(env: Mapping[str, str] = os.environ) -> bool:
    """Whether ``DPRO`` asks for activation by environment."""
    return env.get("DPRO", "").lower() not in _OFF


def disabled(env: Mapping[str, str] = os.environ) -> bool:
    """Whether ``DPRO`` is set to an off word: callbacks then do nothing."""
    return "DPRO" in env and not active(env)
