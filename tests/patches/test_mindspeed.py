"""The real MindSpeed on the real Megatron-LM: its flags, its layer with a norm, its CoC taken over.

Every test starts two processes, in which a function of this file runs after both were imported.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import mindspeed_world
import npu_wheel
import pytest
import torch
import torch.distributed as dist
from logged import logged
from mindspeed_layers import BATCH, ROWS, WIDTH, K, compare, gathered, pair

ON = {"COC_PARALLEL_NUM": "4"}
SEQUENCE = pytest.mark.parametrize("sequence_parallel", ["", "--sequence-parallel"], ids=["all-reduce", "sequence"])
ORDERS = pytest.mark.parametrize("late", [False, True], ids=["by import torch", "after MindSpeed"])


@pytest.fixture(scope="module")
def mindspeed(tmp_path_factory):
    """Return ``run(function, flags, **options)``, which runs a function on 2 ranks, and returns rank 0's output."""
    try:
        environ = mindspeed_world.environment(tmp_path_factory.mktemp("stubs"))
    except npu_wheel.Missing as reason:
        pytest.skip(str(reason))

    def run(function, flags="", fails=False, **options):
        processes = mindspeed_world.run(environ, function, flags, **options)
        for rank, finished in enumerate(processes):
            text = f"rank {rank}:\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
            assert (finished.returncode != 0) == fails, text
            assert fails or "every check was made" in finished.stdout
        return processes[0].stdout + processes[0].stderr

    return run


def overlapped_pair(group):
    import ascend_parallel

    model = pair()
    assert compare(model) == []
    assert str(ascend_parallel.coverage(model)) == "2 of 2 linear layers covered", ascend_parallel.coverage(model)
    counts = ascend_parallel.status().counts
    assert sum(count["chunks"] for count in counts.values()) == 4 * sum(c["calls"] for c in counts.values()) > 0, counts
    with torch.no_grad():
        model["row"].weight[0, 0] += 1
    spoiled = gathered(model["column"].weight, 0), gathered(model["row"].weight, 1)
    with torch.no_grad():
        model["row"].weight[0, 0] -= 1
    assert compare(pair(), spoiled) != []  # the comparison can fail


@ORDERS
@SEQUENCE
def test_at_default_flags_both_layers_are_overlapped(mindspeed, sequence_parallel, late):
    mindspeed(overlapped_pair, sequence_parallel, late=late, **ON)


@SEQUENCE
def test_wrappers_that_keep_main_grad_are_harmless(mindspeed, sequence_parallel):
    mindspeed(wrapped_pair, f"--swap-attention {sequence_parallel}", **ON)


def wrapped_pair(group):
    from megatron.core.tensor_parallel import layers

    forward = vars(layers.LinearWithGradAccumulationAndAsyncCommunication)["forward"]
    assert forward.__code__.co_name == "linear_forward_main_grad", forward  # otherwise nothing is tested
    overlapped_pair(group)


def quantised_pair(group):
    """MindSpeed's QAT multiplies by quantised weights; a layer that is overlapped would not."""
    from mindspeed.core.qat import layers as qat

    import ascend_parallel

    model = pair()
    quantised = [qat.w8a16_fakequant_func(model[name].weight, [1, 32], False).detach() for name in ("column", "row")]
    wholes = gathered(quantised[0], 0), gathered(quantised[1], 1)
    assert not torch.equal(wholes[0], gathered(model["column"].weight, 0))
    with logged() as lines:
        assert compare(model, wholes) == []
    covered = ascend_parallel.coverage(model)
    assert covered.covered == 0 and "w8a16_forward of mindspeed.core.qat.layers" in str(covered)
    assert dist.get_rank() != 0 or any("what it computes was replaced" in line for line in lines), lines
    assert ascend_parallel.status().counts == {}
    ascend_parallel.configure(strict=True)
    with pytest.raises(ascend_parallel.UnmetRequestError, match="w8a16"):
        compare(model, wholes)


@ORDERS
def test_quantisation_in_training_runs_as_it_is(mindspeed, late):
    mindspeed(quantised_pair, "--qat-quant-engine --qat-scheme w8a16-mxfp8 --sequence-parallel", late=late, **ON)


