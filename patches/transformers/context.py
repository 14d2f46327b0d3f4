"""Context parallelism of Hugging Face models: ranks share a sequence, and exchange heads under the model's attention.

`context_parallel` puts a function in the place of the model's attention implementation. It exchanges queries, keys and
values in groups of heads (overlap/context.py) and calls the implementation that the model had, sdpa or eager, on whole
sequences of a rank's heads; or it gathers keys and values in groups, and calls it on the rows of a rank's tokens, which
are then two pieces of the sequence, so that causal masks give all ranks as much. `ContextParallel.cut` gives each rank
its part of a batch.

Positions, masks and losses are the model's own: `prove` (context_proof.py) runs the model on drawn tokens, whole and
shared, before its first batch, and what does not give the same numbers is refused. `SharedForward` (shared_forward.py)
stands before the model's forward, and refuses there what was not proved. The mask is that of the whole sequence
(sequence_mask.py). Written against transformers 5.18 to 5.23, masking_utils.py and modeling_utils.py.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import importlib.metadata
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakIdKeyDictionary

from ascend_parallel.ops.head_exchange import HeadGroup
from ascend_parallel.ops.key_gather import GATHER, HEADS, KeyGroup, choose_exchange, pieces_of
from ascend_parallel.overlap.context import attend_pieces, run_attention
from ascend_parallel.overlap.projected import Projection
from ascend_parallel.overlap.projected_heads import AttentionInput
from ascend_parallel.patches.attention_projection import PROJECTIONS, is_plain, projection_of
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.dtensor_linear import ATTENTION_DROPOUT
from ascend_parallel.patches.exchanged_attention import exchanged_attention, log_exchange
from ascend_parallel.patches.transformers.context_proof import (
    GLOBAL_HOOKS,
    IGNORED,
    SHIFTED,
    Proof,
    all_came,
    can_run,
    failures_announced,
    of_framework,
    prove,
)
from ascend_parallel.patches.transformers.layers import ACTIVE_PATCH
from ascend_parallel.patches.transformers.sequence_mask import SequenceMask, Share, is_causal
from ascend_parallel.patches.transformers.shared_forward import SharedForward
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.settings import Settings, current_settings

log = logging.getLogger("ascend_parallel")

VERSIONS = ">=5.18,<5.24"
NAME = "ascend_parallel"
GATHERED = ("sdpa", "eager")  # the attention implementations that take masks of some rows
# What some models give their attention beside the mask, for each head or each token of a rank.
NOT_EXCHANGED = ("position_bias", "s_aux", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "cache")

LAYER_DROPOUT = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_dropout")
# The hooks of a module.
ALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Whether attention runs on what this rank has, as in `generate`.
_WHOLE: ContextVar[bool] = ContextVar("whole sequences", default=False)


def context_parallel(
    model: Any, group: dist.ProcessGroup | None = None, *, exchange: str | None = None
) -> ContextParallel:
    """Have the ranks of `group` share the sequences of a transformers model; return what cuts batches for it.

    model
        A decoder (or encoder) of text, as it was loaded: its attention implementation stays the one that computes.
        It is run on drawn tokens, whole and shared, without a trace, and must give the same numbers. A model that
        cannot run yet (on the meta device, with other weights on each rank, its layers sharded and itself not) is
        proved by the first `cut`.
    group
        The ranks that share a sequence; None: all ranks.
    exchange
        "heads": each rank gets whole sequences of some heads. "gather": each rank gets the keys and values of all
        tokens. None: heads where each rank gets as many heads of keys, else what sends less.

    ``generate`` runs on whole sequences of each rank. Raises `ValueError` if the model or its heads cannot be shared by
    the ranks, or gives other numbers where they do, `DisagreementError` if a rank has another exchange, fails alone or
    never comes, `DegreeError` with COC_DETERMINISTIC=tp, `PatchError` for a version of transformers that is not known.
    """
    own = group or dist.group.WORLD
    if own is None:
        raise ValueError("context_parallel: torch.distributed is not initialised")
    with failures_announced(own):
        return _share(model, own, exchange)


def _share(model: Any, own: dist.ProcessGroup, exchange: str | None) -> ContextParallel:
    """Have the ranks of a group share a model's sequences, as `context_parallel` does."""
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
    context = ContextParallel(own, implementation, way, model)
    masks, attentions = _interfaces()
    masks.register(context.name, context.mask)
    attentions.register(context.name, context.attend)
    # FSDP2 gives a model a class of its own, which no module has.
    generating = [kind for kind in type(model).__mro__ if hasattr(kind, "generate") and _is_named(kind)]
    if generating and "generate" not in vars(generating[0]):
        name = f"{generating[0].__module__}.{generating[0].__name__}"
        _generate_patch(name).apply(importlib.metadata.version("transformers"))
    model.set_attn_implementation(context.name)
    forward = SharedForward.install(model, context)
    try:
        if can_run(model, own):
            context.proof = prove(model, context)
            context.hand_inputs()
    except Exception:
        forward.remove()
        model.set_attn_implementation(context.implementation)
        raise
    return context


