"""The variables of a process that is to have the emulated device."""

import os
from collections.abc import Mapping
from pathlib import Path

from .build import built
from .devices import Device

# A call's thread is the one that asked for it, so that its line of Python is known.
RACES = {"EMULATED_ASCEND_RACES": "1", "TASK_QUEUE_ENABLE": "0"}


def environment(
    seed: int | None = None,
    delay_us: int | None = None,
    memory_mb: int | None = None,
    devices: int | None = None,
    soc: str | None = None,
    races: bool = False,
    clock: Device | None = None,
    host: float = 1.0,
) -> dict[str, str]:
    """Return this process's variables with those of the emulation; compiles the libraries if need be.

    seed, delay_us  some kernels, copies and collectives are delayed by up to so many microseconds, drawn by the seed
    memory_mb       memory of each device (65,536)
    devices, soc    how many devices the machine has (8), and of which kind (Ascend910B1)
    races           accesses to memory that nothing orders are found, and end the process with status 3
    clock, host     the device whose times a virtual clock takes, and a factor on the host's time
    """
    given = {"SEED": seed, "DELAY_US": delay_us, "MEMORY_MB": memory_mb, "DEVICES": devices, "SOC": soc}
    if clock is not None:
        given |= {"CLOCK": 1, "FIGURES": clock.text(host)}
        given |= {"MEMORY_MB": memory_mb or clock.memory_mb, "SOC": soc or clock.soc}
    options = {f"EMULATED_ASCEND_{name}": str(value) for name, value in given.items() if value is not None}
    # Under the clock the queue's second thread is one of the model: its launches are not processor time of the program.
    queue = {"TASK_QUEUE_ENABLE": "0"} if clock is not None else {}
    # As torchrun sets it: on two threads the CPU's products differ in their last bits from run to run.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {
        **without_cann(os.environ),
        **search_path(built()),
        **threads,
        **options,
        **(RACES if races else {}),
        **queue,
    }


def without_cann(variables: Mapping[str, str]) -> dict[str, str]:
    """Leave out where a real CANN lies: with it, torch_npu asks for folders that are not emulated."""
    return {name: value for name, value in variables.items() if not name.startswith(("ASCEND_HOME", "ASCEND_OPP"))}


def search_path(libraries: Path) -> dict[str, str]:
    """Let the loader and Python find the emulation."""
    package = str(Path(__file__).resolve().parents[1])
    paths = {"LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": package}
    return {name: os.pathsep.join(filter(None, (first, os.environ.get(name)))) for name, first in paths.items()}
