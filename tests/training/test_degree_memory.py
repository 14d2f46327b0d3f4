"""The predicted memory of degrees beside the bytes of live tensors in a step on real ranks."""

import sys
from pathlib import Path

import pytest
import torch
from allocations import most_bytes_of_a_step

from ascend_parallel.settings import current_settings
from ascend_parallel.training.degrees.evaluation import Evaluation
from ascend_parallel.training.degrees.folding import fold
from ascend_parallel.training.degrees.planning import Planner
from ascend_parallel.training.degrees.space import Degrees
from ascend_parallel.training.loss import mean_loss, trace_with_loss
from ascend_parallel.tuning.cost_model.hardware import find_hardware

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "strategy"))
from gpt import GPT

LAYERS, WIDTH, VOCABULARY, LENGTH, ROWS = 4, 128, 256, 64, 16
KINDS = [
    {"dp": 4, "micro_batches": 1, "rows": 4},
    {"dp": 4, "micro_batches": 4, "rows": 1, "zero_stage": 1},
    {"dp": 4, "micro_batches": 2, "rows": 2, "zero_stage": 2, "recompute": "layers"},
    {"dp": 4, "micro_batches": 2, "rows": 2, "zero_stage": 3},
    {"tp": 4, "micro_batches": 4, "rows": 4},
    {"dp": 2, "tp": 2, "micro_batches": 2, "rows": 4, "recompute": "layers+collectives"},
    {"pp": 4, "micro_batches": 4, "rows": 4, "schedule": "gpipe"},
    {"pp": 4, "micro_batches": 8, "rows": 2, "recompute": "layers"},
    {"pp": 2, "dp": 2, "micro_batches": 4, "rows": 2, "recompute": "layers", "recompute_layers": (1, 0)},
    {"dp": 2, "pp": 2, "micro_batches": 4, "rows": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    {"tp": 2, "pp": 2, "micro_batches": 8, "rows": 2, "schedule": "zbv", "virtual_stages": 2},
]


def model_and_batch():
    torch.manual_seed(0)
    model = GPT(LAYERS, WIDTH, 4, VOCABULARY, LENGTH)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
    return model, (tokens[:, :-1], tokens[:, 1:])


def predicted(degrees):
    """Return the predicted bytes, and the patterns of the layers that are recomputed."""
    model, batch = model_and_batch()

    def folded(rows):
        return fold(trace_with_loss(model, mean_loss, [value[:rows] for value in batch]))

    hardware = find_hardware("cpu-gloo")
    evaluation = Evaluation(hardware, Planner(folded, hardware, current_settings()), masters=False)
    return evaluation.memory(degrees), evaluation.recomputed(degrees)


def most_bytes(_group, tables):
    model, batch = model_and_batch()
    return most_bytes_of_a_step(model, batch, tables)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_holds_what_was_predicted(ranks, kind):
    degrees = Degrees(**({"dp": 1, "tp": 1, "pp": 1} | kind))
    memory, layers = predicted(degrees)
    assert layers == (("layers.0",) if degrees.recompute_layers else ("layers.0-3",))
    measured = max(ranks(4).run(most_bytes, degrees.tables(layers, "cpu-gloo", None)))
    buckets = 3 * memory.gradients if degrees.dp > 1 else 0.0  # of a model smaller than a bucket
    if degrees.zero_stage in (2, 3):
        buckets *= degrees.dp
    assert measured <= memory.total
    assert measured > 0.75 * (memory.total - buckets)
