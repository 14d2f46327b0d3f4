"""Context parallelism of Hugging Face models: ranks share a sequence, and exchange heads under the model's attention.

`context_parallel` puts a function in the place of the model's attention implementation. It exchanges queries, keys and
values in groups of heads (overlap/context.py) and calls the implementation that the model had, sdpa or eager, on whole
sequences of a rank's heads; or it gathers keys and values in groups, and calls it on the rows of a rank's tokens, which
are then two pieces of the sequence, so that causal masks give all ranks as much. `ContextParallel.cut` gives each rank
its part of a batch.

The mask is that of the whole sequence, made by transformers' own functions: the positions and the padding of all ranks
are gathered once in each forward of the model. Written against transformers 5.18 to 5.23, masking_utils.py and
modeling_utils.py.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ascend_parallel.ops.head_exchange import HeadGroup
from ascend_parallel.ops.key_gather import GATHER, HEADS, KeyGroup, choose_exchange, in_sequence, pieces_of
from ascend_parallel.overlap.context import attend_pieces
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.dtensor_linear import ATTENTION_DROPOUT
from ascend_parallel.patches.exchanged_attention import exchanged_attention, gathered, log_exchange
from ascend_parallel.patches.transformers.layers import ACTIVE_PATCH
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.settings import current_settings

VERSIONS = ">=5.18,<5.24"
NAME = "ascend_parallel"
GATHERED = ("sdpa", "eager")  # the attention implementations that take masks of some rows
IGNORED = -100  # the label of a token that has no loss
# What some models give their attention beside the mask, for each head or each token of a rank.
NOT_EXCHANGED = ("position_bias", "s_aux", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "cache")

# Whether attention runs on what this rank has, as in `generate`.
_WHOLE: ContextVar[bool] = ContextVar("whole sequences", default=False)


def context_parallel(
    model: Any, group: dist.ProcessGroup | None = None, *, exchange: str | None = None
) -> ContextParallel:
    """Have the ranks of `group` share the sequences of a transformers model; return what cuts batches for it.

    model
        A decoder (or encoder) of text, as it was loaded: its attention implementation stays the one that computes.
    group
        The ranks that share a sequence; None: all ranks.
    exchange
        "heads": each rank gets whole sequences of some heads. "gather": each rank gets the keys and values of all
        tokens. None: heads where each rank gets as many heads of keys, else what sends less.

    ``generate`` runs on whole sequences of each rank. Raises `ValueError` if the model or its heads cannot be shared by
    the ranks, `DegreeError` with COC_DETERMINISTIC=tp, `PatchError` for a version of transformers that is not known.
    """
    own = group or dist.group.WORLD
    if own is None:
        raise ValueError("context_parallel: torch.distributed is not initialised")
    current_settings().arithmetic.refuse("context_parallel: context parallelism has no tree")
    _refuse(model)
    (queries, keys), implementation = _heads_of(model), model.config._attn_implementation
    masked = implementation in GATHERED
    exchangeable = not queries % own.size()
    asked = HEADS if exchange is None and exchangeable and not masked else exchange
    way, why = choose_exchange(queries, keys, own.size(), asked)
    if way == GATHER and not masked:
        raise ValueError(
            f"context_parallel: keys are gathered ({why}), and attn_implementation={implementation!r} takes no "
            f"masks of a rank's rows: give one of {', '.join(GATHERED)}"
            + (', or exchange="heads"' if exchangeable else "")
        )
    if own.rank() == 0:
        log_exchange("context_parallel", way, why, asked=exchange is not None)
    context = ContextParallel(own, implementation, way)
    masks, attentions = _interfaces()
    masks.register(context.name, context.mask)
    attentions.register(context.name, context.attend)
    # FSDP2 gives a model a class of its own, which no module has.
    generating = [kind for kind in type(model).__mro__ if hasattr(kind, "generate") and _is_named(kind)]
    if generating and "generate" not in vars(generating[0]):
        name = f"{generating[0].__module__}.{generating[0].__name__}"
        _generate_patch(name).apply(importlib.metadata.version("transformers"))
    model.set_attn_implementation(context.name)
    return context


def _is_named(kind: type) -> bool:
    """Tell whether a class can be imported by its name."""
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def _interfaces() -> tuple[Any, Any]:
    """Return transformers' registers of functions that make masks, and that compute attention."""
    masking, modeling = (
        importlib.import_module(f"transformers.{name}") for name in ("masking_utils", "modeling_utils")
    )
    return masking.AttentionMaskInterface, modeling.AttentionInterface


