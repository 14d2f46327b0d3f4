"""The part of ``bench --context`` that runs on the ranks: attention of a sequence that ranks share, both passes.

Causal attention of one sequence, by torch's scaled_dot_product_attention. All variants compute the same: by torch's own
all-to-alls before and after it ("serial"), and in groups of heads, by both exchanges where the heads allow it: of heads
("heads, 2 groups") and of gathered keys and values ("gather, 2 groups"), whose ranks have two pieces of the sequence
each. T_comp is the attention of a rank without an exchange, T_comm the whole exchange without attention: by torch's
all-to-alls, or in one group, which sends faster.

The linear layers around attention, hidden states as wide as all heads of queries, are timed with it in the groups that
"auto" takes: before and behind the exchange, and under it (`Projections`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear, scaled_dot_product_attention

from ascend_parallel.ops.call import ALL_TO_ALL_MATMUL, HEAD_EXCHANGE, KEY_GATHER, Exchange, ExchangedMatmul
from ascend_parallel.ops.decision import Known
from ascend_parallel.ops.head_exchange import HeadGroup
from ascend_parallel.ops.key_gather import EXCHANGES, GATHER, HEADS, KeyGroup, choose_exchange, cut_heads
from ascend_parallel.ops.npu_limits import EXCHANGED_OPERATORS, supports_exchanged
from ascend_parallel.ops.record import MATMUL, RECORDING, Recorder
from ascend_parallel.overlap.context import (
    Attention,
    attend_pieces,
    attention_call,
    attention_in_turn,
    run_attention,
)
from ascend_parallel.overlap.projected import Projection
from ascend_parallel.overlap.projected_heads import AttentionInput
from ascend_parallel.settings import Settings
from ascend_parallel.text import parse_int, shown
from ascend_parallel.tuning.bench.exchanges import AUTO, COMMUNICATION, COMPUTATION, SERIAL, Run, plan_of, times_of
from ascend_parallel.tuning.bench.results import speedup_of
from ascend_parallel.tuning.bench.shapes import MOST
from ascend_parallel.tuning.cost_model.tables import PlanningError
from ascend_parallel.tuning.launch.ranks import report
from ascend_parallel.tuning.measured.decider import Decider

SEED = 7
BESIDE, UNDER = "before and behind", "under"  # where projections run


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

    @property
    def features(self) -> int:
        """The features of all heads of queries, as many as hidden states have here."""
        return self.heads * self.width

    def projection(self, ranks: int, device: str, soc: str = "") -> ExchangedMatmul:
        """Return the way back of all heads and their projection, which a fused operator may run."""
        rows, dtype = self.tokens // ranks, getattr(torch, self.dtype)
        return ExchangedMatmul(ALL_TO_ALL_MATMUL, rows, self.features, self.features, dtype, device, ranks, soc)

    def exchange(self, ranks: int, device: str, soc: str = "") -> Exchange:
        """Return the exchange that runs, with the projection behind it if heads are exchanged."""
        way, dtype, of_keys = self.chosen_exchange(ranks), getattr(torch, self.dtype), 2 * self.key_heads * self.width
        parts = self.parts(ranks, way)
        if way == GATHER:
            return Exchange(KEY_GATHER, parts, self.tokens, of_keys, dtype, device, ranks)
        features = self.features + parts * ranks // self.key_heads * of_keys
        projection = self.projection(ranks, device, soc)
        return Exchange(HEAD_EXCHANGE, parts, self.tokens, features, dtype, device, ranks, None, projection)

    def __str__(self) -> str:
        """Return the case in words."""
        return f"{self.tokens} tokens, {self.heads} heads of {self.width}, {self.key_heads} of keys, {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Projections:
    """How the linear layers around attention run under its exchange, and what that gains.

    features        of hidden states, of queries and of the output
    exchange        "heads" or "gather"
    groups          of the exchange
    inputs          the products in which queries are multiplied, and keys and values alike; 0: not under the exchange
    output          the products in which the output is multiplied; 0: not under the exchange
    fused           why no operator of torch_npu runs the exchange with the output's product
    before, under   seconds of forward and backward with projections before and behind the exchange, and under it
    speedup         the paired ratio of both, with its interval `low` to `high`
    """

    features: int
    exchange: str
    groups: int
    inputs: int
    output: int
    fused: str
    before: float
    under: float
    speedup: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the projections in words."""
        gained = f"{self.speedup:.2f} ({self.low:.2f}-{self.high:.2f}) times as fast as before and behind it"
        return (
            f"Projections ({self.features} features) under the exchange ({variant(self.exchange, self.groups)}): "
            f"{1e3 * self.under:.1f} ms, {gained}. {self._how()}. "
            f"{' and '.join(EXCHANGED_OPERATORS.values())} run none of it: {self.fused} (of a chip: explain --context)."
        )

    def _how(self) -> str:
        if self.exchange == GATHER:
            return "Of the output's the weight gradient alone, and no other, because keys are gathered"
        if self.groups == 1:
            return "All whole, because there is one group; keys and values are multiplied while queries are sent"
        changed = "whole, because pieces have other bits on this machine"
        inputs = f"in {self.inputs} groups of heads" if self.inputs > 1 else changed
        output = f"in {self.output} pieces of rows" if self.output > 1 else changed
        return f"Queries, keys and values {inputs}; the output {output}"


