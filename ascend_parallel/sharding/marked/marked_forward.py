"""Inside the forward of a marked module every function of a DTensor is laid out by the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.marked.call import run_function


class PropagatedFunctions(TorchFunctionMode):
    """Runs functions of DTensors by `run_function`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function."""
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return run_function(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def propagate_functions(layer: nn.Module) -> None:
    """Run the forwards of `layer` under `PropagatedFunctions`, while its parameters are DTensors."""
    running: list[PropagatedFunctions | None] = []

    def enter(module: nn.Module, _: Any) -> None:
        marked = any(isinstance(tensor, DTensor) for tensor in (*module.parameters(), *module.buffers()))
        mode = PropagatedFunctions() if marked and not any(running) else None
        running.append(mode)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        mode = running.pop() if running else None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    layer.register_forward_pre_hook(enter, prepend=True)
    layer.register_forward_hook(leave, always_call=True)
