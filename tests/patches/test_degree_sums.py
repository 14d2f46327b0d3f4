"""COC_DETERMINISTIC=tp and what torch itself computes of sharded DTensors: the same bits at every degree, or an error.

The lists have torch's public functions that sum, multiply or normalise, and all optimizers of torch.optim.
"""

import pytest
import torch
from every_degree import at_degrees, digest
from marks import promise
from pairwise import base_choice
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy, layer_norm, mse_loss, normalize, softmax

import ascend_parallel
from ascend_parallel.ops import DegreeError

pytestmark = promise("degree-sums")

TREE = {"deterministic": "tp"}
SHAPE, STEPS = (344, 48), 3


def full_tensor(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


FUNCTIONS = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "sum of columns": lambda x: x.sum(1),
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0),
    "mean of columns": lambda x: x.mean(-1),
    "nansum": lambda x: torch.nansum(x),
    "variance": lambda x: x.var(),
    "standard deviation": lambda x: x.std(0),
    "product": lambda x: x.prod(),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "softmax": lambda x: softmax(x, 1),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=0),
    "matrix norm": lambda x: torch.linalg.matrix_norm(x),
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "total norm": lambda x: torch.nn.utils.get_total_norm([x], 3),
    "normalize": lambda x: normalize(x, dim=0),
    "distance": lambda x: torch.dist(x, x * 2),
    "dot": lambda x: torch.dot(x.flatten(), x.flatten()),
    "inner": lambda x: torch.inner(x, x),
    "mm": lambda x: x.t() @ x,
    "linear": lambda x: torch.nn.functional.linear(x, x),
    "matmul with whole rows": lambda x: x @ replicated(x, torch.ones(48, 5)),
    "matmul with whole columns": lambda x: replicated(x, torch.ones(5, 344)) @ x,
    "bmm": lambda x: torch.bmm(x.unsqueeze(0).mT, x.unsqueeze(0)),
    "einsum": lambda x: torch.einsum("ij,ik->jk", x, x),
    "cumsum": lambda x: x.cumsum(0),
    "layer norm": lambda x: layer_norm(x, SHAPE[1:]),
    "mse": lambda x: mse_loss(x, x * 0.5),
    "cross entropy": lambda x: cross_entropy(x, replicated(x, torch.arange(344) % 48)),
    "max": lambda x: x.max(),
    "amin": lambda x: x.amin(0),
    "any": lambda x: (x > 2).any(),
    "count": lambda x: (x > 0).sum(),
    "largest magnitude": lambda x: torch.linalg.vector_norm(x.detach(), float("inf")),  # torch's gradient is NaN
    "redistribute": lambda x: x.redistribute(placements=[Replicate()]),
}


def replicated(x, y):
    return distribute_tensor(y, x.device_mesh, [Replicate()])


def drawn(seed, *shape):
    return torch.randn(*(shape or SHAPE), generator=torch.Generator().manual_seed(seed))


def tried(run):
    """Return digests of what `run()` returns; "error" for a refusal, and "torch" for what torch cannot do."""
    try:
        return run()
    except DegreeError as error:
        assert "COC_DETERMINISTIC=tp" in str(error)
        return "error"
    except (RuntimeError, NotImplementedError) as error:
        return "error" if "COC_DETERMINISTIC=tp" in str(error) else f"torch: {str(error)[:60]}"


def of_functions(group, name):
    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(**TREE)
    try:
        found = {}
        for dim in (0, 1):
            x = distribute_tensor(drawn(dim), mesh, [Shard(dim)]).requires_grad_()
            found[dim] = tried(lambda x=x: digest(full_tensor(FUNCTIONS[name](x)).double()))
            found[dim, "gradient"] = tried(lambda x=x: gradient(name, x))
        return found
    finally:
        ascend_parallel.configure(num_chunks=1)


def gradient(name, x):
    y = full_tensor(FUNCTIONS[name](x))
    if not y.requires_grad:
        return "none"
    (y * drawn(3, *y.shape)).sum().backward() if y.ndim else y.backward()
    return digest(full_tensor(x.grad))


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_sharded_tensor_has_the_same_bits_at_every_degree_or_is_an_error(ranks, name):
    one, two, four = at_degrees(ranks, of_functions, name)
    for place, bits in one.items():
        for found in (two[place], four[place]):
            assert found in (bits, "error") or found.startswith("torch"), place


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)
PRODUCTS = {"Muon": "torch.optim._muon._zeropower_via_newtonschulz: mm of a sharded DTensor"}
NOT_BY_TORCH = {  # what torch cannot do with DTensors
    "Adafactor": "in-place operations that require placement changes are not supported",
    "Rprop": "in-place operations that require placement changes are not supported",
    "SparseAdam": "does not support dense gradients",
}


def bowl(weights):
    """Set gradients that depend on the weights; return a loss."""
    for number, weight in enumerate(weights):
        aim = distribute_tensor(drawn(7 + number), weight.device_mesh, weight.placements)
        weight.grad = weight.detach() * 0.3 - aim
    return 1.0


def of_optimizer(group, name, dims):
    """Return digests of weights after some steps, or the error."""
    mesh = init_device_mesh("cpu", (group.size(),))
    weights = [torch.nn.Parameter(distribute_tensor(drawn(dim), mesh, [Shard(dim)])) for dim in dims]
    ascend_parallel.configure(**TREE)
    try:
        optimizer = getattr(torch.optim, name)(weights)
        for _ in range(STEPS):
            optimizer.step(lambda: bowl(weights))
        return [digest(full_tensor(weight)) for weight in weights]
    except (DegreeError, RuntimeError) as error:
        return str(error)
    finally:
        ascend_parallel.configure(num_chunks=1)


@pytest.mark.sample("Muon-(0, 1)", "LBFGS-(0,)", "AdamW-(0, 1)")
@pytest.mark.parametrize(("name", "dims"), base_choice(OPTIMIZERS, [(0, 1), (0,)], ("LBFGS", (0, 1))), ids=str)
def test_an_optimizer_has_the_same_bits_at_every_degree_or_is_an_error(ranks, name, dims):
    one, *others = at_degrees(ranks, of_optimizer, name, dims)
    for found in others:
        if name in NOT_BY_TORCH:
            assert NOT_BY_TORCH[name] in one and NOT_BY_TORCH[name] in found
        elif name in PRODUCTS:
            assert f"COC_DETERMINISTIC=tp: {PRODUCTS[name]}" in found
        else:
            assert isinstance(one, list) and found == one


@on_ranks(2)
def test_without_it_torch_computes_them(group):
    """Also after it was in force, in the order of its own sums."""
    x = distribute_tensor(drawn(0), init_device_mesh("cpu", (group.size(),)), [Shard(0)])
    for _ in range(2):
        torch.testing.assert_close(full_tensor(x.sum()).double(), drawn(0).double().sum(), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(full_tensor(x.t() @ x), drawn(0).t() @ drawn(0), rtol=1e-4, atol=1e-3)
        ascend_parallel.configure(**TREE)
        ascend_parallel.configure(num_chunks=1)
