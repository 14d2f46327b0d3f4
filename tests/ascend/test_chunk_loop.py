"""On NPUs the loop of chunks runs in C++, also beside transfer_to_npu, which wraps functions that it stands for."""

import pytest
import torch
import torch.distributed as dist
from programs import counted, device, error, part

from ascend_parallel import Settings, row_linear


def loops(shape):
    """Return whether a call has a loop in C++: before transfer_to_npu, with it, and with a function of a program's."""
    import torch

    from ascend_parallel.ops.chunk_loop import chunk_loop

    x = torch.ones(shape, device=device())
    found = [chunk_loop(dist.group.WORLD, x, x) is not None]
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    found.append(chunk_loop(dist.group.WORLD, x, x) is not None)
    own = torch.empty_like
    torch.empty_like = lambda *given, **options: own(*given, **options)
    found.append(chunk_loop(dist.group.WORLD, x, x) is not None)
    torch.empty_like = own
    return found


def test_the_loop_in_cpp_runs_beside_transfer_to_npu_and_not_beside_a_programs_function(ranks):
    assert ranks().run(loops, (64, 64)) == [[True, True, False]] * 2


def row_forward(rows, k, n, sequence):
    """Return the error of a row layer's forward with a weight [n, k], and the calls of CANN and HCCL that it made."""
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64).bfloat16() for shape in ((rows, k), (n, k)))
    given = [part(each, -1).to(device()) for each in (x, weight)]
    ways = {"group": dist.group.WORLD, "settings": Settings(num_chunks=4, customized_coc={(rows, k // 2, n): 4})}
    with torch.no_grad():
        y, numbers = counted(row_linear, *given, sequence_parallel=sequence, **ways)
    truth = x.double() @ weight.double().t()
    return error(y, part(truth, 0) if sequence else truth), numbers


# [rows, k of a rank, n]: a weight lies by its columns, and is copied nowhere but where K is padded to 512 bytes.
ALIGNED = {
    "as it is": ((2048, 512, 512), 0),
    "rows of no 512 bytes": ((2000, 512, 512), 0),
    "K of neither 32 nor 512 bytes": ((2048, 1030, 512), 2),
}


@pytest.mark.parametrize("what", ALIGNED)
@pytest.mark.parametrize("sequence", [False, True])
def test_the_weight_of_a_row_layer_is_copied_only_where_k_is_padded(ranks, sequence, what):
    """As in MindSpeed: a copy of a weight in each call takes a tenth of the matmul's time."""
    (rows, k, n), copies = ALIGNED[what]
    for deviation, numbers in ranks().run(row_forward, rows, 2 * k, n, sequence):
        assert deviation < 2e-2
        matmuls = sum(number for name, number in numbers.items() if "Mm" in name or "MatMul" in name)
        others = sum(number for name, number in numbers.items() if not name.startswith("Hccl")) - matmuls
        assert (matmuls, others) == (4, copies), numbers
