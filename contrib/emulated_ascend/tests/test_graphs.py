"""Captured graphs: replays run what the capture kept, and a capture refuses what a replay could not have."""

import pytest
import torch
from emulated_ascend import counts
from emulated_ascend.ranks import Ranks


def alone(function, *arguments):
    """Run a function in a process of its own: torch_npu takes one in which a capture failed for one that captures."""
    ranks = Ranks(1)
    try:
        (result,) = ranks.run(function, *arguments)
    finally:
        ranks.close()
    return result


def captured(program):
    """Return a graph of a program, and what the program returned."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = program()
    return graph, result


def on_two_streams():
    """Replay a program of two streams; tell for three inputs whether the result is the eager one."""
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
    same = []
    for seed in range(3):
        a.copy_(torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        b = (a @ a).relu()
        same.append(torch.equal(result.cpu(), ((b + 1) * (b * 3)).cpu()))
    return same


def test_a_replay_reads_what_its_memory_holds_now_on_all_streams_of_the_capture():
    assert alone(on_two_streams) == [True] * 3


def replayed():
    """Replay an operator; return its result, and the counts before and after."""
    a = torch.ones(4, device="npu")
    graph, _ = captured(lambda: a.add_(1))
    before = counts()
    for _ in range(3):
        graph.replay()
    return a.tolist(), before, counts()


def test_a_replay_is_one_call_of_the_host():
    result, before, after = alone(replayed)
    assert result == [4] * 4
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


OUTSIDE = []


def waits_for_an_event_from_outside():
    """Have the captured stream wait for an event that was recorded before."""
    torch.npu.current_stream().wait_event(OUTSIDE[0])


def refused(program):
    """Capture a program of this name; return the error."""
    OUTSIDE.append(torch.npu.Event())
    OUTSIDE[0].record()
    try:
        captured(globals()[program])
    except RuntimeError as error:
        return f"{error} {error.__context__}"
    return ""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (reads, "while a graph is captured: the host cannot wait"),
        (leaves_a_stream, "1 of its streams have work for which its first stream does not wait"),
        (waits_for_an_event_from_outside, "waits for an event that was recorded outside the capture"),
        (tells_a_shape, "aclnnNonzero tells the shape of its result while a graph is captured"),
    ],
)
def test_a_capture_refuses_what_a_replay_cannot_have(program, said):
    assert said in alone(refused, program.__name__)
