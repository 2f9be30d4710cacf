import os
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Ranks

# Triton decides at import whether its kernels are compiled or interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of up to four gloo ranks: ``ranks.run(4, function, ...)``."""
    pool = Ranks(4)
    yield pool
    pool.close()
