"""Regions in a real GPT of megatron-core: losses and gradients bit for bit at TP=2 in fp32, and the ways to train."""

import contextlib

import pytest
import torch
from delayed_collectives import DelayedWork, delayed_collectives
from gpt_training import LLAMA, REGION, both, megatron, pipeline_step, train
from marks import promise
from megatron_cpu import megatron_on_cpu, next_token_loss, small_gpt
from pool import on_ranks

import ascend_parallel

OPTIONS = {
    "gpt": {},
    "llama": {**LLAMA, "rope": True},
    "untied, squared relu": {"tied": False, "activation_func": torch.nn.functional.relu},
    "full recompute": {"recompute": True},
    "gpt, sequence parallel": {"sequence_parallel": True},
    "llama, sequence parallel": {**LLAMA, "rope": True, "sequence_parallel": True},
    "recompute, sequence parallel": {"recompute": True, "sequence_parallel": True},
    "recompute of the attention core": {"recompute_granularity": "selective"},
    "dropout": {"dropout": 0.1},
    "llama, fused activation": {**LLAMA, "rope": True, "bias_activation_fusion": True},
    "gpt, fused activation": {"bias_activation_fusion": True},
}


def with_regions(options):
    return {**options, "settings": REGION}


def beside_layers(group, options):
    """Also count the collectives of a run with the same chunks, layer by layer."""
    found = both(group, options)
    layers = both(group, {**options, "settings": {**REGION, "region": False}})
    found["collectives"] = [
        {name: count for name, count in run["counts"].items() if not name.startswith("region")}
        for run in (found, layers)
    ]
    return found


