"""Megatron-core's mixture of experts, trained plain and overlapped: everything that a step computes, bit for bit."""

import re
import sys
import types
from unittest import mock

import pytest
import torch
from marks import promise
from megatron_cpu import next_token_loss
from megatron_moe import compared, expert_parallel, moe_config, skew, small_moe_gpt, tokens_of, train
from pool import on_ranks
from refused_plan import REFUSED, refused_plan

import ascend_parallel
from ascend_parallel.patches.base import version_tuple
from ascend_parallel.patches.megatron import installed_version
from ascend_parallel.patches.megatron.built_classes import replaced_experts
from ascend_parallel.process_groups.consistency import DisagreementError

VERSION = version_tuple(installed_version())
pytestmark = pytest.mark.skipif(VERSION < (0, 12), reason="its exchange is covered from 0.12")

# A method of the dispatcher behind the experts; 0.12 has combine and unpermutation in one.
BEHIND = "combine_postprocess" if VERSION >= (0, 13) else "token_unpermutation"

SHARED = {"moe_shared_expert_intermediate_size": 80}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
SPLIT = {"ep": 2, "expert_tensor_parallel_size": 2}


CASES = {
    "plain": {},
    "top-1": {"top_k": 1},
    "top-4": {"top_k": 4},
    "skewed": {"skewed": True},
    "skewed, top-1, shared expert": {"top_k": 1, "skewed": True, **SHARED},
    "bf16": {"dtype": torch.bfloat16},
    "bf16, shared expert": {"dtype": torch.bfloat16, **SHARED},
    "shared expert": SHARED,
    "shared expert, Megatron's overlap": {**SHARED, "moe_shared_expert_overlap": True},
    "capacity": {"moe_expert_capacity_factor": 1.0},
    "padded to capacity": PADDED,
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"], **SHARED},
    "recompute of layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "z-loss": {"moe_z_loss_coeff": 1e-3},
    "probabilities on the input": {"top_k": 1, "moe_apply_probs_on_input": True},
    "odd widths": {"hidden": 36, "ffn": 44},
}


@promise("megatron-experts-bits")
@pytest.mark.sample("plain", "skewed, top-1, shared expert", "bf16, shared expert")
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_two_ranks_train_with_the_same_bits(ranks, options):
    asked = [2] if "skewed" in options else [4] if options else [2, 4]  # several experts in a group, and one
    for answers in ranks(2).run(compared, options, asked):
        for count, (different, counts, _, names) in zip(asked, answers, strict=True):
            assert different == []
            assert counts["chunks"] == count * counts["calls"] > 0
            assert names > 50


FOUR = {
    "4 expert-parallel ranks": (1, {"top_k": 4, **SHARED}),
    "4 expert-parallel ranks with an expert each": (1, {"experts": 4, **SHARED}),
    "2 x 2 tensor-parallel ranks": (2, {**SHARED}),
    "2 x 2 tensor-parallel ranks, Megatron's overlap": (2, {**SHARED, "moe_shared_expert_overlap": True}),
    "2 expert-parallel groups": (0, {"skewed": True}),
    "split among 2 x 2 tensor-parallel ranks": (2, {**SPLIT, **SHARED, "dtype": torch.bfloat16}),
    "split among 2 x 2 ranks, Megatron's overlap": (2, {**SPLIT, **SHARED, "moe_shared_expert_overlap": True}),
    "split among other ranks": (1, {**SPLIT, "skewed": True}),
    "split, with an expert each": (1, {**SPLIT, "experts": 2, **SHARED}),
    "split, padded to capacity": (1, {**SPLIT, **PADDED}),
}


@promise("megatron-experts-bits")
@pytest.mark.sample("4 expert-parallel ranks", "split among 2 x 2 tensor-parallel ranks")
@pytest.mark.parametrize(("tp", "options"), FOUR.values(), ids=FOUR)
def test_four_ranks_train_with_the_same_bits(ranks, tp, options):
    if tp == 0:
        tp, options = 1, {"ep": 2, **options}
    overlapped_linears = tp > 1  # two ranks sum alike
    for ((different, counts, coverage, _),) in ranks(4).run(compared, options, [2], tp):
        assert different == []
        groups = 1 if "experts" in options else 2
        assert counts["chunks"] == groups * counts["calls"] > 0
        assert "2 of 2 layers of experts covered" in coverage
        assert ("0 of" in coverage.split(";")[0]) != overlapped_linears


