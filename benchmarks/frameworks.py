"""Time whole training steps of transformers, torch and DeepSpeed, plain and with overlapped layers.

    python benchmarks/frameworks.py --link 1gbit      about eight minutes
    python benchmarks/frameworks.py --chunks auto     over the loopback, where there is little to hide

A Llama of random weights (transformers, DeepSpeed AutoTP), and the decoder of examples/frameworks (torch, with and
without sequence parallelism): forward, backward and AdamW's step, fp32, 2 ranks. The table has medians, and the ratio
plain / variant, paired by round, with a bootstrap interval; "communication" is its share of the plain step, from a
timeline of the layers run without chunks (COC_MODE=1). "first step" includes auto's search for chunks.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measuring import gain, in_turn, milliseconds, on_ranks, options_of, run, table
from torch.distributed.tensor.parallel import PrepareModuleInput

import ascend_parallel
from ascend_parallel.diagnostics.timeline.files import read_run
from ascend_parallel.diagnostics.timeline.table import communicating, length
from ascend_parallel.patches.torch_native.styles import IN_FORCE as TORCH
from ascend_parallel.patches.transformers.layers import IN_FORCE as TRANSFORMERS
from ascend_parallel.tuning.bench.results import interval

RANKS, PLAIN, VOCABULARY = 2, "plain", 8192
FRAMEWORKS = ("transformers", "torch", "torch, sequence parallel", "deepspeed")


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, rounds=15, json=True)
    parser.add_argument(
        "--chunks",
        default="4",
        help='values of COC_PARALLEL_NUM beside the plain step, with commas; "4 region": in regions',
    )
    parser.add_argument("--frameworks", default=";".join(FRAMEWORKS), help="with semicolons; default: all installed")
    for name, size in {"hidden": 768, "layers": 2, "rows": 512, "batch": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    options = vars(parser.parse_args())
    link, file, rows, seconds = options.pop("link"), options.pop("json"), [], {}
    for name in options.pop("frameworks").split(";"):
        if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            print("deepspeed is not installed: make compat-deepspeed, then PYTHONPATH=.compat/deepspeed")
            continue
        share, variants = on_ranks("frameworks:rank", RANKS, link=link, limit=1200, title=name, name=name, job=options)
        plain = variants[PLAIN][1]
        seconds[name] = {chunks: times for chunks, (_, times) in variants.items()}
        for chunks, (first, times) in variants.items():
            ratio = ("1", "") if chunks == PLAIN else _ratio(times, plain)
            communication = f"{100 * share / median(plain):.0f} %" if chunks == PLAIN else ""
            rows.append([name, chunks, milliseconds(times, 0), *ratio, communication, f"{1e3 * first:.0f}"])
    if file is not None:
        file.write_text(json.dumps(seconds) + "\n")
    heads = ["framework", "COC_PARALLEL_NUM", "step, ms", "plain / variant", "95 %", "communication", "first step, ms"]
    print(table(heads, rows))


def _ratio(times: list[float], plain: list[float]) -> tuple[str, str]:
    low, high = interval(np.array(plain) / np.array(times))
    return f"{gain(plain, times):.3f}", f"{low:.3f}-{high:.3f}"


def rank(group: dist.ProcessGroup, name: str, job: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the seconds of communication in a step, and of the first and the other steps by variant."""
    os.environ.update(RANK=str(group.rank()), LOCAL_RANK=str(group.rank()), WORLD_SIZE=str(RANKS))
    ascend_parallel.configure(num_chunks=4)  # forwards are installed while a model is made
    step = _steps_of(name)(job)
    step()  # warm-up of allocator and optimizer
    communication = _communication(step)
    variants = {PLAIN: _state(num_chunks=1)}
    for chunks in job["chunks"].split(","):
        number, *region = chunks.split()
        own = {"auto": True} if number == "auto" else {"num_chunks": int(number)}
        variants[chunks] = _state(**own, region=bool(region))
    ascend_parallel.configure(num_chunks=1)
    runs = {each: lambda state=state: _with(state, step) for each, state in variants.items()}
    first = {each: in_turn({each: runs[each]}, 1, warm_up=0)[each][0] for each in runs}
    times = in_turn(runs, job["rounds"], warm_up=1)
    return communication, {each: (first[each], times[each]) for each in runs}


