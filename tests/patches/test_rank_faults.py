"""Ranks that disagree, die or raise: the remaining ranks raise a clear error within the time limit."""

import ast
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from launch import launch
from marks import promise

from ascend_parallel import __version__
from ascend_parallel.process_groups import consistency
from ascend_parallel.process_groups.consistency import DisagreementError, store_all_gather
from ascend_parallel.tuning.measured.chunk_plan import Plan, this_machine

ROOT = Path(__file__).parents[2]
LINKS = ("ascend_parallel/ops", "ascend_parallel/patches")  # to the folders beside the package

START = """
import datetime, os, sys, time, torch, torch.distributed as dist
import ascend_parallel as ap
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={limit}))
rank, group = dist.get_rank(), dist.group.WORLD
store = dist.distributed_c10d._get_default_store()
def tell(): store.set("told", "1")
def wait_until_told(): store.wait(["told"], datetime.timedelta(seconds=60))
"""

LAYER = """
from megatron_cpu import megatron_on_cpu, start_model_parallel
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import RowParallelLinear
with megatron_on_cpu():
    start_model_parallel(dist.get_world_size())
    config = ModelParallelConfig(tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True)
    layer = RowParallelLinear(64, 32, config=config, init_method=torch.nn.init.normal_,
                              bias=True, input_is_parallel=True, skip_bias_add=False)
    x = torch.randn(256, 64 // dist.get_world_size())
    begin = time.monotonic()
    try:
        layer(x)
    except RuntimeError as error:
        print(type(error).__name__, error)
    print("after", round(time.monotonic() - begin))
"""


def code(*parts, limit=20):
    return (START + "".join(parts)).replace("{limit}", str(limit))


@promise("rank-settings")
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("environs", "difference"),
    [
        ([{"COC_PARALLEL_NUM": "4"}, {"COC_PARALLEL_NUM": "8"}], "COC_PARALLEL_NUM is 4 on rank 0, 8 on rank 1"),
        (
            [{"COC_PARALLEL_NUM": "4"}, {"COC_PARALLEL_NUM": "4", "USE_COC_FUSED_KERNEL": "1"}],
            "USE_COC_FUSED_KERNEL is False on rank 0, True on rank 1",
        ),
    ],
)
def test_settings_that_differ_are_an_error_on_every_rank(environs, difference):
    for rank in launch(code(LAYER), environs):
        assert rank.returncode == 0, rank.stderr
        assert rank.stdout.startswith("DisagreementError ranks of group"), rank.stdout
        assert difference in rank.stdout
        assert "Export the same variables" in rank.stdout


@promise("rank-settings")
@pytest.mark.parametrize("missing", ["file", "variable"])
def test_a_plan_that_one_rank_lacks_is_named_with_its_reason_by_every_rank(tmp_path, missing):
    path = tmp_path / "plan.json"
    Plan(this_machine(2, torch.device("cpu"), "gloo")).save(path)
    lacks = {"COC_PLAN": "none.json"} if missing == "file" else {}
    for rank in launch(code(LAYER), [{"COC_PARALLEL_NUM": "4", **each} for each in ({"COC_PLAN": str(path)}, lacks)]):
        assert rank.returncode == 0, rank.stderr
        assert rank.stdout.startswith("DisagreementError ranks of group"), rank.stdout
        why = "refused: COC_PLAN='none.json' cannot be read: No such file or directory" if lacks else "None"
        assert re.search(rf"COC_PLAN is [0-9a-f]{{16}} on rank 0, {why} on rank 1", rank.stdout), rank.stdout


@pytest.mark.slow
def test_a_plan_that_no_rank_can_use_is_an_error_of_the_plan_on_every_rank(tmp_path):
    path = tmp_path / "plan.json"
    Plan(replace(this_machine(2, torch.device("cpu"), "gloo"), torch="1.0")).save(path)
    for plan, text in (("none.json", "COC_PLAN='none.json' cannot be read"), (str(path), "measured elsewhere: torch")):
        program = code(LAYER.replace("RuntimeError", "ValueError"))
        for rank in launch(program, [{"COC_PARALLEL_NUM": "4", "COC_PLAN": plan}] * 2):
            assert rank.stdout.startswith("PlanError") and text in rank.stdout, rank.stdout + rank.stderr


