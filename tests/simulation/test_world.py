"""The world of a run: availability, speeds, drop-outs, deadlines, over-selection, and the clock."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError, Population, compare, stream
from deltafl.analysis import human_seconds
from deltafl.simulation.conditions import LogNormal
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.training.serial import LocalWork, minibatches
from deltafl.simulation.world import World
from deltafl.types import BoolArray
from tools.simulation import StopError, lines_of, run, stop_after

M = 40
ROUNDS = 3000
SHARE_MC = np.random.default_rng(0).dirichlet(np.full(4, 0.3), size=M)
POPULATION = Population.from_sizes(np.arange(10, 10 + M), aux=SHARE_MC)
WORK = LocalWork(lr=0.1, epochs=2, batch_size=8)


def world_of(
    availability: str = "always", speeds: str | None = None, seed: int = 0, **more: Any
) -> World:
    given = {"sample": 1, "availability": availability, "speeds": speeds, "seed": seed, **more}
    return World(RunSettings(**given), POPULATION, WORK.num_steps, 10_000)


def there(world: World, round: int) -> BoolArray:
    there_m, _ = world.available(round, 0.0)
    assert there_m is not None
    return there_m


def presences(text: str, rounds: int = ROUNDS) -> BoolArray:
    world = world_of(text)
    return np.array([there(world, round) for round in range(rounds)])


@pytest.mark.parametrize(
    ("text", "rate_m"),
    [
        ("bernoulli(rate=0.3)", np.full(M, 0.3)),
        ("markov(rate=0.4, memory=0.8)", np.full(M, 0.4)),
        ("labels(least=0.2, most=0.8)", SHARE_MC @ [0.2, 0.4, 0.6, 0.8]),
        ("sizes(least=0.1, most=0.7)", np.linspace(0.1, 0.7, M)),
        ("daily(share=0.25, period=20)", np.full(M, 0.25)),
    ],
)
def test_clients_are_there_as_often_as_promised(text: str, rate_m: np.ndarray) -> None:
    there_tm = presences(text)
    spread_m = np.sqrt(rate_m * (1 - rate_m) / ROUNDS) * (
        3 if "markov" in text else 1
    )  # (1 + .8) / (1 - .8) = 9
    np.testing.assert_array_less(np.abs(there_tm.mean(axis=0) - rate_m), 4.5 * spread_m + 1e-12)


def test_spells_have_the_length_of_the_chain() -> None:
    there_tm = presences("markov(rate=0.4, memory=0.8)")
    ends = (there_tm[:-1] & ~there_tm[1:]).sum()
    assert there_tm.sum() / ends == pytest.approx(1 / (0.2 * 0.6), rel=0.05)
    both = (there_tm[:-1] & there_tm[1:]).mean() / there_tm.mean()
    assert both == pytest.approx(0.4 + 0.8 * 0.6, abs=0.02)


def test_days_come_again_and_somebody_is_always_there() -> None:
    there_tm = presences("daily(share=0.3, period=24)", 72)
    assert np.array_equal(there_tm[:24], there_tm[48:])
    assert presences("daily(share=0.001, period=24)", 50).sum(axis=1).min() >= 1
    assert presences("bernoulli(rate=0.001)", 50).sum(axis=1).min() >= 1
    with pytest.raises(DeltaflError, match="nobody was available"):
        world_of("labels(least=0, most=1e-9)").available(0, 0.0)


@pytest.mark.parametrize("text", ["bernoulli", "markov", "daily", "labels", "sizes"])
def test_a_round_is_the_same_in_whichever_order_it_is_asked_for(text: str) -> None:
    forward = presences(text, 12)
    world = world_of(text)
    for round in (7, 3, 11, 3):
        assert np.array_equal(there(world, round), forward[round])
    assert not np.array_equal(forward[7], there(world_of(text, seed=1), 7))


def test_a_trace_follows_the_clock_and_the_server_waits_for_the_next_client(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("client,start,end\n3,0,10\n5,5,20\n3,40,50\n")
    world = world_of(str(path), "lognormal")

    def at(clock: float) -> tuple[list[int], float]:
        there_m, later = world.available(0, clock)
        assert there_m is not None
        return np.flatnonzero(there_m).tolist(), later

    assert at(0) == ([3], 0) and at(7) == ([3, 5], 7) and at(12) == ([5], 12)
    assert at(25) == ([3], 40)
    assert at(57) == ([3, 5], 57)  # it begins again after 50
    assert at(72) == ([3], 90)


def test_seconds_are_those_of_the_work_and_the_network() -> None:
    seconds = world_of(speeds="lognormal(seconds=0.5, megabits=2, sigma=0)").seconds_m
    steps_m = np.array(
        [len(minibatches(size, WORK, stream(0, "batches"))) for size in range(10, 10 + M)]
    )
    assert seconds is not None
    np.testing.assert_allclose(seconds, 0.5 * steps_m + 0.08 / 2)


def test_log_normal_speeds() -> None:
    many = Population.from_sizes(np.arange(1, 5001))
    step_m, megabits_m = LogNormal(seconds=0.2, megabits=5, sigma=0.7, size=0.6).begin(many, 0)
    for value_m, median in ((step_m, 0.2), (megabits_m, 5)):
        log_m = np.log(value_m / median)
        assert abs(log_m.mean()) < 4 * 0.7 / np.sqrt(5000)
        assert log_m.std() == pytest.approx(0.7, rel=0.05)
    assert np.corrcoef(np.log(step_m), np.arange(5000))[0, 1] == pytest.approx(
        0.6 * np.sqrt(3 / np.pi), abs=0.04
    )
    assert abs(np.corrcoef(np.log(megabits_m), np.arange(5000))[0, 1]) < 4 / np.sqrt(5000)


def test_a_table_of_speeds(tmp_path: Path) -> None:
    path = tmp_path / "speeds.csv"
    path.write_text("seconds,megabits\n" + "0.5,2\n" * M)
    found = world_of(speeds=str(path))
    expected = world_of(speeds="lognormal(seconds=0.5, megabits=2, sigma=0)")
    assert found.seconds_m is not None and expected.seconds_m is not None
    np.testing.assert_allclose(found.seconds_m, expected.seconds_m)


# --- how a round ends
# ------------------------------------------------------------------------------------------------

ALL = np.arange(M)


def fast(**more: Any) -> World:
    return world_of(speeds="lognormal(jitter=0)", **more)


def test_without_limits_the_slowest_ends_the_round() -> None:
    waited = fast().wait(0, ALL)
    assert waited.responded_n.all() and waited.seconds == fast().seconds_m.max()  # type: ignore[union-attr]


def test_a_deadline_keeps_who_is_in_time() -> None:
    seconds_m = fast().seconds_m
    assert seconds_m is not None
    deadline = float(np.median(seconds_m))
    waited = fast(deadline=deadline).wait(0, ALL)
    assert waited.seconds == deadline and np.array_equal(waited.responded_n, seconds_m <= deadline)
    assert fast(deadline=1e9).wait(0, ALL).seconds == seconds_m.max()


def test_over_selection_keeps_the_first() -> None:
    seconds_m = fast().seconds_m
    assert seconds_m is not None
    waited = fast(over_select=1.3).wait(0, ALL[:13])
    assert waited.responded_n.sum() == 10
    assert waited.seconds == np.sort(seconds_m[:13])[9]
    assert np.array_equal(waited.responded_n, seconds_m[:13] <= waited.seconds)
    # Fewer are there than were wanted: n are kept. Everybody is selected, as by full: the same
    # share.
    kept = [
        fast(over_select=1.3, sample=10).wait(0, ALL[:size]).responded_n.sum()
        for size in (8, 11, 39)
    ]
    assert kept == [8, 10, 30]


def test_drop_outs_are_a_share_and_do_not_depend_on_the_cohort() -> None:
    world = fast(dropout=0.2)
    lost = [~world.wait(round, ALL).responded_n for round in range(500)]
    assert np.mean(lost) == pytest.approx(0.2, abs=4 * 0.4 / np.sqrt(500 * M))
    assert np.array_equal(world.wait(3, ALL[5:9]).responded_n, ~lost[3][5:9])
    assert world_of(dropout=0.2).wait(3, ALL).seconds == 0.0  # no speeds, no clock


def test_a_round_ends_when_nobody_is_left_to_wait_for() -> None:
    world = fast(dropout=0.999999)
    waited = world.wait(0, ALL[:3])
    assert not waited.responded_n.any() and world.seconds_m is not None
    assert 0 < waited.seconds < world.seconds_m[:3].max()


def test_jitter_changes_rounds_not_medians() -> None:
    world = world_of(speeds="lognormal(jitter=0.3)")
    assert world.seconds_m is not None
    ratio = [world.wait(round, np.array([7])).seconds / world.seconds_m[7] for round in range(2000)]
    assert abs(np.mean(np.log(ratio))) < 4 * 0.3 / np.sqrt(2000)
    assert np.std(np.log(ratio)) == pytest.approx(0.3, rel=0.08)


# --- in a run
# --------------------------------------------------------------------------------------------------------

WORLD: dict[str, Any] = {
    "task": "digits",
    "clients": 12,
    "sample": 4,
    "rounds": 6,
    "local_epochs": 1,
    "availability": "markov(rate=0.5)",
    "speeds": "lognormal",
    "dropout": 0.2,
    "over_select": 1.5,
    "checkpoint_every": 2,
}


@pytest.mark.parametrize("sampler", ["innovation", "census"])
def test_an_interrupted_run_meets_the_same_world(tmp_path: Path, sampler: str) -> None:
    run(tmp_path / "whole", **WORLD, sampler=sampler)
    settings = make_settings(RunSettings, {**WORLD, "sampler": sampler})
    with pytest.raises(StopError):
        run_single(settings, tmp_path / "cut", stop_after(3))
    run(tmp_path / "cut", **WORLD, sampler=sampler)
    whole = lines_of(tmp_path / "whole")
    assert lines_of(tmp_path / "cut") == whole
    clock = [line.get("clock", 0.0) for line in whole]
    assert np.all(np.diff(clock) > 0)
    drawn = whole[2:] if sampler == "census" else whole[1:]  # a census waits for everybody
    assert all(1 <= line["available"] <= 12 for line in drawn)
    assert all(line["num_selected"] <= min(6, line["available"]) for line in drawn)


def test_samplers_of_one_seed_meet_one_world(tmp_path: Path) -> None:
    seen = []
    for sampler in ("uniform", "pracdelta"):
        run(tmp_path / sampler, **WORLD, sampler=sampler)
        seen.append([line["available"] for line in lines_of(tmp_path / sampler)[1:]])
    assert seen[0] == seen[1]


def test_a_world_where_everybody_is_there_has_the_bits_of_none(tmp_path: Path) -> None:
    plain = {
        key: value
        for key, value in WORLD.items()
        if key not in {"availability", "speeds", "dropout", "over_select"}
    }
    run(tmp_path / "plain", **plain)
    run(tmp_path / "timed", **plain, speeds="lognormal")
    timed = lines_of(tmp_path / "timed")
    assert [
        {key: value for key, value in line.items() if key != "clock"} for line in timed
    ] == lines_of(tmp_path / "plain")


def test_the_clock_is_in_frames_table_picture_and_report(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "clients": 12,
        "sample": 4,
        "rounds": 4,
        "local_epochs": 1,
        "threshold": 0.12,
    }
    result = compare(
        "digits", ["uniform", "oort"], 2, out=tmp_path, progress=False, speeds="lognormal", **given
    )
    runs = result.runs()
    table = result.summary()
    for (sampler, seed), rows in runs.groupby(["sampler", "seed"]):
        clock = [
            line["clock"] for line in lines_of(tmp_path / "runs" / f"{sampler}-seed{seed}")[1:]
        ]
        assert rows["clock"].tolist() == pytest.approx(clock)
    last = runs[runs["round"] == 4].groupby("sampler")["clock"].mean()
    assert table["clock"].to_dict() == pytest.approx(last.to_dict())
    assert (table["clock_to_threshold"] <= table["clock"]).all()
    assert all(
        f"{human_seconds(number)} s" in repr(result) for number in table["clock_to_threshold"]
    )
    axes = [axes for axes in result.plot().axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in axes] == ["rounds", "seconds of the virtual clock"]
    ends = [float(np.max(np.asarray(line.get_xdata()))) for line in axes[1].get_lines()[:2]]
    assert sorted(ends) == pytest.approx(sorted(last))
    result.report(tmp_path / "page.html")
    assert '<option value="clock">' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"availability": "nights"}, "nights"),
        ({"availability": "bernoulli(rate=2)"}, r"rate .*\(0, 1\]"),
        ({"availability": "labels(rate=0.5)"}, "option 'rate' of 'labels'"),
        ({"deadline": 3}, "speeds = 'lognormal'"),
        ({"over_select": 2}, "speeds = 'lognormal'"),
        ({"availability": "trace.csv"}, "speeds = 'lognormal'"),
        ({"speeds": "fast"}, "lognormal"),
        ({"speeds": "lognormal(sigma=-1)"}, "sigma"),
    ],
)
def test_impossible_worlds_are_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DeltaflError, match=sentence):
        make_settings(RunSettings, given)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("client,start\n1,2\n", "columns client, start, end, all numbers: .*'end'"),
        ("client,start,end\n1,a,3\n", "all numbers"),
        ("client,start,end\n", "no rows"),
        ("client,start,end\n99,0,3\n", "0 to 39"),
        ("client,start,end\n1e30,0,3\n", "0 to 39"),
        ("client,start,end\n1.5,0,3\n", "0 to 39"),
        ("client,start,end\n1,4,3\n", "end after it begins"),
        ("client,start,end\n1,,3\n", "not finite"),
        ("", "columns client, start, end"),
    ],
)
def test_bad_traces_are_refused_in_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(DeltaflError, match=sentence):
        world_of(str(path), "lognormal")
    with pytest.raises(DeltaflError, match="No such file"):
        world_of(str(tmp_path / "no.csv"), "lognormal")
