"""COC_TAKE_OVER=1: MindSpeed's Ulysses in groups of heads, its all-to-alls under the attention of other groups.

With ``--context-parallel-algo ulysses_cp_algo`` MindSpeed wraps the local core attention in `UlyssesContextAttention`,
which sends q, k and v by an all-to-all each, and the output back. The replacement runs the same attention in groups of
heads. What it does not cover runs as MindSpeed wrote it.
Source: mindspeed/core/context_parallel/ulysses_context_parallel/ulysses_context_parallel.py, 26.1.0_core_r0.12.1.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ascend_parallel.overlap.context import Heads
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.coverage import ATTENTION
from ascend_parallel.patches.exchanged_attention import exchanged_attention
from ascend_parallel.patches.framework import ONE_RANK
from ascend_parallel.patches.framework_patch import OnTop
from ascend_parallel.patches.megatron.layers import Megatron

MODULE = "mindspeed.core.context_parallel.ulysses_context_parallel.ulysses_context_parallel"
OWNER = "UlyssesContextAttention"


def patch_set(megatron: Megatron) -> PatchSet:
    """Return the patch of MindSpeed's Ulysses, whose module has been imported; none without COC_TAKE_OVER."""
    patch = Patch(
        target=f"{MODULE}.{OWNER}.forward",
        replacement=lambda original: ulysses_forward(original, megatron),
        parameters=("self", "query", "key", "value", "args", "kwargs"),
        reason="exchanges heads under the attention of other groups of heads (COC_TAKE_OVER=1)",
    )
    return PatchSet("MindSpeed", None, [patch] if megatron.settings.take_over else [])


ON_TOP = OnTop(MODULE, patch_set)


def ulysses_forward(original: Function, megatron: Megatron) -> Function:
    """Make the method that replaces ``UlyssesContextAttention.forward``."""

    @functools.wraps(original)
    def forward(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if (reason := uncovered(self, query, key, (*args, *kwargs.values()))) is not None:
            ATTENTION[self] = f"not overlapped: {reason}"
            megatron.log_uncovered(self, reason)
            whole: torch.Tensor = original(self, query, key, value, *args, **kwargs)
            return whole
        group = self.local_attn.ulysses_comm_para["spg"]
        if group.size() > key.shape[2]:  # as MindSpeed does: every head of queries gets keys of its own
            key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))

        def attention(_: Heads, *received: torch.Tensor) -> torch.Tensor:
            o: torch.Tensor = self.local_attn(*received, *args, **kwargs)
            return o.view(*received[0].shape[:3], -1)

        def by_mindspeed(*given: torch.Tensor) -> torch.Tensor:
            o: torch.Tensor = original(self, *given, *args, **kwargs)
            return o.view(*query.shape[:3], -1)

        return exchanged_attention(self, (query, key, value), attention, group, megatron, own=by_mindspeed).flatten(2)

    return forward


def uncovered(ulysses: Any, query: torch.Tensor, key: torch.Tensor, options: tuple[Any, ...]) -> str | None:
    """Return the reason why MindSpeed's own exchange of q [s, b, N, d] and k [s, b, n, d] must run, or None."""
    local, given = ulysses.local_attn, ulysses.local_attn.ulysses_comm_para
    if (type(ulysses).__module__, type(ulysses).__name__) != (MODULE, OWNER):
        return "it is a class of its own"
    if torch.compiler.is_compiling():
        return "it is being compiled, and a process group cannot be"
    if (ranks := given["spg"].size()) == 1:
        return ONE_RANK
    if (algorithm := getattr(local.config, "context_parallel_algo", None)) != "ulysses_cp_algo":
        return f"--context-parallel-algo {algorithm} has another exchange inside its attention"
    if sys.modules[MODULE].get_args().context_parallel_kv_cache_policy:
        return "--context-parallel-kv-cache-policy has a backward of MindSpeed's own"
    if type(given["gather_size_calculator"]).__name__ != "DefaultGatherSizeCalculator":
        return "its ranks share sequences unevenly"
    if (given["scatter_idx"], given["gather_idx"]) != (2, 0) or query.dim() != 4:
        return "its tensors are not [s, b, heads, d]"
    heads, keys = query.shape[2], key.shape[2]
    if heads % ranks or heads % keys or (keys > ranks and keys % ranks):
        return f"{heads} heads of queries and {keys} of keys are shared unevenly by {ranks} ranks"
    if getattr(local, "pse", None) is not None:
        return "its attention has a bias for each head of a rank"
    if (dropout := local.attention_dropout.p) != 0:
        return f"with attention_dropout={dropout} the elements that are dropped would depend on the groups"
    if any(isinstance(x, torch.Tensor) and x.dim() == 4 and x.shape[1] > 1 for x in options):
        return "its attention mask has heads"
    return None
