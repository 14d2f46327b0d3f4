"""``ascend-parallel verify --against-server``: a trainer's logprobs beside those of a server, bit for bit.

vLLM generates on so many ranks, then transformers computes the logprobs of the same tokens on its own ranks. Both run
with COC_DETERMINISTIC=invariant, unless the variable says something else. Rows that modules return have digests, so the
first module and token that differ can be named.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_parallel.ops.blocks import BLOCKS
from ascend_parallel.tuning.launch.process_tree import process_tree
from ascend_parallel.tuning.launch.signals import signals_as_exceptions

PATIENCE = 10.0  # seconds that a program has to end after SIGTERM
SERVER, TRAINER = "ascend_parallel.patches.vllm.sampled", "ascend_parallel.patches.transformers.recomputed"


class ServerError(ValueError):
    """A request, or a run of the server or the trainer, that cannot be compared; the message says why."""


@dataclass(frozen=True)
class Request:
    """What both programs run.

    checkpoint, dtype
        A folder of transformers, and the dtype of its weights there and in vLLM.
    prompts, new
        Lists of token ids, and how many tokens the server adds to each.
    tp, server_tp
        The ranks of the trainer and of the server.
    """

    checkpoint: str
    prompts: Sequence[Sequence[int]]
    tp: int = 1
    server_tp: int = 1
    new: int = 16
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raise `ServerError` for a value that is not allowed."""
        for option, ranks in (("--tp", self.tp), ("--server-tp", self.server_tp)):
            if ranks < 1 or BLOCKS % ranks:
                raise ServerError(f"{option} {ranks}: give 1, 2, 4 or {BLOCKS}")
        if self.new < 1:
            raise ServerError(f"--new {self.new}: give 1 or more")
        if not Path(self.checkpoint, "config.json").is_file():
            raise ServerError(f"--against-server {self.checkpoint}: the folder has no config.json")


@dataclass(frozen=True)
class Result:
    """What was compared.

    logprobs, equal
        The number of logprobs, and of those with the same bits.
    largest
        The largest difference of two.
    first
        The first difference in words; "": there is none.
    """

    logprobs: int
    equal: int
    largest: float
    first: str = ""

    def __str__(self) -> str:
        """Return the result in a sentence."""
        text = f"{self.equal} of {self.logprobs} logprobs have the same bits"
        return f"{text}; largest difference {self.largest:.2g}; {self.first}" if self.first else text


def prompts_of(file: str) -> list[list[int]]:
    """Return the prompts of a file: on each line a list of token ids in JSON; raises `ServerError`."""
    path = Path(file)
    if not path.is_file():
        raise ServerError(f"--prompts {file}: no such file")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            ids = json.loads(line)
        except json.JSONDecodeError:
            ids = None
        if not isinstance(ids, list) or len(ids) < 2 or not all(type(each) is int and each >= 0 for each in ids):
            raise ServerError(f"--prompts {file}: line {number} is no list of two or more token ids in JSON")
        found.append(ids)
    if not found:
        raise ServerError(f"--prompts {file}: the file has no lines")
    return found


def compare_with_server(request: Request) -> Result:
    """Run server and trainer, and compare; raises `ServerError` if a run fails."""
    with signals_as_exceptions(), tempfile.TemporaryDirectory(prefix="ascend_parallel-server-") as name:
        folder = Path(name)
        given = {**vars(request), "served": str(folder / "served.json"), "trained": str(folder / "trained.json")}
        file = folder / "request.json"
        file.write_text(json.dumps(given), encoding="utf-8")
        found = []
        for program, ranks, written in ((SERVER, request.server_tp, "served"), (TRAINER, request.tp, "trained")):
            _run(program, ranks, file)
            found.append(json.loads(Path(given[written]).read_text(encoding="utf-8")))
    return compared(*found)


def _run(program: str, ranks: int, request: Path) -> None:
    """Run a program on so many ranks of one thread each."""
    values = {"COC_DETERMINISTIC": "invariant", "OMP_NUM_THREADS": "1", **os.environ}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", program, str(request)]
    with process_tree(command, patience=PATIENCE, folder=request.parent, env=values) as run:
        code = run.wait()
    if code:
        raise ServerError(f"{'the server' if program == SERVER else 'the trainer'} ended with {code} on {ranks} ranks")


def compared(served: Sequence[dict[str, Any]], trained: Sequence[dict[str, Any]]) -> Result:
    """Return what server and trainer, each with logprobs and digests of the same sequences, have in common."""
    pairs = [
        (one, other)
        for each, own in zip(served, trained, strict=True)
        for one, other in zip(each["logprobs"], own["logprobs"], strict=True)
    ]
    equal = sum(one == other for one, other in pairs)
    largest = max(abs(one - other) for one, other in pairs)
    return Result(len(pairs), equal, largest, first_difference(served, trained) if equal < len(pairs) else "")


def first_difference(served: Sequence[dict[str, Any]], trained: Sequence[dict[str, Any]]) -> str:
    """Return in words the first logprob that differs, and the first module whose row does, at the earliest token."""
    for number, (one, other) in enumerate(zip(served, trained, strict=True), 1):
        places = [at for at, (a, b) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True), 1) if a != b]
        if not places:
            continue
        at = places[0]
        of_server, of_trainer = (each["logprobs"][at - 1] for each in (one, other))
        text = f"prompt {number}, token {at + 1}: {of_server!r} of the server, {of_trainer!r} of the trainer"
        rows = [
            (row, order, name)
            for order, name in enumerate(other["digests"])
            for row, (a, b) in enumerate(zip(one["digests"].get(name, ()), other["digests"][name], strict=False))
            if a != b
        ]
        if not rows:
            return f"{text}; all modules that were watched have the same rows: the output layer or the log-softmax"
        row, _, name = min(rows)
        return f"{text}; {name} is the first module that differs, in the row of token {row + 1}"
    return ""
