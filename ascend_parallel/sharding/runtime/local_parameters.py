"""What a rank holds of a model's parameters and buffers, under the names that they have in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ascend_parallel.sharding.graph import Node
from ascend_parallel.sharding.layout import REPLICATE, Layout, Shape, bounds
from ascend_parallel.sharding.tensor_shard import TensorShard


@dataclass(frozen=True)
class Holding:
    """Shape of a whole parameter or buffer, and the layout in which ranks hold it."""

    shape: Shape
    layout: Layout

    def piece(self, local: torch.Tensor, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> TensorShard:
        """Return what the rank at `coordinate` holds, as a box in the whole."""
        found = bounds(self.shape, self.layout, mesh_shape, coordinate)
        return TensorShard(local, self.shape, tuple(start for start, _ in found))


def local_slice(
    whole: torch.Tensor, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """Return the rank's part of a whole tensor, contiguous and in memory of its own.

    Raises `ValueError` for states other than replicate and shard: a copy's gradient would be a part of a sum.
    """
    for state in layout:
        if state.kind not in ("replicate", "shard"):
            raise ValueError(f"a tensor of the model cannot be held as {state}: give replicate or shard")
    found = bounds(tuple(whole.shape), layout, mesh_shape, coordinate)
    part = whole.detach()[tuple(slice(start, stop) for start, stop in found)]
    return part.clone(memory_format=torch.contiguous_format)


def check_model(model: torch.nn.Module, given: Sequence[Node]) -> None:
    """Refuse a model whose tensors are not those that were traced, and hooks on gradients that it would lose."""
    _refuse_hooks(model)
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for node in given:
        (meta,), found = node.outputs, held.get(node.source)
        if found is not None and (tuple(found.shape), found.dtype) != (meta.shape, meta.dtype):
            raise ValueError(
                f"{node.source} is {list(found.shape)} of {found.dtype}; traced was {list(meta.shape)} of {meta.dtype}"
            )


def _refuse_hooks(model: torch.nn.Module) -> None:
    """Refuse hooks on gradients: they are of the whole parameter, in whose place each rank has its part."""
    for name, one in model.named_parameters():
        if one._backward_hooks or one._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} has a hook on its gradient, which would not run: each rank gets a part of its own. Remove it "
                "before (handle.remove()), and register one on that part afterwards, get_parameter of what parallelize "
                "or the training step's modules give; a graph takes it with bucket_bytes=0"
            )


def hold(
    target: torch.nn.Module,
    model: torch.nn.Module,
    layouts: Mapping[str, Layout],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    rest: bool = True,
) -> dict[str, Holding]:
    """Give `target` the rank's part of each parameter and buffer of `model`, in modules nested as the model's.

    What has no layout is held whole, or without `rest` not at all. Tied tensors stay tied: one under several names.
    Return what every name holds.

    Raises `ValueError` for a name that the model lacks, where the names of one tensor have different layouts, and for
    a name that is an attribute of `target`.
    """
    for name in (*model._modules, *model._parameters, *model._buffers):
        if hasattr(target, name):
            raise ValueError(f"{name!r} of the model would hide {type(target).__name__}.{name}: give it another name")
    laid = by_tensor(model, layouts)
    held: dict[torch.Tensor, torch.Tensor] = {}
    found: dict[str, Holding] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, whole in (*module._parameters.items(), *module._buffers.items()):
            if whole is None or not (rest or whole in laid):
                continue
            layout = laid.get(whole, (REPLICATE,) * len(mesh_shape))
            if whole not in held:
                held[whole] = _held(whole, local_slice(whole, layout, mesh_shape, coordinate))
            found[f"{path}.{name}" if path else name] = Holding(tuple(whole.shape), layout)
            _register(_nested(target, path), name, held[whole], name not in module._non_persistent_buffers_set)
    return found


def by_tensor(model: torch.nn.Module, layouts: Mapping[str, Layout]) -> dict[torch.Tensor, Layout]:
    """Return the layout of each tensor that is laid out under one or several names; raises `ValueError` as `hold`."""
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    found: dict[torch.Tensor, Layout] = {}
    for name, layout in layouts.items():
        if name not in named:
            raise ValueError(f"the plan lays out {name!r}, which the model lacks: trace and plan the same model")
        if found.setdefault(named[name], layout) != layout:
            shown = [" ".join(map(str, one)) for one in (layout, found[named[name]])]
            raise ValueError(f"{name} is tied to a tensor laid out {shown[1]}, and is itself laid out {shown[0]}")
    return found


def _held(whole: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if isinstance(whole, torch.nn.Parameter):
        return torch.nn.Parameter(local, requires_grad=whole.requires_grad)
    return local


def _nested(target: torch.nn.Module, path: str) -> torch.nn.Module:
    """Return the module of that path, made where it is missing."""
    for name in path.split(".") if path else ():
        if name not in target._modules:
            target.add_module(name, torch.nn.Module())
        target = target.get_submodule(name)
    return target


def _register(target: torch.nn.Module, name: str, local: torch.Tensor, persistent: bool) -> None:
    if isinstance(local, torch.nn.Parameter):
        target.register_parameter(name, local)
    else:
        target.register_buffer(name, local, persistent=persistent)
