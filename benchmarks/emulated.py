"""Steps of Megatron-core's GPT on emulated NPUs under a virtual clock: what overlap costs the host, and what it gains.

    make ascend
    .venv-ascend/bin/python benchmarks/emulated.py                       half an H100 and 910B1, TP 2
    .venv-ascend/bin/python benchmarks/emulated.py --cases half-2048 --chunks 4,auto --rounds 3
    .venv-ascend/bin/python benchmarks/emulated.py --cases tp8           TP 8, and what MindSpeed published for it
    .venv-ascend/bin/python benchmarks/emulated.py --captured            the transformer layers alone, and as a graph
    .venv-ascend/bin/python benchmarks/emulated.py --layers 8192,4096    one layer's forward, by hand beside ours, TP 2

The real torch_npu runs over an emulated CANN (contrib/emulated_ascend). Kernels and collectives take what a table says;
the host's time is the processor time of the program. Nothing ran on an NPU: read signs and causes, not percents
(contrib/emulated_ascend/CLOCK.md).

A line: the step, plain / it by round, the host's time, and of the stream that computes: busy, starved (it waits for
launches), exposed (it waits for collectives), kernels. The slowest rank's medians. Ranks share this machine's cores,
and other work on them makes the host slower: the load is printed. "published" is the ratio that others measured. Of a
published training the tokens a second and card are those of all layers: two and four were timed, the others added.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

PLAIN = "plain"
CALLS = 5  # of a layer, one behind another
MOST_STEPS = 110  # after which auto has timed whole steps
FIELDS = ("step", "host", "busy", "starved", "exposed", "collectives", "kernels")


@dataclass(frozen=True)
class Case:
    """A model on a device.

    published  plain / it by chunks, as others measured it
    speed      tokens a second and card that others measured, with `all_layers` layers
    fused      torch_npu's attention and norm, as MindSpeed has them
    config     of Megatron's TransformerConfig
    """

    device: str
    ranks: int
    hidden: int
    sequence_parallel: bool
    batch: int
    sequence: int = 1024
    layers: int = 2
    vocab: int = 8192
    fused: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)
    speed: float = 0.0
    all_layers: int = 0

    @property
    def title(self) -> str:
        """Name the case."""
        mode = "sequence parallel" if self.sequence_parallel else "all-reduce"
        tokens = f"{self.batch} x {self.sequence} tokens"
        return f"{self.device}, TP {self.ranks}, {self.layers} layers, hidden {self.hidden}, {tokens}, {mode}"


# Two halves of a real H100: benchmarks/README.md.
HALVES = {
    "half-2048": (
        {"2": 0.859, "4": 0.793, "4 region": 0.334, "auto": 0.937},
        {"2": 0.713, "4": 0.673, "4 region": 0.291, "auto": 1.018},
    ),
    "half-4096": ({"4": 1.023, "8": 1.030}, {"4": 1.043, "8": 1.030}),
}
CASES = {
    f"{name}{'-sequence' * sequence}": Case(
        device, ranks, hidden, bool(sequence), batch, published=HALVES.get(name, ({}, {}))[sequence]
    )
    for name, device, ranks, hidden, batch in (
        ("half-2048", "half-H100", 2, 2048, 4),
        ("half-4096", "half-H100", 2, 4096, 8),
        ("910B1-tp2-4096", "910B1", 2, 4096, 4),
        ("910B1-tp8-8192", "910B1", 8, 8192, 4),
    )
    for sequence in (0, 1)
}
SHORT = [name for name in CASES if "tp8" not in name]


def trained(hidden: int, layers: int, batch: int, sequence: int, vocab: int, *, ffn: int, **given: Any) -> Case:
    """Return a published training at TP 8 of a server of Atlas 900 A2 PODc (24 cores), one micro-batch."""
    groups = {"num_query_groups": given.pop("groups")} if "groups" in given else {}
    gated = given.pop("gated", True)
    config: dict[str, Any] = {"ffn_hidden_size": ffn, "gated_linear_unit": gated, **groups}
    config |= {"add_bias_linear": not gated, "normalization": "RMSNorm" if gated else "LayerNorm"}
    return Case("910B2", 8, hidden, True, batch, sequence, 2, vocab, True, config, all_layers=layers, **given)


# MindSpeed-LLM 1.0.RC3, README and scripts: TP 8 on one server, without overlap in the script (Aquila, Baichuan2, Qwen
# 14B) or with fused operators (the others). MindSpeed's page of CoC: gains at TP 8, of which sequences and batches are
# not published; these are those of its scripts.
TP8 = {
    "aquila-7b": trained(4096, 32, 8, 2048, 100008, ffn=11008, speed=2849.0),
    "baichuan2-7b": trained(4096, 32, 4, 4096, 125696, ffn=11008, speed=2664.0),
    "qwen-14b": trained(5120, 40, 4, 2048, 151936, ffn=13696, speed=1560.0),
    "aquila2-7b": trained(4096, 32, 8, 2048, 100008, ffn=11008, speed=3323.0),
    "qwen1.5-7b": trained(4096, 32, 2, 8192, 151936, ffn=11008, speed=2951.0),
    "bloom-7b-coc": trained(4096, 30, 4, 2048, 250880, ffn=16384, gated=False, published={"4": 1.0320}),
    "llama2-70b-coc": trained(8192, 80, 1, 4096, 32000, ffn=28672, groups=8, published={"4": 1.0785}),
}


def main() -> None:
    """Run the cases that the options name, and print a table of each."""
    from measuring import options_of

    known = CASES | TP8
    parser = options_of(__doc__, link=False, rounds=5, json=True)
    parser.add_argument("--cases", default=",".join(SHORT), help=f"some of {', '.join(known)}; tp8: all with 8 ranks")
    parser.add_argument("--chunks", default="2,4,4 region,auto", help="variants beside the plain step (%(default)s)")
    parser.add_argument("--host", default="1", help="factor on the host's time, or probe (%(default)s)")
    parser.add_argument("--layers", metavar="ROWS,HIDDEN", help="in place of steps: a layer's forward on both devices")
    parser.add_argument("--captured", action="store_true", help="time the layers, launched and captured in an NPUGraph")
    asked = parser.parse_args()
    of_tp8 = [name for name, case in known.items() if case.ranks == 8]
    names = of_tp8 if asked.cases == "tp8" else asked.cases.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--cases {','.join(unknown)}: give tp8, or some of {', '.join(known)}")
    if importlib.util.find_spec("torch_npu") is None or importlib.util.find_spec("emulated_ascend") is None:
        raise ValueError("torch_npu and emulated_ascend are not here: make ascend, then .venv-ascend/bin/python")
    if asked.layers:
        return layer_tables(asked.layers, asked.rounds, asked.host)
    cases = {part: case for name in names for part, case in parts(name, known[name])}
    results = {}
    for (device, ranks), group in groupby(cases, lambda name: (cases[name].device, cases[name].ranks)):
        own = {name: cases[name] for name in group}
        found = timed(own, device, ranks, asked.chunks.split(","), asked.rounds, asked.host, captured=asked.captured)
        results |= found
        for name in own:
            print("\n".join(lines(own[name], found[name])), flush=True)
    for name in names:
        if known[name].speed:
            print(speed_line(name, known[name], *(results[part] for part, _ in parts(name, known[name]))), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(results))


def parts(name: str, case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the cases that are timed: those of a published speed with two and with four layers."""
    yield name, case
    if case.speed:
        yield f"{name}, 4 layers", replace(case, layers=4)


