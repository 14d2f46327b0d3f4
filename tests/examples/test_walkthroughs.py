"""examples/for_*: every command of the page prints what the page shows; losses agree, layers are verified."""

import re
from importlib.util import find_spec

import pytest
from walkthrough import ROOT, losses, missing, other_losses, steps, unshown, walk

from ascend_parallel.training import Strategy


def test_a_line_that_is_not_printed_is_missing():
    printed = "layer   1.5 ms\nfast  (0.99x)"
    assert missing(["layer 2.75 ms", "fast ..."], printed) == []
    assert missing(["layers 2.75 ms", "fast (0.99)"], printed) == ["layers 2.75 ms", "fast (0.99)"]
    assert unshown(["layer 2.75 ms", "...t (...)"], printed) == []
    assert unshown(["layer 2.75 ms"], printed) == ["fast  (0.99x)"]


def test_a_loss_that_the_run_does_not_have_is_found():
    """In float64 to nine digits; in float32, where the seventh differs on another CPU, to those before the dots."""
    printed = "step 0  loss 1.982411963868\nstep 4  loss 0.325169230090\nstep 5  loss 6.311215877532959"
    shown = ["step 0  loss 1.982411963868", "...", "step 4  loss 0.000000208967", "step 5  loss 6.31122..."]
    assert other_losses(shown, printed) == ["step 4  loss 0.000000208967"]
    assert other_losses(["step 5  loss 6.31222...", "step 6  loss 1.0"], printed) == [
        "step 5  loss 6.31222...",
        "step 6  loss 1.0",
    ]


WALKS = pytest.mark.parametrize(
    "page", sorted(ROOT.glob("examples/for_*/README.md")), ids=lambda page: page.parent.name
)


@WALKS
def test_a_walk_begins_with_its_environment_and_extras(page):
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line and "(README.zh.md)" not in line]
    environment, extras = lines[1:3]
    assert environment.startswith("- Environment: Python 3.1")
    named = re.fullmatch(r'- Extras: `pip install --no-build-isolation "\.\[([\w,]+)]"` .*', extras)[1].split(",")
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(named) <= set(known)


@WALKS
def test_losses_in_float32_are_shown_to_six_digits(page):
    shown = [loss for _, lines in steps(page) for loss in losses("\n".join(lines))]
    long = [loss for loss in shown if len(loss.replace(".", "").lstrip("0")) > 6 and not loss.endswith("...")]
    assert long == [] or "computes in float64" in page.read_text()


@pytest.mark.slow
def test_a_megatron_user_gets_the_same_losses_overlapped_and_verified(tmp_path):
    plain, status, overlapped, verified, seen, tried = walk("examples/for_megatron_users/README.md", tmp_path)
    assert unshown(steps("examples/for_megatron_users/README.md")[0][1], plain) == []
    assert len(losses(plain)) == 4
    assert float(losses(plain)[-1]) < float(losses(plain)[0]) - 1
    assert losses(plain) == losses(overlapped) == losses(verified) == losses(seen)
    assert "overlap is on" not in plain
    assert "2 of 2 methods of megatron-core" in status
    assert "9 of 9 linear layers covered" in overlapped
    assert "9 of 9 linear layers covered" in tried and "exposed " in tried
    assert "72 checks of 9 layers, 0 over the limit" in verified
    assert "matmul" in (tmp_path / "records" / "report.html").read_text()


# The scripts import them after torch; that a variable patches what is imported later is the matter of tests/patches.
TRANSFORMERS = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_a_hugging_face_user_gets_the_same_losses_overlapped_and_planned(tmp_path):
    printed = walk("examples/for_hugging_face_users/README.md", tmp_path, TRANSFORMERS)
    _, alone, plain, overlapped, verified, _, planned, _, tuned, tried = printed
    assert len(losses(alone)) == 4
    assert losses(plain) == losses(overlapped) == losses(verified)
    assert "overlap is on" not in plain
    assert "15 of 15 linear layers covered" in overlapped
    assert "21 of 21 linear layers covered" in tuned and len(losses(tuned)) == 4
    assert "15 of 15 linear layers covered" in tried and "exposed " in tried
    assert "120 checks of 15 layers, 0 over the limit" in verified
    for parallel in (plain, planned):
        assert as_numbers(parallel) == pytest.approx(as_numbers(alone), rel=1e-5)
    assert re.search(r"overlap: ([1-9]\d*) of \1 matmuls next to a collective can overlap; 4 chunks", planned)
    assert "matmul" in (tmp_path / "records" / "report.html").read_text()
    assert "</svg>" in (tmp_path / "plan.html").read_text()


def as_numbers(printed):
    return [float(loss) for loss in losses(printed)]


@pytest.mark.slow
def test_a_planner_gets_strategies_for_64_and_1024_ranks_and_a_page(tmp_path):
    gains, *plans, _ = walk("examples/for_cluster_planners/README.md", tmp_path)
    assert "predictions of a model, not measurements" in gains
    for ranks, name, printed in zip((64, 1024), ("llama2-7b", "llama2-70b"), plans, strict=True):
        file = tmp_path / f"{name}-{ranks}.toml"
        assert Strategy.from_toml(file).ranks == ranks
        gigabytes = float(re.search(r"a step, ([\d.]+) GB a rank", file.read_text())[1])
        assert 5 < gigabytes <= 60
        rows = re.findall(r"^\d+ +(\d+) +(\d+)(?: \([^)]*\))? +(\d+) .* (\d[\d.]*) +[\d.]+ GB", printed, re.MULTILINE)
        assert len(rows) == 10
        assert {int(dp) * int(tp) * int(pp) for dp, tp, pp, _ in rows} == {ranks}
        seconds = [float(row[3]) for row in rows]
        assert seconds == sorted(seconds)
    for page in ("llama2-7b-64.html", "llama2-7b-64.svg"):
        assert "</svg>" in (tmp_path / page).read_text()


@pytest.mark.slow
def test_a_paddle_and_a_mindspore_user_get_the_losses_of_one_card(tmp_path):
    alone, paddle, mindspore, _ = walk("examples/for_paddle_and_mindspore_users/README.md", tmp_path)
    assert len(losses(alone)) == 5
    for parallel in (paddle, mindspore):
        assert as_numbers(parallel) == pytest.approx(as_numbers(alone), rel=1e-9, abs=2e-12)
        assert re.search(r"overlap: ([1-9]\d*) of \1 matmuls next to a collective can overlap; 4 chunks", parallel)
    assert f"eager   loss {losses(alone)[0]}" in paddle
    assert "is marked, and gathered" not in paddle
    assert mindspore.count("[configured: ") == 2 * 6
    assert "</svg>" in (tmp_path / "plan.html").read_text()
