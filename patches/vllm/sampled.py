"""What a rank of ``verify --against-server`` runs as the server.

Its argument is a file with a request (diagnostics/against_server.py). vLLM generates each prompt's continuation alone,
in one engine that torchrun's ranks share, and rank 0 writes tokens, logprobs and digests.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from ascend_parallel.diagnostics.row_digests import RowDigests

# The engine runs in this process, where its model can be watched.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def main() -> None:
    """Serve the request that the command line names."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    found = sampled(request)
    if os.environ["RANK"] == "0":
        Path(request["served"]).write_text(json.dumps(found), encoding="utf-8")


def sampled(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each prompt the tokens, their logprobs, and the digests of their rows."""
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=request["checkpoint"],
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        dtype=request["dtype"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max(map(len, request["prompts"])) + request["new"],
        seed=0,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=request["new"], detokenize=False, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    watched: list[RowDigests] = []
    llm.apply_model(lambda model: watched.append(RowDigests(model)))
    found = []
    for ids in request["prompts"]:
        (result,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        made = list(result.outputs[0].token_ids)
        steps = [*result.prompt_logprobs[1:], *result.outputs[0].logprobs]
        tokens = [*ids, *made]
        logprobs = [step[token].logprob for step, token in zip(steps, tokens[1:], strict=True)]
        found.append({"tokens": tokens, "logprobs": logprobs, "digests": watched[0].taken()})
    llm.llm_engine.engine_core.shutdown()  # or its shared memory outlives it
    return found


if __name__ == "__main__":
    main()
