"""COC_DETERMINISTIC=invariant: a row's bits depend neither on the degree, nor on the rows beside it, nor on chunks."""

import pytest
import torch
from every_degree import at_degrees, digest
from marks import promise
from test_every_degree import drawn, of_all

from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.ops import row_tiles
from ascend_parallel.ops.degree_error import DegreeError

INVARIANT = Settings(deterministic="invariant")
# Among them those from which MKL takes other routines: 1, 2 and 3 rows, more than 128 at K of 1024 and more.
ROWS = (1, 2, 3, 15, 16, 17, 63, 100, 130, 257)


def outputs(group, shape, dtype, settings, rows, sequence_parallel=False):
    """A column and a row layer without gradients: the bits of the last 16 rows alone."""
    hidden, inner = shape
    x = drawn((300, hidden), dtype, 1)[-rows:]
    share = slice(group.rank() * inner // group.size(), (group.rank() + 1) * inner // group.size())
    w1, w2 = drawn((inner, hidden), dtype, 3)[share], drawn((hidden, inner), dtype, 4)[:, share]
    with torch.no_grad():
        z = column_linear(x, w1, group=group, settings=settings)
        y = row_linear(z, w2, group=group, settings=settings)
    return y


def of_rows(group, cases):
    return [digest(outputs(group, *case)[-1:]) for case in cases]


@promise("invariant-layers")
@pytest.mark.sample("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_among_any_rows_at_any_degree(ranks, dtype):
    chunks = [Settings(deterministic="invariant", num_chunks=count) for count in (1, 2, 4, 8)]
    cases = [((1024, 512), dtype, INVARIANT, rows) for rows in ROWS]
    cases += [((1024, 512), dtype, settings, rows) for settings in chunks for rows in (130, 256)]
    found = at_degrees(ranks, of_rows, cases)
    assert len({bits for degree in found for bits in degree}) == 1


@pytest.mark.slow
def test_rows_of_the_tree_alone_depend_on_the_rows_beside_them(ranks):
    """The comparison above can fail."""
    cases = [((1024, 512), torch.float32, Settings(deterministic="tp"), rows) for rows in ROWS]
    (found,) = at_degrees(ranks, of_rows, cases, degrees=(1,))
    assert len(set(found)) > 1


@promise("invariant-layers")
def test_gradients_of_one_degree_are_those_of_another(ranks):
    """Also with sequence parallelism, and of fused weights."""
    cases = [(rows, (256, 512), torch.float32, INVARIANT) for rows in (1, 33, 64)]
    cases += [(64, (256, 512), torch.bfloat16, Settings(deterministic="invariant", num_chunks=2), True)]
    cases += [(64, (256, 512), torch.float32, INVARIANT, True, (256, 256))]
    one, *others = at_degrees(ranks, of_all, cases)
    for degree in others:
        assert degree == one


def exact(x, w):
    return x.double() @ w.double()


@pytest.mark.parametrize("columns", [1, 10, 64, 100, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_in_tiles_is_the_product(dtype, columns):
    """Of a transposed weight, a weight that is not, and a part of one: the same bits, near the exact product."""
    x, weight = drawn((21, 96), dtype, 1), drawn((columns, 96), dtype, 2)
    wider = torch.cat([weight, weight], 1)
    made = []
    for w in (weight.t(), weight.t().contiguous(), wider[:, :96].t()):
        made.append(torch.full((21, columns), torch.nan, dtype=dtype))
        row_tiles.multiply_tiles(x, w, made[-1])
    assert all(torch.equal(each, made[0]) for each in made)
    error = (made[0].double() - exact(x, weight.t())).abs().max()
    assert error < {torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]


def test_a_weight_without_columns_and_rows_without_tokens():
    for m, n in ((0, 8), (4, 0)):
        y = torch.empty(m, n)
        row_tiles.multiply_tiles(torch.randn(m, 32), torch.randn(32, n), y)
        assert y.shape == (m, n)


def test_where_a_place_changes_a_row_the_product_is_refused(monkeypatch):
    """As a library would that multiplies some rows of a call in another way."""
    multiply = torch.mm

    def uneven(x, w, **out):
        y = multiply(x, w, **out)
        y[0] += y[0].abs() * 1e-6
        return y

    row_tiles.asked_tiling.cache_clear()
    monkeypatch.setattr(torch, "mm", uneven)
    with pytest.raises(DegreeError, match=r"\[16, 40\] x \[40, 8\] in torch.float32 on cpu .* other bits at another"):
        row_tiles.multiply_tiles(torch.randn(3, 40), torch.randn(40, 8), torch.empty(3, 8))
    row_tiles.asked_tiling.cache_clear()


def test_where_larger_calls_have_other_bits_the_tiles_are_multiplied(monkeypatch):
    """As a library would whose routine depends on the rows, or on the columns, of a call."""
    multiply, x, w = torch.mm, torch.randn(100, 40), torch.randn(40, 200)
    row_tiles.asked_tiling.cache_clear()
    expected = torch.empty(100, 200)
    row_tiles.multiply_tiles(x, w, expected)

    def by_shape(a, b, **out):
        y = multiply(a, b, **out)
        if a.shape[0] != row_tiles.ROWS or b.shape[1] != row_tiles.COLUMNS:
            y += y.abs() * 1e-6
        return y

    row_tiles.asked_tiling.cache_clear()
    monkeypatch.setattr(torch, "mm", by_shape)
    found = torch.empty(100, 200)
    row_tiles.multiply_tiles(x, w, found)
    assert row_tiles.tiling_of(w) == row_tiles.Tiling((row_tiles.ROWS,), False)
    row_tiles.asked_tiling.cache_clear()
    assert torch.equal(found, expected)
