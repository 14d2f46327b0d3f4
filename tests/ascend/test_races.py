"""No path of this package has an access to memory that nothing orders; a wait that is left out is found as one."""

import pytest
from races_of import races_of, with_each_wait_left_out

CHUNKS, TREE, ORDERED = (
    {"num_chunks": 4},
    {"num_chunks": 4, "deterministic": "tp"},
    {"num_chunks": 4, "deterministic": True},
)
REGION = {"num_chunks": 4, "region": True, "region_rows": 8}
LAYERS = [
    ("layer", (kind, sequence, settings))
    for kind in ("column", "row")
    for sequence in (False, True)
    for settings in (CHUNKS, ORDERED, TREE)
]
EXCHANGES = [("attention", ("heads", 2)), ("attention", ("gather", 2))]
MODELS = [("gpt", (REGION,)), ("gpt", (CHUNKS,)), ("experts", ({"num_chunks": 2},))]
FUSED = [("fused", (kind, sequence)) for kind in ("column", "row") for sequence in (False, True)]


def pool(ranks):
    from emulated_ascend.environment import RACES

    return ranks(EMULATED_ASCEND_SEED="7", EMULATED_ASCEND_DELAY_US="3000", **RACES)


@pytest.mark.promise("npu-order")
@pytest.mark.parametrize(("path", "arguments"), [*LAYERS, *EXCHANGES, *FUSED, *MODELS], ids=str)
def test_every_access_is_ordered(ranks, path, arguments):
    assert pool(ranks).run(races_of, path, arguments) == [[], []]


@pytest.mark.promise("npu-order")
@pytest.mark.parametrize(("path", "arguments"), [*LAYERS, *EXCHANGES, MODELS[0]], ids=str)
def test_a_wait_that_is_left_out_is_a_race_before_it_is_a_wrong_number(ranks, path, arguments):
    """A wait may be covered by a later one of its stream; then the numbers are right too, however late kernels are."""
    first, second = pool(ranks).run(with_each_wait_left_out, path, arguments, 12)
    found = [race for race, _ in first]
    assert any(found), found
    wrong = [a or b for (_, a), (_, b) in zip(first, second, strict=True)]
    assert [number for number, (race, bad) in enumerate(zip(found, wrong, strict=True)) if bad and not race] == []
