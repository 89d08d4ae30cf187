"""A real DistributedDataParallel (one process) forms the buckets that the model of its rule predicts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dpro.passes.ddp_buckets import MIB, assign, caps_for, limits_bytes

torch: Any = pytest.importorskip("torch")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _rebuilt(net: Any, **options: Any) -> tuple[list[int], list[int], list[str]]:
    """(bytes of the rebuilt buckets, bytes and dtypes of the gradients in ready order)."""
    ready: list[int] = []
    parameters = list(net.parameters())
    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: ready.append(i))
    ddp = torch.nn.parallel.DistributedDataParallel(net, **options)
    for _ in range(3):
        ready.clear()
        ddp(torch.ones(2, 64)).sum().backward()
    told = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    order = [parameters[i] for i in ready]
    dtypes = [str(p.dtype).removeprefix("torch.") for p in order]
    return [int(n) for n in told.split(",")], [p.numel() * p.element_size() for p in order], dtypes


class Mixed(torch.nn.Module):  # type: ignore[misc]
    """Every second layer in float64."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [torch.float32, torch.float64] * 4
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, dtype=kind) for kind in kinds)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


def _plain() -> Any:
    widths = [64, 128, 256, 700, 600, 300, 128, 64]
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(widths)]
    return torch.nn.Sequential(*layers)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [_plain, Mixed])
@pytest.mark.parametrize("caps", [None, [0.25], [1], [0.1, 0.7, 0.3], [0.0001, 0.02, 1.5]])
def test_rebuilt_buckets(make: Any, caps: list[float] | None) -> None:
    if caps is None:
        options: dict[str, Any] = {}
    else:
        options = {"bucket_cap_mb": caps[0]} if len(caps) == 1 else {"bucket_cap_mb_list": caps}
    got, nbytes, dtypes = _rebuilt(make(), **options)
    expected = assign(nbytes, dtypes, limits_bytes(caps))
    assert got == [sum(nbytes[i] for i in bucket) for bucket in expected]
    assert len(expected) > 1 or make is Mixed or caps is None


@pytest.mark.usefixtures("group")
def test_a_chosen_grouping_is_what_ddp_forms() -> None:
    _, nbytes, dtypes = _rebuilt(_plain())
    groups = [[0, 1, 2], [3], [4, 5, 6, 7, 8, 9], [10, 11, 12, 13]]
    caps = caps_for(groups, nbytes, dtypes)
    assert caps is not None and max(caps) * MIB == max(sum(nbytes[i] for i in g) for g in groups)
    got, _, _ = _rebuilt(_plain(), bucket_cap_mb_list=caps)
    assert got == [sum(nbytes[i] for i in g) for g in groups]


def test_default_limits_are_torchs() -> None:
    first, rest = limits_bytes(None)
    assert first == torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
    assert rest == torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB * MIB