@promise("megatron-experts-truth")
@on_ranks(2)
def test_gradients_are_those_of_all_experts_on_a_rank(group):
    def unsharded_name(name, rank):
        before, mark, after = name.partition("local_experts.")
        index, dot, rest = after.partition(".")
        return f"{before}{mark}{int(index) + 4 * rank}{dot}{rest}" if mark else name

    with expert_parallel(2):
        ascend_parallel.configure(num_chunks=4)
        model = small_moe_gpt(moe_config(**SHARED))
        skew(model)
        next_token_loss(model, tokens_of(0)).backward()
        weights = {unsharded_name(name, group.rank()): p.detach() for name, p in model.named_parameters()}
        gradients = {unsharded_name(name, group.rank()): p.grad for name, p in model.named_parameters()}
    of_ranks = [None] * group.size()
    torch.distributed.all_gather_object(of_ranks, weights)
    with expert_parallel(1):
        whole = small_moe_gpt(moe_config(ep=1, dtype=torch.float64, **SHARED))
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                parameter.copy_(next(weights[name] for weights in of_ranks if name in weights))
        next_token_loss(whole, tokens_of(0)).backward()
    worst, rows = {}, 0
    for name, parameter in whole.named_parameters():
        if "local_experts" in name:  # of the rows of both ranks
            torch.distributed.all_reduce(parameter.grad)
            rows += bool(parameter.grad.abs().sum() > 0)
        if name in gradients:
            scale = parameter.grad.abs().max().clamp(min=1e-6)
            worst[name] = float((gradients[name].double() - parameter.grad).abs().max() / scale)
    worst, name, trained = max(worst.values()), max(worst, key=worst.get), rows
    assert worst < 1e-4, name
    assert trained == 2 * 4 * 2  # layers, experts that get rows, weights


@promise("megatron-experts-bits")
@pytest.mark.sample("True")
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@on_ranks(4)
def test_overlapped_reductions_of_data_parallel_gradients(group, distributed_optimizer):
    """Megatron's DistributedDataParallel with overlapped reductions: gradients and weights of 3 steps by chunks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    runs, counts = [], []
    with expert_parallel(2, schedules=True):
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            ascend_parallel.ops.COUNTS.clear()
            config = moe_config(ep=2, **SHARED)
            ddp = DistributedDataParallelConfig(
                overlap_grad_reduce=True, bucket_size=4000, use_distributed_optimizer=distributed_optimizer
            )
            model = DistributedDataParallel(config, ddp, small_moe_gpt(config))
            # Megatron's distributed optimizer takes tensors on the GPU only: its reduce-scatter runs, not its step.
            options = OptimizerConfig(lr=1e-3, clip_grad=0.0)
            optimizer = None if distributed_optimizer else get_megatron_optimizer(options, [model])
            run = {}
            for step in range(3):
                model.zero_grad_buffer()
                if optimizer is not None:
                    optimizer.zero_grad()
                with model.no_sync():
                    next_token_loss(model, tokens_of(step)).backward()
                next_token_loss(model, tokens_of(step + 10)).backward()
                finalize_model_grads([model])
                run |= {f"gradient {step} {n}": p.main_grad.clone() for n, p in model.named_parameters()}
                if optimizer is not None:
                    optimizer.step()
            run |= {f"weight {name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
            runs.append(run)
            counts.append(ascend_parallel.ops.COUNTS.as_dict().get("expert_exchange", {}).get("chunks", 0))
    different = [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])]
    moved = all(bool(x.abs().sum() > 0) for name, x in runs[1].items() if name.startswith("gradient"))
    (plain, overlapped), not_zero = counts, moved
    assert different == []
    assert not_zero
    assert plain == 0
    assert overlapped == 4 * 2 * 2 * 2 * 3  # groups, passes, layers, micro-batches, steps


def replace_behind(dispatcher):
    """Put another function in place of a dispatcher's method behind the experts."""
    own = getattr(dispatcher, BEHIND)
    setattr(dispatcher, BEHIND, lambda *args: own(*args))


