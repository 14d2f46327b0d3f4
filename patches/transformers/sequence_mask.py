"""The mask of a sequence that ranks share: made by transformers' own functions, once in each forward of the model.

`SequenceMask` stands in a model's forward for that mask. The first attention gathers the positions and the padding of
all ranks; with them goes what must be alike on all ranks (`Share`), so that another batch, or another frozen parameter,
is an error on every rank before any rank waits for another.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.key_gather import in_sequence, pieces_of
from ascend_parallel.overlap.selective_checkpoint import hide_from_selective_checkpoint
from ascend_parallel.patches.exchanged_attention import gathered
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.consistency import DisagreementError


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """What a forward of the model knows of a rank's part of a batch before its attention runs.

    positions
        [B, s] or None: the position_ids that the model is given.
    batch
        A digest of the whole batch, an int64 scalar; None: the tensors are not those that `cut` returned.
    graded
        A digest of the parameters that require gradients; 0: no gradients are computed.
    at_documents
        Whether `cut` has made parts of this shape whose positions begin at 0 on every rank.
    packs
        Whether the model's mask separates documents by their positions.
    """

    positions: torch.Tensor | None = None
    batch: torch.Tensor | None = None
    graded: int = 0
    at_documents: bool = False
    packs: bool = True


def is_causal(mask_function: Any) -> bool | None:
    """Tell whether a mask function of transformers is causal or full, also of packed documents; None: it is neither."""
    masking = importlib.import_module("transformers.masking_utils")
    plain = {masking.causal_mask_function: True, masking.bidirectional_mask_function: False}
    inner = mask_function
    joined = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    names = [each.__qualname__.partition(".")[0] for each in joined]
    if names == ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        inner = inspect.getclosurevars(joined[1]).nonlocals["mask_function"]
    elif names[1:] == ["packed_sequence_mask_function"]:  # before 5.23
        inner = joined[0]
    return plain.get(inner)


@dataclass(eq=False)
class SequenceMask:
    """Stands in a model's forward for the mask of the whole sequence.

    padding
        [B, s] or None: whether this rank's tokens are no padding.
    function
        The name of transformers' function of two places, which says who reads whom.
    causal
        Whether a token reads only tokens before it; None: it reads others, or not all of them.
    config
        The model's configuration with its own attention implementation.
    dtype
        The dtype of the mask of eager attention.
    in_pieces
        Whether each rank has two pieces of the sequence (ops/key_gather.py).
    share
        What the forward knows of this rank's part.
    """

    padding: torch.Tensor | None
    function: str
    causal: bool | None
    config: Any
    dtype: torch.dtype
    in_pieces: bool = False
    share: Share = field(default_factory=Share)
    _of_all: tuple[Any, torch.Tensor] | None = None
    _of_rows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def of_all(self, options: Mapping[str, Any], group: dist.ProcessGroup) -> tuple[Any, torch.Tensor]:
        """Return mask and positions [B, S] of the whole sequence; every rank's first layer gathers them."""
        if self.causal is None:  # some models make masks that no layer of theirs reads
            raise ValueError(
                f"context_parallel: the model makes its mask by {self.function}, which is neither causal nor full"
            )
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
        positions = options.get("position_ids") if self.share.positions is None else self.share.positions
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            raise ValueError(
                "context_parallel: the model gives its attention no position_ids [B, s]: they tell the order"
            )
        rows = [positions.long()] if self.padding is None else [positions.long(), self.padding.long()]
        _refuse_different(rows, self.share, group)
        if self.in_pieces:
            pieces_of(group.rank(), group.size(), positions.shape[1])  # refuses an odd number of tokens, on all ranks
        own = torch.cat(rows)
        of_all = gathered(own, group).transpose(0, 1).flatten(1)  # [rows, S]
        if not self.share.at_documents:
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
        packed = None if options.get("use_cache") or not self.share.packs else places
        return masking.create_causal_mask(**common, past_key_values=None, position_ids=packed), places


def _refuse_different(rows: Sequence[torch.Tensor], share: Share, group: dist.ProcessGroup) -> None:
    """Raise `DisagreementError` on every rank if shapes, batches or frozen parameters differ: in each forward."""
    shapes = [rows[0].shape[1], len(rows[1]) if len(rows) > 1 else 0, len(rows[0]), share.at_documents, share.graded]
    mine = torch.tensor([*shapes, 0], device=rows[0].device)
    if share.batch is not None:
        mine[-1] = share.batch.to(mine.device)
    by_rank = gathered(mine[None], group).flatten(1).tolist()
    ranks, where = dist.get_process_group_ranks(group), describe(group)
    if any(other[:4] != by_rank[0][:4] for other in by_rank):
        found = [f"{tokens} tokens, attention_mask {masks > 0}" for tokens, masks, *_ in by_rank]
        raise DisagreementError(
            f"context_parallel: ranks of {where} have other shares of the sequence ({_by_rank(ranks, found)}): give "
            "every rank what cut() returns"
        )
    if len({batch for *_, batch in by_rank} - {0}) > 1:
        found = [f"digest {batch & 0xFFFFFFFF:08x}" for *_, batch in by_rank]
        raise DisagreementError(
            f"context_parallel: ranks of {where} cut different batches ({_by_rank(ranks, found)}): give all ranks that "
            "share a sequence the same batch"
        )
    if len({graded for *_, graded, _ in by_rank} - {0}) > 1:
        found = [f"digest {graded:08x}" for *_, graded, _ in by_rank]
        raise DisagreementError(
            f"context_parallel: on ranks of {where} other parameters require gradients ({_by_rank(ranks, found)}): "
            "freeze the same parameters on all ranks that share a sequence"
        )


def _by_rank(ranks: Sequence[int], found: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, found, strict=True))


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
