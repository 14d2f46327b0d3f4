"""What a forward that is run eagerly has in hand: DTensors of whole shape, of which DTensor decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import TensorMeta as Meta
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.layout import Layout

_PROPERTIES = """shape ndim dtype device layout requires_grad is_leaf grad_fn itemsize nbytes is_cpu is_cuda is_meta
    is_sparse is_quantized is_nested is_mkldnn"""
_METHODS = """size dim ndimension numel nelement element_size stride is_contiguous get_device is_floating_point
    is_complex is_signed is_inference __len__ __hash__"""
# Functions that tell of a tensor what is no number in it.
LOOKS = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    )
)


class Run(Protocol):
    """One forward."""

    def again(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one of its calls once more."""


@dataclass(eq=False)
class Local:
    """A rank's part of a tensor of a run, connected to autograd.

    shared
        The same in the layout of `ShardingPlan.shared_layouts`, once somebody has read it.
    """

    value: Value
    tensor: torch.Tensor
    shared: torch.Tensor | None = None


class Activation(DTensor):
    """A tensor of a run: shape of the whole, placements of the plan, this rank's part.

    Only the run computes with it. Its numbers can be looked at: print it, or take ``to_local()`` and ``full_tensor()``
    under torch.no_grad.
    """

    run: Run
    local: Local

    @classmethod
    def of(cls, run: Run, local: Local, meta: Meta, layout: Layout, mesh: DeviceMesh) -> Activation:
        """Return the part of a tensor of shape and dtype `meta` as a tensor of `run`."""
        stride = torch.empty(meta.shape, device="meta").stride()
        spec = DTensorSpec(
            mesh,
            tuple(state.placement for state in layout),
            tensor_meta=TensorMeta(torch.Size(meta.shape), stride, meta.dtype),
        )
        wants = local.tensor.requires_grad
        made = cls(local.tensor.detach(), spec, requires_grad=wants)
        made.run, made.local = run, local
        return made

    def become(self, other: Activation) -> Activation:
        """Be what an in-place operator has made of this, and return it."""
        self._spec, self._local_tensor, self.local = other._spec, other._local_tensor, other.local
        with torch._C.DisableTorchFunctionSubclass():
            self.requires_grad_(other.requires_grad)
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Outside of the forward, compute with it only what the forward has."""
        if function in LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        runs = [leaf.run for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Activation)]
        return runs[0].again(function, args, kwargs or {})

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's part, under torch.no_grad."""
        self._only_looked_at("to_local")
        return self._local_tensor

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return it as a DTensor with other placements, under torch.no_grad; every rank has to call it."""
        self._only_looked_at("redistribute")
        return self._plain().redistribute(*args, **kwargs)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole, under torch.no_grad; every rank has to call it."""
        self._only_looked_at("full_tensor")
        return self._plain().full_tensor()

    def _plain(self) -> DTensor:
        return DTensor(self._local_tensor, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def _only_looked_at(self, name: str) -> None:
        if torch.is_grad_enabled() and self.requires_grad:
            raise ValueError(
                f"{name} of a tensor of a parallelized model's forward has no gradient: call it under torch.no_grad()"
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the rank's part and where it lies."""
        shown = ", ".join(map(repr, self._spec.placements))
        return f"Activation({self.local.value.node}: {list(self._spec.shape)} as [{shown}], local {self._local_tensor})"

    def __format__(self, form: str) -> str:
        """Return the same."""
        return repr(self)
