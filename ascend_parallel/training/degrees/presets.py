"""The presets of the cost model as models to search degrees for: they have dimensions, and no module of their own."""

from __future__ import annotations

from pathlib import Path

import torch

from ascend_parallel.training.degrees.folding import KEPT, FoldedGraph, fold
from ascend_parallel.training.degrees.search import ModelByBatchSize
from ascend_parallel.training.degrees.transformer import Transformer
from ascend_parallel.training.loss import mean_loss, trace_with_loss
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.tuning.cost_model.models import Model, find_model, read_model

# Tokens of a step: the global batch of Llama 2 (arXiv:2307.09288, section 2.2: "a global batch-size of 4M tokens").
TOKENS = 4_000_000
SEQUENCE = 4096
DTYPES = ("bfloat16", "float32")


def preset_of(name: str | Model, ranks: int, length: int | None, batch: int | None) -> tuple[Model, int, int]:
    """Return a preset, the model of a file of sizes, or a `Model`, with its sequence length and sequences of a step.

    length, batch: None: the model's own length; the default batch of so many ranks.
    """
    model = name if isinstance(name, Model) else _named(name)
    length = length or model.sequence or SEQUENCE
    return model, length, batch or default_batch(ranks, length)


def _named(name: str) -> Model:
    path = Path(name)
    return read_model(path) if path.suffix in (".json", ".toml") else find_model(name)


def default_batch(ranks: int, length: int) -> int:
    """Return the least multiple of `ranks` sequences that has `TOKENS` tokens or more."""
    return ranks * -(-TOKENS // (ranks * length))


def traced_preset(model: Model, length: int, batch: int, dtype: str) -> ModelByBatchSize:
    """Return a preset for `search_traced`: `batch` sequences of `length` tokens.

    dtype: "bfloat16" with fp32 master weights, or "float32". Only three equal layers are traced, behind the dense
    layers of a model with experts.
    """
    if dtype not in DTYPES:
        raise StrategyOptionError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}")
    with torch.device("meta"):
        built = Transformer(model, length, min(model.layers, model.dense_layers + KEPT)).to(getattr(torch, dtype))

    def trace(rows: int) -> FoldedGraph:
        with torch.device("meta"):
            tokens = torch.zeros(rows, length, dtype=torch.long)
        graph = trace_with_loss(built, mean_loss, (tokens, tokens))
        equal = model.layers - model.dense_layers
        return fold(graph, equal if equal > KEPT else None)

    mixed = dtype != "float32"
    return ModelByBatchSize(batch, trace, dtype if mixed else None, mixed, length, length)


def built_preset(model: Model, length: int, batch: int) -> tuple[Transformer, tuple[torch.Tensor, torch.Tensor]]:
    """Return the whole model and a batch on the meta device, for `plan_training`."""
    with torch.device("meta"):
        tokens = torch.zeros(batch, length, dtype=torch.long)
        return Transformer(model, length), (tokens, tokens)
