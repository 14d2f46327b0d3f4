"""Devices of the virtual clock: what a kernel, a copy, a collective and a launch take, each figure with its source.

A figure is (value, source); "assumed" says that nobody published it. Units: microseconds, bytes per microsecond / 1e3
(GB/s), TFLOP/s. `all_reduce` is a list of pieces (bytes up to which it holds, c0, c1, c2) of c0 + c1 x + c2 x^2
microseconds, x in MiB, for `fitted_ranks` ranks. All-gather and reduce-scatter take `gather_share` of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .wheel import Unusable

Figure = tuple[Any, str]
ASSUMED = "assumed"
INI = "CANN runtime's platform_config (github.com/hicann/runtime, commit 681ef76)"
MC2 = "Huawei's planner of fused operators, ops-transformer mc2/common (matmul_performance.cpp, hccl_performance.cpp)"
SDK = "Ascend DrivingSDK's performance-predict: 354 TFLOPS FP16, 88 FP32 on cubes, 1.6 TB/s"
PTO = "PTO-ISA's flash attention on a 910B2: 150.78 of 353.9 TFLOPS"
H100 = "NVIDIA's H100 SXM data sheet: 989.4 TFLOPS BF16, 66.9 FP32, 132 SMs, 3.35 TB/s"


@dataclass(frozen=True)
class Device:
    """A device: its name for `--device`, what torch_npu calls it, its memory, its figures."""

    name: str
    soc: str
    memory_mb: int
    figures: dict[str, Figure] = field(repr=False)

    def text(self, host: float) -> str:
        """Write the figures as the library reads them; `host` is the factor on the host's time."""
        values = {name: value for name, (value, _) in self.figures.items()} | {"host": host}
        pieces = values.pop("all_reduce")
        words = [f"{name}={value:.10g}" for name, value in values.items()]
        return ",".join([*words, "all_reduce=" + "|".join(":".join(f"{x:.10g}" for x in piece) for piece in pieces)])

    def assumed(self) -> list[str]:
        """Name the figures without a source."""
        return [name for name, (_, source) in self.figures.items() if source.startswith(ASSUMED)]


def cubes(cores: int, ghz: float, source: str) -> dict[str, Figure]:
    """Return cores of 16 x 16 x 16 multiply-adds a cycle, at so many GHz."""
    return {"cores": (cores, source), "tflops": (cores * 4096 * 2 * ghz / 1e3, f"4096 multiply-adds a cycle; {source}")}


