"""Build a slow link on one machine: one network namespace per rank, connected by veth pairs with a limited rate.

    with shaped_link("1gbit", ranks=2) as ends:
        subprocess.Popen([*ends[0].prefix, "python", ...], env={..., **ends[0].environment})

Two ranks share one veth pair; more ranks connect to a bridge in a separate namespace. ``tc ... tbf`` limits the sending
side of each end, so a rank sends and receives at the rate at the same time, as over a full-duplex cable. Root's
namespaces have names (`ip netns`); an ordinary user's live in a user namespace (`user_namespaces.py`).
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
from ascend_parallel.tuning.launch.user_namespaces import LinkError, Namespace, user_namespaces

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


@dataclass(frozen=True)
class LinkEndpoint:
    """The place of one rank: its namespace, its address, and how to start a program there."""

    namespace: Namespace
    address: str
    master_address: str
    interface: str = INTERFACE

    @property
    def prefix(self) -> list[str]:
        """The words before a command that runs in this namespace."""
        return list(self.namespace.prefix)

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
def shaped_link(rate: str, ranks: int = 2) -> Iterator[list[LinkEndpoint]]:
    """Build the link and yield one `LinkEndpoint` per rank; remove the link on success, error, Ctrl-C and SIGTERM.

    Root uses named namespaces, any other user the namespaces of a user namespace. Raises `LinkError` if this machine
    allows neither.
    """
    bits = parse_rate(rate)
    if not 2 <= ranks <= 64:
        raise ValueError(f"ranks={ranks} is not allowed: give 2 to 64")
    check_tools()
    names = [str(rank) for rank in range(ranks)] + (["hub"] if ranks > 2 else [])
    with signals_as_exceptions(), _namespaces_of(names) as spaces:
        ends = [LinkEndpoint(spaces[rank], f"{NETWORK}.{rank + 1}", f"{NETWORK}.1") for rank in range(ranks)]
        _build(ends, spaces[-1], bits)
        yield ends


@contextmanager
def _namespaces_of(names: list[str]) -> Iterator[list[Namespace]]:
    """Yield a namespace per name, in order, and remove them afterwards."""
    if missing_right() is not None:
        with user_namespaces(len(names)) as spaces:
            yield spaces
        return
    remove_leftovers()
    tag = f"{NAMESPACE_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
    tagged = [f"{tag}-{name}" for name in names]
    try:
        for name in tagged:
            _run("ip", "netns", "add", name)
        yield [Namespace(name, ("ip", "netns", "exec", name)) for name in tagged]
    finally:
        with signals_held_back():
            _remove(tag)


def check_tools() -> None:
    """Raise `LinkError` if a program that builds links is missing."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkError(f"`{tool}` is missing: install iproute2 (apt-get install iproute2), or leave out --link")


def missing_right() -> str | None:
    """Return the capability that this process lacks for named namespaces, or None if it has both."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    rights = int(match[1], 16) if match else 0
    for name, bit in (("CAP_NET_ADMIN", CAP_NET_ADMIN), ("CAP_SYS_ADMIN", CAP_SYS_ADMIN)):
        if not rights >> bit & 1:
            return name
    return None


def remove_leftovers() -> None:
    """Remove the namespaces of earlier runs that died without cleaning up."""
    for name in _namespaces():
        match = re.fullmatch(rf"{NAMESPACE_PREFIX}-([0-9]+)-([0-9]+)-.+", name)
        if match and _start_time(int(match[1])) != int(match[2]):
            _delete(name)


def _build(ends: list[LinkEndpoint], hub: Namespace, bits: int) -> None:
    spaces = [end.namespace for end in ends]
    if len(ends) == 2:
        first, second = (space.target for space in spaces)
        words = ["ip", "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE]
        _run(*spaces[0].outside, *words, "netns", second)
    else:
        _build_hub(ends, hub, bits)
    for end in ends:
        inside = end.namespace.prefix
        _run(*inside, "ip", "address", "add", f"{end.address}/24", "dev", INTERFACE)
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "link", "set", INTERFACE, "up")
        _shape(end.namespace, INTERFACE, bits)


def _build_hub(ends: list[LinkEndpoint], hub: Namespace, bits: int) -> None:
    _run(*hub.prefix, "ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0")
    _run(*hub.prefix, "ip", "link", "set", "br0", "up")
    for rank, end in enumerate(ends):
        port, space = f"port{rank}", end.namespace.target
        words = ["ip", "link", "add", INTERFACE, "netns", space, "type", "veth", "peer", "name", port]
        _run(*hub.outside, *words, "netns", hub.target)
        _run(*hub.prefix, "ip", "link", "set", port, "master", "br0", "up")
        _shape(hub, port, bits)  # limits the traffic from all other ranks to this rank


def _shape(namespace: Namespace, interface: str, bits: int) -> None:
    burst = max(MIN_BURST_BYTES, round(bits / 8 * BURST_SECONDS))
    words = ["root", "tbf", "rate", f"{bits}bit", "burst", f"{burst}b", "latency", QUEUE_LATENCY]
    _run(*namespace.prefix, "tc", "qdisc", "add", "dev", interface, *words)


def _run(*words: str) -> None:
    # In a new session, so that Ctrl-C reaches only this program, which then cleans up.
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, start_new_session=True, check=False)
    if done.returncode != 0:
        hint = " (does the kernel have the sch_tbf module?)" if "tc" in words else ""
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
