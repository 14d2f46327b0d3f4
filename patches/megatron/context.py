"""Context parallelism of Megatron-core's own attention, which has none: heads exchanged in overlapped groups.

`DotProductAttention` asserts a context-parallel size of 1. With ``context_parallel_size`` above 1 it is built as for 1,
and its forward exchanges heads around the original, which computes on whole sequences; or it gathers keys and values
(``cp_comm_type="all_gather"``, or where the heads do not suffice) and computes the rows of a rank's tokens. The split
of the batch (`get_batch_on_this_cp_rank`), the slices of rotary embeddings and the sums of gradients stay Megatron's
own. Its split balances causal masks: rank i has pieces i and 2 R - 1 - i of 2 R. Exchanged rows are put into the order
of the sequence before the attention, and back after it.

Written against megatron-core 0.13 to 0.19, transformer/dot_product_attention.py.
"""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.collectives import all_gather_single
from ascend_parallel.ops.head_exchange import HeadGroup
from ascend_parallel.ops.key_gather import GATHER, HEADS, KeyGroup, choose_exchange
from ascend_parallel.ops.pending import NamedWork
from ascend_parallel.overlap.context import attend_pieces, confirm_shapes
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.exchanged_attention import exchanged_attention, log_exchange
from ascend_parallel.patches.framework_patch import OnTop
from ascend_parallel.patches.megatron.check import WeightGradients
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.patches.megatron.original import AttributeOverlay
from ascend_parallel.patches.megatron.output_projection import BY_ROWS, OutputProjections, watch_parents

MODULE = "megatron.core.transformer.dot_product_attention"
FIRST = (0, 13)
# What Megatron-core calls the ways (``cp_comm_type``); its default, "p2p", asks for none of them.
COMM_TYPES = {"a2a": HEADS, "all_gather": GATHER}
FORWARD = ("self", "query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params")

# Where a core attention notes that its forward has exchanged heads or keys in this call.
EXCHANGED = "_ascend_parallel_exchanged"


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
        gives_way_to="mindspeed",  # without context parallelism it makes the mask in a wrapper around the forward
    )
    # In the tree the forward has another replacement (every_degree.py), and contexts are refused when they are built.
    patches = [built] if megatron.settings.arithmetic.sums_shared_rows else [built, exchanged]
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
        watch_parents()
        own = copy.copy(config)
        own.context_parallel_size = 1
        original(self, own, *args, **kwargs)
        self.config = config
        asked = kwargs.get("cp_comm_type")  # of this layer; a configuration may have a list of all
        self.exchange_of_context = _exchange_of(self, config.cp_comm_type if asked is None else asked)
        self.register_forward_pre_hook(_begin_call)
        self.register_forward_hook(_refuse_without_exchange)

    return init


def _begin_call(attention: Any, _: Any) -> None:
    vars(attention).pop(EXCHANGED, None)


def _refuse_without_exchange(attention: Any, *_: Any) -> None:
    """Raise an error if overlap has been switched off: Megatron-core's forward has read this rank's tokens alone.

    Asked after the call, so that nobody's wrapper around our forward is taken for Megatron-core's.
    """
    if vars(attention).pop(EXCHANGED, None) is None:
        ranks = attention.config.context_parallel_size
        raise ValueError(
            f"context_parallel_size={ranks}: Megatron-core's own attention cannot share a sequence, and the overlap "
            "that this model was built with has been switched off: keep COC_PARALLEL_NUM, or call "
            "configure(num_chunks=1, mode=2) for one group"
        )


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


