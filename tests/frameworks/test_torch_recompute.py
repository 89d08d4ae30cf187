"""Re-computation of real modules: same weights to the last bit, less memory, and nothing left when it is undone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpro.errors import PlanError
from dpro_integrations.torch_memory import Meter, units, why_not_twice
from dpro_integrations.torch_recompute import check_blocks, recompute


class Block(nn.Module):
    """What recomputing could change: running statistics, and a mask drawn anew."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


class Counting(nn.Module):
    """A buffer that its forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None), nn.ReLU(inplace=True)),
        nn.Sequential(*(Block() for _ in range(4))),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


def train(net: nn.Module, steps: int = 5) -> list[Tensor]:
    """All parameters and buffers after some steps, and the generator's state, by the same inputs and seed."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7)
    for step in range(steps):
        data = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(data), torch.arange(6) % 4).backward()
        optimizer.step()
    return [*(tensor.clone() for tensor in net.state_dict().values()), torch.get_rng_state()]


BLOCKS = [["1.0", "1.1", "1.2", "1.3"], ["1.0..3"], ["0.0..2", "1.1..2", "1.3", "2.0..2"], ["0.1", "1.2"]]


@pytest.mark.parametrize("blocks", BLOCKS)
def test_same_weights(blocks: list[str]) -> None:
    """Bit for bit, statistics and their count included; the job's random numbers go on as they would have."""
    plain, again = train(model()), model()
    undo = recompute(again, blocks)
    assert all(torch.equal(one, other) for one, other in zip(plain, train(again), strict=True))
    undo()
    assert all(torch.equal(one, other) for one, other in zip(train(again, 2), train_on(plain, 2), strict=True))


def train_on(state: list[Tensor], steps: int) -> list[Tensor]:
    """Further steps from a state."""
    net = model()
    net.load_state_dict(dict(zip(net.state_dict(), state[:-1], strict=True)))
    return train(net, steps)


def test_runs_twice_and_is_undone() -> None:
    net, runs = model(), [0]
    inner = net[1][0].conv

    def counted(x: Tensor) -> Tensor:
        runs[0] += 1
        return nn.Conv2d.forward(inner, x)

    inner.forward = counted
    data = torch.randn(2, 3, 8, 8)
    before = {name: dict(vars(module)) for name, module in net.named_modules()}
    undo = recompute(net, ["1.0", "0.0..2"])
    net(data).sum().backward()
    assert runs == [2]
    with torch.no_grad():
        net(data)
    assert runs == [3]  # nothing to come back to
    net.eval()
    net(data).sum().backward()
    assert runs == [4]  # not training
    net.train()
    undo()
    assert {name: dict(vars(module)) for name, module in net.named_modules()} == before
    net(data).sum().backward()
    assert runs == [5]


def test_less_is_kept() -> None:
    """What autograd holds between the passes, as autograd itself tells it: a recomputed block keeps nothing."""

    def kept(blocks: list[str]) -> int:
        net, sizes = nn.Sequential(*(Block() for _ in range(4))), []
        if blocks:
            recompute(net, blocks)
        data = torch.randn(2, 8, 8, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            out = net(data)
        assert out.requires_grad
        return sum(sizes)

    whole = kept([])
    assert kept(["0", "1", "2", "3"]) < 0.3 * whole < kept(["0"]) < whole


def test_refused_before_anything_changes() -> None:
    net = model()
    net[1][2].conv.register_forward_hook(lambda *_: None)
    for blocks, why in (
        (["1.4"], "no block '1.4'"),
        (["1.3..1"], "no block '1.3..1'"),
        (["1.0..9"], "no block '1.0..9'"),
        (["1.0..1", "1.1"], "another block"),
        (["1.0", "1.2"], "hooks"),
        ([""], "no block ''"),
    ):
        with pytest.raises(PlanError, match=why):
            check_blocks(net, blocks)
        with pytest.raises(PlanError, match=why):
            recompute(net, blocks)
    assert not any("forward" in vars(module) for module in net.modules())
    assert "compiled" in why_not_twice(torch.jit.script(nn.Linear(2, 2)))
    assert "all ranks" in why_not_twice(nn.Sequential(nn.SyncBatchNorm(4)))


def metered(net: nn.Module, step: Callable[[], object]) -> Meter:
    meter = Meter(net, False, lambda: 0)
    meter.begin()
    step()
    meter.detach()
    return meter


def test_a_buffer_that_changes_is_seen() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Counting(), nn.BatchNorm1d(4))
    meter = metered(net, lambda: net(torch.randn(3, 4)).sum().backward())
    assert meter._refused == ["", "its forward pass changes a buffer", ""]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_units() -> None:
    """Layers as a person would name them; what stands around a list of blocks is looked into."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block(), Block()])
            self.norm = nn.BatchNorm2d(8)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.encoder, self.head = nn.Conv2d(3, 8, 1), Encoder(), nn.Sequential(nn.Flatten(), nn.ReLU())

    found = {name: follows for name, (_, follows) in units(Net()).items()}
    layers = {f"encoder.layers.{k}": False for k in range(3)}
    assert found == {"stem": False, **layers, "encoder.norm": False, "head.0": False, "head.1": True}


def test_a_model_copied_in_a_captured_step_has_no_hooks_of_ours() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    meter = Meter(net, False, lambda: 0)
    made = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    meter.detach()
    for other in made:
        assert other(torch.randn(2, 4)).shape == (2, 4)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in made[0].modules())


@pytest.mark.parametrize("blocks", [["0"], ["0..1"]])
def test_a_copy_is_on_its_own(blocks: list[str]) -> None:
    """A copied or saved model computes with its own weights, and keeps what it makes."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    recompute(net, blocks)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        data = torch.randn(2, 4)
        assert torch.equal(other(data), net(data))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(data).any() and net(data).any()
        assert "StandIn" not in repr([vars(module).get("forward") for module in other.modules()])
