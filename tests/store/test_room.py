"""How much memory is left."""

from pathlib import Path

import pytest

from deltafl.store import room


def test_a_container_has_less_memory_than_its_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(room, "_CONTAINER", tmp_path)
    machine = room.free_ram()
    if machine is None:
        pytest.skip("the system does not say")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\nactive_file 50\n")
    for most, left in (("1000", 450), ("100", 0)):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        assert room.free_ram() == left
    (tmp_path / "memory.max").write_text("max\n")
    assert room.free_ram() > 10**6  # type: ignore[operator]
