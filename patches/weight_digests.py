"""Digests of a model's weights that depend neither on how ranks share them nor on which program holds them.

A digest is the sum, modulo 2 ** 64, of a mix of each element's bits and of its place in the whole weight. So each rank
sums its own elements, whatever dimension is cut, and the ranks' sums are added: no tensor is gathered. A weight that
vLLM packs, such as qkv_proj, has the digests of its parts, by the names that transformers gives them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ascend_parallel.ops.pending import CollectiveError
from ascend_parallel.process_groups.consistency import store_all_gather

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers of 64 bits, as of splitmix64.
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
_ELEMENTS = 1 << 20  # that are mixed at once, about
_STATE = "vllm.distributed.parallel_state"


@dataclass(frozen=True)
class Part:
    """What a rank holds of a weight: `local` begins at `offset` of the whole, which has `shape`.

    counted: whether this rank's elements count, or are those of another rank.
    """

    name: str
    local: torch.Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    counted: bool = True


def weight_digests(model: torch.nn.Module) -> dict[str, str]:
    """Return a digest of each parameter of a model of transformers or of vLLM, in 16 hexadecimal digits.

    Weights of the same bits have the same digests at any tensor-parallel degree, in a plain model, and under FSDP2. All
    ranks that share the model call this, and get the same; in vLLM ``llm.apply_model(ascend_parallel.weight_digests)``.
    Raises `CollectiveError` with the ranks that do not come.
    """
    group = _group_of(model)
    own = {part.name: (digest_of(part) if part.counted else 0) for part in _parts(model, group)}
    by_rank = {0: own}
    if group is not None and group.size() > 1:
        by_rank = store_all_gather(group, "digests of weights", own, CollectiveError)
    return {name: f"{sum(found[name] for found in by_rank.values()) % 2**64:016x}" for name in own}


def digest_of(part: Part) -> int:
    """Return the sum of the mixed elements that a rank holds."""
    rows = part.local.detach().reshape(part.local.shape[0] if part.local.dim() else 1, -1)
    stride, strides = 1, list[int]()
    for size in reversed(part.shape):
        strides.insert(0, stride)
        stride *= size
    columns = torch.zeros(1, dtype=torch.int64)
    for size, offset, step in list(zip(part.local.shape, part.offset, strides, strict=True))[1:]:
        columns = (columns.unsqueeze(-1) + (torch.arange(size) + offset) * step).reshape(-1)
    total, at_once = 0, max(1, _ELEMENTS // max(1, rows.shape[1]))
    first, step = (part.offset[0], strides[0]) if part.local.dim() else (0, 0)
    for start in range(0, rows.shape[0], at_once):
        bits = rows[start : start + at_once].contiguous().cpu().view(_BITS[rows.element_size()]).to(torch.int64)
        places = (torch.arange(start, start + len(bits)) + first).unsqueeze(1) * step + columns
        total += int(_mixed(bits, places).sum())
    return total % 2**64


def _mixed(bits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    x = bits * _FACTORS[0] + (places + 1) * _FACTORS[1]
    x = (x ^ (x >> 30)) * _FACTORS[2]
    x = (x ^ (x >> 27)) * _FACTORS[1]
    return x ^ (x >> 31)


def _group_of(model: torch.nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that share the model's weights; None: this rank has them all."""
    meshes = [each.device_mesh for each in model.parameters() if isinstance(each, DTensor)]
    if meshes:
        mesh = max(meshes, key=lambda each: each.size())  # a norm beside tensor parallelism may lie on replicas alone
        if mesh.ndim == 1:
            return mesh.get_group()
        if mesh.size() == dist.get_world_size():
            return dist.group.WORLD
        raise ValueError(f"weight_digests: a mesh of {mesh.ndim} dimensions that has not all ranks")
    if any(type(module).__module__.startswith("vllm.") for module in model.modules()):
        group: dist.ProcessGroup = sys.modules[_STATE].get_tp_group().device_group
        return group
    return None


def _parts(model: torch.nn.Module, group: dist.ProcessGroup | None) -> Iterator[Part]:
    """Yield what this rank holds; the first rank of the group counts what all ranks hold."""
    first = group is None or group.rank() == 0
    packed = getattr(model, "packed_modules_mapping", {})
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        layer, _, own = name.rpartition(".")
        if isinstance(parameter, DTensor):
            yield _of_dtensor(name, parameter, 0 if group is None else dist.get_global_rank(group, 0))
        elif hasattr(modules[layer], "tp_size"):
            yield from _of_vllm(layer, own, modules[layer], parameter, packed)
        else:
            yield Part(name, parameter, (0,) * parameter.dim(), tuple(parameter.shape), first)


def _of_dtensor(name: str, parameter: DTensor, first: int) -> Part:
    """Return this rank's part, which counts on one of the meshes that have all parts: that of the rank `first`."""
    mesh, placements = parameter.device_mesh, parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    coordinate: list[int] = list(mesh.get_coordinate() or ())
    # A part of tensor parallelism that FSDP2 cuts again has a placement of its own, which is no Shard.
    counted = all(not each.is_replicate() or at == 0 for each, at in zip(placements, coordinate, strict=True))
    local, counts = parameter.to_local(), counted and first in mesh.mesh.flatten().tolist()
    return Part(name, local, tuple(offset), tuple(parameter.shape), counts and local.numel() > 0)


def _of_vllm(
    layer: str, own: str, module: Any, parameter: torch.Tensor, packed: dict[str, list[str]]
) -> Iterator[Part]:
    """Yield the parts of a parameter of one of vLLM's parallel layers."""
    ranks, rank = module.tp_size, module.tp_rank if hasattr(module, "tp_rank") else _rank()
    parent, _, kind = layer.rpartition(".")
    cut = next((getattr(parameter, dim) for dim in ("output_dim", "input_dim") if _cuts(module, parameter, dim)), None)
    names = packed.get(kind, [kind]) if cut == 0 else [kind]
    sizes = module.output_partition_sizes if len(names) > 1 else [parameter.shape[0]]
    for each, local in zip(names, torch.split(parameter, sizes), strict=True):
        offset, shape = [0] * local.dim(), list(local.shape)
        if cut is not None:
            offset[cut], shape[cut] = rank * local.shape[cut], ranks * local.shape[cut]
        if (words := getattr(module, "org_vocab_size", None)) is not None:  # the vocabulary is padded at its end
            local, shape[0] = local[: max(0, min(len(local), words - offset[0]))], words
        whole = ".".join(filter(None, (parent, each, own)))
        yield Part(whole, local, tuple(offset), tuple(shape), (cut is not None or rank == 0) and local.numel() > 0)


def _rank() -> int:
    rank: int = sys.modules[_STATE].get_tensor_model_parallel_rank()
    return rank


def _cuts(module: Any, parameter: torch.Tensor, dim: str) -> bool:
    """Tell whether ranks share a parameter along the dimension that one of its attributes names."""
    row = hasattr(module, "input_is_parallel")
    return getattr(parameter, dim, None) is not None and row == (dim == "input_dim")
