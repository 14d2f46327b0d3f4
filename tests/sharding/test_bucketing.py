"""Which tensors share a bucket: keys, the smaller first bucket, and tensors that are larger than a bucket."""

from ascend_parallel.sharding.bucketing import form_buckets


def test_the_first_bucket_of_each_key_is_smaller_and_keys_do_not_mix():
    items = [("a", 3), ("b", 3), ("a", 1), ("a", 6), ("a", 4), ("a", 1), ("b", 2)]
    assert form_buckets(items, 10, 4) == [[0, 2], [1], [3, 4], [5], [6]]


def test_a_larger_item_is_a_bucket_of_its_own():
    assert form_buckets([("a", 1), ("a", 20), ("a", 9), ("a", 1)], 10, 4) == [[0], [1], [2, 3]]
    assert form_buckets([("a", 20), ("a", 9)], 10, 4) == [[0], [1]]


def test_the_first_bucket_is_no_larger_than_the_others():
    assert form_buckets([("a", 2), ("a", 2), ("a", 1)], 3, 4) == [[0], [1, 2]]
