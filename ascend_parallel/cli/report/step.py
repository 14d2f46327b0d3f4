"""The part of a report that runs on the ranks: training steps of a small Llama of transformers with its tp_plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ascend_parallel
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.tuning.launch.devices import device_of
from ascend_parallel.tuning.launch.ranks import report
from ascend_parallel.tuning.measured.rank_clock import RankClock

PLAIN = "plain"
WORDS = 2048
HEADS = 16
STEPS = 3  # whose losses are compared


def measure(
    group: dist.ProcessGroup,
    folder: str,
    hidden: int,
    layers: int,
    rows: int,
    chunks: list[int],
    rounds: int,
) -> dict[str, Any]:
    """Return the losses of three steps from the same weights, and the seconds of steps in turn, plain and in chunks.

    A step is forward, backward and AdamW, on `rows` tokens. folder: for the model's files. Before each timed step
    stands another one of the same setting, which installs the setting.
    """
    device = device_of(group)
    ascend_parallel.configure(num_chunks=chunks[0])  # forwards are installed while a model is made
    clock = RankClock(group, device)
    if group.rank() == 0:
        _save(Path(folder), hidden, layers, group.size())
    clock.begin_together()  # the folder is complete
    model = _model(Path(folder))
    ids = torch.randint(WORDS, (1, rows), generator=torch.Generator().manual_seed(1)).to(device)
    start = [each.detach().clone() for each in model.parameters()]
    variants = {PLAIN: 1, **{f"{count} chunks": count for count in chunks}}
    losses = {}
    for name, count in variants.items():
        report(f"losses, {name}")
        ascend_parallel.configure(num_chunks=count)
        _restore(model, start)
        step = _step(model, ids)
        losses[name] = [step() for _ in range(STEPS)]
    report("steps in turn")
    step = _step(model, ids)
    runs = {name: partial(_timed, clock, step, count) for name, count in variants.items()}
    return {
        "model": {"hidden": model.config.hidden_size, "layers": layers, "tokens": rows},
        "losses": losses,
        "times": clock.rounds(runs, rounds),
        "counts": _chunked_calls(step, chunks[0]),
    }


def _save(folder: Path, hidden: int, layers: int, ranks: int) -> None:
    """Write a Llama whose heads, inner features and words the ranks can share; with more heads it is wider."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, inner, words = (-(-count // ranks) * ranks for count in (HEADS, 4 * hidden, WORDS))
    config = LlamaConfig(
        hidden_size=heads * (hidden // HEADS),
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=words,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)


def _step(model: Any, ids: torch.Tensor) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def _restore(model: Any, start: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for own, first in zip(model.parameters(), start, strict=True):
            own.copy_(first)


def _timed(clock: RankClock, step: Callable[[], float], count: int) -> float:
    ascend_parallel.configure(num_chunks=count)
    step()
    return clock.seconds(step)


def _chunked_calls(step: Callable[[], float], count: int) -> dict[str, dict[str, int]]:
    """Return the counts of a step in `count` chunks: a step that runs nothing in chunks compares nothing."""
    ascend_parallel.configure(num_chunks=count)
    COUNTS.clear()
    step()
    return COUNTS.as_dict()
