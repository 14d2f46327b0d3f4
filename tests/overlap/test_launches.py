"""What a layer asks of a device whose backend does not block the host: collectives, matmuls, copies, calls of torch."""

import pytest
import torch
from backends import GroupedSends, as_backend
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_parallel import Settings, column_linear, row_linear

CHUNKS, ROWS, K, N = 4, 256, 32, 48
MATMULS = ("aten::mm", "aten::bmm", "aten::addmm")
COPIES = ("aten::copy_", "aten::clone", "aten::cat", "aten::_to_copy", "aten::add")
# Calls of torch on 2 ranks, forward and backward, when chunks were still gathered into lists.
WITH_LISTS = {("column", True): (31, 52), ("row", True): (38, 35), ("row", False): (13, 7), ("column", False): (2, 17)}


class Calls(TorchDispatchMode):
    """Counts the calls of torch in this thread."""

    def __enter__(self):
        self.names, self._sends = [], GroupedSends.started
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error):
        super().__exit__(*error)
        self.names += ["c10d::alltoall_"] * (GroupedSends.started - self._sends)

    def numbers(self):
        collectives = sum(name.startswith("c10d::") for name in self.names)
        matmuls, copies = (sum(map(self.names.count, of)) for of in (MATMULS, COPIES))
        return {"calls": len(self.names), "collectives": collectives, "matmuls": matmuls, "copies": copies}


def layer(group, kind, sequence_parallel, chunks):
    """Return forward and backward of a layer as functions, and its results."""
    generator = torch.Generator().manual_seed(group.rank())
    wide = sequence_parallel and kind == "column"
    x = torch.randn(ROWS // group.size() if wide else ROWS, K, generator=generator).requires_grad_()
    weight = torch.randn(N, K, generator=generator).requires_grad_()
    run = column_linear if kind == "column" else row_linear
    made = {}

    def forward():
        settings = Settings(num_chunks=chunks, chunk_rows=8)
        made["y"] = run(x, weight, group=group, settings=settings, sequence_parallel=sequence_parallel)

    def backward():
        x.grad = weight.grad = None
        y = made["y"]
        y.backward(torch.ones_like(y) if chunks == 1 else made["ones"])

    def results():
        return [made["y"].detach(), x.grad, weight.grad]

    return forward, backward, results, made


def counted(group, name, kind, sequence_parallel):
    forward, backward, results, made = layer(group, kind, sequence_parallel, 1)
    forward()
    backward()
    plain = results()
    forward, backward, results, made = layer(group, kind, sequence_parallel, CHUNKS)
    numbers = []
    with as_backend(name, group):
        for _ in range(2):  # the first call asks the machine about bits
            forward()
            made["ones"] = torch.ones_like(made["y"])
            backward()
        for call in (forward, backward):
            with Calls() as calls:
                call()
            numbers.append(calls.numbers())
    same = [torch.equal(ours, theirs) for ours, theirs in zip(results(), plain, strict=True)]
    return numbers, same


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ["nccl", "hccl"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("kind", "sequence_parallel"), list(WITH_LISTS))
def test_a_device_gets_few_launches_and_no_copies(ranks, kind, sequence_parallel, count, name):
    made = ranks(count).run(counted, name, kind, sequence_parallel)
    for rank, (numbers, same) in enumerate(made):
        summed = 0 if kind == "row" else 1  # more than two ranks are summed in another order than plain's
        assert all(same) or (count > 2 and all(same[:summed] + same[summed + 1 :])), same
        for direction, each in zip(("forward", "backward"), numbers, strict=True):
            gathers = (kind, direction) in (("column", "forward"), ("row", "backward")) and sequence_parallel
            # No stride leads over the rows of a rank between the first and the last: two launches for its peers.
            launches = 2 if gathers and 0 < rank < count - 1 else 1
            # Of 2 ranks a rank's own rows are half of all: the gather runs whole under their product.
            chunks = 1 if gathers and count == 2 else CHUNKS
            weight_gradient = direction == "backward"
            assert each["matmuls"] <= chunks * launches + gathers + weight_gradient, each
            # Backward of a column layer gathers its input too, whole: the weight gradient reads all rows at once.
            again = kind == "column" and direction == "backward" and sequence_parallel
            assert each["collectives"] in (0, chunks + again), each
            # Gathered rows that the weight gradient reads have this rank's own rows; a buffer is copied to its places.
            kept = gathers and direction == "backward"
            copies = (CHUNKS if name == "hccl" else 1) if kept and count > 2 else 0
            assert each["copies"] == copies, each
            if count == 2:
                assert each["calls"] <= WITH_LISTS[kind, sequence_parallel][weight_gradient], each
