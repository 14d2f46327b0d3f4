"""Records prefills of vLLM on a loopback of 1 Gbit/s, in one chunk and in four, and draws vllm.png of the fastest two.

    .venv-vllm/bin/python docs/images/draw_vllm.py [FOLDER]     keeps both recordings in FOLDER, if one is given

Needs root, for a network namespace, the environment of make test-vllm, and matplotlib in it.

The model of benchmarks/serving.py: a Llama of random weights, 4 layers, hidden size 768, fp32; 2048 tokens, 2 ranks of
one thread. Prefills of both are recorded in turn, each by itself; other programs disturbed the fastest least.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "vllm"), str(ROOT / "benchmarks")]

TOKENS, TURNS = 2048, 6
RUNS = {"one chunk": {"mode": 1}, "unfinished rows": {"num_chunks": 4}}


def recorded(folder: str) -> None:
    """Record on one rank, every prefill into a folder of its own."""
    from generate import engine
    from vllm import SamplingParams

    import ascend_parallel

    draw = random.Random(1)
    prompt = {"prompt_token_ids": [draw.randrange(3, 4000) for _ in range(TOKENS)]}
    once = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    sizes = {"max_model_len": TOKENS + 256, "max_num_batched_tokens": TOKENS + 256}
    with engine("llama", folder, model=str(Path(folder) / "model"), **sizes) as llm:
        for turn in range(TURNS):
            for name, settings in RUNS.items():
                ascend_parallel.configure(frameworks=("vllm",), **settings)
                with ascend_parallel.timeline.record(Path(folder) / name / str(turn)):
                    llm.generate([prompt], once, use_tqdm=False)


def drawn(folder: Path) -> None:
    """Draw the picture, and print the table."""
    from ascend_parallel.diagnostics.timeline.align import align
    from ascend_parallel.diagnostics.timeline.files import read_run
    from ascend_parallel.diagnostics.timeline.merge import merge
    from ascend_parallel.diagnostics.timeline.picture import picture

    def fastest(name: str) -> Path:
        steps = (folder / name).iterdir()
        return min(steps, key=lambda step: picture(align(read_run(step)[0])[0], "").milliseconds)

    plain, ours = map(fastest, RUNS)
    merged = merge(ours, against=plain)
    merged.write(folder, png=True)
    Path(__file__).with_name("vllm.png").write_bytes((folder / "timeline.png").read_bytes())
    for row in merged.rows():
        sys.stdout.write(
            f"{row.layer:40} {row.kernel:12} {row.total:8.1f} ms, hidden {row.hidden}, alone {row.serial}\n"
        )
    if len(sys.argv) > 1:
        for source in (plain, ours):
            shutil.copytree(source, Path(sys.argv[1]) / source.parent.name.replace(" ", "-"))


def main() -> None:
    """Build the link, run two ranks on it, and draw."""
    from serving import in_slow_namespace, made_model

    with tempfile.TemporaryDirectory() as name:
        made_model(str(Path(name) / "model"), hidden=768, layers=4)
        if in_slow_namespace("1gbit", [sys.executable, __file__, "--ranks", name]):
            sys.exit("the ranks failed")
        drawn(Path(name))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks"]:
        from draw_vllm import recorded as run
        from ranks import on_two_ranks

        on_two_ranks(run, sys.argv[2])
    else:
        main()
