"""The optimizer's state in the coordinates of whole parameters, so that it can be kept and loaded in any layout.

A parameter's state has the same names whether it has had a gradient or not: `STEPPED` tells, and without one the other
tensors mean nothing. So a checkpoint's names do not depend on when it was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.optimizer.factory import Recipe
from ascend_parallel.training.optimizer.targets import Owned

MASTER = "master"
STEPPED = "stepped"


def pieces(owned: Sequence[Owned], optimizer: torch.optim.Optimizer, recipe: Recipe) -> dict[str, TensorShard]:
    """Return the state of each box, and its master weights."""
    found: dict[str, TensorShard] = {}
    for one in owned:
        state = optimizer.state.get(one.inner)
        found |= _pieces(one, state or _made(one, recipe), bool(state))
    return found


def empty_pieces(owned: Sequence[Owned], recipe: Recipe) -> dict[str, TensorShard]:
    """Return pieces of the same names and shapes, in memory of their own; their values are to be overwritten."""
    found: dict[str, TensorShard] = {}
    for one in owned:
        found |= _pieces(one, _made(one, recipe), False)
    return {name: TensorShard(piece.local.clone(), piece.shape, piece.offsets) for name, piece in found.items()}


@torch.no_grad()
def load_pieces(
    owned: Sequence[Owned], optimizer: torch.optim.Optimizer, recipe: Recipe, given: Mapping[str, TensorShard]
) -> None:
    """Take the state of each box. Nothing is taken unless all is there."""
    expected: dict[str, TensorShard] = {}
    for one in owned:
        expected |= _pieces(one, _made(one, recipe), False)
    for what, names in (("missing", set(expected) - set(given)), ("of another rank", set(given) - set(expected))):
        if names:
            raise ValueError(f"{_first(names)} is {what} among the pieces given: fill those of empty_pieces()")
    for name, piece in expected.items():
        _check(name, given[name], piece)
    for one in owned:
        one.refresh()
        state = _made(one, recipe)
        if state and bool(given[f"{one.target.name}.{STEPPED}"].local):
            optimizer.state[one.inner] = {key: _value(one, key, value, given) for key, value in state.items()}
        elif state:
            optimizer.state.pop(one.inner, None)
        if one.is_master:
            one.inner.copy_(given[f"{one.target.name}.{MASTER}"].local)


def _made(one: Owned, recipe: Recipe) -> dict[str, Any]:
    _, _, state = recipe.tried(recipe.group_of(one.target.name), one.inner)
    return state


def _value(one: Owned, key: str, value: Any, given: Mapping[str, TensorShard]) -> Any:
    if not _is_kept(value):
        return value
    local = given[f"{one.target.name}.{key}"].local
    return local.to(value.dtype, copy=True) if isinstance(value, torch.Tensor) else type(value)(local.item())


def _is_kept(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, bool, int, float))


def _pieces(one: Owned, state: Mapping[str, Any], stepped: bool) -> dict[str, TensorShard]:
    return {f"{one.target.name}.{key}": piece for key, piece in _of_keys(one, state, stepped)}


def _of_keys(one: Owned, state: Mapping[str, Any], stepped: bool) -> Iterator[tuple[str, TensorShard]]:
    for key, value in state.items():
        if _is_kept(value):
            yield key, _piece(one, value if isinstance(value, torch.Tensor) else _number(value))
    if state:
        yield STEPPED, _piece(one, _number(stepped))
    if one.is_master:
        yield MASTER, _piece(one, one.inner.detach())


def _number(value: float) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def _piece(one: Owned, value: torch.Tensor) -> TensorShard:
    """Return a tensor as a box: of the parameter's coordinates if it has an entry for each element."""
    if value.shape == one.inner.shape:
        return TensorShard(value, one.target.piece.shape, one.offsets)
    return TensorShard(value, tuple(value.shape), (0,) * value.ndim)


def _check(name: str, given: TensorShard, expected: TensorShard) -> None:
    place = (tuple(given.local.shape), tuple(given.shape), tuple(given.offsets))
    wanted = (tuple(expected.local.shape), tuple(expected.shape), tuple(expected.offsets))
    if place != wanted:
        raise ValueError(
            f"{name} is {list(place[0])} at {list(place[2])} of {list(place[1])}; this rank has {list(wanted[0])} at "
            f"{list(wanted[2])} of {list(wanted[1])}"
        )


def _first(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")
