"""COC_DETERMINISTIC=tp and sizes that are no whole vectors: which elements come last depends on the degree."""

import pytest
import torch
import torch.nn.functional as F
from every_degree import at_degrees, digest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ascend_parallel

pytest.importorskip("transformers", reason="transformers is not installed")

from hugging_face import load, write
from marks import promise

from ascend_parallel.ops.elementwise import ELEMENTWISE
from ascend_parallel.patches.transformers import on_one_rank

TREE = {"deterministic": "tp"}
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "mish in place": lambda x: F.mish(x * 1, inplace=True),
    "transposed": lambda x: F.silu(x.t()).t(),
    "powers and roots": lambda x: x.abs() ** 1.5 * torch.rsqrt(x.square() + 1),
}


def own_silu(x):
    """torch's own kernel, up to the next product."""
    ELEMENTWISE.follow(False)
    return F.silu(x)


class Mlp(torch.nn.Module):
    """A learned scale of the features stands for an adapter: its gradient is a sum over tokens."""

    def __init__(self, hidden, inner, activation):
        super().__init__()
        self.up, self.down = torch.nn.Linear(hidden, inner), torch.nn.Linear(inner, hidden)
        self.activation = activation

    def forward(self, x):
        z = self.up(x)
        self.scale = torch.ones(z.shape[-1], dtype=z.dtype, requires_grad=True)
        return self.down(self.activation(z) * self.scale)


def full_tensor(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gathered(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor, group=group)
    return torch.cat(parts)


def step_of(model, x, group):
    y = model(x)
    y.square().mean().backward()
    found = {name: digest(full_tensor(p.grad)) for name, p in model.named_parameters()}
    return {"y": digest(y), "dx": digest(x.grad), "scale": digest(gathered(model.scale.grad, group)), **found}


def mlps(group, shape, names, dtype, threads=1):
    tokens, hidden, inner = shape
    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(**TREE)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = {}
        for name in names:
            torch.manual_seed(1)
            model = Mlp(hidden, inner, {**ACTIVATIONS, "own": own_silu}[name]).to(dtype)
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
            found[name] = step_of(model, x, group)
        return found
    finally:
        torch.set_num_threads(before)
        ascend_parallel.configure(num_chunks=1)


@promise("degree-tails")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_of_features_that_are_no_whole_vectors(ranks, dtype):
    one, two, four = at_degrees(ranks, mlps, (7, 64, 344), list(ACTIVATIONS), dtype)
    assert two == one
    assert four == one


@pytest.mark.slow
def test_torchs_own_kernels_differ(ranks):
    """The comparison above can fail."""
    found = at_degrees(ranks, mlps, (7, 64, 344), ["own"], torch.float32)
    assert len({degree["own"]["y"] for degree in found}) > 1


def test_shares_of_threads_have_no_tails(ranks):
    found = at_degrees(ranks, mlps, (257, 64, 1024), ["silu", "gelu"], torch.float32, 3, degrees=(1, 2))
    assert found[0] == found[1]


def llama(group, paths):
    """The losses and gradients of models whose loss is of all tokens but the last: 2 sequences of 12 rows."""
    found = []
    for path in paths:
        model = load(group, path, torch.float32, tensor_parallel=group.size() > 1).train()
        model = model if group.size() > 1 else on_one_rank(model)
        ascend_parallel.configure(**TREE)
        try:
            ids = torch.randint(480, (2, 13), generator=torch.Generator().manual_seed(3))
            loss = F.cross_entropy(full_tensor(model(input_ids=ids[:, :-1]).logits).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        finally:
            ascend_parallel.configure(num_chunks=1)
        found.append(
            {"loss": loss.item().hex(), **{n: digest(full_tensor(p.grad)) for n, p in model.named_parameters()}}
        )
    return found


@promise("degree-tails")
def test_a_llama_of_odd_inner_sizes(ranks, tmp_path):
    heads = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
    paths = [write(tmp_path / str(inner), "Llama", **heads, intermediate_size=inner) for inner in (344, 1000)]
    one, two, four = at_degrees(ranks, llama, paths)
    assert two == one
    assert four == one
