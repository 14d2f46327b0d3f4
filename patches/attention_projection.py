"""The linear layer that reads an attention module's output: found by its name and shape, and kept to by its use.

Where no proof has seen what a model does with attention's output, the model's first call tells: a product that it did
not ask for is not multiplied again. How heads come back is the same on all ranks; what each rank multiplies under that
is its own matter, since no collective depends on it.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ascend_parallel.overlap.choices import operand_dtype
from ascend_parallel.overlap.projected import Projection

# What an attention module calls the layer.
PROJECTIONS = ("o_proj", "out_proj", "dense")


def projection_of(module: torch.nn.Module, query: torch.Tensor, width: int) -> Any:
    """Return the layer that reads an attention's output, or None: the same on all ranks, whatever hooks they have.

    query: [s, B, N, D] of the attention. width: the features of a head of its output.
    """
    layer = next(filter(None, (getattr(module, name, None) for name in PROJECTIONS)), None)
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if weight is None or not all(is_plain(x, query) for x in (weight, bias) if x is not None):
        return None
    return layer if weight.dim() == 2 and weight.shape[1] == query.shape[2] * width else None


class ProjectionsByUse:
    """The projections of attention modules; tells of each whether its model has ever asked for the product."""

    def __init__(self) -> None:
        """Know no module."""
        self._asked: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()

    def of(
        self,
        module: torch.nn.Module,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        always: bool = False,
        **options: Any,
    ) -> Projection | None:
        """Return the projection of a module to multiply, or None: nobody asked for the product of its first call.

        always: also then, as ranks must for a fused operator, which multiplies and communicates. options: those of
        `Projection`.
        """
        if self._asked.get(module) is False and not always:
            return None
        self._asked.setdefault(module, False)
        asked = functools.partial(self._note, module)
        return Projection(weight=weight, bias=bias, on_use=asked, **options)

    def _note(self, module: torch.nn.Module) -> None:
        self._asked[module] = True


def is_plain(x: Any, query: torch.Tensor) -> bool:
    """Tell whether x is a tensor or a parameter of torch's own, which is multiplied as `query` is.

    One that DeepSpeed's ZeRO-3 cuts has its values only inside of its own layer.
    """
    own = type(x) in (torch.Tensor, torch.nn.Parameter) and not hasattr(x, "ds_id")
    return own and (x.device, operand_dtype(x)) == (query.device, operand_dtype(query))