def timed(
    cases: dict[str, Case],
    device: str,
    ranks: int,
    chunks: list[str],
    rounds: int,
    host: str,
    layers: str = "",
    captured: bool = False,
) -> dict[str, dict[str, Any]]:
    """Run cases on ranks of a device; return by case the steps of each variant by rank, and the machine's load.

    layers    rows and hidden size: layers are run in place of the cases, and named by their kinds
    captured  a model's transformer layers are run, launched by the host and as a graph
    """
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"chunks": chunks, "rounds": rounds, "folder": folder, "layers": layers}
        options["captured"] = captured
        options["cases"] = {name: asdict(case) for name, case in cases.items()}
        words = ["run", "--clock", "--device", device, "--host", host, "--ranks", str(ranks), __file__]
        inherited = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        environment = {**inherited, "OMP_NUM_THREADS": "1", "EMULATED_BENCHMARK": json.dumps(options)}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "emulated_ascend", *words], env=environment, capture_output=True, text=True
        )
        files = sorted(Path(folder).glob("*.json"))
        if done.returncode or len(files) != ranks:
            raise ValueError(f"{', '.join(cases) or device} failed:\n{done.stderr[-3000:]}")
        found = [json.loads(file.read_text()) for file in files]
    about = {"seconds": time.monotonic() - began, "load": os.getloadavg()[0], "cores": os.cpu_count()}
    return {name: {"ranks": [rank[name] for rank in found], **about} for name in found[0]}


def layer_tables(layers: str, rounds: int, host: str) -> None:
    """Print a layer's forward on half an H100 and a 910B1."""
    from measuring import table

    for device in ("half-H100", "910B1"):
        rows = []
        found = timed({}, device, 2, [], rounds, host, layers)
        for kind, result in found.items():
            for way in result["ranks"][0]:
                steps = slowest(result, way)
                rows.append([kind, way, *(f"{median(step[field] for step in steps) / CALLS:.3f}" for field in FIELDS)])
        load = f"load {result['load']:.1f} on {result['cores']} cores"
        print(f"\n{device}, TP 2, rows and hidden {layers}: a forward (emulated; ms; {load})\n", flush=True)
        print(table(("layer", "way", *FIELDS), rows), flush=True)


