"""What somebody has put in the place of a file of a run or of a server: nothing outside the folder is changed,
nothing hangs, and it ends in a sentence or as if it were not there.
"""

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

import deltafl
from deltafl import DeltaflError
from deltafl.simulation import export_model
from deltafl.simulation.folder.record import Job
from deltafl.simulation.parallel.sweep import run_jobs
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from tools.serving import serve
from tools.simulation import StopError, quiet, stop_after

VICTIM = "dear diary"


def link_to_nothing(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "new")


def link(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "victim")


def hard_link(place: Path, outside: Path) -> None:
    os.link(outside / "victim", place)


def pipe(place: Path, _: Path) -> None:
    os.mkfifo(place)


def folder(place: Path, _: Path) -> None:
    place.mkdir()


def device(place: Path, _: Path) -> None:
    place.symlink_to("/dev/zero")


def a_socket(place: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        # A socket's name must be short.
        before = Path.cwd()
        os.chdir(place.parent)
        try:
            made.bind(place.name)
        finally:
            os.chdir(before)


def sparse(place: Path, _: Path) -> None:
    with place.open("wb") as file:
        file.truncate(10**10)


#: All kinds in the place of all files take minutes: else each file has its share of the kinds.
SHARE = 1 if os.environ.get("DELTAFL_ALL_PLACES") else 6
KINDS = (link_to_nothing, link, hard_link, pipe, folder, device, a_socket, sparse)


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def settings_of(root: Path, rounds: int, sampler: str) -> RunSettings:
    given = {"task": "toy", "sample": 2, "checkpoint_every": 1, "rounds": rounds}
    if sampler == "innovation":
        given["memory_path"] = str(root / "memory")
    return make_settings(RunSettings, {**given, "sampler": sampler})


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "outside"
    place.mkdir()
    (place / "victim").write_text(VICTIM)
    yield place
    assert [each.name for each in place.iterdir()] == ["victim"]
    assert (place / "victim").read_text() == VICTIM


def replaced(place: Path, kind: Callable[[Path, Path], None], outside: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    kind(place, outside)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", ["census", "innovation"])
def test_what_is_planted_in_a_run(
    sampler: str, kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path
) -> None:
    root = tmp_path / "root"
    with suppress(StopError):
        run_single(settings_of(root, 3, sampler), root / "out", stop_after(2))
    files = [each.relative_to(root) for each in root.rglob("*") if each.is_file()]
    assert len(files) >= 6
    files += [file.with_name(file.name + ".part") for file in files]
    files += [Path("out.lock"), Path("out/suspect.safetensors")]
    shutil.copytree(root, tmp_path / "kept")
    for file in files[KINDS.index(kind) % SHARE :: SHARE]:
        for rounds in (4,):
            shutil.rmtree(root)
            shutil.copytree(tmp_path / "kept", root)
            replaced(root / file, kind, outside)
            reads = (
                lambda: deltafl.load(root / "out"),
                lambda: export_model(root / "out", root / "model.pt"),
                lambda rounds=rounds: run_single(
                    settings_of(root, rounds, sampler), root / "out", quiet
                ),
            )
            for read in reads:
                with in_time(30), suppress(DeltaflError):
                    read()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_planted_in_the_folders_of_a_server(
    mapped: bool, kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path
) -> None:
    root = tmp_path / "root"
    play = partial(serve, root, "innovation", mapped=mapped)
    play(rounds=3)
    files = [each.relative_to(root) for each in root.rglob("*") if each.is_file()]
    assert len(files) >= 2
    files += [file.with_name(file.name + ".part") for file in files]
    files += [Path("state/federation.lock"), Path("state"), *{file.parent for file in files}]
    shutil.copytree(root, tmp_path / "kept")
    for file in files[KINDS.index(kind) % SHARE :: SHARE]:
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "kept", root)
        replaced(root / file, kind, outside)
        with in_time(30), suppress(DeltaflError):
            play(rounds=5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planted_before_a_server_begins(
    kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path
) -> None:
    names = [f"federation{age}.safetensors" for age in ("", "-1", "-2")]
    places = [f"state/{name}{end}" for name in names for end in ("", ".part")]
    for name in (*places, "state/federation.lock", "state", "disk"):
        root = tmp_path / name.replace("/", "-")
        (root / name).parent.mkdir(parents=True)
        kind(root / name, outside)
        with in_time(30), suppress(DeltaflError):
            serve(root, "innovation", mapped="-" not in name)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planted_before_a_run_begins(
    kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path
) -> None:
    names = (
        "config.toml environment.json engine.json rounds.jsonl timings.jsonl clients.json "
        "checkpoint.safetensors census.safetensors ../out.lock"
    )
    for name in names.split()[KINDS.index(kind) % SHARE :: SHARE]:
        for end in ("", ".part"):
            root = tmp_path / f"{name.strip('./')}{end}"
            (root / "out").mkdir(parents=True)
            kind(root / "out" / f"{name}{end}", outside)
            with in_time(30), suppress(DeltaflError):
                run_single(settings_of(root, 2, "census"), root / "out", quiet)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planted_in_a_sweep(
    kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path
) -> None:
    job = Job("a", settings_of(tmp_path / "root", 2, "uniform"))
    names = ("runs", "runs/a", f"runs/{job.key}.json", f"runs/{job.key}.json.part")
    for name in (*names, "unfinished", "unfinished/a", f"unfinished/{job.key}", "../out.lock"):
        shutil.rmtree(tmp_path / "root", ignore_errors=True)
        place = tmp_path / "root" / "out" / name
        (tmp_path / "root" / "out").mkdir(parents=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        kind(place, outside)
        with in_time(30), suppress(DeltaflError):
            run_jobs([job], tmp_path / "root" / "out", 1, quiet)


@pytest.mark.parametrize("name", ["runs", "runs/uniform-seed0"])
def test_no_link_below_a_folder_is_followed(name: str, tmp_path: Path, outside: Path) -> None:
    given = {"task": "toy", "seeds": 1, "rounds": 2, "sample": 2, "processes": 1}
    place = tmp_path / "out" / name
    place.parent.mkdir(parents=True)
    place.symlink_to(outside)
    with suppress(DeltaflError):
        deltafl.compare(samplers="uniform", out=tmp_path / "out", progress=False, **given)  # type: ignore[arg-type]


@pytest.mark.drawn
@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_pictures_and_tables_are_written_to_files_of_their_own(
    kind: Callable[[Path, Path], None], tmp_path: Path, outside: Path
) -> None:
    run_single(settings_of(tmp_path, 2, "uniform"), tmp_path / "out", quiet)
    found = deltafl.load(tmp_path / "out")
    for name in ("summary.json", "accuracy.png", "report.html", "progress.png.part"):
        place = tmp_path / name.replace(".", "-")
        place.mkdir()
        kind(place / name, outside)
        with in_time(30), suppress(DeltaflError):
            found.write(place, report=name == "report.html")
    writers: list[Callable[[Path], object]] = [found.to_csv, found.to_latex, found.report]
    for number, write in enumerate(writers):
        kind(tmp_path / f"{number}", outside)
        with in_time(30), suppress(DeltaflError):
            write(tmp_path / f"{number}")
