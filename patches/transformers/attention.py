"""transformers' attention with COC_DETERMINISTIC=invariant: ``attn_implementation="invariant"``.

The implementation stands in transformers' own registries, of attention and of masks. A mask says for each query which
keys it sees; what is asked here is that these are a sequence's keys up to the query: causal attention, of padded
batches and of packed sequences. Another mask, sliding windows, soft caps, sinks and dropout are errors.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ascend_parallel.ops.attention import attend, key_spans, sequences_of
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.patches.base import PatchSet
from ascend_parallel.patches.framework_patch import OnTop

NAME = "invariant"
MODELS = "transformers.modeling_utils"
# Arguments of an attention that are not computed, and the values that ask for nothing.
NOT_COMPUTED: dict[str, tuple[Any, ...]] = {
    "dropout": (None, 0, 0.0),
    "sliding_window": (None,),
    "softcap": (None,),
    "s_aux": (None,),
}


REGISTRIES = OnTop(MODELS, lambda _: PatchSet("transformers", None, []))
"""Nothing is patched there: once the module is imported, what is in force is put in force again."""


def register() -> None:
    """Put the implementation into transformers' registries, once they are there."""
    for interface, function in _interfaces():
        interface.register(NAME, function)


def unregister() -> None:
    """Take it out again; a model that has it then fails with transformers' own error."""
    for interface, _ in _interfaces():
        interface._global_mapping.pop(NAME, None)


def _interfaces() -> Iterator[tuple[Any, Any]]:
    models: Any = sys.modules.get(MODELS)
    if hasattr(models, "AttentionInterface"):  # it is imported
        yield models.AttentionInterface, attention
        yield importlib.import_module("transformers.masking_utils").AttentionMaskInterface, mask


def mask(**asked: Any) -> torch.Tensor:
    """Return the first and the last key that each query sees, [B, S, 2]; no keys: (0, -1).

    asked: what transformers asks of `sdpa_mask`.
    """
    masks = importlib.import_module("transformers.masking_utils")
    options = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    seen = masks.sdpa_mask(**{**asked, **options})[:, 0]
    return key_spans(seen)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention [B, S, H, D] of query [B, H, S, D] over key and value [B, G, M, D]."""
    for name, without in NOT_COMPUTED.items():
        if options.get(name) not in without:
            raise DegreeError(
                f'attn_implementation="{NAME}": {type(module).__name__} asks for {name}={options[name]!r}'
            )
    causal = options.get("is_causal")
    if attention_mask is None and not (getattr(module, "is_causal", True) if causal is None else causal):
        raise DegreeError(f'attn_implementation="{NAME}": {type(module).__name__} asks for is_causal=False')
    batch, _, count, width = query.shape
    length = key.shape[2]
    if attention_mask is not None and (attention_mask.dim() != 3 or attention_mask.dtype.is_floating_point):
        shape = list(attention_mask.shape)
        raise DegreeError(f'attn_implementation="{NAME}": a mask of shape {shape} was not made by it')
    sequences = sequences_of(attention_mask, batch, count, length)
    q, k, v = (each.transpose(1, 2).reshape(-1, each.shape[1], each.shape[3]) for each in (query, key, value))
    out = attend(q, k, v, sequences, width**-0.5 if scaling is None else scaling)
    return out.view(batch, count, *out.shape[1:]), None