@pytest.mark.slow
def test_a_plan_of_another_machine_on_one_rank_is_named_by_every_rank(tmp_path):
    path = tmp_path / "plan.json"
    Plan(this_machine(2, torch.device("cpu"), "gloo")).save(path)
    threads = "\nif rank == 1: torch.set_num_threads(2)\n"
    for rank in launch(code(threads, LAYER), [{"COC_PARALLEL_NUM": "4", "COC_PLAN": str(path)}] * 2):
        assert rank.stdout.startswith("DisagreementError ranks of group"), rank.stdout + rank.stderr
        assert "refused: the plan was measured elsewhere: threads is 2 here and was 1" in rank.stdout


def test_a_rank_that_hosts_the_store_lets_the_others_read_the_reason():
    """Rank 0 hosts it, and ends with its error at once; rank 1 has still to read the settings of both."""
    late = """
from ascend_parallel.process_groups import consistency
came = consistency._wait_for_ranks
def late(*args):
    outcome = came(*args)
    time.sleep(1)
    return outcome
if rank == 1: consistency._wait_for_ranks = late
consistency.confirm_same(group, "here", {"it": rank}, "differs", "")
"""
    for rank in launch(code(late), [{}] * 2):
        assert rank.returncode == 1
        assert "DisagreementError: differs: it is 0 on rank 0, 1 on rank 1" in rank.stderr, rank.stderr


@pytest.mark.slow
def test_a_rank_that_came_late_reads_what_the_first_gave_up_for():
    late = """
from ascend_parallel.process_groups import consistency
time.sleep((0, 2, 9)[rank])
if rank < 2: consistency.confirm_same(group, "here", {}, "differs", "")
"""
    for rank in launch(code(late, limit=4), [{}] * 3)[:2]:
        assert rank.returncode == 1
        assert re.search("DisagreementError: rank 2 of .* has not come to here within 4 s", rank.stderr), rank.stderr
        assert "wait timeout" not in rank.stderr


@pytest.mark.slow
def test_settings_that_agree_are_confirmed():
    for rank in launch(code(LAYER), [{"COC_PARALLEL_NUM": "4"}] * 2):
        assert rank.stdout.startswith("after"), rank.stdout + rank.stderr

    module = "ascend_parallel.process_groups.consistency"
    other = f"\nimport {module}\nif rank == 1: {module}.__version__ = '9.9'\n"
    for rank in launch(code(other, LAYER), [{"COC_PARALLEL_NUM": "4"}] * 2):
        assert f"version of ascend_parallel is {__version__} on rank 0, 9.9 on rank 1" in rank.stdout


@pytest.mark.slow
def test_a_rank_without_overlap_is_named():
    ranks = launch(code(LAYER, limit=4), [{"COC_PARALLEL_NUM": "4"}, {}])
    assert "DisagreementError rank 1 of group" in ranks[0].stdout, ranks[0].stdout + ranks[0].stderr
    assert "has not come to its first overlapped layer within 4 s" in ranks[0].stdout
    assert "is COC_PARALLEL_NUM exported there?" in ranks[0].stdout


DIES = """
from ascend_parallel.ops import pending
pending.ROLL_CALL = 2  # of a rank that is alive and waits for a processor too
x, w = torch.randn(4608, 64), torch.randn(64, 256)  # a gather of 64 features beside more columns stays whole
ap.ops.OPERATOR(x, w, group, num_chunks=4)
if rank == 1:
    os._exit(7)
begin = time.monotonic()
try:
    ap.ops.OPERATOR(x, w, group, num_chunks=4)
except ap.CollectiveError as error:
    print(error)
print("after", round(time.monotonic() - begin), flush=True)
if rank == 0:  # the store's host, which rank 2 still asks who is alive
    wait_until_told()
tell()
os._exit(0)
"""