def refusals(group):
    """Train with what is left to the original; return by case the reasons of coverage, and the exchanges."""
    found = {}
    with expert_parallel(2):
        ascend_parallel.configure(num_chunks=4)

        def run(name, change=None, **options):
            model = small_moe_gpt(moe_config(**options))
            if change is not None:
                change(model)
            ascend_parallel.ops.COUNTS.clear()
            next_token_loss(model, tokens_of(0)).backward()
            counts = ascend_parallel.ops.COUNTS.as_dict().get("expert_exchange", {})
            found[name] = [*ascend_parallel.coverage(model).experts.reasons], counts

        run("allgather", moe_token_dispatcher_type="allgather")
        run("one expert", experts=2, top_k=1)

        def wrap(model):
            for layer in model.decoder.layers:
                replace_behind(layer.mlp.token_dispatcher)

        run("a wrapped dispatcher", wrap)

        def derive(model):
            for layer in model.decoder.layers:
                layer.mlp.__class__ = type("MyLayer", (type(layer.mlp),), {})

        run("a subclass", derive)

        def no_cut(model):
            for layer in model.decoder.layers:
                layer.mlp.config.delay_wgrad_compute = True

        run("delayed weight gradients", no_cut)

        model = small_moe_gpt(moe_config())
        for layer in model.decoder.layers:
            layer.mlp.compile(backend="eager")  # not called: what stands for CUDA here cannot be traced
        found["compiled"] = [*ascend_parallel.coverage(model).experts.reasons], {}
        arguments = types.SimpleNamespace(_GLOBAL_ARGS=types.SimpleNamespace(moe_fb_overlap=True))
        with mock.patch.dict(sys.modules, {"megatron.training.global_vars": arguments}):
            run("MindSpeed", None)
    with expert_parallel(1):
        ascend_parallel.configure(num_chunks=4)
        run("one rank", ep=1)
    return found


def test_what_is_not_covered_runs_the_original(ranks):
    for found in ranks(2).run(refusals):
        for reasons, counts in found.values():
            assert counts == {}
            assert len(reasons) == 1
        reasons = {name: reasons[0] for name, (reasons, _) in found.items()}
        assert "MoEAllGatherTokenDispatcher, not MoEAlltoAllTokenDispatcher" in reasons["allgather"]
        assert "a rank has one expert" in reasons["one expert"]
        assert f"MoEAlltoAllTokenDispatcher.{BEHIND} is another package's" in reasons["a wrapped dispatcher"]
        assert "it is a class of its own" in reasons["a subclass"]
        assert reasons["compiled"] == "MoELayer: compiled: the original runs"
        assert "delay_wgrad_compute" in reasons["delayed weight gradients"]
        assert "MindSpeed runs its all-to-alls: drop --moe-fb-overlap" in reasons["MindSpeed"]
        assert "expert-parallel group has one rank" in reasons["one rank"]


@promise("one-rank-habits")
@pytest.mark.parametrize("first", [0, 1])
@on_ranks(2)
def test_a_method_replaced_on_one_rank_sends_all_ranks_to_the_original(group, first):
    losses, counts = [], []
    with expert_parallel(2):
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            model = small_moe_gpt(moe_config())
            dispatcher = model.decoder.layers[0].mlp.token_dispatcher
            ascend_parallel.ops.COUNTS.clear()
            for step in range(2):
                if chunks > 1 and group.rank() == 1 and step == first:
                    replace_behind(dispatcher)
                loss = next_token_loss(model, tokens_of(step))
                loss.backward()
                losses.append(loss.item())
            counts.append(ascend_parallel.ops.COUNTS.as_dict().get("expert_exchange", {}).get("calls", 0))
    (_, calls), layers = counts, len(model.decoder.layers)
    assert losses[:2] == losses[2:]
    assert calls == 2 * (2 * layers - (2 - first))  # forward and backward, of 2 steps


def split_experts(group):
    """Train with experts that 2 ranks split, in each way; return losses and gradients, and the exchanges."""
    found, counts = {}, {}

    def run(name, replaced=None, **settings):
        ascend_parallel.configure(**{"num_chunks": 4, "verify_every": 0, **settings})
        model = small_moe_gpt(moe_config(**SPLIT))
        if group.rank() == replaced:
            replace_behind(model.decoder.layers[0].mlp.token_dispatcher)
        ascend_parallel.ops.COUNTS.clear()
        loss = next_token_loss(model, tokens_of(0))
        loss.backward()
        found[name] = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
        counts[name] = ascend_parallel.ops.COUNTS.as_dict().get("expert_exchange", {}).get("calls", 0)

    with expert_parallel(2, 1, 2):
        run("plain", num_chunks=1)
        run("measured", auto=True)
        run("verified", verify_every=1)
        report = str(ascend_parallel.verification())
        run("replaced on rank 3", replaced=3)
        ascend_parallel.configure(num_chunks=1, verify_every=0)
    plain = found.pop("plain")
    same = {name: all(map(torch.equal, plain, values)) for name, values in found.items()}
    return same, counts, report


@promise("one-rank-habits")
def test_ranks_that_split_experts_decide_together(ranks):
    for same, counts, report in ranks(4).run(split_experts):
        assert same == {"measured": True, "verified": True, "replaced on rank 3": True}
        assert "decoder.layers.1.mlp" in report or VERSION < (0, 13)  # not checked there
        assert counts["plain"] == 0
        assert counts["replaced on rank 3"] == 2  # the other layer, forward and backward


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MindSpeedAlltoAllOverlapMoeLayerAdaptor", "--moe-alltoall-overlap-comm put .* overlap covers none"),
        ("MyMoELayer", "overlap covers no experts of .*MyMoELayer: another package put it in place of MoELayer"),
    ],
)
def test_a_class_in_place_of_the_layer_is_named(monkeypatch, name, text):
    from megatron.core.transformer.moe import moe_layer

    assert replaced_experts() is None
    monkeypatch.setattr(moe_layer, "MoELayer", type(name, (moe_layer.MoELayer,), {}))
    assert re.search(text, replaced_experts())


