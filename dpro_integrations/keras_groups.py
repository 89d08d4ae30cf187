"""Horovod's explicit groups for the optimizer of a Keras model that was made without.

Stock ``DistributedOptimizer(groups=[[...]])`` bakes the groups into the function that reduces the gradients
(``hvd._make_allreduce_grads_fn``). So it is made anew, from Horovod's own parts; the train step that has it traced in
is for ``keras_retrace``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.util import vars_to_refs

from dpro_integrations.keras_version import closed_over

#: What Horovod's function for reducing gradients must have closed over to be made again with groups.
_SETTINGS = (
    "name", "device_dense", "device_sparse", "compression", "sparse_as_dense", "op", "prescale_factor",
    "postscale_factor", "groups", "process_set",
)  # fmt: skip


def settings_of(allreduce: Callable[..., Any]) -> dict[str, Any]:
    """What ``allreduce``, made by Horovod for an optimizer, was made with; empty where it is none of those."""
    function = getattr(allreduce, "python_function", allreduce)
    found = closed_over(function)
    return {key: found[key] for key in _SETTINGS} if set(_SETTINGS) <= set(found) else {}


def grouped(allreduce: Callable[..., Any], groups: list[list[Any]]) -> Callable[..., Any]:
    """As ``allreduce``, which has none, with ``groups`` of variables.

    Horovod's own function takes no group whose members all have no gradient. A kept plan outlives the layers it was
    made for: where the job freezes some and compiles its model anew, groups without a gradient are left out.
    """
    told = settings_of(allreduce)
    # Horovod's own cache would keep the function, and the variables in it, for ever
    make = closed_over(hvd._make_cached_allreduce_grads_fn).get("f", hvd._make_cached_allreduce_grads_fn)
    predivide = told["postscale_factor"] if told["op"] == hvd.Average else 1.0

    def made(kept: list[list[Any]]) -> Any:
        return make(
            told["name"],
            told["device_dense"],
            told["device_sparse"],
            told["compression"],
            told["sparse_as_dense"],
            told["op"],
            predivide,
            vars_to_refs(kept),
            told["process_set"],
        )

    whole = made(groups)

    def reduce(grads: list[Any], vars: list[Any], *args: Any, **kwargs: Any) -> Any:
        alive = {variable.name for variable, grad in zip(vars, grads, strict=True) if grad is not None}
        kept = [group for group in groups if any(variable.name in alive for variable in group)]
        return (whole if len(kept) == len(groups) else made(kept))(grads, vars, *args, **kwargs)

    wrapper: Callable[..., Any] = tf.autograph.experimental.do_not_convert(reduce)
    wrapper.python_function = getattr(whole, "python_function", whole)  # type: ignore[attr-defined]  # see settings_of
    return wrapper


def split_by_kind(variables: list[Any]) -> list[list[Any]]:
    """Variables of one dtype each, in the order given: others can't be in one of Horovod's ops."""
    kinds: dict[Any, list[Any]] = {}
    for variable in variables:
        kinds.setdefault(variable.dtype, []).append(variable)
    return list(kinds.values())


def tensor_bytes(variable: Any, allreduce: Callable[..., Any]) -> tuple[str, int]:
    """dtype and bytes of a variable's gradient on the wire, after compression."""
    compression = settings_of(allreduce).get("compression", hvd.Compression.none)
    sent, _ = compression.compress(tf.zeros([0], variable.dtype))
    return str(sent.dtype.name), int(variable.shape.num_elements()) * int(sent.dtype.size)
