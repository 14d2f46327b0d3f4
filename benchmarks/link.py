"""Measure the real rate of a shaped link between ranks.

    python benchmarks/link.py --check 1gbit

The link itself is in ascend_parallel/tuning/launch/link.py.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from contextlib import suppress

from ascend_parallel.tuning.launch.link import End, LinkError, parse_rate, shaped_link

CHECK_PORT = 5577
CHECK_BLOCK = 1 << 18


def receive(address: str) -> None:
    """Accept a connection, read to its end, print bits per second."""
    with socket.create_server((address, CHECK_PORT)) as server:
        server.settimeout(20)
        connection, _ = server.accept()
        buffer = bytearray(CHECK_BLOCK)
        connection.recv_into(buffer)
        start, total = time.perf_counter(), 0
        while count := connection.recv_into(buffer):
            total += count
        print(json.dumps(total * 8 / (time.perf_counter() - start)))


def send(address: str, size: int) -> None:
    """Connect, with retries, and send `size` bytes."""
    deadline = time.monotonic() + 20
    connection = None
    while connection is None:
        with suppress(ConnectionRefusedError):
            connection = socket.create_connection((address, CHECK_PORT), timeout=20)
        if connection is None and time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens at {address}")
        time.sleep(0.02)
    connection.settimeout(None)
    block = bytes(CHECK_BLOCK)
    with connection:
        for _ in range(max(1, size // CHECK_BLOCK)):
            connection.sendall(block)


def measure(ends: list[End], pairs: list[tuple[int, int]], size: int, limit: float) -> list[float]:
    """Send `size` bytes between each pair of ends, all pairs at once; return the bits per second of each receiver."""
    receivers: list[subprocess.Popen[str]] = []
    processes: list[subprocess.Popen[str]] = []

    def start(end: End, *words: str) -> subprocess.Popen[str]:
        command = [*end.prefix, sys.executable, __file__, *words]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return processes[-1]

    try:
        receivers = [start(ends[target], "--receive", ends[target].address) for _, target in pairs]
        for source, target in pairs:
            start(ends[source], "--send", ends[target].address, "--bytes", str(size))
        return [float(json.loads(process.communicate(timeout=limit)[0])) for process in receivers]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check(rate: str, ranks: int, size: int) -> int:
    """Print the rate of each direction, alone and both at once; return 1 if a rate is off by 10%."""
    bits = parse_rate(rate)
    limit = 30 + 4 * size * 8 / bits
    worst = 0.0
    with shaped_link(rate, ranks) as ends:
        last = ranks - 1
        for pairs in ([(0, last)], [(last, 0)], [(0, last), (last, 0)]):
            measured = measure(ends, pairs, size, limit)
            for (source, target), got in zip(pairs, measured, strict=True):
                direction = f"rank {source} -> rank {target}" + (", both directions at once" if len(pairs) > 1 else "")
                print(f"{direction:38} {got / 1e6:9.1f} Mbit/s   {got / bits:6.1%} of {rate}")
                worst = max(worst, abs(got / bits - 1))
    print(f"{size / 1e6:.0f} MB of TCP payload each; headers take 4.4% of the rate")
    return 0 if worst <= 0.1 else 1


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Build a link of a given rate between namespaces and measure it.")
    parser.add_argument("--check", metavar="RATE", help="build a link of this rate (1gbit, 500mbit ...) and measure it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=50_000_000, help="bytes of each transfer (default: 50 MB)")
    parser.add_argument("--receive", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--send", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(options.receive)
    elif options.send:
        send(options.send, options.bytes)
    elif options.check:
        return check(options.check, options.ranks, options.bytes)
    else:
        parser.error("give --check RATE")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LinkError, ValueError) as error:
        print(f"link.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
