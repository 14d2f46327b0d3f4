"""Rows that are filled on demand."""

from ascend_parallel.overlap.region.rows import LazyRows


def test_rows_are_filled_once_in_order_and_only_as_far_as_needed():
    filled = []
    rows = LazyRows((16, 32, 8), filled.append)
    assert rows.filled == 0
    rows.up_to(0)
    assert filled == []
    rows.up_to(17)
    assert (filled, rows.filled) == ([0, 1], 48)
    rows.up_to(48)
    assert filled == [0, 1]
    rows.finish()
    rows.finish()
    assert (filled, rows.filled) == ([0, 1, 2], 56)


def test_a_chunk_is_pulled_through_a_chain():
    order = []
    first = LazyRows((2, 2, 2), lambda index: order.append(f"first {index}"))

    def fill(index):
        first.up_to(3 * (index + 1))
        order.append(f"second {index}")

    LazyRows((3, 3), fill).up_to(3)
    assert order == ["first 0", "first 1", "second 0"]
