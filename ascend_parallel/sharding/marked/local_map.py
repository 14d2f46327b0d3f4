"""local_map: a function of plain tensors, run on the ranks' parts of DTensors, as in Paddle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.marked.dtensors import dtensor_from_local, reshard
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.reshard import Mesh
from ascend_parallel.sharding.tracing.marked_tensors import is_tracing

Placements = Sequence[Placement]


def local_map(
    func: Callable[..., Any],
    out_placements: Sequence[Placements | None],
    in_placements: Sequence[Placements | None] | None = None,
    process_mesh: Mesh | None = None,
    reshard_inputs: bool = False,
) -> Callable[..., Any]:
    """Return a function of DTensors that runs `func` on each rank's parts; every rank of the mesh calls it.

    out_placements
        For each output, how the ranks' results make a DTensor, all parts of one shape: with Partial("sum") they are
        terms. None: the output stays as it is.
    in_placements
        For each tensor among the arguments, the placements that `func` needs; None: any but Partial.
    process_mesh
        The mesh; by default that of the arguments.
    reshard_inputs
        Reshard arguments that lie otherwise. False: they are a `ValueError`.

    Gradients are those of the whole computation: an argument that is replicated, of which each rank makes its own part
    of an output, has as its gradient the sum over ranks. Replicated outputs must be the same on all ranks.
    """
    for placements in out_placements:
        wrong = [each for each in placements or () if isinstance(each, Partial) and each.reduce_op != "sum"]
        if wrong:
            raise ValueError(f"out_placements has {wrong[0]}: give Partial('sum'), Shard or Replicate")

    @wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            raise ValueError("local_map in a forward that is traced: register_rule makes a rule for a custom operator")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        mesh = _mesh_of(tensors, process_mesh)
        needed = [None] * len(tensors) if in_placements is None else list(in_placements)
        if len(needed) != len(tensors):
            raise ValueError(f"in_placements has {len(needed)} entries, and {len(tensors)} tensors are given")
        kinds = _gradient_kinds(mesh, out_placements)
        parts = iter(
            [_part(tensor, place, mesh, kinds, reshard_inputs) for tensor, place in zip(tensors, needed, strict=True)]
        )
        args, kwargs = pytree.tree_unflatten(
            [next(parts) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )
        outputs, outputs_spec = pytree.tree_flatten(func(*args, **kwargs))
        if len(outputs) != len(out_placements):
            raise ValueError(f"out_placements has {len(out_placements)} entries, and func returned {len(outputs)}")
        pairs = zip(outputs, out_placements, strict=True)
        return pytree.tree_unflatten([_whole(output, place, mesh, kinds) for output, place in pairs], outputs_spec)

    return mapped


def _mesh_of(tensors: Sequence[torch.Tensor], process_mesh: Mesh | None) -> ProcessMesh:
    meshes = {ProcessMesh.of(tensor.device_mesh) for tensor in tensors if isinstance(tensor, DTensor)}
    mesh = ProcessMesh.of(process_mesh) if process_mesh is not None else next(iter(meshes), None)
    if mesh is None or meshes - {mesh}:
        shown = ", ".join(map(str, meshes)) or "no mesh"
        raise ValueError(f"local_map gets tensors on {shown}, process_mesh={process_mesh}: give one mesh")
    return mesh


def _gradient_kinds(mesh: ProcessMesh, out_placements: Sequence[Placements | None]) -> list[Placement]:
    """Return, for each mesh dimension, the placement of gradients of arguments that are replicated there.

    They are terms of a sum where ranks make different parts or terms of an output, else the same on all ranks.
    """
    rows = [list(placements) for placements in out_placements if placements is not None]
    wrong = [row for row in rows if len(row) != mesh.ndim]
    if wrong:
        raise ValueError(f"out_placements has {wrong[0]}, and the mesh has {mesh.ndim} dimensions: give one for each")
    return [Replicate() if all(row[dim].is_replicate() for row in rows) else Partial("sum") for dim in range(mesh.ndim)]


def _part(
    tensor: torch.Tensor, needed: Placements | None, mesh: ProcessMesh, kinds: Sequence[Placement], reshards: bool
) -> torch.Tensor:
    """Return this rank's part of an argument."""
    if not isinstance(tensor, DTensor):
        if tensor.requires_grad:
            raise ValueError(
                "local_map gets a plain tensor that requires a gradient: make it a DTensor by shard_tensor"
            )
        return tensor
    if needed is not None and tuple(needed) != tensor.placements:
        if not reshards:
            raise ValueError(
                f"an argument lies as {list(tensor.placements)}, and in_placements has {list(needed)}: reshard it, or "
                "give reshard_inputs=True"
            )
        tensor = reshard(tensor, mesh, needed)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"an argument lies as {list(tensor.placements)}, of which ranks have terms: reshard it first")
    gradient = [kind if each.is_replicate() else each for each, kind in zip(tensor.placements, kinds, strict=True)]
    return tensor.to_local(grad_placements=gradient)


def _whole(output: Any, placements: Placements | None, mesh: ProcessMesh, kinds: Sequence[Placement]) -> Any:
    """Return an output as a DTensor."""
    if placements is None or not isinstance(output, torch.Tensor):
        return output
    # Every rank has a replicated output: where arguments' gradients are summed, each counts for its share.
    pairs = zip(placements, kinds, mesh.shape, strict=True)
    ranks = [size for placement, kind, size in pairs if placement.is_replicate() and kind.is_partial()]
    if ranks and output.requires_grad:
        output = output.view_as(output)
        output.register_hook(lambda gradient: gradient / prod(ranks))
    return dtensor_from_local(output, mesh, placements)