def hooked(group):
    """Return how often hooks of the experts and of the shared expert ran, on rank 0 alone, and what they changed."""
    seen, losses = [], []
    with expert_parallel(2):
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            model = small_moe_gpt(moe_config(**SHARED))
            for name, module in model.named_modules():
                if group.rank() == 0 and name.endswith(("mlp.experts", "shared_experts", "0.linear_fc1")):
                    module.register_forward_hook(lambda m, x, y, name=name: seen.append(name.split(".")[-1]))
            loss = next_token_loss(model, tokens_of(0))
            loss.backward()
            losses.append(loss.item())
            seen.append(chunks)
    return losses, seen


def test_hooks_on_one_rank_run_once_for_each_group(ranks):
    answers = ranks(2).run(hooked)
    assert all(plain == overlapped for (plain, overlapped), _ in answers)
    seen = answers[0][1]
    plain, overlapped = seen[: seen.index(1)], seen[seen.index(1) + 1 : -1]
    assert {name: overlapped.count(name) / plain.count(name) for name in set(plain)} == {
        "experts": 4,
        "shared_experts": 1,
        "linear_fc1": 1,
    }


def measured(group, options):
    """Train plain and with COC_PARALLEL_NUM=auto; return what differs, and in how many groups exchanges ran."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with expert_parallel(2):
        plain, _, _ = train(options, {"num_chunks": 1}, steps=1)
        model_parallel_cuda_manual_seed(1234)
        found, counts, _ = train(options, {"auto": True}, steps=1)
    return [name for name in plain if not torch.equal(plain[name], found[name])], counts


@pytest.mark.sample("shared expert")
@pytest.mark.parametrize("options", [{"skewed": True}, SHARED], ids=["skewed", "shared expert"])
def test_auto_measures_at_the_first_call_and_leaves_no_trace(ranks, options):
    answers = ranks(2).run(measured, options)
    assert [different for different, _ in answers] == [[], []]
    assert answers[0][1] == answers[1][1]
    assert answers[0][1]["calls"] > 0


def verified(group, wrong):
    """Train with every call checked; return the report, or the message of the error."""
    with expert_parallel(2):
        ascend_parallel.configure(num_chunks=4, verify_every=1)
        model = small_moe_gpt(moe_config(**SHARED))
        mlp = model.decoder.layers[1].mlp
        weight = mlp.experts.local_experts[1].linear_fc1.weight
        faults = {
            "output": lambda y: y * 1.01,
            "weight": lambda y: y + (weight - weight.detach()).sum(),  # adds nothing but to the gradient
        }
        if wrong:  # only where the experts of a group run by themselves
            mlp.experts.register_forward_hook(
                lambda module, x, y: (faults[wrong](y[0]), None) if type(x[1]).__name__ == "GroupTokens" else None
            )
        try:
            next_token_loss(model, tokens_of(0)).backward()
            return str(ascend_parallel.verification())
        except ascend_parallel.VerificationError as error:
            return str(error)
        finally:
            ascend_parallel.configure(num_chunks=1, verify_every=0)


@pytest.mark.skipif(VERSION < (0, 13), reason="not checked in 0.12")
def test_verification_compares_with_megatrons_own_and_finds_a_planted_fault(ranks):
    for report in ranks(2).run(verified, None):
        assert "decoder.layers.0.mlp" in report
        assert "decoder.layers.1.mlp" in report
        assert "weight gradient" in report.splitlines()[1], report
    for error in ranks(2).run(verified, "weight"):
        assert "the local_experts.1.linear_fc1.weight gradient of call 1 is wrong" in error, error
    for error in ranks(2).run(verified, "output"):
        assert "MoELayer, experts): the output of call 1 is wrong" in error, error
        assert "expert_exchange of 4 experts a rank" in error


@on_ranks(2)
def test_a_plan_that_one_rank_refuses_is_an_error_on_every_rank(group):
    """Ranks compare settings once: whoever refuses the plan has to say so then, or raises alone."""
    with expert_parallel(2), refused_plan(group.rank() == 1) as plan, pytest.raises(DisagreementError, match=REFUSED):
        train({}, {"num_chunks": 2, "plan": plan}, steps=1)
