"""Time whole training steps of a real GPT (megatron-core): plain, with overlapped layers, and in regions.

    python benchmarks/training.py --link 1gbit      about four minutes
    python benchmarks/training.py                   over the loopback, where there is little to hide
    python benchmarks/training.py --link 1gbit --exposed     the communication under which nothing is computed
    python benchmarks/training.py --link 1gbit --processor   seconds of the processor in place of the clock's

Forward, backward and the optimizer's step, fp32, 2 ranks, in all-reduce mode and with sequence parallelism. The table
has medians, and the ratio plain / variant, paired by round, with a bootstrap interval. "first step" includes auto's
search for chunks. With --exposed the table has the communication of a step on rank 0, and the part of it under which
nothing is computed, from timelines of the overlapped layers; "serial" is COC_MODE=1. With --processor the table has
what a step takes of a processor, with gloo's threads, on the rank that takes most: where ranks have few cores, no
overlap can make a step shorter than that.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lora import Adapt, adapted, trained
from measuring import (
    ABSENT,
    VARIANTS,
    State,
    deciding,
    in_turn,
    milliseconds,
    on_ranks,
    options_of,
    ratio,
    run,
    settings_of,
    table,
    with_state,
)
from megatron_cpu import (
    end_model_parallel,
    finalize_gradients,
    megatron_on_cpu,
    next_token_loss,
    small_gpt,
    start_model_parallel,
)

import ascend_parallel
from ascend_parallel.diagnostics.intervals import length, union
from ascend_parallel.diagnostics.timeline.files import COMPUTING, Pass, read_run
from ascend_parallel.diagnostics.timeline.table import communicating, exposed

RANKS, PLAIN = 2, "plain"


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, rounds=15, json=True)
    parser.add_argument("--chunks", default="auto,4,4 region", help=VARIANTS)
    for name, size in {"hidden": 768, "layers": 2, "seq": 512, "batch": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    parser.add_argument("--exposed", action="store_true", help="record timelines instead of times")
    parser.add_argument("--processor", action="store_true", help="measure processor time instead of the clock's")
    options = vars(parser.parse_args())
    file = options.pop("json")
    found = on_ranks("training:rank", RANKS, link=options.pop("link"), limit=1200, options=options)
    if options["exposed"]:
        heads = ["mode", "COC_PARALLEL_NUM", "communication, ms", "exposed, ms", "nothing can cover, ms"]
        print(table(heads, _exposed_rows(found)))
        return
    if file is not None:
        file.write_text(json.dumps({mode: _seconds(variants) for mode, variants in found.items()}) + "\n")
    rows = [
        [mode, name, milliseconds(times, 0), *ratio(variants[PLAIN][1], times), f"{1e3 * first:.0f}"]
        for mode, variants in found.items()
        for name, (first, times) in variants.items()
    ]
    print(table(["mode", "COC_PARALLEL_NUM", "step, ms", "plain / variant", "95 %", "first step, ms"], rows))


def _seconds(variants: dict[str, tuple[float, list[float]]]) -> dict[str, list[float]]:
    return {name: times for name, (_, times) in variants.items()}


def _exposed_rows(found: dict[str, dict[str, tuple[float, ...]]]) -> list[list[str]]:
    return [
        [mode, name, *(f"{each:.1f}" for each in sums)]
        for mode, variants in found.items()
        for name, sums in variants.items()
    ]


def rank(group: dist.ProcessGroup, options: dict[str, Any]) -> dict[str, Any]:
    """Time every variant of both modes on this rank."""
    with megatron_on_cpu():
        start_model_parallel(RANKS)
        found = {mode: _mode(mode, options) for mode in ("all-reduce", "sequence parallel")}
        end_model_parallel()
    return found


def _mode(mode: str, job: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of the first step, and of the other steps, by variant; or what `_recorded` returns."""
    step = gpt_step(job, sequence_parallel=mode != "all-reduce")
    step()  # warm-up of allocator and optimizer
    if job["exposed"]:
        return {name: _recorded(step, job["rounds"], options) for name, options in _settings(job["chunks"]).items()}
    runs = {
        name: lambda state=state: with_state(state, step) for name, state in _variants(job["chunks"].split(",")).items()
    }
    first = {name: in_turn({name: runs[name]}, 1, warm_up=0)[name][0] for name in runs}
    for name in runs:
        for _ in range(deciding(name)):
            runs[name]()
    times = in_turn(runs, job["rounds"], warm_up=0, clock=time.process_time if job["processor"] else time.perf_counter)
    runs[PLAIN]()  # restores the plain methods
    return {name: (first[name], times[name]) for name in runs}


