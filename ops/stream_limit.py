"""How many cores of an Ascend NPU the stream of matmuls may take, so that collectives on vector cores have the others.

HCCL's collectives run on vector cores with HCCL_OP_EXPANSION_MODE=AIV: a matmul that may take all of them keeps them
waiting. torch_npu's `set_stream_limit` holds for what is launched on a stream afterwards. CANN reads it where an
operator is launched, which torch_npu's second thread does later than the call: a limit for single calls would reach
others, so a limit stands for the stream.

Documented for A2 and A3. Not run on an NPU.
"""

from __future__ import annotations

from typing import Any

import torch

from ascend_parallel.ops.npu import soc_name
from ascend_parallel.ops.settings import ALL_CORES, OperatorSettings, StreamLimit
from ascend_parallel.ops.soc import GENERATIONS

LIMITED_GENERATIONS = ("A2", "A3")
# Shares of the vector cores that a measurement leaves to the stream of matmuls.
SHARES = (0.75, 0.5)
# The limits that this package has set, by device and id of a stream.
_SET: dict[tuple[int, int], StreamLimit] = {}


class FOLLOWED:
    """What the last settings said: a call whose settings say the same asks nothing."""

    limit: StreamLimit | None = None


def follow(settings: OperatorSettings, device: str) -> None:
    """Set the limit of the settings for the current stream of an NPU; where they name none, take ours away.

    Where calls are measured, the measurement decides (`put`). Raises what `put` raises.
    """
    if device != "npu":
        return
    FOLLOWED.limit = settings.stream_limit
    if settings.stream_limit is not None or not (settings.auto or settings.tune):
        put(settings.stream_limit)


def put(limit: StreamLimit | None) -> None:
    """Let the current NPU's current stream take so many cube and vector cores; None: take a limit of ours away.

    Raises `ValueError` for more cores than there are, `RuntimeError` where no stream can be limited.
    """
    if limit is None and not _SET:
        return
    npu: Any = torch.get_device_module("npu")
    stream = npu.current_stream()
    key = stream.device_index, stream.stream_id
    if _SET.get(key) == limit:
        return
    if limit is None:
        npu.reset_stream_limit(stream)
        del _SET[key]
        return
    if (reason := missing()) is not None:
        raise RuntimeError(f"stream_limit={list(limit)} cannot be set: {reason}")
    for kind, asked, most in zip(("cube", "vector"), limit, _cores(), strict=True):
        if asked > most:
            raise ValueError(f"stream_limit={list(limit)} is not allowed: {soc_name()} has {most} {kind} cores")
    if key in _SET:  # an earlier limit may name a kind of cores that this one leaves free
        npu.reset_stream_limit(stream)
    npu.set_stream_limit(stream, *limit)
    _SET[key] = limit


def missing() -> str | None:
    """Return why no stream can be limited here, or None; the same on all ranks of a group."""
    if GENERATIONS.get(soc_name()) not in LIMITED_GENERATIONS:
        return f"it is documented for {' and '.join(LIMITED_GENERATIONS)}, not for {soc_name()}"
    has = hasattr(torch.get_device_module("npu"), "set_stream_limit")
    return None if has else "the installed torch_npu has no set_stream_limit"


def candidates() -> list[StreamLimit]:
    """Return the limits that a measurement tries; none where no stream can be limited. All ranks return the same."""
    if missing() is not None:
        return []
    vector = _cores()[1]
    return [(ALL_CORES, int(vector * share)) for share in SHARES]


def _cores() -> StreamLimit:
    """Return the cube and vector cores of the current device."""
    npu: Any = torch.get_device_module("npu")
    found = npu.get_device_limit(npu.current_device())
    return found["cube_core_num"], found["vector_core_num"]
