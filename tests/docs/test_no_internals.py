"""Tests read no internals: private names of the product, and functions rebound in it, are those listed here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PRODUCT = "ascend_parallel"
# Calls that set a name: of monkeypatch or Python itself, and of unittest.mock, where `multiple` has names as keywords.
REBINDS = re.compile(r"(^|\.)(setattr|patch|patch\.object|patch\.multiple)$")

# By the name without `ascend_parallel.`, why a test still reads or rebinds it. No new line without a reason of its own.
CACHE = "what a process decided once; a process of tests runs many cases, each of which decides anew"
PLANTED = "a fault or a bound is planted where no input can make one"
MEASURED = "a measurement is given its outcome: real times differ from run to run"
SEEN = "what was asked for is noted on its way; the results alone do not show it"
MACHINE = "stands for a machine or a device that is not here"
PART = "a part whose own property is tested: a bound, a table, a list of candidates"
REMAINS = {
    "cli.bench_request.call_with_progress": MEASURED,
    "cli.report.command._run": PART,
    "diagnostics.trial.PATIENCE": PLANTED,
    "ops.__path__": MACHINE,
    "ops.bits.AHEAD": PART,  # who names calls before they come
    "ops.bits.store_all_gather": SEEN,
    "ops.chunk_loop.LOOP": MACHINE,
    "ops.collectives._reduce_scatter": MACHINE,
    "ops.expert_exchange.ExpertGroup.*": PLANTED,
    "ops.lazy_rows.has_streams": MACHINE,
    "ops.npu._HCCL_NAMES": CACHE,
    "ops.npu.arguments": SEEN,
    "ops.npu.soc_name": MACHINE,
    "ops.operators._operands": SEEN,
    "ops.operators.matmul_of": SEEN,  # and for an NPU: MACHINE
    "ops.pending.Pending.wait_for": SEEN,
    "ops.pending.ROLL_CALL": PLANTED,
    "ops.host_lead.LEADS.asked": MEASURED,
    "ops.host_lead.backend_of": MACHINE,
    "ops.host_lead.runs_ahead": MACHINE,
    "ops.probing.same_bits": SEEN,
    "ops.registry._choose": CACHE,
    "ops.registry.fills": MACHINE,
    "ops.shm.PIECE_BYTES": PLANTED,
    "ops.shm._SHARED": CACHE,
    "ops.shm_extension.__file__": MACHINE,
    "ops.tree.all_gather_single": SEEN,
    "ops.unfinished._settling": PART,
    "ops.unfinished.settle": PLANTED,
    "ops.unfinished_heads.multiply": SEEN,
    "ops.unfinished_heads.multiply_columns": SEEN,
    "overlap.context.project": PLANTED,
    "overlap.context.projection_gradients": PLANTED,
    "overlap.quantised._log_dequantised": CACHE,
    "overlap.weight_gradient.GradientParts.add": SEEN,
    "patch_control.wanted": "stands for a framework that is not here",
    "patches.mindspeed.layernorm_column.column_linear": PLANTED,
    "patches.region_choice.MOST_WAITING": PLANTED,
    "patches.region_choice.now": MEASURED,
    "patches.row_wise.FUNCTIONS": PLANTED,
    "patches.vllm.fused.matmul_of": MACHINE,
    "patches.vllm.start.measure": MEASURED,
    "process_groups.consistency.PATIENCE": PLANTED,
    "process_groups.consistency.is_capturing": MACHINE,
    "process_groups.consistency.time_limit": PLANTED,
    "sharding.planner.pruning._Messages": PART,
    "sharding.planner.pruning.ATTEMPT": PLANTED,
    "sharding.planner.pruning.SMALL": PLANTED,
    "sharding.planner.pruning.optimum": SEEN,
    "sharding.redistribute.collectives.CoalescedCollective.wait": SEEN,
    "sharding.redistribute.collectives.Request.start": SEEN,
    "sharding.rules.attention.lent_pieces": PLANTED,
    "sharding.runtime.overlapped_linear._decider": CACHE,
    "sharding.tracing.function_calls.detached": PLANTED,
    "sharding.tracing.same_blocks.ForwardNotes.repeatable_blocks": "off, to compare with a trace without it",
    "training.checkpoint.loading.verify": PLANTED,
    "training.checkpoint.lock.BEAT": PLANTED,
    "training.checkpoint.lock.STILL": PLANTED,
    "training.checkpoint.storage.complete": PLANTED,
    "training.confirm_degrees.trace_with_loss": SEEN,
    "training.degrees.search._Search": PART,
    "training.options.DTYPES": "casts to float64 show errors of layouts that the rounding of 16 bits hides",
    "training.rank_watch._warn_of_restarts": MACHINE,
    "training.rank_watch.c10d": MACHINE,
    "training.rank_watch.dist": MACHINE,
    "tuning.launch.link.missing_right": MACHINE,
    "tuning.launch.user_namespaces.HOLDER": PLANTED,
    "tuning.measured.part_groups.seconds_of": MEASURED,
    "tuning.measured.pass_times.TimedLinear.time_limits": MEASURED,
    "tuning.measured.pass_times.TimedLinear.time_sizes": MEASURED,
    "tuning.measured.step_contest.LAST": PLANTED,
    "tuning.measured.step_contest.MOST_CALLS": PLANTED,
    "tuning.measured.step_contest.MOST_LOST": PLANTED,
    "tuning.measured.step_contest.Mark": MEASURED,
    "tuning.measured.step_contest.decide": SEEN,
    "tuning.measured.tuner.MeasuredBreakdowns.of": MEASURED,
    "tuning.measured.decider.Decider.known_of_layer": MEASURED,
    "tuning.measured.decider.confirmed": MEASURED,
    "tuning.measured.decider.is_capturing": MACHINE,
}


def internals(code: str) -> set[str]:
    """Return the private names of the product that a file of tests reads, and the names of it that the file sets."""
    tree = ast.parse(code)
    known = dict(_imported(tree))
    found = {private for name in known.values() if (private := _private(name))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _name(node, known)):
            stored, private = isinstance(node.ctx, ast.Store | ast.Del), _private(name)
            found |= {private or name} if stored or private else set()
        if isinstance(node, ast.Call) and REBINDS.search(ast.unparse(node.func)):
            found |= set(_rebound(node, known))
    return {name.removeprefix(f"{PRODUCT}.") for name in found}


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == PRODUCT:
                    yield each.asname or PRODUCT, each.name if each.asname else PRODUCT
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PRODUCT:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _name(node: ast.expr, known: dict[str, str]) -> str | None:
    """Return the product's name that an expression is, or None."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := _name(node.value, known)):
        return f"{owner}.{node.attr}"
    return None


