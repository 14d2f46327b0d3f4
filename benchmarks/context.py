"""Time context parallelism on a shaped link: attention alone, and training steps of a Llama, in groups of heads.

"gather" rows gather keys and values in the place of the exchange; their ranks have two pieces of the sequence each.

    python benchmarks/context.py --link 1gbit              attention and steps; five minutes
    python benchmarks/context.py --link 1gbit --attention  attention alone
    python benchmarks/context.py --link 1gbit --steps      steps alone

Where DeepSpeed can be imported (make compat-deepspeed; PYTHONPATH=.compat/deepspeed), "DeepSpeed's Ulysses" is its
UlyssesSPAttentionHF around the same attention, in the same rounds.

2 ranks of one thread share a sequence. "whole" exchanges all heads by torch's own all-to-alls, before and after the
attention. The table of attention has medians of forward and backward in ms, medians of the ratio whole / own paired by
round with bootstrap intervals, and the medians over max(T_comp, T_comm), below which few schedules come: T_comp is
the attention of a rank's heads without an exchange, T_comm the whole exchange without attention (groups send faster
than torch's all-to-all, so they may pass this bound). The steps are forward,
backward and AdamW of a Llama of transformers, with sdpa; "whole" is one group.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import in_turn, milliseconds, on_ranks, options_of, ratio, run, table, with_state
from torch.nn.functional import scaled_dot_product_attention

import ascend_parallel
from ascend_parallel.ops.key_gather import GATHER
from ascend_parallel.overlap.context import attend_pieces, attention_in_turn, run_attention
from ascend_parallel.settings import Settings

RANKS, GROUPS = 2, (1, 2, 4)
WHOLE = "whole"
# Tokens, heads of queries, heads of keys, head size.
CASES = ((2048, 8, 8, 64), (4096, 8, 8, 64), (4096, 16, 16, 64), (4096, 16, 4, 64))
TOKENS, HIDDEN, INNER, HEADS, LAYERS, WORDS = 4096, 512, 1536, 8, 2, 4096


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, rounds=7)
    parser.add_argument("--attention", action="store_true", help="attention alone")
    parser.add_argument("--steps", action="store_true", help="training steps alone")
    options = parser.parse_args()
    if not options.steps:
        lines = []
        for case in CASES:
            title = "{} tokens, {} heads, {} of keys, head size {}".format(*case)
            times = on_ranks(
                "context:attention", RANKS, link=options.link, title=title, case=list(case), rounds=options.rounds
            )
            lines += _attention_lines(title, times)
        heads = ["attention", "T_comp", "T_comm", "variant", "ms", "whole / own", "95 %", "ms / bound"]
        print(table(heads, lines))
    if not options.attention:
        times = on_ranks("context:steps", RANKS, link=options.link, title="steps", rounds=options.rounds)
        lines = [[name, milliseconds(own), *ratio(times[WHOLE], own)] for name, own in times.items()]
        print(f"\nLlama, {LAYERS} layers, hidden {HIDDEN}, {TOKENS} tokens on {RANKS} ranks\n")
        print(table(["variant", "ms", "whole / own", "95 %"], lines))


def _attention_lines(title: str, times: dict[str, list[float]]) -> list[list[str]]:
    parts = [median(times.pop(name)) for name in ("computation", "communication")]
    lines = []
    for name, own in times.items():
        about = [title, *(f"{1e3 * part:.0f}" for part in parts)] if name == WHOLE else [""] * 3
        lines.append([*about, name, milliseconds(own), *ratio(times[WHOLE], own), f"{median(own) / max(parts):.2f}"])
    return lines


def attention(group: dist.ProcessGroup, case: list[int], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of forward and backward, whole and in groups of heads, and of the parts alone."""
    tokens, query_heads, key_heads, width = case
    sizes = query_heads, key_heads, key_heads
    drawn = [torch.randn(tokens // group.size(), 1, heads, width, requires_grad=True) for heads in sizes]
    gradient = torch.randn(tokens // group.size(), 1, query_heads, width)
    whole = [torch.randn(tokens, 1, heads // group.size(), width, requires_grad=True) for heads in sizes]
    whole_gradient = torch.randn(tokens, 1, query_heads // group.size(), width)

    def trained(made: Callable[..., torch.Tensor], operands: list[torch.Tensor], d_output: torch.Tensor) -> object:
        return torch.autograd.grad(made(*operands), operands, d_output)

    def exchanged(operands: tuple[torch.Tensor, ...], function: Any) -> torch.Tensor:
        return attention_in_turn(*operands, function, group=group)

    runs: dict[str, Callable[[], object]] = {
        "computation": lambda: trained(partial(_attend, None), whole, whole_gradient),
        "communication": lambda: trained(lambda *given: exchanged(given, _nothing), drawn, gradient),
        WHOLE: lambda: trained(lambda *given: exchanged(given, _attend), drawn, gradient),
    }
    if (ulysses := _by_deepspeed(group, tokens, query_heads, key_heads, width)) is not None:
        runs["DeepSpeed's Ulysses"] = partial(trained, ulysses, drawn, gradient)
    for count in GROUPS:
        settings = Settings(num_chunks=count, mode=2)
        run_groups = partial(run_attention, attention=_attend, group=group, settings=settings)
        runs[f"{count} group{'s' if count > 1 else ''}"] = partial(trained, run_groups, drawn, gradient)
        gathers = partial(run_attention, attention=_attend_rows, group=group, settings=settings, exchange=GATHER)
        runs[f"gather, {count} group{'s' if count > 1 else ''}"] = partial(trained, gathers, drawn, gradient)
    return in_turn(runs, rounds)


def _by_deepspeed(
    group: dist.ProcessGroup, tokens: int, query_heads: int, key_heads: int, width: int
) -> Callable[..., torch.Tensor] | None:
    """Return the attention of q, k, v [s, B, N, D] by DeepSpeed's own Ulysses; None: DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ.setdefault("LOCAL_RANK", str(group.rank()))
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    module: Any = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")

    def attend(_: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: object, **___: object) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2), None

    ulysses = module.UlyssesSPAttentionHF(
        attn=attend,
        batch_size=1,
        attn_head_count=query_heads,
        attn_head_size=width,
        kv_head_count=key_heads,
        num_hidden_layers=1,
        process_group=group,
        local_seq_length=tokens // group.size(),
        global_seq_length=tokens,
    )
    places = torch.arange(tokens).chunk(group.size())[group.rank()][None]

    def run(*operands: torch.Tensor) -> torch.Tensor:
        batch_first = (x.permute(1, 2, 0, 3) for x in operands)
        o, _ = ulysses(torch.nn.Identity(), *batch_first, None, position_ids=places)
        heads: torch.Tensor = o.view(1, -1, query_heads, width).transpose(0, 1)
        return heads

    return run


def _attend(_: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention, [S, B, n, D]."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)


def _attend_rows(keys: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention of a rank's two pieces of the sequence."""

    def attend(rows: slice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril_(rows.start)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).permute(2, 0, 1, 3)

    return attend_pieces(attend, keys, q, k, v, causal=True)


def _nothing(_: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stand for attention: every operand is read, and its gradient is as large."""
    return q + (k + v).repeat_interleave(q.shape[2] // k.shape[2], dim=2)


def steps(group: dist.ProcessGroup, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of training steps of a Llama, by the setting in force."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ascend_parallel.patches.transformers import context_parallel
    from ascend_parallel.patches.transformers.layers import IN_FORCE

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=WORDS,
        max_position_embeddings=TOKENS,
    )
    model = LlamaForCausalLM(config)
    context = context_parallel(model, group)
    ids = torch.randint(WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = context.cut(ids, ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=group)
        optimizer.step()

    def variant(**settings: Any) -> Callable[[], object]:
        """Return the step with `settings`: what a setting has measured stays with it."""
        ascend_parallel.configure(**settings)
        return partial(with_state, [(IN_FORCE, "framework", IN_FORCE.framework)], step)

    runs = {f"{count} groups": variant(num_chunks=count) for count in GROUPS[1:]}
    return in_turn({WHOLE: variant(num_chunks=1), **runs, "auto": variant(auto=True)}, rounds)


if __name__ == "__main__":
    run(main)