def _steps_of(name: str) -> Callable[[dict[str, Any]], Callable[[], None]]:
    if name == "transformers":
        return transformers_step
    if name == "deepspeed":
        return deepspeed_step
    return lambda job: torch_step(job, sequence_parallel="sequence" in name)


def _communication(step: Callable[[], None]) -> float:
    """Return the seconds in which this rank communicates in a step whose layers run without chunks."""
    ascend_parallel.configure(mode=1)
    step()
    with tempfile.TemporaryDirectory() as folder:
        with ascend_parallel.timeline.record(folder):
            step()
        (file, *_), _ = read_run(Path(folder))
    return sum(length(communicating(each)) for each in file.passes) / 1e9


def _state(**settings: Any) -> list[tuple[Any, str, Any]]:
    """Return what switches the layers of all frameworks to `settings`: what a setting has found out stays with it."""
    ascend_parallel.configure(**{"mode": -1, **settings})
    held: list[tuple[Any, str, Any]] = [(each, "framework", each.framework) for each in (TRANSFORMERS, TORCH)]
    held.append((PrepareModuleInput, "_prepare_input_arg", vars(PrepareModuleInput)["_prepare_input_arg"]))
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.module_inject import layers

        held += [(kind, "forward", vars(kind)["forward"]) for kind in (layers.LinearAllreduce, layers.LinearLayer)]
    return held


def _with(state: list[tuple[Any, str, Any]], step: Callable[[], None]) -> None:
    for owner, name, value in state:
        setattr(owner, name, value)
    step()


def _tokens(job: dict[str, Any]) -> torch.Tensor:
    return torch.randint(VOCABULARY, (job["batch"], job["rows"]), generator=torch.Generator().manual_seed(1))


def _llama(job: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=job["hidden"],
        intermediate_size=4 * job["hidden"],
        num_hidden_layers=job["layers"],
        num_attention_heads=12,
        vocab_size=VOCABULARY,
    )
    return transformers.LlamaForCausalLM(config)


def transformers_step(job: dict[str, Any]) -> Callable[[], None]:
    """Return a training step of a Llama with its tp_plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        _llama(job).save_pretrained(folder[0])
    dist.barrier()
    plan = DistributedConfig(tp_size=RANKS, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=plan)
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-6), _tokens(job)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def torch_step(job: dict[str, Any], sequence_parallel: bool) -> Callable[[], None]:
    """Return a training step of the decoder of examples/frameworks/torch_tp.py."""
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh

    example = _example(["--hidden", str(job["hidden"]), "--inner", str(4 * job["hidden"]), "--heads", "12"], job)
    example.args.sequence_parallel = sequence_parallel
    torch.manual_seed(0)
    model = example.Decoder()
    example.parallelise(model, init_device_mesh("cpu", (RANKS,)))
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False), _tokens(job)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(ids)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()

    return step


def _example(words: list[str], job: dict[str, Any]) -> Any:
    """Return the module torch_tp.py with the sizes of `job`."""
    folder = Path(__file__).parents[1] / "examples" / "frameworks"
    sys.path.insert(0, str(folder))
    own, sys.argv = sys.argv, ["", *words, "--layers", str(job["layers"]), "--vocabulary", str(VOCABULARY)]
    try:
        return importlib.import_module("torch_tp")
    finally:
        sys.argv = own


def deepspeed_step(job: dict[str, Any]) -> Callable[[], None]:
    """Return a training step of a Llama with DeepSpeed AutoTP."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": job["batch"],
        "tensor_parallel": {"autotp_size": RANKS},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
    }
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=_llama(job), config=config)
    ids = _tokens(job)

    def step() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return step


if __name__ == "__main__":
    run(main)
