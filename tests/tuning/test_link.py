"""Slow links between ranks: in an ordinary user's namespaces, and the errors where none may be created."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ascend_parallel.tuning.launch import link, user_namespaces
from ascend_parallel.tuning.launch.link import shaped_link
from ascend_parallel.tuning.launch.ranks import call_on_ranks
from ascend_parallel.tuning.launch.user_namespaces import LinkError


def addresses(group):
    total = torch.ones(100_000)
    dist.all_reduce(total)
    space = str(Path("/proc/self/ns/net").readlink())
    return [os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"], float(total[0]), space]


@pytest.fixture
def as_an_ordinary_user(monkeypatch):
    monkeypatch.setattr(link, "missing_right", lambda: "CAP_NET_ADMIN")
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    try:
        with shaped_link("100mbit"):
            pass
    except LinkError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_an_ordinary_user_talk_over_the_link(as_an_ordinary_user, ranks):
    master, interface, total, space = call_on_ranks("test_link:addresses", ranks, limit=120, link="100mbit")
    assert (master, interface, total) == ("10.77.0.1", "ap0", ranks)
    assert space != str(Path("/proc/self/ns/net").readlink())


def test_every_end_is_shaped(as_an_ordinary_user):
    with shaped_link("100mbit") as ends:
        for end in ends:
            words = [*end.prefix, "tc", "qdisc", "show", "dev", end.interface]
            assert "tbf" in (shown := subprocess.run(words, capture_output=True, text=True, check=True).stdout)
            assert "rate 100Mbit" in shown


def test_nothing_is_left_after_an_error(as_an_ordinary_user):
    with pytest.raises(ZeroDivisionError), shaped_link("100mbit", ranks=3) as ends:
        pids = [int(end.namespace.target) for end in ends]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        raise ZeroDivisionError
    time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_system_that_forbids_it_is_named(monkeypatch):
    monkeypatch.setattr(user_namespaces, "HOLDER", ("sh", "-c", "echo not permitted >&2; exit 1"))
    expected = pytest.raises(LinkError, match=r"may not create network namespaces|is missing")
    with expected, user_namespaces.user_namespaces(2):
        raise AssertionError("no namespace was created")