def slowest(result: dict[str, Any], name: str) -> list[dict[str, float]]:
    """Return the slowest rank's step of each round."""
    by_rank = [rank[name] for rank in result["ranks"]]
    return [max(steps, key=lambda step: step["step"]) for steps in zip(*by_rank, strict=True)]


def lines(case: Case, result: dict[str, Any]) -> list[str]:
    """Write a case as a Markdown table."""
    from measuring import gain, table

    rows = []
    plain = [step["step"] for step in slowest(result, PLAIN)]
    for name in result["ranks"][0]:
        steps = slowest(result, name)
        middle = {field: median(step[field] for step in steps) for field in FIELDS}
        ratio = "1" if name == PLAIN else f"{gain(plain, [step['step'] for step in steps]):.3f}"
        others = f"{case.published[name]:.3f}" if name in case.published else ""
        figures = [f"{middle[field]:.2f}" for field in FIELDS[:-1]]
        rows.append([name, *figures, f"{middle['kernels']:.0f}", ratio, others])
    heads = ("COC_PARALLEL_NUM", *FIELDS, "plain / it", "published")
    load = f"load {result['load']:.1f} on {result['cores']} cores, {result['seconds']:.0f} s of all cases"
    return [f"\n{case.title} (emulated; ms; {load})\n", table(heads, rows)]


def speed_line(name: str, case: Case, few: dict[str, Any], more: dict[str, Any]) -> str:
    """Write a published training's speed beside the emulated one."""
    two, four = (median(step["step"] for step in slowest(result, PLAIN)) for result in (few, more))
    step = two + (case.all_layers - 2) * (four - two) / 2
    speed = case.batch * case.sequence / (step / 1e3) / case.ranks
    return (
        f"{name}: {speed:.0f} tokens/s a card emulated (a micro-batch {step:.0f} ms), {case.speed:.0f} published: "
        f"{speed / case.speed:.2f}"
    )


