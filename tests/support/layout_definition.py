"""Whole tensors taken apart into what ranks hold, and put together again, by the definition of states (layout.py).

Nothing here is used by the package: it is what rules and redistributions are compared with.
"""

from itertools import pairwise

import torch

from ascend_parallel.sharding.layout import AVERAGE, PARTIAL_GRAD, REPLICATE, SUM, shard

STATES = [REPLICATE, PARTIAL_GRAD, shard(0), shard(1), SUM, AVERAGE]
DIVIDED = "divided"  # the gradient of a partial average: the whole gradient by the number of ranks, on every rank


def split(whole, state, count, generator):
    """Return what each of `count` ranks has of a tensor in a state."""
    if state == DIVIDED:
        return [whole / count] * count
    if state.kind == "shard":
        size = whole.shape[state.dim]
        ends = [min(rank * -(-size // count), size) for rank in range(count + 1)]
        return [whole.narrow(state.dim, first, end - first) for first, end in pairwise(ends)]
    if state.kind != "partial":
        return [whole] * count
    parts = [torch.randn(whole.shape, dtype=whole.dtype, generator=generator) for _ in range(count - 1)]
    total = whole * count if state == AVERAGE else whole
    return [*parts, total - sum(parts)]


def join(parts, state):
    """Return the whole tensor of which ranks have `parts`; ranks that should have the same must have the same."""
    if state != DIVIDED and state.kind == "shard":
        return torch.cat(parts, state.dim)
    if state != DIVIDED and state.kind == "partial":
        return sum(parts) / (len(parts) if state == AVERAGE else 1)
    for part in parts[1:]:
        close(part, parts[0], "ranks that should have the same do not")
    return parts[0] * len(parts) if state == DIVIDED else parts[0]


def split_all(whole, layout, mesh_shape, generator):
    """Return every rank's part, by coordinate."""
    parts = {(): whole}
    for state, count in zip(layout, mesh_shape, strict=True):
        parts = {
            (*at, place): piece
            for at, part in parts.items()
            for place, piece in enumerate(split(part, state, count, generator))
        }
    return parts


def join_all(parts, layout, mesh_shape):
    """Undo `split_all`."""
    for state, count in reversed(list(zip(layout, mesh_shape, strict=True))):
        heads = dict.fromkeys(at[:-1] for at in parts)
        parts = {at: join([parts[(*at, place)] for place in range(count)], state) for at in heads}
    return parts[()]


def gradient_layout(layout):
    """Return the states in which the gradient of a tensor is on the ranks."""
    return tuple(
        {REPLICATE: REPLICATE, PARTIAL_GRAD: SUM, SUM: REPLICATE, AVERAGE: DIVIDED}.get(one, one) for one in layout
    )


def close(found, expected, what):
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, not {expected.dtype}"
    exact = not (expected.is_floating_point() or expected.is_complex())
    same = torch.equal(found, expected) if exact else torch.allclose(found, expected, 1e-9, 1e-9, equal_nan=True)
    assert same, f"{what}:\n{found}\nnot\n{expected}"
