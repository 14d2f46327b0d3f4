"""The layers that `bench` and `tune` measure: those of a model, possibly scaled down, or given shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ascend_parallel.overlap.layer_shape import LayerShape
from ascend_parallel.text import dtype_name, parse_int, shown
from ascend_parallel.tuning.cost_model.models import Model, ModelLinear
from ascend_parallel.tuning.cost_model.tables import PlanningError

TILE = 16
MOST = 1 << 30


def scaled(model: Model, factor: int) -> Model:
    """Return the model with hidden size, head count and MLP width divided by `factor`; heads keep their width."""
    heads = max(1, model.heads // factor)
    return replace(
        model,
        hidden=max(TILE, model.hidden // factor),
        ffn=max(TILE, model.ffn // factor),
        heads=heads,
        kv_heads=max(1, model.kv_heads // factor) if model.kv_heads < model.heads else heads,
        q_rank=model.q_rank // factor,
        kv_rank=model.kv_rank // factor,
    )


def shape_linears(
    shapes: Sequence[str], layers: Sequence[str], ranks: int, sequence_parallel: bool, dtype: torch.dtype, device: str
) -> list[ModelLinear]:
    """Return a layer for each of ``M,K,N`` and each kind: a rank's ``[M, K] x [K, N]``, M the rows of all ranks.

    Raises `PlanningError` for a shape that cannot be split.
    """
    found = []
    for text in shapes:
        m, k, n = _parse(text)
        if sequence_parallel and m % ranks:
            raise PlanningError(
                f"--shape {text}: M is not divisible by the {ranks} ranks, as sequence parallelism needs"
            )
        found += [
            ModelLinear(
                kind, LayerShape.of_rows(kind, m, ranks, sequence_parallel, k=k, n=n, dtype=dtype, device=device)
            )
            for kind in layers
        ]
    return found


def _parse(text: str) -> tuple[int, int, int]:
    sizes = [parse_int(part) or 0 for part in text.split(",")]
    if len(sizes) != 3 or not all(0 < size <= MOST for size in sizes):
        raise PlanningError(
            f"--shape {shown(text)} is not a shape: give M,K,N such as 2048,1024,1024, each up to {MOST}"
        )
    return sizes[0], sizes[1], sizes[2]


def as_plain(shape: LayerShape) -> dict[str, Any]:
    """Return the fields of a shape as JSON holds them; `passes.measure` puts the device of its ranks in."""
    return {**shape._asdict(), "dtype": dtype_name(shape.dtype)}
