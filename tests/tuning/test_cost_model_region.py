"""The cost model's estimate of a region."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware
from ascend_parallel.tuning.cost_model.layer_passes import BEST, BOUND, IN_TURN, ChunkSchedule
from ascend_parallel.tuning.cost_model.layers import TransformerLayerTime
from ascend_parallel.tuning.cost_model.models import Batch, find_model
from ascend_parallel.tuning.cost_model.region import Lanes

GLOO = find_hardware("cpu-gloo").with_link("1gbit").with_launch(0)
NPU = find_hardware("910b2").with_launch(0)


def layer(hardware, name="llama2-7b", tp=8, sequence_parallel=False):
    dtype = torch.float32 if hardware.device == "cpu" else torch.bfloat16
    options = {"sequence_parallel": sequence_parallel, "dtype": dtype, "device": hardware.device}
    return TransformerLayerTime(
        CostModel(hardware), find_model(name), Batch(sequence=1024, micro_batch=1, tp=tp, **options)
    )


def in_regions(count):
    return ChunkSchedule(name=str(count), region=True)


def test_lanes_follow_the_programs_order():
    lanes = Lanes()
    lanes.run(3.0)
    first = lanes.send(10.0)  # from 3 to 13
    lanes.run(4.0)
    second = lanes.send(1.0)  # done at 7, but behind the first: from 13 to 14
    assert (first, second) == (13.0, 14.0)
    assert lanes.run(2.0, first) == 15.0
    assert lanes.run(1.0, second) == 16.0  # its rows were there before
    lanes.send(0.5)
    found = lanes.estimate
    assert (found.seconds, found.computation, found.communication) == (16.5, 10.0, 11.5)


def test_a_task_starts_after_its_launch():
    beside, inside = Lanes(issue=5.0), Lanes(inline=5.0)
    for lanes in (beside, inside):
        lanes.run(1.0)
        lanes.send(1.0)
    assert beside.estimate.seconds == 6.0
    assert inside.estimate.seconds == 12.0
    assert inside.estimate.computation == 11.0


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama2-7b", "deepseek-v3-dense"])
@pytest.mark.parametrize("hardware", [GLOO, NPU], ids=["gloo", "npu"])
def test_an_estimate_lies_between_the_longer_lane_and_both_in_turn(hardware, name, sequence_parallel, count):
    region = layer(hardware, name, sequence_parallel=sequence_parallel).region(count)
    for found in (region.forward(), region.backward()):
        assert found.computation > 0
        assert found.communication > 0
        assert max(found.computation, found.communication) <= found.seconds
        assert found.seconds < found.computation + found.communication


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama2-7b", "deepseek-v3-dense"])
@pytest.mark.parametrize("hardware", [GLOO, NPU], ids=["gloo", "npu"])
def test_the_forward_of_one_chunk_hides_nothing(hardware, name, sequence_parallel):
    """deepseek's attention begins with two matmuls, which pull no rows."""
    one = layer(hardware, name, sequence_parallel=sequence_parallel)
    assert one.region(1).pulls == (name == "llama2-7b")
    forward = one.region(1).forward()
    assert forward.seconds == pytest.approx(forward.computation + forward.communication)
    assert one.forward(in_regions(1)) == pytest.approx(one.forward(IN_TURN))


def test_a_region_hides_what_layers_cannot():
    """On a slow link, a layer's collectives are longer than its own matmul, and shorter than the region's."""
    one = layer(GLOO)
    found = one.region(8).forward()
    assert one.forward(in_regions(8)) < one.forward(BOUND) < one.forward(BEST)
    assert found.seconds == pytest.approx(max(found.computation, found.communication), rel=0.1)


def test_collectives_that_disturb_matmuls_lengthen_a_region():
    costless = replace(GLOO, link=replace(GLOO.link, processor=0.0))
    assert layer(costless).forward(in_regions(4)) < layer(GLOO).forward(in_regions(4))


def test_one_rank_has_no_region():
    one = layer(GLOO, tp=1)
    for each in (one.forward, one.backward):
        assert each(in_regions(4)) == each(IN_TURN)


def test_the_command_predicts_regions():
    words = "predict --model llama2-7b --tp 8 --hardware cpu-gloo --link 1gbit --seq 1024 --no-sequence-parallel"
    ended = CliRunner().invoke(app, [*words.split(), "--json"])
    assert ended.exit_code == 0
    found = json.loads(ended.stdout)
    shares = {name: schedule["e_bound"] for name, schedule in found["layer"].items()}
    assert shares["in turn"] == 0
    assert shares["4 chunks"] < shares["bound"] < shares["4, regions"] <= 1
    for part in ("layer", "step"):
        assert found[part]["4, regions"]["gain"] > found[part]["bound"]["gain"]
    assert "4, regions" in CliRunner(env={"COLUMNS": "200"}).invoke(app, words.split()).stdout
