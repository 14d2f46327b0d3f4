"""Megatron-core's grouped experts, trained plain and overlapped on CPUs: everything that a step computes, bit for bit.

The packages' kernels are torch's grouped matmul here (tests/support/grouped_experts.py).
"""

import contextlib
import copy
import importlib
import re
from unittest import mock

import pytest
import torch
from fused_gradients import install
from grouped_experts import grouped_mm, grouped_mm_of_rows
from hugging_face import full_tensor
from logged import logged
from marks import promise
from megatron_cpu import next_token_loss
from megatron_moe import compared, expert_parallel, moe_config, small_moe_gpt, tokens_of, train
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ascend_parallel
from ascend_parallel.patches.base import version_tuple
from ascend_parallel.patches.megatron import installed_version

VERSION = version_tuple(installed_version())
pytestmark = pytest.mark.skipif(VERSION < (0, 12), reason="grouped experts are covered from 0.12")

GROUPED_MLP_EXISTS = pytest.mark.skipif(VERSION >= (0, 17), reason="GroupedMLP is gone since 0.17")

NOT_CHECKED_BEFORE = pytest.mark.skipif(VERSION < (0, 13), reason="not checked in 0.12")

SHARED = {"moe_shared_expert_intermediate_size": 80}
GROUPED_MLP = {"moe_grouped_gemm": True, "dtype": torch.bfloat16}
TE = {"moe_grouped_gemm": True, "te": True}


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


def built(te=False, **options):
    return small_moe_gpt(moe_config(**options), te=te)


CASES = {
    "plain": {},
    "skewed, top-1, shared expert": {"top_k": 1, "skewed": True, **SHARED},
    "top-4": {"top_k": 4},
    "shared expert, Megatron's overlap": {**SHARED, "moe_shared_expert_overlap": True},
    "padded to capacity": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "recompute of layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute of the activation": pytest.param(
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
        marks=pytest.mark.skipif(VERSION < (0, 16), reason="runs the original"),
    ),
    "probabilities on the input": {"top_k": 1, "moe_apply_probs_on_input": True},
    "not gated": {"gated_linear_unit": False},
}


@GROUPED_MLP_EXISTS
@promise("megatron-grouped-experts-bits")
@pytest.mark.sample("skewed, top-1, shared expert", "recompute of the activation")
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_grouped_mlp_trains_with_the_same_bits(ranks, options):
    asked = [2] if options else [2, 4]  # two of four experts in a group, as slices of weights; and one
    for answers in ranks(2).run(compared, {**GROUPED_MLP, **options}, asked):
        for count, (different, counts, coverage, names) in zip(asked, answers, strict=True):
            assert different == []
            assert counts["chunks"] == count * counts["calls"] > 0
            assert "2 of 2 layers of experts covered" in coverage
            assert names > 40


TE_CASES = {
    **CASES,
    "bf16": {"dtype": torch.bfloat16, **SHARED},
    "biases": pytest.param(
        {"add_bias_linear": True}, marks=pytest.mark.skipif(VERSION < (0, 16), reason="biases are of later versions")
    ),
}


@promise("megatron-grouped-experts-bits")
@pytest.mark.sample("bf16", "biases")
@pytest.mark.parametrize("options", TE_CASES.values(), ids=TE_CASES)
def test_te_grouped_mlp_trains_with_the_same_bits(ranks, options):
    asked = [2] if options else [2, 4]  # two of four experts in a group, as slices of weights; and one
    for answers in ranks(2).run(compared, {**TE, **options}, asked):
        for count, (different, counts, coverage, names) in zip(asked, answers, strict=True):
            assert different == []
            assert counts["chunks"] == count * counts["calls"] > 0
            assert "2 of 2 layers of experts covered" in coverage
            assert names > 60


@GROUPED_MLP_EXISTS
@promise("megatron-grouped-experts-bits")
@pytest.mark.slow
def test_grouped_mlp_on_four_ranks(ranks):
    for ((different, counts, _, _),) in ranks(4).run(compared, {**GROUPED_MLP, **SHARED, "top_k": 4}, [2]):
        assert different == []
        assert counts["chunks"] == 2 * counts["calls"] > 0


