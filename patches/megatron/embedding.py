"""Megatron-core's vocabulary-parallel embedding in regions: its rows come while the first layer computes.

The embedding looks up its own part of the vocabulary, and hands the rows to a mapping that sums them over ranks. While
an embedding is called, the mapping runs the sum in chunks. So the collectives are the same on every rank, whatever a
rank alone has put in place of the forwards of embeddings; the mappings, and their autograd functions, ranks compare
(`Megatron.replacement`). Megatron-core's module calls the mapping, so the sum alone is a `CoveredCall`.

Written against megatron-core 0.10 to 0.19. Without regions nothing is patched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.unfinished import UnfinishedTensor
from ascend_parallel.overlap.embedding import embedding_sizes, sum_embedded
from ascend_parallel.overlap.known import known_of
from ascend_parallel.overlap.layer import ParallelLinear
from ascend_parallel.overlap.layer_shape import ROW
from ascend_parallel.patches.base import Function, Patch, PatchSet
from ascend_parallel.patches.covered_call import CoveredCall, run_covered
from ascend_parallel.patches.framework_patch import OnTop
from ascend_parallel.patches.megatron.conflicts import MAPPINGS
from ascend_parallel.patches.megatron.layers import Megatron
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel_autoload.frameworks import MEGATRON

MODULE = MEGATRON.module
LANGUAGE_MODEL = "megatron.core.models.common.embeddings.language_model_embedding"
# The autograd functions of the mappings that sum rows over ranks, and whether each rank gets its rows of the sum.
SUMS = {"_ReduceFromModelParallelRegion": False, "_ReduceScatterToSequenceParallelRegion": True}

# Embeddings whose rows ranks share once every rank has the sum: with sequence parallelism and learned positions.
_SHARED_LATER: WeakSet[Any] = WeakSet()
# Whether all ranks have noted so at the first call of an embedding.
_ALL_SHARE_LATER: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class _Calls(threading.local):
    """The call of an embedding that runs in this thread, and has not summed its rows yet."""

    current: EmbeddingCall | None = None


_CALLS = _Calls()


class EmbeddingCall:
    """A call of an embedding whose sum over ranks runs in chunks."""

    def __init__(self, embedding: Any, megatron: Megatron) -> None:
        """Hold the module, whose settings are those of `megatron`."""
        self.embedding, self._megatron, self.group = embedding, megatron, megatron.group_of(embedding)
        self._sizes: Sizes | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sum the rows that are handed to a mapping in this context."""
        outer, _CALLS.current = _CALLS.current, self
        try:
            yield
        finally:
            _CALLS.current = outer

    def summed(self, y: torch.Tensor, *, scatters: bool) -> torch.Tensor | None:
        """Return the sum of y [b, s, H], or this rank's rows of that of y [s, b, H]; None: it is not to be cut."""
        megatron, group = self._megatron, self.group
        if y.dim() != 3 or not megatron.leaves_rows:
            return None
        layer = ParallelLinear(
            kind=ROW,
            group=group,
            settings=megatron.settings,
            known=known_of(megatron.settings),
            arithmetic=megatron.settings.arithmetic,
            sequence_parallel=scatters,
            leaves_rows=megatron.leaves_rows,
        )
        summed = CoveredCall(
            layer=self.embedding,
            group=group,
            device=y.device,
            agreeing=group,
            decide=functools.partial(self._decide, layer, y),
            ours=functools.partial(self._sum, layer, y),
            theirs=lambda: None,
            checked=None,  # a row is zero on all ranks but one: its sum has no error
        )
        rows: torch.Tensor | None = run_covered(megatron, summed)
        return rows

    def _decide(self, layer: ParallelLinear, y: torch.Tensor) -> Known:
        """Note the tokens of each chunk of the sum; `original`: it is not to be cut."""
        shared = layer.sequence_parallel
        batch, tokens = (y.shape[1], y.shape[0]) if shared else y.shape[:2]
        later = not shared and _all_share_later(self.embedding, self.group)
        self._sizes = embedding_sizes(batch, tokens, layer, shared_later=later)
        return layer.known._replace(original=self._sizes is None)

    def _sum(self, layer: ParallelLinear, y: torch.Tensor, *_: object) -> torch.Tensor:
        """Return the sum over ranks of y, in the chunks that `_decide` has noted."""
        assert self._sizes is not None
        rows = sum_embedded(y.contiguous(), self._sizes, self.embedding.num_embeddings_per_partition, layer)
        if isinstance(rows, UnfinishedTensor):
            self._megatron.region_choice.ran(self.group)
        return rows


