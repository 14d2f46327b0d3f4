"""Unfinished rows in inference mode, and modules that run by rows: rows that are read early would be NaN here."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from ascend_parallel.ops.lazy_rows import LazyRows, RowPieces, Rows
from ascend_parallel.ops.unfinished import UnfinishedTensor, finished, is_unfinished
from ascend_parallel.ops.unfinished_modules import by_rows

SIZES = (16, 32, 16)


def sent(value, sizes=SIZES):
    """Return an unfinished copy of value [64, ...], NaN until it is asked for, and the chunks that were asked for."""
    memory, asked = torch.full_like(value, torch.nan), []
    stops = [0, *torch.tensor(sizes).cumsum(0).tolist()]

    def fill(index):
        asked.append(index)
        memory[stops[index] : stops[index + 1]] = value[stops[index] : stops[index + 1]]

    return UnfinishedTensor(memory, Rows(LazyRows(sizes, fill), 1, 1)), asked


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Norm(torch.nn.Module):
    """A norm with a residual that writes to its inputs, as fused kernels do."""

    def forward(self, x, residual):
        residual.add_(x)
        return x.copy_(F.rms_norm(residual, residual.shape[-1:])), residual


class Gate(torch.nn.Module):
    """An activation with half the features, through a function that torch's dispatcher does not see."""

    def forward(self, x):
        rows = x.numpy()
        return torch.from_numpy(rows[:, : rows.shape[1] // 2] * rows[:, rows.shape[1] // 2 :])


NORM, GATE = Norm(), Gate()


def norm(x, residual):
    return by_rows(NORM, NORM, x, residual, writes=True)


CHAINS = {
    "linear": lambda x, w: F.linear(x, w, w[:, 0]),
    "MLP": lambda x, w: F.gelu(x @ w + w[0]) @ w.t(),
    "norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w[0], w[1]) @ w,
    "residual": lambda x, w: F.dropout(x, 0.5, training=False) + drawn(64, 64, seed=3),
    "in place": lambda x, w: F.relu_((x * 2).add_(w[0])),
    "heads": lambda x, w: F.rms_norm(F.linear(x, w).view(64, 8, 8), (8,)).reshape(64, 64),
    "along rows": lambda x, w: x.softmax(0),
    "last tokens": lambda x, w: (x * 2)[torch.tensor([63, 5])],
    "modules": lambda x, w: by_rows(GATE, GATE, torch.cat([x, x], 1)) + norm(x, x * 2)[1],
    "modules in a row": lambda x, w: norm(*norm(x, drawn(64, 64, seed=4)))[0] @ w,
}


@pytest.mark.parametrize("chain", CHAINS)
def test_functions_have_the_bits_of_finished_tensors(chain):
    value, w = drawn(64, 64), drawn(64, 64, seed=2)
    with torch.inference_mode():
        plain = finished(CHAINS[chain](value.clone(), w))
        x, _ = sent(value)
        y = CHAINS[chain](x, w)
        assert torch.equal(y, plain)
    assert torch.equal(finished(y), plain)


@pytest.mark.parametrize("chain", ["linear", "norm", "residual", "modules in a row"])
def test_a_chain_stays_unfinished(chain):
    w = drawn(64, 64, seed=2)  # as parameters are made
    with torch.inference_mode():
        x, asked = sent(drawn(64, 64))
        y = CHAINS[chain](x, w)
        assert is_unfinished(y) and not asked
        y[:16].sum()
        assert asked == [0]


READERS = {
    "item": lambda y: y.sum().item(),
    "numpy": lambda y: y.numpy().copy(),
    "list": lambda y: y.tolist(),
    "pointer": lambda y: y.data_ptr(),
    "unknown operator": lambda y: torch.linalg.norm(y),
    "in place": lambda y: y.view(-1).sort()[0],
    "after the mode": None,
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_waits(reader):
    with torch.inference_mode():
        x, asked = sent(drawn(64, 64))
        y = norm(x, drawn(64, 64, seed=4))[0]
        if READERS[reader] is not None:
            READERS[reader](y)
            assert asked == [0, 1, 2]
    if READERS[reader] is None:  # memory of inference mode is written in that mode, by whom it may be
        z = y * 2
        assert not z.isnan().any() and asked == [0, 1, 2]
    assert not y._value.isnan().any()


def test_rows_that_were_made_outside_are_filled_outside():
    x, _ = sent(drawn(64, 64))
    y = x * 2
    with torch.inference_mode():
        z = y + 1
        assert torch.equal(finished(z), drawn(64, 64) * 2 + 1)
    assert not finished(y).is_inference()


@pytest.mark.parametrize("through", ["operator", "module"])
def test_finished_rows_may_change_before_the_others_come(through):
    """They have no version in inference mode that would tell."""
    with torch.inference_mode():
        x, _ = sent(drawn(64, 64))
        residual = drawn(64, 64, seed=4) * 1
        kept = residual.clone()
        y = x + residual if through == "operator" else norm(x, residual)[1]
        residual.zero_()
        assert torch.equal(y, drawn(64, 64) + kept)


@pytest.mark.parametrize("through", ["operator", "module"])
def test_unfinished_rows_change_after_their_readers(through):
    with torch.inference_mode():
        x, _ = sent(drawn(64, 64))
        y = x * 2 if through == "operator" else norm(x, x)[1]
        x.add_(1)
        assert torch.equal(y, drawn(64, 64) * 2) and torch.equal(x, drawn(64, 64) + 1)


def test_a_module_that_writes_leaves_the_rows_of_others_alone():
    with torch.inference_mode():
        x, _ = sent(drawn(64, 64))
        residual, _ = sent(drawn(64, 64, seed=4), (32, 16, 16))
        y, total = norm(x, residual)
        assert torch.equal(total, drawn(64, 64) + drawn(64, 64, seed=4)) and not y.isnan().any()
        assert torch.equal(x, drawn(64, 64)) and torch.equal(residual, drawn(64, 64, seed=4))


class Noted(torch.nn.Module):
    """A module that doubles, and notes which of the rows that it was given are still alive."""

    def __init__(self):
        super().__init__()
        self.given, self.alive = [], []

    def forward(self, x):
        self.given.append(weakref.ref(x))
        self.alive.append(sum(x() is not None for x in self.given))
        return x * 2


def test_rows_between_modules_are_freed_once_they_are_read():
    with torch.inference_mode():
        x, _ = sent(drawn(64, 64))
        first, second = Noted(), Noted()
        y = by_rows(second, second, by_rows(first, first, x))
        assert torch.equal(finished(y), drawn(64, 64) * 4)
    assert second.alive == [1] * 4  # at a trial, and of three chunks never two at once


def test_rows_between_modules_stay_for_whoever_holds_them():
    with torch.inference_mode():
        x, _ = sent(drawn(64, 64))
        second = Noted()
        z = by_rows(NORM, NORM, x, drawn(64, 64, seed=4), writes=True)
        y = by_rows(second, second, z[1])
        y[:16].sum()
        third = by_rows(second, second, z[1])
        joined = z[1] + 1
        total = drawn(64, 64) + drawn(64, 64, seed=4)
        for found, expected in ((joined, total + 1), (third, total * 2), (y, total * 2), (z[1], total)):
            assert torch.equal(finished(found), expected)


def test_rows_of_two_readers_are_freed_after_the_second():
    with torch.inference_mode():
        x, _ = sent(drawn(64, 64))
        first, second, third = Noted(), Noted(), Noted()
        z = by_rows(first, first, x)
        readers = [by_rows(each, each, z) for each in (second, third)]
        del z
        for y in readers:
            assert torch.equal(finished(y), drawn(64, 64) * 4)
    assert second.alive == [1, 1, 2, 3] and third.alive == [1] * 4


def test_a_module_reads_the_pieces_of_finished_rows_without_a_copy():
    """Nobody has had their memory, and who changes them by a function of torch waits for the module."""
    with torch.inference_mode():
        x, _ = sent(drawn(64, 64))
        later, _ = sent(drawn(64, 64, seed=5))
        residual = norm(x, drawn(64, 64, seed=4))[1]
        total = drawn(64, 64) + drawn(64, 64, seed=4)
        residual._rows.progress.finish()
        y = norm(later, residual)[1]
        assert residual.pieces is not None
        residual.add_(1)
        assert torch.equal(y, drawn(64, 64, seed=5) + total) and torch.equal(residual, total + 1)


def test_rows_in_another_place_are_waited_for():
    """Of [heads, tokens, ...] a module by rows would get heads."""
    with torch.inference_mode():
        x, asked = sent(drawn(64, 64))
        y = by_rows(GATE, GATE, x.view(64, 8, 8).transpose(0, 1).reshape(64, 64))
        assert asked == [0, 1, 2] and not is_unfinished(y)


def test_a_module_that_returns_something_else_later_is_an_error():
    class Fickle(torch.nn.Module):
        def forward(self, x):
            return x if x.shape[0] == 16 else x.double()

    with torch.inference_mode():
        x, _ = sent(drawn(64, 64))
        fickle = Fickle()
        y = by_rows(fickle, fickle, x)
        with pytest.raises(RuntimeError, match="Fickle was expected to return"):
            finished(y)


def test_a_module_that_returns_another_number_of_rows_is_an_error():
    class Dropping(torch.nn.Module):
        """Leaves out a row of each chunk but the trial."""

        def forward(self, x):
            return x if not x.any() else x[1:]

    with torch.inference_mode():
        x, _ = sent(drawn(64, 64))
        dropping = Dropping()
        y = by_rows(dropping, dropping, x)
        with pytest.raises(RuntimeError, match="Dropping was given 16 rows, and returned 15"):
            finished(y)


def test_a_module_that_writes_to_finished_rows_runs_after_their_readers():
    class Writing(torch.nn.Module):
        def forward(self, x):
            return x.add_(1)

    with torch.inference_mode():
        x, _ = sent(drawn(64, 64))
        second, writing = Noted(), Writing()
        z = norm(x, drawn(64, 64, seed=4))[1]
        y = by_rows(second, second, z)
        z._rows.progress.finish()
        by_rows(writing, writing, z, writes=True)
        assert torch.equal(finished(y), (drawn(64, 64) + drawn(64, 64, seed=4)) * 2)


def test_rows_that_nobody_reads_are_gone_at_once():
    with torch.inference_mode():
        x, asked = sent(drawn(64, 64))
        module = Noted()
        y = by_rows(module, module, x)
        rows = weakref.ref(y._rows.progress)
        del y
        assert rows() is None and asked == []


def test_pieces_have_one_memory_whoever_asks_for_it():
    pieces = RowPieces((4, 2), torch.float32, torch.device("cpu"), (2, 2))
    pieces.rows[0] = torch.ones(2, 2)
    memory = pieces.joined()
    pieces.rows[1].fill_(2)
    assert pieces.joined() is memory
    assert memory.tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]
