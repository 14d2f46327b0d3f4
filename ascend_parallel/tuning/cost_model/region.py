"""Estimate a region in chunks of like rows: forward from proj into the next layer's qkv, and backward the same way.

A rank has a compute lane, which runs its tasks in the program's order and waits for the chunk that a task reads, and a
link, which runs the collectives in the order of their start. docs/regions.md has the order of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ascend_parallel.ops.rows import Sizes, split_rows
from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD
from ascend_parallel.process_groups.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.tuning.cost_model.cost import ELEMENTWISE_BACKWARD, CostModel
from ascend_parallel.tuning.cost_model.layer_passes import LinearPass
from ascend_parallel.tuning.cost_model.models import Batch


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The seconds of a region, and those of its matmuls and element-wise work, and of its collectives, each alone."""

    seconds: float
    computation: float
    communication: float


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """Element-wise work over all rows of a rank: seconds of its memory traffic, and its launches."""

    seconds: float
    launches: int


class Lanes:
    """Adds tasks in the program's order; each is given the end of what it reads, and gives its own end, in seconds.

    issue
        Host seconds per launch, beside both lanes.
    inline
        Host seconds per launch that the compute lane spends.
    slow
        The factors on the times of both lanes, which disturb each other.
    """

    def __init__(self, issue: float = 0.0, inline: float = 0.0, slow: tuple[float, float] = (1.0, 1.0)) -> None:
        """Begin with both lanes free."""
        self._issue, self._inline, self._slow = issue, inline, slow
        self._launched = 0
        self._computed = self._moved = 0.0
        self.computation = self.communication = 0.0

    def run(self, seconds: float, reads: float = 0.0) -> float:
        """Run a task on the compute lane."""
        spent = seconds * self._slow[0] + self._inline
        self.computation += spent
        self._computed = max(self._computed, self._launch(), reads) + spent
        return self._computed

    def send(self, seconds: float) -> float:
        """Start a collective of what the compute lane has done so far."""
        self.computation += self._inline
        self._computed += self._inline
        spent = seconds * self._slow[1]
        self.communication += spent
        self._moved = max(self._moved, self._computed, self._launch()) + spent
        return self._moved

    @property
    def estimate(self) -> Estimate:
        """The end of the last task of either lane."""
        return Estimate(
            seconds=max(self._computed, self._moved), computation=self.computation, communication=self.communication
        )

    def _launch(self) -> float:
        """Return when the host has issued the next task; the first was issued before."""
        self._launched += 1
        return self._issue * (self._launched - 1)


def disturbed(costs: CostModel, add: Callable[[Lanes], None], *, beside: bool) -> Estimate:
    """Return the estimate of the tasks that `add` adds to lanes, which slow each other down if they run `beside`."""
    host = costs.hardware.host
    issue, inline = (0.0, host.launch) if host.inline else (host.launch, 0.0)
    alone = Lanes(issue, inline)
    add(alone)
    if not beside:
        return alone.estimate
    lanes = Lanes(issue, inline, costs.stretches(alone.computation, alone.communication))
    add(lanes)
    return lanes.estimate