def gpt_step(
    job: dict[str, Any], sequence_parallel: bool, adapt: Adapt | None = None, *, compiled: bool = False
) -> Callable[[], None]:
    """Return a training step of Megatron's GPT with the sizes of `job`; compiled: each layer by torch.compile."""
    shape = {"num_layers": job["layers"], "hidden": job["hidden"], "heads": 12, "seq": job["seq"], "vocab": 8192}
    model = adapted(small_gpt(**shape, sequence_parallel=sequence_parallel), adapt)
    for layer in model.decoder.layers if compiled else ():
        layer.compile()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-6)
    tokens = torch.randint(8192, (job["batch"], job["seq"] + 1), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.zero_grad()
        next_token_loss(model, tokens).backward()
        finalize_gradients(model)
        optimizer.step()

    return step


def _variants(chunks: list[str]) -> dict[str, State]:
    """Return the patched forward methods by setting, the plain methods first."""
    ascend_parallel.configure(num_chunks=1)
    variants = {PLAIN: forwards()}
    for requested in chunks:
        ascend_parallel.configure(**settings_of(requested))
        variants[requested] = forwards()
        ascend_parallel.configure(num_chunks=1)
    return variants


def _settings(chunks: str) -> dict[str, dict[str, Any]]:
    return {"serial": {"mode": 1}, **{requested: settings_of(requested) for requested in chunks.split(",")}}


def _recorded(step: Callable[[], None], rounds: int, options: dict[str, Any]) -> tuple[float, ...]:
    """Return the milliseconds of communication of a step on this rank, of its exposed part, and what no overlap covers.

    They are means of the rounds.
    """
    ascend_parallel.configure(**options)
    step()
    with tempfile.TemporaryDirectory() as folder:
        with ascend_parallel.timeline.record(folder):
            for _ in range(rounds):
                step()
        (file, *_), _ = read_run(Path(folder))
    ascend_parallel.configure(num_chunks=1, mode=-1)
    passes = file.passes
    # In a region the collectives of two passes run at the same time.
    sums = [length(union(each for one in passes for each in part(one))) for part in (communicating, exposed)]
    return tuple(each / rounds / 1e6 for each in (*sums, _uncovered(passes)))


def _uncovered(passes: Sequence[Pass]) -> int:
    """Return the ns by which the communication between two attentions exceeds the computations of its layers."""
    total = communication = computation = 0
    for each in sorted(passes, key=lambda each: each.begin):
        communication += length(communicating(each))
        computation += sum(span.end - span.begin for span in each.spans if span.kind in COMPUTING)
        if (each.layer.rpartition(".")[2], each.direction) in (("linear_qkv", "forward"), ("linear_proj", "backward")):
            total += max(0, communication - computation)
            communication = computation = 0
    return total + max(0, communication - computation)


def forwards() -> State:
    """Return the methods that the settings above replace, or add, with where they stand."""
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, mappings

    layers = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, LanguageModelEmbedding)
    sums = (mappings._ReduceFromModelParallelRegion, mappings._ReduceScatterToSequenceParallelRegion)
    replaced = [*((owner, "forward") for owner in layers), (VocabParallelEmbedding, "__call__")]
    replaced += [(owner, "apply") for owner in sums]
    return [(owner, name, vars(owner).get(name, ABSENT)) for owner, name in replaced]


if __name__ == "__main__":
    run(main)
