"""The GPT of examples/strategy by hand and by annotations: the losses of one card; the counted lines."""

import sys
from pathlib import Path

import pytest
import torch
from pool import on_ranks

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "examples" / "strategy"), str(ROOT / "benchmarks")]

import annotated  # noqa: E402
import by_hand  # noqa: E402
import count_lines  # noqa: E402
import gpt  # noqa: E402
import marked  # noqa: E402
import mixed_precision  # noqa: E402
import strategy as strategy_benchmark  # noqa: E402
import strategy_cases  # noqa: E402

EXACT = {"rtol": 1e-10, "atol": 0}


@pytest.fixture(scope="module")
def one_card():
    losses = gpt.main()
    assert losses[-1] < losses[0] - 1
    return losses


def program(_, name):
    return {"by_hand": by_hand, "annotated": annotated}[name].main()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by_hand", "annotated"])
def test_both_programs_have_the_losses_of_one_card(ranks, one_card, name):
    for losses in ranks(8).run(program, name):
        torch.testing.assert_close(losses, one_card, **EXACT)


def case_of_benchmark(_, name):
    torch.manual_seed(0)
    step = strategy_cases.CASES[name](gpt.GPT().double(), gpt.batch_of(0), 1e-2)
    losses = [step(*gpt.batch_of(index)) for index in range(gpt.STEPS)]
    step.close()
    return losses


# The two others are the two programs above, without recompute and ZeRO, and the last case without chunks.
OTHERS = [
    pytest.param(name, marks=[pytest.mark.stress] if name in ("by hand", "strategy") else [])
    for name in strategy_cases.CASES
]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_what_the_benchmark_times_has_the_losses_of_one_card(ranks, one_card, name):
    for losses in ranks(8).run(case_of_benchmark, name):
        torch.testing.assert_close(losses, one_card, **EXACT)


@pytest.mark.slow
def test_a_gradient_that_is_not_summed_is_seen(ranks, one_card):
    (losses, *_) = ranks(8).run(with_the_replicas_apart)
    torch.testing.assert_close(losses[:1], one_card[:1], **EXACT)
    assert abs(losses[-1] / one_card[-1] - 1) > 1e-6


def with_the_replicas_apart(_):
    kept, by_hand.reduce_gradients = by_hand.reduce_gradients, lambda stage: None
    try:
        return by_hand.main()
    finally:
        by_hand.reduce_gradients = kept


def test_code_is_counted_and_nothing_else(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(
        '"""Text.\n\nMore."""\n\n# why\nx = [\n    1,  # one\n]\n\n\ndef f():\n    """Text."""\n    return x\n'
    )
    assert count_lines.code_lines(file) == ["x = [", "1,  # one", "]", "def f():", "return x"]
    table = tmp_path / "table.toml"
    table.write_text("# why\n\n[mesh]\ndp = 2  # two\n")
    assert count_lines.code_lines(table) == ["[mesh]", "dp = 2  # two"]


def test_annotations_take_less_than_half_the_distributed_lines():
    plain, ours = (len(count_lines.distributed_lines(files)) for files in count_lines.PROGRAMS.values())
    assert 2 * ours < plain


def test_the_documented_count_is_the_count():
    assert count_lines.table() in (ROOT / "docs" / "tutorial.md").read_text()


@pytest.mark.slow
def test_the_strategy_is_planned_for_8192_ranks():
    assert strategy_benchmark.planned(8192).startswith("8192 ranks, ")
    with pytest.raises(ValueError, match="give a multiple of 64"):
        strategy_benchmark.planned(100)


@pytest.mark.slow
@on_ranks(2)
def test_each_level_of_mixed_precision_trains(_):
    found = mixed_precision.main()
    assert found["O1"] != found["fp32"] != found["O2"]
    for losses in found.values():
        torch.testing.assert_close(losses[:3], found["fp32"][:3], rtol=0.02, atol=0)
        assert losses[-1] < losses[0] - 0.5


@on_ranks(4)
def test_a_marked_model_in_both_modes(_):
    eager, losses = marked.main()
    assert losses[0] == pytest.approx(eager, rel=1e-6)
    assert losses[-1] < losses[0] - 0.1
