"""Products that nobody has multiplied yet, and their aliases."""

import pytest
import torch

from ascend_parallel.ops.deferred import DeferredProduct

# What changes the shape of a tensor in place, and how.
CHANGES = {
    "squeeze_": lambda y: y.squeeze_(0),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "transpose_": lambda y: y.transpose_(0, 1),
    "t_": lambda y: y.squeeze_(0).t_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("read_before", [False, True])
def test_a_shape_that_is_changed_in_place_is_that_of_one_alias(change, read_before):
    torch.manual_seed(1)
    x, w = torch.randn(1, 6, 8), torch.randn(8, 5)
    plain, deferred = x @ w, DeferredProduct(x, w)
    plain_alias, alias = plain.detach(), deferred.detach()
    if read_before:
        assert torch.equal(deferred.clone(), plain)
    for each in (plain_alias, alias):
        change(each)
        each.add_(1)
    assert (alias.shape, deferred.shape) == (plain_alias.shape, plain.shape)
    assert torch.equal(torch.cat([deferred]), plain)
    assert torch.equal(torch.cat([alias]), plain_alias)
