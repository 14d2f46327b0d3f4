"""E_bound: of the time that overlap can hide, the share that it hides."""

from __future__ import annotations

# No E_bound is given if less than this share of the serial time can be hidden: noise would dominate.
LEAST_SHARE = 0.03


def e_bound(seconds: float, serial: float, matmul: float, comm: float) -> float | None:
    """Return E_bound = (T_serial - T) / (T_serial - max(T_matmul, T_comm)), from 0 to 1.

    1 means that the shorter of computation and communication is hidden completely. 0 means that nothing is hidden, or
    that overlap lost. None means that there is nothing to hide, or less than `LEAST_SHARE` of the serial time.

    seconds, serial: time of a pass with and without overlap. matmul, comm: time of the pass's matmuls and of its
    collectives, each alone. In backward, the matmuls include the weight gradient. All times are in the same unit.
    """
    to_hide = serial - max(matmul, comm)
    if not matmul or not comm or to_hide <= LEAST_SHARE * serial:
        return None
    return min(max((serial - seconds) / to_hide, 0.0), 1.0)