def replaced_pair(group):
    from megatron.core.tensor_parallel import layers

    import ascend_parallel
    from ascend_parallel.patches.megatron.built_classes import FLAGS

    (flag,) = set(sys.argv) & set(FLAGS.values())
    (own,) = (kind for kind in layers.ColumnParallelLinear.__mro__ if kind.__module__ == layers.__name__)
    model = pair()
    for strict in (False, True):
        ascend_parallel.configure(strict=strict)
        with logged() as lines:
            error = None
            try:
                model["column"](torch.randn(ROWS, BATCH, K))
            except ascend_parallel.UnmetRequestError as raised:
                error = str(raised)
            except RuntimeError as raised:  # MindSpeed's MC2 wants HCCL
                assert "No backend type" in str(raised)
        assert (error is not None and flag in error) == strict
        warned = [line for line in lines if flag in line]
        assert bool(warned) == (dist.get_rank() == 0 and not strict), lines
    assert "was given to mindspeed." in ascend_parallel.status().patches[0].reason
    assert hasattr(vars(own)["forward"], "ascend_parallel")
    ascend_parallel.revert()
    assert not hasattr(vars(own)["forward"], "ascend_parallel")


@ORDERS
@pytest.mark.parametrize("flag", ["--use-ascend-coc", "--use-ascend-mc2 --sequence-parallel", "--unaligned-linear"])
def test_classes_in_place_of_megatrons_are_noticed_at_the_first_layer(mindspeed, flag, late):
    output = mindspeed(replaced_pair, flag, late=late, **ON)
    assert output.count("in place of Megatron-core's layers") >= 1


def taken_over(group):
    import os

    import ascend_parallel

    settings = ascend_parallel.status().settings
    assert (settings.num_chunks, settings.fused) == (int(os.environ["EXPECTED"]), False)
    model = pair()
    assert compare(model) == []
    assert str(ascend_parallel.coverage(model)) == "2 of 2 linear layers covered", ascend_parallel.coverage(model)
    chunks = [count["chunks"] / count["calls"] for count in ascend_parallel.status().counts.values()]
    assert set(chunks) == {settings.num_chunks}, chunks
    assert ascend_parallel.configure(verify_every=1).num_chunks == settings.num_chunks
    exported = int(os.environ.get("COC_PARALLEL_NUM", "1"))
    assert ascend_parallel.configure(take_over=False).num_chunks == exported


@SEQUENCE
@pytest.mark.parametrize("variables", [{"EXPECTED": "2"}, {"EXPECTED": "4", "COC_PARALLEL_NUM": "4"}])
def test_the_package_takes_the_place_of_mindspeeds_coc(mindspeed, sequence_parallel, variables):
    flags = f"--use-ascend-coc --coc-parallel-num 2 {sequence_parallel}"
    output = mindspeed(taken_over, flags, COC_TAKE_OVER="1", **variables)
    assert "in place of MindSpeed's CoC, with its arguments: on" in output


def taken_over_fused(group):
    import ascend_parallel

    assert ascend_parallel.status().settings.fused
    assert compare(pair()) == []


def test_taking_over_reads_the_fused_switch(mindspeed):
    mindspeed(taken_over_fused, "--use-ascend-coc --coc-fused-kernel", COC_TAKE_OVER="1")


def test_taking_over_too_late_is_an_error(mindspeed):
    output = mindspeed(taken_over, "--use-ascend-coc", fails=True, late=True, COC_TAKE_OVER="1", **ON)
    assert "COC_TAKE_OVER=1 came too late" in output


ULYSSES = "--tensor-model-parallel-size 1 --context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"


def ulysses_of(config):
    """Return MindSpeed's attention of ranks that share sequences, as it wraps the attention of each layer."""
    from megatron.core import parallel_state
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.enums import AttnMaskType
    from mindspeed.core.context_parallel.ulysses_context_parallel.ulysses_context_parallel import (
        UlyssesContextAttention,
    )

    local = dot_product_attention.DotProductAttention(config, 1, AttnMaskType.causal, "self")
    assert "MindSpeed" in type(local).__name__
    return UlyssesContextAttention(local, parallel_state.get_context_parallel_group())


