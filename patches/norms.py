"""The forward that is installed on norms for COC_DETERMINISTIC=tp: the module's own, one call for each block of rows.

Whatever class a norm has, its forward is called with copies of its parameters, whose gradients are summed in the tree
(overlap/row_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from ascend_parallel.overlap.row_blocks import RowBlocks
from ascend_parallel.patches.base import Function

InBlocks = Callable[[Any, Function, tuple[Any, ...], dict[str, Any]], Any]


class BlockedForward:
    """What the forward of a norm holds, which is its method; a deep copy of the module gets its own.

    torch.compile takes another object for other code, and would compile each layer of a model anew; a method is known
    by its function.

    run
        Called as ``run(module, own, args, kwargs)``, where `own` is the forward without this one.
    active
        Tells whether to call it: gradients of the norm are to be summed in blocks of rows.
    """

    def __init__(self, module: Any, own: Function | None, run: InBlocks, active: Callable[[], bool]) -> None:
        """Hold a forward that had been put on the module before; None: its class's."""
        self.module, self.own, self.run, self.active = module, own, run, active

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockedForward:
        """Return the forward of the module's copy."""
        return BlockedForward(deepcopy(self.module, memo), deepcopy(self.own, memo), self.run, self.active)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm."""
        own = self.own or type(self.module).forward.__get__(self.module)
        return self.run(self.module, own, args, kwargs) if self.active() else own(*args, **kwargs)


def install_norm(module: Any, run: InBlocks, active: Callable[[], bool]) -> None:
    """Put the forward on `module`, over its own, or have the one that is there run `run`; as of `BlockedForward`."""
    there = vars(module).get("forward")
    if is_blocked(module):
        there.__self__.run, there.__self__.active = run, active
    else:
        module.forward = BlockedForward(module, there, run, active).forward


def is_blocked(module: Any) -> bool:
    """Tell whether the forward of a module is the installed one."""
    return isinstance(getattr(vars(module).get("forward"), "__self__", None), BlockedForward)


def run_norm(
    module: Any, own: Function, x: torch.Tensor, parameters: Mapping[str, torch.Tensor], blocks: RowBlocks
) -> torch.Tensor:
    """Return the output of `own`, the forward of a norm, for each block of rows of the plain tensor x [..., N].

    parameters
        Those of the module itself, as plain tensors.
    """

    def run_block(block: torch.Tensor, copies: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with _with_parameters(module, copies):
            y: torch.Tensor = own(block)
        return y

    return blocks.run(x, parameters, run_block)


@contextmanager
def _with_parameters(module: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    attributes: dict[str, Any] = module._parameters
    own = dict(attributes)
    attributes.update(tensors)
    try:
        yield
    finally:
        attributes.update(own)
