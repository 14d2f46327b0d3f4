"""Experts in inference on 8 emulated ranks of A3: products fused with the exchange of their rows, within the limits."""

import pytest
import torch
import torch.distributed as dist
from programs import counted, device, error

A3 = {"EMULATED_ASCEND_SOC": "Ascend910_9391"}
H, N, K = 512, 64, 32
FUSED = {"aclnnAlltoAllvGroupedMatMul": 1, "aclnnGroupedMatMulAlltoAllv": 1}


def drawn(*sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(torch.bfloat16)


def between(made):
    """Return [*, K] of [*, 2 K]: a gate, as experts have."""
    gate, up = made.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def exchanged(tokens, experts, transposed):
    """Run both operators on unlike counts; return the error, which operators ran, and the decision's code."""
    from ascend_parallel import Settings
    from ascend_parallel.ops.call import ExpertMatmuls, experts_exchange
    from ascend_parallel.ops.fused_experts import (
        ExpertWeights,
        counts_of_all,
        decided_fused_experts,
        run_fused_experts,
        with_counts,
    )

    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    firsts, seconds = drawn(ranks * experts, H, N, seed=1), drawn(ranks * experts, K, H, seed=2)
    rows = drawn(tokens, H, seed=10 + rank)
    chosen, _ = torch.randint(0, ranks * experts, (tokens,), generator=torch.Generator().manual_seed(rank)).sort()
    to_send = torch.bincount(chosen, minlength=ranks * experts).view(ranks, experts)
    own = slice(rank * experts, (rank + 1) * experts)
    first, second = firsts[own], seconds[own]
    if transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    weights = ExpertWeights(*(w.contiguous().to(device()) for w in (first, second)), transposed, between)
    settings, x = Settings(fused=True), rows.to(device())
    matmuls = ExpertMatmuls(weights.inner, 2, inference=True)
    decision = decided_fused_experts(experts_exchange(x, experts, group, matmuls), settings)
    if decision.original:
        return None, {}, decision.code
    counts = counts_of_all(to_send.to(device()), group)
    decision = with_counts(decision, counts)
    if decision.original:
        return None, {}, decision.code
    y, numbers = counted(run_fused_experts, x, counts, weights, group, decision)
    truth = torch.empty(tokens, H, dtype=torch.float64)
    for expert in range(ranks * experts):
        mine = chosen == expert
        truth[mine] = between(rows[mine].double() @ firsts[expert].double()) @ seconds[expert].double()
    return error(y, truth), {name: numbers[name] for name in FUSED if name in numbers}, decision.code


@pytest.mark.parametrize("transposed", [False, True])
def test_both_products_are_fused_with_their_exchanges(ranks, transposed):
    for found, operators, code in ranks(8, **A3).run(exchanged, 3000, 2, transposed):
        assert found < 2e-2
        assert operators == FUSED and code == "fused"


def test_what_the_operators_do_not_take_is_left_on_every_rank_with_one_reason(ranks):
    pool = ranks(8, **A3)
    assert pool.run(exchanged, 2000, 2, False) == [(None, {}, "experts_few_bytes")] * 8  # 2000 rows are 1.95 MB
    assert pool.run(exchanged, 3000, 33, False) == [(None, {}, "experts_not_fused")] * 8
    assert ranks().run(exchanged, 3000, 2, False) == [(None, {}, "experts_not_fused")] * 2  # A2, 2 ranks


def evaluated(tokens, **settings):
    """Evaluate experts of transformers; return the difference from its own code's output, and what ran."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3MoeConfig
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import ascend_parallel

    ranks, experts = dist.get_world_size(), 2
    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=K, num_experts=experts, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    module = Qwen3MoeExperts(config).eval()
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=100 * index + dist.get_rank()) * 0.1)
    module.to(torch.bfloat16).to(device())
    mesh = init_device_mesh("npu", (ranks, 1), mesh_dim_names=("ep", "tp"))
    ascend_parallel.configure(**settings)
    EpDispatchExpertsParallel().install_forward(module, mesh["ep"], tp_mesh=mesh["tp"], ep_implementation="all_to_all")
    x = drawn(tokens, H, seed=dist.get_rank()).to(device())
    drawing = torch.Generator().manual_seed(dist.get_rank())
    index = torch.stack([torch.randperm(ranks * experts, generator=drawing)[:2] for _ in range(tokens)]).to(device())
    weights = torch.full((tokens, 2), 0.5, dtype=torch.bfloat16, device=device())
    with torch.no_grad():
        y, numbers = counted(module.forward, x, index, weights)
    ascend_parallel.configure(num_chunks=1)
    with torch.no_grad():
        own = module.forward(x, index, weights)
    return error(y, own.cpu().double()), {name: numbers[name] for name in FUSED if name in numbers}


def test_transformers_experts_are_evaluated_by_the_operators(ranks):
    for found, operators in ranks(8, **A3).run(fused_evaluation, 1500):
        assert found < 2e-2 and operators == FUSED


def test_few_tokens_and_settings_without_fused_are_transformers_own(ranks):
    pool = ranks(8, **A3)
    for tokens, run in ((500, fused_evaluation), (1500, evaluated)):
        for found, operators in pool.run(run, tokens):
            assert found == 0 and not operators


def fused_evaluation(tokens):
    return evaluated(tokens, fused=True)
