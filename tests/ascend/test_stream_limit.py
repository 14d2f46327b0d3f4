"""How many cores the stream of matmuls may take: what torch_npu is asked for, and what is refused."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from programs import counted, device, layer

SHAPE = ("row", (64, 2, 48), 40, torch.float32, False)
CHUNKED = {"num_chunks": 4, "mode": 2}


def limit_now():
    return tuple(torch.npu.get_stream_limit(torch.npu.current_stream()).values())


def layers_under(*limits):
    """Run two layers under each limit in turn: what torch_npu was asked for, the stream's limit after it, the results.

    The calls reach CANN, which is asked for each kind of cores.
    """
    found, asked = [], []
    own, reset = torch.npu.set_stream_limit, torch.npu.reset_stream_limit
    with (
        patch.object(torch.npu, "set_stream_limit", lambda s, *cores: (asked.append(cores), own(s, *cores))),
        patch.object(torch.npu, "reset_stream_limit", lambda stream: (asked.append("reset"), reset(stream))),
    ):
        for limit in limits:
            settings = CHUNKED if limit is None else {**CHUNKED, "stream_limit": limit}
            asked.clear()
            results, numbers = counted(lambda each: [layer(*SHAPE, **each)[1] for _ in range(2)], settings)
            found.append(([*asked], "aclrtSetStreamResLimit" in numbers, limit_now(), results[-1]))
    return found


def test_a_limit_is_set_once_for_the_stream_and_taken_away_by_settings_without(ranks):
    for found in ranks().run(layers_under, None, (20, 32), (20, 32), (-1, 24), None):
        asked, of_cann, limits, results = zip(*found, strict=True)
        assert asked == ([], [(20, 32)], [], ["reset", (-1, 24)], ["reset"])
        assert of_cann[:3] == (False, True, False)
        assert limits == ((24, 48), (20, 32), (20, 32), (24, 24), (24, 48))
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def error_of(limit):
    try:
        layer(*SHAPE, **CHUNKED, stream_limit=limit)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def test_what_no_stream_can_have_is_an_error_on_every_rank(ranks):
    assert (
        ranks().run(error_of, (25, 48))
        == [("ValueError", "stream_limit=[25, 48] is not allowed: Ascend910B1 has 24 cube cores")] * 2
    )
    refused = "stream_limit=[-1, 24] cannot be set: it is documented for A2 and A3, not for Ascend950PR_9599"
    assert ranks(EMULATED_ASCEND_SOC="Ascend950PR_9599").run(error_of, (-1, 24)) == [("RuntimeError", refused)] * 2


def tuned(folder, winner):
    """Measure a row layer whose cuts win; return which limits were set, the limit then, and after a later call."""
    from ascend_parallel import Settings, row_linear
    from ascend_parallel.overlap.layer_shape import LayerShape
    from ascend_parallel.tuning.measured.decider import Decider
    from ascend_parallel.tuning.measured.pass_times import TimedLinear

    settings, group, asked = Settings(tune=f"{folder}/plan.json"), dist.group.WORLD, []
    own, real = torch.npu.set_stream_limit, TimedLinear.time_limits

    def noted(stream, cube_num=-1, vector_num=-1):
        asked.append((cube_num, vector_num))
        own(stream, cube_num, vector_num)

    def cuts_win(self, operator, candidates, rounds):
        return {sizes: [1 / len(sizes)] * rounds for sizes in candidates}

    def given(self, operator, sizes, limits, rounds):
        times = real(self, operator, sizes, limits, rounds)
        return {limit: [0.5 if limit == winner else 1.0] * rounds for limit in times}

    shape = LayerShape.of_rows("row", 4096, 2, False, k=64, n=2048, dtype=torch.bfloat16, device="npu")
    with (
        patch.object(torch.npu, "set_stream_limit", noted),
        patch.object(TimedLinear, "time_sizes", cuts_win),
        patch.object(TimedLinear, "time_limits", given),
    ):
        decider = Decider(settings)
        known = decider.known_of_layer(shape, group, backward=False)
        after = limit_now()
        x, w = (torch.ones(size, dtype=torch.bfloat16, device=device()) for size in ((4096, 64), (2048, 64)))
        row_linear(x, w, group=group, settings=settings, known=known)
    later = limit_now()
    torch.npu.synchronize()
    row_linear(x, w, group=group, settings=Settings(**CHUNKED))  # takes it away
    return set(asked), after, later, limit_now()


@pytest.mark.parametrize("winner", [(-1, 24), None], ids=str)
def test_measured_chunks_try_limits_and_keep_the_one_that_wins(ranks, tmp_path, winner):
    """The clock is the test's: the trials, and the calls that they time, are real."""
    (tmp_path / str(winner)).mkdir()
    kept = (24, 24) if winner else (24, 48)
    for asked, after, later, at_last in ranks().run(tuned, str(tmp_path / str(winner)), winner):
        assert asked == {(-1, 36), (-1, 24)}
        assert after == later == kept
        assert at_last == (24, 48)
