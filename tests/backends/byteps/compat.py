"""What lies between BytePS 0.2.5 and the newer MXNet, TensorFlow and Keras of ``.venv-backends``: three small mends.

Lies in that environment's site-packages as ``byteps_compat`` and is imported at start by ``byteps_compat.pth``. It
costs nothing until a script imports BytePS; then a module is mended right after it has run, and scripts stay what they
would be with the versions that BytePS was written for. Part of the test bed, never of dpro.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # every Python of the environment comes by here: typing and functools would be most of its start
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def _mend_mxnet(ops: ModuleType) -> None:
    """``byteps.mxnet.ops`` reads a return value that is not there, and takes the address of what is not yet there."""
    # the C function is void: what is in the register now and then is no error code
    ops.MXNET_LIB_CTYPES.byteps_mxnet_declare_tensor.restype = lambda _: 0
    stock, known = ops.byteps_push_pull, set()

    def byteps_push_pull(tensor: Any, version: int = 0, priority: int = 0, name: Any = None, is_average: bool = True):
        # MXNet allocates on its engine's thread, BytePS asks for the address on this one, and the two are not
        # kept apart: the first push of an array that was never waited for may send another buffer
        if name not in known:
            tensor.wait_to_read()
            known.add(name)
        return stock(tensor, version, priority, name, is_average)

    ops.byteps_push_pull = byteps_push_pull


def _mend_keras(module: ModuleType) -> None:
    """``_aggregate_gradients`` returned gradients until Keras 2.4; from then on it returns (gradient, variable) pairs,
    and is called from inside ``apply_gradients``, which BytePS lets nobody enter before it."""
    stock = module.create_distributed_optimizer

    def create_distributed_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = stock(*args, **kwargs)
        kind = type(optimizer)
        apply_gradients = kind.apply_gradients

        def aggregate(self: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
            pairs = list(grads_and_vars)
            return list(
                zip(self._push_pull([grad for grad, _ in pairs]), [variable for _, variable in pairs], strict=True)
            )

        def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._aggregated_gradients = True
            return apply_gradients(self, *args, **kwargs)

        kind._aggregate_gradients, kind.apply_gradients = aggregate, apply
        return optimizer

    module.create_distributed_optimizer = create_distributed_optimizer


_MENDS = {"byteps.mxnet.ops": _mend_mxnet, "byteps._keras": _mend_keras}


class _Mender:
    """Finds the modules to be mended where the others would, and has them mended after they have run."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _MENDS:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            stock = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                stock(module)
                _MENDS[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if not any(isinstance(finder, _Mender) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Mender())  # type: ignore[arg-type]
