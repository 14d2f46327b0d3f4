"""COC_DETERMINISTIC=tp in Megatron-core: how its weights are packed, and the sums and masks beside its linear layers.

Sums over the tensor-parallel group outside of the linear layers:

vocabulary-parallel embedding   exact: one rank has a row, the others zeros
cross-entropy                   the sum of exponentials, in blocks of the vocabulary and the tree
gradient norm                   the sums of squares, in the blocks of each weight
norms, row-parallel biases      their gradients, in blocks of rows and the tree, with and without sequence parallelism
norms of queries and keys       their gradients, in blocks of heads and the tree
attention dropout               no sum: the mask of all heads is drawn on every rank, which takes its own heads

What has no such form is refused at the first call of a layer (`refuse_what_depends_on_the_degree`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ascend_parallel.ops.blocks import BlockedFeatures
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.ops.tree import sum_of_blocks
from ascend_parallel.overlap.row_blocks import RowBlocks
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.dtensor_norm import squares_of_blocks
from ascend_parallel.patches.framework import described, models_with
from ascend_parallel.patches.megatron.attention import attend_in_one_order, refuse_other_kernels
from ascend_parallel.patches.norms import install_norm, is_blocked, run_norm

# Since this version a fused [gate; up] weight says so: its partition_stride is 2.
STRIDE_IS_KNOWN = (0, 16)
# Since this version the cross-entropy is given its group.
LOSS_TAKES_GROUP = (0, 19)
# Since this version parameters may be clipped in groups, and the method that returns their gradients has another name.
NORM_TAKES_GROUP = (0, 19)

# Configurations whose sums or masks over the tensor-parallel group have no tree.
REFUSED = {
    "num_moe_experts": "experts and their router",
    "mtp_num_layers": "the layers of multi-token prediction",
    "defer_embedding_wgrad_compute": "a deferred weight gradient of the output layer",
    "use_kitchen": "Kitchen's layers",
    "cross_entropy_loss_fusion": "the fused cross-entropy",
}

# The norms of a rank's heads [s, b, heads / R, head_dim]. Megatron sums the gradients of all ranks.
HEAD_NORMS = ("q_layernorm", "k_layernorm")
# Classes of Megatron-core whose layers' weights are packed as `parts_of` says.
KNOWN_PARENTS = ("SelfAttention", "MLP", "GPTModel")


class KnownLayouts:
    """The layers whose weights are packed in a known way: a program's own, and those of `KNOWN_PARENTS`."""

    def __init__(self, fixed_tiles: bool) -> None:
        """Know none; fixed_tiles: what stands between layers has to compute each row alike, too."""
        self._known: WeakSet[Any] = WeakSet()
        self._fixed_tiles = fixed_tiles

    def refuse_others(self, layer: Any) -> None:
        """Raise `DegreeError` for a layer of another class of Megatron-core, such as a Mamba mixer's."""
        if layer in self._known:
            return
        for model in models_with(layer):
            for parent in model.modules():
                kind = type(parent)
                if not kind.__module__.startswith("megatron.core.") or kind.__name__ in KNOWN_PARENTS:
                    self._known.update(parent.children())
                elif any(child is layer for child in parent.children()):
                    raise DegreeError(
                        f"{described(layer)}: how {kind.__module__}.{kind.__name__} packs its weight is not known"
                    )
                _refuse_shared_rows(parent)
                if self._fixed_tiles:
                    refuse_other_kernels(parent)
        self._known.add(layer)


def _refuse_shared_rows(module: Any) -> None:
    """Raise `DegreeError` for a module whose gradients Megatron sums over the ranks' rows, and that has no blocks."""
    named = module.named_parameters(recurse=False)
    summed = [name for name, each in named if getattr(each, "sequence_parallel", False)]
    if summed and not is_blocked(module) and type(module).__name__ != "RowParallelLinear":
        raise DegreeError(
            f"config sequence_parallel=True: the gradient of {summed[0]} of {described(module)} "
            "is summed over the ranks' rows, and has a tree only in norms inside of a TransformerBlock"
        )


