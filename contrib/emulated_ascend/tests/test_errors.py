"""What the emulation cannot do, or a program does wrong, is an error that names it."""

import importlib.metadata
import time
from pathlib import Path

import pytest
import torch
from emulated_ascend.argument_lists import OP_PLUGIN, disagreement, lists_of
from emulated_ascend.kernels import KERNELS
from emulated_ascend.kernels.table import library, loaded
from emulated_ascend.ranks import Ranks
from emulated_ascend.wheel import Unusable, Wheel

torch.npu.set_device(0)


def test_an_operator_without_a_kernel_is_named():
    said = "aclnnLinalgQr has no kernel in emulated_ascend; its arguments are t self, i mode_int, t Q, t R"
    with pytest.raises(RuntimeError, match=said):
        torch.linalg.qr(torch.randn(3, 3).npu())[0].cpu()


def older_kind():
    """Ask for an operator of the older kind; return what the next two calls say."""
    x, said = torch.ones(4, device="npu"), []
    for call in (lambda: x.norm(float("inf")), lambda: x + 1, lambda: x + 1):
        try:
            call().cpu()
        except RuntimeError as error:
            said.append(str(error))
    for each in loaded:  # or the process could not answer
        each.emulated_forget_failure()
    return said


def test_an_operator_of_the_older_kind_fails_the_device():
    """torch_npu's queue is dead then, and says nothing at later calls: what they compute would be garbage."""
    ranks = Ranks(1)
    try:
        ((_, *later),) = ranks.run(older_kind)
    finally:
        ranks.close()
    assert len(later) == 2 and all("LpNormReduceV2 is asked for as an aclop operator" in each for each in later)


def test_the_error_of_a_kernel_reaches_synchronize():
    x = torch.arange(6).npu()[torch.tensor([77]).npu()]
    with pytest.raises(RuntimeError, match="aclnnIndex: IndexError: index 77 is out of bounds"):
        torch.npu.synchronize()
    with pytest.raises(RuntimeError, match="aclnnIndex"):
        x.cpu()


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("ts", "aclnnTan, argument 2 of 2: a scalar is expected, a tensor is passed.*integers and addresses are tt"),
        ("t", "aclnnTan is called with another number of arguments than the 1 of its kernel"),
        ("ttt", "aclnnTan, argument 3 of 3: a tensor is expected, no container is passed"),
    ],
)
def test_another_list_of_arguments_is_refused(signature, said):
    x = torch.ones(3).npu()
    known = sorted(KERNELS).index("Tan")
    library().emulated_register(b"aclnnTan", signature.encode(), known, 1)
    try:
        with pytest.raises(RuntimeError, match=said):
            torch.tan(x).cpu()
    finally:
        library().emulated_register(b"aclnnTan", KERNELS["Tan"][0].encode(), known, 1)


def test_more_memory_than_the_device_has_is_refused(monkeypatch):
    monkeypatch.setenv("EMULATED_ASCEND_MEMORY_MB", "64")
    with pytest.raises(RuntimeError, match=r"out of memory. Tried to allocate .* MiB \(NPU 0; 64.00 MiB total"):
        torch.empty(128 << 20, dtype=torch.uint8, device="npu")


def test_fresh_memory_is_not_a_number():
    torch.npu.empty_cache()
    assert torch.empty(5 << 20, device="npu").cpu().isnan().all()


def test_a_wheel_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.12.0")
    with pytest.raises(Unusable, match=r"torch_npu is 2\.12\.0; emulated_ascend knows the argument lists of 2\.13\.0"):
        Wheel()


def test_every_kernel_is_of_an_operator_that_the_wheel_names():
    named = set(Wheel().operators())
    assert not [name for name in KERNELS if f"aclnn{name}" not in named]


def test_every_kernel_takes_what_the_installed_torch_npu_passes():
    version = importlib.metadata.version("torch_npu")
    assert not {name: why for name, (letters, _) in KERNELS.items() if (why := disagreement(name, letters, version))}


@pytest.mark.parametrize("name", ["FusedCausalConv1d", "MoeDistributeCombineAddRmsNorm"])
def test_a_kernel_for_the_list_of_another_version_is_not_run(monkeypatch, name):
    """Lists are those of the wheel's version: these functions take other arguments than in op-plugin 26.0.0."""
    monkeypatch.setitem(OP_PLUGIN, "older", ("26.0.0",))
    for each in lists_of("older")[name]:
        assert disagreement(name, each.letters, "older") is None
        said = f"its kernel takes {each.letters}, torch_npu 2.13.0 passes "
        assert disagreement(name, each.letters, "2.13.0").startswith(said)


def test_a_function_whose_list_is_not_known_is_named():
    assert disagreement("NoSuchFunction", "t", "2.13.0") == "its list of arguments is not known for torch_npu 2.13.0"
    assert "its kernel takes ttss, torch_npu 2.13.0 passes t self, t other, s alpha" in disagreement(
        "Add", "ttss", "2.13.0"
    )


def test_threads_that_wait_for_nothing_are_not_woken_each_microsecond():
    """torch_npu's release threads ask for work in a loop; the emulation lets the system wake them later."""
    (torch.ones(3).npu() + 1).cpu()
    threads = [each for each in Path("/proc/self/task").iterdir() if "elease_thread" in (each / "comm").read_text()]
    assert threads
    limit = time.monotonic() + 60
    while {slack_of(thread) for thread in threads} != {4_000_000} and time.monotonic() < limit:
        time.sleep(0.05)
    assert {slack_of(thread) for thread in threads} == {4_000_000}


def slack_of(thread):
    return int(Path(f"/proc/{thread.name}/timerslack_ns").read_text())
