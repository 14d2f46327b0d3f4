"""Try every kernel, and the exchanges around parts, on a few real ranks of this machine: errors and bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isnan
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.arithmetic import TP
from ascend_parallel.ops.call import (
    ALL_GATHER,
    ALL_REDUCE,
    EXPERT_EXCHANGE,
    HEAD_EXCHANGE,
    KEY_GATHER,
    OPERATORS,
    PART_NAMES,
    Matmul,
    experts_exchange,
)
from ascend_parallel.ops.expert_exchange import ExpertGroup, RowCounts, expert_exchange
from ascend_parallel.ops.key_gather import GATHER, HEADS, KeyGroup, pieces_of
from ascend_parallel.ops.operators import with_fused_limits
from ascend_parallel.ops.part_exchange import Rows
from ascend_parallel.ops.pending import CollectiveError
from ascend_parallel.ops.registry import FUSED, KERNELS, choose
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.ops.settings import OperatorSettings
from ascend_parallel.overlap.context import Heads, attend_pieces, run_attention
from ascend_parallel.process_groups.consistency import store_all_gather
from ascend_parallel.settings import Settings
from ascend_parallel.text import dtype_name
from ascend_parallel.tuning.launch.devices import CPU, device_of
from ascend_parallel.tuning.launch.ranks import RankError, call_on_ranks

ON_CPU, ON_DEVICE = (128, 512, 256), (256, 1024, 512)  # rows of a rank, K and N of the operators
EXPERT_COLUMNS = 64
CHUNKS = (2, 3, 8)
DTYPES = (torch.float32, torch.bfloat16)
EXPERTS = 4  # of a rank
TOKENS = 8  # of one of a rank's two pieces of a sequence
ATTENTION = {HEADS: HEAD_EXCHANGE, GATHER: KEY_GATHER}
SERIAL, RIGHT = "reference", "right"
ROUNDING = 1e-5  # share of the largest magnitude: rounding of fp32 sums of K R products, with a margin
LIMIT = 120.0  # seconds
Call = dict[str, Any]


def try_kernels(ranks: int, device: str = CPU, time_limit: float = LIMIT) -> dict[str, Any]:
    """Return the results of `try_all` on `ranks` ranks here; if they fail or take too long, "error" alone."""
    try:
        tried: dict[str, Any] = call_on_ranks(f"{__name__}:try_all", ranks, limit=time_limit, device=device)
    except RankError as error:
        return {"error": str(error)}
    return tried


def outcomes(tried: Mapping[str, Any]) -> dict[str, str]:
    """Return "right", what is wrong, or why it was not tried, for each kernel and exchange around parts."""
    if "error" in tried:
        return dict.fromkeys((*KERNELS, *PART_NAMES), f"wrong: {tried['error']}")
    by_kernel = {name: [call for call in tried["calls"] if call["kernel"] == name] for name in KERNELS}
    exchanges = {EXPERT_EXCHANGE: tried["experts"], **tried["attention"]}
    return {name: _outcome(calls) for name, calls in by_kernel.items()} | exchanges


def _outcome(calls: list[Call]) -> str:
    ran = [call for call in calls if "refused" not in call]
    if not ran:
        return f"not tried: {calls[0]['refused']}"
    wrong = [
        f"{call['operator']} of {call['dtype']} is off by {call['error']:.1e}"
        for call in ran
        if not call["error"] <= call["limit"]
    ]
    return f"wrong: {', '.join(dict.fromkeys(wrong))} of the largest value" if wrong else RIGHT


def try_all(group: dist.ProcessGroup) -> dict[str, Any]:
    """Try every kernel on the devices of this group; all ranks return the same.

    calls: of each kernel, operator, dtype and chunk count, "refused" with the reason, or these:

    error, limit
        The largest error on any rank against float64, and the largest that rounding explains; shares of the largest
        magnitude of the result.
    bits
        Whether the results of all ranks equal the serial path's bit for bit.
    again
        Whether a second call returned the same bits.

    experts: "right", or what is wrong with the exchange of experts. attention: the same of both exchanges of a sequence
    that ranks share. operand: rows of a rank, K and N.
    """
    device = device_of(group)
    shape = ON_CPU if device == CPU else ON_DEVICE
    calls = []
    for dtype in DTYPES if device == CPU else (*DTYPES, torch.float16):
        for operator in OPERATORS:
            calls += _calls(problem_on(group, operator, *shape, dtype, device), group)
    attention = {operator: try_attention(group, way, device) for way, operator in ATTENTION.items()}
    own = {"calls": calls, "experts": try_experts(group, device), "attention": attention}
    by_rank = store_all_gather(group, "the trial of kernels", own, CollectiveError).values()
    experts = _worst(tried["experts"] for tried in by_rank)
    attention = {operator: _worst(tried["attention"][operator] for tried in by_rank) for operator in attention}
    same = [_of_all_ranks(of_ranks) for of_ranks in zip(*(tried["calls"] for tried in by_rank), strict=True)]
    return {"operand": list(shape), "calls": same, "experts": experts, "attention": attention}


def _worst(outcomes_by_rank: Iterable[str]) -> str:
    return max(outcomes_by_rank, key=lambda text: text != RIGHT)


def _calls(matmul: Matmul, group: dist.ProcessGroup) -> list[Call]:
    """Return this rank's errors and bits of a matmul with every kernel and chunk count."""
    x, w = operands(matmul, 1)
    truth = float64_result(matmul, x, w, group.rank())
    serial = run_kernel(SERIAL, matmul, x, w, group, 1)
    # Each rank's part of the sum is rounded to the dtype, and so is the sum.
    limit = max(ROUNDING, (matmul.ranks + 1) * torch.finfo(matmul.dtype).eps)
    calls = []
    for name, kernel in KERNELS.items():
        call = {"operator": matmul.operator, "dtype": dtype_name(matmul.dtype), "kernel": name}
        if (refusal := kernel.supports(matmul)) is not None:
            calls.append({**call, "refused": refusal})
            continue
        for count in [1] if name in (SERIAL, *FUSED) else CHUNKS:
            y, again = (run_kernel(name, matmul, x, w, group, count) for _ in range(2))
            bits = {"bits": torch.equal(y, serial), "again": torch.equal(y, again)}
            calls.append({**call, "chunks": count, "error": relative_error(y, truth), "limit": limit, **bits})
    return calls


