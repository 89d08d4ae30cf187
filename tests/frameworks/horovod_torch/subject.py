"""The conformance tests' job for Horovod with torch (see ``tests/frameworks/conformance.py``)."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from horovod.torch import optimizer as horovod_optimizer

from dpro.plan import Plan
from dpro_integrations.horovod_exchange import join_exchange
from dpro_integrations.horovod_torch import HorovodTorchAdapter
from tests.frameworks.horovod_torch.jobs import GROUPS, Submissions, distribute, group_plan, job
from tests.frameworks.torch_ddp.jobs import batch, digest, mlp


class HorovodSubject:
    """Four linear layers and a head; two backward passes per step, things of the user's on the optimizer."""

    def __init__(self) -> None:
        self._job = job()
        self.rank = self._job.__enter__()
        self._net = mlp()
        self._submissions = Submissions()
        self._functions = self._patchable()
        self._optimizer = distribute(self._net, backward_passes_per_step=2)
        self._optimizer.note = "the user's"
        self._steps = self._gradients = 0
        self._optimizer.register_step_pre_hook(lambda *_: None)
        self._net[0].weight.register_post_accumulate_grad_hook(self._count_gradient)
        self._net.register_forward_hook(lambda *_: None)
        self._objects = self._identities()
        self.adapter = HorovodTorchAdapter(self._optimizer, join_exchange(hvd.rank(), hvd.size(), "subject", 20.0))

    def _count_gradient(self, _: Any) -> None:
        self._gradients += 1

    def _identities(self) -> list[int]:
        optimizer = self._optimizer
        return [id(optimizer), *map(id, self._net.parameters()), *map(id, optimizer._grad_accs), id(optimizer._handles)]

    def step(self) -> None:
        # gradients stay alive across steps: neither apply nor revert may touch them
        for parameter in self._net.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        self._submissions.take()
        for half in range(2):
            self._net(batch(2 * self._steps + half, rank=self.rank)).square().mean().backward()
        self._optimizer.step()
        self._steps += 1

    def weights(self) -> str:
        return digest(self._net)

    def tensors(self) -> dict[str, int]:
        return {name: p.numel() * 4 for name, p in self._net.named_parameters()}

    def settings(self) -> Any:
        """What was handed to Horovod in the last step."""
        return sorted(self._submissions.seen)

    def plan(self) -> Plan:
        return group_plan(self._optimizer)

    def expected(self, plan: Plan, ready: list[str]) -> Any:
        """A group goes under its first name; the head's bias, in none, is one of its own."""
        assert plan.tensor_groups is not None
        return sorted([*([group[0], len(group)] for group in plan.tensor_groups), ["8.bias", 1]])

    def foreign(self) -> list[Plan]:
        own = self.adapter.fingerprint()
        return [
            Plan(fingerprint=own | {"model": "another"}, tensor_groups=GROUPS),
            Plan(fingerprint=own | {"world_size": "3"}, tensor_groups=GROUPS),
            Plan(fingerprint=own | {"unheard": "of"}, tensor_groups=GROUPS),
            Plan(fingerprint=own, tensor_groups=GROUPS, bucket_caps=[1.0]),
            Plan(fingerprint=own, tensor_groups=[["0.weight", "nowhere.weight"]]),
            Plan(fingerprint=own),
        ]

    def _patchable(self) -> list[int]:
        names = ("init", "shutdown", "synchronize", "allreduce_async_", "grouped_allreduce_async_")
        own = horovod_optimizer._DistributedOptimizer
        return [id(getattr(mpi_ops, name)) for name in names] + [id(own.__init__), id(own.step), id(own._make_hook)]

    def attached(self) -> dict[str, Any]:
        from torch.optim import optimizer as optimizers

        optimizer, parameters = self._optimizer, list(self._net.parameters())
        return {
            "profiler": torch.autograd._profiler_enabled(),
            "grad_hooks": [len(p._post_accumulate_grad_hooks or {}) for p in parameters],
            "backward_hooks": [len(p._backward_hooks or {}) for p in parameters],
            "functions": self._patchable(),
            "submit": [id(horovod_optimizer.allreduce_async_), id(horovod_optimizer.grouped_allreduce_async_)],
            "on_optimizer": sorted(vars(optimizer)),
            "step_hooks": [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)],
            "global_hooks": [len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)],
            "module_hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self._net.modules()],
        }

    def user_state(self) -> dict[str, Any]:
        return {
            "same_objects": self._identities() == self._objects,
            "note": self._optimizer.note,
            "hook_runs": self._gradients == 2 * self._steps,
            "gradients_alive": all(p.grad is not None for p in self._net.parameters()),
            "passes": [self._optimizer.backward_passes_per_step, *self._optimizer._allreduce_delay.values()],
            "idle": not self._optimizer._handles,
        }

    def close(self) -> None:
        self._job.__exit__(None, None, None)


def make() -> HorovodSubject:
    return HorovodSubject()
