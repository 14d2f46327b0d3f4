"""A suite's report: it tells a difference, its reason, and a suite that proves nothing."""

import textwrap
from pathlib import Path

import pytest
from suite import Outcome, Run, Suite, chunked_calls, outcomes, report, run

PASSED, FAILED = Outcome("passed"), Outcome("failed", "AssertionError: 3 != 1 collectives")
REASONS = {r"\d+ collectives": "it counts collectives"}


@pytest.mark.parametrize(
    "plain, patched, wrong",
    [
        ({"a": PASSED}, Run({"a": PASSED}, 4), []),
        ({"a": PASSED}, Run({"a": FAILED}, 4), []),
        (
            {"a": PASSED},
            Run({"a": Outcome("failed", "values differ")}, 4),
            ["patched: a: passed plain, failed, no reason known"],
        ),
        ({"a": PASSED, "b": PASSED}, Run({"b": PASSED}, 4), ["patched: a: passed plain, missing, no reason known"]),
        ({"a": PASSED}, Run({"a": PASSED}, 0), ["patched: no call ran in chunks, so the suite proves nothing"]),
        ({"a": FAILED}, Run({"a": FAILED}, 4), ["plain: no test passed, so there is nothing to compare with"]),
    ],
    ids=["same", "reason known", "reason not known", "a test is gone", "nothing overlapped", "nothing passes plain"],
)
def test_report_tells_what_is_wrong(plain, patched, wrong):
    table, found = report(Run(plain, 0), {"patched": patched}, REASONS)
    assert found == wrong
    assert ("reason: it counts collectives" in table) == (
        FAILED in patched.outcomes.values() and PASSED in plain.values()
    )


def test_plain_run_with_overlap_is_not_plain():
    assert report(Run({"a": PASSED}, 3), {}, {})[1] == ["plain: 3 calls ran in chunks, so this run is not plain"]


def test_outcome_is_the_worst_of_the_ranks(tmp_path: Path):
    case = '<testcase classname="file" name="{}">{}</testcase>'
    ranks = (
        case.format("a", "") + case.format("b", '<skipped message="no GPU"/>') + case.format("c", ""),
        case.format("a", '<failure message="differs">here</failure>') + case.format("b", ""),
    )
    for rank, cases in enumerate(ranks):
        (tmp_path / f"{rank}.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = outcomes(sorted(tmp_path.iterdir()))
    assert {test: outcome.word for test, outcome in found.items()} == {
        "file.a": "failed",
        "file.b": "skipped",
        "file.c": "missing",
    }
    assert found["file.a"].message == "differs\nhere"


def test_run_counts_the_calls_of_ranks_that_are_killed(tmp_path: Path):
    """Real processes: a rank that a test starts counts a call in chunks, and is killed before it could report one."""
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
            import subprocess, sys
            CALL = "from ascend_parallel.ops.counts import COUNTS; COUNTS.add('all_gather_matmul', 4, 4)"
            CALL += "; import os; os.kill(os.getpid(), 9)"
            def test_rank():
                assert subprocess.run([sys.executable, "-c", CALL]).returncode == -9
        """)
    )
    suite = Suite(checkout=tmp_path, arguments=("test_it.py",), variants={}, limit=240)
    assert run(suite, {}) == Run({"test_it.test_rank": PASSED}, chunked=1)


def test_rank_without_report_is_named(tmp_path: Path):
    suite = Suite(checkout=tmp_path, arguments=("--no-such-option",), variants={}, limit=60)
    with pytest.raises(RuntimeError, match="rank 0 wrote no report; pytest ended with 4"):
        run(suite, {})


def test_only_calls_in_several_chunks_count(tmp_path: Path):
    (tmp_path / "1").write_text("matmul_all_reduce 1\nmatmul_all_reduce 2\n")
    (tmp_path / "2").write_text("all_gather_matmul 16\n")
    assert chunked_calls(tmp_path) == 2
