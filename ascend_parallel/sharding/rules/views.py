"""Operators that only move, repeat or create elements.

These are reshape, transpose, expand, slice, split, cat, stack, repeat, pad; arange, zeros, full.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ascend_parallel.sharding.graph import OpCall
from ascend_parallel.sharding.layout import REPLICATE, Shape
from ascend_parallel.sharding.rules.axes import Axis, aligned, arguments, cut, linear_in_all, normal, other_dims, same
from ascend_parallel.sharding.rules.local import Part
from ascend_parallel.sharding.rules.reductions import accumulated
from ascend_parallel.sharding.rules.registry import OpPlacements, register_all

RESHAPES = "view.default reshape _unsafe_view flatten unflatten unsqueeze squeeze _reshape_copy"


def merged(before: Shape, after: Shape) -> list[tuple[int, int]]:
    """Return the (dimension before, dimension after) that start each group of a reshape.

    A group is a shortest run of dimensions before the reshape that holds the elements of a run after it. Sharding the
    first dimension of a group evenly gives the same slices before and after; its other dimensions cannot be sharded.
    Dimensions of size 1 belong to no group.
    """
    if 0 in before:
        return []
    left = [dim for dim, size in enumerate(before) if size > 1]
    right = [dim for dim, size in enumerate(after) if size > 1]
    pairs = []
    while left and right:
        pairs.append((left[0], right[0]))
        counts = [before[left.pop(0)], after[right.pop(0)]]
        while counts[0] != counts[1]:
            if counts[0] < counts[1]:
                counts[0] *= before[left.pop(0)]
            else:
                counts[1] *= after[right.pop(0)]
    return pairs


def reshape(call: OpCall) -> list[OpPlacements]:
    """Shard the first dimension of a group of merged or split dimensions."""
    pairs = merged(call.inputs[0].shape, call.outputs[0].shape)
    return cut(call, [Axis((before,), (after,)) for before, after in pairs]) + linear_in_all(call)


def run_reshape(part: Part) -> Any:
    """Reshape to the local shape. `view` could fail, because a slice may be non-contiguous."""
    return part.inputs[0].reshape(part.output_shape())


def expand(call: OpCall) -> list[OpPlacements]:
    """Shard any dimension of the output; along an expanded dimension the input is partial_grad."""
    return cut(call, aligned(call)) + linear_in_all(call)


def run_expand(part: Part) -> Any:
    """Expand to the local shape."""
    return part.inputs[0].expand(part.output_shape())


def permuted(call: OpCall) -> list[OpPlacements]:
    """Operators that permute dimensions: shard any dimension."""
    dims = len(call.inputs[0].shape)
    return cut(call, [Axis((dim,), (out,)) for out, dim in enumerate(_order(call, dims))]) + linear_in_all(call)


def _order(call: OpCall, dims: int) -> list[int]:
    """Return the input dimension of every output dimension."""
    named = arguments(call)
    order = list(range(dims))
    if "dims" in named:
        return [normal(dim, dims) for dim in named["dims"]]
    if "source" in named:
        source, target = ([normal(dim, dims) for dim in _several(named[name])] for name in ("source", "destination"))
        order = [dim for dim in order if dim not in source]
        for place, dim in sorted(zip(target, source, strict=True)):
            order.insert(place, dim)
        return order
    if call.operator == "numpy_T":
        return order[::-1]
    first, second = ("dim0", "dim1") if "dim0" in named else ("axis0", "axis1")
    swapped = normal(named.get(first, -2), dims), normal(named.get(second, -1), dims)
    if dims >= 2:  # t() of a vector is the vector
        order[swapped[0]], order[swapped[1]] = order[swapped[1]], order[swapped[0]]
    return order


def _several(dims: Any) -> list[int]:
    return list(dims) if isinstance(dims, (list, tuple)) else [dims]


def along(call: OpCall) -> list[OpPlacements]:
    """Shard any dimension but the argument `dim`, which the output may lack (select, unbind)."""
    shape = call.inputs[0].shape
    if call.name.startswith("aten.slice.") and call.outputs[0].shape == shape:
        # A slice of the whole dimension is whole on a shard too: bounds are clamped.
        return cut(call, same(call, range(len(shape)))) + linear_in_all(call)
    return accumulated(call)


def joined(call: OpCall) -> list[OpPlacements]:
    """Concatenate or stack: shard any dimension but the concatenated dimension."""
    ranks = {len(meta.shape) for meta in call.inputs}
    if len(ranks) > 1:
        return []  # an empty vector among others, which cat skips
    before, after = ranks.pop(), len(call.outputs[0].shape)
    dim = normal(arguments(call).get("dim", 0), after)
    pairs = [(axis, axis + (after - before if axis >= dim else 0)) for axis in range(before)]
    axes = [Axis((source,) * len(call.inputs), (out,)) for source, out in pairs if out != dim]
    return cut(call, axes) + linear_in_all(call)


def moved_along(call: OpCall) -> list[OpPlacements]:
    """roll, flip, triu, tril, pad: shard a dimension along which no element moves."""
    dims = len(call.inputs[0].shape)
    named, name = arguments(call), call.operator
    if name in ("triu", "tril"):
        moved = [dims - 2, dims - 1]
    elif "pad" in named:
        moved = [dims - 1 - index // 2 for index, size in enumerate(named["pad"]) if size != 0]
    else:
        moved = list(named["dims"] or range(dims))
    linear = "pad" not in named or not named.get("value")
    return cut(call, same(call, other_dims(call, *moved))) + (linear_in_all(call) if linear else [])


def repeat(call: OpCall) -> list[OpPlacements]:
    """Shard a dimension that is not repeated, or the repetitions of a dimension of size 1."""
    new = len(call.outputs[0].shape) - len(call.inputs[0].shape)
    sizes = zip(call.outputs[0].shape, (1,) * new + call.inputs[0].shape, strict=True)
    dims = [dim for dim, (size, own) in enumerate(sizes) if own in (1, size)]
    return cut(call, aligned(call, dims)) + linear_in_all(call)


def run_repeat(part: Part) -> Any:
    """Repeat up to the local output shape."""
    output = part.output_shape()
    local = (1,) * (len(output) - part.inputs[0].dim()) + tuple(part.inputs[0].shape)
    return part.inputs[0].repeat([size // own if own else 1 for size, own in zip(output, local, strict=True)])


def repeat_interleave(call: OpCall) -> list[OpPlacements]:
    """Shard any dimension, also the repeated dimension: an element's copies stay adjacent."""
    shape, dim = call.inputs[0].shape, arguments(call)["dim"]
    dims = range(len(shape)) if dim is not None else [next((axis for axis, size in enumerate(shape) if size > 1), 0)]
    axes = [Axis((axis,), (axis if dim is not None else 0,)) for axis in dims] if prod(shape) > 1 else []
    return cut(call, axes) + linear_in_all(call)


