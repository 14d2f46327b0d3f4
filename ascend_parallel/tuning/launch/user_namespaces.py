"""Network namespaces: named ones, which need root, and those of a user namespace, which any user may create.

An unnamed namespace lives as long as a process in it. Here that process is a `cat` that reads from this program: it
ends when this program ends, however it ends, and the kernel then removes the namespace with its links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

READY = b"ready\n"
HOLDER = ("sh", "-c", "echo ready && exec cat")
WITHOUT = "run as root (sudo), in a container with --privileged, or leave out --link"


class LinkError(RuntimeError):
    """The link of the requested rate cannot be built on this machine; the message says how to proceed."""


@dataclass(frozen=True)
class Namespace:
    """A network namespace.

    target
        What ``ip link ... netns TARGET`` takes: a name, or the id of a process in the namespace.
    prefix
        The words before a command that runs in the namespace.
    outside
        The words before a command that may move interfaces between the namespaces.
    """

    target: str
    prefix: tuple[str, ...]
    outside: tuple[str, ...] = ()


@contextmanager
def user_namespaces(count: int) -> Iterator[list[Namespace]]:
    """Yield `count` network namespaces in one new user namespace; they are gone after the block.

    Raises `LinkError` if the machine does not let this user create them.
    """
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            raise LinkError(f"`{tool}` is missing: install util-linux, {WITHOUT}")
    holders: list[subprocess.Popen[bytes]] = []
    try:
        holders.append(_hold("unshare", "--user", "--map-root-user", "--net"))
        owner = ("nsenter", "--target", str(holders[0].pid), "--user", "--preserve-credentials")
        for _ in range(count - 1):
            holders.append(_hold(*owner, "unshare", "--net"))
        inside = "nsenter", "--user", "--net", "--preserve-credentials", "--target"
        pids = [str(holder.pid) for holder in holders]
        yield [Namespace(pid, (*inside, pid), (*owner, "--net")) for pid in pids]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def _hold(*words: str) -> subprocess.Popen[bytes]:
    """Start the process that keeps a namespace, and return it once it is in the namespace."""
    pipe = subprocess.PIPE
    holder = subprocess.Popen([*words, *HOLDER], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert holder.stdout is not None
    if holder.stdout.readline() == READY:
        return holder
    holder.kill()
    reason = holder.communicate()[1].decode(errors="replace").strip()
    raise LinkError(
        f"this user (uid {os.geteuid()}) may not create network namespaces without root: `{' '.join(words)}` says "
        f"{reason!r}. The system forbids it (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone or "
        f"kernel.apparmor_restrict_unprivileged_userns, or a container's seccomp profile): {WITHOUT}"
    )
