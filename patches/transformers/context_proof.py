"""The proof that a model gives one rank's numbers where ranks share its sequences: drawn tokens, whole and shared.

Context parallelism takes a model's attention in hand; its positions, masks and losses are the model's own. `prove` runs
the model's forward on a few tokens, on each rank whole and on all ranks shared, and compares: outputs of tokens without
a mask, with padding and with packed documents, and the loss. What can be said in another way is tried in turn:
positions that begin after the padding index, labels that are not shifted, a loss that is the mean of a rank's.

    refused     outputs that have no row for each token, or other numbers in it (the model as such)
    refused     masks, documents and labels with which the numbers are others, if `cut` is given these

Each rank runs the same forwards in the same order, and they decide together. Before each exchange, and before FSDP2
gathers weights, ranks say that they have come (`all_came`): a rank whose forward raises announces its failure
(`failures_announced`), and the others raise too. The model is left as it was: hooks other than those of frameworks do
not run, buffers and attributes are put back, no random state changes, overlap is off.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from ascend_parallel.ops import COUNTS
from ascend_parallel.overlap.selective_checkpoint import without_trace
from ascend_parallel.patches.base import written_in
from ascend_parallel.patches.transformers.layers import ACTIVE_PATCH
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.consistency import DisagreementError, announce_failure, store_all_gather
from ascend_parallel_autoload.frameworks import DEEPSPEED, TORCH, TRANSFORMERS

IGNORED = -100  # the label of a token that has no loss
# A loss is a sum over the labels of the next tokens, over the tokens' own, or a mean over those that a rank has.
SHIFTED, SUMS, MEANS = "the labels of the next tokens", "the labels of the tokens", "the mean over a rank's labels"
# The largest difference of an output, by the largest output; of 16 bits the median over a rank's tokens.
LIMITS = {torch.float64: 1e-6, torch.float32: 5e-3}
OF_16_BITS = 2e-2
# Packages whose hooks are the model's own.
OF_THE_MODEL = (TORCH.package, TRANSFORMERS.package, DEEPSPEED.package, "accelerate", "peft", "ascend_parallel")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
TOPIC = "context proof"  # of what ranks tell each other
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)  # of all modules


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was proved of a model.

    done
        Whether the model has been run; until then the rest is assumed.
    causal
        Whether tokens read only those before them, so that padding at the end needs no mask.
    padding_idx
        None: positions begin at 0. A number: they begin after it, and tokens with this number have no position.
    packs
        Whether the model's mask separates documents by their positions.
    loss
        `SHIFTED`, `SUMS` or `MEANS`; None: there is no loss, or none that ranks can share.
    outputs
        The names of the outputs that were compared.
    refused
        Why `cut` may not be given "labels", "attention_mask", "holes" in a mask, or "position_ids" of documents.
    """

    done: bool = False
    causal: bool = True
    padding_idx: int | None = None
    packs: bool = True
    loss: str | None = SHIFTED
    outputs: frozenset[str] = frozenset()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def positions_of(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the positions that the model itself would give tokens [B, S]."""
        if self.padding_idx is None:
            return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        tokens = (input_ids != self.padding_idx).long()
        return tokens.cumsum(1) * tokens + self.padding_idx

    def refuse(
        self, labels: torch.Tensor | None, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> None:
        """Raise `ValueError` if `cut` is given what was refused."""
        if labels is not None:
            self.refuse_labels()
        if attention_mask is not None and position_ids is None:
            if "attention_mask" in self.refused:
                raise ValueError(self.refused["attention_mask"])
            if "holes" in self.refused and (attention_mask.long().diff(dim=1) > 0).any():
                raise ValueError(self.refused["holes"])
        if position_ids is not None and "position_ids" in self.refused and (position_ids.diff(dim=1) != 1).any():
            raise ValueError(self.refused["position_ids"])

    def refuse_labels(self) -> None:
        """Raise `ValueError` if the model's loss is none that ranks can share."""
        if "labels" in self.refused:
            raise ValueError(self.refused["labels"])


class Sharing(Protocol):
    """What a proof needs of the ranks that share a model's sequences (`ContextParallel`)."""

    group: dist.ProcessGroup
    exchange: str
    causal: bool

    def trial(self, proof: Proof) -> AbstractContextManager[None]:
        """Run forwards as a part of a proof."""

    def whole(self) -> AbstractContextManager[None]:
        """Run forwards on whole sequences."""

    def parts(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's part of a batch."""

    def own_places(self, length: int) -> torch.Tensor:
        """Return the places of this rank's tokens."""


def inner_model(model: Any) -> Any:
    """Return the model of transformers inside of what wraps it."""
    kind = importlib.import_module("transformers").PreTrainedModel
    return next((module for module in model.modules() if isinstance(module, kind)), model)


def floating_outputs(output: Any) -> dict[str, torch.Tensor]:
    """Return a model's outputs that are tensors of floating numbers, by name; a tuple has no names."""
    if not isinstance(output, Mapping):
        return {}
    return {name: x for name, x in output.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}


def can_run(model: Any, group: dist.ProcessGroup) -> bool:
    """Tell, the same on every rank, whether a model can be run now: with the same weights on all ranks.

    Not on the meta device, nor where DeepSpeed has taken the weights' elements away, nor if its layers have been
    sharded by FSDP2 and it has not.
    """
    from torch.distributed.fsdp import FSDPModule  # torch may be importing it when this module is loaded

    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    ready = not any(weight.is_meta or not weight.numel() for weight in model.parameters())
    ready = ready and (not sharded or isinstance(model, FSDPModule))
    mine = {"ready": ready, "weights": _digest_of_weights(model) if ready else ""}
    return all(value == mine and ready for value in _by_rank(group, "what the model's weights are", mine).values())


def prove(model: Any, context: Sharing) -> Proof:
    """Return the proof of a model; raise `ValueError` if it cannot run, or gives other numbers where it is shared.

    Every rank of the group calls this, with the same model.
    """
    kind = type(inner_model(model)).__name__
    loaded = not any(weight.is_meta for weight in model.parameters())
    mine = {"model": kind, "exchange": context.exchange, "weights": _digest_of_weights(model) if loaded else ""}
    by_rank = _by_rank(context.group, "the model's weights", mine)
    if unloaded := [rank for rank, value in by_rank.items() if not value["weights"]]:
        raise ValueError(
            f"context_parallel: {kind} has weights on the meta device on ranks {unloaded}: load them before cut() or "
            "prove()"
        )
    if any(value != mine for value in by_rank.values()):
        what = "; ".join(f"rank {rank}: {', '.join(map(str, value.values()))}" for rank, value in by_rank.items())
        raise DisagreementError(
            f"context_parallel: ranks of {describe(context.group)} have other models, exchanges or weights ({what}): "
            "load the same weights on all ranks that share a sequence, and give the same exchange"
        )
    device = next(model.parameters()).device
    with ExitStack() as undisturbed:
        undisturbed.enter_context(_as_it_was(model))
        undisturbed.enter_context(without_trace(device))
        undisturbed.enter_context(torch.no_grad())
        if not _has_several_dtypes(model):  # else it may need the program's autocast
            undisturbed.enter_context(torch.autocast(device.type, enabled=False))
        undisturbed.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            return Trials(model, context, device).proof()
        except (ValueError, DisagreementError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if "SequenceMask" in reason:
                reason = "it computes with its attention mask itself"
            elif _has_several_dtypes(model) and not torch.is_autocast_enabled(device.type):
                reason += "; its weights have several dtypes: if it needs torch.autocast, call this inside of it"
            raise ValueError(
                f"context_parallel: {kind} does not run on a sequence that ranks share: {reason}"
            ) from error


class Trials:
    """Forwards of a model on drawn tokens, whole and shared."""

    def __init__(self, model: Any, context: Sharing, device: torch.device) -> None:
        """Draw two sequences, one token shorter than what divides evenly among the ranks."""
        self.model, self.context, self.device = model, context, device
        self.inner = inner_model(model)
        self.kind = type(self.inner).__name__
        ranks = context.group.size()
        self.length = ranks * (8 if ranks <= 4 else 4 if ranks <= 16 else 2) - 1
        config = self.inner.config
        self.padding = getattr(config, "pad_token_id", None)
        self.parameters = inspect.signature(type(self.inner).forward).parameters
        generator = torch.Generator("cpu").manual_seed(1)
        ids = torch.randint(config.vocab_size - 1, (2, self.length), generator=generator, device="cpu")
        if self.padding is not None:  # no drawn token is padding
            ids += ids >= self.padding
        self.ids = ids.to(device)
        self.own = context.own_places(self.length + 1).to(device)
        self.of_16_bits = OF_16_BITS
        from torch.distributed.fsdp import FSDPModule  # torch may be importing it when this module is loaded

        sharded: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:  # `_as_it_was` takes the hooks away
            module.register_forward_pre_hook(lambda *_: all_came(context.group), prepend=True)

    def proof(self) -> Proof:
        """Return the proof; raise `ValueError` if there is none."""
        plain = {"input_ids": self.ids}
        whole = self.whole(plain)
        self._refuse_outputs(whole)
        self._measure_rounding(whole)
        proof = Proof(done=True, causal=self.context.causal, outputs=frozenset(whole) | {"loss"})
        error = self.error(plain, whole, proof)
        if error:
            proof = self.with_positions(proof, whole)
            error = self.error(plain, whole, proof)
        if error:
            proof = dataclasses.replace(proof, packs=False)
            error = self.error(plain, whole, proof)
        if error:
            raise ValueError(
                f"context_parallel: {self.kind} gives other numbers where ranks share a sequence ({error}): it does "
                "not take its positions from position_ids, or reads other tokens than by its attention"
            )
        return self.with_loss(self.with_documents(self.with_masks(proof)), whole)

    def accepts(self, name: str) -> bool:
        """Tell whether the model's forward takes an argument of this name."""
        kinds = [each.kind for each in self.parameters.values()]
        return name in self.parameters or inspect.Parameter.VAR_KEYWORD in kinds

    def whole(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the outputs of a batch on this rank alone."""
        all_came(self.context.group)
        with self.context.trial(Proof()), self.context.whole():
            return floating_outputs(self.model(**batch))

    def shared(self, batch: Mapping[str, torch.Tensor], proof: Proof) -> dict[str, torch.Tensor]:
        """Return the outputs of this rank's part of a batch."""
        all_came(self.context.group)
        with self.context.trial(proof):
            parts = self.context.parts(batch)
            if not self.accepts("num_items_in_batch"):
                parts.pop("num_items_in_batch", None)
            return floating_outputs(self.model(**parts))

    def error(self, batch: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], proof: Proof) -> str:
        """Return in words what is wrong if ranks share a batch; empty: nothing."""
        return "; ".join(filter(None, self.errors(batch, whole, proof)))

    def errors(self, batch: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], proof: Proof) -> list[str]:
        """Return in words what is wrong in each sequence of a batch if ranks share it, the same on every rank."""
        shared = self.shared(batch, proof)
        inside = self.own[self.own < self.length]
        read = batch.get("attention_mask", torch.ones_like(self.ids))[:, inside].bool()
        worst = [("", 0.0)] * len(self.ids)
        for name, x in whole.items():
            if name not in shared or shared[name].shape[:2] != (len(self.ids), len(self.own)):
                return [f"no {name} of a rank's tokens"] * len(self.ids)
            coarse = self.rounds_to_16_bits(x)
            scale, limit = float(x.abs().max()), self.of_16_bits if coarse else LIMITS[x.dtype]
            rows = shared[name][:, : len(inside)]
            differences = _of_tokens(rows, x[:, inside]) / (scale or 1.0)
            for index, (row, tokens) in enumerate(zip(differences, read, strict=True)):
                if not tokens.any():
                    continue
                error = float(row[tokens].median() if coarse else row[tokens].max()) / limit
                if not error <= max(worst[index][1], 1.0):  # also of numbers that are none
                    worst[index] = f"{name} is off by {error * limit:.2g} of its largest", error
        return self.agreed([text for text, _ in worst])

    def rounds_to_16_bits(self, x: torch.Tensor) -> bool:
        """Tell whether an output has the rounding of 16 bits: its own, or that of weights before it was widened."""
        return x.dtype not in LIMITS or any(weight.dtype not in LIMITS for weight in self.model.parameters())

    def agreed(self, texts: Sequence[str]) -> list[str]:
        """Return for each of some questions the first rank's answer that is not empty."""
        by_rank = _by_rank(self.context.group, "a proof of the model", {"texts": list(texts)})
        return [
            next(filter(None, of_all), "") for of_all in zip(*(each["texts"] for each in by_rank.values()), strict=True)
        ]

    def with_positions(self, proof: Proof, whole: Mapping[str, torch.Tensor]) -> Proof:
        """Return the proof with the padding index after which the model's positions begin, if there is one."""
        indices = {getattr(module, "padding_idx", None) for module in self.inner.modules()}
        most = getattr(self.inner.config, "max_position_embeddings", 0)
        for index in sorted(each for each in indices if each is not None and each + self.length < most):
            found = dataclasses.replace(proof, padding_idx=index)
            places = self.whole({"input_ids": self.ids, "position_ids": found.positions_of(self.ids)})
            if all(torch.allclose(places[name], x, atol=1e-5) for name, x in whole.items()):
                return found
        return proof

    def with_masks(self, proof: Proof) -> Proof:
        """Return the proof with what is wrong if a sequence is padded at its end, or has holes."""
        mask = torch.ones_like(self.ids)
        mask[0, -3:] = mask[1, :2] = mask[1, self.length // 2] = 0
        ids = self.ids.where(mask.bool(), self.padding or 0)
        batch = {"input_ids": ids, "attention_mask": mask}
        if not self.accepts("attention_mask"):
            return _refusing(proof, attention_mask=f"context_parallel: {self.kind} takes no attention_mask")
        padded, holes = self.errors(batch, self.whole(batch), proof)
        if padded:
            proof = _refusing(
                proof,
                attention_mask=f"context_parallel: {self.kind} gives other numbers where ranks share a sequence with "
                f"an attention_mask ({padded})",
            )
        if holes:
            proof = _refusing(
                proof,
                holes=f"context_parallel: {self.kind} gives other numbers where ranks share a sequence with an "
                f"attention_mask that is not ones followed by zeros ({holes}): pad at the end, or give position_ids",
            )
        return proof

    def with_documents(self, proof: Proof) -> Proof:
        """Return the proof with whether the model separates packed documents, or what is wrong with these."""
        first = self.length // 2 + 2  # no boundary of a part
        places = torch.arange(self.length, device=self.device)
        places = (places % first).expand_as(self.ids) + (0 if proof.padding_idx is None else proof.padding_idx + 1)
        batch = {"input_ids": self.ids, "position_ids": places}
        whole = self.whole(batch)
        for packs in (proof.packs, False):
            error = self.error(batch, whole, dataclasses.replace(proof, packs=packs))
            if not error:
                return dataclasses.replace(proof, packs=packs)
        return _refusing(
            proof,
            position_ids=f"context_parallel: {self.kind} gives other numbers where ranks share packed documents "
            f"({error}): give each document a sequence of its own",
        )

    def with_loss(self, proof: Proof, whole: Mapping[str, torch.Tensor]) -> Proof:
        """Return the proof with what the model's loss is a sum of, or why ranks cannot share it."""
        if "labels" not in self.parameters or "logits" not in whole:
            return _refusing(
                proof,
                labels=f"context_parallel: {self.kind} computes no loss from labels of tokens: compute a loss from its "
                "outputs, and give cut() no labels",
            )
        labels = _telling_labels(whole["logits"])
        batch = {"input_ids": self.ids, "labels": labels}
        loss = float(self.whole(batch).get("loss", torch.nan))
        for kinds in ((SHIFTED,), (SUMS, MEANS)):
            if kinds == (SHIFTED,) and not self.accepts("shift_labels"):
                continue
            shared = self.shared(batch, dataclasses.replace(proof, loss=kinds[0]))
            for kind in kinds:
                if self._adds_up(shared, batch, kind, loss):
                    return self._without_labels(dataclasses.replace(proof, loss=kind))
        return _refusing(
            proof,
            labels=f"context_parallel: the loss of {self.kind} is no sum over the labels of tokens, of which ranks can "
            "have shares: compute a loss from its outputs, and give cut() no labels",
        )

    def _adds_up(
        self, shared: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor], kind: str, loss: float
    ) -> bool:
        """Tell whether the ranks' losses are shares of `loss`, as this kind of loss would be."""
        own = self.own[self.own < self.length]
        labels = batch["labels"]
        counts = int((labels[:, own] != IGNORED).sum()), int((labels != IGNORED).sum())
        share = float(shared["loss"]) if "loss" in shared else torch.nan
        if kind == MEANS:
            share = share * counts[0] / counts[1] if counts[0] else 0.0
        said = {"share": share, "loss": loss}
        by_rank = _by_rank(self.context.group, "a proof of the model's loss", said)
        limit = OF_16_BITS if any(weight.dtype not in LIMITS for weight in self.model.parameters()) else 1e-4
        total = float(sum(each["share"] for each in by_rank.values()))
        loss = float(next(iter(by_rank.values()))["loss"])  # one rank's: all ranks answer alike
        return abs(total - loss) <= limit * abs(loss)

    def _without_labels(self, proof: Proof) -> Proof:
        """Return the proof; in training too a sum over labels is 0 where no token has one."""
        if proof.loss == MEANS:
            return proof
        labels = torch.full_like(self.ids, IGNORED)
        labels[0, 1] = 0  # no rank divides by 0
        with _attributes(self.model, training=True):
            loss = self.shared({"input_ids": self.ids, "labels": labels}, proof)["loss"]
        labelled = {0, 1} & set(self.own.tolist())
        (rest,) = self.agreed(["" if labelled or float(loss) == 0 else f"{float(loss):.2g}"])
        if not rest:
            return proof
        return _refusing(
            proof,
            labels=f"context_parallel: the loss of {self.kind} has {rest} for a rank without labels, which is no sum "
            "over labels: compute a loss from its outputs, and give cut() no labels",
        )

    def _measure_rounding(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Allow outputs of 16 bits by how much the same sequences differ in another batch, where experts may change."""
        if not any(self.rounds_to_16_bits(x) for x in whole.values()):
            return
        again = self.whole({"input_ids": torch.cat([self.ids, self.ids])})
        for name, x in whole.items():
            differences = _of_tokens(again[name][: len(x)], x)
            self.of_16_bits = max(self.of_16_bits, 5 * float(differences.median() / x.abs().max().float()))

    def _refuse_outputs(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Raise `ValueError` unless each output has a row for each token, and says anything."""
        if not whole:
            raise ValueError(f"context_parallel: {self.kind} gives no outputs by name: nothing of it can be compared")
        for name, x in whole.items():
            if x.shape[:2] != self.ids.shape:
                raise ValueError(
                    f"context_parallel: {self.kind} gives {name} {list(x.shape)} for tokens {list(self.ids.shape)}, "
                    "without a row for each token: of a rank's tokens it would be another number"
                )
            if not x.isfinite().all() or bool((x == x[:1, :1]).all()):
                raise ValueError(
                    f"context_parallel: {self.kind} gives the same {name}, or no finite one, for all drawn tokens: "
                    "nothing of it can be proved: load its weights first"
                )


def _of_tokens(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the largest difference between x and y [B, S, ...] of each token, [B, S]."""
    x, y = (each if each.dtype in LIMITS else each.float() for each in (x, y))
    return (x - y).abs().reshape(*x.shape[:2], -1).amax(2)


def _refusing(proof: Proof, **sentences: str) -> Proof:
    """Return a proof that refuses what `sentences` names, each with its reason; without labels there is no loss."""
    if "labels" in sentences:
        proof = dataclasses.replace(proof, loss=None)
    return dataclasses.replace(proof, refused={**proof.refused, **sentences})


def _telling_labels(logits: torch.Tensor) -> torch.Tensor:
    """Return labels [B, S] that are likely after the token before, and not after the token itself; some are missing."""
    before = torch.cat([logits[:, :1] * 0, logits[:, :-1]], 1)
    labels = (before.float() - logits.float()).argmax(-1)
    labels[1, logits.shape[1] // 2 :] = labels[0, -1] = IGNORED  # another number for each rank
    return labels


def _by_rank(group: dist.ProcessGroup, place: str, value: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    return store_all_gather(group, place, value, DisagreementError, topic=TOPIC)


def all_came(group: dist.ProcessGroup) -> None:
    """Return once every rank has come to the same place of a proof; raise `DisagreementError` if a rank has failed."""
    _by_rank(group, "the next exchange of a proof", {})


@contextmanager
def failures_announced(group: dist.ProcessGroup) -> Iterator[None]:
    """Have the other ranks raise `DisagreementError` where they wait for this rank if it raises inside this context.

    Every rank enters it. A `DisagreementError` has been raised on all ranks.
    """
    try:
        yield
    except DisagreementError:
        raise
    except Exception as error:
        where = f"rank {dist.get_rank()} of {describe(group)}"
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        announce_failure(group, f"context_parallel: {where} has failed: {reason}", DisagreementError, topic=TOPIC)
        raise


def _has_several_dtypes(model: Any) -> bool:
    """Tell whether a model's weights have several dtypes of floating numbers, such as norms in float32."""
    return len({weight.dtype for weight in model.parameters() if weight.is_floating_point()}) > 1


def _digest_of_weights(model: Any) -> str:
    """Return a digest of some numbers of each weight that is not sharded."""
    sums = [
        float(weight.detach().flatten()[:: max(1, weight.numel() // 16)].float().sum())
        for weight in model.parameters()
        if not isinstance(weight, DTensor) and weight.is_floating_point()
    ]
    return hashlib.sha256(str(sums).encode()).hexdigest()[:16]


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Leave a model, its configuration and overlap as they are after what runs in this context; evaluate in it."""
    configs = {id(config): config for config in (getattr(each, "config", None) for each in model.modules()) if config}
    counts, framework = COUNTS.as_dict(), ACTIVE_PATCH.framework
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    of_configs = [(config, dict(vars(config))) for config in configs.values() if hasattr(config, "__dict__")]
    with ExitStack() as stack:
        stack.callback(COUNTS.restore, counts)
        stack.callback(setattr, ACTIVE_PATCH, "framework", framework)
        stack.callback(_restore, before, of_configs)
        ACTIVE_PATCH.framework = None
        for config, values in of_configs:
            if "use_cache" in values:
                config.use_cache = False
        for module, values, buffers in before:
            module.training = False
            module._buffers.update({name: x if x is None else x.clone() for name, x in buffers.items()})
            for name in HOOKS:
                hooks = values[name]
                vars(module)[name] = type(hooks)((key, hook) for key, hook in hooks.items() if of_framework(hook))
        for hooks in (getattr(torch_module, name) for name in GLOBAL_HOOKS):
            stack.callback(_refill, hooks, dict(hooks))
            _refill(hooks, {key: hook for key, hook in hooks.items() if of_framework(hook)})
        yield


def _refill(hooks: dict[int, Any], values: Mapping[int, Any]) -> None:
    """Give a dictionary these values, in their order."""
    hooks.clear()
    hooks.update(values)


def _restore(
    modules: Sequence[tuple[Any, Mapping[str, Any], Mapping[str, Any]]],
    configs: Sequence[tuple[Any, Mapping[str, Any]]],
) -> None:
    """Put back the attributes and buffers that modules and configurations had."""
    for module, values, buffers in modules:
        for name in set(vars(module)) - set(values):
            del vars(module)[name]
        vars(module).update(values)
        module._buffers.clear()
        module._buffers.update(buffers)
    for config, values in configs:
        vars(config).clear()
        vars(config).update(values)
    from torch.distributed.fsdp import FSDPModule  # torch may be importing it when this module is loaded

    for module, _, _ in modules:
        if isinstance(module, FSDPModule):  # it would keep its weights whole until its next backward
            module.reshard()


@contextmanager
def _attributes(model: Any, *, training: bool) -> Iterator[None]:
    """Give all modules of a model this flag inside this context, which are in evaluation."""
    for module in model.modules():
        module.training = training
    try:
        yield
    finally:
        for module in model.modules():
            module.training = False


def of_framework(hook: Any) -> bool:
    """Tell whether a hook belongs to a framework, which shards a model or moves it, and not to a program.

    A function that a decorator wraps, such as ``torch.no_grad``, belongs to who wrote it.
    """
    while (inner := getattr(hook, "func", None) or getattr(hook, "__wrapped__", None)) is not None:
        hook = inner
    return written_in(getattr(hook, "__func__", hook)).partition(".")[0] in OF_THE_MODEL
