"""The activations of an eager forward: DTensors whose propagation the plan controls, not DTensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.tracing.function_calls import METADATA_FUNCTIONS


class ForwardRun(Protocol):
    """One forward of an eager model (`EagerForward`)."""

    def rerun(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one of the forward's calls a second time."""

    def gathered(self, local: LocalActivation) -> torch.Tensor:
        """Return the whole tensor of an activation."""


@dataclass(eq=False)
class LocalActivation:
    """A rank's part of an activation, connected to autograd.

    register
        Of the part as it is produced.
    tensors
        The part by register: as it is produced and, from the first read on, in the layout that its readers share.
    """

    value: Value
    register: int
    tensors: dict[int, torch.Tensor]

    @property
    def tensor(self) -> torch.Tensor:
        """The part as it is produced."""
        return self.tensors[self.register]


class PlannedDTensor(DTensor):
    """An activation: a DTensor with the global shape, the plan's placements and this rank's part.

    Only the model's forward may compute with it. To look at its elements, print the tensor, or call any function
    (``x.norm()``, ``x.isnan().any()``, ``x.detach()``), ``to_local()`` or ``full_tensor()`` under torch.no_grad.
    """

    run: ForwardRun
    local: LocalActivation

    @classmethod
    def of(cls, run: ForwardRun, local: LocalActivation, spec: DTensorSpec) -> PlannedDTensor:
        """Return a rank's part as an activation of `run`."""
        activation = cls(local.tensor.detach(), spec, requires_grad=local.tensor.requires_grad)
        activation.run, activation.local = run, local
        return activation

    def become(self, other: PlannedDTensor) -> PlannedDTensor:
        """Take over the result of an in-place operator, and return self."""
        self._spec, self._local_tensor, self.local = other._spec, other._local_tensor, other.local
        with torch._C.DisableTorchFunctionSubclass():
            self.requires_grad_(other.requires_grad)
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Outside of the forward, run only functions that read metadata and calls that the forward has run."""
        if function in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        runs = [leaf.run for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, PlannedDTensor)]
        return runs[0].rerun(function, args, kwargs or {})

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's part; call this under torch.no_grad."""
        self._refuse_gradients("to_local")
        return self._local_tensor

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Redistribute by torch's own DTensor and return the result; call this under torch.no_grad, on every rank."""
        self._refuse_gradients("redistribute")
        return self._plain().redistribute(*args, **kwargs)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the global tensor; call this under torch.no_grad, on every rank."""
        self._refuse_gradients("full_tensor")
        return self._plain().full_tensor()

    def _plain(self) -> DTensor:
        return DTensor(self._local_tensor, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def _refuse_gradients(self, name: str) -> None:
        if torch.is_grad_enabled() and self.requires_grad:
            raise ValueError(
                f"{name} of a tensor of a parallelized model's forward has no backward: call it under torch.no_grad()"
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the node's name, the global shape, the placements and the rank's part."""
        placements = ", ".join(map(repr, self._spec.placements))
        where = f"{self.local.value.node}: {list(self._spec.shape)} as [{placements}]"
        return f"PlannedDTensor({where}, local {self._local_tensor})"

    def __format__(self, form: str) -> str:
        """Return ``repr(self)``."""
        return repr(self)
