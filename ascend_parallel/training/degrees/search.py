"""Search all degrees for the least step time within a memory limit, best first by a lower bound of the time."""

from __future__ import annotations

import copy
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import nn

from ascend_parallel.settings import current_settings
from ascend_parallel.sharding.graph import CALL, PARAMETER, Graph
from ascend_parallel.sharding.planner.annotate import annotated
from ascend_parallel.sharding.planner.operator_cost import multiply_adds
from ascend_parallel.sharding.planner.propagate import MemoryLimitError
from ascend_parallel.sharding.rules import experts
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.text import size_of
from ascend_parallel.training.degrees.evaluation import Evaluation, StepBreakdown
from ascend_parallel.training.degrees.folding import FoldedGraph, fold
from ascend_parallel.training.degrees.planning import Planner
from ascend_parallel.training.degrees.rescaling import GraphFamily
from ascend_parallel.training.degrees.space import (
    Degrees,
    choices,
    expert_degrees,
    meshes,
    sequence_degrees,
    sharing_given,
    sizes,
)
from ascend_parallel.training.degrees.work import NONE
from ascend_parallel.training.loss import Loss, mean_loss, trace_with_loss
from ascend_parallel.training.options import AmpOptions, StrategyOptionError
from ascend_parallel.training.pipeline.stage_assignment import MARK as STAGE
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import DEFAULT_HARDWARE, find_hardware
from ascend_parallel.tuning.step_time.rank_bytes import RankBytes
from ascend_parallel.tuning.step_time.throughput import Throughput

MOST_RANKS, MOST_BYTES = 1 << 17, 1e18


def check_job(ranks: int, memory: float, hardware: str) -> None:
    """Raise for a number of ranks or bytes that is not allowed, and for a hardware that is not known."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
        raise StrategyOptionError(f"ranks={ranks!r}: give a whole number from 1 to {MOST_RANKS}")
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 < memory <= MOST_BYTES:
        raise StrategyOptionError(f"memory={memory!r}: give the bytes of a rank, such as 60e9")
    find_hardware(hardware)


def check_model(model: nn.Module) -> None:
    """Refuse a model that says itself how it is placed."""
    strategies = annotated(model)
    placed = [path for path, module in model.named_modules() if hasattr(module, STAGE)]
    for what, paths in (("a strategy", list(strategies)), ("a pipeline stage", placed)):
        if paths:
            raise StrategyOptionError(
                f"{paths[0] or 'the model'} has {what}: the search chooses these, leave them out of the model"
            )
    if Recompute.of(model).modules:
        raise StrategyOptionError(
            f"{Recompute.of(model).modules[0] or 'the model'} is marked for recompute: the search chooses this, leave "
            "it out of the model"
        )


def unmarked(graph: Graph) -> Graph:
    """Return the graph; raise if a function in it has a strategy."""
    for node in graph.nodes.values():
        if node.mark is not None:
            raise StrategyOptionError(f"{node.mark} in {node.module or 'the model'}: the search chooses all strategies")
    return graph


def batch_rows(batch: Sequence[Any]) -> int:
    """Return the rows of a batch."""
    if isinstance(batch, torch.Tensor) or not isinstance(batch, Sequence):
        raise TypeError(f"batch is a {type(batch).__name__}: give the loss's arguments as a tuple, such as (x,)")
    shapes = [list(value.shape) for value in batch if isinstance(value, torch.Tensor)]
    rows = {shape[0] if shape else 0 for shape in shapes}
    if len(rows) != 1 or 0 in rows:
        raise StrategyOptionError(
            f"batch has tensors of {shapes}: their first dimension is the batch, and has to be the same, 1 or more"
        )
    return rows.pop()


def length_of(batch: Sequence[Any]) -> int:
    """Return the tokens of a sequence: the second dimension, if all tensors of the batch have the same; else 0."""
    lengths = {tuple(value.shape[1:2]) for value in batch if isinstance(value, torch.Tensor)}
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else 0


def tokens_of(batch: Sequence[Any]) -> int:
    """Return the tokens of a batch: the elements of its first tensor of whole numbers, [rows, length]; 0: none."""
    tensors = [value for value in batch if isinstance(value, torch.Tensor) and value.ndim == 2]
    return next((value.numel() for value in tensors if not value.is_floating_point()), 0)


def itemsize_of(graph: Graph, amp: str | None) -> int:
    """Return the bytes of an element of the matmuls' operands: of mixed precision, else of most of the parameters."""
    if amp is not None:
        dtype: torch.dtype = getattr(torch, amp)
        return dtype.itemsize
    held = Counter[int]()
    for node in graph.of_kind(PARAMETER):
        held[node.outputs[0].dtype.itemsize] += int(node.outputs[0].nbytes)
    return held.most_common(1)[0][0] if held else torch.float32.itemsize


