"""The options of ``run`` and ``compare``: what a folder holds already, and what would be
ignored.
"""

import logging
from pathlib import Path
from typing import Any

import pytest

from deltafl.cli.common import path_name
from deltafl.cli.options import Given, settings_from
from deltafl.errors import DeltaflError
from deltafl.simulation.folder.directory import write_header
from deltafl.simulation.settings import CompareSettings, RunSettings, Settings, make_settings

RUN = RunSettings
COMPARISON = CompareSettings


def settings(
    kind: type[Settings], out: Path | None = None, resume: bool = False, *sets: str, **given: Any
) -> Settings:
    config = given.pop("config", None)
    return settings_from(kind, Given(given, [*sets], config, out, resume))


@pytest.mark.parametrize("resume", [True, False])
def test_the_folder_of_another_command_is_named(tmp_path: Path, resume: bool) -> None:
    for kind in (RUN, COMPARISON):
        write_header(tmp_path / kind.__name__, make_settings(kind, {"task": "toy"}))
    with pytest.raises(
        DeltaflError, match="holds what deltafl run began; go on with: deltafl run --resume --out "
    ):
        settings(COMPARISON, tmp_path / "RunSettings", resume)
    with pytest.raises(
        DeltaflError,
        match="holds what deltafl compare began; go on with: deltafl compare --resume --out",
    ):
        settings(RUN, tmp_path / "CompareSettings", resume)
    assert settings(RUN, tmp_path / "RunSettings", resume=True).task == "toy"


def test_a_comparison_grows_without_resume_and_nothing_else_does(tmp_path: Path) -> None:
    write_header(
        tmp_path / "all",
        make_settings(COMPARISON, {"samplers": "full,uniform", "seeds": 2, "proximal": 0.1}),
    )
    grown = settings(
        COMPARISON, tmp_path / "all", samplers="uniform,fedavg", seeds="1,7", rounds=50
    )
    assert isinstance(grown, CompareSettings)
    assert (grown.samplers, grown.seeds, grown.rounds) == (
        ("full", "uniform", "fedavg"),
        (0, 1, 7),
        50,
    )
    assert grown.proximal == 0.1
    write_header(tmp_path / "one", make_settings(RUN, {"rounds": 4}))
    for kind, out, given in ((COMPARISON, "all", {"proximal": 0.1}), (RUN, "one", {"rounds": 5})):
        with pytest.raises(DeltaflError, match="already holds a run; add --resume"):
            settings(kind, tmp_path / out, **given)
    assert settings(RUN, tmp_path / "one", resume=True, rounds=5).rounds == 5


@pytest.mark.parametrize(
    ("task", "key", "value", "why"),
    [
        ("synthetic", "alpha", 0.3, "only Dirichlet partitions have it"),
        ("toy", "alpha", 0.3, "only Dirichlet partitions have it"),
        ("mnist", "alpha", 0.3, "only Dirichlet partitions have it"),
        ("digits", "noise", 5, "only the task 'synthetic' has it"),
        ("digits", "truth", [1.0, 2.0], "only the task 'synthetic' has it"),
        ("digits", "column", "foo", "only the partition 'natural' and tables have it"),
    ],
)
def test_options_that_the_task_does_not_look_at_are_refused(
    tmp_path: Path, task: str, key: str, value: object, why: str
) -> None:
    with pytest.raises(DeltaflError, match=f"{key} does nothing here: {why}; leave it out"):
        settings(RUN, tmp_path / "out", False, f"{key}={value}", task=task)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["data_dir", "memory_path", "task"])
def test_names_that_are_not_utf8_are_refused(key: str) -> None:
    with pytest.raises(DeltaflError, match=rf"{key} is 'd\\udcff', which is not text in UTF-8"):
        make_settings(RUN, {key: "d\udcff"})
    assert make_settings(RUN, {"data_dir": "Größe"}).data_dir == "Größe"


def test_a_home_in_a_path_is_found_where_shells_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_name("~/runs") == tmp_path / "runs"
    assert path_name("~nobody-here/runs") == Path("~nobody-here/runs")


@pytest.mark.parametrize(
    ("kind", "given"), [(RUN, {"rounds": 3}), (COMPARISON, {"seeds": 2, "samplers": "uniform"})]
)
def test_what_people_give_to_go_on_begins_nothing(
    tmp_path: Path, kind: Any, given: dict[str, Any]
) -> None:
    """A mistyped folder is no wish for another experiment."""
    with pytest.raises(DeltaflError, match=r"there is no run in .*typo to resume; .*--task"):
        settings(kind, tmp_path / "typo", resume=True, **given)


def test_the_command_to_go_on_with_is_quoted_and_nothing_to_continue_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_header(tmp_path / "my runs", make_settings(RUN, {"task": "toy"}))
    with pytest.raises(DeltaflError, match=r"deltafl run --resume --out '.*my runs', or choose"):
        settings(COMPARISON, tmp_path / "my runs")
    with caplog.at_level(logging.INFO, "deltafl"):
        settings(RUN, tmp_path / "none", resume=True, rounds=3, task="toy")
    assert f"there is nothing to continue in {tmp_path / 'none'}: it begins anew" in caplog.text
