"""What JSON of `bench` has beside the times of its passes: their predictions, and the collectives alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Matmul
from ascend_parallel.tuning.cost_model.cost import COLLECTIVES, CostModel
from ascend_parallel.tuning.cost_model.hardware import all_hardware
from ascend_parallel.tuning.launch.devices import CPU
from ascend_parallel.tuning.measured.pass_parts import LATENCY_ROWS, PassBreakdown, seconds

SHOWN = {ALL_REDUCE: "all-reduce", REDUCE_SCATTER: "reduce-scatter", ALL_GATHER: "all-gather"}
Values = dict[str, Any]


def known_hardware(name: str) -> str | None:
    """Return the name of the cost model's hardware for a device's name such as "Ascend910B3"; None: it has none."""
    plain = name.lower().replace("-", "").replace(" ", "")
    return next((known for known in all_hardware() if known.replace("-", "") == plain), None)


def predictions(measured: Values, case: Values, hardware: str | None) -> Values:
    """Return the parts of a measured pass that were timed alone, and its predictions; seconds.

    predicted
        Of each choice of chunks, from the parts, as `auto` predicts it. Fused kernels have none.
    predicted_parts
        Of matmul and collective, from the data of a hardware; None without data.
    """
    operator, m, k, n = (measured[name] for name in ("operator", "m", "k", "n"))
    matmul = Matmul(operator, m, k, n, torch.float32, CPU, case["ranks"])  # the parts know dtype and device
    breakdown = PassBreakdown(**measured["parts"])
    predicted = {name: seconds(matmul, breakdown, sizes) for name, sizes in measured["sizes"].items()}
    of_hardware = None
    if hardware is not None:
        costs, item = CostModel(all_hardware()[hardware]), _itemsize(case)
        moved = m * _columns(measured) * item
        of_hardware = {
            "matmul": costs.matmul(m, k, n, item),
            "collective": costs.collective(COLLECTIVES[operator], moved, case["ranks"]),
        }
    return {"parts": measured["parts"], "predicted": predicted, "predicted_parts": of_hardware}


def collectives(measured: Sequence[Values], cases: Sequence[Values]) -> list[Values]:
    """Return the seconds of each collective alone by the bytes of its whole tensor, over all ranks.

    The smallest sizes are of 16 rows: their time is the latency. bus: bytes per second that each rank sends, if ranks
    send no byte twice: (R - 1) / R of the tensor, and twice that in an all-reduce.
    """
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for result in measured:
        case, breakdown, operator = cases[result["case"]], PassBreakdown(**result["parts"]), result["operator"]
        for rows, alone in (
            (min(breakdown.rows, LATENCY_ROWS), breakdown.latency),
            (breakdown.rows, breakdown.collective),
        ):
            whole = rows * _columns(result) * _itemsize(case) * (1 if operator == ALL_REDUCE else case["ranks"])
            times[SHOWN[operator], whole, case["ranks"]].append(alone)
    found = []
    for (name, whole, ranks), alones in sorted(times.items()):
        sent = whole * (ranks - 1) / ranks * (2 if name == SHOWN[ALL_REDUCE] else 1)
        found.append({"collective": name, "bytes": whole, "seconds": median(alones), "bus": sent / median(alones)})
    return found


def _columns(measured: Values) -> int:
    """Return the columns of the tensor that a pass communicates."""
    return int(measured["k"] if measured["operator"] == ALL_GATHER else measured["n"])


def _itemsize(case: Values) -> int:
    return int(getattr(torch, case["dtype"]).itemsize)
