"""The logprobs of chosen tokens by one function, for a trainer and a server: `logprobs`."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.log_softmax import logprobs_of
from ascend_parallel.settings import current_settings

# What the patched call of a model notes, while `logprobs` runs it; None: nothing is asked.
_proved: ContextVar[list[bool] | None] = ContextVar("proved", default=None)


def logprobs(
    model_or_logits: Any,
    tokens: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    **inputs: Any,
) -> torch.Tensor:
    """Return the logprobs of tokens, in fp32, by the log-softmax that a patched vLLM has too.

    model_or_logits
        Logits [..., V / R] for tokens [...], each of the token that stands there; or a model of transformers: the
        result [B, S - 1] has the logprob of each token of tokens [B, S] but the first.
    group
        The ranks that share the vocabulary of logits; None: they are whole.
    temperature
        Logits are divided by it.
    inputs
        Further arguments of a model, such as attention_mask.

    With COC_DETERMINISTIC=invariant they are, bit for bit, those that vLLM gives with it. Gradients flow to the logits.
    Raises `ValueError` for tokens of another shape; `DegreeError` for a model that computes in another way.
    """
    if not isinstance(model_or_logits, torch.Tensor):
        logits = _logits_of(model_or_logits, tokens, inputs)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        return logprobs(logits[:, :-1], tokens[:, 1:], group=group, temperature=temperature)
    if model_or_logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logprobs: logits have shape {list(model_or_logits.shape)}, tokens {list(tokens.shape)}: give one token "
            "for each row of logits"
        )
    if not temperature > 0:
        raise ValueError(f"logprobs: temperature={temperature}: give a number larger than 0")
    return logprobs_of(model_or_logits, tokens, group=group, temperature=temperature)


def note_proved() -> None:
    """Note that a model is called whose modules all compute as a server's do: the patch of its call says so."""
    if (noted := _proved.get()) is not None:
        noted.append(True)


def _logits_of(model: Any, tokens: torch.Tensor, inputs: dict[str, Any]) -> Any:
    noted: list[bool] = []
    before = _proved.set(noted)
    try:
        logits = model(input_ids=tokens, use_cache=False, **inputs).logits
    finally:
        _proved.reset(before)
    settings = current_settings()
    if settings.arithmetic.fixed_tiles and not noted:
        settings.arithmetic.refuse(
            f"logprobs: {type(model).__name__} has not the arithmetic of a server: it has to be a model of "
            "transformers with a tp_plan, on one rank ascend_parallel.patches.transformers.on_one_rank(model)"
        )
    return logits
