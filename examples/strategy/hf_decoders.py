"""Train a Hugging Face decoder with random weights, data x context x tensor x pipeline parallel, and on one process.

    torchrun --nproc-per-node 4 examples/strategy/hf_decoders.py Llama
    torchrun --nproc-per-node 4 examples/strategy/hf_decoders.py Mixtral --dp 1 --stages 2
    torchrun --nproc-per-node 4 examples/strategy/hf_decoders.py Llama --dp 1 --cp 2 --rows 1

Every rank also trains the whole model by itself, and the losses are compared.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding import mixture_of_experts
from ascend_parallel.training import PipelineOptions, Strategy, train_step

VOCABULARY, ROWS, LENGTH, STEPS = 96, 8, 16, 5
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
LLAMA = {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}
# The name of the class, and the options of the configuration beyond SHAPE.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Qwen2": ("Qwen2ForCausalLM", LLAMA),
    "Mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 8}),
    "Mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "experts_implementation": "dense"}),
    "GPT2": ("GPT2LMHeadModel", {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "eos_token_id": 0}),
}
# The layers of GPT-2: a Conv1D reads its bias, its input as rows of tokens, and its weight [K, N].
GPT2_COLUMNS = ([("tp",), None, (1, "tp")], None)
GPT2_ROWS = ([None, None, ("tp", 1)], None)


def dense_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute every expert for every token, with the weight 0 where it was not chosen: shapes without data.

    hidden_states is ``[tokens, hidden]``, the others ``[tokens, chosen]``.
    """
    weights = hidden_states.new_zeros(len(hidden_states), experts.num_experts)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(weights.dtype))
    gate, up = torch.matmul(hidden_states, experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    outputs = torch.matmul(experts.act_fn(gate) * up, experts.down_proj.transpose(1, 2))  # [experts, tokens, hidden]
    return (outputs * weights.t().unsqueeze(-1)).sum(0)


def experts_of_the_plan(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the chosen experts of each token, in an operator that a plan can divide over ranks."""
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    activation = experts.config.hidden_act
    return mixture_of_experts(
        hidden_states, top_k_index, top_k_weights, up, experts.down_proj, gate, activation=activation
    )


def decoder(name: str, **changes: Any) -> nn.Module:
    """Return a decoder in training mode, with the same random weights on every rank."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    ALL_EXPERTS_FUNCTIONS.register("mixture_of_experts", experts_of_the_plan)
    class_name, options = DECODERS[name]
    # use_cache: a cache of keys is for generation; as an output it cannot be traced
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **options, "use_cache": False, **changes})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, class_name)(config).double().train()
    return model


def tensor_parallel(model: nn.Module) -> dict[str, Any]:
    """Return the strategies of the layers that the model's own tp_plan divides, and of GPT-2's, which has none."""
    strategies: dict[str, Any] = {}
    for pattern, style in getattr(model, "tp_plan", {}).items():
        if ".experts" in pattern or style not in ("colwise", "rowwise"):
            continue
        layer = model.get_submodule(pattern.replace("*", "0"))
        weight = ("tp", 1) if style == "colwise" else (1, "tp")
        strategies[pattern] = ([None, weight] + [None] * (layer.bias is not None), None)
    if model.config.model_type == "gpt2":
        strategies |= dict.fromkeys(("transformer.h.*.attn.c_attn", "transformer.h.*.mlp.c_fc"), GPT2_COLUMNS)
        strategies |= dict.fromkeys(("transformer.h.*.attn.c_proj", "transformer.h.*.mlp.c_proj"), GPT2_ROWS)
    if getattr(model.config, "_experts_implementation", "") == "dense":
        strategies["model.layers.*.mlp.experts:matmul"] = ([None, ("tp", 1, 1)], None)  # each rank has some experts
    return strategies


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next token; tokens ``[batch, length]``."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(step: int, rows: int = ROWS, length: int = LENGTH) -> tuple[torch.Tensor]:
    """Return the tokens of a step: consecutive numbers from a random start."""
    starts = torch.randint(VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(step))
    return ((starts + torch.arange(length)) % VOCABULARY,)


def train(name: str, strategy: Strategy, steps: int = STEPS, rows: int = ROWS) -> tuple[list[float], list[float]]:
    """Return the losses of the strategy and those of one process."""
    model = decoder(name)
    whole = copy.deepcopy(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = train_step(model, batch_of(0, rows), optimizer, strategy, loss=loss)
    losses = [float(step(*batch_of(index, rows))) for index in range(steps)]
    step.close()
    optimizer, expected = torch.optim.AdamW(whole.parameters(), lr=1e-2), []
    for index in range(steps):
        optimizer.zero_grad()
        value = loss(whole, *batch_of(index, rows))
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    return losses, expected


def strategy_of(name: str, dp: int, tp: int, stages: int = 1, cp: int = 1, **changes: Any) -> Strategy:
    """Return the strategy of a decoder on ``dp * cp * tp * stages`` ranks; cp cuts the sequence."""
    return Strategy(
        mesh={"dp": dp, "cp": cp, "tp": tp} if cp > 1 else {"dp": dp, "tp": tp},
        sequence_dim="cp" if cp > 1 else None,
        operators=tensor_parallel(decoder(name, **changes)),
        pipeline=PipelineOptions(degree=stages, micro_batches=stages),
    )


def main() -> int:
    """Train both; return 0 if their losses agree."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=DECODERS)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--rows", type=int, default=ROWS)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    strategy = strategy_of(given.name, given.dp, given.tp, given.stages, given.cp)
    losses, expected = train(given.name, strategy, rows=given.rows)
    worst = max(abs(loss / whole - 1) for loss, whole in zip(losses, expected, strict=True))
    if dist.get_rank() == 0:
        print(f"losses {losses[0]:.6f} ... {losses[-1]:.6f}; one process {expected[0]:.6f} ... {expected[-1]:.6f}")
        print(f"largest difference {worst:.1e}")  # transformers computes norms in fp32, also in a float64 model
    dist.destroy_process_group()
    return int(worst > 1e-5)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun --nproc-per-node 4 examples/strategy/hf_decoders.py Llama")
    sys.exit(main())
