"""The collectives of a training step: those of each micro-batch, and those that run once. Predicted, without processes.

They are read off what a rank runs: its compiled instructions, the buckets of its gradients, the optimizer's. A
collective that is overlapped with a matmul counts as one, whatever its chunks. Left out are the comparisons of ranks
before the first step, the sends between the stages of a pipeline, which `explain` tells apart, and the numbers of rows
that ranks tell each other before experts exchange these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch

from ascend_parallel.overlap.layer_shape import COLUMN
from ascend_parallel.process_groups.collectives import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER
from ascend_parallel.sharding.bucketing import form_buckets
from ascend_parallel.sharding.graph import PARAMETER, Node, Value
from ascend_parallel.sharding.layout import REPLICATE, Shape, local_shape, with_placement
from ascend_parallel.sharding.redistribute.costs import sent
from ascend_parallel.sharding.redistribute.edges import DifferentiableRedistribution
from ascend_parallel.sharding.redistribute.shortest_path import Redistribution
from ascend_parallel.sharding.runtime.activation_memory import autograd_saves
from ascend_parallel.sharding.runtime.compiler import compile_plan
from ascend_parallel.sharding.runtime.compute_instructions import Gather, RecomputeBlock, Run, RunKernel
from ascend_parallel.sharding.runtime.gradient_plan import SummedGradient, buckets
from ascend_parallel.sharding.runtime.instructions import Program, Redistribute, Start
from ascend_parallel.sharding.runtime.rank_plan import RankPlan
from ascend_parallel.text import size_of
from ascend_parallel.training.optimizer.partition import partition
from ascend_parallel.training.strategy import Strategy

# Bytes of a norm that ranks exchange (`optimizer/shares.py`).
NORM_BYTES = 8


@dataclass(frozen=True)
class Collectives:
    """Collectives of a rank by kind, the bytes that it sends in them, and their predicted seconds, as if nothing hid.

    `a + b` are both, `3 * a` the same three times.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    nbytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Collectives) -> Collectives:
        """Return both together."""
        counts = Counter(self.counts) + Counter(other.counts)
        return Collectives(dict(counts), self.nbytes + other.nbytes, self.seconds + other.seconds)

    def __rmul__(self, times: int) -> Collectives:
        """Return the same so many times."""
        counts = {kind: times * count for kind, count in self.counts.items()}
        return Collectives(counts, times * self.nbytes, times * self.seconds)


@dataclass(frozen=True)
class StepCollectives:
    """What a rank runs in each micro-batch, and once in a step; a step has so many `micro_batches`."""

    micro_batch: Collectives
    once: Collectives
    micro_batches: int

    @property
    def total(self) -> Collectives:
        """Those of a step."""
        return self.micro_batches * self.micro_batch + self.once

    def __add__(self, other: StepCollectives) -> StepCollectives:
        """Return those of two parts of a rank's model, such as two stages."""
        assert self.micro_batches == other.micro_batches
        return replace(self, micro_batch=self.micro_batch + other.micro_batch, once=self.once + other.once)

    def rows(self) -> list[tuple[str, Collectives]]:
        """Return the rows of the table, in words: of a micro-batch, once in a step, of the step."""
        step = f"a step of {self.micro_batches} micro-batches" if self.micro_batches > 1 else "a step"
        return [("each micro-batch", self.micro_batch), ("once in a step", self.once), (step, self.total)]

    def table(self) -> list[tuple[str, ...]]:
        """Return the table's cells, heads first: a column for each kind, the bytes that a rank sends, milliseconds."""
        kinds = sorted(self.total.counts)
        cells = [("collectives", *kinds, "sent by a rank", "ms")]
        for name, of in self.rows():
            counts = (str(of.counts.get(kind, 0)) for kind in kinds)
            cells.append((name, *counts, size_of(of.nbytes), f"{1e3 * of.seconds:.3f}"))
        return cells

    def lines(self) -> Iterator[str]:
        """Yield the table as lines of text."""
        cells = self.table()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for first, *others in cells:
            padded = zip(others, widths[1:], strict=True)
            yield first.ljust(widths[0]) + "".join(f"  {cell:>{width}}" for cell, width in padded)

    def as_dict(self) -> dict[str, dict[str, object]]:
        """Return plain values for JSON: counts, bytes and seconds."""
        names = ("micro_batch", "once", "step")
        return {
            name: {"counts": dict(of.counts), "bytes": of.nbytes, "seconds": of.seconds}
            for name, (_, of) in zip(names, self.rows(), strict=True)
        }


