"""Real layers called with verification on, for tests."""

from contextlib import contextmanager

import torch
from layers import Layers, same

import ascend_parallel


@contextmanager
def verifying(group, **settings):
    """Real layers with verification, reports from scratch."""
    from ascend_parallel.diagnostics.verify import LEDGER

    with Layers(group.size()) as layers:
        LEDGER.clear()
        ascend_parallel.configure(**{"num_chunks": 4, "verify_every": 1, **settings})
        yield layers
        LEDGER.clear()


def run(layer, shape, seed=0, backward=True, call=None, dtype=torch.float32):
    """Call a layer on reproducible numbers and return all results by name."""
    torch.manual_seed(seed)
    x = torch.randn(shape, dtype=dtype).requires_grad_(backward)
    y, bias = (call or type(layer).__call__)(layer, x)
    if backward:
        torch.manual_seed(seed + 1)
        (y * torch.randn(y.shape, dtype=y.dtype)).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y, "returned bias": bias, "dx": x.grad, "main_grad": getattr(layer.weight, "main_grad", None), **grads}


def with_and_without(group, kind, shape, options, settings, prepare=None, **how):
    """Run two layers alike, verified and not; return what differs and the report."""
    from ascend_parallel.diagnostics.verify import LEDGER

    runs = []
    with verifying(group, **settings) as layers:
        for every in (0, 1):
            ascend_parallel.configure(**{"num_chunks": 4, **settings, "verify_every": every})
            LEDGER.clear()
            layer = layers.make(kind, **{"sizes": (96, 96), **options})
            if prepare is not None:
                prepare(layer)
            runs.append(run(layer, shape, seed=group.rank(), **how))
        found = ascend_parallel.verification()
    return [name for name in runs[0] if not same(runs[0][name], runs[1][name])], found


@contextmanager
def planted(module, name, change):
    """Replace a function of a module, for the time of a test, by one whose result is changed."""
    original = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: change(original(*args, **kwargs)))
    yield
    setattr(module, name, original)
