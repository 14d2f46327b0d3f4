"""The real torch_npu on an emulated CANN: Ascend programs without an Ascend card."""

__version__ = "0.1.0"


def counts() -> dict[str, int]:
    """Return how often this process called each operator (aclnn...) and each collective (Hccl...) so far."""
    return {name: int(number) for name, number in (line.split() for line in _lines_of("emulated_counts"))}


def races() -> list[str]:
    """Return the races that were found in this process: two accesses to memory that nothing orders, with their lines.

    What is queued is waited for. Empty without EMULATED_ASCEND_RACES=1 (`run --races`).
    """
    import ctypes

    ctypes.CDLL("libascendcl.so").emulated_wait_for_all()
    return _lines_of("emulated_races")


def _lines_of(function: str) -> list[str]:
    """Return the lines that a function of the library writes into a buffer."""
    import ctypes

    write = getattr(ctypes.CDLL("libascendcl.so"), function)
    write.restype = ctypes.c_size_t
    size = write(None, ctypes.c_size_t(0)) + 4096
    text = ctypes.create_string_buffer(size)
    write(text, ctypes.c_size_t(size))
    return text.value.decode().splitlines()
