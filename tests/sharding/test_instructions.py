"""The instructions of a compiled plan: the listing, the life of every register, and the memory of a step."""

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import small_models
import torch
import torch.distributed as dist
from allocations import peak_bytes
from pool import on_ranks
from sharded_models import BATCHES, CHUNKS, MLP, Blocks, column_and_row, made, mesh_of, planned, tensor_parallel
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from ascend_parallel import Settings
from ascend_parallel.cli.app import app
from ascend_parallel.overlap.linear import column_linear, row_linear
from ascend_parallel.sharding import explain, propagate
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.runtime.activation_memory import saved_bytes
from ascend_parallel.sharding.runtime.compiler import compile_plan
from ascend_parallel.sharding.runtime.compute_instructions import RecomputeBlock
from ascend_parallel.sharding.runtime.instructions import Free
from ascend_parallel.sharding.runtime.randomness import manual_seed
from ascend_parallel.sharding.runtime.rank_plan import plan_for_rank
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace
from ascend_parallel.sharding.visualize.instructions import instructions_as_text, list_instructions

ROOT = Path(__file__).parents[2]
LAYERS = Recompute(modules=["layers.*"])


def plan_of(name, mesh_shape=(2,), rows_cut=False):
    batch = BATCHES[name](torch.Generator().manual_seed(7))
    return planned(name, trace(made(getattr(small_models, name)), batch), mesh_of(mesh_shape), rows_cut)