def _of_all_ranks(calls: tuple[Call, ...]) -> Call:
    if "refused" in calls[0]:
        return calls[0]
    error = max((call["error"] for call in calls), key=lambda value: (isnan(value), value))
    return {**calls[0], "error": error, **{name: all(call[name] for call in calls) for name in ("bits", "again")}}


def try_experts(group: dist.ProcessGroup, device: str) -> str:
    """Return "right" or what is wrong with the exchange of experts.

    Exchange rows in groups of experts that each multiply by a number of their own; uneven, and one gets no rows.
    """
    ranks, rank = group.size(), group.rank()
    loads = [
        [[(3 * source + expert) % 4 for expert in range(EXPERTS)] for _ in range(ranks)] for source in range(ranks)
    ]
    counts = RowCounts(sent=loads[rank], received=[sent[rank] for sent in loads])
    numbers = torch.tensor(
        [1 + expert for sent in counts.sent for expert, rows in enumerate(sent) for _ in range(rows)]
    )
    x = torch.randn(len(numbers), EXPERT_COLUMNS, generator=torch.Generator().manual_seed(rank)).to(device)
    y = torch.empty_like(x)

    def experts(_: int, expert_group: ExpertGroup, received: Rows) -> Rows:
        factors = torch.tensor([1 + expert for expert in expert_group.experts]).repeat(ranks)
        rows = torch.tensor([rows for counts in expert_group.received for rows in counts])
        return [received[0] * factors.repeat_interleave(rows)[:, None].to(device)]

    decision = choose(experts_exchange(x, EXPERTS, group), OperatorSettings(num_chunks=2, mode=2))
    expert_exchange([x], counts, experts, [y], group, decision)
    return RIGHT if torch.equal(y, x * numbers[:, None].to(device)) else "wrong: rows came back from other experts"


