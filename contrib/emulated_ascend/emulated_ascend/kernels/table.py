"""The table of kernels, and how a call's arguments become tensors.

A kernel is a line: the name without "aclnn", the letters of its arguments (csrc/aclnn.cpp says what they mean), and a
function over CPU tensors. A tensor's memory is the device's own; a kernel writes its result there.
"""

import ctypes
import importlib.metadata
import json
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..argument_lists import disagreement, lists_of

DTYPES = {
    0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 4: torch.uint8, 6: torch.int16, 9: torch.int64,
    11: torch.float64, 12: torch.bool, 27: torch.bfloat16,
}  # fmt: skip
SCALAR_FORMATS = {0: "f", 1: "e", 2: "b", 3: "i", 4: "B", 6: "h", 9: "q", 11: "d", 12: "?"}
Kernel = Callable[..., Any]

KERNELS: dict[str, tuple[str, Kernel]] = {}
# How many of its last tensors and lists a kernel writes; 0: its first. The virtual clock clears the small ones of those
# that it does not compute. The last alone, where nothing is said.
OUTPUTS: dict[str, int] = {}


def kernel(name: str, signature: str, function: Kernel) -> None:
    """Register `function` for aclnn`name`; it writes its results itself."""
    assert name not in KERNELS, name
    KERNELS[name] = (signature.replace(" ", ""), function)


def result(name: str, signature: str, function: Kernel) -> None:
    """Register a function whose value goes to the call's last argument."""
    kernel(name, signature, lambda *given: given[-1].copy_(function(*given[:-1])))


def inplace(name: str, signature: str, function: Kernel) -> None:
    """Register a function whose value goes to the call's first argument."""
    kernel(name, signature, lambda *given: given[0].copy_(function(*given)))
    OUTPUTS[name] = 0


def results(name: str, signature: str, count: int, function: Kernel) -> None:
    """Register a function whose values go to the call's last `count` arguments."""
    kernel(name, signature, lambda *given: store(given[-count:], function(*given[:-count])))
    OUTPUTS[name] = count


def each(name: str, signature: str, function: Kernel) -> None:
    """Register a Foreach function: `function(i, ...)` makes the i-th tensor of the last list."""

    def run(*given: Any) -> None:
        for i, out in enumerate(given[-1]):
            out.copy_(function(i, *given[:-1]))

    kernel("Foreach" + name, signature, run)


def store(outs: Any, values: Any) -> None:
    """Copy values to where the call wants them; what it does not want is None or has no elements."""
    for out, value in zip(outs, values, strict=False):  # gradients that the call has no place for
        if out is not None and value is not None and out.numel():
            out.copy_(value.reshape(out.shape))


class ShapedTensor:
    """A result whose shape the kernel tells: `tell(values)` writes them and their shape."""

    def __init__(self, tensor: torch.Tensor, container: int) -> None:
        self.tensor, self.container = tensor, container

    def tell(self, values: torch.Tensor) -> None:
        """Write values to the beginning of the memory, and their shape to the container."""
        flat = self.tensor.reshape(-1)
        flat[: values.numel()].copy_(values.reshape(-1))
        dims = (ctypes.c_int64 * max(1, values.dim()))(*values.shape)
        library().emulated_set_shape(ctypes.c_void_p(self.container), dims, values.dim())


def tensor_at(dtype: int, data: int, offset: int, dims: list[int], strides: list[int], *_: int) -> torch.Tensor:
    """View the device's memory."""
    kind = DTYPES.get(dtype)
    if kind is None:
        raise TypeError(f"a tensor of acl's data type {dtype}, which has no kernels")
    if not data or 0 in dims:
        return torch.empty(dims, dtype=kind)
    span = 1 + sum((size - 1) * stride for size, stride in zip(dims, strides, strict=True))
    memory = (ctypes.c_char * (span * kind.itemsize)).from_address(data + offset * kind.itemsize)
    return torch.frombuffer(memory, dtype=kind, count=span).as_strided(dims, strides)


def scalar_of(dtype: int, text: str) -> Any:
    """Read a scalar's bytes."""
    data = bytes.fromhex(text)
    if dtype == 27:
        return struct.unpack("f", b"\0\0" + data[:2])[0]
    return struct.unpack_from(SCALAR_FORMATS[dtype], data)[0]


