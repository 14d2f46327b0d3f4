"""What the backend of a process group does with a call, on one type of device: one row for each, with its source.

Nobody else asks for a backend's or a device's name to decide how to communicate. No backend is given a list of places
to gather into: gloo, NCCL and HCCL all gather into a buffer and copy it to the places (torch #33924 measured NCCL's
copies at up to 3.6 times the gather).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.devices import device_type

log = logging.getLogger("ascend_parallel")

# How the rows of a chunk reach their places, which are strided over the ranks.
SENDS = "sends"  # a send and a receive for each peer, each from and to its own address
ALL_TO_ALL = "all_to_all"  # one call with a list of places, which the backend runs as grouped sends
CHUNK_MAJOR = "chunk-major"  # an all-gather into a tensor of the chunk's own


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What a backend does on a type of device.

    blocks_host
        Whether `wait` returns once the result is there; else it only orders the device's streams.
    concurrent
        Whether collectives of one group run at the same time; else in the order of their starts.
    gathers
        `SENDS`, `ALL_TO_ALL` or `CHUNK_MAJOR`: the way of a chunk that needs no copy by the host's program.
    own_scatter
        Whether `reduce_scatter_tensor` moves what a reduce-scatter has to.
    adds_pairs
        Whether a sum over two ranks is known to be one addition, whose operands have no order.
    launches
        Whether matmuls are launched on a device, so that one launch for the rows of several ranks saves time.
    computes_on
        What runs the backend's collectives, and is missing to matmuls meanwhile; in words.
    source
        Where this was read or measured.
    """

    blocks_host: bool
    concurrent: bool
    gathers: str
    own_scatter: bool
    adds_pairs: bool
    launches: bool
    computes_on: str
    source: str


GLOO = Backend(
    blocks_host=True,
    concurrent=True,
    gathers=SENDS,
    own_scatter=False,  # an all-reduce of a copy: twice the traffic or more
    adds_pairs=True,
    launches=False,
    computes_on="threads of the host",
    source="torch's ProcessGroupGloo.cpp; benchmarks/README.md: sends of 16 MB take a third less processor time",
)
# gloo copies a device's tensors through the host; its sends and receives read the host's memory alone.
GLOO_OF_A_DEVICE = Backend(
    blocks_host=True,
    concurrent=True,
    gathers=CHUNK_MAJOR,
    own_scatter=True,
    adds_pairs=False,
    launches=True,
    computes_on="threads of the host, and copies to and from it",
    source="torch's ProcessGroupGloo.cpp; benchmarks/README.md, two ranks on one GPU",
)
NCCL = Backend(
    blocks_host=False,
    concurrent=False,
    gathers=ALL_TO_ALL,
    own_scatter=True,
    adds_pairs=False,
    launches=True,
    computes_on="multiprocessors, 1 to 32 for each collective (NCCL_MAX_CTAS)",
    source="torch's ProcessGroupNCCL.cpp and csrc/cuda/nccl.cpp (torch #44374)",
)
# torch_npu concatenates and copies the lists of an all_to_all, and pads those of an all-gather. HcclBatchSendRecv would
# need no copy, but torch_npu from 2.10.0.post2 on addresses wrong ranks in groups that are not the world's.
HCCL = Backend(
    blocks_host=False,
    concurrent=False,
    gathers=CHUNK_MAJOR,
    own_scatter=True,
    adds_pairs=False,
    launches=True,
    computes_on="SDMA or AI CPU; with HCCL_OP_EXPANSION_MODE=AIV vector cores",
    source="torch_npu's ProcessGroupHCCL.cpp; not run on an NPU",
)
# A group of torch's that pretends to communicate.
FAKE = Backend(
    blocks_host=False,
    concurrent=False,
    gathers=CHUNK_MAJOR,
    own_scatter=True,
    adds_pairs=True,
    launches=False,
    computes_on="nothing",
    source="torch's FakeProcessGroup.hpp",
)

ROWS: dict[tuple[str, str], Backend] = {
    ("gloo", "cpu"): GLOO,
    ("gloo", "cuda"): GLOO_OF_A_DEVICE,
    ("gloo", "npu"): GLOO_OF_A_DEVICE,
    ("nccl", "cuda"): NCCL,
    ("hccl", "npu"): HCCL,
    ("fake", "cpu"): FAKE,
    ("fake", "cuda"): FAKE,
    ("fake", "npu"): FAKE,
    ("fake", "meta"): FAKE,
}
"""Backends by name and type of device; a test puts another row in a place to run the way of a backend on gloo."""


# By group and device, what a row is found by: a call asks for it, and torch makes two objects to tell it.
_NAMES: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, tuple[str, str]]] = WeakKeyDictionary()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """Return the row of the group's backend on the type of `device`."""
    names = _NAMES.get(group)
    name = None if names is None else names.get(device)
    if name is None:
        name = group._get_backend(device).name(), device.type
        _NAMES.setdefault(group, {})[device] = name
    return ROWS.get(name) or unknown(*name)


def usual_backend(device: str) -> Backend:
    """Return the row of the backend that a type of device usually has: a call may be described without a group."""
    return ROWS.get((device_type(device).backend, device)) or _cautious(device)


@lru_cache(maxsize=64)
def unknown(name: str, device: str) -> Backend:
    """Return the row of a backend of which nothing is known, and say so once on rank 0."""
    if dist.is_initialized() and dist.get_rank() == 0:
        log.warning(
            "backend %r on %s is not known to this package: its collectives are taken to run at the same time, and its "
            "gathers to need a buffer; known: %s",
            name,
            device,
            ", ".join(sorted({known for known, _ in ROWS if known != "fake"})),
        )
    return _cautious(device)


def _cautious(device: str) -> Backend:
    """Return the row that is right, if not fast, for any backend."""
    return Backend(
        blocks_host=device == "cpu",
        concurrent=True,
        gathers=CHUNK_MAJOR,
        own_scatter=True,
        adds_pairs=device == "cpu",
        launches=device != "cpu",
        computes_on="not known",
        source="an unknown backend",
    )
