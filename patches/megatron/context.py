"""Context parallelism of Megatron-core's own attention, which has none: heads exchanged in overlapped groups.

`DotProductAttention` asserts a context-parallel size of 1. With ``context_parallel_size`` above 1 it is built as for 1,
and its forward exchanges heads around the original, which computes on whole sequences. The split of the batch
(`get_batch_on_this_cp_rank`), the slices of rotary embeddings and the sums of gradients stay Megatron's own. Its split
balances causal masks: rank i has pieces i and 2 R - 1 - i of 2 R. The rows are put into the order of the sequence
before the attention, and back after it.

Written against megatron-core 0.13 to 0.19, transformer/dot_product_attention.py.
"""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.arithmetic import EVERY_DEGREE
from ascend_parallel.ops.collectives import all_gather_single
from ascend_parallel.ops.head_exchange import HeadGroup, repeats_of
from ascend_parallel.ops.pending import NamedWork
from ascend_parallel.overlap.context import confirm_shapes
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.exchanged_attention import exchanged_attention
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.original import AttributeOverlay
from ascend_parallel.patches.megatron.seam import OnTop

MODULE = "megatron.core.transformer.dot_product_attention"
FIRST = (0, 13)
FORWARD = ("self", "query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params")


def patch_set(megatron: Megatron) -> PatchSet:
    """Return the patches of the attention, whose module has been imported."""
    if megatron.version < FIRST:
        return PatchSet("megatron-core", None, [])
    built = Patch(
        target=f"{MODULE}.DotProductAttention.__init__",
        replacement=_init,
        parameters=None,
        reason="is built for ranks that share sequences too",
    )
    exchanged = Patch(
        target=f"{MODULE}.DotProductAttention.forward",
        replacement=lambda original: _forward(original, megatron),
        parameters=FORWARD,
        reason="exchanges heads with the context-parallel ranks under groups of heads",
    )
    # In the tree the forward has another replacement (every_degree.py), and contexts are refused when they are built.
    patches = [built] if megatron.settings.arithmetic is EVERY_DEGREE else [built, exchanged]
    return PatchSet("megatron-core", None, patches)


ON_TOP = OnTop(MODULE, patch_set)


def _init(original: Function) -> Function:
    """Make the method that replaces ``DotProductAttention.__init__``."""

    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.context_parallel_size == 1:
            original(self, config, *args, **kwargs)
            return
        _refuse(config)
        own = copy.copy(config)
        own.context_parallel_size = 1
        original(self, own, *args, **kwargs)
        self.config = config

    return init


def _refuse(config: Any) -> None:
    """Raise an error for a configuration whose heads the context-parallel ranks cannot share."""
    from ascend_parallel.settings import current_settings

    ranks = config.context_parallel_size
    current_settings().arithmetic.refuse(
        f"context_parallel_size={ranks}: context parallelism has no tree: weight gradients are summed over the ranks "
        "that share a sequence"
    )
    if (kind := getattr(config, "softmax_type", "vanilla")) != "vanilla":
        raise ValueError(
            f"softmax_type={kind!r} is not allowed with context_parallel_size={ranks}: its offsets belong to the heads "
            "of one rank; give 'vanilla'"
        )
    tensor_ranks = config.tensor_model_parallel_size
    heads, groups = config.num_attention_heads, config.num_query_groups or config.num_attention_heads
    repeats_of(heads // tensor_ranks, max(groups // tensor_ranks, 1), ranks)


def _forward(original: Function, megatron: Megatron) -> Function:
    """Make the method that replaces ``DotProductAttention.forward``."""

    @functools.wraps(original)
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        options = attn_mask_type, attention_bias, packed_seq_params
        if self.config.context_parallel_size == 1:
            own: torch.Tensor = original(self, query, key, value, attention_mask, *options)
            return own
        group = _group_of(self)
        _refuse_call(self, query, attention_bias, packed_seq_params)
        shape = "none" if attention_mask is None else list(attention_mask.shape)
        confirm_shapes(query, key, value, group, f"attention_mask {shape}")
        places, tokens = _places(len(query), group.size(), query.device)
        mask = None if attention_mask is None else _whole_mask(attention_mask, len(query), tokens, group)

        def attention(_: HeadGroup, *received: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.index_select(0, tokens) for x in received)
            features = q.shape[2] * v.shape[3]
            part = AttributeOverlay(
                self,
                hidden_size_per_partition=features,
                num_attention_heads_per_partition=q.shape[2],
                num_query_groups_per_partition=k.shape[2],
            )
            o: torch.Tensor = original(part, q, k, v, mask, *options)
            return o.view(*q.shape[:3], v.shape[3]).index_select(0, places)

        o = exchanged_attention(self, (query, key, value), attention, group, megatron)
        return o.flatten(2)

    return forward


def _group_of(attention: Any) -> dist.ProcessGroup:
    """Return the ranks that share the sequences of a core attention."""
    groups = getattr(attention, "pg_collection", None) or getattr(attention, "model_comm_pgs", None)
    group: dist.ProcessGroup | None = getattr(groups, "cp", None)
    if group is None:
        group = importlib.import_module("megatron.core.parallel_state").get_context_parallel_group()
    assert group is not None
    return group


def _refuse_call(attention: Any, query: torch.Tensor, bias: Any, packed: Any) -> None:
    """Raise `ValueError` for a call whose attention ranks cannot share."""
    dropout = attention.attention_dropout.p if attention.training else 0
    given = {
        "packed_seq_params": (packed, None),
        "attention_bias": (bias, None),
        "attention_dropout": (dropout, 0),
    }
    for name, (value, allowed) in given.items():
        if value is not None and value != 0:
            raise ValueError(
                f"{name} is not allowed with context_parallel_size={attention.config.context_parallel_size} without "
                f"TransformerEngine: give {allowed}"
            )
    if len(query) % 2:
        raise ValueError(
            f"a rank has {len(query)} tokens of a sequence that ranks share: give a sequence that is a multiple of "
            f"{2 * attention.config.context_parallel_size} (get_batch_on_this_cp_rank cuts each rank two pieces)"
        )


@functools.lru_cache(maxsize=16)
def _places(rows: int, ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place in the sequence of each row in the order of the ranks, and the row of each place.

    rows: of a rank: pieces i and 2 R - 1 - i of 2 R, for rank i.
    """
    piece = torch.arange(rows // 2)
    starts = [rows // 2 * number for rank in range(ranks) for number in (rank, 2 * ranks - 1 - rank)]
    places = torch.cat([start + piece for start in starts])
    return places.to(device), places.argsort().to(device)


def _whole_mask(mask: torch.Tensor, rows: int, tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mask [b, 1, S, S] of all ranks' rows, from this rank's [b, 1, s, S]."""
    if mask.dim() != 4 or mask.shape[2:] != (rows, rows * group.size()):
        raise ValueError(
            f"attention_mask {list(mask.shape)} is not allowed: give [b, 1, {rows}, {rows * group.size()}], as "
            "get_batch_on_this_cp_rank cuts it, or None for a causal mask"
        )
    own = mask.permute(2, 0, 1, 3).contiguous()
    own = own.byte() if own.dtype == torch.bool else own
    gathered = own.new_empty(group.size() * rows, *own.shape[1:])
    with hide_from_selective_checkpoint():
        NamedWork("the attention mask", all_gather_single(gathered, own, group), group, own.device).wait()
    return gathered.index_select(0, tokens).permute(1, 2, 0, 3).to(mask.dtype)
