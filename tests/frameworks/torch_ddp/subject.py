"""The conformance tests' job for PyTorch DDP (see ``tests/frameworks/conformance.py``)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from dpro.plan import Plan
from dpro_integrations.torch_ddp import TorchDDPAdapter
from tests.frameworks.torch_ddp.jobs import batch, bucket_plan, buckets, digest, mlp, settle

_MIB = 1 << 20
#: One linear layer's gradients are 64 * 64 * 4 + 64 * 4 = 16,640 bytes, 0.0159 MiB.
_CAPS = [0.01, 0.03]


class TorchSubject:
    """Four linear layers and a head, with things of the user's on the wrapper."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self._ddp = DDP(mlp())
        self._names = [name for name, _ in self._ddp.module.named_parameters()]
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=0.01, momentum=0.9)
        self._count = 0
        self._forwards = 0
        self._ddp.note = "the user's"
        self._ddp.register_forward_hook(self._count_forward)
        self._ddp.register_forward_pre_hook(lambda module, args: None)
        self._ddp.module[0].register_forward_hook(lambda *_: None)
        self._ddp.module[0].weight.register_hook(lambda gradient: gradient)
        self._ddp.eval()  # no layer here cares, but it must not change
        self._adapter_objects = (id(self._ddp), id(self._ddp.module), [id(p) for p in self._ddp.parameters()])
        self.adapter = TorchDDPAdapter(self._ddp)

    def _count_forward(self, *_: Any) -> None:
        self._forwards += 1

    def step(self) -> None:
        # gradients stay alive across steps: neither apply nor revert may touch them
        for parameter in self._ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        with self._ddp.no_sync():
            self._ddp(batch(2 * self._count)).square().mean().backward()
        self._ddp(batch(2 * self._count + 1)).square().mean().backward()
        self._optimizer.step()
        self._count += 1

    def weights(self) -> str:
        return digest(self._ddp.module)

    def tensors(self) -> dict[str, int]:
        return {name: p.numel() * 4 for name, p in self._ddp.module.named_parameters()}

    def settings(self) -> Any:
        return {
            "buckets": [[self._names[i] for i in bucket] for bucket in buckets(self._ddp)],
            "view": bool(self._ddp.gradient_as_bucket_view),
        }

    def plan(self) -> Plan:
        return bucket_plan(self._ddp, _CAPS, ddp_options={"gradient_as_bucket_view": True})

    def expected(self, plan: Plan, ready: list[str]) -> Any:
        """DDP's rule: a bucket closes when it reaches its cap; the last cap holds for the rest."""
        sizes, caps = self.tensors(), list(plan.bucket_caps or [])
        found: list[list[str]] = [[]]
        filled = 0
        for name in ready:
            found[-1].append(name)
            filled += sizes[name]
            if filled >= caps[min(len(found), len(caps)) - 1] * _MIB and name != ready[-1]:
                found.append([])
                filled = 0
        return {"buckets": found, "view": True}

    def foreign(self) -> list[Plan]:
        own = self.adapter.fingerprint()
        return [
            Plan(fingerprint=own | {"model": "another"}, bucket_caps=_CAPS),
            Plan(fingerprint=own | {"world_size": "3"}, bucket_caps=_CAPS),
            Plan(fingerprint=own | {"unheard": "of"}, bucket_caps=_CAPS),
            Plan(fingerprint=own, bucket_caps=_CAPS, fusion_threshold=1),
            Plan(fingerprint=own, ddp_options={"find_unused_parameters": True}),
        ]

    def attached(self) -> dict[str, Any]:
        import torch.autograd.profiler as autograd_profiler
        from torch.optim import optimizer
        from torch.profiler import _KinetoProfile

        parameters = list(self._ddp.parameters())
        return {
            "profiler": torch.autograd._profiler_enabled(),
            "grad_hooks": [len(p._post_accumulate_grad_hooks or {}) for p in parameters],
            "backward_hooks": [len(p._backward_hooks or {}) for p in parameters],
            "prepare_trace": id(_KinetoProfile.prepare_trace),
            "enter": id(autograd_profiler.profile.__enter__),
            "construct": id(DDP.__init__),
            "optimizer_hooks": len(self._optimizer._optimizer_step_post_hooks),
            "global_optimizer_hooks": len(optimizer._global_optimizer_post_hooks),
            "module_hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self._ddp.modules()],
        }

    def user_state(self) -> dict[str, Any]:
        same = (id(self._ddp), id(self._ddp.module), [id(p) for p in self._ddp.parameters()])
        return {
            "same_objects": same == self._adapter_objects,
            "note": self._ddp.note,
            "training": self._ddp.training,
            "module_training": self._ddp.module.training,
            "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self._ddp.modules()],
            "hook_runs": self._forwards == 2 * self._count,
            "sync": self._ddp.require_backward_grad_sync,
            "gradients_alive": all(p.grad is not None for p in self._ddp.parameters()),
            "requires_grad": [p.requires_grad for p in self._ddp.parameters()],
        }

    def close(self) -> None:
        settle()
        dist.destroy_process_group()


def make() -> TorchSubject:
    return TorchSubject()
