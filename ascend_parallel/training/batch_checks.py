"""Check a training step's batches: all have the shapes of the first, and the ranks of a replica get the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ascend_parallel.ops.pending import run_collective
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.sharding.graph import Value
from ascend_parallel.sharding.mesh import ProcessMesh, default_device
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.text import some_of
from ascend_parallel.training.strategy import Strategy

# Each of the first batches is compared.
FIRST = 8
# Then every N-th batch, by default.
EVERY = 100
# A message lists at most so many ranks, and so many different batches.
LISTED = 8
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def is_due(number: int, every: int) -> bool:
    """Tell whether to check batch `number`: each of the first `FIRST`, then every `every`-th; 0: never."""
    return bool(every) and (number < FIRST or number % every == 0)


@dataclass(frozen=True)
class _Part:
    """Tensors of a batch that are cut along the same mesh dimensions.

    dims
        These dimensions; () if all ranks get the whole tensors.
    tensors
        The tensors' indices among the batch's tensors; None: the whole batch, also values that are no tensors.
    replicas
        Groups of ranks; the ranks of a group must get the same.
    """

    dims: tuple[str, ...]
    tensors: frozenset[int] | None
    replicas: tuple[tuple[int, ...], ...]


class BatchCheck:
    """Checks that each batch has the arguments and shapes of the first, and that the ranks of a replica get the same.

    Ranks compare digests: of each of the first 8 batches, then of every N-th batch.
    """

    def __init__(
        self,
        batch: Sequence[Any],
        strategy: Strategy,
        plans: Sequence[ShardingPlan],
        local_batches: bool,
        every: int,
    ) -> None:
        """Take the first batch, with which the step is made, and determine which ranks must get the same.

        plans
            The plan of the model on each mesh; () in mode "hybrid": ranks at the same place along the data dimension
            must.
        local_batches
            Every rank gives its part of the batch, of any shape: ranks with the same part must. False: all ranks must.
        every
            N; 0: nothing is compared.
        """
        self._shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in batch]
        self._whole = bool(plans) and not local_batches
        self._strategy, self._every, self._seen = strategy, every, 0
        meshes = strategy.meshes()
        if not plans:
            dims = () if strategy.data_dim is None else (strategy.data_dim,)
            self._parts = [_Part(dims, None, _replicas(meshes, dims))]
        elif local_batches:
            self._parts = _local_parts(meshes, plans)
        else:
            self._parts = [_Part((), None, _replicas(meshes, ()))]

    def error(self, batch: Sequence[Any]) -> Exception | None:
        """Return the error of a batch; every rank must call it. Raises `DisagreementError` if a rank does not."""
        problem = self._problem(batch)
        difference = self._difference(batch, problem)
        if problem:
            return ValueError(problem)
        return DisagreementError(difference) if difference else None

    def _problem(self, batch: Sequence[Any]) -> str:
        """Return an error message for another number of arguments or other shapes, "" if they match."""
        if len(batch) != len(self._shapes):
            return f"{len(batch)} arguments were given; the batch that the step was made with has {len(self._shapes)}"
        for number, (value, shape) in enumerate(zip(batch, self._shapes, strict=True)):
            if self._whole and isinstance(value, torch.Tensor) and shape is not None and tuple(value.shape) != shape:
                return (
                    f"argument {number} of the batch is {list(value.shape)}; the step was made with {list(shape)}, and "
                    "all batches are of one shape: leave out a smaller last batch (drop_last=True of a DataLoader)"
                )
        return ""

    def _difference(self, batch: Sequence[Any], problem: str) -> str:
        """Return a message, the same on all ranks, if the batch differs on ranks that must get the same, else "".

        problem
            This rank's own error message, "" without an error; it is returned on the other ranks too.
        """
        number, self._seen = self._seen, self._seen + 1
        if not is_due(number, self._every) or dist.get_backend() == "fake":  # fake ranks have no batches
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
        mine = {"problem": problem, "batch": {name: f"{_described(leaf)} ({_bits(leaf)})" for name, leaf in leaves}}
        messages = store_all_gather(dist.group.WORLD, "the training step", mine, DisagreementError)
        for rank, message in messages.items():
            if message["problem"]:
                return f"rank {rank}: {message['problem']}"
        return self._message(*differing[0], {rank: message["batch"] for rank, message in messages.items()}, number)

    def _message(self, part: _Part, ranks: Sequence[int], batches: Mapping[int, Mapping[str, str]], number: int) -> str:
        """Return a message that names the first differing argument, the ranks' values, and the remedy."""
        names = dict.fromkeys(name for rank in ranks for name in batches[rank])
        differs = next(name for name in names if len({batches[rank].get(name) for rank in ranks}) > 1)
        holders: dict[str | None, list[int]] = {}
        for rank in ranks:
            holders.setdefault(batches[rank].get(differs), []).append(rank)
        shown = list(holders.items())[:LISTED]
        which = "; ".join(f"{value or 'not there'} on {_ranks(some)}" for value, some in shown)
        more = f"; and {len(holders) - LISTED} others" if len(holders) > LISTED else ""
        return (
            f"ranks call the training step differently: {differs} of the batch is {which}{more} (batch {number} of "
            f"this run, counted from 0). {self._cure(part, ranks)}"
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


def _replicas(meshes: Sequence[ProcessMesh], dims: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of these meshes, grouped by their place along the mesh dimensions `dims`."""
    ranks_by_place: dict[tuple[int, ...], list[int]] = {}
    for mesh in meshes:
        for rank in mesh.process_ids:
            place = mesh.coordinate(rank)
            assert place is not None
            ranks_by_place.setdefault(tuple(place[mesh.dim(name)] for name in dims), []).append(rank)
    return tuple(tuple(sorted(ranks)) for ranks in ranks_by_place.values())


def _local_parts(meshes: Sequence[ProcessMesh], plans: Sequence[ShardingPlan]) -> list[_Part]:
    """Return the inputs of the plans of these meshes, grouped by the mesh dimensions along which they are cut.

    Meshes that cut an input along the same dimensions, into as many parts, must get the same parts.
    """
    by_cut: dict[tuple[tuple[str, int], ...], dict[int, list[ProcessMesh]]] = {}
    for mesh, plan in zip(meshes, plans, strict=True):
        for index, node in enumerate(plan.graph.inputs):
            layout = plan.layouts[Value(node.name)]
            dims = zip(mesh.dim_names, mesh.shape, layout, strict=True)
            cut = tuple((name, size) for name, size, placement in dims if placement.kind == "shard" and size > 1)
            by_cut.setdefault(cut, {}).setdefault(index, []).append(mesh)
    parts: list[_Part] = []
    for cut, held in by_cut.items():
        by_meshes: dict[tuple[ProcessMesh, ...], list[int]] = {}
        for index, some in held.items():
            by_meshes.setdefault(tuple(some), []).append(index)
        names = tuple(name for name, _ in cut)
        parts += [_Part(names, frozenset(indices), _replicas(some, names)) for some, indices in by_meshes.items()]
    return parts


def _leaves(batch: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a batch, each with its name."""
    for number, argument in enumerate(batch):
        leaves, _ = pytree.tree_flatten_with_path(dict(argument) if isinstance(argument, Mapping) else argument)
        for path, leaf in leaves:
            if isinstance(leaf, (torch.Tensor, *PLAIN)):
                yield f"argument {number}{pytree.keystr(path)}", leaf


def _gathered(mine: Sequence[int]) -> list[list[int]]:
    """Return every rank's numbers; all ranks give equally many."""
    sent = torch.tensor(mine, dtype=torch.int64, device=default_device())
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    run_collective("the comparison of batches", dist.all_gather, received, sent, group=None)
    rows: list[list[int]] = torch.stack(received).tolist()
    return rows


def _digest(leaves: Sequence[tuple[str, Any]], chosen: frozenset[int] | None) -> int:
    """Return a 64-bit digest of names, shapes, dtypes and contents; `chosen` are indices among the tensors."""
    if chosen is not None:
        tensors = [leaf for leaf in leaves if isinstance(leaf[1], torch.Tensor)]
        leaves = [leaf for index, leaf in enumerate(tensors) if index in chosen]
    digest = hashlib.blake2b(digest_size=8)
    for name, leaf in leaves:
        digest.update(f"{name} {_described(leaf)} {_bits(leaf)};".encode())
    return int.from_bytes(digest.digest(), "big", signed=True)


def _bits(leaf: Any) -> str:
    """Return a digest of a tensor's bits, or the text of a plain value."""
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    plain = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(plain.data, digest_size=8).hexdigest()


def _described(leaf: Any) -> str:
    return f"{list(leaf.shape)} of {leaf.dtype}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text."""
    return f"rank{'s' if len(ranks) > 1 else ''} {some_of(ranks, LISTED, 'others')}"
