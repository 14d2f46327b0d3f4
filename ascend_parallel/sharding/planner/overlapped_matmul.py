"""Matmuls that run together with a collective: which may, and how much of the collective stays exposed.

row     the weight is sharded along K. The all-reduce or reduce-scatter of the partial sums moves into the matmul.
column  the weight is sharded along N. Either the input is R*, and the all-reduce of its gradient moves into the
        backward; or the input's rows are sharded, and the all-gather moves into the forward, the reduce-scatter into
        the backward.

The overlap pass (planner/overlap_pass.py) and the planner's prices both ask the functions here, so a plan is priced as
it will run. The seconds are those of the passes of a linear layer (tuning/cost_model/layer_passes.py), in the chunks
that the operators would choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch

from ascend_parallel.ops.call import Matmul
from ascend_parallel.ops.registry import FUSED, would_choose
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.overlap.known import known_in_call, known_of
from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD, LayerShape
from ascend_parallel.settings import Settings
from ascend_parallel.sharding.graph import OpCall, Ref
from ascend_parallel.sharding.layout import (
    PARTIAL_GRAD,
    REPLICATE,
    SUM,
    Layout,
    Placement,
    Shape,
    cuts,
    is_even,
    shard,
    with_placement,
)
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.costs import FittedCosts, MeshCosts
from ascend_parallel.tuning.cost_model.chunk_search import MOST_CHUNKS
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import Hardware
from ascend_parallel.tuning.cost_model.layer_passes import LinearPass
from ascend_parallel.tuning.cost_model.models import ModelLinear


@dataclass(frozen=True)
class MatmulInputs:
    """The positions of x, weight and bias among a call's inputs.

    transposed
        True for a weight [K, N], as of aten.mm; False for [N, K], as of aten.linear.
    """

    x: int
    weight: int
    bias: int | None
    transposed: bool

    @property
    def n_dim(self) -> int:
        """The weight's dimension N, the output features."""
        return 1 if self.transposed else 0

    @property
    def k_dim(self) -> int:
        """The weight's dimension K, which the matmul sums over."""
        return 1 - self.n_dim


def matmul_of(call: OpCall) -> MatmulInputs | None:
    """Return the positions if a call multiplies ``x [..., K]`` by a 2-D weight; None for other calls."""
    if call.kwargs or not all(argument is None or isinstance(argument, Ref) for argument in call.args):
        return None
    places = [None if argument is None else argument.index for argument in call.args]
    if call.name == "aten.linear.default":
        places = [*places, None][:3]
    elif call.name in ("aten.mm.default", "aten.matmul.default"):
        places = [*places, None]
    elif call.name == "aten.addmm.default":
        places = [*places[1:], places[0]]
    else:
        return None
    x, weight, bias = places
    assert x is not None and weight is not None
    dims = [len(call.inputs[place].shape) for place in (x, weight)]
    if dims[0] < 2 or dims[1] != 2 or (bias is not None and len(call.inputs[bias].shape) != 1):
        return None
    return MatmulInputs(x, weight, bias, transposed=call.name != "aten.linear.default")


def sums_rows(matmul: MatmulInputs, reads: Sequence[Layout], output: Layout, mesh_dim: int) -> bool:
    """Tell whether a matmul leaves partial sums along `mesh_dim`, of a weight that is sharded along K there."""
    return output[mesh_dim] == SUM and reads[matmul.weight][mesh_dim] == shard(matmul.k_dim)


def reads_columns(matmul: MatmulInputs, reads: Sequence[Layout], mesh_dim: int) -> bool:
    """Tell whether a matmul reads R* along `mesh_dim`, and a weight that is sharded along N there."""
    return reads[matmul.x][mesh_dim] == PARTIAL_GRAD and reads[matmul.weight][mesh_dim] == shard(matmul.n_dim)


def row_obstacle(
    matmul: MatmulInputs, shape: Shape, output: Layout, mesh: ProcessMesh, mesh_dim: int, target: Placement
) -> str:
    """Return why the sum over `mesh_dim` of an output [*shape] to `target` cannot run in the matmul; "" if it can."""
    layout = with_placement(output, mesh_dim, target)
    if matmul.bias is not None and SUM in layout:
        return "it has a bias, and partial sums on another mesh dimension"
    if target == REPLICATE:
        return ""
    if target.kind != "shard":
        return f"its partial sums become {target}"
    return _rows_obstacle(shape, layout, mesh, mesh_dim)


def column_obstacle(
    matmul: MatmulInputs,
    shape: Shape,
    read: Layout,
    output: Layout,
    mesh: ProcessMesh,
    mesh_dim: int,
    placement: Placement,
) -> str:
    """Return why an input [*shape], `placement` along `mesh_dim`, cannot be gathered in the matmul; "" if it can."""
    if matmul.bias is not None and SUM in output:
        return "it has a bias, and partial sums on another mesh dimension"
    if placement.kind != "shard":
        return ""
    return _rows_obstacle(shape, with_placement(read, mesh_dim, placement), mesh, mesh_dim)


