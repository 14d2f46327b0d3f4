"""The forward of a model whose ranks share sequences: refuses what was not proved of it, and makes the loss a share.

`SharedForward` stands on the model as its ``forward``, as wrappers of accelerate do: those that call the model, and
those that call its forward alone, as PEFT does, meet it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ascend_parallel.patches.transformers.context_proof import (
    IGNORED,
    MEANS,
    SHIFTED,
    Proof,
    floating_outputs,
    inner_model,
)
from ascend_parallel.patches.transformers.sequence_mask import Share


class Sharing(Protocol):
    """What a forward needs of the ranks that share a model's sequences (`ContextParallel`)."""

    name: str
    proof: Proof
    proving: bool
    attended: int

    @property
    def runs_whole(self) -> bool:
        """Whether attention runs on what this rank has."""

    def share_of(self, input_ids: Any, position_ids: Any, graded: int) -> Share:
        """Return the forward's share."""

    def sharing(self, share: Share) -> AbstractContextManager[None]:
        """Hand it to masks."""


class SharedForward:
    """A model's forward, before and after which its context looks at what the model is given and gives."""

    def __init__(self, model: Any, context: Sharing | None, before: Any) -> None:
        """Take the model, and the forward that stood on it, if any: else the class has it."""
        self.model, self.context, self.before = model, context, before

    @classmethod
    def install(cls, model: Any, context: Sharing) -> SharedForward:
        """Set the forward of the model of transformers inside of `model`; return it."""
        inner = inner_model(model)
        before = vars(inner).get("forward")
        if isinstance(before, SharedForward):  # the model has been made context parallel before
            before = before.before
        inner.forward = cls(inner, context, before)
        return inner.forward  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Set the forward that stood on the model before."""
        vars(self.model).pop("forward")
        if self.before is not None:
            self.model.forward = self.before

    @property
    def __wrapped__(self) -> Any:
        """The model's own forward, whose signature programs read."""
        return type(self.model).forward.__get__(self.model) if self.before is None else self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward on this rank's part of a batch."""
        context, total = self.context, None
        if context is None:  # unpickled in a process whose ranks share nothing
            return self.__wrapped__(*args, **kwargs)
        if context.proving:
            return self._with_share(context, args, kwargs)
        if context.proof.loss == MEANS:
            total = kwargs.pop("num_items_in_batch", None)
        if context.runs_whole:
            output = self.__wrapped__(*args, **kwargs)
        else:
            self._refuse_call(context, kwargs, total)
            before = context.attended
            output = self._with_share(context, args, kwargs)
            self._refuse_output(context, output, exchanges=context.attended - before)
        if total is None or kwargs.get("labels") is None:
            return output
        return _scaled(output, kwargs["labels"], total)

    def _with_share(self, context: Sharing, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's own forward; its masks know this rank's part."""
        input_ids, places = kwargs.get("input_ids", args[0] if args else None), kwargs.get("position_ids")
        with context.sharing(context.share_of(input_ids, places, _digest_of_graded(self.model))):
            return self.__wrapped__(*args, **kwargs)

    def _refuse_call(self, context: Sharing, kwargs: Mapping[str, Any], total: Any) -> None:
        """Raise `ValueError` for arguments with which the model would give other numbers than whole."""
        kind, config, proof = type(self.model).__name__, self.model.config, context.proof
        if config._attn_implementation != context.name:
            raise ValueError(
                f"context_parallel: {kind} has attn_implementation={config._attn_implementation!r}, which reads a "
                "rank's tokens alone: set it before context_parallel, and run whole sequences inside of whole()"
            )
        if not proof.done:
            raise ValueError(
                f"context_parallel: {kind} could not run when context_parallel was called, and nothing has been proved "
                "of it since: call cut(), or prove(), on all ranks first"
            )
        asked = kwargs.get("output_attentions")
        if asked or (asked is None and getattr(config, "output_attentions", False)):
            raise ValueError(
                "context_parallel: output_attentions=True is not allowed: no rank has the weights of whole sequences; "
                "inside of whole() the model gives them"
            )
        if kwargs.get("labels") is not None:
            proof.refuse_labels()
            missing = kwargs.get("num_items_in_batch") is None and total is None
            if missing or (proof.loss == SHIFTED and kwargs.get("shift_labels") is None):
                raise ValueError(
                    f"context_parallel: {kind} is given labels that cut() did not make: of these its loss would be no "
                    "share of the loss of all labels"
                )

    def _refuse_output(self, context: Sharing, output: Any, *, exchanges: int) -> None:
        """Raise `ValueError` if no exchange has run, or for outputs that were not compared with those of one rank."""
        kind, proof = type(self.model).__name__, context.proof
        if not exchanges:
            raise ValueError(
                f"context_parallel: {kind} computed attention without an exchange, on a rank's tokens alone: its "
                "attention has been replaced since context_parallel"
            )
        names = set(floating_outputs(output)) - proof.outputs
        if names - {"loss"}:
            raise ValueError(
                f"context_parallel: {kind} gives {', '.join(sorted(names - {'loss'}))}, which was not compared with "
                "one rank's when context_parallel was called: give what asks for it before, or compute it inside of "
                "whole()"
            )
        if "loss" in names:
            proof.refuse_labels()


def _digest_of_graded(model: Any) -> int:
    """Return a digest of which parameters require gradients; 0: no gradients are computed."""
    if not torch.is_grad_enabled():
        return 0
    return zlib.crc32(bytes(weight.requires_grad for weight in model.parameters())) or 1


def _scaled(output: Any, labels: torch.Tensor, total: torch.Tensor) -> Any:
    """Return a model's output whose loss, a mean over this rank's labels, has become its share of the mean over all."""
    own = (labels != IGNORED).sum()
    loss = output[0] if isinstance(output, tuple) else output["loss"]
    share = torch.where(own > 0, loss * (own / total), torch.zeros_like(loss))
    if isinstance(output, tuple):
        return share, *output[1:]
    output["loss"] = share
    return output