def _multiply_adds(folded: FoldedGraph) -> float:
    calls = [node.call for node in folded.graph.of_kind(CALL)]
    each = [0.0 if call is None else multiply_adds(call) for call in calls]
    return float(sum(each[place] for place in folded.sequence))


def rows_part(value: Any, rows: int, dtype: str | None) -> Any:
    """Return the first rows of a tensor of the batch, in the dtype of mixed precision."""
    if not isinstance(value, torch.Tensor):
        return value
    part = value.detach()[:rows]
    return part if dtype is None or not part.is_floating_point() else part.to(getattr(torch, dtype))


# Results that a search returns.
BEST = 10
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ModelByBatchSize:
    """A model to search for: its graph by rows of a micro-batch.

    rows
        Rows of the whole batch.
    trace
        Returns the folded graph of a micro-batch of so many rows.
    amp
        The dtype of mixed precision; None: the model's own dtype.
    masters
        Whether the optimizer keeps fp32 weights.
    length
        The tokens of a sequence, the batch's second dimension; 0: none.
    tokens
        The tokens of a row; 0: it has none.
    """

    rows: int
    trace: Callable[[int], FoldedGraph]
    amp: str | None
    masters: bool
    length: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Candidate:
    """Degrees with their predicted time and memory.

    gathers_weights
        Whether the tensor-parallel ranks gather weights rather than activations, as ZeRO-3 does.
    whole_weights
        Whether the tensor-parallel ranks hold most weights whole, as data or context parallel ranks do.
    recomputed
        The patterns of the layers that are recomputed, if not all are.
    """

    degrees: Degrees
    breakdown: StepBreakdown
    memory: RankBytes
    gathers_weights: bool = False
    whole_weights: bool = False
    recomputed: tuple[str, ...] = ()

    @property
    def tensor(self) -> str:
        """The tensor-parallel ranks, with what they really run if it is not tensor parallelism."""
        like = " (ZeRO-3-like)" if self.gathers_weights else " (weights whole)" if self.whole_weights else ""
        return f"{self.degrees.tp}{like}"

    def __str__(self) -> str:
        """Return the degrees in words, with what runs."""
        return str(self.degrees).replace(f" x tp {self.degrees.tp} x", f" x tp {self.tensor} x", 1)

    @property
    def seconds(self) -> float:
        """The step's seconds."""
        return self.breakdown.total


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    best
        The candidates of least time within the limit, the fastest first, at most ten.
    too_large
        The candidate with the least lower bound of its time among those that were planned and do not fit; None: all
        that were looked at fit.
    macs, tokens
        The multiply-adds of a row's forward, and its tokens; 0: it has none.
    itemsize
        Bytes of an element of the matmuls' operands.
    considered, timed
        The number of candidates, and of those whose schedule was timed; a lower bound excluded the others.
    """

    ranks: int
    rows: int
    limit: float
    hardware: str
    amp: str | None
    layers: tuple[str, ...]
    macs: float
    tokens: int
    itemsize: int
    best: tuple[Candidate, ...]
    too_large: Candidate | None
    considered: int
    timed: int

    def throughput(self, candidate: Candidate) -> Throughput:
        """Return tokens a second and card of a candidate, or rows of a batch that has no tokens, and the MFU."""
        return Throughput(
            seconds=candidate.seconds,
            cards=self.ranks,
            work=self.rows * (self.tokens or 1),
            macs=self.rows * self.macs,
            peak=CostModel(find_hardware(self.hardware)).peak(self.itemsize),
            unit="tokens" if self.tokens else "rows",
        )

    def tables(self, candidate: Candidate | None = None) -> dict[str, Any]:
        """Return the tables of the strategy of a candidate, by default of the best."""
        candidate = candidate or self.best[0]
        layers = candidate.recomputed if candidate.degrees.recompute_layers else self.layers
        return candidate.degrees.tables(layers, self.hardware, self.amp)


def search_degrees(
    model: nn.Module,
    batch: Sequence[Any],
    *,
    ranks: int,
    memory: float,
    hardware: str = DEFAULT_HARDWARE,
    loss: Loss = mean_loss,
    amp: AmpOptions | None = None,
    progress: Progress | None = None,
    ep: int | None = None,
    cp: int | None = None,
    cp_exchange: str | None = None,
    cp_groups: int | None = None,
) -> SearchResult:
    """Search dp x ep x cp x tp x pp, micro-batches, schedule, recompute and ZeRO stage for the fastest training step.

    model, batch, loss
        As for `plan_training`: the model for a single card, a global batch, the mean loss. They may be on the meta
        device. Batches are cut along their first dimension.
    ranks, memory
        The number of ranks, all of which are used, and the bytes that each may hold.
    hardware
        A hardware of the cost model.
    progress
        Called with a text before each slow step.
    ep
        The ranks that share the experts of each `mixture_of_experts`; None: searched. A model without experts has 1.
    cp
        The ranks that share each sequence; None: searched for sequences of 32768 tokens or more, else 1.
    cp_exchange, cp_groups
        How these bring a sequence together, "heads" (Ulysses) or "gather", and in how many groups of heads; None: what
        takes least time. Plans run no ring.

    Raises `StrategyOptionError` for arguments that are not allowed, and for a model with strategies of its own;
    `MemoryLimitError`, naming the least memory, if nothing fits; `TraceError`; `PlanningError` for the hardware.
    """
    options = amp or AmpOptions()
    check_model(model)
    rows = batch_rows(batch)
    built = model if options.dtype is None else copy.deepcopy(model).to(getattr(torch, options.dtype))

    def trace(count: int) -> FoldedGraph:
        part = [rows_part(value, count, options.dtype) for value in batch]
        return fold(unmarked(trace_with_loss(built, loss, part)))

    traced = ModelByBatchSize(
        rows=rows,
        trace=trace,
        amp=options.dtype,
        masters=options.dtype is not None and options.master_weights,
        length=length_of(batch),
        tokens=tokens_of(batch) // rows,
    )
    return search_traced(
        traced,
        ranks=ranks,
        memory=memory,
        hardware=hardware,
        progress=progress,
        ep=ep,
        cp=cp,
        cp_exchange=cp_exchange,
        cp_groups=cp_groups,
    )


def search_traced(
    traced: ModelByBatchSize,
    *,
    ranks: int,
    memory: float,
    hardware: str,
    progress: Progress | None = None,
    ep: int | None = None,
    cp: int | None = None,
    cp_exchange: str | None = None,
    cp_groups: int | None = None,
) -> SearchResult:
    """Search as `search_degrees`, for a model by its graphs."""
    check_job(ranks, memory, hardware)
    sharing = sharing_given(cp, cp_exchange, cp_groups)
    return _Search(traced, ranks, float(memory), hardware, progress or (lambda text: None), ep, cp, sharing).run()


def experts_of(graph: Graph) -> int:
    """Return the number that the experts of every mixture are a multiple of; 0: the model has none."""
    calls = [node.call for node in graph.nodes.values() if node.call is not None and node.call.name == experts.CALL]
    return gcd(*(call.inputs[experts.UP].shape[0] for call in calls))


def candidate_of(evaluation: Evaluation, degrees: Degrees, memory: RankBytes) -> Candidate:
    """Return degrees with their time, and what runs."""
    work = evaluation.stages(degrees).work
    if work.sharing is not None:
        degrees = replace(degrees, cp_exchange=work.sharing.exchange, cp_groups=work.sharing.groups)
    recomputed = evaluation.recomputed(degrees) if degrees.recompute_layers else ()
    breakdown = evaluation.breakdown(degrees)
    return Candidate(degrees, breakdown, memory, work.gathers_weights, work.whole_weights, recomputed)


class _Search:
    def __init__(
        self,
        traced: ModelByBatchSize,
        ranks: int,
        limit: float,
        hardware: str,
        progress: Progress,
        ep: int | None = None,
        cp: int | None = None,
        sharing: tuple[str, int] = ("", 0),
    ) -> None:
        self._traced, self._ranks, self._limit, self._progress = traced, ranks, limit, progress
        self._hardware, self._folded = hardware, cache(GraphFamily(self._trace).at)
        known = find_hardware(hardware)
        planner = Planner(self._folded, known, current_settings(), ranks=ranks)
        self.evaluation = Evaluation(known, planner, masters=traced.masters)
        self._ep, self._cp, self._sharing = ep, cp, sharing
        self._considered, self._layers = 0, tuple[str, ...]()
        # Candidates that do not fit, with a lower bound of their memory; and the fastest of them that was planned.
        self._rejected: list[tuple[float, int, Degrees]] = []
        self._fastest: tuple[float, Degrees] | None = None

    def run(self) -> SearchResult:
        """Return the best candidates."""
        waiting = [(self.evaluation.bound(each), place, each) for place, each in enumerate(self._candidates())]
        heapq.heapify(waiting)
        best: list[Candidate] = []
        timed = 0
        while waiting and (len(best) < BEST or waiting[0][0] < best[-1].seconds):
            _, place, degrees = heapq.heappop(waiting)
            memory = self.evaluation.memory(degrees)
            if memory.total > self._limit:
                more = self.evaluation.fewest_layers(degrees, self._limit) if degrees.recompute_layers else None
                if more is None:
                    self._reject(degrees)
                else:
                    heapq.heappush(waiting, (self.evaluation.bound(more), place, more))
                continue
            if self._needless(degrees):
                continue
            timed += 1
            if timed % 100 == 1:
                self._progress(f"timing schedules: {timed} timed, {len(waiting)} may be faster")
            best.append(candidate_of(self.evaluation, degrees, memory))
            best.sort(key=lambda found: (found.seconds, found.memory.total))
            del best[BEST:]
        if not best:
            raise MemoryLimitError(self._nothing_fits())
        return SearchResult(
            ranks=self._ranks,
            rows=self._traced.rows,
            limit=self._limit,
            hardware=self._hardware,
            amp=self._traced.amp,
            layers=self._layers,
            macs=_multiply_adds(self._folded(1)),
            tokens=self._traced.tokens,
            itemsize=itemsize_of(self._folded(1).graph, self._traced.amp),
            best=tuple(best),
            too_large=self._too_large(),
            considered=self._considered,
            timed=timed,
        )

    def _candidates(self) -> Iterator[Degrees]:
        """Yield the degrees that may fit; those with too many activations are not planned."""
        rows, first = self._traced.rows, self._folded(1)
        self._layers, most = first.layers, first.most_stages
        degrees_of_experts = expert_degrees(self._ranks, experts_of(first.graph), self._ep)
        parts = sequence_degrees(self._ranks, self._traced.length, self._cp)
        shapes = meshes(self._ranks, rows, most, degrees_of_experts, parts)
        for size in sorted({size for dp, *_ in shapes for size in sizes(rows // dp)}):
            for shape in shapes:
                dp, ep, cp, tp, pp = shape
                replica = rows // dp
                if size not in sizes(replica) or size % ep:
                    continue
                apart = "".join(f" x {name} {count}" for name, count in (("ep", ep), ("cp", cp)) if count > 1)
                self._progress(f"micro-batches of {size} rows, dp {dp}{apart} x tp {tp} x pp {pp}")
                for degrees in choices(shape, size, replica // size, first.layers, most, self._sharing):
                    self._considered += 1
                    least = self.evaluation.least_activations(degrees)
                    if least > self._limit:
                        self._rejected.append((least, len(self._rejected), degrees))
                        continue
                    fewest = self.evaluation.fewest_layers(degrees, self._limit, least=True)
                    if fewest is None:
                        self._reject(degrees)
                    else:
                        yield fewest

    def _needless(self, degrees: Degrees) -> bool:
        """Tell whether degrees recompute although they fit without."""
        plain = replace(degrees, recompute=NONE, recompute_layers=())
        return degrees.recompute != NONE and self.evaluation.memory(plain).total <= self._limit

    def _reject(self, degrees: Degrees) -> None:
        """Remember planned degrees that do not fit, and the fastest of them by the lower bound of its time."""
        degrees = replace(degrees, recompute_layers=())
        self._rejected.append((self.evaluation.least_memory(degrees), len(self._rejected), degrees))
        bound = self.evaluation.bound(degrees)
        if self._fastest is None or bound < self._fastest[0]:
            self._fastest = (bound, degrees)

    def _too_large(self) -> Candidate | None:
        """Return the candidate with the least bound of its time among those that were planned and do not fit."""
        if self._fastest is None:
            return None
        degrees = self._fastest[1]
        return candidate_of(self.evaluation, degrees, self.evaluation.memory(degrees))

    def _nothing_fits(self) -> str:
        """Say what the smallest needs, and of what."""
        smallest: tuple[float, Degrees] | None = None
        for bound, _, degrees in sorted(self._rejected):
            if smallest is not None and bound >= smallest[0]:
                break
            total = self.evaluation.memory(degrees).total
            if smallest is None or total < smallest[0]:
                smallest = (total, degrees)
        assert smallest is not None, "tensor parallelism over all ranks is always a candidate"
        least = smallest[1]
        memory = self.evaluation.memory(least)
        parts = ", ".join(f"{size_of(size)} {name}" for name, size in vars(memory).items())
        return (
            f"memory={size_of(self._limit)}: no degrees fit on {self._ranks} ranks. The least is "
            f"{size_of(memory.total)} a rank, with {least}: {parts}. Give more ranks, more memory, shorter sequences "
            "or a smaller model"
        )

    def _trace(self, rows: int) -> FoldedGraph:
        self._progress(f"tracing a micro-batch of {rows} rows")
        return self._traced.trace(rows)