def run_repeat_interleave(part: Part) -> Any:
    """Repeat without the argument output_size, which is the whole output's."""
    return part.run(output_size=None)


# Outputs are replicated, because slicing them costs nothing.
CREATIONS = "arange zeros ones full empty eye linspace scalar_tensor tril_indices triu_indices"
RANDOM = "rand randn randint randperm normal"
NEW = "new_zeros new_ones new_full new_empty"


def created(call: OpCall) -> list[OpPlacements]:
    """No strategy besides the whole tensor on every rank."""
    return []


def made_like(call: OpCall) -> list[OpPlacements]:
    """new_zeros and others: the output takes only the input's dtype. Shard any dimension of the input."""
    dims = len(call.inputs[0].shape)
    return cut(call, [Axis((dim,), (None,), REPLICATE) for dim in range(dims)])


def register() -> None:
    """Register this file's rules."""
    register_all(RESHAPES, reshape, run_reshape)
    register_all("expand broadcast_to", expand, run_expand)
    names = "transpose permute t numpy_T mT swapaxes swapdims movedim moveaxis"
    register_all(names, permuted)
    names = "slice.Tensor select.int narrow unbind split split_with_sizes chunk"
    register_all(f"{names} unsafe_split unsafe_split_with_sizes unsafe_chunk tensor_split.sections", along)
    register_all("cat concat stack", joined)
    register_all("roll flip triu tril constant_pad_nd pad", moved_along)
    register_all("repeat tile", repeat, run_repeat)
    register_all("repeat_interleave.self_int", repeat_interleave, run_repeat_interleave)
    register_all(CREATIONS, created)
    register_all(RANDOM, created)
    register_all(NEW, made_like)
