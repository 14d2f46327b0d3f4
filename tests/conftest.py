import pytest
from pool import RankPool

_pools = {}


@pytest.fixture(scope="session")
def ranks():
    """Give ``ranks(n)``, a pool of n gloo processes."""

    def pool(count):
        if count not in _pools or not _pools[count].alive:
            _pools[count] = RankPool(count)
        return _pools[count]

    yield pool
    for made in _pools.values():
        made.close()
    _pools.clear()
