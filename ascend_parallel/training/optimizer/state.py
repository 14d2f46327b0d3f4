"""Convert the optimizer's state to `TensorShard`s of whole parameters, so that any layout can save and load it.

A parameter's state has the same names before and after its first gradient: `STEPPED` tells whether it came.
Before, the other tensors mean nothing. So a checkpoint's names do not depend on the step at which it was saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.text import some_of
from ascend_parallel.training.optimizer.factory import OptimizerFactory
from ascend_parallel.training.optimizer.targets import OwnedShard

MASTER = "master"
STEPPED = "stepped"


def tensor_shards(
    owned_shards: Sequence[OwnedShard], optimizer: torch.optim.Optimizer, factory: OptimizerFactory
) -> dict[str, TensorShard]:
    """Return the state and the master weights of each owned shard."""
    found: dict[str, TensorShard] = {}
    for owned in owned_shards:
        state = optimizer.state.get(owned.inner)
        found |= _named_shards(owned, state or _initial_state(owned, factory), bool(state))
    return found


def empty_tensor_shards(owned_shards: Sequence[OwnedShard], factory: OptimizerFactory) -> dict[str, TensorShard]:
    """Return shards of the same names and shapes in new memory; their values are to be overwritten."""
    shards = _initial_shards(owned_shards, factory).items()
    return {name: TensorShard(shard.local.clone(), shard.shape, shard.offsets) for name, shard in shards}


@torch.no_grad()
def load_tensor_shards(
    owned_shards: Sequence[OwnedShard],
    optimizer: torch.optim.Optimizer,
    factory: OptimizerFactory,
    loaded: Mapping[str, TensorShard],
) -> None:
    """Load the state of each owned shard. Raises `ValueError` before any change unless `loaded` has exactly these."""
    expected = _initial_shards(owned_shards, factory)
    for fault, names in (("missing", set(expected) - set(loaded)), ("of another rank", set(loaded) - set(expected))):
        if names:
            raise ValueError(
                f"{some_of(sorted(names), 10)} is {fault} among the shards given: fill those of empty_tensor_shards()"
            )
    for name, shard in expected.items():
        _check(name, loaded[name], shard)
    for owned in owned_shards:
        owned.refresh()
        state = _initial_state(owned, factory)
        if state and bool(loaded[f"{owned.target.name}.{STEPPED}"].local):
            optimizer.state[owned.inner] = {key: _value(owned, key, value, loaded) for key, value in state.items()}
        elif state:
            optimizer.state.pop(owned.inner, None)
        if owned.is_master:
            owned.inner.copy_(loaded[f"{owned.target.name}.{MASTER}"].local)


def settings_of_groups(
    groups: Sequence[Sequence[str]], saved_groups: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return, for each group of names, the hyperparameters that these parameters were saved with.

    A group without parameters takes those of its place.
    """
    by_name = {name: settings for names, settings in zip(saved_groups, saved, strict=True) for name in names}
    found = []
    for place, names in enumerate(groups):
        known = [by_name[name] for name in names if name in by_name] or (
            [] if names else list(saved[place : place + 1])
        )
        if names and not known:
            raise ValueError(
                f"group {place} of the optimizer ({some_of(names, 3)}) has no parameter of the saved state"
            )
        differing = [key for settings in known for key in settings if settings[key] != known[0].get(key)]
        if differing:
            raise ValueError(
                f"group {place} of the optimizer ({some_of(names, 3)}) joins parameters that were saved with different "
                f"{differing[0]}: make the groups as they were saved"
            )
        found.append(known[0] if known else {})
    return found


def _initial_shards(owned_shards: Sequence[OwnedShard], factory: OptimizerFactory) -> dict[str, TensorShard]:
    found: dict[str, TensorShard] = {}
    for owned in owned_shards:
        found |= _named_shards(owned, _initial_state(owned, factory), False)
    return found


def _initial_state(owned: OwnedShard, factory: OptimizerFactory) -> dict[str, Any]:
    return factory.state_of_zeros(factory.group_of(owned.target.name), owned.inner)


def _value(owned: OwnedShard, key: str, value: Any, loaded: Mapping[str, TensorShard]) -> Any:
    if not _is_kept(value):
        return value
    local = loaded[f"{owned.target.name}.{key}"].local
    return local.to(value.dtype, copy=True) if isinstance(value, torch.Tensor) else type(value)(local.item())


def _is_kept(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, bool, int, float))


def _named_shards(owned: OwnedShard, state: Mapping[str, Any], stepped: bool) -> dict[str, TensorShard]:
    tensors = {
        key: value if isinstance(value, torch.Tensor) else _number(value)
        for key, value in state.items()
        if _is_kept(value)
    }
    tensors |= {STEPPED: _number(stepped)} if state else {}
    tensors |= {MASTER: owned.inner.detach()} if owned.is_master else {}
    return {f"{owned.target.name}.{key}": _shard(owned, tensor) for key, tensor in tensors.items()}


def _number(value: float) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def _shard(owned: OwnedShard, value: torch.Tensor) -> TensorShard:
    """Return a tensor as a shard: at the owned bounds of the parameter if it has the parameter's shape, else whole."""
    if value.shape == owned.inner.shape:
        return TensorShard(value, owned.target.shard.shape, owned.offsets)
    return TensorShard.whole(value)


def _check(name: str, loaded: TensorShard, expected: TensorShard) -> None:
    actual = (tuple(loaded.local.shape), tuple(loaded.shape), tuple(loaded.offsets))
    needed = (tuple(expected.local.shape), tuple(expected.shape), tuple(expected.offsets))
    if actual != needed:
        raise ValueError(
            f"{name} is {list(actual[0])} at {list(actual[2])} of {list(actual[1])}; "
            f"this rank has {list(needed[0])} at {list(needed[2])} of {list(needed[1])}"
        )
