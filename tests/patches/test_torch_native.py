"""torch's parallelize_module: losses and gradients, overlapped, plain, and of the whole model in float64."""

import pytest
import torch
from hugging_face import both, unequal, worst
from torch.distributed.device_mesh import init_device_mesh
from torch_parallel import decoder, parallel, step

import ascend_parallel
from ascend_parallel.ops import COUNTS


def parallelised(group, plan, **options):
    ascend_parallel.configure(num_chunks=4)  # the forwards are installed while the model is parallelised
    return parallel(decoder(**options), init_device_mesh("cpu", (group.size(),)), plan)


def calls():
    return {name: count["calls"] for name, count in COUNTS.as_dict().items()}


def trained(group, plan, options, micro_batches):
    """Return the names that differ from plain, the worst error against the whole model, and the overlapped calls."""
    model = parallelised(group, plan, **options)
    before = calls()
    plain, overlapped = both(model, lambda model: step(model, micro_batches))
    right = step(decoder(**{**options, "dtype": torch.float64}), micro_batches)
    after = {name: count - before.get(name, 0) for name, count in calls().items()}
    return unequal(plain, overlapped), worst(overlapped, right), {name: n for name, n in after.items() if n}


@pytest.mark.parametrize("plan", ["plain", "layers", "sequence"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_losses_and_gradients(ranks, plan, count):
    for different, (error, where), made in ranks(count).run(trained, plan, {}, 1):
        if count == 2:
            assert different == []
        assert error < 2e-5, where
        # In each of two blocks: two row layers, and five column layers; the vocabulary's layer gathers for itself.
        if plan == "plain":
            assert made == {"matmul_all_reduce": 2 * 7}
        elif plan == "layers":
            assert made["matmul_reduce_scatter"] == 2 * 7 + 1


@pytest.mark.parametrize("plan", ["plain", "layers", "sequence"])
@pytest.mark.parametrize(
    ("options", "micro_batches", "limit"),
    [({"dtype": torch.bfloat16}, 1, 0.1), ({"bias": True}, 2, 2e-5), ({"dtype": torch.float64}, 1, 1e-12)],
)
def test_other_models(ranks, plan, options, micro_batches, limit):
    for different, (error, where), _ in ranks(2).run(trained, plan, options, micro_batches):
        if "bias" not in options:  # torch adds a share of a row layer's bias on each rank before the sum
            assert different == []
        assert error < limit, where