def _context_named(name: str) -> ContextParallel | None:
    """Return the context of this process whose attention implementation has this name."""
    _, attentions = _interfaces()
    context = getattr(attentions._global_mapping.get(name), "__self__", None)
    return context if isinstance(context, ContextParallel) else None


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
    for name in LAYER_DROPOUT:
        if getattr(config, name, 0):
            raise ValueError(
                f"context_parallel: {kind} has {name}={getattr(config, name)}; only 0 is allowed, because ranks would "
                "drop other layers, and wait for each other"
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
    proof
        What was proved of the model, and what was not.
    attended
        How many exchanges have run.
    causal
        Whether all masks that were asked for during a proof were causal.
    projecting
        The attention modules whose output, as it is, goes through one linear layer, as a proof has seen.
    widths
        The attention modules that a proof has seen, with the features of a head.
    """

    def __init__(self, group: dist.ProcessGroup, implementation: str, exchange: str, model: Any) -> None:
        """Take a name of its own: models may be shared by different groups."""
        self.group, self.implementation, self.exchange = group, implementation, exchange
        self.proof, self.attended, self.proving, self.causal = Proof(), 0, False, True
        self._model, self._share = weakref.ref(model), Share()
        self.projecting: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.widths: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()
        self._batches = WeakIdKeyDictionary()  # digests of whole batches, by the tensors that cut made of them
        self._at_documents: set[torch.Size] = set()  # shapes of parts that were cut where documents begin
        _, attentions = _interfaces()
        if (before := getattr(attentions._global_mapping.get(implementation), "__self__", None)) is not None:
            self.implementation = before.implementation  # the model has been made context parallel before
        taken = sum(known.startswith(NAME) for known in attentions._global_mapping)
        self.name = f"{NAME}_{taken + 1}" if taken else NAME
        self._same_batch = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name: another process has no context of this name, or its own."""
        return _context_named, (self.name,)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Return itself: a copy of a model has the same ranks."""
        return self

    def prove(self) -> None:
        """Prove now what the numbers rely on, unless that has been done; every rank of the group calls it.

        Raises `ValueError` if the model cannot run, or if ranks that share a sequence give other numbers,
        `DisagreementError` if another rank fails alone.
        """
        model = self._model()
        if not self.proof.done and model is not None:
            with failures_announced(self.group):
                self.proof = prove(model, self)
                self.hand_inputs()

    @contextmanager
    def trial(self, proof: Proof) -> Iterator[None]:
        """Run the model's forward as a part of a proof in this context, with what `proof` assumes."""
        before, implementation = self.proof, self.implementation
        self.proof, self.proving = proof, True
        if implementation == "flex_attention":  # is compiled anew for each shape and mask
            self.implementation = "sdpa"
        try:
            yield
        finally:
            self.proof, self.implementation, self.proving = before, implementation, False

    @contextmanager
    def sharing(self, share: Share) -> Iterator[None]:
        """Hand masks that are made in this context what the forward knows of this rank's part."""
        before, self._share = self._share, share
        try:
            yield
        finally:
            self._share = before

    def share_of(self, input_ids: Any, position_ids: Any, graded: int) -> Share:
        """Return the share of a forward that is given these tensors."""
        given = [x for x in (position_ids, input_ids) if isinstance(x, torch.Tensor)]
        return Share(
            positions=position_ids,
            batch=next((self._batches[x] for x in given if x in self._batches), None),
            graded=graded,
            at_documents=bool(given) and given[0].shape in self._at_documents,
            packs=self.proof.packs,
        )

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

        A sequence that is no multiple of the ranks is padded at its end, with tokens that have no label, and that
        nobody reads: those before them read on in causal models, others get an attention_mask. Where keys are gathered
        a rank has two pieces of 2 R, number i and 2 R - 1 - i, and the sequence is padded to a multiple of 2 R. The
        model's loss is this rank's share: the sum over the ranks is the mean over all labels. So gradients are to be
        summed over the ranks; where they are averaged, multiply the loss by the number of ranks. Raises `ValueError`
        for other shapes, and for what was not proved of the model, `DisagreementError` if the ranks' first batches
        differ; if later ones do, the model's forward raises it.
        """
        _refuse_shape(input_ids)
        given = {"labels": labels, "attention_mask": attention_mask, "position_ids": position_ids}
        for name, x in given.items():
            if x is not None and x.shape != input_ids.shape:
                shapes = f"{name} is {list(x.shape)}, and input_ids {list(input_ids.shape)}"
                raise ValueError(f"context_parallel: {shapes}: both must be alike")
        self.prove()
        self.proof.refuse(labels, attention_mask, position_ids)
        batch = {"input_ids": input_ids} | {name: x for name, x in given.items() if x is not None}
        self._confirm_same_batch(input_ids)
        parts = self.parts(batch, pad_token_id)
        places = parts["position_ids"]
        self._batches[parts["input_ids"]] = self._batches[places] = _digest(batch)
        # In order, the parts of documents as long as a part look like whole sequences of each rank.
        if position_ids is not None and self.group.size() > 1:
            starts = position_ids[:, :: places.shape[1]]
            if starts.shape[1] > 1 and not starts.any():
                self._at_documents.add(places.shape)
        return parts

    def parts(self, batch: Mapping[str, torch.Tensor], pad_token_id: int = 0) -> dict[str, torch.Tensor]:
        """Return this rank's part of a batch as `cut` makes it, with what `proof` says of the model."""
        ids, labels, proof = batch["input_ids"], batch.get("labels"), self.proof
        ranks, length = self.group.size(), ids.shape[1]
        more = -length % (2 * ranks if self._in_pieces else ranks)
        mask, places = batch.get("attention_mask"), batch.get("position_ids")
        if places is None:
            places = proof.positions_of(ids)
        if mask is None and more and not proof.causal:
            mask = torch.ones_like(ids)
        after = places[:, -1:] + torch.arange(1, more + 1, device=places.device)
        whole = {"input_ids": pad(ids, (0, more), value=pad_token_id), "position_ids": torch.cat([places, after], 1)}
        if mask is not None:
            whole["attention_mask"] = pad(mask, (0, more), value=0)
        if labels is not None and proof.loss == SHIFTED:
            shifted = pad(labels, (0, more + 1), value=IGNORED)[:, 1:]
            whole |= {"labels": shifted, "shift_labels": shifted}
        elif labels is not None:
            whole["labels"] = pad(labels, (0, more), value=IGNORED)
        own = self.own_places(length + more).to(ids.device)
        parts = {name: x[:, own] for name, x in whole.items()}
        if labels is not None:
            parts["num_items_in_batch"] = (whole["labels"] != IGNORED).sum()
        return parts

    @property
    def _in_pieces(self) -> bool:
        return self.exchange == GATHER and self.group.size() > 1

    def own_places(self, length: int) -> torch.Tensor:
        """Return where this rank's tokens lie in a padded sequence of `length` tokens."""
        rank, ranks, places = self.group.rank(), self.group.size(), torch.arange(length, device="cpu")
        if self._in_pieces:
            return torch.cat([places[piece] for piece in pieces_of(rank, ranks, length // ranks)])
        return places.chunk(ranks)[rank]

    def _confirm_same_batch(self, input_ids: torch.Tensor) -> None:
        """Compare the first batch on all ranks here; forwards compare the later ones, beside the positions."""
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
    def runs_whole(self) -> bool:
        """Whether attention runs on what this rank has."""
        return self.group.size() == 1 or _WHOLE.get()

    def mask(
        self, *, q_length: int, kv_length: int, mask_function: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        """Stand for the mask of the whole sequence: transformers asks for a mask once in a forward."""
        if self.proving:
            self.causal = self.causal and is_causal(mask_function) is not False
        if self.runs_whole:
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
            attention_mask,
            mask_function.__qualname__,
            is_causal(mask_function),
            config,
            options["dtype"],
            in_pieces=self._in_pieces,
            share=self._share,
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
        if self.runs_whole:
            return self._own_attention(module, query, key, value, attention_mask, options)
        if not isinstance(attention_mask, SequenceMask):
            raise ValueError(f"context_parallel: {type(module).__name__} is given a mask that the model made itself")
        self.attended += 1
        self._refuse_options(module, options)
        if self.proving:
            self.widths[module] = gcd(query.shape[3], value.shape[3])
            all_came(self.group)
        mask, positions = attention_mask.of_all(options, self.group)
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
                return attend_pieces(of_rows, heads, *received, causal=bool(attention_mask.causal))
            result = own_attention(mask, *received)
            if self.proving:  # the result is exchanged next
                all_came(self.group)
            return result

        projection, by_rows = self._projection_of(module, operands[0], value.shape[3])
        how: dict[str, Any] = {"exchange": self.exchange, "projection": projection, "by_rows": by_rows}
        if self.proving:
            o = run_attention(*operands, attention, group=self.group, settings=Settings(), **how)
        else:
            o = exchanged_attention(module, operands, attention, self.group, ACTIVE_PATCH.framework, **how)
        return o.permute(1, 0, 2, 3).contiguous(), None

    def _projection_of(self, module: Any, query: torch.Tensor, width: int) -> tuple[Projection | None, bool]:
        """Return the layer that reads the output, which has `width` features in each head; and whether it may be cut.

        Whether heads come back by rows is the same on all ranks; hooks on the layer, which may change what it reads,
        need not be: they get the output alone.
        """
        if not self.proving and module not in self.projecting:
            return None, False
        if (layer := projection_of(module, query, width)) is None:
            return None, False
        if _is_hooked(layer):
            self._say(module, f"{type(layer).__name__}, which reads attention's output, has hooks on what it reads")
            return None, True
        asked = functools.partial(self.projecting.add, module)
        return Projection(weight=layer.weight, bias=getattr(layer, "bias", None), on_use=asked), True

    def hand_inputs(self) -> None:
        """Have the attention modules that a proof has seen get hidden states whose heads are projected later."""
        for module in self.widths:
            if not any(isinstance(hook, InputHook) for hook in module._forward_pre_hooks.values()):
                module.register_forward_pre_hook(InputHook(self), with_kwargs=True)

    def input_of(self, module: torch.nn.Module, x: Any) -> Any:
        """Return hidden states, of which the module's linear layers make heads once the exchange asks for them.

        No collective depends on it: the exchange asks for the same heads, whatever a rank has around its layers.
        """
        width = self.widths.get(module)
        if width is None or self.exchange != HEADS or self.runs_whole or ACTIVE_PATCH.framework is None:
            return x
        if self.proving or not isinstance(x, torch.Tensor):
            return x
        weights: list[torch.Tensor] = []
        for name, layer in module.named_children():
            weight = getattr(layer, "weight", None)
            if name in PROJECTIONS or weight is None or weight.dim() != 2 or weight.shape[-1] != x.shape[-1]:
                continue
            if not is_plain(weight, x) or len(weight) % width:
                continue
            if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
                self._say(module, f"{name} is a {type(layer).__name__} with a forward of its own")
            elif any(getattr(layer, hooks) for hooks in ALL_HOOKS):
                self._say(module, f"{name} has hooks")
            else:
                weights.append(weight)
        return AttentionInput.of(x, weights, width) if weights else x

    def _say(self, module: torch.nn.Module, why: str) -> None:
        """Log once, on this rank, why a projection does not run under the exchange."""
        text = f"{type(module).__name__}: {why}"
        if not self.proving and ACTIVE_PATCH.framework is not None and text not in self._said:
            self._said.add(text)
            log.warning("context_parallel: %s: it is projected before or behind the exchange, not under it", text)

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


class InputHook:
    """A hook before an attention module's forward: hands it hidden states whose heads are projected later."""

    def __init__(self, context: ContextParallel | None) -> None:
        """Take the module's context; None: it was unpickled in a process whose ranks share nothing."""
        self.context = context

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments with hidden states that are projected later, the first or by name."""
        if self.context is None:
            return None
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": self.context.input_of(module, kwargs["hidden_states"])}
        return ((self.context.input_of(module, args[0]), *args[1:]), kwargs) if args else None


def _is_hooked(layer: Any) -> bool:
    """Tell whether hooks of a program see, and may change, what a layer reads."""
    of_all = [hook for name in GLOBAL_HOOKS for hook in getattr(torch_module, name).values()]
    return bool(layer._forward_pre_hooks or layer._backward_hooks) or not all(map(of_framework, of_all))


@contextmanager
def _attribute(holder: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value inside this context."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _refuse_shape(input_ids: torch.Tensor) -> None:
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"context_parallel: input_ids are {list(input_ids.shape)}, and must be [batch, tokens]")


def _digest(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return an odd integer that changes with each number of a batch: a scalar on its device, with no wait for it."""
    digest = torch.ones((), dtype=torch.int64, device=batch["input_ids"].device)
    for x in batch.values():
        places = torch.arange(1, x.numel() + 1, device=x.device)
        mixed = (x.flatten().long() + 1442695040888963407) * (places * 6364136223846793005)
        digest = digest * 31 + (mixed ^ (mixed >> 29)).sum()
    return digest | 1


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
