"""The pool of ranks that the other tests run on: what a failing rank says."""

import pytest


def fails(group, value):
    found = {"rank": group.rank(), "value": value}
    assert found["value"] == group.rank()


def test_a_failed_assertion_shows_its_values(ranks):
    with pytest.raises(AssertionError) as error:
        ranks(2).run(fails, 0)
    assert "rank 1:" in str(error.value)
    assert "rank 0:" not in str(error.value)
    assert "assert 0 == 1" in str(error.value)
