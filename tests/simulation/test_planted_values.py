"""What somebody has written in a file of a run, under a checksum that is right: what reads it ends in
one sentence, or shows what it says.
"""

import copy
import json
import shutil
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deltafl
from deltafl.cli.main import app, run_app
from deltafl.simulation import RunSettings, export_model, make_settings
from deltafl.simulation.folder.checkpoint import FILE
from deltafl.simulation.folder.record import Job, RunStore
from deltafl.store.sealed import read_sealed, write_sealed
from tools.simulation import reseal, run_job

#: Of each type of JSON, and what JSON has no word for.
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 2**31, 2**63, 10**400, -0.5, 0.5, 1e308, -1e308, 1e101),
    *(
        float("nan"),
        float("inf"),
        "",
        "x",
        "7",
        "nan",
        "\x1b[2J\u202e",
        "../x",
        "\x00",
        "x" * 10**5,
    ),
    *(
        [],
        [1],
        [[1]],
        [None],
        ["x"],
        {},
        {"name": 1},
        {"x": {"y": []}},
        {"why": "x", "kept": 1, "z": 2},
    ),
    *(
        [{"name": "x", "text": 5, "sign": "a"}],
        [{"name": "accuracy", "higher": False}],
        [[10**9, "x"]],
    ),
)
#: Stands for an entry that is left out.
GONE = object()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``all``: a comparison; ``sweep``: a run that is recorded."""
    folder = tmp_path_factory.mktemp("played")
    given: dict[str, Any] = {
        "task": "toy",
        "rounds": 2,
        "sample": 2,
        "speeds": "lognormal(sigma=0.5)",
    }
    deltafl.compare(
        samplers="uniform,census", seeds=1, processes=1, progress=False, out=folder / "all", **given
    )
    run_job(job_in(folder), folder / "sweep")
    return folder


def job_in(folder: Path) -> Job:
    given = {"task": "toy", "rounds": 2, "sample": 2, "sampler": "uniform"}
    return Job("a", make_settings(RunSettings, given))


def files_of(folder: Path) -> list[Path]:
    kinds = {".json", ".jsonl", ".toml", ".safetensors"}
    found = [file.relative_to(folder) for file in folder.rglob("*") if file.suffix in kinds]
    return sorted(file for file in found if file.name != "summary.json")


def opened(file: Path) -> Any:
    if file.suffix == ".safetensors":
        return read_sealed(file, "")[1]
    text = file.read_text()
    if file.suffix == ".toml":
        return tomllib.loads(text)
    return list(map(json.loads, text.splitlines())) if file.suffix == ".jsonl" else json.loads(text)


def write(file: Path, value: Any) -> None:
    if file.suffix == ".safetensors":
        header = value if isinstance(value, dict) else {"x": value}
        write_sealed(file, read_sealed(file, "")[0], header)
    elif file.suffix == ".toml":
        file.write_text(tomli_w.dumps(value))
    elif file.suffix == ".jsonl" and isinstance(value, list):
        file.write_text("".join(json.dumps(line) + "\n" for line in value))
    else:
        file.write_text(json.dumps(value))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each entry; of a list the first and the last one."""
    yield path
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from places(entry, (*path, key))
    elif isinstance(value, list):
        for index in {0: 0, len(value) - 1: 0} if value else ():
            yield from places(value[index], (*path, index))


def planted(value: Any, path: tuple[Any, ...], entry: Any) -> Any:
    if not path:
        return entry if entry is not GONE else {}
    changed = copy.deepcopy(value)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if entry is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = entry
    return changed


def command(*words: str) -> Callable[[Path], None]:
    def call(folder: Path) -> None:
        with pytest.raises(SystemExit) as end:
            run_app(app, [word.format(folder) for word in words])
        assert (end.value.code or 0) in (0, 2, 3)

    return call


def shown(folder: Path) -> None:
    found = deltafl.load(folder / "all")
    assert repr(found) and found.to_csv() and found.to_latex()
    for table in (found.summary(), found.runs(), found.clients()):
        assert len(table)


def resumed(folder: Path) -> None:
    deltafl.compare(
        task="toy", samplers="uniform,census", seeds=1, processes=1, progress=False, report=False,
        out=folder / "all", rounds=3, sample=2, speeds="lognormal(sigma=0.5)",
    )  # fmt: skip


def recorded(folder: Path) -> None:
    record = RunStore(folder / "sweep").get(job_in(folder))
    assert record is not None
    record.run()


READERS: dict[str, Callable[[Path], object]] = {
    "load": shown,
    "report": command("report", "{}/all", "--out", "{}/o", "--no-report"),
    "export": lambda folder: export_model(folder / "all/runs/census-seed0", folder / "m.pt"),
    "compare": resumed,
    "sweep": recorded,
}


def read(folder: Path, reader: str) -> str:
    """``"shown"``, or ``"refused"`` in one sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of the pictures and of torch.
        warnings.simplefilter("ignore", UserWarning)
        try:
            READERS[reader](folder)
        except deltafl.DeltaflError as error:
            assert "\n" not in str(error) and len(str(error)) < 5000
            return "refused"
    return "shown"


def tried(
    played: Path,
    folder: Path,
    file: Path,
    path: tuple[Any, ...],
    entry: Any,
    readers: Iterable[str] = READERS,
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(played, folder)
    place = folder / file
    content = planted(opened(place), path, entry)
    # As older records are: a checksum would hide the rest.
    if isinstance(content, dict) and "sweep" in file.parts and path[:1] != ("crc32",):
        content.pop("crc32", None)
    write(place, content)
    if place.name != FILE and (place.parent / FILE).exists():
        reseal(place.parent)
    for reader in readers:
        if ("sweep" in file.parts) == (reader == "sweep"):
            read(folder, reader)


#: Readers, and how many planted values are tried; those that draw or play take a second each.
TRIED = [(("load", "export", "sweep"), 40), (("report",), 4), (("compare",), 4)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("readers", "examples"), TRIED)
def test_what_is_planted_is_a_sentence_or_is_shown(
    played: Path, tmp_path: Path, readers: tuple[str, ...], examples: int
) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=[*HealthCheck])
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        plant(played, tmp_path / "copy", data, readers)

    one()


def plant(played: Path, folder: Path, data: st.DataObject, readers: Iterable[str]) -> None:
    file = data.draw(st.sampled_from(files_of(played)))
    path = data.draw(st.sampled_from([*places(opened(played / file))]))
    others = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    )
    entry = data.draw(st.sampled_from([*VALUES, GONE]) | others)
    if file.suffix == ".toml" and (not path or not is_toml(entry)):
        return
    tried(played, folder, file, path, entry, readers)


def is_toml(entry: Any) -> bool:
    try:
        tomli_w.dumps({"x": entry})
    except (TypeError, ValueError):
        return entry is GONE
    return True


def test_planted_answers_to_a_census_are_a_sentence_or_count(played: Path, tmp_path: Path) -> None:
    census = Path("all/runs/census-seed0/census.safetensors")
    arrays, header = read_sealed(played / census, "")
    answers = arrays["answer_mk"]
    changes = [answers[None], answers[0], answers[:-1], answers[:, :-1], answers[:0]]
    for changed in (*changes, answers > 0, answers.astype(np.float32), np.nan * answers, None):
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(played, folder)
        given = {} if changed is None else {"answer_mk": changed}
        write_sealed(folder / census, given, header)
        reseal((folder / census).parent)
        read(folder, "compare")
