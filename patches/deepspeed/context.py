"""Attention of DeepSpeed's Ulysses: its all-to-alls in groups of heads, each under the attention of another group.

`UlyssesSPAttentionHF.forward` gathers positions, sends q, k and v by an all-to-all each, computes attention on whole
sequences, and sends back what it made. The replacement computes the same attention by the same function, in groups of
heads, and multiplies the output projection of transformers' module under the last of them. What DeepSpeed refuses it
still refuses itself.

Written against DeepSpeed 0.19, deepspeed/runtime/sequence_parallel/ulysses_sp.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ascend_parallel.overlap.context import Heads
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.patches.attention_projection import ProjectionsByUse, projection_of
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.coverage import ATTENTION
from ascend_parallel.patches.deepspeed.layers import DeepSpeed
from ascend_parallel.patches.exchanged_attention import exchanged_attention, gathered
from ascend_parallel.patches.framework_patch import OnTop

MODULE = "deepspeed.runtime.sequence_parallel.ulysses_sp"
OWNER = "UlyssesSPAttentionHF"
PARAMETERS = ("self", "module", "query", "key", "value", "attention_mask", "args", "kwargs")


def patch_set(deepspeed: DeepSpeed) -> PatchSet:
    """Return the patch of Ulysses' attention, whose module has been imported."""
    patch = Patch(
        target=f"{MODULE}.{OWNER}.forward",
        replacement=lambda original: ulysses_forward(original, deepspeed),
        parameters=PARAMETERS,
        reason="exchanges heads under the attention of other groups of heads",
    )
    return PatchSet("deepspeed", None, [patch])


ON_TOP = OnTop(MODULE, patch_set)


def ulysses_forward(original: Function, deepspeed: DeepSpeed) -> Function:
    """Make the method that replaces ``UlyssesSPAttentionHF.forward``."""
    projections = ProjectionsByUse()

    @functools.wraps(original)
    def forward(
        self: Any,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        own = functools.partial(original, self, module)
        if _is_refused(self, query, key, value, kwargs) or (self.disable_in_eval and not module.training):
            return own(query, key, value, attention_mask, *args, **kwargs)
        if (reason := uncovered(self, kwargs)) is not None:
            ATTENTION[module] = f"not overlapped: {reason}"
            deepspeed.log_uncovered(self, reason)
            return own(query, key, value, attention_mask, *args, **kwargs)
        with torch.no_grad(), hide_from_selective_checkpoint():
            positions = torch.cat(list(gathered(kwargs["position_ids"], self.process_group)), dim=1)
        options = {**kwargs, "position_ids": positions}

        def attention(_: Heads, *received: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.permute(1, 2, 0, 3).contiguous() for x in received)
            if self.kv_replication_factor > 1:
                module.num_key_value_groups = q.shape[1] // k.shape[1]
            o, weights = self.attn(module, q, k, v, attention_mask, *args, **options)
            _refuse_weights(weights)
            heads: torch.Tensor = o.transpose(0, 1)
            return heads

        def by_deepspeed(*given: torch.Tensor) -> torch.Tensor:
            o, _ = own(*(x.permute(1, 2, 0, 3) for x in given), attention_mask, *args, **kwargs)
            heads: torch.Tensor = o.unflatten(2, (query.shape[1], -1)).transpose(0, 1)
            return heads

        operands = query.permute(2, 0, 1, 3), key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)
        how: dict[str, Any] = {"own": by_deepspeed}
        if (layer := projection_of(module, operands[0], value.shape[3])) is not None:  # the same on all ranks
            of_layer = layer.weight, getattr(layer, "bias", None)
            projection = projections.of(module, *of_layer, always=deepspeed.settings.fused)
            how |= {"projection": projection, "by_rows": True}
        o = exchanged_attention(module, operands, attention, self.process_group, deepspeed, **how)
        return o.transpose(0, 1).flatten(2), None

    return forward


def uncovered(ulysses: Any, options: Mapping[str, Any]) -> str | None:
    """Return the reason why DeepSpeed's own exchange must run, or None."""
    if (type(ulysses).__module__, type(ulysses).__name__) != (MODULE, OWNER):
        return "it is a class of its own"
    if torch.compiler.is_compiling():
        return "it is being compiled, and a process group cannot be"
    if ulysses.skip_all_but_last_attention_debug_mode:
        return "skip_all_but_last_attention_debug_mode is on"
    if ulysses.core_attn_implementation == "flex_attention":
        return "DeepSpeed makes the mask of flex_attention for all heads of a rank"
    if options.get("dropout"):
        return f"with dropout={options['dropout']} the elements that are dropped would depend on the groups"
    return None


def _is_refused(
    ulysses: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]
) -> bool:
    """Tell whether DeepSpeed raises an error for these operands: [B, heads, s, D], and positions [B, s]."""
    expected = ulysses.required_query_shape, ulysses.required_key_value_shape, ulysses.required_key_value_shape
    first = 1 if ulysses.seq_length_is_variable else 0
    shapes = [(x.shape[2], x.shape[0], x.shape[1], x.shape[3]) for x in (query, key, value)]
    fits = all(shape[first:] == tuple(known)[first:] for shape, known in zip(shapes, expected, strict=True))
    alike = query.shape[2] == key.shape[2] == value.shape[2]
    return not (fits and alike and isinstance(options.get("position_ids"), torch.Tensor))


def _refuse_weights(weights: Any) -> None:
    """Raise `ValueError` for attention that returns its weights, which are of a group of heads alone."""
    if weights is not None:
        raise ValueError(
            "UlyssesSPAttentionHF: the attention returned its weights, which the exchange in groups of heads does not "
            "give on: use an implementation without them (sdpa, flash_attention_2), or leave deepspeed out of "
            "COC_FRAMEWORKS"
        )