def _private(name: str) -> str | None:
    """Return the name up to its first private part, or None."""
    parts = name.split(".")
    places = (place for place, part in enumerate(parts) if part.startswith("_") and not part.startswith("__"))
    return next((".".join(parts[: place + 1]) for place in places), None)


def _rebound(call: ast.Call, known: dict[str, str]) -> Iterator[str]:
    """Yield the product's names that a call of `REBINDS` sets."""
    match call.args:
        case [ast.Constant(value=str(path)), *_] if path.startswith(f"{PRODUCT}."):
            yield path
        case [target, ast.Constant(value=str(attribute)), *_] if owner := _name(target, known):
            yield f"{owner}.{attribute}"
        case [target] if owner := _name(target, known):
            yield from (f"{owner}.{keyword.arg or '*'}" for keyword in call.keywords)


def test_tests_read_no_internals_but_those_that_are_listed():
    found: dict[str, set[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        for name in internals(path.read_text()):
            found.setdefault(name, set()).add(str(path.relative_to(TESTS)))
    assert {name: sorted(files) for name, files in found.items() if name not in REMAINS} == {}
    assert sorted(set(REMAINS) - set(found)) == [], "no test needs these any more: take them from the list"


@pytest.mark.parametrize(
    "code",
    [
        "from ascend_parallel.ops.bits import _new",
        "from ascend_parallel.ops import bits\nbits._new.clear()",
        "import ascend_parallel.ops.bits as b\nb._new = 1",
        "import ascend_parallel\nascend_parallel.ops.bits._new",
        "from ascend_parallel.ops import bits\nmonkeypatch.setattr(bits, '_new', 1)",
        "monkeypatch.setattr('ascend_parallel.ops.bits._new', 1)",
        "mock.patch('ascend_parallel.ops.bits._new')",
        "from ascend_parallel.ops import bits\npatch.object(bits, '_new', side_effect=print)",
        "from ascend_parallel.ops import bits\nmock.patch.multiple(bits, _new=1)",
    ],
)
def test_each_way_to_reach_an_internal_is_found(code):
    assert internals(code) == {"ops.bits._new"}


def test_public_names_and_tests_own_are_none():
    code = "from ascend_parallel.ops import bits\nbits.public(1)\nself._own = 1\nmonkeypatch.setattr(other, 'x', 1)"
    assert internals(code) == set()