MESH_OF_8: list[tuple[float, ...]] = [
    (65536, 18, 0, 0), (8388608, 14.769, 27.0623, -0.96982), (float("inf"), 61.508333, 13.58491, 0),
]  # fmt: skip
A2: dict[str, Figure] = {
    "utilisation": (0.75, f"{MC2}: 0.85, 0.75, 0.65 by the operands' size; the middle for all, for chunks too"),
    "share_32_bit": (0.25, SDK),
    "k_multiple": (128, MC2),
    "k_unaligned": (0.7, MC2),
    "attention": (0.426, PTO),
    "bandwidth": (1600, SDK),
    "bandwidth_share": (0.75, ASSUMED),
    "host_bandwidth": (20, f"{ASSUMED}: PCIe 4.0 x16 in effect"),
    "kernel": (3, f"{ASSUMED}: the least time of a kernel"),
    "latency": (8, f"{ASSUMED}: from a launch to the device's start"),
    "launch": (5, f"{ASSUMED}: a launch, on the second thread of torch_npu's queue"),
    "mark": (1, f"{ASSUMED}: an event's record or wait"),
    "collective_launch": (18, f"{MC2}: the smallest collective; users report up to 480"),
    "queue": (1, "torch_npu launches in a thread of its own (TASK_QUEUE_ENABLE=1, its default)"),
    "mesh": (1, "Atlas A2: 8 cards, a link of HCCS for each pair"),
    "fitted_ranks": (8, MC2),
    "all_reduce": (MESH_OF_8, MC2),
    "gather_share": (0.5, MC2),
    "collective_cores": (0, "HCCL's default on A2: SDMA and AI CPU, no cubes"),
}
A3: dict[str, Figure] = A2 | {
    "mesh": (0, "Atlas A3: rings"),
    "all_reduce": ([(2097152, 250, 0, 0), (float("inf"), 248.151561, 11.38155, 0)], f"{MC2}: double ring"),
    "bandwidth": (1600, "CloudMatrix384, arXiv 2506.12708: 1.6 TB/s a die"),
}
A5: dict[str, Figure] = A2 | {
    "utilisation": (0.85, f"{MC2}: 0.95, 0.85, 0.75; the middle"),
    "share_32_bit": (0.0625, "DrivingSDK: 27 of 432 TFLOPS"),
    "bandwidth": (1600, "the chip's white paper, quoted in gitcode.com/cann/ops-nn/issues/6033"),
    "mesh": (0, ASSUMED),
    "all_reduce": (
        [(33554, 5.6997, 0, 0), (1437597, 5.608, 2.86702, 0), (float("inf"), 5.8887, 2.59568, 0)], MC2,
    ),
}  # fmt: skip
# Two ranks on the halves of one H100 (benchmarks/README.md of ascend_parallel): what the clock is held against.
HALF_H100: dict[str, Figure] = {
    "cores": (66, H100),
    "tflops": (494.7, H100),
    "utilisation": (0.7, f"{ASSUMED}: a half under MPS; 760 of 989 TFLOPS were reported for whole cards"),
    "share_32_bit": (0.068, H100),
    "k_multiple": (8, f"{ASSUMED}: cuBLAS's alignment"),
    "k_unaligned": (0.5, ASSUMED),
    "attention": (0.5, ASSUMED),
    "bandwidth": (1700, f"{H100}, shared by two"),
    "bandwidth_share": (0.8, ASSUMED),
    "host_bandwidth": (20, ASSUMED),
    "kernel": (2, ASSUMED),
    "latency": (4, ASSUMED),
    "launch": (4, ASSUMED),
    "mark": (1, ASSUMED),
    "collective_launch": (15, ASSUMED),
    "queue": (0, "CUDA launches on the program's thread"),
    "mesh": (0, "one card"),
    "fitted_ranks": (2, "two halves"),
    "all_reduce": ([(float("inf"), 15, 20.97152, 0)], "50 GB/s, fitted to one measured row layer; 15 us assumed"),
    "gather_share": (0.5, "a ring's"),
    "collective_cores": (4 / 66, "NCCL_MAX_CTAS=4 of the measured runs"),
}
DEVICES = {
    device.name: device
    for device in (
        Device("910B1", "Ascend910B1", 65536, A2 | cubes(24, 1.85, INI)),
        Device("910B2", "Ascend910B2", 65536, A2 | cubes(24, 1.8, INI)),
        Device("910B3", "Ascend910B3", 65536, A2 | cubes(20, 1.8, INI)),
        Device(
            "910B4", "Ascend910B4", 32768,
            A2 | cubes(20, 1.5, INI) | {"bandwidth": (800, f"{ASSUMED}: half of the others', as its memory is")},
        ),
        Device("910_93", "Ascend910_9391", 65536, A3 | cubes(24, 1.85, INI)),
        Device("950", "Ascend950PR_9589", 131072, A5 | cubes(32, 1.65, INI)),
        Device("half-H100", "Ascend910B1", 40960, HALF_H100),
    )
}  # fmt: skip


def device_of(name: str) -> Device:
    """Return a device by its name; an unknown one is an error that names all."""
    known = {each.lower(): device for each, device in DEVICES.items()}
    found = known.get(name.lower().removeprefix("ascend"))
    if found is None:
        raise Unusable(f"--device is {name}; allowed are {', '.join(DEVICES)}")
    return found
