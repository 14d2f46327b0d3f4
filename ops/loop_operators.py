"""The operators in one call of a loop in C++: from operands as a layer has them to a result in the layer's shape.

Each makes the calls of torch that operators.py and overlap/sequence_backward.py make, in the same order. Where no
loop runs the call (chunk_loop.py), or work waits to run beside it, those two run it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.ops.chunk_loop import EXTENSION, ChunkLoop, chunk_loop, in_cpp
from ascend_parallel.ops.collectives import gather_tag, scatter_tag
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.decision import Decision
from ascend_parallel.ops.multiply import is_laid_out
from ascend_parallel.ops.pending import IDLE_WORK, run_in_loops
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.process_groups import wait_limit
from ascend_parallel.process_groups.backend import CHUNK_MAJOR, SENDS, Backend, backend_of

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of a layer: dx, dw, and db if it was asked for."""


def loop_for(x: Any, w: Any, group: dist.ProcessGroup, decision: Decision, *beside: Any) -> ChunkLoop | None:
    """Return the loop that runs a decided call of x [..., K], w [K, N] and operands `beside` it, or None."""
    if decision.kernel != "chunked" or (loop := chunk_loop(group, x, w, *beside)) is None:
        return None
    return None if decision.alignment and not is_laid_out(w, decision.alignment) else loop


def row_tile_of(decision: Decision) -> Any:
    """Return the rows of a tile: all that the chunked kernel is told beside the sizes; 0: none."""
    return decision.options[0][1] if decision.options else 0


def run_all_reduce(x: Any, w: Any, group: dist.ProcessGroup, decision: Decision) -> torch.Tensor | None:
    """Return ``all_reduce(x @ w)`` [..., N]; None: no loop runs it."""
    if IDLE_WORK or (loop := loop_for(x, w, group, decision)) is None:
        return None
    sizes, limit = decision.sizes, wait_limit(group, x.device, backend_of(group, x.device))
    y: torch.Tensor = run_in_loops(
        {ALL_REDUCE: loop}, group, limit, loop.run_all_reduce, x, w, sizes, row_tile_of(decision)
    )
    COUNTS.add(ALL_REDUCE, len(sizes), len(sizes))
    return y


def run_reduce_scatter(x: Any, w: Any, group: dist.ProcessGroup, decision: Decision) -> torch.Tensor | None:
    """Return ``reduce_scatter(x @ w)`` [S / R, ..., N]: x [S, ..., K]; None: no loop runs it."""
    if IDLE_WORK or len(x.shape) < 2 or (loop := loop_for(x, w, group, decision)) is None:
        return None
    sizes, backend = decision.sizes, backend_of(group, x.device)
    limit, arguments = wait_limit(group, x.device, backend), _scattering(group, backend, row_tile_of(decision))
    y: torch.Tensor = run_in_loops(
        {REDUCE_SCATTER: loop}, group, limit, loop.run_reduce_scatter, x, w, sizes, *arguments
    )
    COUNTS.add(REDUCE_SCATTER, len(sizes), len(sizes))
    return y


def _scattering(group: dist.ProcessGroup, backend: Backend, row_tile: int) -> tuple[int, bool, bool, bool, int]:
    own = backend.own_scatter
    return row_tile, own, False, backend.launches and not row_tile, 0 if own else scatter_tag(group)