def _heads_of(model: Any) -> tuple[int, int]:
    """Return how many heads of queries and of keys a tensor-parallel rank of a model has."""
    ranks, heads = getattr(model, "tp_size", None) or 1, model.config.num_attention_heads
    return heads // ranks, max((getattr(model.config, "num_key_value_heads", None) or heads) // ranks, 1)


def _refuse(model: Any) -> None:
    """Raise `ValueError` for a model whose sequences ranks cannot share."""
    kind, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"context_parallel: {kind} is no model of transformers")
    if config.get_text_config() is not config:
        raise ValueError(f"context_parallel: {kind} has other parts than text: give its language model")
    if not model._can_set_attn_implementation():
        raise ValueError(f"context_parallel: {kind} does not look its attention up in AttentionInterface")
    if not model.supports_context_parallel:
        kinds = sorted(set(getattr(config, "layer_types", None) or ())) or "its class"
        window = f"layer types {kinds}, sliding_window={getattr(config, 'sliding_window', None)}"
        raise ValueError(
            f"context_parallel: {kind}.supports_context_parallel is false ({window}): its layers need another mask "
            "than full attention, or carry a state along the sequence"
        )
    for name in ATTENTION_DROPOUT:
        if getattr(config, name, 0):
            raise ValueError(
                f"context_parallel: {kind} has {name}={getattr(config, name)}; only 0 is allowed, because the elements "
                "that are dropped would depend on the ranks"
            )


