"""Runs a function of DTensors by the rules: planned once for its arguments, then run on the ranks' parts.

`shard_tensor`, `dtensor_from_local` and `reshard` return `PropagatedDTensor`s; so does every function called on these.
Parameters stay torch's own DTensors: in the forward of a module that `shard_layer` has marked, functions of parameters
alone are run here too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ascend_parallel.sharding.graph import Ref, TensorMeta, Value
from ascend_parallel.sharding.marked import autograd_calls
from ascend_parallel.sharding.marked.function_plan import Argument, FunctionPlan, plan_function
from ascend_parallel.sharding.marked.outside_ranks import from_stand_in, is_outside, on_stand_ins
from ascend_parallel.sharding.marked.torch_call import TorchCall, as_replicated
from ascend_parallel.sharding.marked.unsharded_call import first_rank_draws, on_whole_tensors, runs_whole
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.edges import from_part, layout_of, leaf, local_part, take_over
from ascend_parallel.sharding.redistribute.reshard import costs_of, reshard
from ascend_parallel.sharding.tracing.function_calls import METADATA_FUNCTIONS, name_of
from ascend_parallel.sharding.tracing.trace import TraceError

_METHODS = """register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ untyped_storage storage_offset
    data_ptr __reduce_ex__ __setstate__ share_memory_ is_shared _is_view"""
_READ = "grad _grad _version output_nr retains_grad _backward_hooks _base"
_WRITTEN = "grad _grad requires_grad _backward_hooks"
OWN = METADATA_FUNCTIONS | {
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(getattr(torch.Tensor, name).__get__ for name in _READ.split()),
    *(getattr(torch.Tensor, name).__set__ for name in _WRITTEN.split()),
    torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
}
"""Run by torch: they read and write the tensor object, not its elements."""

_VALUES = """item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__ equal allclose
    __array_wrap__ is_nonzero __dlpack__"""
GATHERING = frozenset(
    (*(getattr(torch.Tensor, name) for name in _VALUES.split()), torch.equal, torch.allclose, torch.is_nonzero)
)
"""Run on whole tensors, without a gradient: they read values."""


Function = Callable[..., Any]
AUTOGRAD: dict[Function, Function] = {
    torch.Tensor.backward: autograd_calls.tensor_backward,
    torch.autograd.backward: autograd_calls.backward,
    torch.autograd.grad: autograd_calls.grad,
}
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
MOST_PLANS = 4096
_plans: dict[Any, FunctionPlan | str] = {}  # a text says why the function runs on whole tensors
# For a tensor with views: the tensors that share its memory on one card.
_views: WeakIdKeyDictionary = WeakIdKeyDictionary()


class PropagatedDTensor(DTensor):
    """A DTensor whose functions are laid out by the rules of `sharding.rules`, each call at the least cost.

    Sums over ranks are complete in every result. Gradients are torch's own DTensors, and may be partial sums.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function by the rules; those of the object itself, and of autograd, as torch does."""
        return run_function(function, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the global shape, the placements and the rank's part; runs no collective."""
        placements = ", ".join(map(repr, self._spec.placements))
        return f"PropagatedDTensor({list(self._spec.shape)} as [{placements}], local {self._local_tensor})"

    def __format__(self, form: str) -> str:
        """Return a number in this form; other tensors as ``repr(self)``."""
        return repr(self) if self._spec.shape else format(self.item(), form)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as torch's own DTensor, which loads without this package."""
        plain = leaf(DTensor, self._local_tensor, self._spec, self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> PropagatedDTensor:
        """Return a leaf with the same values."""
        copied = type(self)(self._local_tensor.detach().clone(), self._spec, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied


def run_function(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return ``function(*args, **kwargs)``, of which an argument is a DTensor; every rank of its mesh calls it.

    A plain tensor among the arguments counts as replicated, once its ranks have compared it. Raises `ValueError` on
    every rank for one that differs, for DTensors of two meshes, and for an in-place function that writes to a tensor
    with views.
    """
    if function in AUTOGRAD:
        return AUTOGRAD[function](*args, **kwargs)
    if function is torch.Tensor.__iter__:
        return iter(run_function(torch.Tensor.unbind, args, {}))
    if function == SET_DATA:
        return _set_data(*args)
    if function in OWN:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    if function not in GATHERING:
        leaves = [torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    call = _DTensorCall.of(function, leaves, spec)
    if function in GATHERING:
        with torch.no_grad():
            return call.on_whole_tensors(draws=False)
    plan = call.plan()
    if isinstance(plan, FunctionPlan):
        return call.run(plan)
    returned = call.on_whole_tensors(draws=True)
    runs_whole(function, plan)
    return returned


@dataclass(frozen=True)
class _DTensorCall:
    """A call and its tensors; `plain` are the places of those that were plain."""

    torch_call: TorchCall
    tensors: tuple[DTensor, ...]
    plain: frozenset[int]
    mesh: ProcessMesh

    @classmethod
    def of(cls, function: Function, leaves: Sequence[Any], spec: pytree.TreeSpec) -> _DTensorCall:
        """Compare plain tensors among ranks, and complete partial extremes."""
        given, refs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], count()
        dtensors = [leaf for leaf in given if isinstance(leaf, DTensor)]
        mesh = _mesh_of(dtensors, function)
        by_place = tuple(Ref(next(refs)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(
            TorchCall(function, by_place, spec),
            tuple(_sums_only(as_replicated(tensor, dtensors[0].device_mesh, function)) for tensor in given),
            frozenset(index for index, tensor in enumerate(given) if not isinstance(tensor, DTensor)),
            mesh,
        )

    def on_whole_tensors(self, *, draws: bool) -> Any:
        return on_whole_tensors(PropagatedDTensor, self.torch_call, self.tensors, self.mesh, draws=draws)

    def plan(self) -> FunctionPlan | str:
        """Return the plan of the call, made at its first run; or why it runs on whole tensors."""
        records, mesh = torch.is_grad_enabled(), self.mesh
        arguments = tuple(
            Argument(
                tuple(tensor.shape),
                tensor.dtype,
                layout_of(tensor.placements, mesh, tensor.ndim),
                records and tensor.requires_grad,
            )
            for tensor in self.tensors
        )
        call = self.torch_call
        key = call.function, tuple(map(_key, call.leaves)), call.spec, arguments, mesh, dist.get_rank()
        if key not in _plans:
            if len(_plans) >= MOST_PLANS:
                _plans.clear()
            place = mesh.coordinate(dist.get_rank()) or (0,) * mesh.ndim
            try:
                _plans[key] = plan_function(call, arguments, mesh, place)
            except TraceError as error:
                _plans[key] = str(error)
        return _plans[key]

    def run(self, plan: FunctionPlan) -> Any:
        values = _run(self, plan) | dict(zip(plan.arguments, self.tensors, strict=True))
        for index, value in plan.updates.items():
            if index in self.plain:
                raise ValueError(
                    f"{self.torch_call.name} of DTensors writes to a plain tensor: make it a DTensor, by shard_tensor, "
                    "or use the function that returns a new tensor"
                )
            saved = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)
            _write(self.torch_call.name, self.tensors[index], values[value], saved)
            values[value] = self.tensors[index]
        for value in plan.results:
            base = self.tensors[plan.views[value]] if isinstance(value, Value) and value in plan.views else None
            if base is not None and values[value] is not base:
                _note_view(values[value], base)
        results = [values[each] if isinstance(each, Value) else each for each in plan.results]
        return pytree.tree_unflatten(results, plan.results_spec)


def _run(call: _DTensorCall, plan: FunctionPlan) -> dict[Value, DTensor]:
    """Return the DTensors that a call returns and writes."""
    tensors, mesh = call.tensors, call.mesh
    if is_outside(mesh):
        stand_ins = _stand_ins(call, plan)
        made = plan.made
        return {value: from_stand_in(PropagatedDTensor, stand_ins[value], plan.layouts[value], mesh) for value in made}
    costs, layouts = costs_of(mesh), plan.arguments.values()
    locals_ = [local_part(tensor, layout, mesh) for tensor, layout in zip(tensors, layouts, strict=True)]
    parts = plan.run(locals_, first_rank_draws(mesh) if plan.draws else "")
    return {
        value: from_part(
            PropagatedDTensor, part, TensorMeta(plan.shapes[value], part.dtype), plan.layouts[value], mesh, costs
        )
        for value, part in parts.items()
    }


def _stand_ins(call: _DTensorCall, plan: FunctionPlan) -> dict[Value, torch.Tensor]:
    """Return stand-ins for a call's results and the tensors it writes, on a rank outside of the mesh."""
    returned, given = on_stand_ins(call.torch_call, call.tensors, tuple(plan.arguments.values()), call.mesh)
    results = zip(plan.results, pytree.tree_leaves(returned), strict=True)
    written = {value: given[index] for index, value in plan.updates.items()}
    return {value: result for value, result in results if isinstance(value, Value)} | written


def _key(leaf: Any) -> Any:
    """Return an argument as a key: equal keys are equal arguments of one type."""
    if isinstance(leaf, (slice, float, complex)):
        return type(leaf), repr(leaf)
    return type(leaf), leaf


def _mesh_of(dtensors: Sequence[DTensor], function: Function) -> ProcessMesh:
    """Return the mesh of a call's DTensors; raise `ValueError` if they are several."""
    mesh = ProcessMesh.of(dtensors[0].device_mesh)
    for dtensor in dtensors[1:]:
        if dtensor.device_mesh is not dtensors[0].device_mesh and ProcessMesh.of(dtensor.device_mesh) != mesh:
            raise ValueError(
                f"{name_of(function)} gets DTensors on {mesh} and on "
                f"{ProcessMesh.of(dtensor.device_mesh)}: reshard them to one mesh"
            )
    return mesh


def _sums_only(dtensor: DTensor) -> DTensor:
    """Return a DTensor without partial extremes, which no rule reads."""
    placements = dtensor.placements
    if not any(isinstance(placement, Partial) and placement.reduce_op in ("max", "min") for placement in placements):
        return dtensor
    whole = [Replicate() if isinstance(each, Partial) else each for each in placements]
    return reshard(dtensor, dtensor.device_mesh, whole)


def _write(name: str, tensor: DTensor, new: DTensor, saved: bool) -> None:
    """Write the result of an in-place function to its tensor.

    saved
        Whether autograd may have saved what the tensor holds: it then gets new memory.
    """
    if (new.shape, new.dtype) != (tensor.shape, tensor.dtype):
        raise ValueError(
            f"{name} makes {list(new.shape)} of {new.dtype} of a DTensor of {list(tensor.shape)} of {tensor.dtype}, in "
            "place: use the function that returns a new tensor"
        )
    others = [alias() for alias in _views.get(tensor, ())]  # type: ignore[no-untyped-call]
    if any(other is not None and other is not tensor for other in others):
        raise ValueError(
            f"{name} writes to a tensor of which there are views, and views of DTensors do not share their memory: "
            "write to a copy, x = x.clone(), or use the function that returns a new tensor"
        )
    if new.requires_grad or (tensor.requires_grad and torch.is_grad_enabled()):
        take_over(tensor, new)
    else:
        placed = reshard(new, tensor.device_mesh, tensor.placements)._local_tensor
        if saved:
            tensor._local_tensor = placed.clone()
        else:
            with torch.no_grad():
                tensor._local_tensor.copy_(placed)


def _set_data(tensor: DTensor, data: torch.Tensor) -> None:
    if not isinstance(data, DTensor) or (data.shape, data.dtype) != (tensor.shape, tensor.dtype):
        raise ValueError(
            f".data of a DTensor of {list(tensor.shape)} of {tensor.dtype} is set to {type(data).__name__} of "
            f"{list(data.shape)} of {data.dtype}: give a DTensor of this shape and dtype"
        )
    tensor._local_tensor, tensor._spec = data._local_tensor.detach(), data._spec


def _note_view(view: DTensor, base: DTensor) -> None:
    """Note that on one card `view` shares the memory of `base`."""
    known = _views.setdefault(base, [weakref.ref(base)])  # type: ignore[no-untyped-call]
    known[:] = [*(alias for alias in known if alias() is not None), weakref.ref(view)]
    _views[view] = known
