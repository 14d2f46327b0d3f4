"""How many bytes of tensors are alive at once while a function runs."""

import gc
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascend_parallel.training import Strategy, train_step


class _Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.alive, self.peak, self._known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage(), tree_leaves(args))
        return result

    def _see(self, storage, args):
        pointer = storage.data_ptr()
        if pointer == 0 or pointer in self._known:
            return
        if any(isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == pointer for a in args):
            return
        self._known.add(pointer)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, pointer, storage.nbytes())

    def _forget(self, pointer, size):
        self._known.discard(pointer)
        self.alive -= size


def peak_bytes(function):
    """Run `function` and return the most bytes its tensors held at once."""
    with _Watch() as watch:
        function()
    return watch.peak


def alive_bytes(function):
    """Run `function` and return the bytes of tensors that its result keeps alive."""
    with _Watch() as watch:
        result = function()
    gc.collect()  # what only cycles of references hold is not kept by the result
    time.sleep(0.5)  # nor what gloo's threads let go shortly after a collective's wait has returned
    alive = watch.alive
    del result
    return alive


def most_bytes_of_a_step(model, batch, tables):
    """Return the most bytes of tensors in a strategy's second step: what it allocates, and what it had before."""
    step = train_step(model, batch, torch.optim.Adam(model.parameters()), Strategy.from_dict(tables))
    step(*batch)
    states = [value for state in step.optimizer._inner.state.values() for value in state.values()]
    kept = [*(parameter for module in step._runner.modules for parameter in module.parameters()), *states]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    with _Watch() as watch:
        step(*batch)
    step.close()
    return sum(storages.values()) + watch.peak
