"""Megatron-core's mixture of experts with grouped experts, expert-parallel over all ranks, with a loop of its own.

    COC_PARALLEL_NUM=4 torchrun --nproc-per-node 2 examples/frameworks/megatron_moe.py

The experts are a GroupedMLP (--moe-grouped-gemm, megatron-core 0.13 to 0.16). Its kernel, grouped_gemm's, needs a GPU:
`gmm` below stands for it. What is marked "CPU" stands in for an accelerator, too.
"""

from __future__ import annotations

import argparse
import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_cpu import end_model_parallel, finalize_gradients, megatron_on_cpu  # CPU
from results import Results, gradients_of, options, tokens


def gmm(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """Return the product of each expert's rows with its weight: a loop in place of grouped_gemm's kernel (CPU)."""
    parts = zip(rows.split(counts.tolist()), weights.transpose(1, 2) if trans_b else weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


class Stream:
    """Stands for a CUDA stream (CPU)."""

    def record_event(self, *_: Any) -> Stream:
        """Return an event that has happened."""
        return self

    def wait_stream(self, *_: Any) -> None:
        """Wait for nothing."""

    synchronize = wait_stream


def on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return what Megatron-core makes of counts on a GPU (CPU)."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@contextlib.contextmanager
def moe_on_cpu() -> Iterator[None]:
    """Have Megatron-core's mixture of experts run without a GPU inside this context (CPU)."""
    from megatron.core.transformer.moe import experts, grouped_gemm_util, moe_utils, token_dispatcher

    ops, stream = types.SimpleNamespace(gmm=gmm), Stream()
    with megatron_on_cpu(), contextlib.ExitStack() as stack:
        for owner, name, value in (
            (grouped_gemm_util, "grouped_gemm", ops),
            (grouped_gemm_util, "ops", ops),
            (experts, "jit_fuser", lambda function: function),  # torch.compile takes a minute for the activation
            (torch.cuda, "Stream", lambda *_: stream),
            (torch.cuda, "current_stream", lambda *_: stream),
            (token_dispatcher, "maybe_move_tensor_to_cpu", on_host),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        yield


def build(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model: every layer has experts, and beside them a shared expert."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        ffn_hidden_size=args.inner,
        num_moe_experts=args.experts,
        moe_router_topk=2,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_shared_expert_intermediate_size=args.inner,
        expert_model_parallel_size=dist.get_world_size(),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=True,  # GroupedMLP takes nothing else
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,  # this one and the four below need a GPU
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec(num_experts=args.experts, moe_grouped_gemm=True)
    torch.manual_seed(1234)
    model: torch.nn.Module = GPTModel(
        config=config, transformer_layer_spec=layer, vocab_size=args.vocabulary, max_sequence_length=args.rows
    )
    return model.bfloat16()


def main() -> None:
    """Train some steps."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    args = options(__doc__, hidden=256, inner=512, experts=8)
    dist.init_process_group("gloo")
    with moe_on_cpu():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
        model_parallel_cuda_manual_seed(1234)
        model = build(args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        positions = torch.arange(args.rows).expand(args.batch, -1)
        hidden_from = torch.ones(1, 1, args.rows, args.rows, dtype=torch.bool).triu(1)
        results = Results()
        for step in range(args.steps):
            ids = tokens(args, step * dist.get_world_size() + dist.get_rank())
            loss = model(ids, positions, hidden_from, labels=ids.roll(-1, 1)).mean()
            optimizer.zero_grad()
            loss.backward()
            finalize_gradients(model)
            results.add(loss, gradients_of(model))
            optimizer.step()
        results.write(args.out)
        end_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
