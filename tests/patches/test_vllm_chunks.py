"""What needs no vLLM: the chunks of a number of tokens, and VLLM_PLUGINS."""

import itertools

import pytest

from ascend_parallel.ops.row_wise import RowWise
from ascend_parallel.patches.base import PatchError
from ascend_parallel.patches.vllm import refuse_unless_allowed
from ascend_parallel.patches.vllm.chunks import ladder_of, token_chunks


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 64])
def test_chunks_have_sizes_of_the_ladder_but_for_the_last(device, count):
    for tokens, least in itertools.product(range(1, 8193, 7), (0, 1024)):
        ladder = ladder_of(device, least)
        *most, last = token_chunks(tokens, count, device, least)
        assert sum(most) + last == tokens
        assert len({*most}) <= 1 and all(size in ladder for size in most)
        if count == 1 or tokens < 2 * ladder[0]:
            assert not most
        else:
            assert most and max(ladder[0], most[0] / 2) <= last < 2 * most[0]


def test_about_as_many_chunks_as_asked_for():
    assert token_chunks(2048, 4, "cpu") == (512, 512, 512, 512)
    assert token_chunks(1500, 4, "cpu") == (256, 256, 256, 256, 256, 220)
    assert token_chunks(300, 4, "cpu") == (128, 172)
    assert token_chunks(255, 4, "cpu") == (255,)
    assert token_chunks(2048, 4, "cpu", 1024) == (1024, 1024)
    assert token_chunks(2000, 4, "cpu", 1024) == (2000,)
    assert token_chunks(8192, 4, "npu") == (2048,) * 4


@pytest.mark.parametrize("plugins", [None, "ascend_parallel", "other,ascend_parallel"])
def test_vllm_plugins_may_name_this_package(plugins):
    refuse_unless_allowed(plugins)


@pytest.mark.parametrize("plugins", ["", "other", "ascend"])
def test_vllm_plugins_that_leave_this_package_out_are_respected(plugins):
    with pytest.raises(PatchError, match="VLLM_PLUGINS"):
        refuse_unless_allowed(plugins)


def test_a_version_without_a_module_of_the_table_has_no_such_class():
    assert not RowWise("vllm_of_another_day.layers.activation", "SiluAndMul").exists()
