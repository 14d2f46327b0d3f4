"""Megatron-core's grouped experts, trained plain and overlapped on CPUs: everything that a step computes, bit for bit.

The packages' kernels are torch's grouped matmul here (tests/support/grouped_experts.py).
"""

import contextlib
import importlib
import re
from unittest import mock

import pytest
import torch
from grouped_experts import grouped_mm, grouped_mm_of_rows
from marks import promise
from megatron_cpu import next_token_loss
from megatron_moe import compared, expert_parallel, moe_config, small_moe_gpt, tokens_of, train

import ascend_parallel
from ascend_parallel.patches.base import version_tuple
from ascend_parallel.patches.megatron import installed_version

VERSION = version_tuple(installed_version())
pytestmark = pytest.mark.skipif(VERSION < (0, 13), reason="its parts are of 0.13 and later")
with_grouped_mlp = pytest.mark.skipif(VERSION[:2] > (0, 16), reason="GroupedMLP is of 0.16 and before")

SHARED = {"moe_shared_expert_intermediate_size": 80}
GROUPED_MLP = {"moe_grouped_gemm": True, "dtype": torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_multiplies_experts_as_a_loop_of_matmuls_does(dtype):
    """The kernels of this file: each expert's product has the bits of its own matmul, with zero rows too."""
    x, weights = torch.randn(30, 64, dtype=dtype), torch.randn(4, 64, 96, dtype=dtype)
    dy, sizes = torch.randn(30, 96, dtype=dtype), [7, 0, 22, 1]
    parts = list(zip(x.split(sizes), weights, dy.split(sizes), strict=True))
    assert torch.equal(grouped_mm(x, weights, sizes), torch.cat([rows @ weight for rows, weight, _ in parts]))
    assert torch.equal(
        grouped_mm(dy, weights.transpose(1, 2), sizes), torch.cat([dy @ weight.t() for _, weight, dy in parts])
    )
    assert torch.equal(grouped_mm_of_rows(x, dy, sizes), torch.stack([rows.t() @ dy for rows, _, dy in parts]))


CASES = {
    "plain": {},
    "skewed, top-1, shared expert": {"top_k": 1, "skewed": True, **SHARED},
    "top-4": {"top_k": 4},
    "shared expert, Megatron's overlap": {**SHARED, "moe_shared_expert_overlap": True},
    "padded to capacity": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "recompute of layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute of the activation": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    "probabilities on the input": {"top_k": 1, "moe_apply_probs_on_input": True},
    "not gated": {"gated_linear_unit": False},
}


@promise("megatron-grouped-experts-bits")
@with_grouped_mlp
@pytest.mark.sample("skewed, top-1, shared expert", "recompute of the activation")
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_grouped_mlp_trains_with_the_same_bits(ranks, options):
    for answers in ranks(2).run(compared, {**GROUPED_MLP, **options}, [2, 4]):
        for count, (different, counts, coverage, names) in zip([2, 4], answers, strict=True):
            assert different == []
            assert counts["chunks"] == count * counts["calls"] > 0
            assert "2 of 2 layers of experts covered" in coverage
            assert names > 40


@promise("megatron-grouped-experts-bits")
@pytest.mark.slow
@with_grouped_mlp
def test_grouped_mlp_on_four_ranks(ranks):
    for ((different, counts, _, _),) in ranks(4).run(compared, {**GROUPED_MLP, **SHARED, "top_k": 4}, [2]):
        assert different == []
        assert counts["chunks"] == 2 * counts["calls"] > 0


def like_a_compiled_function(function):
    """Return a function whose backward refuses to keep the graph, as torch.compile's with inductor does."""

    def compiled(*args):
        y = function(*args)
        if y.requires_grad:
            y.register_hook(refuse_kept_graph)
        return y

    return compiled


def refuse_kept_graph(_):
    assert not torch._C._autograd._get_current_graph_task_keep_graph(), "compiled with donated buffers"


def counted(group, options, distributed=False, compiled=False):
    """Train a step with hooks on rank 0 alone, plain and in 4 groups; return what differs, and how often hooks ran.

    compiled: GroupedMLP's activation refuses what it refuses under torch.compile, as Megatron-core runs it
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    runs, ran = [], []
    with expert_parallel(2, schedules=distributed), contextlib.ExitStack() as stack:
        if compiled:
            module = importlib.import_module("megatron.core.transformer.moe.experts")
            stack.enter_context(mock.patch.object(module, "jit_fuser", like_a_compiled_function))
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            config, seen = moe_config(**options), []
            model = small_moe_gpt(config)
            experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
            for name, module in model.named_modules():
                if group.rank() == 0 and name.endswith("mlp.experts"):
                    module.register_forward_pre_hook(lambda m, x, seen=seen: seen.append("forward"))
                    for weight in module.parameters():
                        weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append("gradient"))
            if distributed:
                ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=4000)
                model = DistributedDataParallel(config, ddp, model)
                model.zero_grad_buffer()
            next_token_loss(model, tokens_of(0)).backward()
            if distributed:
                finalize_model_grads([model])
            runs.append({n: (p.main_grad if distributed else p.grad).clone() for n, p in model.named_parameters()})
            assert all(bool(runs[-1][name].abs().sum() > 0) for name in runs[-1] if name in experts)
            ran.append(seen)
    return [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])], ran


@promise("megatron-grouped-experts-hooks")
@with_grouped_mlp
@pytest.mark.sample("compiled activation")
@pytest.mark.parametrize(
    "how", [(False, False), (False, True), (True, False)], ids=["plain", "compiled activation", "overlapped reductions"]
)
def test_a_hook_of_a_weight_runs_once_for_all_groups(ranks, how):
    (different, (plain, overlapped)), (others, _) = ranks(2).run(counted, GROUPED_MLP, *how)
    assert different == others == []
    assert plain.count("gradient") == overlapped.count("gradient") == 2 * 2  # layers, weights
    assert overlapped.count("forward") == 4 * plain.count("forward") > 0


def measured(group, options):
    """Train plain and with COC_PARALLEL_NUM=auto; return what differs, and in how many groups exchanges ran."""
    with expert_parallel(2):
        plain, _, _ = train(options, {"num_chunks": 1}, steps=1)
        found, counts, _ = train(options, {"auto": True}, steps=1)
    return [name for name in plain if not torch.equal(plain[name], found[name])], counts


@with_grouped_mlp
def test_auto_measures_grouped_mlp_and_leaves_no_trace(ranks):
    answers = ranks(2).run(measured, {**GROUPED_MLP, **SHARED})
    assert [different for different, _ in answers] == [[], []]
    assert answers[0][1] == answers[1][1]
    assert answers[0][1]["calls"] > 0


def verified(group, options, wrong):
    """Train with every call checked; return the report, or the message of the error."""
    with expert_parallel(2):
        ascend_parallel.configure(num_chunks=4, verify_every=1)
        model = small_moe_gpt(moe_config(**options))
        if wrong:  # the gradients of a group's weights are twice what they should be
            model.decoder.layers[1].mlp.experts.register_forward_pre_hook(doubled_gradients)
        try:
            next_token_loss(model, tokens_of(0)).backward()
            return str(ascend_parallel.verification())
        except ascend_parallel.VerificationError as error:
            return str(error)
        finally:
            ascend_parallel.configure(num_chunks=1, verify_every=0)


def doubled_gradients(module, arguments):
    rows, tokens, probs = arguments
    if type(tokens).__name__ == "GroupTokens":
        tokens = tokens._replace(weights=[weight + (weight - weight.detach()) for weight in tokens.weights])
    return rows, tokens, probs


@with_grouped_mlp
def test_verification_compares_weight_gradients_of_grouped_mlp(ranks):
    for report in ranks(2).run(verified, GROUPED_MLP, False):
        assert "decoder.layers.1.mlp" in report
        assert "gradients of experts' weights" not in report
    for error in ranks(2).run(verified, GROUPED_MLP, True):
        assert re.search(r"MoELayer, experts\): the weight[12] gradient of call 1 is wrong", error), error
