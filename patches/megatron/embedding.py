"""The replacement of VocabParallelEmbedding.forward: in regions its rows come while the first layer computes.

The replacement repeats the lookup, and starts the collective in chunks. Written against megatron-core 0.10 to 0.19,
whose forward differs in where it finds its group. Without regions the original runs.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ascend_parallel.overlap.embedding import embedding_sizes, sum_embedded
from ascend_parallel.overlap.layer import ParallelLinear
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.seam import OnTop

MODULE = "megatron.core.tensor_parallel.layers"
LANGUAGE_MODEL = "megatron.core.models.common.embeddings.language_model_embedding"

# Embeddings whose rows ranks share once every rank has the sum: with sequence parallelism and learned positions.
_SHARED_LATER: WeakSet[Any] = WeakSet()


def patch_set(megatron: Megatron) -> PatchSet:
    """Return the patch of the embedding; without regions there is none."""
    patch = Patch(
        module=MODULE,
        owner="VocabParallelEmbedding",
        method="forward",
        replacement=lambda original: embedding_forward(original, megatron),
        parameters=("self", "input_"),
        reason="sums over ranks under the first layer's norm and matmul",
        gives_way_to="mindspeed",  # it puts its own there after the layers were imported
    )
    return PatchSet("megatron-core", None, [patch] if megatron.settings.region else [])


def language_model_patch_set(megatron: Megatron) -> PatchSet:
    """Return the patch that looks at what happens to the embedding's rows; without regions there is none."""
    patch = Patch(
        module=LANGUAGE_MODEL,
        owner="LanguageModelEmbedding",
        method="forward",
        replacement=_noting,
        parameters=None,
        reason="sums the embedding's rows in the order in which ranks share them",
    )
    return PatchSet("megatron-core", None, [patch] if megatron.settings.region else [])


ON_TOP = OnTop(MODULE, patch_set), OnTop(LANGUAGE_MODEL, language_model_patch_set)


def _noting(original: Function) -> Function:
    """Make the method that replaces ``LanguageModelEmbedding.forward``."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        scatters = self.config.sequence_parallel and getattr(self, "scatter_to_sequence_parallel", True)
        if scatters and not self.reduce_scatter_embeddings:
            _SHARED_LATER.add(self.word_embeddings)
        return original(self, *args, **kwargs)

    return forward


def embedding_forward(original: Function, megatron: Megatron) -> Function:
    """Make the method that replaces ``VocabParallelEmbedding.forward``."""

    @functools.wraps(original)
    def forward(self: Any, input_: torch.Tensor) -> Any:
        if _is_left_alone(self, input_, megatron):
            return original(self, input_)
        return megatron.timed(self, input_, functools.partial(_embed, megatron, original, self, input_))

    return forward


def _is_left_alone(embedding: Any, tokens: torch.Tensor, megatron: Megatron) -> bool:
    """Tell whether the original must run, on all ranks alike."""
    if torch.compiler.is_compiling() or not dist.is_initialized() or tokens.dim() != 2:
        return True
    if megatron.group_of(embedding).size() == 1 or getattr(embedding, "gtp_remat_size", 1) > 1:
        return True
    by_inference = getattr(embedding, "use_inference_optimized_reduce_scatter", False) and not embedding.training
    return by_inference or megatron.left_to_replaced(embedding) is not None


def _embed(megatron: Megatron, original: Function, embedding: Any, tokens: torch.Tensor) -> Any:
    group = megatron.group_of(embedding)
    layer = ParallelLinear(
        group=group,
        settings=megatron.settings,
        sequence_parallel=embedding.reduce_scatter_embeddings,
        before_communicating=megatron.confirm(group),
        leaves_rows=megatron.leaves_rows,
    )
    batch, length = tokens.shape
    sizes = embedding_sizes(batch, length, layer, shared_later=embedding in _SHARED_LATER)
    if sizes is None:
        return original(embedding, tokens)
    return sum_embedded(_looked_up(embedding, tokens), sizes, embedding.num_embeddings_per_partition, layer)


def _looked_up(embedding: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the rows [b, s, H] of this rank's tokens, by the operators of Megatron-core; zeros for the others."""
    others = (tokens < embedding.vocab_start_index) | (tokens >= embedding.vocab_end_index)
    own = tokens.clone() - embedding.vocab_start_index
    own[others] = 0
    weight = embedding.weight
    rows: torch.Tensor = weight[own] if embedding.deterministic_mode else F.embedding(own, weight)
    rows[others, :] = 0.0
    return rows
