"""Run folders that survive: power losses, full disks, copies put back, and what somebody else
has planted in them.
"""

import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltafl import DeltaflError
from deltafl.simulation.folder.checkpoint import change_checkpoint
from deltafl.simulation.folder.directory import RunDirectory, recorded_settings
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from tools.simulation import TINY, StopError, quiet, stop_after

ROOT = Path(__file__).parents[2]


def settings_of(root: Path, **more: object) -> RunSettings:
    given = {
        **TINY,
        "sampler": "innovation",
        "checkpoint_every": 2,
        "memory_path": str(root / "memory"),
        **more,
    }
    return make_settings(RunSettings, given)


def broken(root: Path, rounds: int = 5, **more: object) -> Path:
    """The folder of a run that was stopped."""
    with pytest.raises(StopError):
        run_single(settings_of(root, **more), root / "run", stop_after(rounds))
    return root / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Disk:
    """What a power loss leaves: the bytes of files that were synced, under names whose folder
    was synced.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bytes = dict[int, bytes]()
        self.names = dict[Path, bytes]()

    def fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            files = [file for file in path.iterdir() if file.is_file()]
            self.names = {
                file: kept
                for file, kept in self.names.items()
                if file.parent != path or file in files
            }
            self.names |= {file: self.bytes.get(file.stat().st_ino, b"") for file in files}
        else:
            self.bytes[os.fstat(descriptor).st_ino] = path.read_bytes()
            if path in self.names:
                self.names[path] = path.read_bytes()

    def lose_power(self) -> None:
        for file in self.root.rglob("*"):
            if file.is_file():
                file.unlink()
        for file, kept in self.names.items():
            file.write_bytes(kept)


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are read from /proc")
@pytest.mark.parametrize("rounds", [1, 4])
def test_after_a_power_loss_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """Bytes that no fsync has brought to the disk are lost, and names in folders that were not
    synced.
    """
    run_single(settings_of(tmp_path / "whole"), tmp_path / "whole" / "run", quiet)
    disk = Disk(tmp_path / "lost")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk.fsync)
        run = broken(tmp_path / "lost", rounds)
    disk.lose_power()
    assert (run / "rounds.jsonl").stat().st_size > 0
    run_single(settings_of(tmp_path / "lost"), run, quiet)
    assert (run / "rounds.jsonl").read_bytes() == (
        tmp_path / "whole" / "run" / "rounds.jsonl"
    ).read_bytes()
    rows, whole = (
        next((tmp_path / name / "memory").glob("*/rows.bin")) for name in ("lost", "whole")
    )
    assert rows.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("named", ["diary", "memory/diary-0123abcd", "link"])
def test_what_a_run_folder_names_is_neither_deleted_nor_written(tmp_path: Path, named: str) -> None:
    run = broken(tmp_path)
    other = tmp_path / named
    if named == "link":
        (tmp_path / "diary").mkdir()
        other = tmp_path / "memory" / "link-0123abcd"
        other.symlink_to(tmp_path / "diary")
    other.mkdir(exist_ok=True)
    (other / "diary.txt").write_text("dear diary")
    change_checkpoint(run, memory=str(other))
    with pytest.raises(DeltaflError, match=r"no folder of a run in|are not there"):
        run_single(settings_of(tmp_path), run, quiet)
    directory = RunDirectory(run)
    if named.startswith("memory"):
        directory.memory_folder(str(tmp_path / "memory"))
    directory.delete()
    assert content(other) == {"diary.txt": b"dear diary"}


def test_a_run_deletes_its_own_files_alone(tmp_path: Path) -> None:
    run_single(settings_of(tmp_path), tmp_path / "run", quiet)
    directory = RunDirectory(tmp_path / "run")
    memory = directory.memory_folder(str(tmp_path / "memory"))
    assert memory is not None
    for file in (memory / "rows-mine.bin", directory.path / "checkpoint-best.safetensors"):
        file.write_text("mine")
    directory.delete()
    assert content(memory) == {"rows-mine.bin": b"mine"}
    assert content(directory.path) == {"checkpoint-best.safetensors": b"mine"}


@pytest.mark.parametrize(
    ("memory", "run"), [("old", "new"), ("new", "old"), ("none", "new"), ("other", "new")]
)
def test_a_memory_and_a_checkpoint_of_different_rounds_are_refused(
    tmp_path: Path, memory: str, run: str
) -> None:
    for age, rounds in (("old", 2), ("new", 4)):
        broken(tmp_path, rounds, checkpoint_every=1)
        shutil.copytree(tmp_path / "memory", tmp_path / f"memory-{age}")
        shutil.copytree(tmp_path / "run", tmp_path / f"run-{age}")
    (tmp_path / "memory-none").mkdir()
    broken(tmp_path / "another", seed=1)
    (own,), (foreign,) = (
        list((tmp_path / place).iterdir()) for place in ("memory-new", "another/memory")
    )
    shutil.copytree(foreign, tmp_path / "memory-other" / own.name)
    for name, age in (("memory", memory), ("run", run)):
        shutil.rmtree(tmp_path / name)
        shutil.copytree(tmp_path / f"{name}-{age}", tmp_path / name)
    before = content(tmp_path)
    with pytest.raises(
        DeltaflError, match=r"updates in .* are (of round \d|not there).* last checkpoint of "
    ):
        run_single(settings_of(tmp_path), tmp_path / "run", quiet)
    assert content(tmp_path) == before


def test_a_row_with_another_bit_is_refused(tmp_path: Path) -> None:
    run = broken(tmp_path, 5, clients=6)
    rows = next((tmp_path / "memory").glob("*/rows.bin"))
    changed = bytearray(rows.read_bytes())
    for place in range(0, len(changed), 100):
        changed[place] ^= 1
    rows.write_bytes(changed)
    with pytest.raises(
        DeltaflError, match=r"the update of client \d in .*rows\.bin is not as it was written"
    ):
        run_single(settings_of(tmp_path, clients=6, rounds=6), run, quiet)


@pytest.mark.parametrize(("key", "value"), [("sampler", "fedvarp"), ("rounds", 7)])
def test_settings_that_were_edited_are_refused(tmp_path: Path, key: str, value: object) -> None:
    run = broken(tmp_path)
    config = run / "config.toml"
    before = config.read_text()
    old = next(line for line in before.splitlines() if line.startswith(f"{key} = "))
    config.write_text(before.replace(old, f"{key} = {json.dumps(value)}"))
    edited = make_settings(RunSettings, recorded_settings(run) or {})
    with pytest.raises(
        DeltaflError,
        match=rf"{key} = {value}, and the checkpoint beside it .*: put {key} = .* back",
    ):
        run_single(edited, run, quiet)
    config.write_text(before)
    run_single(settings_of(tmp_path, rounds=8), run, quiet)  # more rounds may be asked for


def test_nothing_is_cut_off_before_the_checkpoint_is_known_to_fit(tmp_path: Path) -> None:
    """With the checkpoint of another run, of more clients and fewer rounds."""
    run = broken(tmp_path)
    other = broken(tmp_path / "other", 3, clients=20, seed=1)
    for path in (*run.glob("checkpoint*"), *other.glob("checkpoint*")):
        shutil.copy(path, run) if path.parent == other else path.unlink()
    before = content(run)
    with pytest.raises(DeltaflError):
        run_single(settings_of(tmp_path), run, quiet)
    assert content(run) == before


def test_a_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    run = broken(tmp_path)
    (run / "checkpoint.safetensors").rename(run / "checkpoint-4.safetensors")
    with pytest.raises(DeltaflError, match=r"no checkpoint\.safetensors: delete this run's folder"):
        run_single(settings_of(tmp_path), run, quiet)


def test_damage_at_random_places_never_misleads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python benchmarks/damage.py`` tries many more."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import damage

    outcomes, wrong = damage.count(24, 0, tmp_path)
    assert wrong == []
    assert outcomes["refused"] >= 8
    assert outcomes["finite"] <= 12


def test_many_clients_state_with_damage_is_refused_or_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python benchmarks/damage.py --million`` tries many more."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import damage

    outcomes, wrong, _ = damage.count_million(8, 0, tmp_path, 10**5)
    assert wrong == []
    assert outcomes.total() == 8


def test_states_and_memories_are_for_their_owner_alone(tmp_path: Path) -> None:
    run = broken(tmp_path)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    private = {name for name, mode in modes.items() if mode & 0o077 == 0}
    memory = next((tmp_path / "memory").iterdir())
    assert private == {next(run.glob("*.safetensors")).name, memory.name, "rows.bin", "round"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.thorough
def test_a_full_disk_under_the_memory_ends_in_a_sentence(small_disk: Path, tmp_path: Path) -> None:
    """In a process of its own: it was killed by SIGBUS."""
    (small_disk / "other").write_bytes(bytes(40_000))
    script = (
        "import sys; sys.path.insert(0, 'tests'); import deltafl.scale.memory_budget as budget\n"
        "from tools.simulation import *; budget.shutil.disk_usage = lambda _: type('', (), "
        "{'free': 1e9})\n"
        "try: run(Path(sys.argv[1]), **TINY, sampler='innovation', checkpoint_every=2, "
        "memory_path=sys.argv[2])\n"
        "except ValueError as error: sys.exit(str(error))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run"), str(small_disk)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1, done.stderr
    assert "rows.bin: No space left on device; make room" in done.stderr
    (small_disk / "other").unlink()
    subprocess.run(command, cwd=ROOT, check=True)


def test_a_file_that_cannot_grow_is_named(tmp_path: Path) -> None:
    run = broken(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(
            DeltaflError,
            match=r"^cannot write .*\.(bin|jsonl|part|json|safetensors): File too large; make room",
        ):
            run_single(settings_of(tmp_path), run, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run_single(settings_of(tmp_path), run, quiet)
