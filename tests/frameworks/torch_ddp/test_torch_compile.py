"""What is tried on a submodule leaves nothing; which are tried; what is called compiled. No compiler here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dpro.errors import PlanError
from dpro_integrations import torch_compile
from dpro_integrations.torch_compile import CompiledRegions, apart, passes
from dpro_integrations.torch_regions import candidates


class Odd(nn.Module):
    """Everything a forward pass may change: buffers, what it keeps, generators, its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.count, self.kept, self.by_name = 0, [1], {"last": 2}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.kept.append(self.count)
        self.by_name["last"] = random.random()
        x.mul_(2)
        return self.norm(self.linear(x)) + torch.randn(4)


def test_a_trial_leaves_nothing() -> None:
    module, x = Odd(), torch.ones(3, 4)
    given = x.clone().requires_grad_()
    gradient = torch.full((4, 4), 7.0)
    module.linear.weight.grad = gradient
    hooked: list[torch.Tensor] = []
    module.linear.bias.register_post_accumulate_grad_hook(hooked.append)
    buffers = dict(module.norm.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    torch.manual_seed(5)
    random.seed(5)
    drawn, chosen, kept, by_name = torch.get_rng_state(), random.getstate(), module.kept, module.by_name

    found = passes(module, module.forward, (given,), {})

    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == chosen
    assert module.count == 0
    assert module.kept is kept
    assert module.by_name is by_name
    assert (kept, by_name) == ([1], {"last": 2})
    assert torch.equal(given, x)
    assert given.grad is None
    assert module.linear.weight.grad is gradient
    assert torch.equal(gradient, torch.full((4, 4), 7.0))
    assert hooked == []
    assert all(p.grad is None for p in module.norm.parameters())
    for name, buffer in module.norm.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, values[name])
    # and it was a forward and a backward pass: of the input and of four parameters
    assert [tuple(g.shape) for g in found.gradients] == [(3, 4), (4, 4), (4,), (4,), (4,)]
    assert int(found.state[2]) == 1  # batches that the norm has seen
    assert found.forward_ns > 0
    assert found.backward_ns > 0
    # the job's own call then is as if there had been none
    assert torch.equal(module(x.clone()).detach(), found.results[0])


def test_what_differs_is_said() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), torch.randn(8, 4)

    def silent(x: torch.Tensor) -> torch.Tensor:  # another number of random numbers
        return module(x) + 0 * torch.randn(()) * x.mean()

    def still(x: torch.Tensor) -> torch.Tensor:  # the same, with statistics that stand still
        seen = {name: buffer.clone() for name, buffer in module[1].named_buffers()}
        out = module(x)
        for name, buffer in seen.items():
            module[1]._buffers[name] = buffer
        return out

    def flat(x: torch.Tensor) -> torch.Tensor:
        return module(x.detach()) + 0 * x

    def refusing(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no\nluck")

    ways: dict[Callable[..., Any], str] = {
        module.forward: "",
        silent: "compiled it has other state",
        still: "compiled it has other state",
        flat: "compiled it has other gradients",
        lambda x: 1.001 * module(x): "compiled it has other results",
        refusing: "ArithmeticError: no luck",
    }
    for way, says in ways.items():
        assert apart(module, way, (x.clone().requires_grad_(),), {}) == says


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes that "compiled" submodules were called with, trials included."""
    seen: list[tuple[int, ...]] = []

    def compiled(module: nn.Module) -> Callable[..., Any]:
        def fast(x: torch.Tensor) -> Any:
            seen.append(tuple(x.shape))
            if len(seen) > 3:
                raise RuntimeError("no luck any more")
            return module.forward(x)

        return fast

    monkeypatch.setattr(torch_compile, "compiled", compiled)
    return seen


def test_only_what_was_tried_is_called_compiled(calls: list[tuple[int, ...]]) -> None:
    model, said = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)), list[str]()
    regions = CompiledRegions(model, said.append)
    regions.set(["0"])
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert calls == []
    model(torch.ones(3, 4))
    assert calls == [(3, 4), (3, 4)]  # the trial, and the call
    model(torch.ones(2, 4))
    model(torch.ones(3, 4).requires_grad_())
    assert len(calls) == 2
    regions.set([])
    model(torch.ones(3, 4))
    assert len(calls) == 2
    regions.set(["0"])  # tried already
    model(torch.ones(3, 4))
    assert len(calls) == 3
    assert (regions.names, said) == (("0",), [])
    # one that fails later goes on as it was, and for good
    want = model[0].forward(torch.ones(3, 4))
    for _ in range(2):
        assert torch.equal(model[0](torch.ones(3, 4)), want)
    assert len(calls) == 4
    assert regions.names == ()
    (line,) = said
    assert line == "submodule '0' (and maybe others) not compiled: RuntimeError: no luck any more; it goes on as it was"


def test_compiling_ends_when_the_time_is_up(calls: list[tuple[int, ...]]) -> None:
    model, said = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))), list[str]()
    regions = CompiledRegions(model, said.append, limit_s=1e-9)
    regions.set(["0", "1"])
    model(torch.ones(3, 4))
    assert len(calls) == 2
    assert regions.names == ("0",)
    assert len(said) == 1
    assert "the others took more than 0 s to compile" in said[0]


def block(**more: nn.Module) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for name, part in more.items():
        made.add_module(name, part)
    return made


def test_candidates_are_the_blocks() -> None:
    tied, hooked, frozen = block(), block(), block()
    hooked[0].weight.register_hook(lambda gradient: gradient)
    frozen[1].register_forward_hook(lambda *_: None)
    odd = block(inner=block())
    odd.inner.forward = lambda x: x
    model = nn.ModuleDict({
        "stem": nn.Linear(4, 4),
        "encoder": nn.Sequential(nn.ModuleList([block(), block(inner=nn.Sequential(nn.ReLU()))]), nn.Linear(4, 4)),
        "tied": nn.ModuleList([tied, tied]),
        "hooked": hooked,
        "frozen": frozen,
        "odd": odd,
        "large": nn.Sequential(*(nn.Linear(4, 4) for _ in range(25))),
        "synchronised": block(norm=nn.SyncBatchNorm(4)),
        "head": block(),
    })  # fmt: skip
    assert list(candidates(model)) == ["encoder.0.0", "encoder.0.1", "head"]
    regions = CompiledRegions(model, print)
    for name, says in {
        "hooked": "submodule 'hooked' has parameters with hooks",
        "frozen": "submodule 'frozen' has hooks, or a forward of its own",
        "odd": "submodule 'odd' has hooks, or a forward of its own",
        "synchronised": "submodule 'synchronised' synchronises on its own",
        "encoder.0": "submodule 'encoder.0' has no forward pass to compile",
        "encoder.2": "the model has no submodule 'encoder.2'",
    }.items():
        with pytest.raises(PlanError, match=f"^{says}$"):
            regions.set([name])
    head = model["head"]
    head.compile()
    with pytest.raises(PlanError, match=r"^submodule 'head' is compiled already$"):
        regions.set(["head"])
    assert "head" not in candidates(model)