class ContextParallel:
    """The ranks that share the sequences of a model, and the attention implementation that computes on them.

    group
        The process group of these ranks.
    implementation
        The name of the model's own attention implementation.
    name
        The name under which transformers finds this one.
    exchange
        "heads" or "gather".
    """

    def __init__(self, group: dist.ProcessGroup, implementation: str, exchange: str = HEADS) -> None:
        """Take a name of its own: models may be shared by different groups."""
        self.group, self.implementation, self.exchange = group, implementation, exchange
        _, attentions = _interfaces()
        if (before := getattr(attentions._global_mapping.get(implementation), "__self__", None)) is not None:
            self.implementation = before.implementation  # the model has been made context parallel before
        taken = sum(known.startswith(NAME) for known in attentions._global_mapping)
        self.name = f"{NAME}_{taken + 1}" if taken else NAME
        self._same_batch = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Return itself: a copy of a model has the same ranks."""
        return self

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run attention on what this rank has inside this context, as in `generate`: for decoding loops of your own."""
        token = _WHOLE.set(True)
        try:
            yield
        finally:
            _WHOLE.reset(token)

    def cut(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        pad_token_id: int = 0,
    ) -> dict[str, torch.Tensor]:
        """Return this rank's part of a batch, as arguments of the model.

        input_ids, labels   [B, S], the same on every rank of the group; labels as the model takes them, not shifted
        attention_mask      [B, S] or None: 0 where a sequence is padded
        position_ids        [B, S] or None: positions that begin again at 0 separate documents (use_cache=False)

        A sequence that is no multiple of the ranks is padded at its end, with tokens that have no label and, if there
        is an attention_mask, that nobody reads. Where keys are gathered a rank has two pieces of 2 R, number i and
        2 R - 1 - i, and the sequence is padded to a multiple of 2 R. The model's loss is this rank's share: the sum
        over the ranks is the mean over all labels. So gradients are to be summed over the ranks; where they are
        averaged, multiply the loss by the number of ranks. Raises `ValueError` for other shapes, `DisagreementError`
        if the ranks' first batches differ.
        """
        batch, length = _shape(input_ids)
        ranks = self.group.size()
        more = -length % (2 * ranks if self._in_pieces else ranks)
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).expand(batch, length)
        given = {"labels": labels, "attention_mask": attention_mask, "position_ids": position_ids}
        for name, x in given.items():
            if x is not None and x.shape != input_ids.shape:
                shapes = f"{name} is {list(x.shape)}, and input_ids {list(input_ids.shape)}"
                raise ValueError(f"context_parallel: {shapes}: both must be alike")
        self._confirm_same_batch(input_ids)
        after = position_ids[:, -1:] + torch.arange(1, more + 1, device=position_ids.device)
        whole = {
            "input_ids": pad(input_ids, (0, more), value=pad_token_id),
            "position_ids": torch.cat([position_ids, after], 1),
        }
        if attention_mask is not None:
            whole["attention_mask"] = pad(attention_mask, (0, more), value=0)
        if labels is not None:
            shifted = pad(labels, (0, more + 1), value=IGNORED)[:, 1:]
            whole |= {"labels": shifted, "shift_labels": shifted}
        parts = {
            name: torch.cat([x[:, rows] for rows in self._own_rows(length + more)], 1) for name, x in whole.items()
        }
        if labels is not None:
            parts["num_items_in_batch"] = (whole["labels"] != IGNORED).sum()
        return parts

    @property
    def _in_pieces(self) -> bool:
        return self.exchange == GATHER and self.group.size() > 1

    def _own_rows(self, length: int) -> tuple[slice, ...]:
        """Return where this rank's tokens lie in a sequence of `length` tokens."""
        rank, ranks = self.group.rank(), self.group.size()
        if self._in_pieces:
            return pieces_of(rank, ranks, length // ranks)
        return (slice(length // ranks * rank, length // ranks * (rank + 1)),)

    def _confirm_same_batch(self, input_ids: torch.Tensor) -> None:
        """Compare the first batch on all ranks: a loader that gives each rank another batch is a likely mistake."""
        if self._same_batch or self.group.size() == 1:
            return
        digest = hashlib.sha256(str(input_ids.tolist()).encode()).hexdigest()[:16]
        mine = f"input_ids {list(input_ids.shape)}, digest {digest}"
        by_rank = store_all_gather(self.group, "the first batch", {"batch": mine}, DisagreementError, topic="context")
        if any(value["batch"] != mine for value in by_rank.values()):
            what = "; ".join(f"rank {rank}: {value['batch']}" for rank, value in by_rank.items())
            raise DisagreementError(
                f"context_parallel: ranks of {describe(self.group)} cut different batches ({what}): give all ranks "
                "that share a sequence the same batch"
            )
        self._same_batch = True

    @property
    def _runs_whole(self) -> bool:
        return self.group.size() == 1 or _WHOLE.get()

    def mask(
        self, *, q_length: int, kv_length: int, mask_function: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        """Stand for the mask of the whole sequence: transformers asks for a mask once in a forward."""
        if self._runs_whole:
            lengths = {"q_length": q_length, "kv_length": kv_length}
            masks, _ = _interfaces()
            own = masks._global_mapping[self.implementation]
            return own(**lengths, mask_function=mask_function, attention_mask=attention_mask, **options)
        if kv_length != q_length or torch.compiler.is_compiling():
            how = "compiled" if torch.compiler.is_compiling() else f"given {q_length} tokens and a cache of {kv_length}"
            raise ValueError(
                f"context_parallel: the model is {how}: ranks share whole sequences, uncompiled; for generation call "
                "generate(), or a loop of your own inside of whole()"
            )
        config = self._own_config(options["config"])
        return SequenceMask(
            attention_mask, _is_causal(mask_function), config, options["dtype"], in_pieces=self._in_pieces
        )

    def _own_config(self, config: Any) -> Any:
        """Return a copy of a model's configuration with the model's own attention implementation."""
        own = copy.copy(config)
        own._attn_implementation_internal = self.implementation
        return own

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Compute attention in transformers' way: query [B, N, s, D], key, value [B, n, s, D]; returns [B, s, N, D]."""
        if self._runs_whole:
            return self._own_attention(module, query, key, value, attention_mask, options)
        if not isinstance(attention_mask, SequenceMask):
            raise ValueError(f"context_parallel: {type(module).__name__} is given a mask that the model made itself")
        mask, positions = attention_mask.of_all(options, self.group)
        self._refuse_options(module, options)
        options |= {"position_ids": positions if self.exchange == HEADS else None}
        operands = query.permute(2, 0, 1, 3), key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)

        def own_attention(mask: Any, *received: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.permute(1, 2, 0, 3) for x in received)
            own, _ = self._own_attention(module, q, k, v, mask, options)
            return own.permute(1, 0, 2, 3)

        def of_rows(rows: slice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return own_attention(attention_mask.of_rows(rows, len(k), q.device), q, k, v)

        def attention(heads: HeadGroup | KeyGroup, *received: torch.Tensor) -> torch.Tensor:
            if isinstance(heads, KeyGroup):
                return attend_pieces(of_rows, heads, *received, causal=attention_mask.causal)
            return own_attention(mask, *received)

        o = exchanged_attention(module, operands, attention, self.group, ACTIVE_PATCH.framework, self.exchange)
        return o.permute(1, 0, 2, 3).contiguous(), None

    def _refuse_options(self, module: Any, options: Mapping[str, Any]) -> None:
        given = [name for name in NOT_EXCHANGED if options.get(name) is not None]
        given += [f"dropout={options['dropout']}"] if options.get("dropout") else []
        given += ["sinks"] if hasattr(module, "sinks") else []
        if given:
            kind = type(module).__name__
            raise ValueError(f"context_parallel: {kind} computes attention with {given[0]}, which ranks do not share")

    def _own_attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        options: Mapping[str, Any],
    ) -> tuple[torch.Tensor, Any]:
        """Compute attention as the model would without this package, on the heads that are given."""
        _, attentions = _interfaces()
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = attentions._global_mapping.get(self.implementation, eager)
        with _attribute(module.config, "_attn_implementation_internal", self.implementation):
            if not hasattr(module, "num_key_value_groups"):
                return function(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
            with _attribute(module, "num_key_value_groups", query.shape[1] // key.shape[1]):
                return function(module, query, key, value, mask, **options)  # type: ignore[no-any-return]


@contextmanager
def _attribute(holder: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value inside this context."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _shape(input_ids: torch.Tensor) -> tuple[int, int]:
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"context_parallel: input_ids are {list(input_ids.shape)}, and must be [batch, tokens]")
    batch, length = input_ids.shape
    return batch, length


def _is_causal(mask_function: Any) -> bool:
    """Tell whether a mask function of transformers is causal or full, also of packed documents; others are refused."""
    masking = importlib.import_module("transformers.masking_utils")
    plain = {masking.causal_mask_function: True, masking.bidirectional_mask_function: False}
    inner = mask_function
    joined = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    names = [each.__qualname__.partition(".")[0] for each in joined]
    if names == ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        inner = inspect.getclosurevars(joined[1]).nonlocals["mask_function"]
    elif names[1:] == ["packed_sequence_mask_function"]:  # before 5.23
        inner = joined[0]
    if inner not in plain:
        name = mask_function.__qualname__
        raise ValueError(f"context_parallel: the model makes its mask by {name}, which is neither causal nor full")
    return plain[inner]


@dataclass(eq=False)
class SequenceMask:
    """Stands in a model's forward for the mask of the whole sequence.

    padding
        [B, s] or None: whether this rank's tokens are no padding.
    causal
        Whether a token reads only tokens before it.
    config
        The model's configuration with its own attention implementation.
    dtype
        The dtype of the mask of eager attention.
    in_pieces
        Whether each rank has two pieces of the sequence (ops/key_gather.py).
    """

    padding: torch.Tensor | None
    causal: bool
    config: Any
    dtype: torch.dtype
    in_pieces: bool = False
    _of_all: tuple[Any, torch.Tensor] | None = None
    _of_rows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def of_all(self, options: Mapping[str, Any], group: dist.ProcessGroup) -> tuple[Any, torch.Tensor]:
        """Return mask and positions [B, S] of the whole sequence; every rank's first layer gathers them."""
        if self._of_all is None:
            with torch.no_grad(), hide_from_selective_checkpoint():
                self._of_all = self._gather(options, group)
        return self._of_all

    def of_rows(self, rows: slice, keys: int, device: torch.device) -> Any:
        """Return the mask of the rows at the places `rows`, for the first `keys` keys; None: nothing is masked.

        Where the whole sequence has no mask, the attention itself makes a causal one, which is square.
        """
        assert self._of_all is not None
        whole, _ = self._of_all
        if whole is not None:
            return whole[:, :, rows, :keys]
        if not self.causal:
            return None
        place = rows.start, keys
        if place not in self._of_rows:
            own = torch.ones(1, 1, rows.stop - rows.start, keys, dtype=torch.bool, device=device)
            self._of_rows[place] = own.tril_(rows.start)
        return self._of_rows[place]

    def _gather(self, options: Mapping[str, Any], group: dist.ProcessGroup) -> tuple[Any, torch.Tensor]:
        positions = options.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            raise ValueError(
                "context_parallel: the model gives its attention no position_ids [B, s]: they tell the order"
            )
        rows = [positions.long()] if self.padding is None else [positions.long(), self.padding.long()]
        _refuse_different(rows, group)
        if self.in_pieces:
            pieces_of(group.rank(), group.size(), positions.shape[1])  # refuses an odd number of tokens, on all ranks
        own = torch.cat(rows)
        of_all = gathered(own, group).transpose(0, 1).flatten(1)  # [rows, S]
        _refuse_uncut(of_all[: len(positions)].view(len(positions), group.size(), -1))
        of_all = in_sequence(of_all.T, group.size()).T if self.in_pieces else of_all
        places, padding = of_all[: len(positions)], of_all[len(positions) :].bool()
        if self.in_pieces:
            _refuse_other_cut(places, padding, 2 * group.size())
        batch = len(positions) if self.padding is None else len(padding)
        embeds = torch.empty((), dtype=self.dtype, device=own.device).expand(batch, places.shape[1], 1)
        masking = importlib.import_module("transformers.masking_utils")
        common = {"config": self.config, "inputs_embeds": embeds, "attention_mask": padding if len(padding) else None}
        if not self.causal:
            return masking.create_bidirectional_mask(**common), places
        # As transformers does: with a cache it does not look for packed documents.
        packed = None if options.get("use_cache") else places
        return masking.create_causal_mask(**common, past_key_values=None, position_ids=packed), places


def _refuse_different(rows: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Raise `DisagreementError` on every rank if their positions and masks differ in shape: in each forward."""
    shapes = [len(rows[0]), len(rows[1]) if len(rows) > 1 else 0, rows[0].shape[1]]
    by_rank = gathered(torch.tensor([shapes], device=rows[0].device), group).flatten(1).tolist()
    if any(other != shapes for other in by_rank):
        ranks = zip(dist.get_process_group_ranks(group), by_rank, strict=True)
        what = "; ".join(
            f"rank {rank}: {tokens} tokens, attention_mask {masks > 0}" for rank, (_, masks, tokens) in ranks
        )
        raise DisagreementError(
            f"context_parallel: ranks of {describe(group)} have other shares of the sequence ({what}): give every rank "
            "what cut() returns"
        )


def _refuse_uncut(places: torch.Tensor) -> None:
    """Raise `ValueError` if the positions [B, R, s] of each rank begin at 0, as those of a whole sequence do."""
    if torch.equal(places, torch.arange(places.shape[2], device=places.device).expand_as(places)):
        raise ValueError(
            "context_parallel: the positions of every rank begin at 0: give the model what cut(input_ids, ...) "
            "returns, or position_ids of each rank's part; whole sequences run inside of whole()"
        )


def _refuse_other_cut(places: torch.Tensor, padding: torch.Tensor, pieces: int) -> None:
    """Raise `ValueError` if a piece does not go on where the one before it ends, in positions [B, S].

    padding: [B, S], or [0, S]: tokens that are none have any position. Position 0 begins a document.
    """
    starts = torch.arange(1, pieces, device=places.device) * (places.shape[1] // pieces)
    goes_on = (places[:, starts] == places[:, starts - 1] + 1) | (places[:, starts] == 0)
    if len(padding):
        goes_on = goes_on | ~padding[:, starts] | ~padding[:, starts - 1]
    if not goes_on.all():
        raise ValueError(
            "context_parallel: keys are gathered, and the positions of the ranks are not those of two pieces for each "
            f"rank, number i and {pieces} - 1 - i of {pieces}: give the model what cut(input_ids, ...) returns"
        )


def _run_whole(original: Function) -> Function:
    """Make the method ``generate`` of a model's class: each rank generates from whole sequences."""

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _WHOLE.set(True)
        try:
            return original(self, *args, **kwargs)
        finally:
            _WHOLE.reset(token)

    return generate


@functools.cache
def _generate_patch(kind: str) -> PatchSet:
    patch = Patch(
        target=f"{kind}.generate",
        replacement=_run_whole,
        parameters=None,
        inherited=True,
        reason="generates from whole sequences although the model's ranks share those of its training",
    )
    return PatchSet("transformers", VERSIONS, [patch], newest="5.23.0")