class Region:
    """The region of one transformer layer in `count` chunks, on one rank."""

    def __init__(
        self,
        costs: CostModel,
        linear_passes: Mapping[str, Sequence[LinearPass]],
        batch: Batch,
        count: int,
        *,
        tail: Elementwise,
        activation: Elementwise,
    ) -> None:
        """Describe the region by its layers' passes, proj and the MLP's two last.

        tail: bias, addition and norm. If one layer alone stands before proj, it pulls the rows of the layer before.
        """
        self._costs, self._tail, self._activation = costs, tail, activation
        *self._first, self._proj, self._up, self._down = linear_passes[FORWARD]
        *self._first_backward, self._proj_backward, self._up_backward, self._down_backward = linear_passes[BACKWARD]
        self._sequence_parallel = batch.sequence_parallel and batch.tp > 1
        self._sizes: Sizes = split_rows(batch.own_rows, count)
        self._rows = batch.own_rows

    @property
    def pulls(self) -> bool:
        """Whether the next layer's attention begins with one matmul, which pulls rows."""
        return len(self._first) == 1

    def forward(self) -> Estimate:
        """Return the estimate from proj to the next layer's norm, and its qkv if that pulls rows."""
        return disturbed(self._costs, self._run_forward, beside=not self._whole)

    def backward(self) -> Estimate:
        """Return the estimate from the next layer's qkv, if that is one matmul, to proj, weight gradients included."""
        return disturbed(self._costs, self._run_backward, beside=not self._whole)

    def _run_forward(self, lanes: Lanes) -> None:
        left: list[float] = []

        def rest_of_mlp(rows: int) -> None:
            lanes.run(self._part(self._activation, rows))
            lanes.run(self._matmul(self._down, rows))
            left.append(lanes.send(self._reduce(self._down, rows)))

        self._pull(lanes, self._rows_of_proj(lanes), self._up, rest_of_mlp)
        if self.pulls:
            self._pull(lanes, left.__getitem__, self._first[0], lambda rows: None)
        else:
            for rows, ready in zip(self._sizes, left, strict=True):
                lanes.run(self._part(self._tail, rows), ready)

    def _rows_of_proj(self, lanes: Lanes) -> Callable[[int], float]:
        """Return ``end(chunk)`` of a chunk's collective; with sequence parallelism proj sends a chunk ahead."""
        reduced: list[float] = []

        def end(index: int) -> float:
            count = index + 2 if self._sequence_parallel else len(self._sizes)
            for rows in self._sizes[len(reduced) : count]:
                lanes.run(self._matmul(self._proj, rows))
                reduced.append(lanes.send(self._reduce(self._proj, rows)))
            return reduced[index]

        return end

    def _pull(
        self, lanes: Lanes, reduced: Callable[[int], float], column: LinearPass, then: Callable[[int], None]
    ) -> None:
        """Run the tail of each chunk, its matmul, then `then`; with sequence parallelism chunks are gathered between.

        A chunk is gathered one ahead, and the rank's own rows are multiplied under the gather.
        """

        def normed(index: int) -> float:
            done = lanes.run(self._part(self._tail, self._sizes[index]), reduced(index))
            return lanes.send(self._gather(column, self._sizes[index])) if self._sequence_parallel else done

        own = 1 / self._blocks if self._sequence_parallel and not self._whole else 0.0
        ahead = normed(0) if self._sequence_parallel else 0.0
        for index, rows in enumerate(self._sizes):
            ready, matmul = ahead if self._sequence_parallel else normed(index), self._matmul(column, rows)
            if own:
                lanes.run(own * matmul)
            if self._sequence_parallel and index + 1 < len(self._sizes):
                ahead = normed(index + 1)
            lanes.run((1 - own) * matmul, ready)
            then(rows)

    def _run_backward(self, lanes: Lanes) -> None:
        reduced, weight_gradient, begun = [0.0] * len(self._sizes), 0.0, 0.0
        if self.pulls:
            reduced, begun = self._column_backward(lanes, self._first_backward[0])
            weight_gradient = self._first_backward[0].tail
        norm = ELEMENTWISE_BACKWARD if self.pulls else 0.0
        self._row_backward(lanes, self._down_backward, norm, reduced, weight_gradient, begun)
        lanes.run(ELEMENTWISE_BACKWARD * self._part(self._activation, self._rows))
        reduced, begun = self._column_backward(lanes, self._up_backward)
        self._row_backward(lanes, self._proj_backward, ELEMENTWISE_BACKWARD, reduced, self._up_backward.tail, begun)

    def _column_backward(self, lanes: Lanes, column: LinearPass) -> tuple[list[float], float]:
        """Run the input gradient; return the ends of its collectives, and that of the gather for the weight's."""
        gathered, reduced = 0.0, []
        if self._sequence_parallel:
            gathered = max(lanes.send(self._gather(column, rows, outputs=True)) for rows in self._sizes)
        for rows in self._sizes:
            lanes.run(self._matmul(column, rows))
            reduced.append(lanes.send(self._reduce(column, rows)))
        return reduced, gathered

    def _row_backward(
        self,
        lanes: Lanes,
        row: LinearPass,
        norm: float,
        reduced: Sequence[float],
        weight_gradient: float,
        begun: float,
    ) -> None:
        """Run the norm's backward and the input gradient of each chunk once its collective has ended in `reduced`.

        The weight gradient of the layer behind runs before the last chunk is waited for.
        """
        own = 1 / self._blocks if self._sequence_parallel and not self._whole else 0.0
        gathered = []
        for index, (rows, end) in enumerate(zip(self._sizes, reduced, strict=True)):
            if index == len(self._sizes) - 1:
                lanes.run(weight_gradient, begun)
            lanes.run(norm * self._part(self._tail, rows), end)
            if self._sequence_parallel:
                gathered.append(lanes.send(self._gather(row, rows)))
                lanes.run(own * self._matmul(row, rows))
            else:
                lanes.run(self._matmul(row, rows))
        for rows, end in zip(self._sizes, gathered, strict=bool(gathered)):
            lanes.run((1 - own) * self._matmul(row, rows), end)
        lanes.run(row.tail)

    @property
    def _whole(self) -> bool:
        return len(self._sizes) == 1

    @property
    def _blocks(self) -> int:
        """The ranks whose rows a chunk holds."""
        return self._proj.shape.ranks if self._sequence_parallel else 1

    def _matmul(self, part: LinearPass, rows: int) -> float:
        """Return the seconds of `rows` rows of every rank, or of this rank, in the pass's matmul."""
        m, k, n, item = _shape(part)
        if self._whole:
            return part.matmul
        hardware, launches = self._costs.hardware, self._costs.launches(self._blocks)
        utilisation = self._costs.utilisation(m, k, n, item)
        more = (launches - 1) * hardware.matmul.launch
        return more + self._costs.matmul(rows, k, n, item, batches=self._blocks, utilisation=utilisation)

    def _reduce(self, part: LinearPass, rows: int) -> float:
        _, _, n, item = _shape(part)
        kind = REDUCE_SCATTER if self._sequence_parallel else ALL_REDUCE
        return self._costs.collective(kind, rows * self._blocks * n * item, part.shape.ranks, whole=self._whole)

    def _gather(self, part: LinearPass, rows: int, *, outputs: bool = False) -> float:
        """Return the seconds of the gather of the matmul's input, or of rows as wide as its outputs."""
        _, k, n, item = _shape(part)
        size = rows * self._blocks * (n if outputs else k) * item
        return self._costs.collective(ALL_GATHER, size, part.shape.ranks, whole=self._whole)

    def _part(self, work: Elementwise, rows: int) -> float:
        return work.seconds * rows / self._rows + work.launches * self._costs.hardware.matmul.launch


def _shape(part: LinearPass) -> tuple[int, int, int, int]:
    """Return m, k and n of the pass's matmul over all rows, and the bytes of an element."""
    shape = part.shape
    k, n = (shape.k, shape.n) if part.direction == FORWARD else (shape.n, shape.k)
    return shape.rows, k, n, shape.dtype.itemsize
