"""Prefill, mixed requests, decoding, first tokens under a steady load, and memory of vLLM, as it is and with overlap.

python benchmarks/serving.py --link 1gbit     (as root: a network namespace whose loopback has this rate each way)
python benchmarks/serving.py --host           (what a replaced method, and an operator, costs where it does nothing)
python benchmarks/serving.py --invariant      (COC_DETERMINISTIC=invariant, in one chunk and in four)
python benchmarks/serving.py --decoding       (a token of decoding in one engine, whose overlap is switched in turn)

A small random Llama on two ranks; every way is an engine of its own, in turn, with vLLM's own executor and its
asynchronous front end. All ways run without the shared memory that vLLM uses between ranks of one machine, as on two
machines. Under the steady load requests come at random moments, the same in every way, half as fast as vLLM as it is
has finished the mixed ones. Printed are medians, or quantiles, of all rounds, how much faster than vLLM as it is, and
the 95 % of that by a bootstrap over requests or repeats. Needs the environment of make test-vllm.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests" / "vllm"
WAYS = {
    "as it is": {},
    "chunks in the layers": {"COC_PARALLEL_NUM": "4", "COC_REGION": "0"},
    "unfinished rows": {"COC_PARALLEL_NUM": "4"},
    "auto": {"COC_PARALLEL_NUM": "auto"},
}
# Of a compiled model: in its graphs, whose rows are finished at a layer's end, and in large steps outside them.
COMPILED_WAYS = {
    "as it is": {},
    "operators in chunks": {"COC_PARALLEL_NUM": "4"},
    "auto": {"COC_PARALLEL_NUM": "auto"},
}
# The logprobs of a trainer: products in tiles, and the tree over ranks, whose chunks run under the next one's products.
INVARIANT_WAYS = {
    "as it is": {},
    "invariant": {"COC_DETERMINISTIC": "invariant", "COC_PARALLEL_NUM": "1"},
    "invariant, 4 chunks": {"COC_DETERMINISTIC": "invariant", "COC_PARALLEL_NUM": "4"},
}


def made_model(folder: str, hidden: int, layers: int) -> None:
    """Save a Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 192,
        vocab_size=4096,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)


async def measured(given: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each run of each load, the tokens, and a worker's most bytes meanwhile."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=given["model"],
            tensor_parallel_size=2,
            enforce_eager=not given["compiled"],
            skip_tokenizer_init=True,
            dtype=given["dtype"],
            max_model_len=2304,
            max_num_batched_tokens=2304,
            max_num_seqs=8,
            enable_prefix_caching=False,
            distributed_executor_backend="mp",
            seed=0,
        )
    )
    draw = random.Random(1)
    mixed = [128, 256, 512, 1024, 2048]
    loads = {
        f"prefill {given['tokens']}": ([given["tokens"]], 1),
        "24 requests": ([draw.choice(mixed) for _ in range(24)], 12),
        "decode 64": ([64], 64),
    }
    results: dict[str, Any] = {}
    for name, (lengths, tokens) in loads.items():
        runs = []
        for repeat in range(1 + given["repeats"]):
            if repeat == 1:
                forget_peaks()
            begin = time.perf_counter()
            answers = await asyncio.gather(*requests(engine, name, lengths, tokens, [0.0] * len(lengths)))
            runs.append(time.perf_counter() - begin)
        results[name] = {"seconds": runs[1:], "tokens": [made for _, made in answers], "peak": peak()}
    rate = given["rate"] or 24 / median(results["24 requests"]["seconds"]) / 2
    arrivals = np.cumsum([draw.expovariate(rate) for _ in range(given["steady"])]).tolist()
    lengths = [draw.choice(mixed) for _ in arrivals]
    answers = await asyncio.gather(*requests(engine, "steady", lengths, 12, arrivals))
    first = {"seconds": [first for first, _ in answers], "tokens": [made for _, made in answers]}
    engine.shutdown()
    return {**results, "first token": first, "rate": rate}


