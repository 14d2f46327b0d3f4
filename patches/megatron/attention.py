"""Megatron-core's own attention with COC_DETERMINISTIC=invariant: one order of sums, whatever is in the batch.

What a model has in its place, or in that of torch's norms and activations, is refused (`refuse_other_kernels`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ascend_parallel.ops.attention import attend, key_spans, sequences_of
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.patches.base import Function, full_name

ATTENTION = "megatron.core.transformer.dot_product_attention.DotProductAttention"
NORMS = ("torch.nn.modules.normalization.", "megatron.core.transformer.identity_op.")
# Configurations of a module that choose a kernel whose bits were not compared.
KERNELS = ("bias_activation_fusion", "use_te_activation_func", "apply_rope_fusion")


def attend_in_one_order(original: Function) -> Function:
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
        softmax = self.scale_mask_softmax
        asked = {
            "a bias of its scores": attention_bias is not None,
            "packed sequences": packed_seq_params is not None,
            f"dropout ({self.attention_dropout.p})": self.training and self.attention_dropout.p > 0,
            "a sliding window": getattr(softmax, "window_size", None) is not None,
            "an offset of its softmax": getattr(self, "softmax_offset", None) is not None,
            "other masks than causal ones": attention_mask is None and self.attn_mask_type.name != "causal",
        }
        for what, given in asked.items():
            if given:
                raise DegreeError(f"attention of {type(self).__name__} asks for {what}")
        count, batch, heads, width = query.shape
        spans = None
        if attention_mask is not None:  # [b, 1, s, m], true where a key is not seen
            seen = ~attention_mask[:, 0].bool()
            spans = key_spans(seen.expand(batch, *seen.shape[1:]))
        out = attend(
            _side_by_side(query),
            _side_by_side(key),
            _side_by_side(value),
            sequences_of(spans, batch, count, key.shape[0]),
            self.softmax_scale * (1 if softmax.scale is None else softmax.scale),
        )
        return out.view(batch, count, heads * width).transpose(0, 1).contiguous()

    return forward


def refuse_other_kernels(module: Any) -> None:
    """Raise `DegreeError` for a module of a model whose attention, norm or activation runs in another kernel."""
    attention = getattr(module, "core_attention", None)
    if attention is not None and full_name(type(attention)) != ATTENTION:
        raise DegreeError(
            f"{type(module).__name__}: its core_attention is {full_name(type(attention))}: give the layer spec of "
            "Megatron-core's local layers"
        )
    config = getattr(module, "config", None)
    for name in KERNELS:
        if getattr(config, name, False):
            raise DegreeError(f"config {name}=True: a fused kernel, whose bits were not compared: set it to False")
    for name, norm in module.named_children():
        kind = full_name(type(norm))
        if "norm" in name and not kind.startswith(NORMS):
            raise DegreeError(f"{type(module).__name__}: its {name} is {kind}, whose bits were not compared")


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """Return [b * s, heads, D] of [s, b, heads, D]."""
    return x.transpose(0, 1).reshape(-1, *x.shape[2:])
