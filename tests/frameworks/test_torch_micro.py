"""What parts of a batch take, found on the side of a job: what is refused, what is held meanwhile, what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpro_integrations import torch_micro

WIDTH, LAYERS = 256, 8


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)), *more)


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def stepped(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor] = mean) -> DistributedDataParallel:
    """A job after a step that was watched."""
    ddp = DistributedDataParallel(model)
    torch_micro.cutting(ddp)
    torch_micro.watch(ddp, True)
    torch_micro.step(ddp, loss_of, torch.randn(8, WIDTH))
    return ddp


def most_bytes(call: Callable[[], object]) -> int:
    """The most that was allocated at once meanwhile, of what was allocated meanwhile, as torch's profiler tells it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as told:
        call()
    events = [e for e in told.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = most = 0
    for event in sorted(events, key=lambda e: int(e.start_ns())):
        level += event.nbytes()
        most = max(most, level)
    return most


def test_one_set_of_gradients_at_a_time() -> None:
    """And one gradient more, an eighth of a set, on its way into it; activations are a few KB."""
    ddp = stepped(net())
    set_bytes = sum(p.numel() * 4 for p in ddp.parameters())
    assert set_bytes == LAYERS * WIDTH * WIDTH * 4
    most = most_bytes(lambda: torch_micro.times(ddp))
    assert set_bytes <= most < 1.3 * set_bytes


def test_the_job_is_left_as_it_was() -> None:
    ddp = stepped(net())
    before = [(p.grad, p.grad.clone(), p.clone()) for p in ddp.parameters()]
    state = torch.get_rng_state()
    assert set(torch_micro.times(ddp)) == {1, 2, 4, 8}
    for p, (gradient, values, weights) in zip(ddp.parameters(), before, strict=True):
        assert p.grad is gradient and torch.equal(gradient, values) and torch.equal(p, weights)
        assert not p._backward_hooks
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("more", "loss_of"),
    [
        ([nn.BatchNorm1d(WIDTH)], mean),
        ([nn.Dropout(0.5)], mean),
        ([], lambda model, batch: model(batch).square().sum()),
        # of the second part alone: a gradient that the whole batch has not is found as well
        ([], lambda model, batch: model(batch).square().mean() * (1 + (batch.shape[0] < 8))),
        ([], lambda model, batch: model(batch).square().mean() * float("nan")),
    ],
    ids=["batch norm", "dropout", "a sum", "another loss of parts", "no number"],
)
def test_refused(more: list[nn.Module], loss_of: Callable[[nn.Module, Tensor], Tensor]) -> None:
    ddp = stepped(net(*more), loss_of)
    buffers = [buffer.clone() for buffer in ddp.buffers()]
    with pytest.raises(RuntimeError, match="other gradients than the batch"):
        torch_micro.times(ddp)
    assert all(torch.equal(old, new) for old, new in zip(buffers, ddp.buffers(), strict=True))
    assert not any(p._backward_hooks for p in ddp.parameters())


def test_a_parameter_that_is_not_used() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    assert set(torch_micro.times(stepped(Partly()))) == {1, 2, 4, 8}