def _all_share_later(embedding: Any, group: dist.ProcessGroup) -> bool:
    """Tell whether ranks share the rows of the sum later. Ranks ask each other once: one may have its own forwards."""
    if embedding not in _ALL_SHARE_LATER:
        mine = {"shared later": embedding in _SHARED_LATER}
        found = store_all_gather(group, "its embedding", mine, DisagreementError, topic="embedding")
        _ALL_SHARE_LATER[embedding] = all(each["shared later"] for each in found.values())
    return _ALL_SHARE_LATER[embedding]


def patch_set(megatron: Megatron) -> PatchSet:
    """Return the patches of the embedding and of the sums over ranks; without regions there are none."""
    embedding: dict[str, Any] = {"replacement": lambda original: embedding_call(original, megatron), "parameters": None}
    patches = [
        Patch(
            target=f"{MODULE}.VocabParallelEmbedding.__call__",
            **embedding,
            reason="sums over ranks under the first layer's norm and matmul",
            inherited=True,
        ),
        Patch(
            target=f"{MODULE}.VocabParallelEmbedding.forward",
            **embedding,
            reason="does so where a program calls it by its name",
            gives_way_to="mindspeed",  # it puts its own there after the layers were imported
        ),
        *(
            Patch(
                target=f"{MAPPINGS}.{owner}.apply",
                replacement=functools.partial(sum_of_call, scatters=scatters),
                parameters=None,
                reason="sums the rows of an embedding in chunks",
                inherited=True,
            )
            for owner, scatters in SUMS.items()
        ),
    ]
    return PatchSet("megatron-core", None, patches if megatron.settings.region else [])


def language_model_patch_set(megatron: Megatron) -> PatchSet:
    """Return the patch that looks at what happens to the embedding's rows; without regions there is none."""
    patch = Patch(
        target=f"{LANGUAGE_MODEL}.LanguageModelEmbedding.forward",
        replacement=_noting,
        parameters=None,
        reason="sums the embedding's rows in the order in which ranks share them",
    )
    return PatchSet("megatron-core", None, [patch] if megatron.settings.region else [])


ON_TOP = OnTop(MODULE, patch_set), OnTop(LANGUAGE_MODEL, language_model_patch_set)


def _noting(original: Function) -> Function:
    """Make the method that replaces ``LanguageModelEmbedding.forward``."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        scatters = self.config.sequence_parallel and getattr(self, "scatter_to_sequence_parallel", True)
        if scatters and not self.reduce_scatter_embeddings:
            _SHARED_LATER.add(self.word_embeddings)
        return original(self, *args, **kwargs)

    return forward


def embedding_call(original: Function, megatron: Megatron) -> Function:
    """Make the method that stands in front of ``VocabParallelEmbedding.__call__``, or replaces its forward."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, self, *args, **kwargs)
        if _runs_already(self) or _is_left_alone(self, megatron):
            return run()
        with EmbeddingCall(self, megatron).running():
            tokens: torch.Tensor = next(iter((*args, *kwargs.values())))
            return megatron.timed(self, tokens, run)

    return call


def _runs_already(embedding: Any) -> bool:
    """Tell whether `__call__` of an embedding runs, which calls its forward."""
    return _CALLS.current is not None and _CALLS.current.embedding is embedding


def _is_left_alone(embedding: Any, megatron: Megatron) -> bool:
    """Tell whether the sum must run as it is, on all ranks alike."""
    if torch.compiler.is_compiling() or not dist.is_initialized():
        return True
    if megatron.group_of(embedding).size() == 1 or getattr(embedding, "gtp_remat_size", 1) > 1:
        return True
    by_inference = getattr(embedding, "use_inference_optimized_reduce_scatter", False) and not embedding.training
    return by_inference or megatron.replacement(embedding)[0] is not None


def sum_of_call(original: Function, *, scatters: bool) -> Function:
    """Make the class method that stands in front of ``apply`` of an autograd function of `SUMS`."""

    @functools.wraps(original)
    def apply(cls: Any, input_: torch.Tensor, *options: Any) -> Any:
        if torch.compiler.is_compiling():  # its tracer knows the method of the base class alone
            return torch.compiler.disable(original)(cls, input_, *options)  # type: ignore[no-untyped-call]
        call = _CALLS.current
        if call is None or any(option is not None and option is not call.group for option in options[:1]):
            return original(cls, input_, *options)
        _CALLS.current = None
        rows = call.summed(input_, scatters=scatters)
        return original(cls, input_, *options) if rows is None else rows

    return apply
