"""torch's fused optimizers under ZeRO, which updates slices of parameters: against one card in float64."""

import copy

import pytest
import torch
from one_card import box_of, losses_of
from pool import on_ranks
from torch import nn
from torch.nn import functional as F

from ascend_parallel.training import ShardingOptions, Strategy, train_step

OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, fused=True, amsgrad=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, fused=True),
}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(12, 6, dtype=torch.float64, generator=generator),) for _ in range(3)]


def loss(model, x):
    return F.mse_loss(model(x), x)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "zero_stage", [1, 2, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(3)
def test_slices_are_updated_as_on_one_card(group, name, zero_stage):
    """Compare three steps and every weight; the second layer is cut along its second dimension."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 18), nn.GELU(), nn.Linear(18, 6)).double()
    whole = copy.deepcopy(model)
    strategy = Strategy(mode="data", mesh={"dp": group.size()}, sharding=ShardingOptions(zero_stage=zero_stage))
    step = train_step(model, batches()[0], OPTIMIZERS[name](model), strategy, loss=loss)
    # Not fused: whole parameters are contiguous, but this test shall not rest on the same kernels.
    optimizer = OPTIMIZERS[name](whole)
    for each in optimizer.param_groups:
        each["fused"] = False
    found = [step(*batch).item() for batch in batches()]
    torch.testing.assert_close(found, losses_of(whole, optimizer, batches(), loss), rtol=1e-10, atol=0)
    assert all(each["fused"] for each in step.optimizer.param_groups)
    for key, shard in step.tensor_shards().items():
        if key in dict(whole.named_parameters()):
            torch.testing.assert_close(shard.local.detach(), whole.get_parameter(key).detach()[box_of(shard)])
    step.close()
