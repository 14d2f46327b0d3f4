"""A rank's slices of a model's parameters and buffers, under their names in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ascend_parallel.sharding.graph import Node, in_place_of, named_tensors
from ascend_parallel.sharding.layout import REPLICATE, Layout, Shape, bounds, text
from ascend_parallel.sharding.tensor_shard import TensorShard


@dataclass(frozen=True)
class ParameterLayout:
    """The global shape of a parameter or buffer, and the layout in which ranks hold it."""

    shape: Shape
    layout: Layout

    def piece(self, local: torch.Tensor, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> TensorShard:
        """Return the shard that the rank at `coordinate` holds."""
        ranges = bounds(self.shape, self.layout, mesh_shape, coordinate)
        return TensorShard(local, self.shape, tuple(start for start, _ in ranges))


def local_slice(
    whole: torch.Tensor, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """Return a contiguous copy of the rank's part of a global tensor.

    Raises `ValueError` for placements other than replicate and shard: the gradient of R* would be a partial sum.
    """
    for placement in layout:
        if placement.kind not in ("replicate", "shard"):
            raise ValueError(f"a tensor of the model cannot be held as {placement}: give replicate or shard")
    ranges = bounds(tuple(whole.shape), layout, mesh_shape, coordinate)
    part = whole.detach()[tuple(slice(start, stop) for start, stop in ranges)]
    return part.clone(memory_format=torch.contiguous_format)


def tensor_at(module: torch.nn.Module, path: Sequence[str]) -> torch.Tensor:
    """Return a module's parameter or buffer by the names on its path, also if a submodule was replaced."""
    *owners, name = path
    for owner in owners:
        child = module._modules[owner]
        assert child is not None
        module = child
    tensor = module._parameters.get(name)
    return getattr(module, name) if tensor is None else tensor  # a buffer, a constant, or a parametrized weight


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that a module and its submodules hold now; a tied parameter several times."""
    found = [parameter for parameter in module._parameters.values() if parameter is not None]
    for child in module._modules.values():
        if child is not None:
            found += parameters_of(child)
    return found


def check_model(model: torch.nn.Module, nodes: Sequence[Node]) -> None:
    """Raise `ValueError` if a tensor differs from the traced tensor, or a parameter has a hook that would be lost."""
    _refuse_hooks(model)
    held = named_tensors(model, all_names=True)
    for node in nodes:
        (meta,), tensor = node.outputs, held.get(node.source)
        if tensor is not None and (tuple(tensor.shape), tensor.dtype) != (meta.shape, meta.dtype):
            raise ValueError(
                f"{node.source} is {list(tensor.shape)} of {tensor.dtype}; "
                f"traced was {list(meta.shape)} of {meta.dtype}"
            )


def _refuse_hooks(model: torch.nn.Module) -> None:
    """Raise `ValueError` for a hook on a parameter's gradient: each rank replaces the parameter by its slice."""
    for name, param in model.named_parameters():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} has a hook on its gradient, which would not run: each rank gets a part of its own. Remove the "
                "hook before (handle.remove()) and register it afterwards on the rank's part: get_parameter of the "
                "parallelized model or of the training step's modules. A graph needs bucket_bytes=0 for hooks"
            )


def hold(
    target: torch.nn.Module,
    model: torch.nn.Module,
    layouts: Mapping[str, Layout],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    rest: bool = True,
) -> dict[str, ParameterLayout]:
    """Register the rank's part of each parameter and buffer of `model` in `target`, in modules nested as the model's.

    A tensor without a layout is replicated, or with rest=False left out. Tied tensors stay tied. Returns the global
    shape and layout of each name.

    Raises `ValueError` for a name that the model lacks, for different layouts of one tied tensor, and for a name that
    is an attribute of `target`.
    """
    for name in (*model._modules, *model._parameters, *model._buffers):
        if hasattr(target, name):
            raise ValueError(f"{name!r} of the model would hide {type(target).__name__}.{name}: give it another name")
    layout_of = by_tensor(model, layouts)
    held: dict[torch.Tensor, torch.Tensor] = {}
    found: dict[str, ParameterLayout] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, whole in (*module._parameters.items(), *module._buffers.items()):
            if whole is None or not (rest or whole in layout_of):
                continue
            layout = layout_of.get(whole, (REPLICATE,) * len(mesh_shape))
            if whole not in held:
                held[whole] = in_place_of(whole, local_slice(whole, layout, mesh_shape, coordinate))
            found[f"{path}.{name}" if path else name] = ParameterLayout(tuple(whole.shape), layout)
            _register(_nested(target, path), name, held[whole], name not in module._non_persistent_buffers_set)
    return found


def by_tensor(model: torch.nn.Module, layouts: Mapping[str, Layout]) -> dict[torch.Tensor, Layout]:
    """Return the layout of each tensor, for layouts by name; raises `ValueError` as `hold`."""
    named = named_tensors(model, all_names=True)
    found: dict[torch.Tensor, Layout] = {}
    for name, layout in layouts.items():
        if name not in named:
            raise ValueError(f"the plan lays out {name!r}, which the model lacks: trace and plan the same model")
        if found.setdefault(named[name], layout) != layout:
            mine, tied = map(text, (layout, found[named[name]]))
            raise ValueError(f"{name} is tied to a tensor laid out {tied}, and is itself laid out {mine}")
    return found


def _nested(target: torch.nn.Module, path: str) -> torch.nn.Module:
    """Return the module at a path; missing modules are added."""
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