def measure(group: dist.ProcessGroup, case: dict[str, Any], groups: list[int], rounds: int) -> dict[str, Any]:
    """Return the seconds of the slowest rank, by variant and round; T_comp and T_comm are among the variants."""
    asked = AttentionCase(**case)
    runs, chosen = runs_of(asked, group, groups)
    times = times_of(runs, group, rounds)
    report("projections")
    projections = projections_of(asked, group, chosen, rounds)
    auto = variant(asked.chosen_exchange(group.size()), chosen)
    return {"times": times, "auto": auto, "projections": asdict(projections), "torch": torch.__version__}


def projections_of(case: AttentionCase, group: dist.ProcessGroup, groups: int, rounds: int) -> Projections:
    """Time attention with its projections, in so many groups of the exchange that runs."""
    layer, exchange = ProjectedAttention(case, group), case.chosen_exchange(group.size())
    runs: Mapping[str, Run] = {
        BESIDE: functools.partial(layer.run, groups),
        UNDER: functools.partial(layer.run, groups, inputs=exchange == HEADS, output=True),
    }
    inputs, output = layer.products(groups) if exchange == HEADS else (0, 0)
    times = times_of(runs, group, rounds)
    speedup, low, high = speedup_of(times[BESIDE], times[UNDER])
    fused = "keys are gathered" if exchange == GATHER else supports_exchanged(case.projection(group.size(), "cpu"))
    assert fused is not None, "CPUs have no such operator"
    return Projections(
        features=case.features,
        exchange=exchange,
        groups=groups,
        inputs=inputs,
        output=output,
        fused=fused,
        before=median(times[BESIDE]),
        under=median(times[UNDER]),
        speedup=speedup,
        low=low,
        high=high,
    )


def tune(group: dist.ProcessGroup, case: dict[str, Any], groups: list[int]) -> dict[str, Any]:
    """Return a plan with the fastest number of groups of heads, as COC_TUNE measures them."""
    attention = _SharedAttention(AttentionCase(**case), group)
    report("timing groups of heads")
    overlapped = functools.partial(attention.overlapped, attention.exchange)
    return plan_of(attention.call, group, overlapped, functools.partial(overlapped, 1), groups)


def runs_of(case: AttentionCase, group: dist.ProcessGroup, groups: list[int]) -> tuple[dict[str, Run], int]:
    """Return the variants and parts of a forward and backward by name, and the number of groups that "auto" takes."""
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
                runs[variant(exchange, count)] = functools.partial(attention.overlapped, exchange, count)
    report("auto")
    runs[AUTO], chosen = attention.automatic()
    return runs, chosen


