"""``verify --against-server``: what it asks for, and what it says; tests/vllm runs it on a real server."""

import json
import subprocess

import pytest
import torch
from launch import forked_python
from marks import promise

from ascend_parallel.diagnostics.against_server import Request, Result, ServerError, compared, prompts_of
from ascend_parallel.diagnostics.row_digests import RowDigests


def sequence(logprobs, **digests):
    return {"tokens": list(range(len(logprobs) + 1)), "logprobs": logprobs, "digests": digests}


@promise("invariant-verify")
def test_the_first_module_that_differs_is_named_at_the_earliest_token():
    served = [sequence([-1.0, -2.0], norm="aab", proj="cde"), sequence([-3.0, -4.0], norm="xyz", proj="uvw")]
    same = compared(served, served)
    assert (same.logprobs, same.equal, same.largest, same.first) == (4, 4, 0.0, "")
    assert str(same) == "4 of 4 logprobs have the same bits"
    trained = [served[0], sequence([-3.0, -4.5], norm="xYz", proj="uVw")]
    found = compared(served, trained)
    assert (found.equal, found.largest) == (3, 0.5)
    assert found.first == (
        "prompt 2, token 3: -4.0 of the server, -4.5 of the trainer; norm is the first module that differs, in the row "
        "of token 2"
    )
    assert (
        "the output layer or the log-softmax" in compared(served, [served[0], sequence([-3.5, -4.0], norm="xyz")]).first
    )


def test_digests_of_rows_do_not_depend_on_the_rows_beside_them():
    model = torch.nn.ModuleDict({"o_proj": torch.nn.Identity(), "q_proj": torch.nn.Identity()})
    watched, x = RowDigests(model), torch.randn(6, 8)
    for part in (x[:2], x[2:]):
        model["o_proj"](part)
        model["q_proj"](part)
    parts = watched.taken()
    model["o_proj"](x.view(1, 6, 8))
    assert watched.taken() == parts
    assert list(parts) == ["o_proj"]
    assert len(set(parts["o_proj"])) == 6
    watched.remove()
    model["o_proj"](x)
    assert watched.taken() == {}


REFUSALS = {
    "no prompts": ((), "give --prompts FILE"),
    "a script": (("--prompts", "p.jsonl", "train.py"), "takes no script"),
    "degree": (("--prompts", "p.jsonl", "--tp", "3"), "--tp 3: give 1, 2, 4 or 8"),
    "no number": (("--prompts", "p.jsonl", "--server-tp", "two"), "--server-tp 'two': give a whole number"),
    "dtype": (("--prompts", "p.jsonl", "--dtype", "int8"), "--dtype 'int8': give float32 or bfloat16"),
    "tokens": (("--prompts", "p.jsonl", "--new", "0"), "--new 0: give 1 or more"),
    "checkpoint": (("--prompts", "p.jsonl"), "the folder has no config.json"),
    "file": (("--prompts", "absent.jsonl"), "no such file"),
    "lines": (("--prompts", "words.jsonl"), "line 2 is no list of two or more token ids in JSON"),
    "empty": (("--prompts", "empty.jsonl"), "the file has no lines"),
}


@pytest.mark.sample("no number")
@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_one_line(tmp_path, case):
    for name, text in (("p", "[1, 2]\n"), ("words", "[1, 2]\nhello\n"), ("empty", "")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    options, expected = REFUSALS[case]
    command = [forked_python(), "-m", "ascend_parallel", "verify", "--against-server", ".", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_request_and_a_result_are_plain_values(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    request = Request(checkpoint=str(tmp_path), prompts=[[1, 2]])
    assert json.loads(json.dumps(vars(request)))["dtype"] == "float32"
    with pytest.raises(ServerError, match=r"--server-tp 16"):
        Request(checkpoint=str(tmp_path), prompts=[[1, 2]], server_tp=16)
    (tmp_path / "p").write_text("[3, 4]\n[5, 6, 7]\n")
    assert prompts_of(str(tmp_path / "p")) == [[3, 4], [5, 6, 7]]
    assert str(Result(3, 2, 0.25, "here")) == "2 of 3 logprobs have the same bits; largest difference 0.25; here"