@promise("dead-rank")
@pytest.mark.parametrize(
    "operator",
    [
        "matmul_all_reduce",
        *(pytest.param(name, marks=pytest.mark.stress) for name in ("matmul_reduce_scatter", "all_gather_matmul")),
    ],
)
def test_a_rank_that_dies_is_named_by_the_others(operator):
    ranks = launch(code(DIES.replace("OPERATOR", operator), limit=8), [{}] * 3)
    assert ranks[1].returncode == 7
    for survivor in (ranks[0], ranks[2]):
        failed = rf"{operator}, collective \d of 4, on group 'default_pg' of ranks 0, 1, 2 failed on rank"
        assert re.search(failed, survivor.stdout), survivor.stdout
        assert "no sign of rank 1 within 2 s: it has stopped or never called the collective" in survivor.stdout
        assert "after" in survivor.stdout  # launch() limits the total time


STAYS_AWAY = """
from concurrent.futures import ThreadPoolExecutor
from ascend_parallel.ops import pending
from ascend_parallel.sharding import ProcessMesh
from ascend_parallel.sharding.layout import REPLICATE
from ascend_parallel.sharding.redistribute.across_meshes import redistribute_across_meshes
from ascend_parallel.sharding.redistribute.collectives import Request
from ascend_parallel.sharding.redistribute.shortest_path import RedistributeStep
from ascend_parallel.tuning.measured.pass_parts import Collective
import functools
pending.ROLL_CALL = 0.5
groups = [dist.new_group(timeout=datetime.timedelta(minutes=30)) for _ in range(9)]
x, w = torch.randn(256, 64), torch.randn(64, 32)
operators = ap.ops.matmul_all_reduce, ap.ops.matmul_reduce_scatter
calls = [functools.partial(operator, x, w, group, num_chunks=4) for operator, group in zip(operators, groups)]
for call in calls:  # the bits are probed
    call()
meshes = ProcessMesh([0]), ProcessMesh([1])
step = RedistributeStep("all_gather", 0, REPLICATE, REPLICATE)
run = functools.partial(functools.partial, pending.run_collective)
calls += [
    lambda: Request(step, groups[2], x[:1]).start().wait(),
    lambda: redistribute_across_meshes(x, x.shape, meshes[0], (REPLICATE,), meshes[1], (REPLICATE,), groups[3]),
    run("the sum of gradients", dist.all_reduce, x.clone(), group=groups[4]),
    run("the norm of gradients", dist.all_gather, [x.clone(), x.clone()], x, group=groups[5]),
    run("the drawing of a seed", dist.broadcast, x.clone(), group=groups[6], group_src=1),
    functools.partial(Collective("matmul_all_reduce", groups[7], x, 64, 32).run, (32, 32)),
    functools.partial(Collective("matmul_reduce_scatter", groups[8], x, 64, 32).run, (32, 32)),
]
if rank == 1:
    wait_until_told()
    sys.exit()
def said(call):
    begin = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return f"{error} after {time.monotonic() - begin:.0f}"
with ThreadPoolExecutor(len(calls)) as pool:
    print(*pool.map(said, calls), sep="\\n")
print(said(lambda: ProcessMesh([[0], [1]]).device_mesh()))
tell()
"""
WAITS = ["matmul_all_reduce, collective 1 of 4,", "matmul_reduce_scatter, collective 1 of 4,", "all_gather"]
WAITS += ["a reshard across meshes", "the sum of gradients", "the norm of gradients", "the drawing of a seed"]
WAITS += ["a measured all-reduce", "a measured reduce-scatter"]


