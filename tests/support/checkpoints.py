"""Tensors for checkpoints, and the shards that ranks have of them under many layouts."""

from math import prod

import numpy as np
import torch

from ascend_parallel.sharding.layout import REPLICATE, bounds, shard
from ascend_parallel.sharding.tensor_shard import TensorShard


def model_tensors():
    """Return whole tensors of many shapes and dtypes, alike whoever asks."""
    made = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(shape, generator=made, dtype=torch.float64)  # noqa: E731
    return {
        "one.weight": draw(6, 10).float(),
        "one.bias": draw(10).bfloat16(),
        "two.weight": draw(5, 3),
        "two.scale": draw(),
        "two.count": torch.arange(7) - 3,
        "two.mask": torch.arange(9) % 2 == 0,
        "none": torch.zeros(0, 4),
    }


def optimizer_tensors():
    """Return whole tensors of an optimizer's state."""
    found = {}
    for name, tensor in model_tensors().items():
        if tensor.dtype.is_floating_point:
            found |= {f"{name}.exp_avg": tensor.float() * 3 + 1, f"{name}.step": torch.tensor(7.0)}
    return found


# Mesh, which mesh dimension cuts which tensor dimension of the model and of the optimizer's state, pipeline stages.
LAYOUTS = {
    "one process": ((1,), {}, {}, 1),
    "replicas on 1 x 2": ((1, 2), {}, {1: 0}, 1),
    "columns on 1 x 2": ((1, 2), {1: 1}, {1: 1}, 1),
    "2 x 2": ((2, 2), {0: 1, 1: 0}, {0: 0, 1: 0}, 1),
    "rows on 4": ((4,), {0: 0}, {0: 0}, 1),
    "rows on 3": ((3,), {0: 0}, {0: 0}, 1),
    "two stages on 2 x 2": ((2, 2), {1: 0}, {1: 0}, 2),
}


def ranks_of(layout):
    """Return how many ranks a layout has."""
    return prod(LAYOUTS[layout][0])


def tensor_shards(tensors, layout, rank, *, optimizer=False, blank=False):
    """Return the rank's shards of whole tensors: copies, or with `blank` full of what they are not."""
    mesh, model_cuts, optimizer_cuts, stages = LAYOUTS[layout]
    cuts = optimizer_cuts if optimizer else model_cuts
    place = [int(at) for at in np.unravel_index(rank, mesh)]
    found = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if stages > 1 and number % stages != place[0]:
            continue
        states = [shard(cuts[at]) if cuts.get(at, 9) < tensor.dim() else REPLICATE for at in range(len(mesh))]
        spans = bounds(tuple(tensor.shape), tuple(states), mesh, place)
        local = tensor[tuple(slice(*span) for span in spans)].clone()
        if blank:
            local = torch.ones_like(local) if local.dtype is torch.bool else local.zero_() - 77
        found[name] = TensorShard(local, tuple(tensor.shape), tuple(start for start, _ in spans))
    return found


def are_as_in(found, wanted):
    """Tell whether every shard has the bits of the other's of its name."""
    return found.keys() == wanted.keys() and all(
        torch.equal(shard.local, wanted[name].local) and shard.local.dtype == wanted[name].local.dtype
        for name, shard in found.items()
    )
