"""Measure the real rate of a shaped link between ranks.

    python benchmarks/link.py --check 1gbit

The first and the last rank send to each other over TCP, each alone and both at once. The link itself is in
ascend_parallel/tuning/launch/link.py. Exits with 1 if a rate is off by 10 %.
"""

from __future__ import annotations

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from measuring import on_ranks, options_of, run

from ascend_parallel.tuning.launch.link import NETWORK, parse_rate

PORT, BLOCK = 5577, 1 << 18


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, link=False)
    parser.add_argument("--check", metavar="RATE", required=True, help="rate of the link: 1gbit, 500mbit ...")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--bytes", type=int, default=50_000_000, help="bytes of each transfer (default: 50 MB)")
    options = parser.parse_args()
    bits = parse_rate(options.check)
    limit = 60 + 12 * options.bytes * 8 / bits
    found = on_ranks("link:rank", options.ranks, link=options.check, limit=limit, size=options.bytes)
    for name, rate in found:
        print(f"{name:42} {rate / 1e6:9.1f} Mbit/s   {rate / bits:6.1%} of {options.check}")
    print(f"{options.bytes / 1e6:.0f} MB of TCP payload each; headers take 4.4% of the rate")
    sys.exit(any(abs(rate / bits - 1) > 0.1 for _, rate in found))


def rank(group: dist.ProcessGroup, size: int) -> list[tuple[str, float]]:
    """Return the bits per second of each direction, alone and both at once."""
    own, last, found = group.rank(), group.size() - 1, []
    with socket.create_server((f"{NETWORK}.{own + 1}", PORT)) as server, ThreadPoolExecutor() as threads:
        for pairs in ([(0, last)], [(last, 0)], [(0, last), (last, 0)]):
            dist.barrier()
            rates = torch.zeros(len(pairs), dtype=torch.float64)
            sending = [threads.submit(send, target, size) for source, target in pairs if source == own]
            for index, (_, target) in enumerate(pairs):
                if target == own:
                    rates[index] = receive(server)
            for done in sending:
                done.result()
            dist.all_reduce(rates)
            for (source, target), rate in zip(pairs, rates.tolist(), strict=True):
                at_once = ", both directions at once" if len(pairs) > 1 else ""
                found.append((f"rank {source} -> rank {target}{at_once}", rate))
    return found


def send(target: int, size: int) -> None:
    """Send about `size` bytes to a rank."""
    block = bytes(BLOCK)
    with socket.create_connection((f"{NETWORK}.{target + 1}", PORT), timeout=20) as connection:
        connection.settimeout(None)
        for _ in range(max(1, size // BLOCK)):
            connection.sendall(block)


def receive(server: socket.socket) -> float:
    """Accept a connection and read to its end; return bits per second, from the first bytes on."""
    connection, _ = server.accept()
    buffer = bytearray(BLOCK)
    with connection:
        connection.recv_into(buffer)
        start, total = time.perf_counter(), 0
        while count := connection.recv_into(buffer):
            total += count
    return total * 8 / (time.perf_counter() - start)


if __name__ == "__main__":
    run(main)