def step_collectives(strategy: Strategy, rank_plan: RankPlan) -> StepCollectives:
    """Return the collectives of a rank's part of a model under a strategy."""
    counting = _Counting(strategy, rank_plan)
    return StepCollectives(_all(counting.micro_batch()), _all(counting.once()), strategy.backwards)


def _all(parts: Iterable[Collectives]) -> Collectives:
    return sum(parts, Collectives())


class _Counting:
    """Counts the collectives of a rank's plan."""

    def __init__(self, strategy: Strategy, rank_plan: RankPlan) -> None:
        self._strategy, self._rank_plan, self._plan = strategy, rank_plan, rank_plan.plan
        self._bucket_bytes = strategy.comm_fusion.bucket_bytes
        dim = self._plan.mesh.dim(strategy.sharding.dim) if strategy.sharding.zero_stage else -1
        # The mesh dimension of the replicas that share updates, if there are several.
        self._dim = dim if dim >= 0 and self._plan.mesh.shape[dim] > 1 else None
        pipeline = strategy.pipeline.degree > 1
        self._sums_later = pipeline or not strategy.overlap.gradients
        self._scatters = strategy.sharding.zero_stage == 2
        self._scatters_each = self._scatters and not pipeline

    def micro_batch(self) -> Iterator[Collectives]:
        """Yield what a forward and its backward run."""
        yield from self._of_program(compile_plan(self._rank_plan, self._plan.graph, gradients=True))
        if self._scatters_each:
            # Sums over the replicas wait for the optimizer alone: it reduce-scatters them in each backward.
            waiting = [each for each in self._rank_plan.summed if self._dim in (*each.dims, *each.full_dims)]
            others = [each for each in self._rank_plan.summed if each not in waiting]
            for each in waiting:
                yield from self._sum([each], [dim for dim in each.dims if dim != self._dim])
            yield from self._bucket_sums(others)
            yield from self._reduce_scatters()

    def once(self) -> Iterator[Collectives]:
        """Yield what a step runs once: sums of gradients, their norm, gathers of updated parameters."""
        if self._scatters and not self._scatters_each:
            held = [replace(each, dims=tuple(dim for dim in each.dims if dim != self._dim)) for each in self._held]
            yield from self._bucket_sums([each for each in held if each.dims])
            yield from self._reduce_scatters()
        elif self._scatters:
            pass
        elif self._sums_later:
            yield from self._bucket_sums(self._held)
        else:
            yield from self._bucket_sums(self._rank_plan.summed)
            # What earlier backwards have left is summed apart if every rank of a dimension has the full gradient.
            left = self._held if self._strategy.backwards > 1 else ()
            yield from self._bucket_sums(sorted((each for each in left if each.full_dims), key=lambda each: each.name))
        if self._scatters and self._dim is not None:  # which gradients there are: two flags for each
            yield self._one(ALL_REDUCE, self._dim, 2 * len(self._replicated))
        if self._strategy.max_norm is not None or self._strategy.amp.dtype == "float16":
            yield Collectives({ALL_GATHER: 1}, (self._strategy.ranks - 1) * NORM_BYTES)
        if self._dim is not None:
            yield from self._gathers(self._dim)

    def _of_program(self, program: Program, *, again: bool = False, kept: bool = False) -> Iterator[Collectives]:
        """Yield the collectives of instructions; again: of their second run alone, in backward.

        kept: the first run kept the results of collectives, but for gathered weights.
        """
        for instruction in program.instructions:
            match instruction:
                case RecomputeBlock():
                    yield from self._of_program(instruction.body)
                    yield from self._of_program(instruction.body, again=True, kept=instruction.keep_collectives)
                case Redistribute() if kept and instruction.keep:
                    pass
                case RunKernel() if kept:
                    pass
                case Redistribute():
                    yield from self._redistributed(program, instruction, [instruction.redistribution], again)
                case Start():
                    yield from self._redistributed(program, instruction, instruction.redistributions, again)
                case Run():
                    yield from self._inside(instruction, again, kept)
                case RunKernel():
                    yield from self._kernel(instruction, again)

    def _redistributed(
        self,
        program: Program,
        instruction: Redistribute | Start,
        redistributions: Sequence[DifferentiableRedistribution],
        again: bool,
    ) -> Iterator[Collectives]:
        """Yield the collectives of redistributions that run as one, forward and backward."""
        yield _together([each.forward for each in redistributions])
        if program.registers[instruction.writes[0]].value in self._plan.differentiable and not again:
            yield _together([each.backward for each in redistributions])

    def _inside(self, instruction: Run, again: bool, kept: bool) -> Iterator[Collectives]:
        """Yield the collectives that an operator runs itself, and the gathers of its weights in backward.

        A second run repeats those of its forward: sums if their results were not kept, exchanges of rows in any case.
        """
        sums_kept = again and (kept or instruction.keep) and instruction.find_exchange_ranks is None
        for step in () if sums_kept else self._plan.op_collectives.get(instruction.node.name, ()):
            if not (again and step.backward):
                yield Collectives({step.kind: 1}, step.nbytes, step.seconds)
        if not again:
            yield from self._gathered_again(instruction.node, instruction.gathers)

    def _gathered_again(self, node: Node, gathers: Sequence[Gather]) -> Iterator[Collectives]:
        """Yield the gathers of weights in backward: of those that the operator's backward reads."""
        assert node.call is not None
        saves = autograd_saves(node.call, [value in self._plan.differentiable for value in node.inputs])
        for gather in gathers:
            if saves is None or gather.place in saves.inputs:
                yield _together([gather.redistribution.forward])

    def _kernel(self, instruction: RunKernel, again: bool) -> Iterator[Collectives]:
        """Yield the collectives of a matmul that overlaps with them, or of several that run as one."""
        kernel, fused_plan = instruction.kernel.fused, self._rank_plan.fused_plan
        column, rows = kernel.kind == COLUMN, kernel.row_dim is not None
        node = self._plan.graph.nodes[kernel.nodes[0]]
        value = node.inputs[kernel.matmuls[0].x] if column else node.values[0]
        layout = fused_plan.inputs[node.name][kernel.matmuls[0].x] if column else fused_plan.layouts[value]
        whole = with_placement(layout, kernel.mesh_dim, REPLICATE)
        nbytes = self._plan.graph.meta(value).local_bytes(whole, self._plan.mesh.shape)
        inward, outward = ALL_GATHER if rows else None, REDUCE_SCATTER if rows else ALL_REDUCE
        ahead, back = (inward, outward) if column else (outward, inward)
        kinds = [ahead]
        if value in self._plan.differentiable and not again:
            kinds += [back, inward if column and instruction.kernel.settings.recompute_all_gather else None]
        for kind in kinds if self._plan.mesh.shape[kernel.mesh_dim] > 1 else ():
            if kind is not None:
                yield self._one(kind, kernel.mesh_dim, nbytes)
        for place, gather in () if again else instruction.gathers:
            yield from self._gathered_again(self._plan.graph.nodes[kernel.nodes[place]], [gather])

    @cached_property
    def _held(self) -> list[SummedGradient]:
        """The gradients as backwards without sums leave them: to be summed over each dimension that holds copies."""
        return [replace(each, dims=tuple(sorted((*each.dims, *each.full_dims)))) for each in self._rank_plan.summed]

    def _bucket_sums(self, gradients: Sequence[SummedGradient]) -> Iterator[Collectives]:
        """Yield the sums of gradients over ranks, in buckets (`GradientReducer`)."""
        for bucket in buckets(gradients, self._bucket_bytes):
            yield from self._sum(bucket.members, bucket.dims)

    def _sum(self, members: Sequence[SummedGradient], dims: Sequence[int]) -> Iterator[Collectives]:
        """Yield the sums of some gradients as one tensor, over one mesh dimension after the other."""
        width = self._strategy.gradient_dtype
        nbytes = sum(each.nbytes // each.dtype.itemsize * width(each.dtype).itemsize for each in members)
        for dim in dims:
            yield self._one(ALL_REDUCE, dim, nbytes)

    @cached_property
    def _replicated(self) -> list[tuple[Shape, torch.dtype]]:
        """A rank's parts of the parameters whose updates replicas share."""
        plan, dim = self._plan, self._dim
        found = []
        for node in plan.graph.of_kind(PARAMETER):
            value, layout = Value(node.name), plan.layouts[Value(node.name)]
            if dim is not None and value in plan.differentiable and layout[dim].kind != "shard":
                (meta,) = node.outputs
                found.append((local_shape(meta.shape, layout, plan.mesh.shape, self._rank_plan.coordinate), meta.dtype))
        return found

    def _reduce_scatters(self) -> Iterator[Collectives]:
        """Yield the reduce-scatters of ZeRO stage 2 (`GradientReduceScatter`)."""
        if self._dim is not None:
            for members in self._together(self._replicated[::-1]):
                width = [prod(shape) * self._strategy.gradient_dtype(dtype).itemsize for shape, dtype in members]
                yield self._one(REDUCE_SCATTER, self._dim, sum(width))

    def _gathers(self, dim: int) -> Iterator[Collectives]:
        """Yield what gives replicas each other's updates (`gather_shards`): whole parameters are broadcast."""
        ranks, by = self._plan.mesh.shape[dim], self._strategy.sharding.partition_by
        partitions = partition([shape for shape, _ in self._replicated], ranks, by)
        owners = [[rank for rank, bounds in enumerate(one) if bounds is not None] for one in partitions]
        cut = [each for each, of in zip(self._replicated, owners, strict=True) if len(of) != 1]
        for kind, tensors in [(ALL_GATHER, cut)] + [
            (BROADCAST, [each for each, of in zip(self._replicated, owners, strict=True) if of == [rank]])
            for rank in range(ranks)
        ]:
            for members in self._together(tensors):
                yield self._one(kind, dim, sum(prod(shape) * dtype.itemsize for shape, dtype in members))

    def _together(self, tensors: Sequence[tuple[Shape, torch.dtype]]) -> Iterator[list[tuple[Shape, torch.dtype]]]:
        """Yield the tensors of each bucket of the optimizer (`bucket_indices`)."""
        runs = accumulate((one[1] != other[1] for one, other in pairwise(tensors)), initial=0)
        sized = zip(runs, (prod(shape) * dtype.itemsize for shape, dtype in tensors), strict=False)
        for indices in form_buckets(sized, self._bucket_bytes, self._bucket_bytes):
            yield [tensors[index] for index in indices]

    def _one(self, kind: str, dim: int, nbytes: float) -> Collectives:
        """Return one collective on a tensor of so many bytes in all; a broadcast is priced as a gather."""
        priced = ALL_GATHER if kind == BROADCAST else kind
        seconds = self._plan.costs.seconds(priced, nbytes, dim)
        return Collectives({kind: 1}, sent(priced, nbytes, self._plan.mesh.shape[dim]), seconds)


def _together(redistributions: Sequence[Redistribution]) -> Collectives:
    """Return the collectives of redistributions that run as one: those of the first, with the bytes of all."""
    counts = Counter(step.kind for step in redistributions[0].steps if step.nbytes)
    steps = [step for each in redistributions for step in each.steps]
    return Collectives(dict(counts), sum(step.nbytes for step in steps), sum(step.seconds for step in steps))
