"""What torch dispatches while a function runs."""

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    """Tells ``note(operator, types)`` of every operator before it runs."""

    def __init__(self, note):
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self._note(operator, types)
        return operator(*args, **(kwargs or {}))
