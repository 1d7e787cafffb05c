from collections.abc import Iterator

import pytest

from deltafl.simulation.parallel.workers import one_thread


@pytest.fixture(autouse=True)
def as_the_workers_do() -> Iterator[None]:
    """Several threads would divide sums by the number of clients."""
    with one_thread():
        yield
