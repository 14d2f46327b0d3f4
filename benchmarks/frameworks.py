"""Time whole training steps of every framework, plain and with overlapped layers.

    python benchmarks/frameworks.py --link 1gbit      about 13 minutes
    python benchmarks/frameworks.py --chunks "4,auto,auto region=auto"     over the loopback: little to hide

A Llama of random weights (transformers, DeepSpeed AutoTP), the decoder of examples/frameworks (torch), the GPT of
benchmarks/training.py (megatron), and a planned GPT (examples/sharding), whose plan has Megatron's layouts: forward,
backward and AdamW's step, fp32, 2 ranks. With "LoRA" the model is frozen, and every linear layer of its blocks has an
adapter of rank 16: of PEFT (transformers), by class (torch), or a wrapper as Megatron-Bridge's (megatron).

The table has medians, and the ratio plain / variant, paired by round, with a bootstrap interval; "communication" is its
share of the plain step, from a timeline of the layers run without chunks (COC_MODE=1). "compiled": torch.compile
compiles each transformer layer, in both steps. "first step" includes auto's search for chunks. Steps in which
COC_REGION=auto decides are not timed. Below the table stands what it decided, for wrappers how much of the
adapters' forward ran under their layers' collectives, from a timeline of one step, and for ranks of one thread bounds
of plain / variant: with each collective under the products of its own layer, and with all of them under all that a step
computes. A collective takes part of its time of a processor, with gloo's threads: where a rank has one core, that part
cannot be hidden.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lora import ADAPTERS, Adapt, adapted, bridge_adapters, class_adapters, peft_adapters, trained, under_collectives
from measuring import (
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
from megatron_cpu import end_model_parallel, megatron_on_cpu, start_model_parallel
from region_graph import GPT, HEAD, ProcessMesh, ShardedModule, planned, trace
from torch import nn
from torch.distributed.tensor.parallel import PrepareModuleInput
from training import forwards, gpt_step

import ascend_parallel
from ascend_parallel.diagnostics.intervals import length
from ascend_parallel.diagnostics.timeline.files import COMPUTING, read_run
from ascend_parallel.diagnostics.timeline.table import communicating
from ascend_parallel.patches.torch_native.styles import ACTIVE_PATCH as TORCH
from ascend_parallel.patches.transformers.layers import ACTIVE_PATCH as TRANSFORMERS
from ascend_parallel.settings import Settings, current_settings

RANKS, PLAIN, VOCABULARY, FEW_ROUNDS = 2, "plain", 8192, 5
FRAMEWORKS = (
    "transformers",
    "torch",
    "torch, sequence parallel",
    "deepspeed",
    "megatron",
    "megatron, sequence parallel",
    "megatron, compiled",
    "planned",
    "planned, sequence parallel",
    "transformers, LoRA",
    "torch, LoRA",
    "torch, sequence parallel, LoRA",
    "megatron, LoRA",
    "megatron, sequence parallel, LoRA",
)
Step = Callable[[], None]


class Serial(NamedTuple):
    """Seconds of a step whose layers run without chunks (COC_MODE=1).

    step
        In which it runs, on the slowest rank.
    communication
        In which rank 0 communicates for its layers.
    beside_products
        The part of it that the products of the same pass of the same layer could cover.
    processor
        Of a processor, with all threads, on the rank that takes most.
    """

    step: float
    communication: float
    beside_products: float
    processor: float

    def bounds(self, plain: float) -> str:
        """Return the bounds of plain / variant in words; plain: the seconds of the plain step.

        They hold for ranks of one thread alone: `processor` counts all threads.
        """
        if not self.communication:
            return "no bounds: no communication of its layers was recorded"
        computed = self.step - self.communication
        sending = min(max(self.processor - computed, 0) / self.communication, 1)
        layers, step = self.beside_products, self.step - max(computed, self.communication)
        found = [
            f"{plain / (self.step - hidden):.2f} and {plain / (self.step - (1 - sending) * hidden):.2f}"
            for hidden in (layers, step)
        ]
        return (
            f"bounds of plain / variant, with a core for what sends and without: {found[0]} with each collective under "
            f"the products of its layer, {found[1]} under all that a step computes; sending takes {sending:.0%} of its "
            "time of a processor"
        )


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, rounds=15, json=True)
    parser.add_argument("--chunks", default="4", help=VARIANTS)
    parser.add_argument("--frameworks", default=";".join(FRAMEWORKS), help="with semicolons; default: all installed")
    for name, size in {"hidden": 768, "layers": 2, "rows": 512, "batch": 2, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    options = vars(parser.parse_args())
    link, file = options.pop("link"), options.pop("json")
    rows, seconds, decided = [], {}, []
    for name in options.pop("frameworks").split(";"):
        if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            print("deepspeed is not installed: make compat-deepspeed, then PYTHONPATH=.compat/deepspeed")
            continue
        serial, variants, decisions = on_ranks(
            "frameworks:rank", RANKS, link=link, limit=1200, title=name, name=name, job=options
        )
        decided += [f"{name}, {decision}" for decision in decisions]
        plain = variants[PLAIN][1]
        if options["threads"] == 1:
            decided.append(f"{name}: {Serial(*serial).bounds(median(plain))}")
        seconds[name] = {chunks: times for chunks, (_, times) in variants.items()}
        for chunks, (first, times) in variants.items():
            communication = f"{100 * serial[1] / median(plain):.0f} %" if chunks == PLAIN else ""
            cells = [milliseconds(times, 0), *ratio(plain, times), communication, f"{1e3 * first:.0f}"]
            rows.append([name, chunks, *cells])
    if file is not None:
        file.write_text(json.dumps(seconds) + "\n")
    heads = ["framework", "COC_PARALLEL_NUM", "step, ms", "plain / variant", "95 %", "communication", "first step, ms"]
    print(table(heads, rows))
    print(*decided, sep="\n")


def rank(
    group: dist.ProcessGroup, name: str, job: dict[str, Any]
) -> tuple[tuple[float, ...], dict[str, tuple[float, list[float]]], list[str]]:
    """Return the numbers of `Serial`, and seconds of the first and the other steps by variant; and decisions."""
    torch.set_num_threads(job["threads"])
    os.environ.update(RANK=str(group.rank()), LOCAL_RANK=str(group.rank()), WORLD_SIZE=str(RANKS))
    with _megatron() if name.startswith("megatron") else contextlib.nullcontext():
        return _measured(name, job)


@contextlib.contextmanager
def _megatron() -> Iterator[None]:
    with megatron_on_cpu():
        start_model_parallel(RANKS)
        yield
        end_model_parallel()


def _measured(
    name: str, job: dict[str, Any]
) -> tuple[tuple[float, ...], dict[str, tuple[float, list[float]]], list[str]]:
    ascend_parallel.configure(num_chunks=4)  # forwards are installed while a model is made
    step = _step_of(name, job)
    step()  # warm-up of allocator and optimizer
    serial = _serial(step)
    variants = {PLAIN: state_of(step, num_chunks=1)}
    for chunks in job["chunks"].split(","):
        variants[chunks] = state_of(step, **settings_of(chunks))
    ascend_parallel.configure(num_chunks=1)
    runs = {each: lambda state=state: with_state(state, step) for each, state in variants.items()}
    first = {each: in_turn({each: runs[each]}, 1, warm_up=0)[each][0] for each in runs}
    decisions = [f"{each}: {text}" for each in runs for text in _decided(runs[each], deciding(each))]
    if ADAPTERS:
        decisions += [f"{each}: {under_collectives(run)}" for each, run in runs.items() if each != PLAIN]
    times = in_turn(runs, job["rounds"], warm_up=1)
    runs[PLAIN]()  # restores the plain methods
    return serial, {each: (first[each], times[each]) for each in runs}, decisions


def _decided(step: Step, steps: int) -> list[str]:
    """Run the steps in which COC_REGION=auto decides; return what rank 0 logs of it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ascend_parallel")
    log.addHandler(handler)
    for _ in range(steps):
        step()
    log.removeHandler(handler)
    return [text for text in said if "COC_REGION=auto" in text]