def variant(exchange: str, groups: int) -> str:
    """Return the name of an exchange in so many groups."""
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

    def automatic(self) -> tuple[Run, int]:
        """Return the variant that COC_PARALLEL_NUM=auto takes, and its number of groups."""
        run = functools.partial(self.overlapped, self.exchange)
        found = Decider(Settings(auto=True), keeps=False).known_of_exchange(
            self.call, self._group, lambda tried: run(tried.number), functools.partial(run, 1), self._device
        )
        return functools.partial(run, found.number), found.number

    @property
    def _device(self) -> torch.device:
        return self._d_output.device

    def _backward(self, made: torch.Tensor, operands: list[torch.Tensor]) -> None:
        d_output = self._d_output if made.shape == self._d_output.shape else torch.ones_like(made)
        torch.autograd.grad(made, operands, d_output)


class ProjectedAttention:
    """Hidden states of this rank's tokens, attention of them, and its projections: queries, keys, values and output."""

    def __init__(self, case: AttentionCase, group: dist.ProcessGroup) -> None:
        """Draw hidden states, weights, and the gradient of the result."""
        self._case, self._group, self._ranks = case, group, group.size()
        self._exchange = case.chosen_exchange(group.size())
        generator, dtype = torch.Generator().manual_seed(SEED), getattr(torch, case.dtype)

        def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, generator=generator).mul_(scale).to(dtype).requires_grad_()

        self._own, hidden = case.tokens // self._ranks, case.features
        self._x, self._d_y = drawn(1, self._own, hidden), drawn(1, self._own, hidden).detach()
        heads = case.heads, case.key_heads, case.key_heads
        self._weights = [drawn(count * case.width, hidden, scale=0.02) for count in heads]
        self._weight = drawn(hidden, hidden, scale=0.02)

    def run(self, groups: int, *, inputs: bool = False, output: bool = False) -> None:
        """Run forward and backward, with attention exchanged in so many groups.

        inputs: queries, keys and values are projected under the exchange; output: what reads the output is.
        """
        x = AttentionInput.of(self._x, self._weights, self._case.width) if inputs else self._x
        how: dict[str, Any] = {"settings": Settings(), "known": Known(number=groups), "exchange": self._exchange}
        projection = Projection.of(self._weight) if output else None
        q, k, v = self._heads(x)
        self._backward(run_attention(q, k, v, attend, group=self._group, projection=projection, **how))

    def compute(self) -> None:
        """Run forward and backward without an exchange: a rank's share of the heads attends as often as it has rows."""
        q, k, v = (x[:, :, : x.shape[2] // self._ranks].repeat(self._ranks, 1, 1, 1) for x in self._heads(self._x))
        o = attend(None, q, k, v).reshape(self._ranks, self._own, 1, -1, self._case.width)
        self._backward(o.permute(1, 2, 0, 3, 4).flatten(2, 3))

    def products(self, groups: int) -> tuple[int, int]:
        """Return in how many products under the exchange queries are multiplied, and the output, in a forward.

        As it runs here: where pieces of a product have other bits on this machine, it is one.
        """
        self.run(groups, inputs=True, output=True)  # asks the machine for bits
        kept, RECORDING.recorder = RECORDING.recorder, Recorder(2, lambda _: None)
        try:
            self.run(groups, inputs=True, output=True)
            forward = RECORDING.recorder.passes[0]
        finally:
            RECORDING.recorder = kept
        names = [span.name for span in forward.spans if span.kind == MATMUL]
        attended = len(names) - names[::-1].index("attention")
        return names[:attended].count("projection") // len(self._weights), len(names[attended:])

    def _heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return queries, keys and values [s, 1, N, D]."""
        return [linear(x, w).view(1, self._own, -1, self._case.width).permute(1, 0, 2, 3) for w in self._weights]

    def _backward(self, o: torch.Tensor) -> None:
        y = linear(o.permute(1, 0, 2, 3).contiguous().reshape(1, self._own, -1), self._weight)
        torch.autograd.grad(y, [self._x, *self._weights, self._weight], self._d_y)


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
