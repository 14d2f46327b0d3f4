"""Whole tensors taken apart into what ranks hold, and put together again, by the definition of states.

Nothing here is used by the package: it is what the package is compared with.
"""

import itertools

import torch

from ascend_parallel.sharding.layout import AVERAGE, PARTIAL_GRAD, REPLICATE, SUM, shard

STATES = [REPLICATE, PARTIAL_GRAD, shard(0), shard(1), SUM, AVERAGE]


def parts_of(whole, layout, mesh_shape, seed=0):
    """Return what each coordinate holds of a tensor."""
    generator = torch.Generator().manual_seed(seed)

    def apart(tensor, dim):
        if dim == len(layout):
            return {(): tensor}
        pieces = _pieces(tensor, layout[dim], mesh_shape[dim], generator)
        return {
            (place, *rest): found for place, piece in enumerate(pieces) for rest, found in apart(piece, dim + 1).items()
        }

    return apart(whole, 0)


def _pieces(tensor, state, count, generator):
    if state.kind in ("replicate", "partial_grad"):
        return [tensor] * count
    if state.kind == "shard":
        size = tensor.shape[state.dim]
        step = -(-size // count)
        starts = [min(place * step, size) for place in range(count + 1)]
        return [tensor.narrow(state.dim, a, b - a) for a, b in itertools.pairwise(starts)]
    random = [torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) for _ in range(count - 1)]
    summands = [*random, tensor - sum(random)]
    return [one * count for one in summands] if state == AVERAGE else summands


def together(parts, layout):
    """Return the whole tensor of what each coordinate holds; replicas have to be the same."""
    if not layout:
        return parts[()]
    state = layout[0]
    below = [
        together({rest[1:]: part for rest, part in parts.items() if rest[0] == place}, layout[1:])
        for place in sorted({place[0] for place in parts})
    ]
    if state.kind == "shard":
        return torch.cat(below, state.dim)
    if state.kind == "partial":
        return sum(below) / (len(below) if state == AVERAGE else 1)
    for other in below[1:]:
        torch.testing.assert_close(other, below[0], rtol=1e-12, atol=1e-12)
    return below[0]


def of_gradient(layout, mesh_shape):
    """Return the layout of a gradient, and what the whole one is multiplied by to be in it."""
    factor = 1.0
    for state, size in zip(layout, mesh_shape, strict=True):
        factor /= size if state == AVERAGE else 1
    states = {"partial_grad": SUM, "partial": REPLICATE}
    return tuple(states.get(state.kind, state) for state in layout), factor