def parts_of(layer: Any, weight: torch.Tensor) -> tuple[int, ...]:
    """Return the features of each packed part of a column layer's weight on this rank: of [gate; up] two.

    Megatron packs queries, keys and values group by group, so that every rank's part is a run of whole groups.
    """
    stride = getattr(layer._parameters.get("weight"), "partition_stride", 1)
    return (weight.shape[0] // stride,) * stride if stride > 1 else ()


def refuse_what_depends_on_the_degree(layer: Any, ranks: int, version: tuple[int, ...]) -> None:
    """Raise `DegreeError` if Megatron's configuration has sums or masks whose bits depend on the degree."""
    config = layer.config
    for name, what in REFUSED.items():
        if getattr(config, name, None):
            raise DegreeError(f"config {name}={getattr(config, name)!r}: {what} have no tree")
    if getattr(config, "gated_linear_unit", False) and version < STRIDE_IS_KNOWN:
        text = ".".join(map(str, version))
        raise DegreeError(
            f"{type(layer).__name__}: megatron-core {text} does not tell which weights are "
            f"packed as [gate; up]; {'.'.join(map(str, STRIDE_IS_KNOWN))} and later do"
        )
    groups = getattr(config, "num_query_groups", None)
    if groups and groups % ranks:
        raise DegreeError(f"{groups} query groups cannot be shared by {ranks} ranks")
    if config.sequence_parallel and getattr(config, "hidden_dropout", 0) and torch.is_grad_enabled():
        raise DegreeError(
            f"config hidden_dropout={config.hidden_dropout} with sequence_parallel=True: each "
            "rank draws masks for its own rows: set it to 0, or train without sequence parallelism"
        )


def row_blocks(layer: Any, group: dist.ProcessGroup) -> RowBlocks:
    """Return the blocks of rows of a parallel layer's output."""
    return RowBlocks(group=group if layer.sequence_parallel else None, summed_later=True)


def patch_sets() -> dict[str, Callable[[Any], PatchSet]]:
    """Return the makers of the patches of sums and masks, by the module whose import they wait for.

    Without COC_DETERMINISTIC=tp the sets are empty.
    """
    return {
        module: functools.partial(_patch_set, module)
        for module in dict.fromkeys(each.module for each in _patches((), False))
    }


def _patch_set(module: str, megatron: Any) -> PatchSet:
    every = _patches(megatron.version, megatron.settings.arithmetic.fixed_tiles)
    patches = [each for each in every if each.module == module]
    return PatchSet("megatron-core", None, [*megatron.settings.arithmetic.tree_needs(*patches)])


def _group() -> dist.ProcessGroup:
    """Return Megatron-core's tensor-parallel group."""
    state = importlib.import_module("megatron.core.parallel_state")
    group: dist.ProcessGroup = state.get_tensor_model_parallel_group()
    return group


def _patches(version: tuple[int, ...], fixed_tiles: bool) -> list[Patch]:
    of_group = ("tp_group",) if version >= LOSS_TAKES_GROUP else ()
    gradients = "get_main_grads_for_grad_norm"
    of_norm: tuple[str, ...] = ()
    if version >= NORM_TAKES_GROUP:
        gradients, of_norm = "get_grads_for_grad_norm", ("grad_norm_group",)
    return [
        Patch(
            target="megatron.core.tensor_parallel.cross_entropy.VocabParallelCrossEntropy.calculate_predicted_logits",
            replacement=_predicted_logits,
            parameters=("vocab_parallel_logits", "target", "logits_max", "vocab_start_index", "vocab_end_index"),
            reason="sums exponentials over the vocabulary in the tree",
        ),
        Patch(
            target="megatron.core.tensor_parallel.cross_entropy._VocabParallelCrossEntropy.forward",
            replacement=_cross_entropy,
            parameters=("ctx", "vocab_parallel_logits", "target", "label_smoothing", *of_group),
            reason="refuses label smoothing, whose mean over the vocabulary has no tree",
        ),
        Patch(
            target="megatron.core.transformer.dot_product_attention.DotProductAttention.forward",
            replacement=attend_in_one_order if fixed_tiles else _attention,
            parameters=(
                "self",
                "query",
                "key",
                "value",
                "attention_mask",
                "attn_mask_type",
                "attention_bias",
                "packed_seq_params",
            ),
            reason="attends in one order of sums" if fixed_tiles else "draws the dropout mask of all heads",
        ),
        Patch(
            target="megatron.core.transformer.transformer_block.TransformerBlock.forward",
            replacement=_block,
            parameters=None,
            reason="sums the gradients of norms in blocks of rows",
        ),
        Patch(
            target=f"megatron.core.optimizer.optimizer.MegatronOptimizer.{gradients}",
            replacement=_gradients_for_norm,
            parameters=("self", *of_norm),
            reason="sums the squares of gradients in the blocks of their weights",
        ),
    ]


def _cross_entropy(original: Function) -> Function:
    """Make the function that replaces ``_VocabParallelCrossEntropy.forward``."""

    @functools.wraps(original)
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, *groups: Any
    ) -> Any:
        if label_smoothing:
            raise DegreeError(f"label_smoothing={label_smoothing}: its mean over the vocabulary has no tree")
        for group in filter(None, groups):
            ranks, own = dist.get_process_group_ranks(group), dist.get_process_group_ranks(_group())
            if ranks != own:
                raise DegreeError(
                    f"cross-entropy with a tp_group of ranks {ranks}: only the tensor-parallel group, of ranks {own}, "
                    "has a tree"
                )
        return original(ctx, logits, target, label_smoothing, *groups)

    return forward


def _predicted_logits(original: Function) -> Function:
    """Make the function that replaces ``VocabParallelCrossEntropy.calculate_predicted_logits``."""

    @functools.wraps(original)
    def calculate(*args: Any, **kwargs: Any) -> Any:
        group = _group()
        target_mask, masked_target, predicted, _, exp_logits = original(*args, **kwargs)
        features = BlockedFeatures((exp_logits.shape[-1],), group.size())
        if features.refusal:
            raise DegreeError(f"cross-entropy: {features.refusal}")
        sums = [block.sum(dim=-1) for block in features.blocks_of(exp_logits, -1)]
        total = sum_of_blocks(sums, group).view(exp_logits.shape[:-1])
        # Megatron-core adds what the ranks return: the total and zeros, in any order.
        return target_mask, masked_target, predicted, total if group.rank() == 0 else total.zero_(), exp_logits

    return calculate


