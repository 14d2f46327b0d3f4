"""Time context parallelism on a shaped link: attention alone, and training steps of a Llama, in groups of heads.

    python benchmarks/context.py --link 1gbit              attention and steps; ten minutes
    python benchmarks/context.py                           the same over the loopback, where "auto" must not lose
    python benchmarks/context.py --link 1gbit --attention  attention alone; --case 0: one of its cases
    python benchmarks/context.py --link 1gbit --layer      attention with its projections alone
    python benchmarks/context.py --link 1gbit --steps      steps alone

Where DeepSpeed can be imported (make compat-deepspeed; PYTHONPATH=.compat/deepspeed), "DeepSpeed's Ulysses" is its
UlyssesSPAttentionHF around the same attention, in the same rounds.

2 ranks of one thread share a sequence. The attention is that of ``ascend-parallel bench --context``, which times other
sizes: "serial" exchanges all heads by torch's own all-to-alls, before and after the attention; "gather" gathers keys
and values in the place of the exchange, and its ranks have two pieces of the sequence each; "auto" is what
COC_PARALLEL_NUM=auto measured and took. The table has medians of forward and backward in ms, medians of the ratios
serial / own and one group / own, paired by round, with bootstrap intervals, and the medians over max(T_comp, T_comm),
below which few schedules come. The layer projects queries, keys and values, attends, and projects the
output: before and behind the exchange, with the output under it ("output projected"), or with all under it
("projected"); "computation" is the layer without an exchange. The steps are forward, backward and AdamW of a Llama of
transformers, with sdpa; "whole" is one group.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import in_turn, milliseconds, on_ranks, options_of, ratio, run, table, with_state

import ascend_parallel
from ascend_parallel.tuning.bench.attention import AttentionCase, ProjectedAttention, attend, runs_of, variant
from ascend_parallel.tuning.bench.exchanges import AUTO, COMMUNICATION, COMPUTATION, SERIAL, parts_of

RANKS, GROUPS = 2, (1, 2, 4)
WHOLE, OUTPUT, PROJECTED = "whole", ", output projected", ", projected"
CASES = (
    AttentionCase(tokens=2048, heads=8, key_heads=8, width=64),
    AttentionCase(tokens=4096, heads=8, key_heads=8, width=64),
    AttentionCase(tokens=4096, heads=16, key_heads=16, width=64),
    AttentionCase(tokens=4096, heads=16, key_heads=4, width=64),
)
TOKENS, HIDDEN, INNER, HEADS, LAYERS, WORDS = 4096, 512, 1536, 8, 2, 4096


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, rounds=7)
    parser.add_argument("--attention", action="store_true", help="attention alone")
    parser.add_argument("--layer", action="store_true", help="attention with its projections alone")
    parser.add_argument("--steps", action="store_true", help="training steps alone")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="one case of attention; default: all")
    parser.add_argument("--tokens", type=int, help="tokens of attention; default: those of the case")
    options = parser.parse_args()
    if options.layer:
        _print_layers(options)
        return
    if not options.steps:
        lines = []
        for case in CASES if options.case is None else CASES[options.case : options.case + 1]:
            case = case if options.tokens is None else replace(case, tokens=options.tokens)
            asked: dict[str, Any] = {"title": str(case), "case": asdict(case), "rounds": options.rounds}
            lines += _attention_lines(case, on_ranks("context:attention", RANKS, link=options.link, **asked))
        ratios = ["serial / own", "95 %", "one group / own", "95 %"]
        print(table(["attention", "T_comp", "T_comm", "variant", "ms", *ratios, "ms / bound"], lines))
    if not options.attention:
        times = on_ranks("context:steps", RANKS, link=options.link, title="steps", rounds=options.rounds)
        lines = [[name, milliseconds(own), *ratio(times[WHOLE], own)] for name, own in times.items()]
        print(f"\nLlama, {LAYERS} layers, hidden {HIDDEN}, {TOKENS} tokens on {RANKS} ranks\n")
        print(table(["variant", "ms", "whole / own", "95 %"], lines))


def _print_layers(options: argparse.Namespace) -> None:
    lines = []
    for case in CASES if options.case is None else CASES[options.case : options.case + 1]:
        asked: dict[str, Any] = {"title": str(case), "case": asdict(case), "rounds": options.rounds}
        times = on_ranks("context:layer", RANKS, link=options.link, **asked)
        for name, own in times.items():
            groups = times.get(name.removesuffix(PROJECTED).removesuffix(OUTPUT), own)
            lines.append([str(case), name, milliseconds(own), *ratio(times["1 groups"], own), *ratio(groups, own)])
    print(table(["layer", "variant", "ms", "one group / own", "95 %", "not projected / own", "95 %"], lines))


def _attention_lines(case: AttentionCase, found: dict[str, Any]) -> list[list[str]]:
    times: dict[str, list[float]] = found["times"]
    one_group, lines, parts = times[f"{case.chosen_exchange(RANKS)}, 1 group"], [], parts_of(times)
    for name, own in times.items():
        if not name.startswith((COMPUTATION, COMMUNICATION)):
            about = [str(case), *(f"{1e3 * part:.0f}" for part in parts)] if name == SERIAL else [""] * 3
            named = f"auto: {found['auto']}" if name == AUTO else name
            beside = *ratio(times[SERIAL], own), *ratio(one_group, own)
            lines.append([*about, named, milliseconds(own), *beside, f"{median(own) / max(parts):.2f}"])
    return lines


def attention(group: dist.ProcessGroup, case: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return the seconds of forward and backward, by variant, and the variant that "auto" takes."""
    asked = AttentionCase(**case)
    runs, chosen = runs_of(asked, group, list(GROUPS))
    auto = variant(asked.chosen_exchange(group.size()), chosen)
    if (ulysses := _by_deepspeed(group, asked)) is not None:
        runs["DeepSpeed's Ulysses"] = ulysses
    return {"times": in_turn(runs, rounds), "auto": auto}


