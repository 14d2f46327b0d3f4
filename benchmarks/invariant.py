"""What COC_DETERMINISTIC=invariant costs beside torch's own: products, attention, log-softmax, a training step.

All run in turn, on one thread. What a server pays, python benchmarks/serving.py --invariant measures.

Each line has the median of the ratios of a round, with the 95 % interval of that median.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from measuring import options_of

import ascend_parallel
from ascend_parallel.ops.attention import Sequence, attend, attend_last, key_blocks
from ascend_parallel.ops.blocks import BlockedFeatures, SummedBlocks
from ascend_parallel.ops.log_softmax import log_softmax
from ascend_parallel.ops.row_tiles import multiply_tiles
from ascend_parallel.patches.transformers import on_one_rank
from ascend_parallel.tuning.bench.results import interval

WIDTH, HEADS, GROUPS, HEAD, VOCABULARY, TRAINED = 1024, 16, 8, 64, 32000, 4
Call = Callable[[], object]


def products(dtype: torch.dtype) -> dict[str, tuple[Call, Call]]:
    """Return products of a column and a row layer on one rank, ours beside torch's."""
    found: dict[str, tuple[Call, Call]] = {}
    w = torch.randn(WIDTH, WIDTH).to(dtype)
    rows = SummedBlocks(w.t(), BlockedFeatures((WIDTH,), 1, True))
    for m in (1, 16, 256, 2048):
        x, y, sums = torch.randn(m, WIDTH).to(dtype), torch.empty(m, WIDTH, dtype=dtype), torch.empty(m, WIDTH)
        plain = functools.partial(F.linear, x, w)
        name = f"{str(dtype).removeprefix('torch.')}, {m} rows"
        found[f"column product, {name}"] = functools.partial(multiply_tiles, x, w.t(), y), plain
        found[f"row product in 8 blocks, {name}"] = functools.partial(rows.multiply, x, sums, 0), plain
    return found


def attentions() -> dict[str, tuple[Call, Call]]:
    """Return attention in prefill and in decoding, ours beside sdpa's."""
    found: dict[str, tuple[Call, Call]] = {}
    for n in (512, 2048):
        q, k, v = torch.randn(n, HEADS, HEAD), torch.randn(n, GROUPS, HEAD), torch.randn(n, GROUPS, HEAD)
        ours = functools.partial(attend, q, k, v, (Sequence(0, n, 0, n),), HEAD**-0.5)
        q, k, v = (each.transpose(0, 1).unsqueeze(0).contiguous() for each in (q, k, v))
        plain = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        found[f"attention, {n} queries"] = ours, plain
    for sequences in (1, 8):
        k, v = torch.randn(512, GROUPS * sequences, HEAD), torch.randn(512, GROUPS * sequences, HEAD)
        q, blocks = torch.randn(sequences, HEADS, HEAD), key_blocks(k, v)
        ours = functools.partial(attend_last, q, blocks, [512] * sequences, HEAD**-0.5)
        k, v = (each.transpose(0, 1).reshape(sequences, GROUPS, 512, HEAD).contiguous() for each in (k, v))
        plain = functools.partial(F.scaled_dot_product_attention, q.unsqueeze(2), k, v, enable_gqa=True)
        found[f"attention, the last of 512 tokens of {sequences} sequences"] = ours, plain
    return found


def training_steps() -> dict[str, tuple[Call, Call]]:
    """Return forward and backward of a Llama of transformers on one rank, ours beside its own with sdpa."""
    found: dict[str, tuple[Call, Call]] = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ascend_parallel.configure(deterministic="invariant")
    for dtype in (torch.float32, torch.bfloat16):
        models = [llama(dtype), on_one_rank(llama(dtype))]
        models[1].set_attn_implementation("invariant")
        tokens = torch.randint(4096, (TRAINED, 256))
        plain, ours = (functools.partial(train, model, tokens) for model in models)
        found[f"training step, {str(dtype).removeprefix('torch.')}, {TRAINED} x 256 tokens"] = ours, plain
    return found


def llama(dtype: torch.dtype) -> Any:
    """Return a Llama of two layers."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 4096}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=12, num_key_value_heads=4)
    return transformers.LlamaForCausalLM(config).to(dtype)


def train(model: Any, tokens: torch.Tensor) -> None:
    """Run forward and backward of the logprobs of tokens; plain models by torch's log-softmax."""
    with torch.enable_grad():
        model.zero_grad()
        if model.config._attn_implementation == "invariant":
            found = ascend_parallel.logprobs(model, tokens)
        else:
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
            found = logits.log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1))
        (-found.mean()).backward()


def log_softmaxes() -> dict[str, tuple[Call, Call]]:
    """Return the log-softmax of a batch, ours beside torch's."""
    logits = torch.randn(64, VOCABULARY)
    plain = functools.partial(torch.log_softmax, logits, -1)
    return {f"log-softmax, [64, {VOCABULARY}]": (functools.partial(log_softmax, logits), plain)}


def seconds(call: Call) -> float:
    """Return the CPU time of a call: other programs do not count."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def main() -> None:
    """Time each in turn, and print a table."""
    options = options_of(__doc__, link=False, rounds=15).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    calls = {
        **products(torch.float32),
        **products(torch.bfloat16),
        **attentions(),
        **log_softmaxes(),
        **training_steps(),
    }
    print("| | torch, ms | over it [95 %] |\n|---|---|---|")
    with torch.no_grad():
        for name, (ours, plain) in calls.items():
            ours(), plain()
            times = [(seconds(ours), seconds(plain)) for _ in range(options.rounds)]
            ratios = np.array([own / other for own, other in times])
            low, high = interval(ratios)
            typical = 1e3 * median(other for _, other in times)
            print(f"| {name} | {typical:.2f} | {np.median(ratios):.2f} [{low:.2f}-{high:.2f}] |", flush=True)


if __name__ == "__main__":
    main()
