"""Megatron-core's mixture of experts, trained plain and overlapped: loss, outputs, gradients and weights bit for bit."""

import pytest
import torch

from ascend_parallel.patches.base import version_tuple
from ascend_parallel.patches.megatron import installed_version

pytestmark = pytest.mark.skipif(version_tuple(installed_version()) < (0, 13), reason="its parts are of 0.13 and later")

SHARED = {"moe_shared_expert_intermediate_size": 80}


def train(options, settings, steps=3):
    """Train from scratch; return everything that a step computes, the exchanges' counts, and the coverage."""
    from megatron_cpu import finalize_gradients, next_token_loss
    from megatron_moe import moe_config, skew, small_moe_gpt, tokens_of

    import ascend_parallel

    options = dict(options)
    skewed, outputs = options.pop("skewed", False), []
    ascend_parallel.configure(**settings)
    ascend_parallel.ops.COUNTS.clear()
    model = small_moe_gpt(moe_config(**options))
    if skewed:
        skew(model)
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_hook(lambda module, x, y: outputs.append(y[0].detach().clone()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = {}
    for step in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(2):
            loss = next_token_loss(model, tokens_of(step + 10 * micro_batch))
            loss.backward()
            found[f"loss {step}.{micro_batch}"] = loss.detach()
        finalize_gradients(model)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            found[f"gradient {step} {name}"] = parameter.grad.clone()
        optimizer.step()
    found |= {f"weight {name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    found |= {f"output {index}": output for index, output in enumerate(outputs)}
    return found, ascend_parallel.ops.COUNTS.as_dict().get("expert_exchange", {}), ascend_parallel.coverage(model)


def compared(group, options, group_counts, tp=1):
    """Return for each number of groups the names that differ from the unpatched run, and the exchanges."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron_moe import expert_parallel

    ep = group.size() // tp
    options = {"ep": ep, "tp": tp, **options}
    answers = []
    with expert_parallel(ep, tp):
        plain, none, _ = train(options, {"num_chunks": 1})
        assert none == {}
        for count in group_counts:
            model_parallel_cuda_manual_seed(1234)
            found, counts, coverage = train(options, {"num_chunks": count})
            different = [name for name in plain if not torch.equal(plain[name], found[name])]
            answers.append((different, counts, str(coverage), len(plain)))
    return answers


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
    "padded to capacity": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"], **SHARED},
    "recompute of layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "z-loss": {"moe_z_loss_coeff": 1e-3},
    "probabilities on the input": {"top_k": 1, "moe_apply_probs_on_input": True},
    "odd widths": {"hidden": 36, "ffn": 44},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_two_ranks_train_with_the_same_bits(ranks, options):
    for answers in ranks(2).run(compared, options, [2, 4]):
        for count, (different, counts, coverage, names) in zip([2, 4], answers, strict=True):
            assert different == []
            assert counts["chunks"] == count * counts["calls"] > 0
            assert names > 50