def decoded(value: Any, letter: str = "") -> Any:
    """Turn an argument as csrc/aclnn.cpp writes it into what kernels take."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "t":
        tensor = tensor_at(*rest)
        return ShapedTensor(tensor, rest[-1]) if letter == "r" else tensor
    if kind == "s":
        return scalar_of(*rest)
    if kind == "a":
        return tuple([int(item) if letter in "IB" else item for item in rest[0]])
    return [decoded(item) for item in rest[0]]


def arguments_of(text: bytes, signature: str) -> list[Any]:
    """Return what a kernel takes.

    A list: a tuple that grows can be seen by gc.get_objects() of another thread, and Python then refuses to finish it.
    """
    return [decoded(value, letter) for value, letter in zip(json.loads(text), signature, strict=True)]


def library() -> ctypes.CDLL:
    """Return the emulated CANN, which the wheel has loaded."""
    return loaded[0]


loaded: list[Any] = []
_functions: list[tuple[str, Kernel]] = []


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
def run(number: int, text: bytes, error: int, size: int) -> int:
    """Run a kernel on its stream's thread; an exception becomes the device's failure."""
    signature, function = _functions[number]
    try:
        if library().emulated_finds_races():
            note_uses(function, arguments_of(text, signature))
        else:
            with torch.inference_mode():
                function(*arguments_of(text, signature))
    except BaseException as raised:  # noqa: BLE001  the stream's synchronise raises it
        traceback.print_exc()
        said = f"{type(raised).__name__}: {raised}".encode()[: size - 1] + b"\0"
        ctypes.memmove(error, said, len(said))
        return 1
    return 0


def note_uses(function: Kernel, given: list[Any]) -> None:
    """Run a kernel, and tell the library which tensors it has written, by their versions, and which it has read."""
    with torch.no_grad():
        function(*given)
    for leaf in tensors_of(given):
        dims, strides = ((ctypes.c_int64 * leaf.dim())(*each) for each in (leaf.shape, leaf.stride()))
        library().emulated_access(
            ctypes.c_void_p(leaf.data_ptr()), ctypes.c_size_t(leaf.element_size()), dims, strides, leaf.dim(),
            int(leaf._version > 0),
        )  # fmt: skip


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a call's arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, ShapedTensor):
        yield value.tensor
    elif isinstance(value, (list, tuple)):
        for each_value in value:
            yield from tensors_of(each_value)


# Where a program's lines are not: in torch, in torch_npu and here.
NOT_LINES = tuple(str(Path(module.__file__).parent) for module in (torch, ctypes) if module.__file__)
MOST_LINES = 4


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
def where(text: int, size: int) -> None:
    """Write the lines of Python at which the calling thread is, the innermost first; of many the outermost too."""
    lines, frame = [], sys._getframe().f_back
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(NOT_LINES) and "torch_npu" not in file and not file.startswith("<"):
            lines.append(f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], "...", lines[-1]]
    said = " < ".join(lines).encode()[: size - 1] + b"\0"
    ctypes.memmove(text, said, len(said))


def register() -> None:
    """Give the kernels to the library, without those that cannot take what the installed torch_npu passes."""
    version = importlib.metadata.version("torch_npu")
    loaded.append(ctypes.CDLL("libascendcl.so", mode=ctypes.RTLD_GLOBAL))
    for number, (name, (signature, function)) in enumerate(sorted(KERNELS.items())):
        _functions.append((signature, function))
        if why := disagreement(name, signature, version):
            library().emulated_note(f"aclnn{name}".encode(), f" cannot be run: {why}".encode())
            continue
        outputs = OUTPUTS.get(name, 0 if name.startswith("Inplace") else 1)
        library().emulated_register(f"aclnn{name}".encode(), signature.encode(), number, outputs)
    for name, lists in lists_of(version).items():
        if name not in KERNELS:
            text = f" has no kernel in emulated_ascend; its arguments are {' or '.join(map(str, lists))}"
            library().emulated_note(f"aclnn{name}".encode(), text.encode())
    library().emulated_set_run(run)
    library().emulated_set_where(where)