def decoding(given: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of 64 tokens of one request, with overlap and without it in turn, in one eager engine.

    Two engines of the same code differ by several percent, which is more than decoding may cost.
    """
    from vllm import LLM, SamplingParams

    def switch(_: object, chunks: int) -> None:
        """Run in each worker."""
        import ascend_parallel

        ascend_parallel.configure(num_chunks=chunks)

    limits = {"max_model_len": 2304, "max_num_batched_tokens": 2304, "max_num_seqs": 8}
    engine = LLM(
        given["model"],
        tensor_parallel_size=2,
        enforce_eager=True,
        skip_tokenizer_init=True,
        dtype=given["dtype"],
        enable_prefix_caching=False,
        distributed_executor_backend="mp",
        seed=0,
        **limits,
    )
    sampling = SamplingParams(temperature=0, max_tokens=64, detokenize=False, ignore_eos=True)
    draw = random.Random(1)
    seconds: dict[str, list[float]] = {"as it is": [], "4 chunks": []}
    for pair in range(given["pairs"] + 1):
        for way in sorted(seconds, reverse=bool(pair % 2)):
            engine.collective_rpc(switch, args=(1 if way == "as it is" else 4,))
            prompt = {"prompt_token_ids": [draw.randrange(3, 4000) for _ in range(64)]}
            begin = time.perf_counter()
            engine.generate([prompt], sampling, use_tqdm=False)
            seconds[way].append(time.perf_counter() - begin)
    engine.llm_engine.engine_core.shutdown()
    return {way: runs[1:] for way, runs in seconds.items()}  # the first warm up


def decoding_told(seconds: dict[str, list[float]]) -> str:
    """Return the line of the pairs: milliseconds a token of both ways, and as it is / 4 chunks with its 95 %."""
    own, ours = (np.array(runs) for runs in seconds.values())
    pairs = own / ours
    drawn = np.median(pairs[np.random.default_rng(0).integers(0, len(pairs), (2000, len(pairs)))], axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    each = ", ".join(f"{way} {1e3 * median(runs) / 64:.2f} ms" for way, runs in seconds.items())
    return f"a token of decoding: {each}; paired {np.median(pairs):.3f} ({low:.3f} to {high:.3f}), {len(pairs)} pairs"


def requests(engine: Any, name: str, lengths: Sequence[int], tokens: int, arrivals: Sequence[float]) -> list[Any]:
    """Return what answers requests for so many tokens each: seconds from arrival to the first token, and the tokens."""
    from vllm import SamplingParams

    draw, start = random.Random(name), time.perf_counter()
    sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)

    async def answered(prompt: dict[str, Any], number: int, arrival: float) -> tuple[float, list[int]]:
        await asyncio.sleep(start + arrival - time.perf_counter())
        first, made = 0.0, []
        async for output in engine.generate(prompt, sampling, f"{name} {number} {start}"):
            first = first or time.perf_counter() - start - arrival
            made = list(output.outputs[0].token_ids)
        return first, made

    prompts = [{"prompt_token_ids": [draw.randrange(3, 4000) for _ in range(length)]} for length in lengths]
    return [answered(prompt, number, at) for number, (prompt, at) in enumerate(zip(prompts, arrivals, strict=True))]


def forget_peaks() -> None:
    """Let the peak of each process of the engine begin at what it has now: loading a model may have taken more."""
    for process in processes():
        (process / "clear_refs").write_text("5")


def peak() -> int:
    """Return the bytes of the process of the engine that had the most since then, a worker; modules count too."""
    lines = [line for process in processes() for line in (process / "status").read_text().splitlines()]
    return max(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def processes() -> list[Path]:
    """Return the folders in /proc of the processes that this one has started, and theirs."""
    import psutil

    return [Path("/proc") / str(process.pid) for process in psutil.Process().children(recursive=True)]


def one_run(given: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """Return `measured` of a process of its own."""
    from ascend_parallel.tuning.launch.process_tree import process_tree

    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COC_", "USE_COC_"))}
    env = {
        **kept,
        "PYTHONPATH": str(TESTS / "plugin"),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **variables,
    }
    command = [sys.executable, __file__, "--inside", json.dumps(given)]
    with process_tree(command, patience=10, env=env, stdout=subprocess.PIPE) as process:
        said = process.communicate(timeout=900)[0].decode(errors="replace")
    lines = [line[7:] for line in said.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"a run failed: {said[-2000:]}")
    return json.loads(lines[0])


def host_costs() -> list[str]:
    """Return a line for each kind of replaced method: the microseconds that it adds to a call with one token."""
    from types import SimpleNamespace

    import torch
    import vllm.envs  # noqa: F401  the patches look it up

    from ascend_parallel.ops.row_wise import MATMULS, NORMS
    from ascend_parallel.patches.vllm.layers import Vllm, all_reduce, make_row_forward
    from ascend_parallel.patches.vllm.row_wise import row_wise_call
    from ascend_parallel.settings import Settings

    def nothing(*_: Any) -> None:
        """Return at once."""

    framework, x, owner = Vllm(Settings(num_chunks=4), "0.32.0"), torch.zeros(1, 64), SimpleNamespace()
    calls = {
        "row layer": (make_row_forward(nothing, framework), (owner, x)),
        "all-reduce": (all_reduce(nothing, framework), (owner, x)),
        "norm": (row_wise_call(nothing, NORMS[0]), (owner, x, x)),
        "matmul": (row_wise_call(nothing, MATMULS[0]), (owner, owner, x, None)),
    }
    lines = []
    for name, (call, given) in calls.items():
        timed = [timeit.repeat(partial(each, *given), number=20000, repeat=7) for each in (call, nothing)]
        own, alone = map(min, timed)
        lines.append(f"{name:16} {1e6 * (own - alone) / 20000:6.2f} us more")
    return lines


def operator_costs(layers: int = 16) -> list[str]:
    """Return lines: the microseconds of a row layer with one token in a compiled graph, vLLM's own and as an operator.

    Compiled as by vLLM on CPUs, with its own kernel, and with its own all-reduce over gloo in a group of one rank, so
    that nobody is waited for.
    """
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.forward_context import ForwardContext, override_forward_context
    from vllm.model_executor.layers.linear import RowParallelLinear

    import ascend_parallel
    from ascend_parallel.patches.vllm.operators import give_names

    class Chain(torch.nn.Module):
        """Row layers, one after the other."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                RowParallelLinear(64, 64, bias=False, return_bias=False, params_dtype=torch.float32, prefix=f"{number}")
                for number in range(layers)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def seconds(chain: Chain) -> float:
        """Return those of one of its layers with one token."""
        torch._dynamo.reset()
        options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "size_asserts": False}
        run = torch.compile(chain, fullgraph=True, options=options)
        x = torch.zeros(300, 64)
        torch._dynamo.mark_dynamic(x, 0)
        run(x)
        return min(timeit.repeat(partial(run, x[:1].clone()), number=200, repeat=30)) / 200 / layers

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()), torch.no_grad():
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        chain, group = Chain(), parallel_state.get_tp_group()
        group.world_size = 2  # a group of one rank would skip its all-reduce
        group.device_communicator = CpuCommunicator(group.cpu_group, torch.device("cpu"), group.device_group, "alone")
        for layer in chain.layers:
            layer.quant_method.process_weights_after_loading(layer)
            layer.tp_size = 2
        own = seconds(chain)
        ascend_parallel.configure(num_chunks=4, frameworks=("vllm",))
        context: dict[str, Any] = {}
        give_names(chain, set(chain.layers), context)
        with override_forward_context(ForwardContext(context, {}, {})):
            operator = seconds(chain)
    return [f"{'own of a graph':16} {1e6 * own:6.2f} us", f"{'operator':16} {1e6 * (operator - own):6.2f} us more"]