def try_attention(group: dist.ProcessGroup, way: str, device: str) -> str:
    """Return "right" or what is wrong with the attention of a sequence that ranks share.

    way: `HEADS` or `GATHER`. Outputs and gradients, in groups of heads, are compared with float64 attention of the
    whole sequence.
    """
    ranks, own = group.size(), 2 * TOKENS
    whole = [_tokens(seed, ranks * own, 2 * ranks) for seed in range(3)]
    places = torch.arange(ranks * own).view(ranks, own)[group.rank()]
    if way == GATHER:
        places = torch.cat([torch.arange(ranks * own)[rows] for rows in pieces_of(group.rank(), ranks, own)])

    def attention(part: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if isinstance(part, KeyGroup):
            return attend_pieces(lambda _, *rows: _attend(*rows), part, q, k, v, causal=False)
        return _attend(q, k, v)

    truth = [x.double().requires_grad_() for x in whole]
    expected = _attend(*truth)
    q, k, v = (x[places].to(device).requires_grad_() for x in whole)
    settings = Settings(num_chunks=2, mode=2)
    made = run_attention(q, k, v, attention, group=group, settings=settings, exchange=way)
    found = made, *torch.autograd.grad(made, [q, k, v], torch.ones_like(made))
    right = expected, *torch.autograd.grad(expected, truth, torch.ones_like(expected))
    worst = max(relative_error(x, y[places]) for x, y in zip(found, right, strict=True))
    return RIGHT if worst <= ROUNDING else f"wrong: off by {worst:.1e} of the largest value"


def _tokens(seed: int, tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, 1, heads, EXPERT_COLUMNS // 4, generator=torch.Generator().manual_seed(seed))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention of [S, B, n, D] in plain products."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return (torch.softmax(q @ k.transpose(2, 3), -1) @ v).permute(2, 0, 1, 3)


def problem_on(
    group: dist.ProcessGroup, operator: str, rows: int, k: int, n: int, dtype: torch.dtype, device: str
) -> Matmul:
    """Return the matmul of `rows` rows of one rank in an all-gather, and ``rows * ranks`` rows in the others."""
    return with_fused_limits(Matmul(operator, rows * group.size(), k, n, dtype, device, group.size()), group)


def operands(matmul: Matmul, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands of every rank, x [R, rows, K] and w [R, K, N]; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = matmul.m // matmul.ranks if matmul.operator == ALL_GATHER else matmul.m
    x = torch.randn(matmul.ranks, rows, matmul.k, generator=generator)
    w = torch.randn(matmul.ranks, matmul.k, matmul.n, generator=generator)
    return x.to(matmul.device, matmul.dtype), w.to(matmul.device, matmul.dtype)


def float64_result(matmul: Matmul, x: torch.Tensor, w: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the unsharded result of `operands` that belongs to a rank, computed in float64 on the CPU."""
    x, w = x.cpu().double(), w.cpu().double()
    if matmul.operator == ALL_GATHER:
        return x.flatten(0, 1) @ w[rank]
    total = torch.bmm(x, w).sum(dim=0)
    return total if matmul.operator == ALL_REDUCE else total.chunk(matmul.ranks)[rank]


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest error, as a share of the largest magnitude of `truth`."""
    return float((result.cpu().double() - truth).abs().max() / truth.abs().max())


def run_kernel(
    name: str, matmul: Matmul, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, chunks: int
) -> torch.Tensor:
    """Run an operator with a kernel on this rank's part of `operands`, in `chunks` chunks where the kernel has any."""
    sizes = (matmul.rows,) if name == SERIAL else split_rows(matmul.rows, chunks)
    options: dict[str, Any] = {}
    if name == "tree":  # its chunks and blocks are those of COC_DETERMINISTIC=tp alone
        decision = choose(matmul, OperatorSettings(num_chunks=chunks, mode=2, deterministic=TP))
        sizes, options = decision.sizes, dict(decision.options)
    result = getattr(KERNELS[name], matmul.operator)(x[group.rank()], w[group.rank()], group, sizes, **options)
    y: torch.Tensor = result[0] if matmul.operator == ALL_GATHER else result.wait()
    return y
