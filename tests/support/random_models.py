"""Draws small models of one operator a module, whose shapes fit, for tests that run random plans of them.

A model is a list of steps, each (operator, its options, the values that it reads). Value 0 is the model's input; the
values that no step reads are the model's outputs.
"""

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

SIZES = (4, 8, 6, 2, 3, 1)
FUNCTIONS = {"gelu": F.gelu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": F.relu, "scale": lambda x: x * 0.5}
JOINTS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}


class Apply(nn.Module):
    """A function of tensors."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


class Product(nn.Module):
    """A matmul with a weight that is no linear layer's."""

    def __init__(self, width, wide):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, wide) / width)

    def forward(self, x):
        return x @ self.weight


class Buffered(nn.Module):
    """Adds a buffer and a sum of means, which it updates in place, and multiplies with a constant."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("bias", torch.randn(width))
        self.register_buffer("running", torch.zeros(width))

    def forward(self, x):
        self.running.add_(x.detach().reshape(-1, x.shape[-1]).mean(0))
        return (x + self.bias - self.running) * torch.tensor(0.75, dtype=x.dtype)


class Tokens(nn.Module):
    """An embedding of tokens that it holds, added to the rows of its input."""

    def __init__(self, rows, width):
        super().__init__()
        self.table = nn.Embedding(8, width)
        self.register_buffer("tokens", torch.randint(8, (rows,)))

    def forward(self, x):
        return x + self.table(self.tokens)


class Loss(nn.Module):
    """The cross-entropy of each row's classes."""

    def __init__(self, rows, classes, reduction):
        super().__init__()
        self.register_buffer("targets", torch.randint(classes, (rows,)))
        self.reduction = reduction

    def forward(self, x):
        return F.cross_entropy(x.flatten(0, -2), self.targets, reduction=self.reduction)


class Drawn(nn.Module):
    """Runs steps."""

    def __init__(self, spec):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Parameter(torch.linspace(0.5, 1.5, spec["shape"][-1]))
        self.reads, self.steps = [reads for _, _, reads in spec["steps"]], nn.ModuleList()
        for name, options, _ in spec["steps"]:
            self.steps.append(self.step(name, *options))
        read = {number for reads in self.reads for number in reads}
        self.unread = [number for number in range(spec["values"]) if number not in read]

    def step(self, name, *options):
        if name == "tied":  # a second reader of the weight of an earlier linear layer
            layer = nn.Linear(*options[1:], bias=True)
            layer.weight = self.steps[options[0]].weight
            return layer
        return MAKERS[name](*options)

    def forward(self, x):
        values = [x * self.first]
        for reads, step in zip(self.reads, self.steps, strict=True):
            found = step(*(values[number] for number in reads))
            values += found if isinstance(found, (tuple, list)) else [found]
        return [values[number] for number in self.unread]


MAKERS = {
    "linear": lambda width, wide, bias: nn.Linear(width, wide, bias=bias),
    "product": Product,
    "buffered": Buffered,
    "tokens": Tokens,
    "loss": Loss,
    "norm": lambda width: nn.LayerNorm(width),
    "batch_norm": lambda width: nn.BatchNorm1d(width),
    "dropout": lambda: nn.Dropout(0.0),
    "function": lambda name: Apply(FUNCTIONS[name]),
    "softmax": lambda dim: Apply(lambda x: x.softmax(dim)),
    "joint": lambda name: Apply(JOINTS[name]),
    "gram": lambda: Apply(lambda x: x @ x.mT / x.shape[-1]),
    "transpose": lambda one, other: Apply(lambda x: x.transpose(one, other)),
    "flatten": lambda dim: Apply(lambda x: x.flatten(dim, dim + 1)),
    "unflatten": lambda dim, count: Apply(lambda x: x.unflatten(dim, (count, -1))),
    "sum": lambda dim, keep: Apply(lambda x: x.sum(dim, keepdim=keep) / x.shape[dim]),
    "mean": lambda dim, keep: Apply(lambda x: x.mean(dim, keepdim=keep)),
    "cat": lambda dim: Apply(lambda *tensors: torch.cat(tensors, dim)),
    "split": lambda dim, count: Apply(lambda x: x.chunk(count, dim)),
}


@st.composite
def models(draw, least=4, most=8):
    """Draw {"shape": the input's, "steps": as above, "values": how many there are}."""
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    shapes, steps = [shape], []
    linear = {}  # (width, wide): the first such layer
    for _ in range(draw(st.integers(least, most))):
        number = draw(st.one_of(st.just(len(shapes) - 1), st.integers(0, len(shapes) - 1)))
        name, *options = draw(st.sampled_from(possible(shapes[number], linear)))
        if name == "wide":
            name, options = draw(st.sampled_from(("linear", "product"))), [shapes[number][-1], draw(SIZE)]
            options += [draw(st.booleans())] if name == "linear" else []
        reads = [number]
        if name in ("joint", "cat"):
            fitting = [each for each, other in enumerate(shapes) if fits(name, shapes[number], other)]
            reads.append(draw(st.sampled_from(fitting)))
        if name == "linear":
            linear.setdefault(tuple(options[:2]), len(steps))
        steps.append((name, tuple(options), tuple(reads)))
        shapes += outcome(steps[-1], [shapes[each] for each in reads])
    return {"shape": shape, "steps": steps, "values": len(shapes)}


SIZE = st.sampled_from(SIZES)


def fits(name, shape, other):
    """Tell whether a second tensor can be joined."""
    if name == "cat":
        return shape == other
    longest = zip(reversed(shape), reversed(other), strict=False)
    return len(other) <= len(shape) and all(size in (1, most) for most, size in longest)


def possible(shape, linear):
    """Return the steps that fit a tensor of this shape."""
    dims, width = len(shape), shape[-1] if shape else 0
    found = [("function", name) for name in FUNCTIONS] + [("joint", name) for name in JOINTS] + [("dropout",)]
    if not dims:
        return found
    rows = shape[-2] if dims > 1 else 1
    found += [("wide",)] * 5 + [("buffered", width)] * 3 + [("tokens", rows, width)] * 2
    found += [("tied", number, *sizes) for sizes, number in linear.items() if sizes[0] == width] * 3
    found += [(name, dim, keep) for name in ("sum", "mean") for dim in range(dims) for keep in (False, True)]
    found += [(name, dim) for name in ("softmax", "cat") for dim in range(dims)]
    found += [("split", dim, 2) for dim in range(dims) if shape[dim] % 2 == 0]
    if width > 2:
        found += [("norm", width)] * 2
    if dims > 1:
        found += [("gram",)] + [("transpose", dim - 1, dim) for dim in range(1, dims)]
        found += [("flatten", dim) for dim in range(dims - 1)]
        found += [("loss", torch.Size(shape[:-1]).numel(), width, reduction) for reduction in ("mean", "sum", "none")]
    if dims == 2 and shape[0] > 2:
        found += [("batch_norm", width)] * 2
    if dims < 3:
        found += [("unflatten", dim, 2) for dim in range(dims) if shape[dim] % 2 == 0]
    return found


def outcome(step, shapes):
    """Return the shapes of a step's outputs."""
    name, options, _ = step
    if name == "tied":
        return [(*shapes[0][:-1], options[2])]
    with torch.device("meta"):
        found = MAKERS[name](*options)(*(torch.empty(shape) for shape in shapes))
    return [tuple(each.shape) for each in (found if isinstance(found, (tuple, list)) else [found])]
