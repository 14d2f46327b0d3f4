"""On NPUs the loop of chunks runs in C++, also beside transfer_to_npu, which wraps functions that it stands for."""

import torch.distributed as dist
from programs import device


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
