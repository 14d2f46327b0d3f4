"""Types of devices, as torch names them: a row for each, the one place that knows what differs between them.

What a backend of torch.distributed does on a device stands in process_groups/backend.py, by both names; numbers of
chips stand in tuning/cost_model/data/hardware. Imports no torch: commands read the table for their help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Units(NamedTuple):
    """Units that each compute a tile [rows, columns] of a product at a time."""

    number: int
    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class DeviceType:
    """What is known of a type of device.

    backend
        The usual backend of its process groups; "": none is known.
    hardware
        The hardware (tuning/cost_model) whose costs decide among the collectives of a mesh.
    dtype
        The dtype of layers that a command describes without --dtype.
    is_host
        Whether a call has done its work when it returns; else the host runs ahead.
    units
        The compute units of the chip of most units; None: a matmul of any size takes as long as its products.
    chunk_rows
        The allowed rows of a chunk of a prefill, rising. On accelerators a smaller matmul costs more than its
        collective hides.
    vllm_reduces_in_place
        Whether vLLM's own all-reduce writes to the tensor that it is given.
    score_bytes
        Bytes that the softmax of written scores moves for each score in 16 bits, forward and backward.
    statistics
        Numbers in fp32 that fused attention keeps of each row of scores.
    adds_gradients
        Whether frameworks add a micro-batch's gradient to its fp32 sum inside the matmul.
    """

    backend: str = ""
    hardware: str = "910b"
    dtype: str = "bfloat16"
    is_host: bool = False
    units: Units | None = None
    chunk_rows: tuple[int, ...] = (512, 1024, 2048, 4096)
    vllm_reduces_in_place: bool = False
    score_bytes: tuple[int, int] = (8, 12)
    statistics: int = 1
    adds_gradients: bool = False


CPU = DeviceType(
    backend="gloo",
    hardware="cpu-gloo",
    dtype="float32",
    is_host=True,
    chunk_rows=(128, 256, 512, 1024, 2048),
    vllm_reduces_in_place=True,
)
CUDA = DeviceType(
    backend="nccl",
    hardware="h100-nvlink",
    units=Units(132, 128, 128),  # H100: its multiprocessors (h100-nvlink.toml); cuBLAS has tiles of this size
    # The fused kernel reads and writes scores once, and dropout again with a mask of a byte (Megatron-core,
    # fusions/fused_softmax.py, transformer/dot_product_attention.py).
    score_bytes=(4 + 5, 5 + 6),
    adds_gradients=True,  # Megatron-core's gradient_accumulation_fusion needs a CUDA extension
)
NPU = DeviceType(
    backend="hccl",
    units=Units(32, 128, 256),  # Ascend 950: its cubes (ascend-950.toml), and the blocks of Huawei's planner
    vllm_reduces_in_place=True,
    # MindSpeed-LLM's scripts have --no-masked-softmax-fusion and --attention-softmax-in-fp32: cast, mask, softmax and
    # cast run one by one, in fp32. They switch gradient_accumulation_fusion off.
    score_bytes=(6 + 8 + 8 + 6, 6 + 12 + 8 + 6),
    statistics=2 * 8,  # a maximum and a sum, eight times each: [B, N, S, 8] of npu_fusion_attention
)

DEVICES = {"npu": NPU, "cuda": CUDA, "cpu": CPU}
"""The types of devices on which ranks run."""

_META = DeviceType(is_host=True)
_OTHER = DeviceType()


def device_type(name: str) -> DeviceType:
    """Return the row of a type of device; a type that is not known has the values of an accelerator."""
    return _META if name == "meta" else DEVICES.get(name, _OTHER)