@promise("dead-rank")
def test_a_missing_rank_is_named_within_the_programs_limit_in_groups_of_half_an_hour():
    """As in the groups of Megatron and of torch's DeviceMesh: gloo itself would wait for half an hour, also at exit."""
    waiting, _ = launch(code(STAYS_AWAY, limit=2), [{}] * 2, timeout=40)
    *lines, mesh = waiting.stdout.splitlines()
    assert len(lines) == len(WAITS), waiting.stdout + waiting.stderr
    for line, start in zip(lines, WAITS, strict=True):
        assert line.startswith(f"{start} on group") and "failed on rank 0" in line, line
        assert re.search(r"no sign of rank 1 within 0\.5 s: .* after [2-9]$", line), line
    assert mesh.startswith("rank 1 of group 'default_pg' of ranks 0, 1 has not come to the groups of ProcessMesh("), (
        mesh
    )
    assert waiting.returncode == 0


# Calls of torch.distributed that return when they are done. Their groups have the program's time limit: they are the
# default group, or were made with a limit.
BLOCKING = {
    ("ascend_parallel/training/pipeline/pipeline.py", "barrier"),
    ("ascend_parallel/training/pipeline/pipeline.py", "broadcast"),
    ("ascend_parallel/training/checkpoint/storage.py", "all_gather_object"),
    ("ascend_parallel/training/to_static.py", "all_gather_object"),
    ("ascend_parallel/tuning/launch/rank.py", "barrier"),
}
# Files that start work, and what they wait on: `Pending`, `NamedWork` or `FinishingWork`, which limit it.
STARTING = {
    "ops/chunked.py",
    "ops/collectives.py",
    "ops/part_exchange.py",
    "ascend_parallel/process_groups/__init__.py",
    "ascend_parallel/sharding/redistribute/across_meshes.py",
    "ascend_parallel/sharding/redistribute/collectives.py",
    "ascend_parallel/sharding/runtime/gradient_reduction.py",
    "ascend_parallel/training/optimizer/buckets.py",
    "ascend_parallel/tuning/measured/pass_parts.py",
    "ascend_parallel/tuning/measured/rank_clock.py",
}
COMMUNICATES = re.compile(
    r"(all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast\w*|(monitored_)?barrier|scatter\w*|"
    r"gather\w*|reduce|i?send|i?recv|batch_isend_irecv)$"
)


def communications():
    """Yield file, function and whether it is started only, for each call of torch.distributed in the package."""
    for path in [
        path for name in ("ascend_parallel", "ops", "patches") for path in sorted((ROOT / name).rglob("*.py"))
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func.value) in ("dist", "torch.distributed") and COMMUNICATES.match(node.func.attr):
                named = {each.arg: ast.unparse(each.value) for each in node.keywords}
                starts = node.func.attr in ("isend", "irecv", "batch_isend_irecv") or named.get("async_op") == "True"
                yield path.relative_to(ROOT).as_posix(), node.func.attr, starts


@promise("wait-limits")
def test_what_waits_without_a_limit_of_this_package_is_known():
    """Each has a reason above; a collective of a new file goes through `run_collective`, `Pending` or `NamedWork`."""
    found = {(file, name) for file, name, starts in communications() if not starts and not file.startswith(LINKS)}
    assert found == BLOCKING
    assert {file for file, _, starts in communications() if starts and not file.startswith(LINKS)} == STARTING


RAISES = """
x, w = torch.randn(4096, 64), torch.randn(64, 512)
ap.ops.matmul_all_reduce(x, w, group, num_chunks=4)  # probes the bits first
mm, calls = torch.mm, []
def failing(*args, **kwargs):
    calls.append(1)
    if rank == 1 and len(calls) == 3:
        raise MemoryError("no memory left in chunk 3")
    return mm(*args, **kwargs)
torch.mm = failing
try:
    ap.ops.matmul_all_reduce(x, w, group, num_chunks=4)
except (ap.CollectiveError, MemoryError) as error:
    print(type(error).__name__, error, flush=True)
if rank == 1:
    wait_until_told()
tell()
os._exit(0)
"""


@promise("rank-error")
@pytest.mark.slow
def test_a_rank_that_raises_between_chunks_reports_its_own_error():
    first, second = launch(code(RAISES, limit=4), [{}] * 2)
    assert second.stdout.startswith("MemoryError no memory left in chunk 3"), second.stdout + second.stderr
    assert "CollectiveError matmul_all_reduce, collective 3 of 4" in first.stdout, first.stdout + first.stderr
    assert "no sign of rank 1" in first.stdout


