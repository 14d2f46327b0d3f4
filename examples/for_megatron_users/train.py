"""A Megatron-core GPT with a training loop of its own, tensor-parallel over all ranks. It knows nothing of overlap.

    torchrun --nproc-per-node 2 examples/for_megatron_users/train.py

The two lines marked "CPU" stand in for an accelerator. Without them the script is one for GPUs or NPUs.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_cpu import megatron_on_cpu  # CPU

SEQUENCE, MICRO_BATCH, VOCABULARY = 128, 4, 512  # 512 rows in every matmul


def build() -> GPTModel:
    """Return the model: Llama's kind of layers, with a bias in the projections of queries, keys and values."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=704,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        masked_softmax_fusion=False,  # this one and the three below need a GPU
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and the tokens after them, ``[MICRO_BATCH, SEQUENCE]``: numbers that count up."""
    starts = torch.randint(VOCABULARY, (MICRO_BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + torch.arange(SEQUENCE + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    """Train, and print every digit of the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE)
    hidden_from = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    for step in range(steps):
        tokens, labels = batch(step)
        loss = model(tokens, positions, hidden_from, labels=labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.17g}", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    with megatron_on_cpu():  # CPU
        main()