def run_all_gather(
    x: Any, w: Any, group: dist.ProcessGroup, decision: Decision, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return ``all_gather(x) @ w`` [S R, ..., N] and, to keep, all_gather(x) [M, K]: x [S, ..., K]; None: no loop."""
    if IDLE_WORK or len(x.shape) < 2 or (loop := loop_for(x, w, group, decision)) is None:
        return None
    sizes, backend = decision.sizes, backend_of(group, x.device)
    limit, (way, tag, *how) = wait_limit(group, x.device, backend), _gathering(group, backend, row_tile_of(decision))
    found: tuple[torch.Tensor, torch.Tensor | None] = run_in_loops(
        {ALL_GATHER: loop}, group, limit, loop.run_all_gather, x, w, sizes, way, tag, keep, *how
    )
    COUNTS.add(ALL_GATHER, len(sizes), len(sizes))
    return found


def _gathering(group: dist.ProcessGroup, backend: Backend, row_tile: int) -> tuple[str, int, int, bool]:
    way = backend.gathers
    batched = backend.launches and not row_tile and group.size() > 2
    return way, gather_tag(group) if way == SENDS else 0, row_tile, batched


def run_local_product(x: Any, w: Any, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``x @ w.t() + bias`` [..., N]: x [..., K], w [N, K]; None: C++ does not multiply them."""
    if not in_cpp(x, w, bias):
        return None
    y: torch.Tensor | None = EXTENSION.local_product(x, w, bias)
    return y


def run_local_gradients(dy: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return ``dy @ w`` [..., K], and ``dy.t() @ x`` [N, K]: w [N, K]; None: C++ does not multiply them."""
    if not in_cpp(dy, w, x):
        return None
    found: tuple[torch.Tensor, torch.Tensor] = EXTENSION.local_gradients(dy, w, x)
    return found


def run_row_sequence_gradients(
    dy: torch.Tensor, w: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, decision: Decision
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return ``all_gather(dy) @ w`` [S, ..., K], and ``all_gather(dy).t() @ x`` [N, K]; None: no loop runs it.

    dy [S / R, ..., N], w [N, K], x [S, ..., K].
    """
    if IDLE_WORK or len(dy.shape) < 2 or (loop := loop_for(dy, w, group, decision, x)) is None:
        return None
    sizes, backend = decision.sizes, backend_of(group, dy.device)
    limit, how = wait_limit(group, dy.device, backend), _gathering(group, backend, row_tile_of(decision))
    found: tuple[torch.Tensor, torch.Tensor] = run_in_loops(
        {ALL_GATHER: loop}, group, limit, loop.run_row_sequence_gradients, dy, w, x, sizes, *how
    )
    COUNTS.add(ALL_GATHER, len(sizes), len(sizes))
    return found


def run_column_gradients(
    dy: torch.Tensor, w: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, decision: Decision, *, bias: bool
) -> Gradients | None:
    """Return ``all_reduce(dy @ w)`` [..., K], and under it ``dy.t() @ x`` [N, K]: w [N, K]; None: no loop runs it.

    bias: also the sum of dy over its rows [N], last; else None.
    """
    if IDLE_WORK or (loop := loop_for(dy, w, group, decision, x)) is None:
        return None
    sizes, limit = decision.sizes, wait_limit(group, dy.device, backend_of(group, dy.device))
    found: Gradients = run_in_loops(
        {ALL_REDUCE: loop}, group, limit, loop.run_column_gradients, dy, w, x, bias, sizes, row_tile_of(decision)
    )
    COUNTS.add(ALL_REDUCE, len(sizes), len(sizes))
    return found


def run_column_sequence_gradients(
    dy: torch.Tensor,
    w: torch.Tensor,
    x: torch.Tensor,
    group: dist.ProcessGroup,
    decision: Decision,
    gather_sizes: Sizes,
    *,
    bias: bool,
) -> Gradients | None:
    """Return ``reduce_scatter(dy @ w)`` [S / R, ..., K], ``dy.t() @ all_gather(x)`` [N, K], and db; None: no loops do.

    The gather of x [S / R, ..., K], in chunks of `gather_sizes` rows, starts first; of one chunk it is the backend's
    own, as of a plan, which has no sizes for it. Where a backend runs collectives concurrently the other has to wait
    for it, which a loop does not. `bias` as of `run_column_gradients`.
    """
    backend = backend_of(group, dy.device)
    if IDLE_WORK or (backend.concurrent and backend.gathers != SENDS):
        return None
    if (loop := loop_for(dy, w, group, decision, x)) is None or (gather := chunk_loop(group)) is None:
        return None
    way, sizes = backend.gathers if len(gather_sizes) > 1 else CHUNK_MAJOR, decision.sizes
    gathering = gather, gather_sizes, way, gather_tag(group) if way == SENDS else 0
    scattering = sizes, *_scattering(group, backend, row_tile_of(decision))
    limit, loops = wait_limit(group, dy.device, backend), {"all_gather": gather, REDUCE_SCATTER: loop}
    found: Gradients = run_in_loops(
        loops, group, limit, loop.run_column_sequence_gradients, *gathering, dy, w, x, bias, *scattering
    )
    COUNTS.add(REDUCE_SCATTER, len(sizes), len(sizes))
    return found