def in_slow_namespace(rate: str, command: list[str]) -> int:
    """Run a command in a network namespace whose loopback has the rate each way; return its exit code."""
    from ascend_parallel.tuning.launch.process_tree import process_tree

    name = f"serving{os.getpid()}"
    number = int("".join(filter(str.isdigit, rate)))
    shared = f"{2 * number}{rate.lstrip('0123456789')}"  # both directions pass the loopback

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    run("ip", "netns", "add", name)
    try:
        run("ip", "-n", name, "link", "set", "lo", "up")
        tc = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", shared, "burst", "1m", "latency", "200ms"]
        run("ip", "netns", "exec", name, *tc)
        with process_tree(["ip", "netns", "exec", name, *command], patience=30) as process:
            return process.wait()
    finally:
        run("ip", "netns", "del", name)


def faster(base: Sequence[float], own: Sequence[float], share: float) -> tuple[float, float, float]:
    """Return base / own of a quantile of seconds of the same runs, and the ends of its 95 % by a bootstrap."""
    both = np.array([base, own])
    ratio = np.divide(*np.quantile(both, share, axis=1))
    drawn = both[:, np.random.default_rng(0).integers(0, both.shape[1], (2000, both.shape[1]))]
    low, high = np.quantile(np.divide(*np.quantile(drawn, share, axis=2)), [0.025, 0.975])
    return float(ratio), float(low), float(high)