def check_lives(program):
    """Assert that registers are written once, read only while alive, and freed once unless they are outputs."""
    written, freed, read = set(program.inputs), set(), set()
    for instruction in program.instructions:
        if isinstance(instruction, Free):
            assert freed.isdisjoint(instruction.registers)
            assert written.issuperset(instruction.registers)
            assert len(set(instruction.registers)) == len(instruction.registers)
            freed |= set(instruction.registers)
            continue
        assert set(instruction.reads) <= written - freed
        assert written.isdisjoint(instruction.writes)
        assert len(set(instruction.writes)) == len(instruction.writes)
        read |= set(instruction.reads)
        written |= set(instruction.writes)
        if isinstance(instruction, RecomputeBlock):
            assert len(instruction.reads) == len(instruction.body.inputs)
            assert len(instruction.writes) == len(instruction.body.outputs)
            check_lives(instruction.body)
    assert written == set(range(len(program.registers)))
    assert freed == (written & read | written - set(program.inputs)) - set(program.outputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", ["Llama", "GPT", "Bert", "ResNet"])
def test_every_register_is_read_while_alive_and_freed_once(name, rank):
    modules = [""] if name in ("Bert", "ResNet") else ["layers.*"]
    configs = [Recompute(modules=modules, collectives=collectives) for collectives in ("keep", "recompute")]
    plan = plan_of(name, (2, 2), rows_cut=name == "Llama")
    for overlap in (None, Settings(**CHUNKS)):
        for recompute in (None, *configs):
            for bucket_bytes in (0, 1 << 20):
                found = plan_for_rank(
                    plan, plan.mesh.coordinate(rank), overlap, recompute=recompute, bucket_bytes=bucket_bytes
                )
                for gradients in (True, False):
                    program = compile_plan(found, plan.graph, gradients=gradients)
                    kinds = Counter(type(each).__name__ for each in program.instructions)
                    assert kinds["Start"] == len([group for groups in found.prefetches.values() for group in groups])
                    assert (kinds["RecomputeBlock"] > 0) == (gradients and recompute is not None)
                    check_lives(program)


def test_a_register_that_is_read_too_late_is_found():
    plan = plan_of("GPT")
    program = compile_plan(plan_for_rank(plan, (0,), None), plan.graph, gradients=True)
    place = next(place for place, each in enumerate(program.instructions) if isinstance(each, Free))
    kept = list(program.instructions)
    early = [*kept[: place - 1], kept[place], kept[place - 1], *kept[place + 1 :]]
    for wrong in (early, kept[:place] + kept[place + 1 :], kept[: place + 1] + kept[place:]):
        with pytest.raises(AssertionError):
            check_lives(replace(program, instructions=tuple(wrong)))


def blocks_plan(count, mesh, **sizes):
    with torch.device("meta"):
        graph = trace(Blocks(count, **sizes), (torch.zeros(8, 128, sizes.get("width", 64)),))
    return propagate(graph, mesh, column_and_row(), objective="redistribution")


def test_the_last_of_thousands_of_ranks_compiles_without_processes():
    mesh = ProcessMesh(torch.arange(64 * 128).reshape(64, 128), ["dp", "mp"])
    with torch.device("meta"):
        graph = trace(Blocks(3, width=256, wide=1024), (torch.zeros(64, 16, 256),))
    plan = propagate(graph, mesh, column_and_row("dp"), objective="redistribution")
    assert not dist.is_initialized()
    listed = list_instructions(plan, 64 * 128 - 1)
    assert not dist.is_initialized()
    up = next(each for each in listed if "linear" in each.text and "blocks.0.up" in each.text)
    assert up.text.endswith("-> S(0) S(2)")
    assert up.change == 4 * 16 * 8  # one sequence of 16, 1024 / 128 features
    found = plan_for_rank(plan, mesh.coordinate(64 * 128 - 1), Settings())
    check_lives(compile_plan(found, plan.graph, gradients=True))


@pytest.mark.slow
def test_a_block_has_the_same_instructions_whatever_the_number_of_blocks():
    counts, registers = {}, {}
    for blocks in (12, 13, 48):
        plan = blocks_plan(blocks, mesh_of((2,)))
        program = compile_plan(plan_for_rank(plan, (1,), Settings()), plan.graph, gradients=True)
        counts[blocks] = Counter(type(each).__name__ for each in program.instructions)
        registers[blocks] = len(program.registers)
    block = counts[13] - counts[12]
    assert block["Load"] == 4
    assert block["RunKernel"] == 2
    assert counts[48] - counts[12] == Counter({name: 36 * count for name, count in block.items()})
    assert registers[48] - registers[12] == 36 * (registers[13] - registers[12])


def without_frees(program):
    """Return the program without its `Free`s, and its regions without theirs."""
    kept = [each for each in program.instructions if not isinstance(each, Free)]
    inner = [
        replace(each, body=without_frees(each.body)) if isinstance(each, RecomputeBlock) else each for each in kept
    ]
    return replace(program, instructions=tuple(inner))


@pytest.mark.sample("kept")
@pytest.mark.parametrize("recompute", [None, LAYERS], ids=["kept", "recomputed"])
@on_ranks(2)
def test_frees_do_not_change_a_bit(group, recompute):
    whole, batch = made(small_models.GPT, dropout=0.3), BATCHES["GPT"](torch.Generator().manual_seed(7))
    plan, found = planned("GPT", trace(whole, batch), mesh_of((2,))), []
    for change in (lambda program: program, without_frees):
        model = ShardedModule(whole, plan, settings=Settings(**CHUNKS), recompute=recompute)
        manual_seed(model, 3)
        for gradients in (True, False):
            program = model.instructions(gradients=gradients)
            model._programs[True, gradients] = change(program)
        for _ in range(2):
            model(*batch).backward()
        with torch.no_grad():
            found.append((model(*batch), {name: param.grad for name, param in model.named_parameters()}))
    assert len(change(program).instructions) < len(program.instructions)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class ByHand(nn.Module):
    """A rank's part of `Blocks`, written with the overlapped layers."""

    def __init__(self, whole, group):
        super().__init__()
        self.group, rank, size = group, group.rank(), group.size()
        self.blocks = nn.ModuleList()
        for block in whole.blocks:
            up, down = block["up"], block["down"]
            tensors = [up.weight.chunk(size)[rank], up.bias.chunk(size)[rank], down.weight.chunk(size, 1)[rank]]
            self.blocks.append(nn.ParameterList([each.detach().clone() for each in (*tensors, down.bias)]))

    def forward(self, x):
        options = {"group": self.group, "settings": Settings()}
        for up, up_bias, down, down_bias in self.blocks:
            h = column_linear(x, up, up_bias, **options)
            x = x + (row_linear(F.gelu(h), down, **options) + down_bias)
        return x.square().mean()


HELD = {"weights:blocks.*.down.bias": (None, [(None,)])}


@pytest.mark.parametrize("rows", [4, 64])
@on_ranks(2)
def test_a_planned_step_needs_the_memory_of_the_same_step_by_hand(group, rows):
    torch.manual_seed(5)
    whole, x = Blocks(4), torch.randn(rows, 16, 64, generator=torch.Generator().manual_seed(1))
    plan = propagate(trace(whole, (x,)), mesh_of((2,)), column_and_row() | HELD, objective="redistribution")
    models = [ByHand(whole, group), ShardedModule(whole, plan, settings=Settings())]
    peaks = []
    for model in models:
        model(x).backward()  # what the first step alone makes
        model.zero_grad()
        peaks.append(peak_bytes(lambda model=model: model(x).backward()))
    by_hand, planned_step = peaks
    assert planned_step <= 1.05 * by_hand
    assert by_hand > 4 * 4 * 64 * 256  # the gradients of the weights alone


def changes(listed):
    return [(each.text.split(" = ")[-1].split("(")[0].split(" and ")[0], each.change) for each in listed if each.change]


def test_the_listing_counts_what_each_instruction_allocates_and_frees():
    x = torch.randn(4, 2, 12)
    plan = tensor_parallel(trace(MLP(), (x,)), mesh_of((2,)))
    whole, half = 4 * 4 * 2 * 12, 4 * 4 * 2 * 24 // 2  # bytes of a tensor of 12 features, and of 24 on two ranks
    listed = list_instructions(plan, settings=Settings(), gradients=False)
    allocated = [each for each in changes(listed) if each[1] > 0]
    assert allocated == [
        ("input x: R", whole),
        ("run mul", whole),
        ("run overlapped up linear", half),
        ("run gelu", half),
        ("run overlapped down linear", whole),
        ("run add", whole),
    ]
    assert [change for _, change in changes(listed) if change < 0] == [-whole, -half, -half, -2 * whole]
    totals = list(accumulate(each.change for each in listed))
    assert [each.in_use for each in listed] == totals
    assert max(totals) == 3 * whole  # the residual, the sum and the output of `add`
    assert totals[-1] == whole
    kept = list_instructions(plan, settings=Settings())[-1].in_use
    assert kept == 2 * whole + 2 * half  # the output, and what both layers and gelu read


def test_rows_that_a_kernel_gathers_and_keeps_are_listed():
    plan, listed, saved = plan_of("GPT", rows_cut=True), [], []
    for again in (True, False):
        settings = Settings(num_chunks=2, recompute_all_gather=again)
        listed.append(list_instructions(plan, settings=settings)[-1].in_use)
        saved.append(saved_bytes(plan_for_rank(plan, (0,), settings), Recompute()))
    assert listed[1] - listed[0] == saved[1] - saved[0] > 0


class Viewed(nn.Module):
    def forward(self, x):
        one, other = x.exp().transpose(0, 1).chunk(2)
        return one.sum() * other.sum()


def test_a_view_holds_the_memory_of_its_base():
    plan = propagate(trace(Viewed(), (torch.randn(8, 8),)), mesh_of((2,)), objective="redistribution")
    listed = list_instructions(plan, gradients=False)
    (place,) = [place for place, each in enumerate(listed) if each.change == -8 * 8 * 4 and place > 2]
    assert "sum" in listed[place - 1].text  # of the second chunk
    assert sum("sum" in each.text for each in listed[:place]) == 2


def test_the_listing_names_every_instruction():
    plan = plan_of("Llama", (2,), rows_cut=True)
    plain, recomputed, without = (
        instructions_as_text(list_instructions(plan, 1, settings=Settings(), **options))
        for options in ({}, {"recompute": LAYERS}, {"recompute": LAYERS, "gradients": False})
    )
    for text in (plain, without):
        for word in ("input tokens: R", "load embedding.weight", "redistribute %", "free %"):
            assert word in text, word
        assert "run overlapped layers.0.mlp.gate linear and layers.0.mlp.up linear(" in text
        assert "recompute" not in text
    assert "(kept for backward)" in plain
    assert "(kept for backward)" not in without
    assert "recompute layers.1(" in recomputed
    assert re.search(r"B {6}%\d+ = run overlapped layers.1.mlp.down linear", recomputed)  # inside a region
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank={rank} is not in ProcessMesh.*give one of its ranks"):
            list_instructions(plan, rank)
    assert explain(plan, memory=True) == f"{explain(plan)}\n\n{instructions_as_text(list_instructions(plan))}"


def test_the_command_lists_instructions(monkeypatch):
    monkeypatch.chdir(ROOT)

    def run(*more):
        words = ["examples/sharding/mlp.py:small", "--mesh", "mp=2", "--config", "examples/sharding/mlp.toml", *more]
        return CliRunner().invoke(app, ["propagate", *words])

    text = run("--instructions", "--rank", "1")
    found = json.loads(run("--instructions", "--rank", "1", "--json").stdout)
    assert [set(each) for each in found["instructions"]] == [{"text", "change", "in_use"}] * len(found["instructions"])
    lines = text.stdout.splitlines()[1:]
    for number, (line, each) in enumerate(zip(lines, found["instructions"], strict=False)):
        assert line.split()[0] == str(number)
        assert line.endswith(f"  {each['text']}")
    assert "instructions" not in json.loads(run("--json").stdout)
    wrong = run("--instructions", "--rank", "2")
    assert wrong.exit_code == 2
    assert "rank=2 is not in ProcessMesh([0, 1], dim_names=['mp']): give one of its ranks" in " ".join(
        wrong.output.split()
    )
