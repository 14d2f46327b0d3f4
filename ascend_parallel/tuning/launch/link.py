"""Build a slow link on one machine: one network namespace per rank, connected by veth pairs with a limited rate.

    with shaped_link("1gbit", ranks=2) as ends:
        subprocess.Popen([*ends[0].prefix, "python", ...], env={..., **ends[0].environment})

Two ranks share one veth pair; more ranks connect to a bridge in a separate namespace. ``tc ... tbf`` limits the sending
side of each end, so a rank sends and receives at the rate at the same time, as over a full-duplex cable.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ascend_parallel.text import bits_per_second, shown
from ascend_parallel.tuning.launch.signals import signals_as_exceptions, signals_held_back

NAMESPACE_PREFIX = "aplink"
INTERFACE = "ap0"
NETWORK = "10.77.0"
# Traffic that may pass without limit after a pause. It should be small. But below the 64 KiB segments of TCP, tbf
# splits each segment, and a link that is busy in both directions loses a tenth of its rate.
BURST_SECONDS = 0.7e-3
MIN_BURST_BYTES = 80_000
QUEUE_LATENCY = "50ms"
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
NAMESPACES = Path("/run/netns")


class LinkError(RuntimeError):
    """The link of the requested rate cannot be built on this machine; the message says how to proceed."""


@dataclass(frozen=True)
class End:
    """The place of one rank: its namespace, its address, and how to start a program there."""

    namespace: str
    address: str
    master_address: str
    interface: str = INTERFACE

    @property
    def prefix(self) -> list[str]:
        """The words before a command that runs in this namespace."""
        return ["ip", "netns", "exec", self.namespace]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make a rank's gloo use this link."""
        return {"GLOO_SOCKET_IFNAME": self.interface, "MASTER_ADDR": self.master_address}


def parse_rate(text: str) -> int:
    """Return the bits per second of a rate such as ``1gbit``, ``2.5gbit`` or ``500mbit``."""
    rate = bits_per_second(text) or 0.0
    if not 10**6 <= rate <= 10**12:
        raise ValueError(
            f"the rate {shown(text)} is not allowed: give 1mbit or more, up to 1000gbit, such as 500mbit or 1gbit"
        )
    return round(rate)


@contextmanager
def shaped_link(rate: str, ranks: int = 2) -> Iterator[list[End]]:
    """Build the link and yield one `End` per rank; remove the link on success, error, Ctrl-C and SIGTERM."""
    bits = parse_rate(rate)
    if not 2 <= ranks <= 64:
        raise ValueError(f"ranks={ranks} is not allowed: give 2 to 64")
    check_rights()
    remove_leftovers()
    tag = f"{NAMESPACE_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
    ends = [End(f"{tag}-{rank}", f"{NETWORK}.{rank + 1}", f"{NETWORK}.1") for rank in range(ranks)]
    with signals_as_exceptions():
        try:
            _build(ends, f"{tag}-hub", bits)
            yield ends
        finally:
            with signals_held_back():
                _remove(tag)


def check_rights() -> None:
    """Raise `LinkError` if a tool or a capability is missing."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkError(f"`{tool}` is missing: install iproute2 (apt-get install iproute2), or leave out --link")
    status = Path("/proc/self/status").read_text()
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    rights = int(match[1], 16) if match else 0
    for name, bit in (("CAP_NET_ADMIN", CAP_NET_ADMIN), ("CAP_SYS_ADMIN", CAP_SYS_ADMIN)):
        if not rights >> bit & 1:
            raise LinkError(
                f"network namespaces need {name}, which this process (uid {os.geteuid()}) lacks: run as root (sudo), "
                "in a container with --privileged (or --cap-add NET_ADMIN --cap-add SYS_ADMIN), or leave out --link"
            )


def remove_leftovers() -> None:
    """Remove the namespaces of earlier runs that died without cleaning up."""
    for name in _namespaces():
        match = re.fullmatch(rf"{NAMESPACE_PREFIX}-([0-9]+)-([0-9]+)-.+", name)
        if match and _start_time(int(match[1])) != int(match[2]):
            _delete(name)


def _build(ends: list[End], hub: str, bits: int) -> None:
    for end in ends:
        _run("ip", "netns", "add", end.namespace)
    if len(ends) == 2:
        first, second = (end.namespace for end in ends)
        _run("ip", "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
    else:
        _build_hub(ends, hub, bits)
    for end in ends:
        _run("ip", "-n", end.namespace, "address", "add", f"{end.address}/24", "dev", INTERFACE)
        _run("ip", "-n", end.namespace, "link", "set", "lo", "up")
        _run("ip", "-n", end.namespace, "link", "set", INTERFACE, "up")
        _shape(end.namespace, INTERFACE, bits)


def _build_hub(ends: list[End], hub: str, bits: int) -> None:
    _run("ip", "netns", "add", hub)
    _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
    _run("ip", "-n", hub, "link", "set", "br0", "up")
    for rank, end in enumerate(ends):
        port, space = f"port{rank}", end.namespace
        _run("ip", "link", "add", INTERFACE, "netns", space, "type", "veth", "peer", "name", port, "netns", hub)
        _run("ip", "-n", hub, "link", "set", port, "master", "br0", "up")
        _shape(hub, port, bits)  # limits the traffic from all other ranks to this rank


def _shape(namespace: str, interface: str, bits: int) -> None:
    burst = max(MIN_BURST_BYTES, round(bits / 8 * BURST_SECONDS))
    words = ["root", "tbf", "rate", f"{bits}bit", "burst", f"{burst}b", "latency", QUEUE_LATENCY]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, *words)


def _run(*words: str) -> None:
    # In a new session, so that Ctrl-C reaches only this program, which then cleans up.
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, start_new_session=True, check=False)
    if done.returncode != 0:
        hint = "" if words[0] == "ip" else " (does the kernel have the sch_tbf module?)"
        output = (done.stderr or done.stdout).strip()
        raise LinkError(f"`{' '.join(words)}` failed with status {done.returncode}: {output}{hint}")


def _namespaces() -> list[str]:
    return sorted(path.name for path in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []


def _remove(tag: str) -> None:
    for name in _namespaces():
        if name.startswith(f"{tag}-"):
            _delete(name)


def _delete(name: str) -> None:
    try:
        _run("ip", "netns", "delete", name)
    except (LinkError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"warning: could not remove the network namespace {name}: {error}\n")


def _start_time(pid: int) -> int | None:
    """Return the start of a process in clock ticks, or None if it is gone; detects a reused pid."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError):
        return None
