"""Captured graphs: replays run what the capture kept, and a capture refuses what a replay could not have."""

import pytest
import torch
from emulated_ascend import counts

torch.npu.set_device(0)


def captured(program):
    """Return a graph of a program, and what the program returned."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = program()
    return graph, result


def test_a_replay_reads_what_its_memory_holds_now_on_all_streams_of_the_capture():
    a = torch.randn(32, 32).npu()
    side = torch.npu.Stream()

    def program():
        b = (a @ a).relu()
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            c = b + 1
        d = b * 3
        torch.npu.current_stream().wait_stream(side)
        assert torch.npu.is_current_stream_capturing()
        return c * d

    graph, result = captured(program)
    assert not torch.npu.is_current_stream_capturing()
    for seed in range(3):
        a.copy_(torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        b = (a @ a).relu()
        assert torch.equal(result.cpu(), ((b + 1) * (b * 3)).cpu())


def test_a_replay_is_one_call_of_the_host():
    a = torch.ones(4, device="npu")
    graph, _ = captured(lambda: a.add_(1))
    before = counts()
    for _ in range(3):
        graph.replay()
    assert a.tolist() == [4] * 4
    after = counts()
    assert after["aclmdlRIExecuteAsync"] - before.get("aclmdlRIExecuteAsync", 0) == 3
    assert after["aclnnInplaceAdds"] == before["aclnnInplaceAdds"]


def reads():
    """Have the host read what has not run."""
    return (torch.ones(4, device="npu") + 1).sum().item()


def leaves_a_stream():
    """Leave a stream's work behind, for which nobody waits."""
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        return torch.ones(4, device="npu") + 1


def tells_a_shape():
    """Run an operator whose result has a shape that its values decide."""
    return torch.ones(4, device="npu").nonzero()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (reads, "while a graph is captured: the host cannot wait"),
        (leaves_a_stream, "1 of its streams have work for which its first stream does not wait"),
        (tells_a_shape, "aclnnNonzero tells the shape of its result while a graph is captured"),
    ],
)
def test_a_capture_refuses_what_a_replay_cannot_have(program, said):
    with pytest.raises(RuntimeError) as raised:
        captured(program)
    assert said in f"{raised.value} {raised.value.__context__}"
    assert (torch.ones(4, device="npu") + 1).tolist() == [2] * 4


def test_a_captured_stream_does_not_wait_for_an_event_from_outside():
    event = torch.npu.Event()
    event.record()
    with pytest.raises(RuntimeError, match="waits for an event that was recorded outside the capture"):
        captured(lambda: torch.npu.current_stream().wait_event(event))
