"""Llama of transformers with a sequence that ranks share, on emulated NPUs, against the whole sequence on the CPU."""

import copy

import pytest
import torch
import torch.distributed as dist
from programs import device, error


def long_sequence(exchange, chunks):
    """Return the largest errors of the loss and of the gradients, relative to the largest magnitude of each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import ascend_parallel
    from ascend_parallel.patches.transformers import context_parallel

    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(5)
    whole = LlamaForCausalLM(config).train()
    shared = copy.deepcopy(whole).to(device())
    tokens = torch.randint(96, (1, 128), generator=torch.Generator().manual_seed(11))
    truth = whole(input_ids=tokens, labels=tokens).loss
    truth.backward()
    ascend_parallel.configure(num_chunks=chunks)
    context = context_parallel(shared, dist.group.WORLD, exchange=exchange)
    part = shared(**context.cut(tokens.to(device()), tokens.to(device()))).loss
    part.backward()
    loss = part.detach().clone()
    dist.all_reduce(loss)
    errors = [error(loss, truth.double())]
    for ours, theirs in zip(shared.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        errors.append(error(ours.grad, theirs.grad.double()))
    ascend_parallel.configure(num_chunks=1)
    return errors


@pytest.mark.parametrize("exchange", ["heads", "gather"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_ranks_that_share_a_sequence_have_its_loss_and_gradients(ranks, exchange, chunks):
    late = {"EMULATED_ASCEND_SEED": "5", "EMULATED_ASCEND_DELAY_US": "2000"}
    for pool in (ranks(), ranks(**late)):
        for errors in pool.run(long_sequence, exchange, chunks):
            assert max(errors) < 1e-4, errors
