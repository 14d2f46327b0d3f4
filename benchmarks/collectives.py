"""Collectives by plain torch.distributed calls on gloo, to time communication apart from the package.

Each function starts a collective and returns the handles for `finish`. Reduce-scatter is an exchange and sum, the
fastest on gloo (gloo's own is an all-reduce of a copy), with all receives posted first. So the package is compared with
the fastest plain calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"

Finish = Callable[[], None]


def start(kind: str, rows: torch.Tensor, pieces: int, group: dist.ProcessGroup) -> Finish:
    """Start one collective over ``rows [M, N]``, cut into pieces of about the same size, all in flight at once.

    all-reduce      sums the rows in place
    reduce-scatter  sums the rows; this rank's M / R of them go to a new tensor
    all-gather      gathers every rank's M / R rows, of which this rank has its own, into a new tensor
    """
    return {ALL_REDUCE: _all_reduce, REDUCE_SCATTER: _reduce_scatter, ALL_GATHER: _all_gather}[kind](
        rows, pieces, group
    )


def _all_reduce(rows: torch.Tensor, pieces: int, group: dist.ProcessGroup) -> Finish:
    works = [dist.all_reduce(piece, group=group, async_op=True) for piece in rows.chunk(pieces)]

    def finish() -> None:
        for work in works:
            work.wait()

    return finish


def _all_gather(rows: torch.Tensor, pieces: int, group: dist.ProcessGroup) -> Finish:
    ranks = group.size()
    own = rows.view(ranks, -1, rows.shape[1])[group.rank()]
    gathered = torch.empty_like(rows).view(ranks, -1, rows.shape[1])
    works = [
        dist.all_gather(list(views.unbind()), piece, group=group, async_op=True)
        for views, piece in zip(gathered.chunk(pieces, dim=1), own.chunk(pieces), strict=True)
    ]

    def finish() -> None:
        for work in works:
            work.wait()

    return finish


def _reduce_scatter(rows: torch.Tensor, pieces: int, group: dist.ProcessGroup) -> Finish:
    ranks, rank = group.size(), group.rank()
    rows_r = rows.view(ranks, -1, rows.shape[1])
    outs = rows.new_empty(rows_r.shape[1:]).chunk(pieces)
    parts = [list(out.new_empty(ranks, *out.shape).unbind()) for out in outs]
    peers = [peer for peer in range(ranks) if peer != rank]
    works = [[dist.irecv(part[peer], group=group, group_src=peer) for peer in peers] for part in parts]
    for index, piece in enumerate(rows_r.chunk(pieces, dim=1)):
        parts[index][rank] = piece[rank]
        works[index] += [dist.isend(piece[peer], group=group, group_dst=peer) for peer in peers]

    def finish() -> None:
        for out, part, mine in zip(outs, parts, works, strict=True):
            for work in mine:
                assert work is not None
                work.wait()
            torch.add(part[0], part[1], out=out)
            for more in part[2:]:
                out.add_(more)

    return finish
