"""torch.compile with this package's kernels of symm_mem, and nothing stale from torch's caches."""

import uuid
from contextlib import contextmanager

import torch

import ascend_parallel


@contextmanager
def compiling(tag):
    """Switch the pass on, in 2 chunks; with `tag`, what earlier runs left in torch's caches on disk is not found."""
    import torch._inductor.config as options

    ascend_parallel.configure(num_chunks=2)
    torch._dynamo.reset()
    try:
        with options.patch(_micro_pipeline_tp=True, compile_threads=1), torch.compiler.config.patch(cache_key_tag=tag):
            yield
            ascend_parallel.unregister_symm_mem()
    finally:
        ascend_parallel.unregister_symm_mem()
        ascend_parallel.configure()
        torch._dynamo.reset()


def fresh():
    return uuid.uuid4().hex
