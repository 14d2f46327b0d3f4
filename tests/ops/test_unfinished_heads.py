"""Heads that are still to be multiplied: made group by group with the bits of the whole, or whole for whoever reads."""

import copy
import pickle

import pytest
import torch
from marks import promise
from torch import nn

from ascend_parallel.ops import unfinished_heads
from ascend_parallel.ops.unfinished import UnfinishedTensor
from ascend_parallel.ops.unfinished_heads import UnfinishedHeads, heads_of_product

ROWS, HIDDEN, HEADS, WIDTH = 32, 64, 8, 16
GROUPS = (((0, 2), (4, 6)), ((2, 4), (6, 8)))  # of two ranks


def operands(bias=False, features=HEADS * WIDTH):
    generator = torch.Generator().manual_seed(0)
    x, weight, more = (
        torch.randn(shape, generator=generator) for shape in ((ROWS, HIDDEN), (features, HIDDEN), (features,))
    )
    return x, weight.t(), more if bias else None


def plain_and_unfinished(bias=False, unit=WIDTH, features=HEADS * WIDTH):
    x, w, more = operands(bias, features)
    plain = torch.mm(x, w) if more is None else torch.addmm(more, x, w)
    return plain, heads_of_product(x, w, more, unit, "projection")


def rotated(x):
    """Return what a model makes of queries [ROWS, N D]: [2, N, s, D]."""
    q = x.view(2, ROWS // 2, -1, WIDTH).transpose(1, 2)
    angles = torch.arange(ROWS // 2 * WIDTH // 2).view(1, 1, ROWS // 2, WIDTH // 2).float().repeat(1, 1, 1, 2)
    first, second = q[..., : WIDTH // 2], q[..., WIDTH // 2 :]
    return q * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def interleaved(x):
    """Return heads whose neighbouring features are rotated, as GPT-J does."""
    q = x.view(2, ROWS // 2, -1, WIDTH)
    return torch.stack((-q[..., 1::2], q[..., ::2]), dim=-1).flatten(-2).transpose(1, 2)


def normed(x):
    q = x.view(2, ROWS // 2, -1, WIDTH)
    wide = q.to(torch.float64)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype).transpose(1, 2) * torch.arange(
        16.0
    )


def adapted(x):
    """Return heads with what an adapter adds to all of them."""
    return (x + torch.linspace(0, 1, x.numel()).view_as(x)).view(2, ROWS // 2, -1, WIDTH).transpose(1, 2)


def of_the_first_third(x):
    return x.view(2, ROWS // 2, -1).split(x.shape[1] // 3, dim=2)[1].view(2, ROWS // 2, -1, WIDTH).transpose(1, 2)


def gated(x):
    """Return the first halves of heads that have a gate each."""
    return torch.chunk(x.view(2, ROWS // 2, -1, 2 * WIDTH), 2, dim=-1)[0].transpose(1, 2)


CHAINS = {
    "rotary": (rotated, {}),
    "rotary, biased": (rotated, {"bias": True}),
    "interleaved": (interleaved, {}),
    "norms": (normed, {}),
    "adapter": (adapted, {}),
    "packed": (of_the_first_third, {"features": 3 * HEADS * WIDTH}),
    "gated": (gated, {"features": 2 * HEADS * WIDTH, "unit": 2 * WIDTH}),
    "finer units": (gated, {"features": 2 * HEADS * WIDTH}),
}


@pytest.mark.parametrize("name", CHAINS)
def test_groups_of_heads_have_the_bits_of_the_whole(name, monkeypatch):
    """And of products only the columns that a group needs are multiplied, each once."""
    chain, how = CHAINS[name]
    plain, x = plain_and_unfinished(**how)
    expected, multiplied, own = chain(plain), [], unfinished_heads.multiply
    monkeypatch.setattr(
        unfinished_heads, "multiply", lambda *given: multiplied.append(given[1].shape[1]) or own(*given)
    )
    found = chain(x)
    assert isinstance(found, UnfinishedHeads) and multiplied == []
    assert found.stride() == expected.stride() and found.dtype == expected.dtype
    assert found.finished_unless_cut(1, GROUPS) is found
    multiplied.clear()  # those of the probe
    for places in GROUPS:
        heads = [head for first, stop in places for head in range(first, stop)]
        assert torch.equal(found.some(1, places), expected[:, heads])
    columns = HEADS * WIDTH * (2 if chain is gated else 1)
    assert multiplied == [columns // 2] * 2
    assert torch.equal(found.finished(), expected) and found.finished().stride() == expected.stride()
    if name != "packed":  # of which two thirds were not asked for
        assert sum(multiplied) == columns, "the whole is put together from what is there"


@pytest.mark.parametrize("name", CHAINS)
def test_whoever_reads_gets_the_whole(name):
    chain, how = CHAINS[name]
    plain, x = plain_and_unfinished(**how)
    expected, found = chain(plain), chain(x)
    whole = found.finished()
    assert type(whole) is torch.Tensor and torch.equal(whole, expected) and whole.stride() == expected.stride()
    assert torch.equal(found.some(1, GROUPS[1]), expected[:, [2, 3, 6, 7]])
    assert torch.equal(x.finished(), plain)


READERS = {
    "NumPy": lambda x: torch.from_numpy(x.numpy().copy()),
    "a list": lambda x: torch.tensor(x.tolist()),
    "a copy": copy.deepcopy,
    "a pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "dlpack": torch.from_dlpack,
    "print": lambda x: torch.tensor(" 12.3217" in repr(x)),
    "a softmax over heads": lambda x: torch.softmax(x.view(ROWS, HEADS, WIDTH), 1),
    "a sum over heads": lambda x: x.view(ROWS, HEADS, WIDTH).sum(1),
    "a norm over heads": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "some columns": lambda x: x[:, 3:50] * 2,
    "a matmul": lambda x: x @ torch.ones(HEADS * WIDTH, 3),
    "an odd view": lambda x: x.view(ROWS * 2, -1)[:, :7].clone(),
    "a boolean": lambda x: torch.tensor(bool((x > 0).any())),
    "cumsum": lambda x: x.cumsum(1),
    "data": lambda x: x.data.clone(),
}


@promise("unfinished-rows")
@pytest.mark.parametrize("name", READERS)
def test_no_reader_sees_what_is_not_multiplied(name):
    plain, x = plain_and_unfinished()
    read = READERS[name]
    assert torch.equal(read(x), read(plain))


def test_changes_in_place_are_seen_by_views_and_not_by_what_was_made_before():
    plain, x = plain_and_unfinished()
    for given in (plain, x):
        given.before, given.view_of = given * 2, given.view(ROWS, HEADS, WIDTH)
        given.mul_(3)
        given.after = given + 1
    assert torch.equal(x.finished(), plain)
    for name in ("before", "view_of", "after"):
        made, expected = getattr(x, name), getattr(plain, name)
        assert torch.equal(made.finished() if isinstance(made, UnfinishedTensor) else made, expected)


@pytest.mark.parametrize("what", ["rows", "weight", "memory"])
def test_what_changed_before_the_heads_are_made_is_an_error(what):
    x, w, _ = operands()
    made = heads_of_product(x, w, None, WIDTH, "projection").view(ROWS, HEADS, WIDTH)
    if what == "memory":
        w.untyped_storage().resize_(0)
    else:
        {"rows": x, "weight": w}[what].mul_(2)
    with pytest.raises(RuntimeError, match="heads of attention are still to be made of a tensor of shape"):
        made.some(1, GROUPS[0])


def test_autograd_sees_whole_operators():
    norm = nn.RMSNorm(WIDTH)
    x, w, _ = operands()
    found = []
    for make in (lambda: heads_of_product(x, w, None, WIDTH, "projection"), lambda: torch.mm(x, w)):
        y = make().requires_grad_()
        made = rotated(y).transpose(1, 2)
        made = norm(made) * made
        if isinstance(made, UnfinishedHeads):
            made.some(2, GROUPS[0])
        (gradient,) = torch.autograd.grad(made.sum(), [y])
        found.append(gradient)
    assert torch.equal(found[0], found[1])