def attended(attention, heads, dtype=torch.float32, whole=False):
    """Return the output and the gradients of this rank's tokens, or of all tokens by plain attention in float64."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(32, 2, n, 16, generator=generator) for n in (heads[0], heads[1], heads[1], heads[0])]
    causal = torch.ones(32, 32, dtype=torch.bool).triu(1)
    if whole:
        q, k, v, d_o = (x.double() for x in drawn)
    else:
        q, k, v, d_o = (x.chunk(2)[dist.get_rank()].to(dtype) for x in drawn)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    if whole:
        batch_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(*batch_first, attn_mask=~causal, enable_gqa=True)
        o = o.permute(2, 0, 1, 3).flatten(2)
    else:
        o = attention(q, k, v, causal)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), d_o.flatten(2))


def ulysses_in_groups(group):
    import npu_operators
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.global_vars import get_args

    import ascend_parallel

    library = npu_operators.register()
    config = core_transformer_config_from_args(get_args())
    config.attention_dropout = 0.0
    attention = ulysses_of(config)
    for heads in ((4, 4), (8, 4), (4, 1)):
        ascend_parallel.configure(num_chunks=1)
        own = attended(attention, heads)
        assert ascend_parallel.status().counts == {}
        ascend_parallel.configure(num_chunks=2, mode=2, verify_every=1)
        found = attended(attention, heads)
        assert [torch.equal(x, y) for x, y in zip(found, own, strict=True)] == [True] * 4, heads
        for x, right in zip(found, attended(attention, heads, whole=True), strict=True):
            part = right.chunk(2)[dist.get_rank()]
            assert (x - part).abs().max() < 1e-5 * part.abs().max()
        count = ascend_parallel.status().counts["head_exchange"]
        assert count["chunks"] == 2 * count["calls"] == 4, count
        assert "attention of 1 layers: exchanged in 2 groups" in str(ascend_parallel.coverage(attention))
        ascend_parallel.ops.COUNTS.clear()
    assert "0 over the limit" in str(ascend_parallel.verification())
    attention.local_attn.attention_dropout.p = 0.5
    ascend_parallel.configure(num_chunks=2, mode=2, strict=True)
    with pytest.raises(ascend_parallel.UnmetRequestError, match=r"attention_dropout=0\.5"):
        attended(attention, (4, 4))
    ascend_parallel.configure(num_chunks=2, mode=2, take_over=False)
    assert "ascend_parallel" not in type(attention).forward.__code__.co_filename
    del library


@pytest.mark.parametrize("late", [False, True], ids=["by import torch", "after MindSpeed"])
def test_ulysses_is_taken_over(mindspeed, late):
    mindspeed(ulysses_in_groups, ULYSSES, late=late, COC_TAKE_OVER="1", **ON)


EXPERTS = (
    "--tensor-model-parallel-size 1 --num-experts 8 --moe-grouped-gemm --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-router-topk 2 --disable-bias-linear "
    "--swiglu --bf16"
)


def moe_layer(config, te):
    """Return a layer of experts of the classes that MindSpeed has put in place of Megatron-core's."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts, moe_layer
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = ModuleSpec(module=experts.GroupedMLP)
    if te:
        names = ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")
        linears = MLPSubmodules(
            **{f"linear_fc{number}": getattr(transformer_engine, name) for number, name in enumerate(names, 1)}
        )
        spec = ModuleSpec(module=experts.TEGroupedMLP, submodules=linears)
    torch.manual_seed(5)
    with mindspeed_world.NpuMeansCpu():
        return moe_layer.MoELayer(config, submodules=moe_layer.MoESubmodules(experts=spec), layer_number=1)


