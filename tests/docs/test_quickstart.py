"""The quick start's own lines, run as written but for the script's name and the number of ranks."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import forked_python
from marks import promise
from pool import on_ranks

from ascend_parallel.diagnostics.timeline.files import Pass, Span

ROOT = Path(__file__).parents[2]
TRAIN, COMPARE = ROOT / "examples/gpt/train.py", ROOT / "examples/gpt/compare.py"
PAGES = ("README.md", "README.zh.md", "docs/quickstart.md", "docs/quickstart.zh.md")


def launches(page, script="pretrain_gpt.py"):
    """Every line of a page's shell blocks that starts `script`, with the variable exported before it."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    exported, found = {}, []
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            exported |= dict(word.split("=") for word in words[1:])
        elif script in words:
            start = words.index("torchrun")
            found.append(({**exported, **dict(word.split("=") for word in words[:start])}, words[start:]))
    return found


def here(words):
    """The same words for two ranks and the script that is here."""
    scripts = dict.fromkeys(("pretrain_gpt.py", "examples/gpt/train.py"), str(TRAIN))
    words = [{**scripts, "8": "2"}.get(word, word) for word in words if word != "..."]
    return [str(Path(forked_python()).with_name("torchrun")), *words[1:], "--steps", "2"]


def environ(variables):
    kept = {name: value for name, value in os.environ.items() if "COC" not in name}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}


def test_all_pages_recommend_auto_and_the_same_lines():
    found = {page: launches(page) for page in PAGES}
    for page in ("README", "docs/quickstart"):
        assert found[f"{page}.md"] == found[f"{page}.zh.md"]
    for page, lines in found.items():
        assert lines, page
        assert {variables["COC_PARALLEL_NUM"] for variables, _ in lines} == {"auto"}, page


