"""Tasks on images: clothes split by kind, and archives with writers or packed JPEG, made here and tiny."""

from pathlib import Path

import numpy as np
import pytest

from deltafl.tasks.registry import make_task
from deltafl.tasks.sources import SOURCES


@pytest.mark.skipif(
    not SOURCES["fashion-mnist"].system_folders[0].is_dir(), reason="Debian's data set is not installed"
)
def test_split_fashion_mnist_has_the_papers_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)
    task = make_task("split-fashion-mnist", seed=0)
    assert [len(rows) for rows in task.client_rows] == [6000] * 9 + [60] * 100
    assert {len(np.unique(task.dataset.train_y[rows])) for rows in task.client_rows} == {1}
    assert len({int(task.dataset.train_y[rows[0]]) for rows in task.client_rows[8:]}) == 2
    assert (task.name, task.dataset.name) == ("split-fashion-mnist", "fashion-mnist")