def _rows_obstacle(shape: Shape, layout: Layout, mesh: ProcessMesh, mesh_dim: int) -> str:
    """Return why an overlapped operator cannot gather or scatter a tensor's slices as rows; "" if it can."""
    dim, mesh_shape = layout[mesh_dim].dim, mesh.shape
    if dim == len(shape) - 1:
        return f"{layout[mesh_dim]} shards its features, not its rows"
    if not is_even(shape, layout, mesh_shape):
        return f"{layout[mesh_dim]} of {list(shape)} is not even"
    if layout[mesh_dim] in layout[mesh_dim + 1 :]:
        return f"dimension {dim} is sharded by a later mesh dimension too"
    if not mesh.ascends(mesh_dim):
        return f"the ranks along {mesh.dim_names[mesh_dim]} do not ascend"
    return ""


@dataclass(frozen=True)
class ColumnGroup:
    """What column matmuls of one input have in common if they run as one; the weight's layout as of [N, K]."""

    read: Layout
    weight: Layout
    output: Layout
    has_bias: bool
    dtype: torch.dtype


def column_group(matmul: MatmulInputs, reads: Sequence[Layout], output: Layout, dtype: torch.dtype) -> ColumnGroup:
    """Return the group of a column matmul whose weight has this dtype."""
    weight = reads[matmul.weight]
    if matmul.transposed:
        weight = tuple(shard(1 - each.dim) if each.kind == "shard" else each for each in weight)
    return ColumnGroup(reads[matmul.x], weight, output, matmul.bias is not None, dtype)


def rank_shape(
    kind: str, call: OpCall, matmul: MatmulInputs, reads: Sequence[Layout], mesh_shape: Sequence[int], mesh_dim: int
) -> LayerShape:
    """Return a rank's part of a matmul that reads these layouts, on no device yet: as if all slices were even.

    Its own rows are those of x as the call reads it: `sequence_parallel` is False.
    """
    x, weight = call.inputs[matmul.x], call.inputs[matmul.weight]
    slices = cuts(reads[matmul.x], mesh_shape, len(x.shape))
    *rows, k = (size // count for size, count in zip(x.shape, slices, strict=True))
    n = weight.shape[matmul.n_dim] // cuts(reads[matmul.weight], mesh_shape, 2)[matmul.n_dim]
    ranks = mesh_shape[mesh_dim]
    return LayerShape(kind, prod(rows), k, n, ranks, sequence_parallel=False, dtype=weight.dtype, device="")


class ExposedCosts:
    """Seconds by which matmuls with their collectives outlast the matmuls alone."""

    def __init__(self, costs: MeshCosts, settings: Settings) -> None:
        """Take the costs of collectives, and the settings that choose the chunks."""
        self._mesh_shape = costs.shape
        self._models = [_line_model(line) if isinstance(line, FittedCosts) else None for line in costs.dims]
        self._settings = settings
        # Products in the tree are priced as plain chunks.
        self._known = known_of(settings)._replace(deterministic=settings.arithmetic.priced_as, equal=True)
        self.passes = cache(self._passes)

    def knows(self, mesh_dim: int) -> bool:
        """Tell whether collectives along a mesh dimension are priced from a hardware, which prices chunks too."""
        model = self._models[mesh_dim]
        return model is not None

    def shape(
        self, kind: str, call: OpCall, matmul: MatmulInputs, reads: Sequence[Layout], mesh_dim: int
    ) -> LayerShape:
        """Return a rank's part of a matmul whose x, if "column", is whole along `mesh_dim`."""
        return rank_shape(kind, call, matmul, reads, self._mesh_shape, mesh_dim)

    def seconds(self, shape: LayerShape, mesh_dim: int, rows: bool, gradient: bool = True) -> float:
        """Return the exposed seconds of a step: of forward, and of backward if there is a `gradient`.

        rows: the collectives gather and scatter rows; otherwise they sum whole tensors.
        """
        forward, backward = self.passes(shape, mesh_dim, rows)
        return forward + backward * gradient

    def _passes(self, shape: LayerShape, mesh_dim: int, rows: bool) -> tuple[float, float]:
        costs, _ = self._model(mesh_dim)
        here = shape.sharing_rows(rows)._replace(device=costs.hardware.device)
        linear, again = ModelLinear(shape.kind, here), self._settings.recompute_all_gather
        passes = (LinearPass(costs, linear, run, gathers_again=again) for run in (FORWARD, BACKWARD))
        forward, backward = map(self._exposed, passes)
        return forward, backward

    def _model(self, mesh_dim: int) -> tuple[CostModel, int]:
        model = self._models[mesh_dim]
        assert model is not None
        return model

    def _exposed(self, part: LinearPass) -> float:
        if part.beside is None:
            return 0.0
        return max(0.0, self._in_chunks(part, part.beside) - part.computation)

    def _in_chunks(self, part: LinearPass, matmul: Matmul) -> float:
        """Return the seconds of a pass in the chunks that will run.

        Of a fused operator, and of chunks that are measured in the run, in the best number of them.
        """
        known = known_in_call(self._settings, self._known, part.shape, part.direction)
        decision = would_choose(matmul, self._settings, known)
        if decision.kernel in FUSED or "unmeasured" in decision.codes:
            return min(part.seconds(split_rows(matmul.rows, count)) for count in range(1, MOST_CHUNKS + 1))
        return part.seconds(decision.sizes)


@cache
def _line_model(line: FittedCosts) -> tuple[CostModel, int]:
    """Return the cost model of a line of ranks, of which `in_domain` share a domain, and the number of its ranks."""
    hardware: Hardware = line.hardware
    collectives = replace(hardware.collectives, domain=line.in_domain)
    return CostModel(replace(hardware, collectives=collectives)), line.ranks