ROWS_DIFFER = """
x, w = torch.randn(256 if rank == 0 else 512, 16), torch.randn(16, 24)
for number in range(2):
    try:
        ap.ops.OPERATOR(x, w, group, num_chunks=4)
    except RuntimeError as error:
        print(type(error).__name__, error)
dist.barrier()
"""


@promise("rank-error")
@pytest.mark.parametrize("operator", ["matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"])
def test_first_calls_with_other_rows_on_a_rank_are_an_error_at_once_on_every_rank(operator):
    """The probe of bits is where they meet; a call that a rank has probed before goes on without meeting anybody."""
    for rank in launch(code(ROWS_DIFFER.replace("OPERATOR", operator), limit=300), [{}] * 2, timeout=60):
        assert rank.returncode == 0, rank.stderr
        errors = rank.stdout.splitlines()
        assert len(errors) == 2
        for error in errors:
            assert error.startswith("CollectiveError ranks of group"), error
            assert f"have come to different calls (rank 0: {operator}" in error and "512" in error


OLD_STYLE = """
import logging
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())
        tell()
logging.getLogger("ascend_parallel").addHandler(Keep())
import ascend_parallel.process_groups.consistency as agreement
agreement.PATIENCE = 1.0
if rank == 1:
    wait_until_told()
from ascend_parallel.settings import Settings
agreement.SettingsAgreement(Settings(num_chunks=4).shared).confirm(group)
print(len(records) >= 1 and "rank 1 of group" in records[0] if rank == 0 else "late")
"""


@pytest.mark.slow
def test_waiting_for_a_late_rank_is_said():
    first, second = launch(code(OLD_STYLE), [{}] * 2)
    assert (first.stdout.strip(), second.stdout.strip()) == ("True", "late"), first.stderr


ALONE = """
agreement = ap.process_groups.consistency.SettingsAgreement(ap.Settings(num_chunks=4).shared)
if rank == 0:
    try:
        agreement.confirm(group)
    except ap.DisagreementError as error:
        print(error)
    tell()
else:
    wait_until_told()
dist.barrier()
agreement.confirm(group)
ap.process_groups.consistency.SettingsAgreement(ap.Settings(num_chunks=2).shared).confirm(group)
print("agreed")
"""


@promise("settings-compared")
@pytest.mark.slow
def test_a_rank_that_came_alone_is_not_ahead_of_the_others():
    import_it = "\nimport ascend_parallel.process_groups.consistency\n"
    rank_0, rank_1 = launch(code(import_it, ALONE, limit=3), [{}] * 2)
    assert "rank 1 of group" in rank_0.stdout and rank_0.stdout.endswith("agreed\n"), rank_0.stdout + rank_0.stderr
    assert rank_1.stdout == "agreed\n", rank_1.stderr


def given_up(group):
    """Rank 2 stays away from the first exchange; rank 0 gives up long before rank 1 would."""
    three, limit = dist.new_group(), timedelta(seconds=60 if group.rank() else 0.5)
    error = None
    with patch.object(consistency, "time_limit", lambda _: limit), patch.object(consistency, "PATIENCE", 0.1):
        if group.rank() < 2:
            with pytest.raises(DisagreementError) as error:
                store_all_gather(three, "the first place", {"call": 1}, DisagreementError)
    dist.barrier()
    return error and str(error.value), store_all_gather(three, "the second place", {"call": 2}, DisagreementError)


def test_all_ranks_that_came_give_up_together_and_the_next_exchange_is_anew(ranks):
    (first, met), (second, _), (third, late_met) = ranks(3).run(given_up)
    assert "rank 2 of group" in first and "has not come to the first place within 0.5 s" in first
    assert (second, third) == (first, None)
    assert met == late_met == {rank: {"call": 2} for rank in range(3)}