def rank() -> None:
    """Time the cases on this rank, and write their steps."""
    import torch
    import torch.distributed as dist
    import torch_npu.contrib.transfer_to_npu  # noqa: F401
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils
    from megatron_cpu import start_model_parallel

    moe_utils.te_general_gemm = None  # 0.16.1 names it without TransformerEngine too
    options = json.loads(os.environ["EMULATED_BENCHMARK"])
    torch.npu.set_device(int(os.environ["RANK"]))
    dist.init_process_group("hccl")
    if options["layers"]:
        found = layers_of(*map(int, options["layers"].split(",")), options["rounds"])
    else:
        start_model_parallel(dist.get_world_size())
        cases = {name: Case(**case) for name, case in options["cases"].items()}
        if options["captured"]:
            model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True, force_reset_rng=True)
        ways = options["chunks"], options["rounds"], options["captured"]
        found = {name: steps_of(case, *ways) for name, case in cases.items()}
    Path(options["folder"], f"{dist.get_rank():03}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def layers_of(rows: int, hidden: int, rounds: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Time `CALLS` forwards of each layer in each way: the matmul alone, plain, by hand, ours."""
    import functools

    import torch
    import torch.distributed as dist
    from emulated_ascend import clock
    from halves import KINDS, Operands

    from ascend_parallel import Settings

    group = dist.group.WORLD
    assert group is not None
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for kind in KINDS:
        operands = Operands(kind, group, {"rows": rows, "hidden": hidden, "device": "npu"})
        ways: dict[str, Any] = {"matmul alone": operands.matmul, "plain": operands.plain, **operands.by_hand()}
        ways |= {f"ours, {count}": functools.partial(operands.ours, Settings(num_chunks=count)) for count in (1, 2, 4)}
        found[kind] = {}
        for name, way in ways.items():
            for _ in range(3):
                way()
            torch.npu.synchronize()
            clock.forget()
            for _ in range(rounds):
                dist.barrier()
                torch.npu.synchronize()
                clock.mark()
                for _ in range(CALLS):
                    way()
                torch.npu.synchronize()
                clock.mark()
            found[kind][name] = [asdict(step) for step in clock.steps()[::2]]
    return found


def steps_of(case: Case, chunks: list[str], rounds: int, captured: bool) -> dict[str, list[dict[str, float]]]:
    """Time the plain step and the variants in turn."""
    import torch
    import torch.distributed as dist
    from emulated_ascend import clock
    from measuring import deciding, settings_of, with_state
    from training import forwards

    import ascend_parallel

    step = layers_step(case) if captured else model_step(case)
    ascend_parallel.configure(num_chunks=1)
    states = {PLAIN: forwards()}
    for name in chunks:
        ascend_parallel.configure(**settings_of(name))
        states[name] = forwards()
        ascend_parallel.configure(num_chunks=1)
    ways: dict[str, tuple[Any, Callable[[], object]]] = {name: (state, step) for name, state in states.items()}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for name, state in states.items():
        for _ in range(3 + deciding(name) + (MOST_STEPS if "auto" in name else 0)):
            optimizer.step()  # changes nothing: it tells auto where a step ends
            with_state(state, step)
        if captured:
            graph = torch.npu.NPUGraph()
            with_state(state, partial(capture, graph, step))
            ways[f"{name}, captured"] = state, graph.replay
    torch.npu.synchronize()
    clock.forget()
    order: list[str] = []
    for index in range(rounds):
        for name in random.Random(index).sample(list(ways), len(ways)):
            dist.barrier()
            torch.npu.synchronize()
            clock.mark()
            with_state(*ways[name])
            torch.npu.synchronize()
            clock.mark()
            order.append(name)
    with_state(states[PLAIN], lambda: None)
    steps = clock.steps()[::2]
    return {name: [asdict(step) for its, step in zip(order, steps, strict=True) if its == name] for name in ways}


def capture(graph: Any, step: Callable[[], object]) -> None:
    """Capture a step in a graph."""
    import torch

    with torch.npu.graph(graph):
        step()


def model_step(case: Case) -> Callable[[], None]:
    """Return forward and backward of a case's model on drawn tokens."""
    import torch
    from megatron_cpu import finalize_gradients, next_token_loss

    model = model_of(case).to("npu")
    tokens = torch.randint(case.vocab, (case.batch, case.sequence + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to("npu")

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        next_token_loss(model, tokens).backward()
        finalize_gradients(model)

    return step


def layers_step(case: Case) -> Callable[[], None]:
    """Return forward and backward of a case's transformer layers: its embedding and loss read masks on the host."""
    import torch

    model = model_of(case).to("npu")
    layers, rows = model.decoder, case.sequence // (case.ranks if case.sequence_parallel else 1)
    x = torch.zeros(rows, case.batch, case.hidden, dtype=torch.bfloat16, device="npu", requires_grad=True)
    dy = torch.zeros_like(x)
    mask = torch.ones(1, 1, case.sequence, case.sequence, dtype=torch.bool, device="npu").triu(1)
    rotary = model.rotary_pos_emb(case.sequence) if hasattr(model, "rotary_pos_emb") else None

    def step() -> None:
        for each in (x, *layers.parameters()):
            each.grad = None
        layers(x, mask, rotary_pos_emb=rotary).backward(dy)

    return step


def model_of(case: Case) -> Any:
    """Return the model on the host, without values."""
    import torch
    from megatron_cpu import small_gpt

    gated = bool(case.config.get("gated_linear_unit"))
    return small_gpt(
        num_layers=case.layers,
        hidden=case.hidden,
        heads=case.hidden // 128,
        seq=case.sequence,
        vocab=case.vocab // 64 * 64,
        sequence_parallel=case.sequence_parallel,
        rope=gated,
        tied=not gated,
        dtype=torch.bfloat16,
        change_layer=fuse_layer if case.fused else None,
        perform_initialization=False,
        **case.config,
        **({"activation_func": torch.nn.functional.silu} if gated else {}),
    )


def fuse_layer(submodules: Any) -> None:
    """Give a layer torch_npu's attention and RMS norm, as MindSpeed does."""
    import torch
    import torch_npu
    from megatron_cpu import PlainNorm

    class FusedAttention(torch.nn.Module):
        """Causal attention of [s, b, heads, d], packed."""

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(2048, 2048, dtype=torch.bool).triu(1), persistent=False)
            self.scale = config.kv_channels**-0.5

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            flat = [tensor.flatten(2) for tensor in (query, key, value)]
            found: Any = torch_npu.npu_fusion_attention(
                *flat, query.shape[2], "SBH", atten_mask=self.mask, scale=self.scale, sparse_mode=2
            )
            return found[0]

    class FusedNorm(torch.nn.Module):
        """torch_npu's RMS norm, or torch's layer norm."""

        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
            if config.normalization == "RMSNorm":
                return super().__new__(cls)
            return PlainNorm(config, hidden_size, eps)

        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__()
            self.eps, self.weight = eps, torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
            self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        def forward(self, x: Any) -> Any:
            return torch_npu.npu_rms_norm(x, self.weight, self.eps)[0]

    submodules.input_layernorm = submodules.pre_mlp_layernorm = FusedNorm
    submodules.self_attention.submodules.core_attention = FusedAttention


if __name__ == "__main__":
    if "EMULATED_BENCHMARK" in os.environ:
        rank()
    else:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu cannot be imported outside the emulation
        from measuring import run

        run(main)
