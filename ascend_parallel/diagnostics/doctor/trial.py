"""Try every kernel, and the exchange of experts, on one small problem, on a few real ranks of this machine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops.arithmetic import TP
from ascend_parallel.ops.expert_exchange import ExpertGroup, RowCounts, expert_exchange
from ascend_parallel.ops.operators import with_fused_limits
from ascend_parallel.ops.part_exchange import Rows
from ascend_parallel.ops.pending import CollectiveError
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, EXPERT_EXCHANGE, OPERATORS, Problem, experts_problem
from ascend_parallel.ops.registry import KERNELS, choose
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.ops.settings import OperatorSettings
from ascend_parallel.process_groups.consistency import exchange
from ascend_parallel.tuning.launch.ranks import RankError, call_on_ranks

ROWS, K, N = 128, 64, 48  # input rows of one rank: ROWS for an all-gather, ROWS * ranks otherwise
EXPERTS = 4  # of a rank
DTYPE = torch.float32
LIMIT = 1e-5  # share of the largest magnitude: rounding of fp32 sums of K R products, with a margin


def try_kernels(ranks: int, time_limit: float = 60.0) -> dict[str, str]:
    """Run the operators with each kernel on `ranks` gloo ranks; return "right" or the error by kernel."""
    try:
        outcome: dict[str, str] = call_on_ranks(f"{__name__}:try_all", ranks, limit=time_limit)
    except RankError as error:
        outcome = dict.fromkeys((*KERNELS, EXPERT_EXCHANGE), f"wrong: {error}")
    return outcome


def try_all(group: dist.ProcessGroup) -> dict[str, str]:
    """Try every kernel on this group; return "right" for a kernel only if every rank found it right."""
    own = {name: _try(name, group) for name in KERNELS} | {EXPERT_EXCHANGE: try_experts(group)}
    answers = exchange(group, "the trial of kernels", own, CollectiveError).values()
    return {name: max((answer[name] for answer in answers), key=lambda text: text != "right") for name in own}


def try_experts(group: dist.ProcessGroup, device: str = "cpu") -> str:
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
    x = torch.randn(len(numbers), K, generator=torch.Generator().manual_seed(rank)).to(device)
    y = torch.empty_like(x)

    def experts(_: int, expert_group: ExpertGroup, received: Rows) -> Rows:
        factors = torch.tensor([1 + expert for expert in expert_group.experts]).repeat(ranks)
        rows = torch.tensor([rows for counts in expert_group.received for rows in counts])
        return [received[0] * factors.repeat_interleave(rows)[:, None].to(device)]

    choice = choose(experts_problem(x, EXPERTS, group), OperatorSettings(num_chunks=2, mode=2))
    expert_exchange([x], counts, experts, [y], group, choice)
    return "right" if torch.equal(y, x * numbers[:, None].to(device)) else "wrong: rows came back from other experts"


def _try(name: str, group: dist.ProcessGroup) -> str:
    problems = {operator: problem_on(group, operator, ROWS, K, N, DTYPE, "cpu") for operator in OPERATORS}
    refusals = {operator: KERNELS[name].supports(problem) for operator, problem in problems.items()}
    runs = [operator for operator, refusal in refusals.items() if refusal is None]
    if not runs:
        return f"not tried: {refusals[ALL_REDUCE]}"
    errors = {operator: _error(name, problems[operator], group) for operator in runs}
    wrong = [f"{operator} is off by {error:.1e}" for operator, error in errors.items() if not error <= LIMIT]
    return f"wrong: {', '.join(wrong)} of the largest value" if wrong else "right"


def _error(name: str, problem: Problem, group: dist.ProcessGroup) -> float:
    x, w = operands(problem, 1)
    return relative_error(run_kernel(name, problem, x, w, group, 3), float64_result(problem, x, w, group.rank()))


def problem_on(
    group: dist.ProcessGroup, operator: str, rows: int, k: int, n: int, dtype: torch.dtype, device: str
) -> Problem:
    """Return the problem of `rows` rows of one rank in an all-gather, and ``rows * ranks`` rows in the others."""
    return with_fused_limits(Problem(operator, rows * group.size(), k, n, dtype, device, group.size()), group)


def operands(problem: Problem, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands of every rank, x [R, rows, K] and w [R, K, N]; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = problem.m // problem.ranks if problem.operator == ALL_GATHER else problem.m
    x = torch.randn(problem.ranks, rows, problem.k, generator=generator)
    w = torch.randn(problem.ranks, problem.k, problem.n, generator=generator)
    return x.to(problem.device, problem.dtype), w.to(problem.device, problem.dtype)


def float64_result(problem: Problem, x: torch.Tensor, w: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the unsharded result of `operands` that belongs to a rank, computed in float64 on the CPU."""
    x, w = x.cpu().double(), w.cpu().double()
    if problem.operator == ALL_GATHER:
        return x.flatten(0, 1) @ w[rank]
    total = torch.bmm(x, w).sum(dim=0)
    return total if problem.operator == ALL_REDUCE else total.chunk(problem.ranks)[rank]


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest error, as a share of the largest magnitude of `truth`."""
    return float((result.cpu().double() - truth).abs().max() / truth.abs().max())


def run_kernel(
    name: str, problem: Problem, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, chunks: int
) -> torch.Tensor:
    """Run an operator with a kernel on this rank's part of `operands`, in `chunks` chunks where the kernel has any."""
    sizes = (problem.rows,) if name == "reference" else split_rows(problem.rows, chunks)
    options: dict[str, Any] = {}
    if name == "tree":  # its chunks and blocks are those of COC_DETERMINISTIC=tp alone
        choice = choose(problem, OperatorSettings(num_chunks=chunks, mode=2, deterministic=TP))
        sizes, options = choice.sizes, dict(choice.options)
    result = getattr(KERNELS[name], problem.operator)(x[group.rank()], w[group.rank()], group, sizes, **options)
    y: torch.Tensor = result[0] if problem.operator == ALL_GATHER else result.wait()
    return y
