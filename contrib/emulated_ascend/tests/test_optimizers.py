"""Steps of optimizers, gradient clipping and scaling against the CPU."""

import pytest
import torch
import torch.nn.functional as F

torch.npu.set_device(0)


def trained(device, optimizer, steps=3, scaler=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 5)).to(device)
    x, target = torch.randn(8, 6).to(device), torch.arange(8).remainder(5).to(device)
    stepper = optimizer(model.parameters())
    for _ in range(steps):
        stepper.zero_grad()
        F.cross_entropy(model(x), target).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        stepper.step()
    return [weight.detach().cpu() for weight in model.parameters()]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
        lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
        lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
        lambda p: torch.optim.AdamW(p, 1e-2, foreach=True, amsgrad=True),
        lambda p: torch.optim.Adam(p, 1e-2),
        lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    ],
    ids=["foreach", "single", "fused", "amsgrad", "adam", "sgd"],
)
def test_a_step_has_the_weights_of_the_cpu(optimizer):
    for found, expected in zip(trained("npu", optimizer), trained("cpu", optimizer), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_the_same_seed_draws_the_same_numbers_and_dropout_keeps_the_mean():
    def draws():
        torch.npu.manual_seed(5)
        x = torch.empty(1000, device="npu")
        mask = F.dropout(torch.ones(20000, device="npu"), 0.3)
        return (
            x.normal_(2, 3).cpu(),
            x.uniform_(-1, 1).cpu(),
            mask.cpu(),
            torch.randperm(50, device="npu").cpu(),
            x.bernoulli_(0.2).cpu(),
        )

    first, second = draws(), draws()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert abs(first[0].mean() - 2) < 0.4 and abs(first[0].std() - 3) < 0.3
    assert abs(first[2].mean() - 1) < 0.03 and abs((first[2] == 0).float().mean() - 0.3) < 0.02
    assert first[3].sort().values.equal(torch.arange(50))


def test_dropout_has_the_gradient_of_its_own_mask():
    x = torch.ones(4000, device="npu", requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
