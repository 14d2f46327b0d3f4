"""A real GPTModel of megatron-core, trained plain and overlapped from the same weights and tokens."""

import contextlib

import torch
from megatron_cpu import (
    end_model_parallel,
    finalize_gradients,
    megatron_on_cpu,
    next_token_loss,
    small_gpt,
    start_model_parallel,
)

import ascend_parallel

# Regions, even of the few rows of small_gpt; and small_gpt's options in Llama's style.
REGION = {"num_chunks": 4, "region": True, "region_rows": 16}
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
}


@contextlib.contextmanager
def megatron(tensor_parallel, **options):
    """Run with Megatron-core on the CPU and its groups; switch everything off afterwards."""
    with megatron_on_cpu():
        start_model_parallel(tensor_parallel, **options)
        try:
            yield
        finally:
            ascend_parallel.configure(num_chunks=1)
            end_model_parallel()


def train(options, overlap):
    """Train from scratch; return every loss, the last gradients and the operators' counts."""
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


def pipeline_step(model, batches, micro_batches=3):
    """Run one step of Megatron's own pipeline schedule; return the losses, on the last stage alone."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(iterator, model):
        tokens = next(iterator)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(64).expand_as(inputs)
        mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).triu(1)
        output = model(inputs, positions, mask, labels=labels)
        return output, lambda each: (each.mean(), {"loss": each.mean().detach()})

    losses = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches,
        model=model,
        num_microbatches=micro_batches,
        seq_length=64,
        micro_batch_size=4,
        forward_only=False,
    )
    return [loss["loss"] for loss in losses]


def both(group, options):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

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
