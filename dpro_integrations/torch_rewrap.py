"""Change the settings of a living DistributedDataParallel object, through its stock constructor.

The wrapper stays the same Python object: the old reducer is dropped, then the constructor is run
again on the object with the user's arguments and other bucket settings. Everything the user put
on the wrapper (hooks, attributes, training flag) is carried over. Nothing here decides *what* to
set.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dpro.plan import Plan

_SIGNATURE = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters)
HAS_CAP_LIST = "bucket_cap_mb_list" in _SIGNATURE
_MIB = 1024 * 1024
#: Attributes by which the constructor's arguments can be read back from a wrapper.
_SAME_NAME = (
    "device_ids",
    "output_device",
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)
#: What the user may have put on the wrapper and ``Module.__init__`` would clear.
_KEPT = tuple(
    key for key in torch.nn.Module().__dict__ if key not in ("_parameters", "_buffers", "_modules")
)  # hooks, the training flag, …


#: torch's own, by :attr:`dpro.plan.Plan.gradient_dtype`.
_COMPRESS = {"bfloat16": default_hooks.bf16_compress_hook, "float16": default_hooks.fp16_compress_hook}


def why_fixed(ddp: DistributedDataParallel, own_hook: bool = False) -> str:
    """Why this wrapper can't be re-wrapped with the same results; '' if it can.

    Args:
        own_hook: the communication hook that it has is :func:`compress`'s, which may go.
    """
    if not own_hook and (ddp._comm_hooks or "comm_hook" in ddp._get_ddp_logging_data()):
        return "a communication hook is registered"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params is used"
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP's own mixed precision is used"
    if getattr(ddp, "_use_python_reducer", False):
        return "the python reducer is used"
    if any(hasattr(p, "_in_backward_optimizers") for p in ddp.module.parameters()):
        return "the optimizer runs inside backward"
    if "init_sync" not in _SIGNATURE:
        return "this torch's DDP can't be made without sending all parameters again"
    if ddp.find_unused_parameters and not ddp.static_graph:
        return "find_unused_parameters=True (DDP then never groups gradients by their ready order)"
    if ddp._join_config.enable:
        return "the job runs under Join (uneven inputs)"
    return ""


def built_over_these(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer was built over just those parameters that need a gradient now."""
    left_out = ddp.parameters_to_ignore
    present = [p for name, p in ddp.module.named_parameters() if name not in left_out]
    made = ddp._module_parameters
    same = len(made) == len(present) and all(a is b for a, b in zip(made, present, strict=True))
    return same and sum(p.requires_grad for p in present) == ddp._get_ddp_logging_data()["num_parameter_tensors"]


def arguments(ddp: DistributedDataParallel) -> dict[str, Any]:
    """The constructor's arguments that would make this wrapper again, bucket sizes included."""
    given: dict[str, Any] = {key: getattr(ddp, key) for key in _SAME_NAME if key in _SIGNATURE and hasattr(ddp, key)}
    mesh = getattr(ddp, "device_mesh", None)
    given |= {"device_mesh": mesh} if mesh is not None else {"process_group": ddp.process_group}
    if "forward_sync_buffers" in _SIGNATURE:
        given["forward_sync_buffers"] = ddp.forward_sync_buffers
    else:
        given["broadcast_buffers"] = ddp.broadcast_buffers
    if HAS_CAP_LIST and getattr(ddp, "bucket_bytes_cap_list", None):
        given["bucket_cap_mb_list"] = [cap / _MIB for cap in ddp.bucket_bytes_cap_list]
    # an older torch does not say whether its cap is the default one; the default given again is the same
    elif not getattr(ddp, "bucket_bytes_cap_default", False):
        given["bucket_cap_mb"] = ddp.bucket_bytes_cap / _MIB
    return given


def plan_arguments(plan: Plan) -> dict[str, Any]:
    """What the plan changes, as arguments of the constructor: one cap is uniform, more are a list."""
    given: dict[str, Any] = dict(plan.ddp_options or {})
    if plan.bucket_caps:
        several = len(plan.bucket_caps) > 1
        given |= {"bucket_cap_mb_list": plan.bucket_caps} if several else {"bucket_cap_mb": plan.bucket_caps[0]}
    return given


def rewrap(ddp: DistributedDataParallel, given: dict[str, Any]) -> None:
    """Run the constructor again on ``ddp`` with ``given``; no collective is called.

    Must be called between an optimizer step and the next forward. ``init_sync`` is off: the
    parameters are equal on all ranks already, and a broadcast would be a needless message.

    Raises:
        Exception: what the constructor raised (no memory for a second set of buckets, …); the
            wrapper is then untouched.
    """
    before = dict(ddp.__dict__)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            DistributedDataParallel.__init__(ddp, ddp.module, init_sync=False, **given)
    except BaseException:
        ddp.__dict__.clear()
        ddp.__dict__.update(before)
        raise
    # only now that there is a new reducer may the old one go: a job is never without
    before.pop("logger")
    before.pop("reducer")._remove_autograd_hooks()
    for key in (*_KEPT, "require_backward_grad_sync", "require_forward_param_sync"):
        ddp.__dict__[key] = before[key]
    for key, value in before.items():
        ddp.__dict__.setdefault(key, value)
    gc.collect()  # the old buckets


def gradient_dtypes(ddp: DistributedDataParallel) -> list[str]:
    """What :func:`compress` may be called with, best first: nothing where a gradient is not float32.

    gloo adds bfloat16 up as well, but DDP refuses torch's hook for it anywhere but over NCCL.
    """
    if any(p.dtype != torch.float32 for _, p in reducer_parameters(ddp)):
        return []
    backend = torch.distributed.get_backend(ddp.process_group)
    return {"nccl": ["bfloat16", "float16"], "gloo": ["float16"]}.get(backend, [])


def compress(ddp: DistributedDataParallel, dtype: str) -> None:
    """Have gradients cast to ``dtype`` for the wire, until :func:`rewrap` makes a reducer without a hook."""
    # no process group as the hook's state, so that the wrapper can be pickled: it spans all ranks (make_tuner)
    ddp.register_comm_hook(None, _COMPRESS[dtype])


def reducer_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) in the order in which the reducer numbers them; a tied one counts once."""
    ignored = ddp.parameters_to_ignore
    named = ddp.module.named_parameters(remove_duplicate=True)
    return [(name, p) for name, p in named if p.requires_grad and name not in ignored]


def bucket_parameters(ddp: DistributedDataParallel) -> list[list[int]]:
    """Parameter numbers per bucket in force, in launch order; [] before DDP's first rebuild."""
    text = str(ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))
    return [[int(i) for i in part.split()] for part in text.split(",") if part.strip()]


def bucket_bytes(ddp: DistributedDataParallel) -> int:
    """What the reducer's buckets take that no tensor of Python's shows: nothing where gradients are views of them."""
    if ddp.gradient_as_bucket_view:
        return 0
    return sum(p.numel() * p.element_size() for _, p in reducer_parameters(ddp))
