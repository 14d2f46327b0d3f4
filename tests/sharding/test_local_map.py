"""local_map: functions of the ranks' parts, their results and gradients against one card in float64."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from ascend_parallel.sharding import (
    ProcessMesh,
    TraceError,
    dtensor_from_local,
    local_map,
    shard_tensor,
    trace,
    unshard,
)

SUM = Partial("sum")


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((8, 6), (6, 4), (4,))]


def parts_of(x, w, b):
    """Return rows of a product, a number of the weights alone, and a sum over rows."""
    return torch.tanh(x @ w + b), {"decay": w.square().sum(), "squares": (x @ w).square().sum()}


def loss_of(rows, others):
    return rows.square().sum() + 2 * others["squares"] + 3 * others["decay"]


# Placements on a mesh of dp and mp: of the arguments x, w and b, and of the three results.
WHOLE, ROWS = [Replicate(), Replicate()], [Shard(0), Replicate()]
LAYOUTS = {
    "rows": ([ROWS, WHOLE, WHOLE], [ROWS, WHOLE, [SUM, Replicate()]]),
    "rows and columns": (
        [ROWS, [Replicate(), Shard(1)], [Replicate(), Shard(0)]],
        [[Shard(0), Shard(1)], [Replicate(), SUM], [SUM, SUM]],
    ),
}


def mapped(_group, layout):
    mesh, (arguments, results) = ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"]), LAYOUTS[layout]
    given = [shard_tensor(tensor.requires_grad_(), mesh, WHOLE) for tensor in tensors()]
    rows, others = local_map(parts_of, results, arguments, mesh, reshard_inputs=True)(*given)
    loss = unshard(loss_of(rows, others))
    loss.backward()
    with pytest.raises(ValueError, match=r"lies as .* and in_placements has"):
        local_map(parts_of, results, arguments)(*given)
    with pytest.raises(ValueError, match="has 2 entries, and func returned 3"):
        local_map(parts_of, results[:2])(*given)
    with pytest.raises(ValueError, match="plain tensor that requires a gradient"):
        local_map(parts_of, results)(given[0], *(tensor.requires_grad_() for tensor in tensors()[1:]))
    with pytest.raises(ValueError, match=r"give Partial\('sum'\)"):
        local_map(parts_of, [[Partial("max"), Replicate()]])
    with pytest.raises(ValueError, match="of which ranks have terms"):
        local_map(torch.tanh, [WHOLE])(dtensor_from_local(torch.ones(2), mesh, [SUM, Replicate()]))
    with pytest.raises(ValueError, match="gets tensors on no mesh"):
        local_map(torch.tanh, [WHOLE])(torch.ones(2))
    return loss.item(), [unshard(tensor.grad) for tensor in given], rows.placements


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_whole_computation(ranks, layout):
    whole = [tensor.requires_grad_() for tensor in tensors()]
    loss = loss_of(*parts_of(*whole))
    loss.backward()
    for found, gradients, placements in ranks(4).run(mapped, layout):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(gradients, [tensor.grad for tensor in whole], rtol=1e-12, atol=1e-12)
        assert placements == tuple(LAYOUTS[layout][1][0])


def test_a_traced_forward_names_what_to_use():
    class Model(torch.nn.Module):
        def forward(self, x):
            return local_map(torch.tanh, [[Replicate()]])(x)

    with pytest.raises(TraceError, match="local_map in a forward that is traced: register_rule"):
        trace(Model(), (torch.ones(2),))
