"""Random programs of modules by rows, operators, views and changes in place: they compute what finished tensors do."""

import random

import pytest
import torch
import torch.nn.functional as F

from ascend_parallel.ops.lazy_rows import LazyRows, Rows
from ascend_parallel.ops.unfinished import UnfinishedTensor, finished
from ascend_parallel.ops.unfinished_modules import by_rows

ROWS, FEATURES = 64, 16
CUTS = ((16, 32, 16), (16, 32, 16), (10, 54), (5, 20, 30, 9))  # rows that are cut alike pass in pieces
STEPS, PROGRAMS = 30, 25


class Norm(torch.nn.Module):
    """A norm with a residual that writes to its inputs."""

    def forward(self, x, residual):
        residual.add_(x)
        return x.copy_(F.rms_norm(residual, residual.shape[-1:])), residual


class Gate(torch.nn.Module):
    """An activation that keeps its latest input, and fails for a share of its calls, but not in its trial."""

    def __init__(self, draw, share):
        super().__init__()
        self.draw, self.share, self.kept = draw, share, None

    def forward(self, x):
        self.kept = x
        if x.any() and self.draw.random() < self.share:
            raise ZeroDivisionError
        return x.tanh()


class Program:
    """Pairs of tensors with the same values: rows of the first may be on their way, the second is torch's own."""

    def __init__(self, seed, share):
        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.norm, self.gate = Norm(), Gate(random.Random(seed), share)
        self.weight, self.pairs = self.drawn(FEATURES), []
        self.steps = [self.arriving, self.here, self.activated, self.normed, self.normed, self.computed, self.viewed]
        self.steps += [self.dropped, self.dropped, self.read]
        # A change in place that fails is its caller's to make up for.
        self.steps += [] if share else [self.changed, self.changed]

    def drawn(self, rows=ROWS):
        return torch.randn(rows, FEATURES, generator=self.generator)

    def run(self):
        self.arriving()
        for _ in range(STEPS):
            self.draw.choice(self.steps)()
        for pair in self.pairs:
            self.equal(*pair)

    def pick(self, count=2):
        """Return tensors on their way, and those of torch with the same values."""
        return zip(*self.draw.choices(self.pairs, k=count), strict=True)

    def until_it_succeeds(self, function):
        while True:
            try:
                return function()
            except ZeroDivisionError:
                continue

    def equal(self, ours, plain):
        ours = self.until_it_succeeds(lambda: finished(ours))
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5, equal_nan=True)

    def arriving(self):
        value, sizes = self.drawn(), self.draw.choice(CUTS)
        memory, pieces = torch.full_like(value, torch.nan), value.split_with_sizes(sizes)
        rows = LazyRows(sizes, lambda index: memory.split_with_sizes(sizes)[index].copy_(pieces[index]))
        self.pairs.append((UnfinishedTensor(memory, Rows(rows, 1, 1)), value.clone()))

    def here(self):
        value = self.drawn() * 1
        self.pairs.append((value, value.clone()))

    def activated(self):
        (x,), (plain,) = self.pick(1)
        self.pairs.append((self.until_it_succeeds(lambda: by_rows(self.gate, self.gate, x)), plain.tanh()))

    def normed(self):
        ours, plain = self.pick()
        made = self.until_it_succeeds(lambda: by_rows(self.norm, self.norm, *ours, writes=True))
        writes = not isinstance(made[0], UnfinishedTensor)  # all rows are there, or they lie in another dimension
        self.pairs += zip(made, self.norm(*(x if writes else x.clone() for x in plain)), strict=True)

    def computed(self):
        function = self.draw.choice(
            [
                lambda x, y: x @ self.weight,
                lambda x, y: x * 1.5,
                lambda x, y: 0.5 * (x + y),
                lambda x, y: x.detach(),
                lambda x, y: torch.cat([x[:, :4] * 2, y[:, 4:]], 1),
            ]
        )
        ours, plain = self.pick()
        self.pairs.append((self.until_it_succeeds(lambda: function(*ours)), function(*plain)))

    def viewed(self):
        (x,), (plain,) = self.pick(1)
        self.pairs.append((x.view(1, ROWS, FEATURES)[0], plain.view(1, ROWS, FEATURES)[0]))

    def dropped(self):
        if len(self.pairs) > 1:
            self.pairs.pop(self.draw.randrange(len(self.pairs)))

    def read(self):
        rows = self.draw.randrange(1, ROWS)
        function = self.draw.choice(
            [
                lambda x: x[:rows].sum(),
                lambda x: x[rows:] * 1,
                lambda x: x[torch.tensor([rows, 3])],
                lambda x: torch.from_numpy(x.numpy().copy()),
                lambda x: torch.tensor(x.data_ptr() % 8),
            ]
        )
        (x,), (plain,) = self.pick(1)
        self.equal(self.until_it_succeeds(lambda: finished(function(x))), function(plain))

    def changed(self):
        rows = self.draw.randrange(1, ROWS)
        function = self.draw.choice(
            [
                lambda x, y: x.add_(1),
                lambda x, y: x.mul_(y).tanh_(),
                lambda x, y: x[:rows].add_(2),
                lambda x, y: x.copy_(y),
                lambda x, y: torch.fill_(x.view(-1)[rows:], 0.5),
            ]
        )
        for pair in self.pick():
            function(*pair)


@pytest.mark.parametrize("share", [0, 0.3], ids=["changes", "errors"])
def test_a_random_program_computes_what_finished_tensors_do(share):
    for seed in range(PROGRAMS):
        program = Program(seed, share)
        with torch.inference_mode():
            program.run()