def _by_deepspeed(group: dist.ProcessGroup, case: AttentionCase) -> Callable[[], object] | None:
    """Return a forward and backward by DeepSpeed's own Ulysses; None: DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ.setdefault("LOCAL_RANK", str(group.rank()))
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    module: Any = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")

    def attention(_: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: object, **___: object) -> Any:
        return attend(None, *(x.permute(2, 0, 1, 3) for x in (q, k, v))).transpose(0, 1), None

    own = case.tokens // group.size()
    ulysses = module.UlyssesSPAttentionHF(
        attn=attention,
        batch_size=1,
        attn_head_count=case.heads,
        attn_head_size=case.width,
        kv_head_count=case.key_heads,
        num_hidden_layers=1,
        process_group=group,
        local_seq_length=own,
        global_seq_length=case.tokens,
    )
    places = torch.arange(case.tokens).chunk(group.size())[group.rank()][None]
    heads = case.heads, case.key_heads, case.key_heads
    drawn = [torch.randn(1, count, own, case.width, requires_grad=True) for count in heads]
    gradient = torch.randn(1, own, case.heads * case.width)

    def step() -> object:
        o, _ = ulysses(torch.nn.Identity(), *drawn, None, position_ids=places)
        return torch.autograd.grad(o, drawn, gradient)

    return step


def layer(group: dist.ProcessGroup, case: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of forward and backward of attention with its projections, by variant."""
    asked = AttentionCase(**case)
    projected = ProjectedAttention(asked, group)
    runs: dict[str, Callable[[], object]] = {COMPUTATION: projected.compute}
    for count in (each for each in GROUPS if each <= asked.parts(group.size())):
        runs[f"{count} groups"] = partial(projected.run, count)
        runs[f"{count} groups{OUTPUT}"] = partial(projected.run, count, output=True)
        runs[f"{count} groups{PROJECTED}"] = partial(projected.run, count, inputs=True, output=True)
    return in_turn(runs, rounds)


def steps(group: dist.ProcessGroup, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of training steps of a Llama, by the setting in force."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ascend_parallel.patches.transformers import context_parallel
    from ascend_parallel.patches.transformers.layers import ACTIVE_PATCH

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
        return partial(with_state, [(ACTIVE_PATCH, "framework", ACTIVE_PATCH.framework)], step)

    runs = {f"{count} groups": variant(num_chunks=count) for count in GROUPS[1:]}
    return in_turn({WHOLE: variant(num_chunks=1), **runs, "auto": variant(auto=True)}, rounds)


if __name__ == "__main__":
    run(main)