def _exchange_of(attention: Any, asked: Any) -> str:
    """Return the exchange of a core attention, `HEADS` or `GATHER`; log it once."""
    config = attention.config
    ranks, tensor_ranks = config.context_parallel_size, config.tensor_model_parallel_size
    heads, groups = config.num_attention_heads, config.num_query_groups or config.num_attention_heads
    windowed = getattr(attention.scale_mask_softmax, "window_size", None) is not None
    exchange = COMM_TYPES.get(asked) if isinstance(asked, str) else None
    if windowed and exchange == GATHER:
        raise ValueError(
            f"cp_comm_type={asked!r} is not allowed with window_size={config.window_size}: a window is made for whole "
            "sequences; give 'a2a'"
        )
    return _chosen(heads // tensor_ranks, max(groups // tensor_ranks, 1), ranks, HEADS if windowed else exchange)


@functools.cache
def _chosen(query_heads: int, key_heads: int, ranks: int, asked: str | None) -> str:
    """Return the exchange of the heads, and log it on the first rank, once for each kind of attention."""
    exchange, why = choose_exchange(query_heads, key_heads, ranks, asked)
    if dist.is_initialized() and dist.get_rank() == 0:
        log_exchange(f"context_parallel_size={ranks}", exchange, why, asked=asked is not None)
    return exchange


def _forward(original: Function, megatron: Megatron) -> Function:
    """Make the method that replaces ``DotProductAttention.forward``."""
    projections = OutputProjections(megatron)

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
        vars(self)[EXCHANGED] = True
        group = _group_of(self)
        _refuse_call(self, query, attention_bias, packed_seq_params)
        shape = "none" if attention_mask is None else list(attention_mask.shape)
        confirm_shapes(query, key, value, group, f"attention_mask {shape}")
        places, tokens = _places(len(query), group.size(), query.device)
        exchange: str = self.exchange_of_context
        _refuse_mask(attention_mask, len(query), group.size())

        def run(mask: torch.Tensor | None, *received: torch.Tensor, **replaced: Any) -> torch.Tensor:
            q, k, v = received
            part = AttributeOverlay(
                self,
                hidden_size_per_partition=q.shape[2] * v.shape[3],
                num_attention_heads_per_partition=q.shape[2],
                num_query_groups_per_partition=k.shape[2],
                **replaced,
            )
            o: torch.Tensor = original(part, q, k, v, mask, *options)
            return o.view(*q.shape[:3], v.shape[3])

        back: dict[str, Any] = {}
        if vars(self).get(BY_ROWS, False):
            back = {"by_rows": True, "batch_first": False}
            if (found := projections.of(self, query, value.shape[3])) is not None:
                layer, projection = found
                back |= {"projection": projection, "gradients": WeightGradients(layer, projection.weight)}

        if exchange == GATHER:
            softmax, causal = _of_rows(self.scale_mask_softmax), _is_causal(self)

            def of_rows(rows: slice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                mask = _mask_of_rows(attention_mask, rows, len(q), len(k), causal, q.device)
                return run(mask, q, k, v, scale_mask_softmax=softmax)

            def gathered(keys: HeadGroup | KeyGroup, *given: torch.Tensor) -> torch.Tensor:
                assert isinstance(keys, KeyGroup)
                return attend_pieces(of_rows, keys, *given, causal=causal and attention_mask is None)

            o = exchanged_attention(self, (query, key, value), gathered, group, megatron, exchange, **back)
            return o.flatten(2)

        mask = None if attention_mask is None else _whole_mask(attention_mask, len(query), tokens, group)

        def attention(_: HeadGroup | KeyGroup, *received: torch.Tensor) -> torch.Tensor:
            return run(mask, *(x.index_select(0, tokens) for x in received)).index_select(0, places)

        o = exchanged_attention(self, (query, key, value), attention, group, megatron, **back)
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


def _refuse_mask(mask: torch.Tensor | None, rows: int, ranks: int) -> None:
    """Raise `ValueError` for a mask that is not of this rank's rows, [b, 1, s, S]."""
    if mask is not None and (mask.dim() != 4 or mask.shape[2:] != (rows, rows * ranks)):
        raise ValueError(
            f"attention_mask {list(mask.shape)} is not allowed: give [b, 1, {rows}, {rows * ranks}], as "
            "get_batch_on_this_cp_rank cuts it, or None for a causal mask"
        )


def _of_rows(softmax: Any) -> Any:
    """Return a softmax like `softmax` that takes the masks it is given, also of rows that are fewer than the keys."""
    own = copy.copy(softmax)
    own.attn_mask_type = importlib.import_module("megatron.core.transformer.enums").AttnMaskType.padding
    return own


def _is_causal(attention: Any) -> bool:
    """Tell whether an attention without a mask makes the causal one."""
    kinds = importlib.import_module("megatron.core.transformer.enums").AttnMaskType
    return bool(attention.scale_mask_softmax.attn_mask_type == kinds.causal)


def _mask_of_rows(
    mask: torch.Tensor | None, rows: slice, count: int, keys: int, causal: bool, device: torch.device
) -> torch.Tensor | None:
    """Return the mask of a piece of this rank's rows, those at the places `rows`: True where a key is not read."""
    if mask is not None:
        return mask[:, :, :count] if _is_first(rows, mask) else mask[:, :, count:]
    if not causal:
        return None
    return torch.ones(1, 1, count, keys, dtype=torch.bool, device=device).triu_(rows.start + 1)


def _is_first(rows: slice, mask: torch.Tensor) -> bool:
    """Tell whether `rows` are the first of a rank's two pieces: it lies in the first half of the sequence."""
    return bool(rows.start < mask.shape[3] // 2)


def _whole_mask(mask: torch.Tensor, rows: int, tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mask [b, 1, S, S] of all ranks' rows, from this rank's [b, 1, s, S]."""
    own = mask.permute(2, 0, 1, 3).contiguous()
    own = own.byte() if own.dtype == torch.bool else own
    gathered = own.new_empty(group.size() * rows, *own.shape[1:])
    with hide_from_selective_checkpoint():
        NamedWork("the attention mask", all_gather_single(gathered, own, group), group, own.device).wait()
    return gathered.index_select(0, tokens).permute(1, 2, 0, 3).to(mask.dtype)
