"""Two processes play one run (gloo, CPU): the record of one process, also after a resume; no
hanging after a crash.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl.errors import DeltaflError
from deltafl.simulation.distributed import ProcessGroup, divided, refuse_processes
from deltafl.simulation.run import run_single
from tools.rank_processes import RESUMED, RUNS, quiet, settings_of
from tools.simulation import lines_of


def two_processes(end: str, folder: Path) -> list[tuple[int, str]]:
    """Exit codes and last words of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= os.environ | place | {"OMP_NUM_THREADS": "1"}
    tool = str(Path(__file__).parents[1] / "tools" / "rank_processes.py")
    program = [sys.executable, tool, end, str(folder)]
    processes = [
        subprocess.Popen(
            program, env=place | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    return [(process.returncode, words) for process, words in zip(processes, said, strict=True)]


Played = tuple[Path, list[tuple[int, str]]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """All runs by two processes, the last of which fails in the second one; and the same runs by
    one process.
    """
    folder = tmp_path_factory.mktemp("ranks")
    ends = two_processes("fails", folder)
    for name, settings in RUNS.items():
        run_single(settings_of(settings), folder / f"{name}-alone", quiet)
    return folder, ends


@pytest.mark.parametrize(
    "pair",
    [
        *(f"{name} {name}-alone" for name in RUNS),
        *(f"{name} {name}-again" for name in RESUMED),
        "theory theory-file",
    ],
)
def test_the_bits_are_those_of_one_process_or_of_an_unbroken_run(played: Played, pair: str) -> None:
    one, other = ((played[0] / name / "rounds.jsonl").read_bytes() for name in pair.split())
    assert one == other
    assert not Path("nowhere").exists()


def test_a_failure_is_reported_in_the_other_process(played: Played) -> None:
    (code, words), (other_code, other_words) = played[1]
    assert (code, other_code) == (2, 2)
    assert "process 1 failed: the callback on_round failed in round 2 of pracdelta, seed 0" in words
    assert "the second process is out of luck" in words
    assert other_words.startswith("the callback on_round failed in round 2 of pracdelta, seed 0")


@pytest.mark.thorough
def test_after_a_kill_the_others_end_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    (code, words), (killed, _) = two_processes("killed", tmp_path)
    assert (code, killed) == (2, -9)
    assert "another process of this run ended unexpectedly" in words
    settings = settings_of({"sampler": "pracdelta"})
    run_single(settings, tmp_path / "killed", quiet)  # by one process
    run_single(settings, tmp_path / "alone", quiet)
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "alone")


@given(st.lists(st.floats(0.1, 100.0), max_size=30), st.integers(1, 5))
def test_shares_are_balanced_and_complete(costs: list[float], count: int) -> None:
    shares = divided(costs, count)
    assert sorted(place for share in shares for place in share) == list(range(len(costs)))
    loads = [sum(costs[place] for place in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0.0) + 1e-9
    assert shares == divided(costs, count)


def test_what_several_processes_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_processes("compare")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        DeltaflError, match="several processes cannot do 'deltafl compare' together"
    ):
        refuse_processes("compare")
    group = ProcessGroup()
    group.count = 2
    with pytest.raises(DeltaflError, match="this run has several"):
        run_single(
            settings_of({"memory_path": "rows", "sampler": "innovation"}), tmp_path, quiet, group
        )
    monkeypatch.setattr(group, "gathered", lambda data: [data, {"data_crc32": "0"}], raising=False)
    with pytest.raises(
        DeltaflError,
        match=r"different data \(checksums 0, \w{8}\); give every machine the same copy",
    ):
        run_single(settings_of({}), tmp_path, quiet, group)
