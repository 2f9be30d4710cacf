from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of up to four gloo ranks: ``ranks.run(4, function, ...)``."""
    pool = Ranks(4)
    yield pool
    pool.close()