@promise("region-bits")
@pytest.mark.sample("llama, sequence parallel")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_ranks_train_with_the_same_bits_and_the_collectives_of_layers(ranks, options):
    for found in ranks(2).run(beside_layers, with_regions(options)):
        assert found["losses"][0] == found["losses"][1]
        assert found["different"] == []
        # proj and fc2 of two layers in three forwards, which recompute runs twice
        runs = 24 if options.get("recompute") else 12
        assert found["counts"]["region"] == {"calls": runs, "chunks": 4 * runs, "collectives": 0}
        assert found["counts"]["region embedding"] == {"calls": 3, "chunks": 12, "collectives": 0}
        assert found["counts"]["region backward"]["calls"] == 15  # qkv and fc1 of two layers, the logits; three steps
        assert found["collectives"][0] == found["collectives"][1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks(3)
def test_deterministic_runs_keep_their_bits_on_three_ranks(group, sequence_parallel):
    """Regions beside layers with COC_DETERMINISTIC=1, whose sums do not depend on the chunks."""
    options, runs = {"sequence_parallel": sequence_parallel, "hidden": 96, "heads": 3, "vocab": 258, "seq": 96}, []
    with megatron(group.size()):
        for region in (False, True):
            settings = {**REGION, "region": region, "deterministic": True}
            runs.append(train({**options, "settings": settings, "steps": 2}, overlap=True))
    assert runs[0][0] == runs[1][0]
    assert [n for n in runs[0][1] if not torch.equal(runs[0][1][n], runs[1][1][n])] == []


def unfinished_rows(group, options):
    """Train with all-reduces that happen when they are waited for, and rows that are NaN until then."""
    with megatron(group.size()):
        plain = train(options, overlap=False)
        with delayed_collectives():
            late = train(options, overlap=True)
    # The rows of the last recomputed layer have no reader; backward's end waits for them.
    return (
        plain[0] == late[0],
        [n for n in plain[1] if not torch.equal(plain[1][n], late[1][n])],
        DelayedWork.unfinished,
    )


@promise("region-bits")
@pytest.mark.slow
@pytest.mark.parametrize("style", ["gpt", "llama", "gpt, sequence parallel", "llama, fused activation"])
def test_nothing_reads_rows_that_are_not_there_yet(ranks, style):
    options = with_regions({**OPTIONS[style], "recompute": style == "llama", "steps": 2})
    assert ranks(2).run(unfinished_rows, options) == [(True, [], 0)] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("count", [3, 4])
def test_more_ranks_train_alike(ranks, count, sequence_parallel):
    """With more than two ranks the order of sums changes, so only the bits may differ."""
    options = {"hidden": 96 if count == 3 else 64, "heads": count, "vocab": 258 if count == 3 else 256, "steps": 1}
    options |= {"sequence_parallel": sequence_parallel, "seq": 96}
    for found in ranks(count).run(both, with_regions(options)):
        assert found["worst"] < 1e-5
        assert found["counts"]["region"]["calls"] == 4
        for plain, overlapped in zip(*found["losses"], strict=True):
            assert float.fromhex(plain) == pytest.approx(float.fromhex(overlapped), rel=1e-6)


@promise("region-bits")
@pytest.mark.sample("False")
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@on_ranks(4)
def test_ddp_with_overlapped_gradient_reduction(group, distributed_optimizer):
    """Megatron's DistributedDataParallel with overlapped gradient reduction, DP=2 x TP=2."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    gradients = []
    with megatron(2):
        for settings in ({"num_chunks": 1}, REGION):
            ascend_parallel.configure(**settings)
            ascend_parallel.ops.COUNTS.clear()
            model = small_gpt(seq=64, sequence_parallel=distributed_optimizer)
            config = DistributedDataParallelConfig(
                overlap_grad_reduce=True, bucket_size=20000, use_distributed_optimizer=distributed_optimizer
            )
            wrapped = DistributedDataParallel(model.config, config, model)
            for step in range(2):
                wrapped.zero_grad_buffer()
                torch.manual_seed(step + 10 * parallel_state.get_data_parallel_rank())
                for last in (False, True):  # of two micro-batches
                    with contextlib.nullcontext() if last else wrapped.no_sync():
                        next_token_loss(wrapped, torch.randint(256, (4, 65))).backward()
                wrapped.finish_grad_sync()
            gradients.append([parameter.main_grad.clone() for parameter in model.parameters()])
        counts = ascend_parallel.ops.COUNTS.as_dict()
    moved = all(bool(g.abs().sum() > 0) for g in gradients[1]) or distributed_optimizer
    assert all(map(torch.equal, *gradients)) and moved
    assert counts["region"]["calls"] == 16


@on_ranks(2)
def test_gradient_accumulation_fusion(group):
    """gradient_accumulation_fusion: weight gradients go to main_grad, fc2's before fc1's, and hooks fire."""
    from megatron.core.tensor_parallel import layers as module

    order, found = [], []

    class Extension:
        @staticmethod
        def wgrad_gemm_accum_fp32(x, dy, main_grad):
            order[-1].append(tuple(main_grad.shape))
            main_grad.add_(dy.t().matmul(x))

    module.fused_weight_gradient_mlp_cuda, module._grad_accum_fusion_available = Extension, True
    with megatron(group.size()):
        for settings in ({"num_chunks": 1}, REGION):
            ascend_parallel.configure(**settings)
            model = small_gpt(num_layers=1, gradient_accumulation_fusion=True, ffn_hidden_size=96)
            for parameter in model.parameters():
                parameter.main_grad = torch.ones_like(parameter)
                parameter.grad_added_to_main_grad = False
            order.append([])
            torch.manual_seed(3)
            next_token_loss(model, torch.randint(256, (4, 65))).backward()
            flags = [parameter.grad_added_to_main_grad for parameter in model.parameters()]
            found.append(([parameter.main_grad for parameter in model.parameters()], flags))
    same = all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert same
    assert found[0][1] == found[1][1]
    assert order[0] == order[1]


def recorded(group, folder, sequence_parallel):
    with megatron(group.size()):
        ascend_parallel.configure(**REGION)
        model = small_gpt(sequence_parallel=sequence_parallel)
        with ascend_parallel.timeline.record(folder):
            next_token_loss(model, torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(3))).backward()


@pytest.mark.sample("sequence parallel")
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all-reduce", "sequence parallel"])
def test_a_timeline_shows_waits_and_chunks_where_they_ran(ranks, tmp_path, sequence_parallel):
    from ascend_parallel.diagnostics.timeline.files import read_run

    ranks(2).run(recorded, tmp_path, sequence_parallel)
    files, _ = read_run(tmp_path)
    for file in files:
        passes = {(p.layer, p.direction): p for p in file.passes}
        proj = passes["decoder.layers.0.self_attention.linear_proj", "forward"]
        assert [call["chunks"] for call in proj.calls] == [4]
        assert sum(span.name == "wait" for span in proj.spans) == 4
        asks = "fc1" if sequence_parallel else "fc2"  # the rows of what stands before
        spans = passes[f"decoder.layers.0.mlp.linear_{asks}", "forward"].spans
        assert {"aten::add", "aten::native_layer_norm", "aten::gelu"} & {span.name for span in spans}


@promise("region-bits")
@pytest.mark.sample("True")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(4)
def test_pipeline_stages(group, sequence_parallel):
    """Two pipeline stages of two tensor-parallel ranks, three micro-batches in Megatron's own schedule."""
    from megatron.core import parallel_state

    runs, counts = [], []
    with megatron(2, pipeline_parallel=2), megatron_on_cpu(schedules=True):
        for settings in ({"num_chunks": 1}, REGION):
            ascend_parallel.configure(**settings)
            ascend_parallel.ops.COUNTS.clear()
            model = small_gpt(num_layers=4, tied=False, sequence_parallel=sequence_parallel)
            generator = torch.Generator().manual_seed(3)
            batches = iter([torch.randint(256, (4, 65), generator=generator) for _ in range(3)])
            losses = pipeline_step(model, batches)
            gradients = [parameter.grad for parameter in model.parameters()]
            runs.append([*losses, *gradients])
            counts.append(ascend_parallel.ops.COUNTS.as_dict())
        last = parallel_state.is_pipeline_last_stage()
    assert len(runs[0]) > 4 + 3 * last
    assert all(map(torch.equal, *runs))
    assert counts[1]["region"]["calls"] == 12
