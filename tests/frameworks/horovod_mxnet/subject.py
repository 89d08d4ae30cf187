"""The conformance tests' job for Gluon with Horovod (see ``tests/frameworks/conformance.py``)."""

from __future__ import annotations

from typing import Any

import horovod.mxnet as hvd
import mxnet as mx
from horovod.mxnet import mpi_ops
from mxnet import autograd
from mxnet.gluon import Block

from dpro.plan import Plan
from dpro_integrations.horovod_exchange import join_exchange
from dpro_integrations.mxnet_horovod import HorovodMXNetAdapter
from tests.frameworks.horovod_mxnet.jobs import GROUPS, Submissions, batch, digest, distribute, group_plan, job, mlp


class GluonSubject:
    """Four dense layers and a head; two backward passes per step are summed, things of the user's on the trainer."""

    def __init__(self) -> None:
        self._job = job()
        self.rank = self._job.__enter__()
        self._net = mlp(static_alloc=True, static_shape=True)
        self._submissions = Submissions()
        self._trainer = distribute(self._net)
        self._net(batch(0))  # what it runs from now on must be there afterwards
        self._functions = self._patchable()
        self._trainer.note = "the user's"
        for parameter in self._net.collect_params().values():
            parameter.grad_req = "add"
        self._net.register_forward_hook(lambda *_: None)
        self._steps = 0
        self._objects = self._identities()
        self.adapter = HorovodMXNetAdapter(self._trainer, join_exchange(hvd.rank(), hvd.size(), "subject", 20.0))

    def _identities(self) -> list[int]:
        trainer = self._trainer
        arrays = [array for p in trainer._params for array in (*p.list_data(), *p.list_grad())]
        return [id(trainer), id(trainer._optimizer), *map(id, trainer._params), *map(id, arrays)]

    def step(self) -> None:
        self._submissions.seen.clear()
        for half in range(2):
            x = batch(2 * self._steps + half, self.rank)
            with autograd.record():
                loss = self._net(x).square().mean()
            loss.backward()
        self._trainer.step(2)
        loss.asscalar()
        # gradients stay alive across steps: neither apply nor revert may touch them
        for parameter in self._net.collect_params().values():
            parameter.grad()[:] = parameter.grad() * 0.5
        self._steps += 1

    def weights(self) -> str:
        return digest(self._net)

    def tensors(self) -> dict[str, int]:
        return {name: p.data().size * 4 for name, p in self._net.collect_params().items()}

    def settings(self) -> Any:
        """What was handed to Horovod in the last step: a place in the trainer, or a group's first and its size."""
        return sorted([seen[0].split(":")[0], *seen[1:]] for seen in self._submissions.seen)

    def plan(self) -> Plan:
        return group_plan(self._trainer)

    def expected(self, plan: Plan, ready: list[str]) -> Any:
        """A group goes under its first place; the head's bias, in none, is one of its own."""
        assert plan.tensor_groups is not None
        places = {p.name: i for i, p in enumerate(self._trainer._params)}
        grouped = [[str(min(places[name] for name in group)), len(group)] for group in plan.tensor_groups]
        return sorted([*grouped, [str(places["net_head_bias"])]])

    def foreign(self) -> list[Plan]:
        own = self.adapter.fingerprint()
        return [
            Plan(fingerprint=own | {"model": "another"}, tensor_groups=GROUPS),
            Plan(fingerprint=own | {"world_size": "3"}, tensor_groups=GROUPS),
            Plan(fingerprint=own | {"unheard": "of"}, tensor_groups=GROUPS),
            Plan(fingerprint=own, tensor_groups=GROUPS, bucket_caps=[1.0]),
            Plan(fingerprint=own, tensor_groups=[["net_d0_weight", "nowhere_weight"]]),
            Plan(fingerprint=own),
        ]

    def _patchable(self) -> list[int]:
        names = ("init", "shutdown", "allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_")
        own = hvd.DistributedTrainer
        functions = [getattr(module, name) for module in (hvd, mpi_ops) for name in names]
        functions += [own.__init__, own._allreduce_grads, own.step, own.update, own._update]
        functions += [Block.__call__, type(self._trainer._optimizer).update_multi_precision]
        return list(map(id, functions))

    def attached(self) -> dict[str, Any]:
        return {
            "functions": self._patchable(),
            "on_trainer": sorted(vars(self._trainer)),
            "cached_op": id(self._net._cached_op),
            "hooks": [len(self._net._forward_hooks), len(self._net._forward_pre_hooks)],
            "bulk": _bulk_size(),
        }

    def user_state(self) -> dict[str, Any]:
        return {
            "same_objects": self._identities() == self._objects,
            "note": self._trainer.note,
            "gradients": [p.grad_req for p in self._trainer._params],
            "steps": self._trainer._optimizer.num_update == self._steps,
            "rate": self._trainer.learning_rate,
        }

    def close(self) -> None:
        self._job.__exit__(None, None, None)


def _bulk_size() -> int:
    size = mx.engine.set_bulk_size(0)
    mx.engine.set_bulk_size(size)
    return int(size)


def make() -> GluonSubject:
    return GluonSubject()
