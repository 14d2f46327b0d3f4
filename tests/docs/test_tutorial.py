"""docs/tutorial.md: its diffs apply one after another, and after each the training has the losses of one card."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from tutorial import printed, steps

from ascend_parallel.training import Strategy, explain, plan_training

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
FILES = {"train.py": (ROOT / "examples" / "strategy" / "gpt.py").read_text()}
_, *STEPS = steps(PAGE, FILES)  # after the first the script is not yet changed
EXACT = {"rtol": 1e-10, "atol": 0}


def train(_, folder, count=None):
    """Run the script in its folder, as torchrun would, in the processes that there are."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        spec = importlib.util.spec_from_file_location("train", "train.py")
        script = importlib.util.module_from_spec(spec)
        sys.modules["train"] = script
        spec.loader.exec_module(script)
        script.STEPS = count or script.STEPS
        return script.main()
    finally:
        os.chdir(before)


def written(folder, files):
    """Write a step's files; return the folder's name and the strategy."""
    for name, text in files.items():
        (folder / name).write_text(text)
    return str(folder), Strategy.from_toml(folder / "strategy.toml")


@pytest.fixture(scope="module")
def one_card(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_card")
    (folder / "train.py").write_text(FILES["train.py"])
    return train(None, folder)


def test_the_page_goes_from_one_card_to_eight_ranks(tmp_path):
    found = [written(tmp_path, step.files)[1] for step in STEPS]
    assert [one.ranks for one, step in zip(found, STEPS, strict=True) if not step.aside] == [2, 4, 4, 8, 8, 8, 8, 8]
    assert all(step.ranks in (None, one.ranks) for one, step in zip(found, STEPS, strict=True))
    example = Strategy.from_toml(ROOT / "examples" / "strategy" / "gpt.toml")
    assert example in found


IN_CI = (0, 1, 4, len(STEPS) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [one if one in IN_CI else pytest.param(one, marks=pytest.mark.stress) for one in range(len(STEPS))]
)
def test_each_step_has_the_losses_of_one_card(ranks, one_card, tmp_path, number):
    folder, strategy = written(tmp_path, STEPS[number].files)
    near = EXACT if strategy.amp.dtype is None else {"rtol": 0.02, "atol": 0}
    for losses in ranks(strategy.ranks).run(train, folder):
        torch.testing.assert_close(losses, one_card, **near)


@pytest.mark.stress
def test_a_restart_goes_on_bit_for_bit(ranks, tmp_path):
    uninterrupted, interrupted = tmp_path / "whole", tmp_path / "stopped"
    for folder in (uninterrupted, interrupted):
        folder.mkdir()
        written(folder, STEPS[-1].files)
    whole = ranks(8).run(train, str(uninterrupted))
    assert ranks(8).run(train, str(interrupted), 6) == [losses[:6] for losses in whole]
    assert ranks(8).run(train, str(interrupted)) == [losses[4:] for losses in whole]


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_layout(ranks, one_card, tmp_path):
    exact = [step.files["strategy.toml"] for step in STEPS if "amp" not in step.files["strategy.toml"]]
    folder, of_eight = written(tmp_path, {**STEPS[-1].files, "strategy.toml": exact[-1]})
    ranks(of_eight.ranks).run(train, folder, 4)
    folder, of_four = written(tmp_path, {"strategy.toml": exact[1]})
    assert of_four.ranks == 4
    for losses in ranks(of_four.ranks).run(train, folder):
        torch.testing.assert_close(losses, one_card[4:], **EXACT)


def test_what_the_page_shows_is_printed(one_card):
    first, explained = printed(PAGE)
    assert first == [f"step {step}  loss {loss:.6f}" for step, loss in enumerate(one_card[:3])]
    script = sys.modules["train"]
    strategy = Strategy.from_toml(ROOT / "examples" / "strategy" / "gpt.toml")
    lines = explain(plan_training(strategy, script.GPT().double(), script.batch_of(0))).splitlines()
    assert [line for line in explained if line not in (*lines, "...")] == []