def _step_of(name: str, job: dict[str, Any]) -> Step:
    framework, *modes = name.split(", ")
    sequence_parallel, lora = "sequence parallel" in modes, "LoRA" in modes
    if framework == "transformers":
        return transformers_step(job, adapt=peft_adapters if lora else None)
    if framework == "deepspeed":
        return deepspeed_step(job)
    if framework == "megatron":
        adapt = bridge_adapters if lora else None
        return gpt_step({**job, "seq": job["rows"]}, sequence_parallel, adapt=adapt, compiled="compiled" in modes)
    if framework == "planned":
        return PlannedStep(job, sequence_parallel)
    return torch_step(job, sequence_parallel, adapt=class_adapters if lora else None)


def _serial(step: Step) -> tuple[float, ...]:
    """Return the numbers of `Serial`."""
    serial = state_of(step, mode=1)
    seconds, processor = (
        median(in_turn({"": lambda: with_state(serial, step)}, FEW_ROUNDS, warm_up=1, clock=clock)[""])
        for clock in (time.perf_counter, time.process_time)
    )
    with tempfile.TemporaryDirectory() as folder:
        with ascend_parallel.timeline.record(folder):
            step()
        (file, *_), _ = read_run(Path(folder))
    found = [
        (length(communicating(each)), sum(span.end - span.begin for span in each.spans if span.kind in COMPUTING))
        for each in file.passes
    ]
    return seconds, sum(sent for sent, _ in found) / 1e9, sum(map(min, found)) / 1e9, processor