def told(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a line for each load and way."""
    lines, first = [], next(iter(runs.values()))
    rows = [(load, load, 0.5) for load in first[0] if load not in ("first token", "rate")]
    rows += [("first token, p50", "first token", 0.5), ("first token, p99", "first token", 0.99)]
    for title, load, share in rows:
        seconds = {way: [each for run in found for each in run[load]["seconds"]] for way, found in runs.items()}
        for way, found in runs.items():
            ratio, low, high = faster(next(iter(seconds.values())), seconds[way], share)
            same = all(run[load]["tokens"] == first[0][load]["tokens"] for run in found)
            lines.append(
                f"{title:18} {way:21} {1e3 * np.quantile(seconds[way], share):8.1f} ms  {ratio:.2f} "
                f"({low:.2f} to {high:.2f})  tokens {'equal' if same else 'differ'}"
            )
    prefill = next(iter(first[0]))
    for way, found in runs.items():
        peaks = [run[prefill]["peak"] / 1e6 for run in found]
        lines.append(f"{'peak, ' + prefill:18} {way:21} {median(peaks):8.1f} MB ({min(peaks):.1f} to {max(peaks):.1f})")
    return lines


def main() -> int:
    """Measure all ways in turn and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", help="rate of the loopback in a network namespace, such as 1gbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steady", type=int, default=40, help="requests of the steady load, each round")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compiled", action="store_true", help="compiled models, vLLM's default")
    parser.add_argument("--invariant", action="store_true", help="what COC_DETERMINISTIC=invariant costs")
    parser.add_argument("--host", action="store_true", help="microseconds of replaced methods, without an engine")
    parser.add_argument("--decoding", type=int, nargs="?", const=40, metavar="PAIRS", help="decoding alone, default 40")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time to this file too; seconds, bytes")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        given = json.loads(options.inside)
        found = decoding(given) if "pairs" in given else asyncio.run(measured(given))
        print("RESULT " + json.dumps(found), flush=True)
        os._exit(0)  # an engine that has ended cannot be ended again when Python ends
    if options.host:
        print("\n".join([*host_costs(), *operator_costs()]))
        return 0
    if options.link:
        again = [word for word in sys.argv[1:] if word not in ("--link", options.link)]
        return in_slow_namespace(options.link, [sys.executable, __file__, *again])
    with tempfile.TemporaryDirectory() as folder:
        made_model(folder, options.hidden, options.layers)
        given = {key: getattr(options, key) for key in ("compiled", "dtype", "tokens", "repeats", "steady")}
        given |= {"model": folder, "rate": None}
        if options.decoding:
            # A function is sent to the workers.
            allowed = {"COC_PARALLEL_NUM": "4", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
            seconds = one_run({**given, "pairs": options.decoding}, allowed)
            if options.json:
                options.json.write_text(json.dumps({"options": vars(options), "seconds": seconds}, default=str))
            print(decoding_told(seconds))
            return 0
        ways = COMPILED_WAYS if options.compiled else INVARIANT_WAYS if options.invariant else WAYS
        runs: dict[str, list[Any]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, variables in ways.items():
                runs[way].append(one_run(given, variables))
                given["rate"] = runs[way][-1]["rate"]  # that of vLLM as it is, which comes first
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options), "runs": runs}, default=str))
    print("\n".join(told(runs)), flush=True)
    activation = options.tokens * options.hidden * (4 if options.dtype == "float32" else 2)
    print(f"one activation: {activation / 1e6:.1f} MB; steady load: {given['rate']:.2f} requests a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
