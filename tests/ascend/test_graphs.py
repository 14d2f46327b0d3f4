"""Steps that `torch.npu.graph` captures: a replay has the bits of the step that the host launches."""

import pytest
import torch
from programs import block, counted, layer

WAYS = {"chunks": {"num_chunks": 2}, "region": {"num_chunks": 4, "region": True, "region_rows": 8}}


def replayed(*given):
    """Return results, and this package's and CANN's counts, of steps of which the last are replays."""
    (results, own), cann = counted(block, *given, captured=True)
    return results, own, cann


@pytest.mark.parametrize("sequence", [False, True], ids=["all-reduce", "sequence"])
def test_replays_of_layers_have_the_bits_of_plain_steps(ranks, sequence):
    own = ranks(TEST="graphs")
    plain = own.run(block, None, sequence)
    for way, settings in WAYS.items():
        found = own.run(replayed, settings, sequence)
        for (expected, _), (results, counts, cann) in zip(plain, found, strict=True):
            same = [torch.equal(*pair) for pair in zip(expected, results, strict=True)]
            assert all(same), (way, same)
            assert cann["aclmdlRIExecuteAsync"] == 2
            assert counts["matmul_reduce_scatter" if sequence else "matmul_all_reduce"]["chunks"] > 0
            assert ("region" in counts) == (way == "region"), counts


def unprepared():
    """Capture a layer that no step ran before; return the error, and the errors of the same layer behind it."""
    said = None
    try:
        with torch.npu.graph(torch.npu.NPUGraph()):
            layer("row", (64, 2, 48), 40, torch.float32, False, num_chunks=2, mode=2)
    except RuntimeError as error:
        said = f"{error} {error.__context__}"
    return said, layer("row", (64, 2, 48), 40, torch.float32, False, num_chunks=2, mode=2)[0]


def test_a_capture_without_a_warm_up_is_an_error_and_the_layer_runs_behind_it(ranks):
    own = ranks(TEST="no warm-up")
    for said, errors in own.run(unprepared):
        assert "while a graph is captured" in said
        assert max(errors) < 1e-6
