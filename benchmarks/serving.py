"""Prefill, mixed requests and decoding of vLLM on two ranks: as it is, in chunks in the layers, unfinished, auto.

python benchmarks/serving.py --link 1gbit     (as root: a network namespace whose loopback has this rate each way)

A small random Llama; every way is a process of its own, in turn, with vLLM's own executor. Both ways run without the
shared memory that vLLM uses between ranks of one machine, as on two machines. Needs the environment of make test-vllm.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests" / "vllm"
WAYS = {
    "as it is": {},
    "chunks in the layers": {"COC_PARALLEL_NUM": "4", "COC_REGION": "0"},
    "unfinished rows": {"COC_PARALLEL_NUM": "4"},
    "auto": {"COC_PARALLEL_NUM": "auto"},
}
# Of a compiled model, whose rows are finished at a layer's end.
COMPILED_WAYS = {
    "as it is": {},
    "operators in chunks": {"COC_PARALLEL_NUM": "4"},
    "auto": {"COC_PARALLEL_NUM": "auto"},
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


def measured(given: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each run of each load in this process, and the tokens."""
    from vllm import LLM, SamplingParams

    llm = LLM(
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
    draw = random.Random(1)
    loads = {
        f"prefill {given['tokens']}": ([given["tokens"]], 1),
        "24 requests": ([draw.choice([128, 256, 512, 1024, 2048]) for _ in range(24)], 12),
        "decode 64": ([64], 64),
    }
    results = {}
    for name, (lengths, tokens) in loads.items():
        prompts = [{"prompt_token_ids": [draw.randrange(3, 4000) for _ in range(length)]} for length in lengths]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        seconds, made = [], []
        for _ in range(1 + given["repeats"]):
            begin = time.perf_counter()
            made = [each.outputs[0].token_ids for each in llm.generate(prompts, sampling, use_tqdm=False)]
            seconds.append(time.perf_counter() - begin)
        results[name] = {"seconds": seconds[1:], "tokens": [list(each) for each in made]}
    return results


def one_run(given: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """Return `measured` of a process of its own."""
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
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=900)
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"a run failed: {done.stdout[-2000:]}")
    return json.loads(lines[0])


def in_slow_namespace(rate: str, command: list[str]) -> int:
    """Run a command in a network namespace whose loopback has the rate each way; return its exit code."""
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
        return subprocess.run(["ip", "netns", "exec", name, *command]).returncode
    finally:
        run("ip", "netns", "del", name)


def main() -> int:
    """Measure all ways in turn and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", help="rate of the loopback in a network namespace, such as 1gbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compiled", action="store_true", help="compiled models, vLLM's default")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print("RESULT " + json.dumps(measured(json.loads(options.inside))), flush=True)
        return 0
    if options.link:
        again = [word for word in sys.argv[1:] if word not in ("--link", options.link)]
        return in_slow_namespace(options.link, [sys.executable, __file__, *again])
    with tempfile.TemporaryDirectory() as folder:
        made_model(folder, options.hidden, options.layers)
        given = {"model": folder, **{key: getattr(options, key) for key in ("compiled", "dtype", "tokens", "repeats")}}
        ways = COMPILED_WAYS if options.compiled else WAYS
        runs: dict[str, list[Any]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, variables in ways.items():
                runs[way].append(one_run(given, variables))
        first = next(iter(runs.values()))
        for load in first[0]:
            base = statistics.median(statistics.median(run[load]["seconds"]) for run in first)
            for way, found in runs.items():
                rounds = [statistics.median(run[load]["seconds"]) for run in found]
                same = all(run[load]["tokens"] == first[0][load]["tokens"] for run in found)
                middle = statistics.median(rounds)
                print(
                    f"{load:14} {way:22} {1e3 * middle:8.1f} ms ({1e3 * min(rounds):.1f} to {1e3 * max(rounds):.1f})  "
                    f"{base / middle:.2f}  tokens {'equal' if same else 'differ'}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