@promise("megatron-grouped-experts-bits")
@pytest.mark.sample("TEGroupedMLP")
@pytest.mark.parametrize(
    "options", [pytest.param(GROUPED_MLP, marks=GROUPED_MLP_EXISTS), TE], ids=["GroupedMLP", "TEGroupedMLP"]
)
def test_grouped_experts_that_2_ranks_split(ranks, options):
    options = {**options, **SHARED, "ep": 2, "expert_tensor_parallel_size": 2}
    for ((different, counts, coverage, _),) in ranks(4).run(compared, options, [4], 2):
        assert different == []
        assert counts["chunks"] == 4 * counts["calls"] > 0
        assert "2 of 2 layers of experts covered" in coverage


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
            model, seen = built(**options), []
            experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
            for name, module in model.named_modules():
                if group.rank() == 0 and name.endswith("mlp.experts"):
                    module.register_forward_pre_hook(lambda m, x, seen=seen: seen.append("forward"))
                    for weight in module.parameters():
                        weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append("gradient"))
            if distributed:
                ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=4000)
                model = DistributedDataParallel(model.config, ddp, model)
                model.zero_grad_buffer()
            next_token_loss(model, tokens_of(0)).backward()
            if distributed:
                finalize_model_grads([model])
            runs.append({n: (p.main_grad if distributed else p.grad).clone() for n, p in model.named_parameters()})
            assert all(bool(runs[-1][name].abs().sum() > 0) for name in runs[-1] if name in experts)
            ran.append(seen)
    return [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])], ran


HABITS = {
    "GroupedMLP": pytest.param((GROUPED_MLP, False, False), marks=GROUPED_MLP_EXISTS),
    "GroupedMLP, compiled activation": pytest.param((GROUPED_MLP, False, True), marks=GROUPED_MLP_EXISTS),
    "GroupedMLP, overlapped reductions": pytest.param((GROUPED_MLP, True, False), marks=GROUPED_MLP_EXISTS),
    "TEGroupedMLP": (TE, False, False),
}


@promise("megatron-grouped-experts-hooks")
@pytest.mark.sample("GroupedMLP, compiled activation", "TEGroupedMLP")
@pytest.mark.parametrize(
    "how",
    HABITS.values(),
    ids=HABITS,
)
def test_a_hook_of_a_weight_runs_once_for_all_groups(ranks, how):
    (different, (plain, overlapped)), (others, _) = ranks(2).run(counted, *how)
    assert different == others == []
    weights = 2 * 4 if how[0] is TE else 2  # a layer, of 4 experts
    assert plain.count("gradient") == overlapped.count("gradient") == 2 * weights
    assert overlapped.count("forward") == 4 * plain.count("forward") > 0


def sharded(group, options):
    """Train with FSDP2 around each layer but its experts; return what differs, and how often hooks of weights ran.

    A rank's experts are no other rank's. Around the experts themselves FSDP2 changes their class: return the reason.
    """
    runs, counts, ran = [], [], []
    with expert_parallel(2):
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            ascend_parallel.ops.COUNTS.clear()
            model, seen = built(**options), []
            experts = {p for name, p in model.named_parameters() if ".experts." in name}
            mesh = init_device_mesh("cpu", (group.size(),))
            for layer in model.decoder.layers:
                fully_shard(layer, mesh=mesh, ignored_params=experts)
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(lambda _, name=name, seen=seen: seen.append(name))
            next_token_loss(model, tokens_of(0)).backward()
            runs.append({n: full_tensor(p.grad).clone() for n, p in model.named_parameters()})
            counts.append(ascend_parallel.ops.COUNTS.as_dict().get("expert_exchange", {}).get("chunks", 0))
            ran.append({seen.count(name) for name in runs[-1]})
        model = built(**options)
        for layer in model.decoder.layers:
            fully_shard(layer.mlp.experts, mesh=mesh)
        reasons = [*ascend_parallel.coverage(model).experts.reasons]
    return [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])], counts, ran, reasons


