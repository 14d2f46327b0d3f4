"""What a training step asks of its batches: all like the first, and the same on the ranks of one replica."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ascend_parallel.consistency import DisagreementError, exchange
from ascend_parallel.sharding.graph import INPUT, Value
from ascend_parallel.sharding.mesh import default_device
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.training.strategy import Strategy

# So many of the first batches are compared each.
FIRST = 8
# And then every so many-th is looked at, where nobody says otherwise.
EVERY = 100
# More ranks, and more different batches, are not listed in a message.
LISTED = 8
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def is_due(number: int, every: int) -> bool:
    """Tell whether the `number`-th batch is looked at: one of the first, or the `every`-th; 0: never."""
    return bool(every) and (number < FIRST or number % every == 0)


class BatchesLike:
    """Batches have the arguments, and where every rank gives the whole of them the shapes, of the first."""

    def __init__(self, batch: Sequence[Any], whole: bool) -> None:
        """Take the batch that the step is made with."""
        shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in batch]
        self._shapes, self._whole = shapes, whole

    def problem(self, batch: Sequence[Any]) -> str:
        """Say what is wrong with a batch of another number of arguments, or of other shapes; "" if nothing is."""
        if len(batch) != len(self._shapes):
            return f"{len(batch)} arguments were given; the batch that the step was made with has {len(self._shapes)}"
        for number, (one, shape) in enumerate(zip(batch, self._shapes, strict=True)):
            if self._whole and isinstance(one, torch.Tensor) and shape is not None and tuple(one.shape) != shape:
                return (
                    f"argument {number} of the batch is {list(one.shape)}; the step was made with {list(shape)}, and "
                    "all batches are of one shape: leave out a smaller last one (drop_last=True of a DataLoader)"
                )
        return ""


@dataclass(frozen=True)
class _Part:
    """Tensors of a batch that are cut along the same mesh dimensions.

    dims
        These dimensions; () for what all ranks are given whole.
    tensors
        Their indices among the batch's tensors; None: all of the batch, also what is no tensor.
    replicas
        Groups of ranks, each of which has to be given the same.
    """

    dims: tuple[str, ...]
    tensors: frozenset[int] | None
    replicas: tuple[tuple[int, ...], ...]


class SameBatches:
    """Compares a digest of every rank's batch: of each of the first 8 batches, then of every N-th."""

    def __init__(self, strategy: Strategy, plan: ShardingPlan | None, local_batches: bool, every: int) -> None:
        """Say who has to be given the same.

        plan
            Of a planned model; None in mode "hybrid", where the ranks at one place along the data dimension have to.
        local_batches
            Every rank gives its part of the batch; those with the same part have to. Else all ranks have to.
        every
            N; 0: nothing is compared.
        """
        self._strategy, self._every, self._seen = strategy, every, 0
        if plan is None:
            dims = () if strategy.data_dim is None else (strategy.data_dim,)
            self._parts = [_Part(dims, None, _replicas(strategy, dims))]
        elif local_batches:
            self._parts = _local_parts(strategy, plan)
        else:
            self._parts = [_Part((), None, _replicas(strategy, ()))]

    def difference(self, batch: Sequence[Any], problem: str) -> str:
        """Say, alike on all ranks, how this batch differs on ranks that have to have the same; "" if it does not.

        problem
            What this rank alone has found wrong with it; the others are told.

        Every rank calls it alike. Raises `DisagreementError` if a rank does not come to say what it was given.
        """
        number, self._seen = self._seen, self._seen + 1
        if (
            not is_due(number, self._every) or dist.get_backend() == "fake"
        ):  # ranks that do not exist have nothing to say
            return ""
        leaves = list(_leaves(batch))
        rows = _gathered([bool(problem), *(_digest(leaves, part.tensors) for part in self._parts)])
        differing = [
            (part, ranks)
            for place, part in enumerate(self._parts, 1)
            for ranks in part.replicas
            if len({rows[rank][place] for rank in ranks}) > 1
        ]
        if not differing and not any(row[0] for row in rows):
            return ""
        assert dist.group.WORLD is not None
        mine = {"problem": problem, "batch": {name: f"{_told(one)} ({_hex(one)})" for name, one in leaves}}
        told = exchange(dist.group.WORLD, "the training step", mine, DisagreementError)
        for rank, one in told.items():
            if one["problem"]:
                return f"rank {rank}: {one['problem']}"
        return self._said(*differing[0], {rank: one["batch"] for rank, one in told.items()}, number)

    def _said(self, part: _Part, ranks: Sequence[int], told: Mapping[int, Mapping[str, str]], number: int) -> str:
        """Name the first argument in which `ranks` differ, who has what, and what to do."""
        names = dict.fromkeys(name for rank in ranks for name in told[rank])
        name = next(one for one in names if len({told[rank].get(one) for rank in ranks}) > 1)
        holders: dict[str | None, list[int]] = {}
        for rank in ranks:
            holders.setdefault(told[rank].get(name), []).append(rank)
        shown = list(holders.items())[:LISTED]
        which = "; ".join(f"{value or 'not there'} on {_ranks(some)}" for value, some in shown)
        more = f"; and {len(holders) - LISTED} others" if len(holders) > LISTED else ""
        return (
            f"ranks call the training step differently: {name} of the batch is {which}{more} (batch {number} of this "
            f"run, counted from 0). {self._cure(part, ranks)}"
        )

    def _cure(self, part: _Part, ranks: Sequence[int]) -> str:
        strategy = self._strategy
        if not part.dims:
            cure = "Give every rank the whole batch, or train_step(..., local_batches=True) and each its part"
        else:
            cure = (
                f"{_ranks(ranks)} are one replica, at the same place along {', '.join(part.dims)}: give them the same"
            )
        if strategy.data_dim is not None:
            cure += (
                f"; of a DataLoader by DistributedSampler(dataset, num_replicas={strategy.mesh[strategy.data_dim]}, "
                f"rank=strategy.data_rank(rank)), which is {strategy.data_rank(ranks[0])} on rank {ranks[0]}, and not "
                "by the global rank"
            )
        return cure + ". check_batches=0 compares no batches"


