"""The part of ``bench --context`` that runs on the ranks: attention of a sequence that ranks share, both passes.

Causal attention of one sequence, by torch's scaled_dot_product_attention. All variants compute the same: by torch's own
all-to-alls before and after it ("serial"), and in groups of heads, by both exchanges where the heads allow it: of heads
("heads, 2 groups") and of gathered keys and values ("gather, 2 groups"), whose ranks have two pieces of the sequence
each. T_comp is the attention of a rank without an exchange, T_comm the whole exchange without attention: by torch's
all-to-alls, or in one group, which sends faster.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ascend_parallel.ops.call import Exchange
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.head_exchange import HeadGroup
from ascend_parallel.ops.key_gather import EXCHANGES, GATHER, KeyGroup, choose_exchange, cut_heads
from ascend_parallel.overlap.context import (
    Attention,
    attend_pieces,
    attention_call,
    attention_in_turn,
    run_attention,
)
from ascend_parallel.settings import Settings
from ascend_parallel.text import parse_int, shown
from ascend_parallel.tuning.bench.exchanges import AUTO, COMMUNICATION, COMPUTATION, SERIAL, Run, plan_of, times_of
from ascend_parallel.tuning.bench.shapes import MOST
from ascend_parallel.tuning.cost_model.tables import PlanningError
from ascend_parallel.tuning.launch.ranks import report
from ascend_parallel.tuning.measured.decider import Decider

SEED = 7


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Attention of a sequence that ranks share.

    tokens     of the whole sequence
    heads      of queries
    key_heads  of keys and values
    width      features of a head
    """

    tokens: int
    heads: int
    key_heads: int
    width: int
    dtype: str = "float32"

    @classmethod
    def parse(cls, text: str, dtype: str, ranks: int) -> AttentionCase:
        """Read ``TOKENS,HEADS,KEYS,WIDTH``; raises `PlanningError` for another text, or heads that cannot be shared."""
        sizes = [parse_int(part) or 0 for part in text.split(",")]
        if len(sizes) != 4 or not all(0 < size <= MOST for size in sizes) or sizes[0] % (2 * ranks):
            raise PlanningError(
                f"--context {shown(text)} is not allowed: give TOKENS,HEADS,KEYS,WIDTH, with a multiple of {2 * ranks} "
                f"tokens, such as {2048 * ranks},8,8,64, each up to {MOST}"
            )
        tokens, heads, key_heads, width = sizes
        case = cls(tokens=tokens, heads=heads, key_heads=key_heads, width=width, dtype=dtype)
        try:
            case.chosen_exchange(ranks)
        except ValueError as error:
            raise PlanningError(f"--context {shown(text)} is not allowed: {error}") from error
        return case

    def chosen_exchange(self, ranks: int) -> str:
        """Return the exchange that runs unless another is asked for: "heads" or "gather"."""
        return choose_exchange(self.heads, self.key_heads, ranks)[0]

    def parts(self, ranks: int, exchange: str | None = None) -> int:
        """Return the number of heads of keys by which an exchange is cut, or the one that runs; 0: it cannot run."""
        try:
            return cut_heads(self.heads, self.key_heads, ranks, exchange or self.chosen_exchange(ranks))
        except ValueError:
            return 0

    def __str__(self) -> str:
        """Return the case in words."""
        return f"{self.tokens} tokens, {self.heads} heads of {self.width}, {self.key_heads} of keys, {self.dtype}"


def measure(group: dist.ProcessGroup, case: dict[str, Any], groups: list[int], rounds: int) -> dict[str, Any]:
    """Return the seconds of the slowest rank, by variant and round; T_comp and T_comm are among the variants."""
    runs, chosen = runs_of(AttentionCase(**case), group, groups)
    return {"times": times_of(runs, group, rounds), "auto": chosen, "torch": torch.__version__}


def tune(group: dist.ProcessGroup, case: dict[str, Any], groups: list[int]) -> dict[str, Any]:
    """Return a plan with the fastest number of groups of heads, as COC_TUNE measures them."""
    attention = _SharedAttention(AttentionCase(**case), group)
    report("timing groups of heads")
    overlapped = functools.partial(attention.overlapped, attention.exchange)
    return plan_of(attention.call, group, overlapped, functools.partial(overlapped, 1), groups)


