"""A real GPTModel trained with and without overlap: losses and gradients bit for bit at TP=2 in fp32."""

import pytest
import torch


def train(options, overlap):
    """Train from scratch; return every loss, the last gradients and the operators' counts."""
    import ascend_parallel
    from ascend_parallel.patches.megatron.testing import finalize_gradients, next_token_loss, small_gpt

    options = dict(options)
    dropout, steps, seq = options.pop("dropout", 0.0), options.pop("steps", 3), options.pop("seq", 64)
    settings = options.pop("settings", {"num_chunks": 4})
    ascend_parallel.configure(**(settings if overlap else {"num_chunks": 1}))
    ascend_parallel.ops.COUNTS.clear()
    model = small_gpt(seq=seq, attention_dropout=dropout, hidden_dropout=dropout, **options)
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(256, (4, seq + 1))
        optimizer.zero_grad()
        loss = next_token_loss(model, tokens)
        loss.backward()
        finalize_gradients(model)
        optimizer.step()
        losses.append(loss.item().hex())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return losses, gradients, ascend_parallel.ops.COUNTS.as_dict(), ascend_parallel.coverage(model)


def both(group, options):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from ascend_parallel.patches.megatron.testing import end_model_parallel, megatron_on_cpu, start_model_parallel

    with megatron_on_cpu():
        start_model_parallel(group.size())
        model_parallel_cuda_manual_seed(1234)
        plain = train(options, overlap=False)
        model_parallel_cuda_manual_seed(1234)
        overlapped = train(options, overlap=True)
        end_model_parallel()
    different = [name for name in plain[1] if not torch.equal(plain[1][name], overlapped[1][name])]
    worst = max((plain[1][n] - overlapped[1][n]).abs().max().item() / plain[1][n].abs().max().item() for n in plain[1])
    return {
        "losses": (plain[0], overlapped[0]),
        "different": different,
        "worst": worst,
        "plain counts": plain[2],
        "counts": overlapped[2],
        "coverage": str(overlapped[3]),
    }


OPTIONS = {
    "all-reduce": {},
    "sequence parallel": {"sequence_parallel": True},
    "untied": {"tied": False},
    "untied, sequence parallel": {"tied": False, "sequence_parallel": True},
    "recompute": {"recompute": True},
    "recompute, sequence parallel": {"recompute": True, "sequence_parallel": True},
    "dropout, recompute, sequence parallel": {"recompute": True, "sequence_parallel": True, "dropout": 0.1},
}


# K of 1024 in the input gradients: on AVX-512 MKL uses another routine for few rows there, with other bits.
REAL_SIZES = {
    "hidden": 256,
    "heads": 8,
    "ffn_hidden_size": 1024,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "seq": 256,
    "steps": 2,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("chunks", [4, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_train_with_the_same_bits_at_sizes_of_real_layers(ranks, sequence_parallel, chunks):
    options = {**REAL_SIZES, "sequence_parallel": sequence_parallel, "settings": {"num_chunks": chunks}}
    for found in ranks(2).run(both, options):
        assert found["losses"][0] == found["losses"][1]
        assert found["different"] == []
        assert all(count["chunks"] > count["calls"] for count in found["counts"].values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_ranks_train_with_the_same_bits(ranks, options):
    for found in ranks(2).run(both, options):
        assert found["losses"][0] == found["losses"][1]
        assert found["different"] == []
        assert found["plain counts"] == {}
        expected = (
            {"matmul_reduce_scatter", "all_gather_matmul"}
            if options.get("sequence_parallel")
            else {"matmul_all_reduce"}
        )
        assert expected <= set(found["counts"])
        for count in found["counts"].values():
            assert count["chunks"] == 4 * count["calls"]
        assert found["coverage"].startswith("9 of 9 linear layers covered")


@pytest.mark.parametrize("count", [3, 4])
def test_more_ranks_train_alike(ranks, count):
    """With more than two ranks the order of sums changes, so only the bits may differ."""
    options = {"hidden": 96 if count == 3 else 64, "heads": count, "vocab": 258 if count == 3 else 256, "steps": 1}
    for found in ranks(count).run(both, options):
        assert found["worst"] < 1e-5
        for plain, overlapped in zip(*found["losses"], strict=True):
            assert float.fromhex(plain) == pytest.approx(float.fromhex(overlapped), rel=1e-6)


def data_parallel(group):
    """Megatron's DistributedDataParallel with overlapped gradient reduction, DP=2 x TP=2."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    import ascend_parallel
    from ascend_parallel.patches.megatron.testing import (
        end_model_parallel,
        megatron_on_cpu,
        next_token_loss,
        small_gpt,
        start_model_parallel,
    )

    gradients = []
    with megatron_on_cpu():
        start_model_parallel(2)
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            model = small_gpt(seq=64, sequence_parallel=True)
            config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=20000)
            wrapped = DistributedDataParallel(model.config, config, model)
            for step in range(2):
                wrapped.zero_grad_buffer()
                torch.manual_seed(step + 10 * parallel_state.get_data_parallel_rank())
                next_token_loss(wrapped, torch.randint(256, (4, 65))).backward()
                wrapped.finish_grad_sync()
            gradients.append([parameter.main_grad.clone() for parameter in model.parameters()])
        end_model_parallel()
    return all(map(torch.equal, *gradients)) and all(bool(g.abs().sum() > 0) for g in gradients[1])


def test_ddp_with_overlapped_gradient_reduction(ranks):
    assert ranks(4).run(data_parallel) == [True] * 4