class WholeDropout(torch.nn.Module):
    """Dropout of attention's probabilities [b, heads / R, sq, sk], with a mask drawn for the heads of all ranks."""

    def __init__(self, probability: float, group: dist.ProcessGroup) -> None:
        """Drop with `probability`."""
        super().__init__()
        self.probability, self._group = probability, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with dropped elements, the others scaled; the random state is the one that all ranks share."""
        from megatron.core.tensor_parallel import random  # the program has imported it

        ranks, heads = self._group.size(), x.shape[1]
        with random.get_cuda_rng_tracker().fork(random.get_data_parallel_rng_tracker_name()):
            kept = x.new_empty(x.shape[0], ranks * heads, *x.shape[2:]).bernoulli_(1 - self.probability)
        own = kept[:, self._group.rank() * heads :][:, :heads]
        return x * own.div_(1 - self.probability)


def _attention(original: Function) -> Function:
    """Make the method that replaces ``DotProductAttention.forward``."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        dropout = self.attention_dropout
        if not (self.training and getattr(dropout, "p", 0)):
            return original(self, *args, **kwargs)
        self.attention_dropout = WholeDropout(dropout.p, _group())
        try:
            return original(self, *args, **kwargs)
        finally:
            self.attention_dropout = dropout

    return forward


def _block(original: Function) -> Function:
    """Make the method that replaces ``TransformerBlock.forward``: all its norms run in blocks of rows."""
    seen: WeakSet[Any] = WeakSet()

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in seen:
            for path, module in self.named_modules():
                if _is_norm(module):
                    of_heads = path.rpartition(".")[2] in HEAD_NORMS
                    install_norm(module, functools.partial(norm, of_heads), in_force)
            seen.add(self)
        return original(self, *args, **kwargs)

    def in_force() -> bool:
        return any(vars(kind).get("forward") is forward for kind in _transformer_block().__mro__)

    def norm(of_heads: bool, module: Any, own: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor):
            return own(*args, **kwargs)
        parameters = dict(module.named_parameters(recurse=False))
        shared = of_heads or any(getattr(each, "sequence_parallel", False) for each in parameters.values())
        blocks = RowBlocks(group=_group() if shared else None, dim=-2 if of_heads else 0, summed_later=True)
        return run_norm(module, own, x, parameters, blocks)

    return forward


def _transformer_block() -> type:
    kind: type = importlib.import_module("megatron.core.transformer.transformer_block").TransformerBlock
    return kind


def _is_norm(module: Any) -> bool:
    """Tell whether a module has parameters that act on all features of a row, on ranks that may share the rows."""
    if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        return True
    marked = any(hasattr(each, "sequence_parallel") for each in module.parameters(recurse=False))
    return marked and type(module).__name__ != "RowParallelLinear"


def _gradients_for_norm(original: Function) -> Function:
    """Make the method that replaces ``MegatronOptimizer.get_main_grads_for_grad_norm``, of the group that it is given.

    It returns one gradient of one element, the norm of all, on the first rank, and none on the others: Megatron-core
    adds the squares over the ranks.
    """

    @functools.wraps(original)
    def gradients(self: Any, *of_group: Any, **named: Any) -> list[torch.Tensor]:
        if any(kind.__name__ == "DistributedOptimizer" for kind in type(self).__mro__):
            raise _not_whole(self)
        group = _group()
        kept = {id(gradient) for gradient in original(self, *of_group, **named)}
        blocks, replicated = [], []
        for parameter in self.get_parameters():
            gradient = parameter.grad
            if gradient is None or id(gradient) not in kept:
                continue
            if getattr(parameter, "tensor_model_parallel", False):
                dim, parts = parameter.partition_dim, parameter.partition_stride
                features = [gradient.shape[dim] * group.size() // parts] * parts
                blocks.append(squares_of_blocks(gradient, features, dim, group))
            else:
                replicated.append(gradient.detach().float().square().sum())
        if len(blocks) + len(replicated) != len(kept):
            raise _not_whole(self)
        total = norm_of(blocks, replicated, group)
        return [] if total is None or group.rank() else [total.view(1)]

    return gradients


def _not_whole(optimizer: Any) -> DegreeError:
    return DegreeError(
        f"{type(optimizer).__name__} clips gradients that are not those of its parameters: their norm has no tree"
    )


def norm_of(
    blocks: Sequence[torch.Tensor], replicated: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> torch.Tensor | None:
    """Return the norm of all gradients from the squares of this rank's blocks and of the gradients that all ranks have.

    `replicated` counts on the first rank. None without gradients.
    """
    squares = list(replicated)
    if blocks:
        of_tensors = torch.stack(list(blocks), 1)  # [8 / R, tensors]
        squares.append(sum_of_blocks(list(of_tensors.unbind()), group).sum())
    return torch.stack(squares).sum().sqrt() if squares else None
