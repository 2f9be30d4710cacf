import os
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Ranks

# Triton decides at import whether its kernels are compiled or interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def _pool() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(_pool: Ranks) -> Ranks:
    """A pool of up to four gloo ranks: ``ranks.run(4, function, ...)``."""
    return _pool


@pytest.fixture(scope="module", autouse=True)
def _fresh_workers_after_megatron(request: pytest.FixtureRequest, _pool: Ranks) -> Iterator[None]:
    """Megatron's groups stay in a worker, with threads that poll (hundreds, at last): what comes
    later would take almost twice as long."""
    yield
    if "megatron" in request.module.__name__:
        _pool.stop()