@promise("quickstart-lines")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "passes"),
    # Of qkv, proj, fc1, fc2 and the output layer: one each with all-reduce, two with sequence parallel.
    [("pretrain_gpt.py", 5), ("examples/gpt/train.py", 10)],
)
def test_the_lines_run_as_written_and_say_what_they_do(script, passes, tmp_path):
    """By torchrun, with an unchanged script: the first line with Megatron-core's own norms, the other with torch's."""
    variables, words = launches("docs/quickstart.md", script)[0]
    assert "--transformer-impl" in words
    assert ("--sequence-parallel" in words) == (passes == 10)
    ended = subprocess.run(
        here(words),
        env=environ({**variables, "XDG_CACHE_HOME": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"^step", ended.stdout, re.MULTILINE)) == 2
    said = [line for line in ended.stderr.splitlines() if line.startswith("ascend_parallel: ")]
    (first,) = [line for line in said if "overlap is on" in line]
    assert first == said[0]
    assert "9 of 9 linear layers covered" in first
    chosen = [re.search(r"NUM=auto: (\w+ \w+ \[.*?\] x \[.*?\])", line) for line in said if "NUM=auto: " in line]
    assert len({one.group(1) for one in chosen}) == len(chosen) == passes, said


@pytest.fixture
def showing(monkeypatch):
    """The demo's module that prints."""
    monkeypatch.syspath_prepend(str(COMPARE.parent))
    yield importlib.import_module("showing")
    sys.modules.pop("showing")


def test_the_demo_says_how_long_steps_took_and_where(showing):
    verdicts = {"auto": {"median_milliseconds": [80.0, 81.0]}, "4": {"median_milliseconds": [80.0, 50.0]}}
    found = showing.about_time(verdicts, None)
    assert found.startswith(
        "On the loopback a step took 80.0 ms as it is, 81.0 ms with auto (0.99 times as fast), 50.0 "
    )
    assert "next to nothing to hide" in found
    found = showing.about_time({"4": verdicts["4"]}, "1gbit")
    assert found == (
        "Over a link of 1gbit a step took 80.0 ms as it is, 50.0 ms with 4 chunks (1.60 times as fast), "
        "each run by itself."
    )
    assert showing._middle_half([10.0, 20.0, 30.0, 40.0, 5000.0]) == "20 to 40 ms"
    assert showing._middle_half([10.0]) == "-"


def one_pass(*spans):
    """A pass of 0 to 40 ms or the end of its last span; spans in ms: kind, begin, end."""
    made = tuple(Span(kind, kind, 0, begin, begin, end) for kind, begin, end in spans)
    end = max(span.end for span in made)
    return Pass("mlp.linear_fc2", "row", "forward", (0, 1), 0, end, (), made, finished=True)


def test_the_demo_draws_both_passes_on_one_scale(showing):
    serial = one_pass(("matmul", 0, 20_000_000), ("comm", 20_000_000, 40_000_000))
    chunks = one_pass(("matmul", 0, 20_000_000), ("comm", 10_000_000, 30_000_000))
    assert showing.sketch({"serial": serial, "2 chunks": chunks}, width=8) == [
        "serial: 40.0 ms",
        "  matmul |####    |",
        "  link   |    ====|",
        "2 chunks: 30.0 ms",
        "  matmul |####    |",
        "  link   |  ====  |",
    ]


def test_the_demo_predicts_the_gain_on_a_named_cluster(showing):
    found = showing.predicted_gain()
    assert found.startswith("Predicted, not measured: Llama 2 70B on 8 x Ascend 910B2")
    assert float(re.search(r"\(([\d.]+) times as fast\)", found)[1]) > 1


def test_the_demos_table_has_a_plain_run_that_imported_nothing(showing):
    plain = {"milliseconds": [2.0, 4.0], "status": None, "coverage": None}
    counts = {"matmul_all_reduce": {"calls": 6, "chunks": 24, "collectives": 24}}
    overlapped = {"milliseconds": [1.0, 3.0], "status": {"counts": counts}, "coverage": {"covered": 8, "total": 9}}
    table = showing._summary_table(["as it is", "4 chunks"], [plain, overlapped])
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert ("median step", "3.0 ms", "2.0 ms") in rows
    assert ("linear layers covered", "-", "8 of 9") in rows
    assert ("matmul_all_reduce", "-", "6 calls, 24 chunks, 24 collectives") in rows


@pytest.mark.stress
@pytest.mark.parametrize("words", [("--link", "none", "--chunks", "auto", "--sequence-parallel"), ()])
def test_the_demo_ends_well(words):
    """The same losses and weights, bit for bit; what auto chose; on a link where one can be built."""
    command = [forked_python(), str(COMPARE), "--steps", "2", *words, "--json"]
    ended = subprocess.run(command, env=environ({}), capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    found = json.loads(ended.stdout)
    value = "auto" if words or found["link"] is None else "4"
    assert found["verdicts"][value]["equal"]
    assert found["verdicts"][value]["patched"]
    assert found["runs"][value]["coverage"].items() >= {"covered": 9, "total": 9, "reasons": {}}.items()
    if words:
        assert found["link"] is None
        assert sum("COC_PARALLEL_NUM=auto: " in line for line in found["runs"]["auto"]["said"]) == 10
    assert found["plain"]["said"] == []


@pytest.mark.skipif(importlib.util.find_spec("apex") is not None, reason="Apex is installed")
@on_ranks(2)
def test_what_megatron_refuses_without_apex(group):
    """Why Megatron-core builds no GPT of its own norms and kernels where Apex is missing."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron_cpu import (
        _small_config,
        end_model_parallel,
        megatron_on_cpu,
        small_gpt,
        start_model_parallel,
    )

    texts = []
    with megatron_on_cpu():
        start_model_parallel(group.size())
        for option in ("persist_layer_norm", "gradient_accumulation_fusion"):
            with pytest.raises((AssertionError, RuntimeError)) as error:
                small_gpt(**{option: True})
            texts.append(str(error.value))
        for normalization in ("LayerNorm", "RMSNorm"):
            overrides = {"normalization": normalization}
            config = _small_config(2, 64, 4, True, False, torch.float32, overrides)
            with pytest.raises(AssertionError) as error:
                GPTModel(
                    config=config,
                    transformer_layer_spec=get_gpt_layer_local_spec(),
                    vocab_size=256,
                    max_sequence_length=64,
                )
            texts.append(str(error.value))
            assert small_gpt(sequence_parallel=True, **overrides) is not None
        end_model_parallel()
    persist, fusion, *norms = texts
    assert "persist_layer_norm not supported by torch LayerNorm" in persist
    assert "gradient_accumulation_fusion" in fusion
    assert all("sequence parallel not supported by torch LayerNorm" in text for text in norms)
