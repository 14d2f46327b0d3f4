"""Train a small GPT with Megatron-core, split over the ranks by tensor parallelism, on CPUs over gloo.

An ordinary training script: no line of it asks for overlap. `megatron_cpu` stands in for the accelerator that
Megatron-core expects. Exporting COC_PARALLEL_NUM is what changes the layers:

    torchrun --nproc-per-node 2 examples/gpt/train.py
    COC_PARALLEL_NUM=auto torchrun --nproc-per-node 2 examples/gpt/train.py

It knows the flags of Megatron-LM's pretrain_gpt.py that the quick start names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron_cpu import (
    finalize_gradients,
    megatron_on_cpu,
    small_gpt,
    start_model_parallel,
    stop_model_parallel,
)

TEXT = Path(__file__).with_name("text.txt")
SEQ, MICRO_BATCH = 128, 4  # 512 rows in every matmul: 4 chunks of 128
HIDDEN, HEADS, LAYERS, VOCAB = 256, 8, 2, 256  # a token is a byte


def main() -> None:
    """Train, print a line a step on rank 0, and write the report if one is asked for."""
    args = _parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with megatron_on_cpu():
        start_model_parallel(args.tensor_model_parallel_size or dist.get_world_size(), seed=args.seed)
        model = small_gpt(
            num_layers=LAYERS,
            hidden=args.hidden_size,
            heads=HEADS,
            vocab=VOCAB,
            seq=args.seq_length,
            sequence_parallel=args.sequence_parallel,
            seed=args.seed,
            persist_layer_norm=False,
            gradient_accumulation_fusion=False,
        )
        losses, times = train(model, args.steps, args.seed, args.seq_length)
        if args.report is not None:
            report = describe(model, losses, times)
            if dist.get_rank() == 0:
                args.report.write_text(json.dumps(report, indent=2), encoding="utf-8")
        stop_model_parallel()


def train(model: torch.nn.Module, steps: int, seed: int, seq: int) -> tuple[list[float], list[float]]:
    """Return each step's loss and its milliseconds."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    positions = torch.arange(seq).expand(MICRO_BATCH, seq)
    hidden_from = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)
    losses, times = [], []
    for step, (inputs, labels) in zip(range(steps), batches(seed, seq), strict=False):
        start = time.perf_counter()
        loss = model(inputs, positions, hidden_from, labels=labels).mean()
        optimizer.zero_grad()
        loss.backward()
        finalize_gradients(model)
        optimizer.step()
        losses.append(loss.item())
        times.append((time.perf_counter() - start) * 1000)
        if dist.get_rank() == 0:
            print(f"step {step:3d}   loss {losses[-1]:.6f}   {times[-1]:6.1f} ms", flush=True)
    return losses, times


def batches(seed: int, seq: int = SEQ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and the bytes that follow them, from places in the text that are the same on all ranks."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - seq, (MICRO_BATCH, 1), generator=generator)
        window = text[starts + torch.arange(seq + 1)]
        yield window[:, :-1], window[:, 1:]


def describe(model: torch.nn.Module, losses: list[float], times: list[float]) -> dict[str, Any]:
    """Collect what a comparison needs, every bit of it; all ranks must call it, for the weights' digests.

    A script that trains on an accelerator imports nothing of ascend_parallel, hence sys.modules. The
    import of the shims would switch overlap on by itself; "autoloaded" says that torch had seen to it.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    weights: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(weights, digest.hexdigest())
    plugin = sys.modules.get("ascend_parallel")
    return {
        "versions": {"torch": torch.__version__, "megatron-core": megatron.core.__version__},
        "losses": [loss.hex() for loss in losses],
        "milliseconds": times,
        "weights": weights,
        "autoloaded": "ascend_parallel_autoload" in sys.modules,
        "status": plugin.status().as_dict() if plugin else None,
        "coverage": plugin.coverage(model).as_dict() if plugin else None,
    }


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--tensor-model-parallel-size", type=int, help="all ranks unless said otherwise")
    parser.add_argument("--hidden-size", type=int, default=HIDDEN)
    parser.add_argument("--seq-length", type=int, default=SEQ)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--transformer-impl", choices=["local"], default="local", help="the layers that are covered")
    for kernel in ("persist-layer-norm", "gradient-accumulation-fusion"):
        parser.add_argument(f"--no-{kernel}", action="store_true", help="always: that kernel of Apex needs a GPU")
    parser.add_argument("--report", type=Path, help="write losses, times and what was overlapped to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
