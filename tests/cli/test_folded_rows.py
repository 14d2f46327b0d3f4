"""Rows of repeated layers folded into one: in tables on a terminal and on pages; `--full` and JSON have all."""

import html
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.cli.propagate import build_model
from ascend_parallel.sharding import ProcessMesh, explain, propagate, to_html, trace
from ascend_parallel.sharding.planner.operator_strategy import path_matches
from ascend_parallel.text.folded_rows import fold
from ascend_parallel.training.checkpoint import save

EXAMPLES = Path(__file__).parents[2] / "examples" / "sharding"
DEEP = """
import sys
sys.path.insert(0, {folder!r})
import torch
from small_models import Llama

def deep():
    tokens = torch.zeros(8, 64, dtype=torch.long)
    return Llama(layers=6, width=64, heads=8, groups=8, wide=128, vocabulary=128, length=64), (tokens, tokens)
"""


def test_equal_rows_of_layers_are_a_row_and_others_stay():
    names = [f"layers.{layer}.{part}" for layer in range(5) for part in ("up", "down")] + ["head"]
    kinds = ["other" if name == "layers.2.up" else "same" for name in names]
    folded = fold(names, kinds)
    assert [(row.label, len(row.rows), row.times) for row in folded] == [
        ("layers.0-1,3-4.up", 4, " x4"),
        ("layers.0-4.down", 5, " x5"),
        ("layers.2.up", 1, ""),
        ("head", 1, ""),
    ]
    assert [row.label for row in fold(names, kinds, full=True)] == names


def test_two_equal_rows_stay_two():
    assert [row.label for row in fold(["a.0", "a.1"], [0, 0])] == ["a.0", "a.1"]


def test_experts_of_layers_fold_in_both_numbers():
    names = [f"layers.{layer}.experts.{expert}.up" for layer in range(4) for expert in range(8)]
    (row,) = fold(names, [0] * 32)
    assert (row.label, row.times) == ("layers.0-3.experts.0-7.up", " x32")
    ragged = names[:-1]  # the last layer has an expert less: a row for each layer
    assert [row.label for row in fold(ragged, [0] * 31)] == [
        *(f"layers.{layer}.experts.0-7.up" for layer in range(3)),
        "layers.3.experts.0-6.up",
    ]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_in_one_fold_and_its_label_names_it(seed):
    drawn = torch.Generator().manual_seed(seed)
    draw = lambda most: int(torch.randint(most, (), generator=drawn))  # noqa: E731
    names = [f"a.{draw(4)}.b.{draw(5)}" for _ in range(60)]
    kinds = [draw(2) for _ in names]
    folded = fold(names, kinds)
    assert sorted(itertools.chain.from_iterable(row.rows for row in folded)) == list(range(60))
    assert [row.first for row in folded] == sorted(row.first for row in folded)
    for row in folded:
        assert len({kinds[each] for each in row.rows}) == 1
        assert {names[each] for each in row.rows} == set(expanded(row.label))
        assert len(row.rows) == len(set(row.rows)) == len(list(expanded(row.label)))


def expanded(label):
    """Yield the names of a label."""
    parts = [numbers_of(part) if part[0].isdecimal() else [part] for part in label.split(".")]
    yield from map(".".join, itertools.product(*parts))


def numbers_of(part):
    """Return the numbers of a part such as "0-2,4"."""
    ends = [piece.split("-") for piece in part.split(",")]
    return [str(number) for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    file = tmp_path_factory.mktemp("deep") / "deep_llama.py"
    file.write_text(DEEP.format(folder=str(EXAMPLES)))
    model, args, _ = build_model(f"{file}:deep")
    return file, propagate(trace(model, args), ProcessMesh([0, 1], ["mp"]))


def rows_of(text):
    """Return the rows of a plan's text: (where, the rest), without collectives."""
    return [line.split("  ", 1) for line in text.partition("\n\n")[2].splitlines() if line[:1] not in " "]


def test_a_plan_folds_its_layers_and_the_rows_are_those_of_the_full_text(plan):
    _, plan = plan
    few, every = rows_of(explain(plan)), rows_of(explain(plan, full=True))
    assert 3 * len(few) < len(every) == len(plan.graph.nodes)
    unfolded = []
    for where, rest in few:
        count = re.search(r" x(\d+)$", where)
        words = where.removesuffix(count[0] if count else "").split()
        paths = [word for word in words if "." in word or word in ("embedding", "head")][:1]
        names = list(expanded(paths[0])) if count else [paths[0]] if paths else [""]
        assert len(names) == int(count[1]) if count else True
        unfolded += [(" ".join(words).replace(paths[0], name) if paths else where, rest.strip()) for name in names]
    assert sorted(unfolded) == sorted((where, rest.strip()) for where, rest in every)
    assert path_matches("layers.3.mlp.up", "layers.0-5.mlp.up")  # such a label is a pattern of strategies


@pytest.mark.slow
def test_the_command_has_full_and_its_json_has_every_row(plan):
    file, plan = plan
    words = ["propagate", f"{file}:deep", "--mesh", "mp=2"]
    few, full = (CliRunner().invoke(app, [*words, *more]).stdout for more in ((), ("--full",)))
    assert "layers.0-5.mlp.up.weight x6" in few
    assert "layers.0-5" not in full
    assert full.strip() == explain(plan, full=True)
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert len(found["nodes"]) == len(plan.graph.nodes)


def test_the_page_folds_as_the_text_and_its_details_name_every_row(plan):
    _, plan = plan
    page = html.unescape(to_html(plan).replace("<wbr>", ""))
    table = page[page.index("<h2>Every operator</h2>") :]
    few = [where for where, _ in rows_of(explain(plan))]
    assert table.count("<tr>") == len(few) + 1
    for where in few:
        assert re.sub(r" x\d+$", "", where) in table
    (names,) = re.findall(r"<details><summary>parameter layers.0-5.mlp.up.weight</summary>(.*?)</details>", table)
    assert names == ", ".join(f"parameter layers.{layer}.mlp.up.weight" for layer in range(6))


def test_a_checkpoint_shows_the_tensors_of_equal_layers_in_a_row(tmp_path):
    from ascend_parallel.sharding import TensorShard

    tensors = {f"layers.{layer}.up.weight": torch.zeros(4, 4) for layer in range(40)}
    whole = {name: TensorShard.whole(tensor) for name, tensor in tensors.items()}
    save(tmp_path / "saved", step=1, model=whole, optimizer={}, values={})
    run = lambda *more: CliRunner().invoke(app, ["checkpoint", "show", str(tmp_path / "saved"), *more]).stdout  # noqa: E731
    assert "layers.0-39.up.weight x40" in run()
    assert "layers.17.up.weight" not in run()
    assert "layers.17.up.weight" in run("--full")
    assert len(json.loads(run("--json"))["tensors"]) == 40