def experts_in_groups(group):
    import npu_operators
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.global_vars import get_args
    from megatron_moe import moe_on_cpu

    import ascend_parallel

    library, te = npu_operators.register(), get_args().transformer_impl == "transformer_engine"
    config, runs = core_transformer_config_from_args(get_args()), []
    with moe_on_cpu(), mock.patch.object(torch.cuda, "stream", lambda stream: mock.MagicMock()):
        layer = moe_layer(config, te)
        kind = type(layer.experts.linear_fc1 if te else layer.experts)
        assert kind.__module__.startswith("mindspeed."), kind
        for settings in ({"num_chunks": 1}, {"num_chunks": 2}, {"num_chunks": 4}, {"num_chunks": 4, "auto": True}):
            ascend_parallel.configure(**settings)
            ascend_parallel.ops.COUNTS.clear()
            layer.zero_grad()
            torch.manual_seed(7 + group.rank())
            x = torch.randn(16, 2, 64, dtype=torch.bfloat16, requires_grad=True)
            with mindspeed_world.NpuMeansCpu():
                y, _ = layer(x)
                y.backward(torch.randn_like(y))
            runs.append([y.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
            counts, groups = ascend_parallel.ops.COUNTS.as_dict().get("expert_exchange"), settings["num_chunks"]
            if "auto" not in settings and groups > 1:
                assert counts["chunks"] == groups * counts["calls"] == groups * 2, counts
                assert "1 of 1 layers of experts covered" in str(ascend_parallel.coverage(layer))
        assert all(bool(found.abs().sum() > 0) for found in runs[0])
        for run in runs[1:]:
            assert [torch.equal(*pair) for pair in zip(runs[0], run, strict=True)] == [True] * len(run)
    if not te:
        config.gemm_gradient_accumulation_fusion = True
        assert "--gemm-gradient-accumulation-fusion" in str(ascend_parallel.coverage(layer))
    del library


@pytest.mark.parametrize("te", ["", "--transformer-impl transformer_engine"], ids=["gmm", "TEGroupedLinear"])
def test_grouped_experts_run_in_groups(mindspeed, te):
    mindspeed(experts_in_groups, f"{EXPERTS} {te}", **ON)


FB_OVERLAP = (
    "--moe-fb-overlap --num-experts 2 --moe-grouped-gemm --expert-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --disable-bias-linear --bf16"
)


def detached_pair(group):
    from megatron.training.global_vars import get_args

    import ascend_parallel

    get_args().params_dtype, get_args().bf16 = torch.float32, False  # the arguments' check wants bf16 for experts
    model = pair()
    assert compare(model) == []
    covered = ascend_parallel.coverage(model)
    assert covered.covered == 0 and "linear_backward_wgrad_detach" in str(covered), str(covered)


def test_mindspeeds_own_overlap_of_moe_stays(mindspeed):
    mindspeed(detached_pair, FB_OVERLAP, **ON)


def spoil_first_rank():
    """From now on, make the input gradient of the layer with a norm wrong on one rank, so that its check fails."""
    from ascend_parallel.patches.mindspeed import layernorm_column

    linear = layernorm_column.column_linear

    def spoilt(x, *args, **options):
        x = x.clone()
        if dist.get_rank() == 0:
            x.register_hook(lambda gradient: 1.5 * gradient)
        return linear(x, *args, **options)

    layernorm_column.column_linear = spoilt


def pair_with_norm(group):
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.global_vars import get_args

    import ascend_parallel

    config = core_transformer_config_from_args(get_args())
    shared = {"config": config, "bias": True, "is_expert": False, "init_method": torch.nn.init.xavier_normal_}
    with mindspeed_world.NpuMeansCpu():
        column = TELayerNormColumnParallelLinear(K, WIDTH, gather_output=False, skip_bias_add=False, **shared)
        row = TERowParallelLinear(WIDTH, K, input_is_parallel=True, skip_bias_add=False, **shared)
    model = torch.nn.ModuleDict({"column": column, "row": row})
    with torch.no_grad():
        for name, parameter in column.named_parameters():
            if name.startswith("layer_norm"):
                parameter.add_(torch.linspace(-0.5, 0.5, K))

    def norm(x, gamma, beta=None):
        if beta is not None:
            return torch.nn.functional.layer_norm(x, [K], gamma, beta, config.layernorm_epsilon)
        return torch.nn.functional.rms_norm(x, [K], gamma, config.layernorm_epsilon)

    assert compare(model, norm=norm) == []
    assert str(ascend_parallel.coverage(model)) == "2 of 2 linear layers covered", ascend_parallel.coverage(model)
    chunks = [count["chunks"] / count["calls"] for count in ascend_parallel.status().counts.values()]
    assert set(chunks) == {4.0}, ascend_parallel.status().counts
    ascend_parallel.configure(verify_every=1)
    compare(model, norm=norm)
    checked = ascend_parallel.verification()
    assert len(checked.layers) == 2 and checked.passed, checked
    spoil_first_rank()
    with pytest.raises(ascend_parallel.VerificationError, match="backward"):
        compare(model, norm=norm)
    config.fp8 = "e4m3"
    assert "fp8" in str(ascend_parallel.coverage(model))


@SEQUENCE
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_the_layer_with_a_norm_is_overlapped(mindspeed, sequence_parallel, normalization):
    flags = f"--transformer-impl transformer_engine --normalization {normalization} {sequence_parallel}"
    mindspeed(pair_with_norm, flags, **ON)


def nothing(group):
    pass


def test_the_dummy_module_of_transformer_engine_is_not_blamed(mindspeed):
    output = mindspeed(nothing, **ON)
    assert "0 linear layers ran with it: " in output
    assert "no layer of megatron-core with a tensor-parallel group of several ranks was called" in output
    assert "use --transformer-impl local" not in output


def taken_over_from_llm(group):
    """Import the real file of MindSpeed-LLM's feature, without its packages, which need a dozen more libraries."""
    import importlib
    import os
    import types

    from megatron.core.tensor_parallel import layers
    from megatron.training.global_vars import get_args

    folder = os.environ["MINDSPEED_LLM"]
    for name in ("mindspeed_llm", "mindspeed_llm.features_manager", "mindspeed_llm.features_manager.tensor_parallel"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(Path(folder, *name.split(".")))]
    module = importlib.import_module("mindspeed_llm.features_manager.tensor_parallel.coc")

    manager = mock.Mock()
    module.CoCFeature().register_patches(manager, get_args())
    assert manager.mock_calls == []
    assert layers.ColumnParallelLinear.__module__ == layers.__name__
    assert module.CoCFeature.register_patches is not module.MindSpeedCoCFeature.register_patches


def test_taking_over_knows_the_feature_of_mindspeed_llm(mindspeed):
    if "MINDSPEED_LLM" not in os.environ:
        pytest.skip("MINDSPEED_LLM names no checkout of MindSpeed-LLM")
    mindspeed(taken_over_from_llm, "--use-ascend-coc --coc-parallel-num 2", COC_TAKE_OVER="1")


def parsed_script(group):
    """Every flag of the script is an argument of Megatron-LM or MindSpeed, or stands in MindSpeed-LLM's source."""
    from megatron.training import arguments

    sys.argv = ["pretrain_gpt.py", *os.environ["SCRIPT_ARGUMENTS"].split()]
    args = arguments.parse_args(ignore_unknown_args=True)
    assert (args.tensor_model_parallel_size, args.sequence_parallel, args.transformer_impl) == (8, True, "local")
    assert (args.hidden_size, args.num_layers, args.ffn_hidden_size) == (5120, 64, 25600)
    known = {f"--{name.replace('_', '-')}" for name in vars(args)}
    source = "".join(path.read_text() for path in Path(os.environ["MINDSPEED_LLM"], "mindspeed_llm").rglob("*.py"))
    for flag in (word for word in sys.argv if word.startswith("--")):
        negated = "--" + flag.removeprefix("--no-")
        assert {flag, negated} & known or f"'{flag}'" in source or f'"{flag}"' in source, flag


def test_the_launch_script_for_npus_has_only_known_arguments(mindspeed, tmp_path):
    if "MINDSPEED_LLM" not in os.environ:
        pytest.skip("MINDSPEED_LLM names no checkout of MindSpeed-LLM")
    for name, code in (("torchrun", 'echo "$@"'), ("ascend-parallel", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    places = dict.fromkeys(("NODE_RANK", "MASTER_ADDR", "DATA", "TOKENIZER", "LOAD", "SAVE"), "x")
    script = Path(__file__).parents[2] / "examples/launch/qwen3_32b_npu.sh"
    environ = os.environ | places | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    words = subprocess.run(["bash", str(script)], env=environ, capture_output=True, text=True, check=True).stdout
    mindspeed(parsed_script, SCRIPT_ARGUMENTS=words.partition("pretrain_gpt.py ")[2].strip())


def test_the_benchmark_runs_mindspeeds_functions_beside_ours(mindspeed):
    script = Path(__file__).parents[2] / "benchmarks/beside_mindspeed.py"
    words = [sys.executable, str(script), "--shape", "64,32,32", "--chunks", "2", "--rounds", "1"]
    environ = os.environ | {"MINDSPEED": str(Path(os.environ["MINDSPEED"]).resolve())}
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr  # it compares every result with plain's
    assert ended.stdout.count("| MindSpeed |") == 8, ended.stdout
