"""Try every kernel, and the exchange of experts, on one small problem, on a few real ranks of this machine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.ops import shm
from ascend_parallel.ops.expert_exchange import ExpertGroup, RowCounts, Rows, expert_exchange
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, EXPERT_EXCHANGE, OPERATORS, TP, Problem, experts_problem
from ascend_parallel.ops.registry import KERNELS, choose
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.ops.settings import OperatorSettings
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
    own = {name: _try(name, group) for name in KERNELS} | {EXPERT_EXCHANGE: _try_experts(group)}
    answers: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(answers, own, group=group)
    return {name: max((answer[name] for answer in answers), key=lambda text: text != "right") for name in own}


def _try_experts(group: dist.ProcessGroup) -> str:
    """Exchange rows in groups of experts that each multiply by a number of their own; uneven, and one gets no rows."""
    ranks, rank = group.size(), group.rank()
    loads = [
        [[(3 * source + expert) % 4 for expert in range(EXPERTS)] for _ in range(ranks)] for source in range(ranks)
    ]
    counts = RowCounts(sent=loads[rank], received=[sent[rank] for sent in loads])
    numbers = torch.tensor(
        [1 + expert for sent in counts.sent for expert, rows in enumerate(sent) for _ in range(rows)]
    )
    x = torch.randn(len(numbers), K, generator=torch.Generator().manual_seed(rank))
    y = torch.empty_like(x)

    def experts(_: int, expert_group: ExpertGroup, received: Rows) -> Rows:
        factors = torch.tensor([1 + expert for expert in expert_group.experts]).repeat(ranks)
        rows = torch.tensor([rows for counts in expert_group.received for rows in counts])
        return [received[0] * factors.repeat_interleave(rows)[:, None]]

    choice = choose(experts_problem(x, EXPERTS, group), OperatorSettings(num_chunks=2, mode=2))
    expert_exchange([x], counts, experts, [y], group, choice)
    return "right" if torch.equal(y, x * numbers[:, None]) else "wrong: rows came back from other experts"


def _try(name: str, group: dist.ProcessGroup) -> str:
    refusals = {}
    for operator in OPERATORS:
        problem = shm.ask(Problem(operator, ROWS * group.size(), K, N, DTYPE, "cpu", group.size()), group)
        refusals[operator] = KERNELS[name].supports(problem)
    runs = [operator for operator, refusal in refusals.items() if refusal is None]
    if not runs:
        return f"not tried: {refusals[ALL_REDUCE]}"
    errors = {operator: _error(name, operator, group) for operator in runs}
    wrong = [f"{operator} is off by {error:.1e}" for operator, error in errors.items() if not error <= LIMIT]
    return f"wrong: {', '.join(wrong)} of the largest value" if wrong else "right"


def _error(name: str, operator: str, group: dist.ProcessGroup) -> float:
    """Return the largest error against the float64 result, relative to the largest magnitude of that result."""
    generator = torch.Generator().manual_seed(1)
    ranks, rank = group.size(), group.rank()
    rows = ROWS if operator == ALL_GATHER else ROWS * ranks
    x = torch.randn(ranks, rows, K, generator=generator)
    w = torch.randn(ranks, K, N, generator=generator)
    result = _run(name, operator, x[rank], w[rank], group)
    if operator == ALL_GATHER:
        truth = x.double().flatten(0, 1) @ w[rank].double()
    else:
        truth = torch.bmm(x.double(), w.double()).sum(dim=0)
        truth = truth if operator == ALL_REDUCE else truth.chunk(ranks)[rank]
    return float((result.double() - truth).abs().max() / truth.abs().max())


def _run(name: str, operator: str, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    rows = x.shape[0] // group.size() if operator == "matmul_reduce_scatter" else x.shape[0]
    sizes = (rows,) if name == "reference" else split_rows(rows, 3)
    options: dict[str, Any] = {}
    if name == "tree":  # its chunks and blocks are those of COC_DETERMINISTIC=tp alone
        whole = x.shape[0] * (group.size() if operator == ALL_GATHER else 1)
        problem = Problem(operator, whole, K, N, DTYPE, "cpu", group.size())
        choice = choose(problem, OperatorSettings(num_chunks=3, mode=2, deterministic=TP))
        sizes, options = choice.sizes, dict(choice.options)
    result = getattr(KERNELS[name], operator)(x, w, group, sizes, **options)
    y: torch.Tensor = result[0] if operator == ALL_GATHER else result.wait()
    return y
