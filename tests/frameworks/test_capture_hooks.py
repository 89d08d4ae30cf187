"""What a capture hooks into, and what must not notice it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dpro_integrations.host_load import StepCpu
from dpro_integrations.torch_capture import StepCapture


class _EveryForward(StepCapture):
    """Minds the time at every module's forward, as Horovod's capture does."""

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return []

    def _attach(self) -> None:
        self._handles.append(register_module_forward_pre_hook(lambda *_: self._mind_the_time()))


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_model_that_is_compiled_while_we_capture() -> None:
    # the job wants one graph without a break: what the compiler can't trace would end the job
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(plain, fullgraph=True, backend="eager")
    capture = _EveryForward(usual_s=1.0, on_gpu=False, cpu=StepCpu())
    try:
        found = compiled(torch.ones(3, 4))
    finally:
        capture.abort()
    assert torch.equal(found, plain(torch.ones(3, 4)))