def state_of(step: object, **settings: Any) -> State:
    """Return what switches the layers of all frameworks to `settings`: what a setting has found out stays with it."""
    ascend_parallel.configure(**{"mode": -1, **settings})
    state: State = [(each, "framework", each.framework) for each in (TRANSFORMERS, TORCH)]
    state.append((PrepareModuleInput, "_prepare_input_arg", vars(PrepareModuleInput)["_prepare_input_arg"]))
    if isinstance(step, PlannedStep):
        state.append((step, "model", step.sharded()))
    if "megatron.core.tensor_parallel" in sys.modules:
        state += forwards()
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.module_inject import layers

        state += [(kind, "forward", vars(kind)["forward"]) for kind in (layers.LinearAllreduce, layers.LinearLayer)]
    return state


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


def transformers_step(job: dict[str, Any], adapt: Adapt | None = None) -> Step:
    """Return a training step of a Llama with its tp_plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        _llama(job).save_pretrained(folder[0])
    dist.barrier()
    plan = DistributedConfig(tp_size=RANKS, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=plan).train()
    model = adapted(model, adapt)
    optimizer, ids = torch.optim.AdamW(trained(model), lr=1e-6), _tokens(job)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def torch_step(job: dict[str, Any], sequence_parallel: bool, adapt: Adapt | None = None) -> Step:
    """Return a training step of the decoder of examples/frameworks/torch_tp.py."""
    model, loss_of = torch_decoder(job, sequence_parallel)
    model = adapted(model, adapt)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-6, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    return step


def torch_decoder(
    job: dict[str, Any], sequence_parallel: bool, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return the decoder of examples/frameworks/torch_tp.py, parallelised, and what computes its loss."""
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh

    example = _example(
        ["--hidden", str(job["hidden"]), "--inner", str(4 * job["hidden"]), "--heads", str(job.get("heads", 12))], job
    )
    example.args.sequence_parallel = sequence_parallel
    if device != "cpu":  # gloo does not scatter tensors of a GPU; the ranks draw the same weights
        example.parallelize_module = functools.partial(example.parallelize_module, src_data_rank=None)
    torch.manual_seed(0)
    model = example.Decoder().to(device, dtype)
    example.parallelise(model, init_device_mesh(device, (RANKS,)))
    ids = _tokens(job).to(device)

    def loss_of(model: nn.Module) -> torch.Tensor:
        logits = model(ids)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    return model, loss_of


def _example(words: list[str], job: dict[str, Any]) -> Any:
    """Return the module torch_tp.py with the sizes of `job`."""
    folder = Path(__file__).parents[1] / "examples" / "frameworks"
    sys.path.insert(0, str(folder))
    own, sys.argv = sys.argv, ["", *words, "--layers", str(job["layers"]), "--vocabulary", str(VOCABULARY)]
    try:
        return importlib.import_module("torch_tp")
    finally:
        sys.argv = own


class PlannedStep:
    """A training step of a planned GPT; `model` is the sharded model that runs, and its optimizer."""

    def __init__(self, job: dict[str, Any], sequence_parallel: bool) -> None:
        """Trace and plan the model."""
        torch.manual_seed(0)
        sizes = {"layers": job["layers"], "width": job["hidden"], "length": job["rows"]}
        self._whole = GPT(**sizes, heads=job["hidden"] // HEAD, vocabulary=VOCABULARY)
        ids = _tokens({**job, "rows": job["rows"] + 1})
        self._batch = ids[:, :-1], ids[:, 1:]
        form = "reduce-scatter" if sequence_parallel else "all-reduce"
        self._plan = planned(trace(self._whole, self._batch), ProcessMesh(list(range(RANKS)), ["mp"]), form)
        self.model = self.sharded()

    def sharded(self) -> tuple[ShardedModule, torch.optim.Optimizer]:
        """Return the model, sharded with the current settings, which may ask for no overlap, and an optimizer."""
        settings = current_settings()
        model = ShardedModule(self._whole, self._plan, overlap=settings != Settings(), settings=settings)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-6)

    def __call__(self) -> None:
        """Run the step."""
        model, optimizer = self.model
        optimizer.zero_grad()
        model(*self._batch).backward()
        optimizer.step()


def deepspeed_step(job: dict[str, Any]) -> Step:
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