def runs_of(case: AttentionCase, group: dist.ProcessGroup, groups: list[int]) -> tuple[dict[str, Run], str]:
    """Return the variants and parts of a forward and backward by name, and the variant that "auto" takes."""
    attention = _SharedAttention(case, group)
    runs: dict[str, Run] = {
        COMPUTATION: attention.compute,
        COMMUNICATION: functools.partial(attention.serial, _nothing),
        f"{COMMUNICATION} in one group": functools.partial(attention.overlapped, attention.exchange, 1, _nothing),
        SERIAL: attention.serial,
    }
    for exchange in EXCHANGES:
        most = case.parts(group.size(), exchange)
        for count in sorted({1, *groups}):
            if count <= most:
                runs[_variant(exchange, count)] = functools.partial(attention.overlapped, exchange, count)
    report("auto")
    runs[AUTO], chosen = attention.automatic()
    return runs, chosen


def _variant(exchange: str, groups: int) -> str:
    return f"{exchange}, {groups} group{'s' if groups > 1 else ''}"


class _SharedAttention:
    """The operands of this rank, and the variants of a forward and backward."""

    def __init__(self, case: AttentionCase, group: dist.ProcessGroup) -> None:
        self._case, self._group, self._ranks = case, group, group.size()
        self.exchange = case.chosen_exchange(group.size())
        generator = torch.Generator().manual_seed(SEED)

        def drawn(tokens: int, heads: int) -> torch.Tensor:
            shape = (tokens, 1, heads, case.width)
            return torch.randn(shape, generator=generator).to(getattr(torch, case.dtype)).requires_grad_()

        own = case.tokens // self._ranks
        heads = case.heads, case.key_heads, case.key_heads
        self._operands = [drawn(own, count) for count in heads]
        self._d_output = drawn(own, case.heads).detach()
        shared = case.parts(self._ranks)
        self._part: KeyGroup | None = None
        if self.exchange == GATHER:
            (self._part,) = KeyGroup.cut((shared,), [own] * self._ranks, group.rank())
            queries = self._operands[0]
        else:
            queries = drawn(case.tokens, case.heads // self._ranks)
        self._whole = [queries, drawn(case.tokens, shared), drawn(case.tokens, shared)]

    @property
    def call(self) -> Exchange:
        """The exchange, as its number of groups is chosen."""
        q, k, v = self._operands
        return attention_call(q, k, v, self._group, self.exchange)

    def overlapped(self, exchange: str, groups: int, attention: Attention | None = None) -> None:
        """Run the operator in `groups` groups of heads."""
        known = Known(number=groups)
        run = functools.partial(run_attention, group=self._group, settings=Settings(), known=known, exchange=exchange)
        q, k, v = self._operands
        self._backward(run(q, k, v, attention or attend), self._operands)

    def serial(self, attention: Attention | None = None) -> None:
        """Run all-to-alls, attention, and an all-to-all in turn, with torch's own autograd."""
        q, k, v = self._operands
        made = attention_in_turn(q, k, v, attention or attend, group=self._group, exchange=self.exchange)
        self._backward(made, self._operands)

    def compute(self) -> None:
        """Run the attention of this rank on operands that are there."""
        q, k, v = self._whole
        self._backward(attend(self._part, q, k, v), self._whole)

    def automatic(self) -> tuple[Run, str]:
        """Return the variant that COC_PARALLEL_NUM=auto takes, and its name."""
        run = functools.partial(self.overlapped, self.exchange)
        found = Decider(Settings(auto=True), keeps=False).known_of_exchange(
            self.call, self._group, lambda tried: run(tried.number), functools.partial(run, 1), self._device
        )
        return functools.partial(run, found.number), _variant(self.exchange, found.number)

    @property
    def _device(self) -> torch.device:
        return self._d_output.device

    def _backward(self, made: torch.Tensor, operands: list[torch.Tensor]) -> None:
        d_output = self._d_output if made.shape == self._d_output.shape else torch.ones_like(made)
        torch.autograd.grad(made, operands, d_output)


def attend(part: HeadGroup | KeyGroup | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention, [S, B, n, D]: of whole sequences, or of a rank's two pieces to gathered keys."""
    if isinstance(part, KeyGroup):
        return attend_pieces(_attend_rows, part, q, k, v, causal=True)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)


def _attend_rows(rows: slice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention of the queries at the places `rows`."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril_(rows.start)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).permute(2, 0, 1, 3)


def _nothing(part: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stand for attention: every operand is read, and its gradient is as large."""
    summed = (k + v).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return q + summed[: len(q)]