def _replicas(strategy: Strategy, dims: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of all stages by their place along the mesh dimensions `dims`."""
    found: dict[tuple[int, ...], list[int]] = {}
    for mesh in strategy.meshes():
        for rank in mesh.process_ids:
            place = mesh.coordinate(rank)
            assert place is not None
            found.setdefault(tuple(place[mesh.dim(name)] for name in dims), []).append(rank)
    return tuple(tuple(sorted(ranks)) for ranks in found.values())


def _local_parts(strategy: Strategy, plan: ShardingPlan) -> list[_Part]:
    """Group a plan's inputs by the mesh dimensions along which they are cut."""
    names, by_dims = plan.mesh.dim_names, dict[tuple[str, ...], list[int]]()
    for index, node in enumerate(node for node in plan.graph.nodes.values() if node.kind == INPUT):
        layout = plan.layouts[Value(node.name)]
        dims = tuple(name for name, state in zip(names, layout, strict=True) if state.kind == "shard")
        by_dims.setdefault(dims, []).append(index)
    return [_Part(dims, frozenset(some), _replicas(strategy, dims)) for dims, some in by_dims.items()]


def _leaves(batch: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a batch, each with its name."""
    for number, one in enumerate(batch):
        found, _ = pytree.tree_flatten_with_path(dict(one) if isinstance(one, Mapping) else one)
        for path, leaf in found:
            if isinstance(leaf, (torch.Tensor, *PLAIN)):
                yield f"argument {number}{pytree.keystr(path)}", leaf


def _gathered(mine: Sequence[int]) -> list[list[int]]:
    """Return every rank's numbers, of which all have as many."""
    sent = torch.tensor(mine, dtype=torch.int64, device=default_device())
    found = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(found, sent)
    rows: list[list[int]] = torch.stack(found).tolist()
    return rows


def _digest(leaves: Sequence[tuple[str, Any]], chosen: frozenset[int] | None) -> int:
    """Return 64 bits of names, shapes, dtypes and contents; `chosen` counts tensors alone."""
    if chosen is not None:
        tensors = [leaf for leaf in leaves if isinstance(leaf[1], torch.Tensor)]
        leaves = [leaf for index, leaf in enumerate(tensors) if index in chosen]
    found = hashlib.blake2b(digest_size=8)
    for name, leaf in leaves:
        found.update(f"{name} {_told(leaf)} {_hex(leaf)};".encode())
    return int.from_bytes(found.digest(), "big", signed=True)


def _hex(leaf: Any) -> str:
    """Return what tells a tensor's bits, or a plain value, from others."""
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    plain = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(plain.data, digest_size=8).hexdigest()


def _told(leaf: Any) -> str:
    return f"{list(leaf.shape)} of {leaf.dtype}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _ranks(ranks: Sequence[int]) -> str:
    """Name ranks for a person."""
    shown = ", ".join(map(str, ranks[:LISTED])) + (f" and {len(ranks) - LISTED} others" if len(ranks) > LISTED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