@promise("megatron-grouped-experts-hooks")
@pytest.mark.parametrize(
    "options", [pytest.param(GROUPED_MLP, marks=GROUPED_MLP_EXISTS), TE], ids=["GroupedMLP", "TEGroupedMLP"]
)
def test_hooks_of_fsdp_run_once_for_all_groups(ranks, options):
    for different, (plain, overlapped), ran, reasons in ranks(2).run(sharded, options):
        assert different == []
        assert plain == 0
        assert overlapped == 4 * 2 * 2  # groups, passes, layers
        assert ran == [{1}, {1}]
        assert "its experts are FSDP" in reasons[0]


@promise("megatron-grouped-experts-hooks")
@on_ranks(2)
def test_every_group_sees_the_first_micro_batch_of_its_call(group):
    """TransformerEngine adds to main_grad, but in the first micro-batch of a step, which writes over what is there."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    runs, flags = [], []
    with expert_parallel(2, schedules=True):
        install()
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            model = built(te=True, moe_grouped_gemm=True, gradient_accumulation_fusion=True)
            ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=4000)
            model = DistributedDataParallel(model.config, ddp, model)
            linears = [module for module in model.modules() if hasattr(module, "is_first_microbatch")]
            run = {}
            for step in range(2):
                model.zero_grad_buffer()
                for linear in linears:
                    linear.is_first_microbatch = True
                    for index in range(4):
                        getattr(linear, f"weight{index}").main_grad.fill_(7.0)
                with model.no_sync():
                    next_token_loss(model, tokens_of(step)).backward()
                flags += [linear.is_first_microbatch for linear in linears]
                next_token_loss(model, tokens_of(step + 10)).backward()
                finalize_model_grads([model])
                run |= {f"{step} {name}": p.main_grad.clone() for name, p in model.named_parameters()}
            runs.append(run)
    assert [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])] == []
    assert flags == [False] * 2 * 2 * 4  # runs, steps, layers of two linears
    assert all(bool(runs[1][name].isfinite().all()) for name in runs[1])


def measured(group, options):
    """Train plain and with COC_PARALLEL_NUM=auto; return what differs, and in how many groups exchanges ran."""
    with expert_parallel(2):
        plain, _, _ = train(options, {"num_chunks": 1}, steps=1)
        found, counts, _ = train(options, {"auto": True}, steps=1)
    return [name for name in plain if not torch.equal(plain[name], found[name])], counts


@pytest.mark.sample("TEGroupedMLP")
@pytest.mark.parametrize(
    "options", [pytest.param(GROUPED_MLP, marks=GROUPED_MLP_EXISTS), TE], ids=["GroupedMLP", "TEGroupedMLP"]
)
def test_auto_measures_grouped_experts_and_leaves_no_trace(ranks, options):
    answers = ranks(2).run(measured, {**options, **SHARED})
    assert [different for different, _ in answers] == [[], []]
    assert answers[0][1] == answers[1][1]
    assert answers[0][1]["calls"] > 0


def verified(group, options, wrong):
    """Train with every call checked; return the report, or the message of the error."""
    with expert_parallel(2):
        ascend_parallel.configure(num_chunks=4, verify_every=1)
        model = built(**options)
        if wrong:
            model.decoder.layers[1].mlp.experts.register_forward_pre_hook(wrong_gradients)
        try:
            next_token_loss(model, tokens_of(0)).backward()
            return str(ascend_parallel.verification())
        except ascend_parallel.VerificationError as error:
            return str(error)
        finally:
            ascend_parallel.configure(num_chunks=1, verify_every=0)


def wrong_gradients(module, arguments):
    """Return arguments with which the gradients of weights are not what they should be."""
    rows, tokens, probs = arguments
    if type(tokens).__name__ == "GroupTokens" and tokens.weights:
        tokens = tokens._replace(weights=[weight + (weight - weight.detach()) for weight in tokens.weights])
    elif type(tokens).__name__ == "GroupTokens":  # adds nothing but to the gradient of a parameter
        weight = module.linear_fc1.weight1
        rows = rows + (weight - weight.detach()).sum()
    return rows, tokens, probs


@GROUPED_MLP_EXISTS
@NOT_CHECKED_BEFORE
def test_verification_compares_weight_gradients_of_grouped_mlp(ranks):
    for report in ranks(2).run(verified, GROUPED_MLP, False):
        assert "decoder.layers.1.mlp" in report
        assert "gradients of experts' weights" not in report
    for error in ranks(2).run(verified, GROUPED_MLP, True):
        assert re.search(r"MoELayer, experts\): the weight[12] gradient of call 1 is wrong", error), error


@NOT_CHECKED_BEFORE
def test_verification_compares_weight_gradients_of_te_grouped_mlp(ranks):
    for report in ranks(2).run(verified, TE, False):
        assert "decoder.layers.1.mlp" in report
    for error in ranks(2).run(verified, TE, True):
        assert re.search(r"the linear_fc1\.weight1 gradient of call 1 is wrong", error), error


def refused(group):
    """Train what is left to the original; return the reasons of coverage by case and the exchanges, and the log."""
    found = {}
    with expert_parallel(2), logged() as lines:
        ascend_parallel.configure(num_chunks=4)

        def run(name, change):
            model = built(**TE)
            for layer in model.decoder.layers:
                change(layer.mlp)
            ascend_parallel.ops.COUNTS.clear()
            next_token_loss(model, tokens_of(0)).backward()
            counts = ascend_parallel.ops.COUNTS.as_dict().get("expert_exchange", {})
            found[name] = [*ascend_parallel.coverage(model).experts.reasons], counts

        def wrap(mlp):
            mlp.experts.linear_fc1 = Wrapper(mlp.experts.linear_fc1)

        def single(mlp):
            mlp.experts.linear_fc2.register_parameter("weight", torch.nn.Parameter(torch.zeros(1)))

        def fused(mlp):
            mlp.config.use_transformer_engine_op_fuser = True

        def fp8(mlp):
            mlp.config = copy.copy(mlp.config)  # the experts have the other: they cannot multiply in fp8 here
            mlp.config.fp8 = "e4m3"

        def delayed(mlp):
            mlp.config.delay_wgrad_compute = True

        def derived(mlp):
            mlp.experts.__class__ = type("InferenceGroupedMLP", (type(mlp.experts),), {})

        for change in (wrap, single, derived, fp8, delayed, fused):
            run(change.__name__, change)
    return found, [line for line in lines if "MoELayer runs without overlap" in line]


class Wrapper(torch.nn.Module):
    """An adapter around a grouped layer."""

    def __init__(self, linear):
        super().__init__()
        self.to_wrap = linear

    def forward(self, x, m_splits):
        """Return what the layer returns."""
        return self.to_wrap(x, m_splits)


def test_what_is_not_covered_runs_the_original(ranks):
    for rank, (found, said) in enumerate(ranks(2).run(refused)):
        assert len(said) == len(set(said)) == (len(found) if rank == 0 else 0)  # once, for two layers
        assert all(counts == {} and len(reasons) == 1 for reasons, counts in found.values())
        reasons = {name: reasons[0] for name, (reasons, _) in found.items()}
        assert "its linear_fc1 is Wrapper, not TEColumnParallelGroupedLinear" in reasons["wrap"]
        assert "its linear_fc2 has a parameter of all experts: weight" in reasons["single"]
        assert (
            "InferenceGroupedMLP, not SequentialMLP, GroupedMLP, TEGroupedMLP or MindSpeedGmmExperts"
            in reasons["derived"]
        )
        assert "its experts multiply in fp8" in reasons["fp8"]
        assert "its weight gradients are computed later (delay_wgrad_compute)" in reasons["delayed"]
        assert "use_transformer_engine_op_fuser" in reasons["fused"]
