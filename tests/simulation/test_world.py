"""The world of a run: availability, speeds, drop-outs, deadlines, over-selection, and the clock."""

from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl import DeltaflError, Population, compare, stream
from deltafl.analysis import human_amount
from deltafl.simulation.conditions import LogNormal, Measured, Trace, costs_of, find_availability
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.training.serial import LocalWork, minibatches
from deltafl.simulation.world import World
from deltafl.types import BoolArray, FloatArray
from tools.simulation import StopError, lines_of, run, stop_after

M = 40
ROUNDS = 3000
SHARE_MC = np.random.default_rng(0).dirichlet(np.full(4, 0.3), size=M)
POPULATION = Population.from_sizes(np.arange(10, 10 + M), aux=SHARE_MC)
WORK = LocalWork(lr=0.1, epochs=2, batch_size=8)
ALL = np.arange(M)


def world_of(
    availability: str = "always", speeds: str | None = None, seed: int = 0, **more: Any
) -> World:
    given = {"sample": 1, "availability": availability, "speeds": speeds, "seed": seed, **more}
    return World(RunSettings(**given), POPULATION, WORK.num_steps, 10_000)


def fast(**more: Any) -> tuple[World, FloatArray]:
    """A world without jitter, and the seconds of its clients."""
    world = world_of(speeds="lognormal(jitter=0)", **more)
    assert world.seconds_m is not None
    return world, world.seconds_m


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
def test_clients_are_there_as_often_as_promised(text: str, rate_m: FloatArray) -> None:
    there_tm = presences(text)
    wider = 3 if "markov" in text else 1  # (1 + .8) / (1 - .8) = 9
    spread_m = wider * np.sqrt(rate_m * (1 - rate_m) / ROUNDS)
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
    for text in ("daily(share=0.001, period=24)", "bernoulli(rate=0.001)"):
        assert presences(text, 50).sum(axis=1).min() >= 1
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
    path.write_text("client,start,end\n0,0,10\n1,5,20\n0,40,50\n")
    available = Trace(str(path)).begin(Population.from_sizes([1, 1]), 0)
    for clock, clients, later in (
        (0, [0], 0),
        (7, [0, 1], 7),
        (12, [1], 12),
        (25, [0], 40),
        (57, [0, 1], 57),  # it begins again after 50
        (72, [0], 90),
    ):
        there_m, begins = available(0, clock)
        assert there_m is not None
        assert (np.flatnonzero(there_m).tolist(), begins) == (clients, later)


def test_seconds_are_those_of_the_work_and_the_network(tmp_path: Path) -> None:
    sizes = range(10, 10 + M)
    steps_m = np.array([len(minibatches(size, WORK, stream(0, "batches"))) for size in sizes])
    table = tmp_path / "speeds.csv"
    table.write_text("seconds,megabits\n" + "0.5,2\n" * M)
    for speeds in ("lognormal(seconds=0.5, megabits=2, sigma=0)", str(table)):
        seconds_m = world_of(speeds=speeds).seconds_m
        assert seconds_m is not None
        np.testing.assert_allclose(seconds_m, 0.5 * steps_m + 0.08 / 2)


def test_log_normal_speeds() -> None:
    many = Population.from_sizes(np.arange(1, 5001))
    step_m, megabits_m = LogNormal(seconds=0.2, megabits=5, sigma=0.7, size=0.6).begin(many, 0)
    for value_m, median in ((step_m, 0.2), (megabits_m, 5)):
        log_m = np.log(value_m / median)
        assert abs(log_m.mean()) < 4 * 0.7 / np.sqrt(5000)
        assert log_m.std() == pytest.approx(0.7, rel=0.05)
    by_rank = np.corrcoef([np.log(step_m), np.log(megabits_m), np.arange(5000)])[2]
    # The correlation of a normal score with its rank is sqrt(3 / pi).
    assert by_rank[0] == pytest.approx(0.6 * np.sqrt(3 / np.pi), abs=0.04)
    assert abs(by_rank[1]) < 4 / np.sqrt(5000)


def test_the_slowest_or_a_deadline_ends_the_round() -> None:
    world, seconds_m = fast()
    waited = world.wait(0, ALL)
    assert waited.responded_n.all() and waited.seconds == seconds_m.max()
    deadline = float(np.median(seconds_m))
    waited = fast(deadline=deadline)[0].wait(0, ALL)
    assert waited.seconds == deadline and np.array_equal(waited.responded_n, seconds_m <= deadline)
    assert fast(deadline=1e9)[0].wait(0, ALL).seconds == seconds_m.max()


def test_what_is_received_beside_the_model_takes_time() -> None:
    world, seconds_m = fast()
    _, megabits_m = LogNormal(jitter=0.0).begin(POPULATION, 0)
    waited = world.wait(0, ALL, more_bytes=5_000)
    assert waited.seconds == pytest.approx((seconds_m + 0.04 / megabits_m).max())
    assert world.wait(0, ALL, more_bytes=0).seconds == seconds_m.max()


@pytest.mark.parametrize(
    ("label", "vectors"), [("fedvarp", 2), ("fedvarp+scaffold", 3), ("uniform+mime=0.5", 3)]
)
def test_corrected_steps_download_a_second_vector_on_the_clock(
    label: str, vectors: int, tmp_path: Path
) -> None:
    """With steps that take no time the clock is that of the bytes."""
    csv = "seconds,megabits\n" + "1e-12,0.008\n" * 4  # a kilobyte a second
    (tmp_path / "slow.csv").write_text(csv)
    given = {"task": "digits", "clients": 4, "sample": 2, "rounds": 3, "sampler": label}
    settings = make_settings(RunSettings, given | {"speeds": str(tmp_path / "slow.csv")})
    run_single(settings, tmp_path / "run", lambda _: None)
    lines = lines_of(tmp_path / "run")
    # 650 parameters of 4 bytes; in the first round nothing is known that corrects.
    later = lines[-1]["clock"] - lines[-2]["clock"]
    assert later == pytest.approx(2.6 * vectors, rel=1e-6)
    assert lines[-1]["bytes_down"] == 2 * 2600 * (vectors - 1)


def test_over_selection_keeps_the_first() -> None:
    world, seconds_m = fast(over_select=1.3)
    waited = world.wait(0, ALL[:13])
    assert waited.responded_n.sum() == 10
    assert waited.seconds == np.sort(seconds_m[:13])[9]
    assert np.array_equal(waited.responded_n, seconds_m[:13] <= waited.seconds)
    assert fast(over_select=1.4)[0].wait(0, ALL[:21]).responded_n.sum() == 15  # 15.000000000000002
    # Fewer are there than were wanted: n are kept. Everybody is selected, as by full: the same
    # share.
    world, _ = fast(over_select=1.3, sample=10)
    assert [world.wait(0, ALL[:size]).responded_n.sum() for size in (8, 11, 39)] == [8, 10, 30]


@pytest.mark.parametrize(
    ("wanted", "factor"),
    [(3, 1.3), (5, 1.3), (7, 1.1), (9, 1.05), (4, 1.6), (10, 1.3), (15, 1.4), (1, 2.5)],
)
def test_of_a_cohort_that_was_rounded_up_n_are_kept(wanted: int, factor: float) -> None:
    size = ceil(factor * wanted)
    waited = fast(over_select=factor, sample=wanted)[0].wait(0, ALL[:size])
    assert waited.responded_n.sum() == wanted


def test_drop_outs_are_a_share_and_do_not_depend_on_the_cohort() -> None:
    world, _ = fast(dropout=0.2)
    lost = [~world.wait(round, ALL).responded_n for round in range(500)]
    assert np.mean(lost) == pytest.approx(0.2, abs=4 * 0.4 / np.sqrt(500 * M))
    assert np.array_equal(world.wait(3, ALL[5:9]).responded_n, ~lost[3][5:9])
    assert world_of(dropout=0.2).wait(3, ALL).seconds == 0.0  # no speeds, no clock


def test_a_round_ends_when_nobody_is_left_to_wait_for() -> None:
    world, seconds_m = fast(dropout=0.999999)
    waited = world.wait(0, ALL[:3])
    assert not waited.responded_n.any()
    assert 0 < waited.seconds < seconds_m[:3].max()


def test_jitter_changes_rounds_not_medians() -> None:
    world = world_of(speeds="lognormal(jitter=0.3)")
    assert world.seconds_m is not None
    seconds = [world.wait(round, np.array([7])).seconds for round in range(2000)]
    ratio = np.log(seconds / world.seconds_m[7])
    assert abs(ratio.mean()) < 4 * 0.3 / np.sqrt(2000)
    assert ratio.std() == pytest.approx(0.3, rel=0.08)


PLAIN: dict[str, Any] = {"task": "digits", "clients": 12, "sample": 4, "rounds": 6}
PLAIN |= {"local_epochs": 1, "checkpoint_every": 2}
WORLD = PLAIN | {"availability": "markov(rate=0.5)", "speeds": "lognormal"}
WORLD |= {"dropout": 0.2, "over_select": 1.5}


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
    assert any(line["num_responded"] < line["num_selected"] for line in drawn)


def test_samplers_of_one_seed_meet_one_world(tmp_path: Path) -> None:
    seen = []
    for sampler in ("uniform", "pracdelta"):
        run(tmp_path / sampler, **WORLD, sampler=sampler)
        seen.append([line["available"] for line in lines_of(tmp_path / sampler)[1:]])
    assert seen[0] == seen[1]


def test_a_world_where_everybody_is_there_has_the_bits_of_none(tmp_path: Path) -> None:
    run(tmp_path / "plain", **PLAIN)
    run(tmp_path / "timed", **PLAIN, speeds="lognormal")
    timed = lines_of(tmp_path / "timed")
    assert all(line.pop("clock") > 0 for line in timed[1:])
    assert timed == lines_of(tmp_path / "plain")


@pytest.mark.drawn
def test_the_clock_is_in_frames_table_picture_and_report(tmp_path: Path) -> None:
    given: dict[str, Any] = {"clients": 12, "sample": 4, "rounds": 4, "threshold": 0.12}
    given |= {"local_epochs": 1, "speeds": "lognormal", "progress": False}
    result = compare("digits", ["uniform", "oort"], 2, out=tmp_path, **given)
    runs = result.runs()
    table = result.summary()
    for (sampler, seed), rows in runs.groupby(["sampler", "seed"]):
        lines = lines_of(tmp_path / "runs" / f"{sampler}-seed{seed}")[1:]
        assert rows["clock"].tolist() == pytest.approx([line["clock"] for line in lines])
    last = runs[runs["round"] == 4].groupby("sampler")["clock"].mean()
    assert table["clock"].to_dict() == pytest.approx(last.to_dict())
    assert (table["clock_to_threshold"] <= table["clock"]).all()
    assert all(f"{human_amount(found)} s" in repr(result) for found in table["clock_to_threshold"])
    axes = [axes for axes in result.plot().axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in axes] == ["rounds", "seconds of the virtual clock"]
    ends = [float(np.max(np.asarray(line.get_xdata()))) for line in axes[1].get_lines()[:2]]
    assert sorted(ends) == pytest.approx(sorted(last))
    result.report(tmp_path / "page.html")
    assert '<option value="clock">' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ({"availability": "nights"}, "'nights': .*FILE.csv, always"),
        ({"availability": "bernoulli(rate=2)"}, r"rate .*\(0, 1\]"),
        ({"availability": "labels(rate=0.5)"}, "option 'rate' of 'labels'"),
        ({"deadline": 3}, "speeds = 'lognormal'"),
        ({"over_select": 2}, "speeds = 'lognormal'"),
        ({"availability": "trace.csv"}, "speeds = 'lognormal'"),
        ({"speeds": "fast"}, "lognormal"),
        ({"speeds": "lognormal(sigma=-1)"}, "sigma"),
    ],
)
def test_impossible_worlds_are_refused(given: dict[str, Any], fragment: str) -> None:
    with pytest.raises(DeltaflError, match=fragment):
        make_settings(RunSettings, given)


@pytest.mark.parametrize(
    ("rows", "fragment"),
    [
        ("client,start\n1,2\n", "it has the columns client, start$"),
        ("client,start,end\n1,a,3\n", "row 1 has 'a' as start"),
        ("client,start,end\n", "and a row at least"),
        ("client,start,end\n99,0,3\n", "row 1 is of client '99'; .* 0 to 39"),
        ("client,start,end\n1e30,0,3\n", "'1e30' as client"),
        ("client,start,end\n1.5,0,3\n", "0 to 39"),
        ("client,start,end\n0,1,2\n1,4,3\n", "row 2 is from 4 to 3; .* end after it begins"),
        ("client,start,end\n0,1,2\n1,1,2\n1,4,4\n", "row 3 is from 4 to 4; .* after it begins"),
        ("client,start,end\n0,1,2\n2,4,5\n", "no interval of client 1;"),
        ("client,start,end\n1,,3\n", "row 1 has '' as start"),
        ("", "No columns"),
        (None, "No such file"),
    ],
)
def test_bad_traces_are_refused(rows: str | None, fragment: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    if rows is not None:
        path.write_text(rows)
    with pytest.raises(DeltaflError, match=fragment):
        world_of(str(path), "lognormal")


@pytest.mark.parametrize(
    "text",
    [
        "seconds,megabits\n0.5,1\n2,3\n",
        "\ufeffseconds;megabits\r\n0.5;1\r\n2;3\r\n",
        '\n"seconds", "megabits"\n\n"0.5", "1"\n"2", "3"\n',
        "megabits\tseconds\n1\t0.5\n3\t2\n",
        ",seconds,megabits\n0,0.5,1\n1,2,3\n",
        # By its column, not by its place.
        "client,seconds,megabits\n1,2,3\n0,0.5,1\n",
    ],
)
def test_a_file_is_read_as_spreadsheets_write_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "speeds.csv"
    path.write_bytes(text.encode())
    step_m, megabits_m = Measured(str(path)).begin(Population.from_sizes([1, 1]), 0)
    assert (step_m.tolist(), megabits_m.tolist()) == ([0.5, 2], [1, 3])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seconds,megabits\n0,5,1\n2,3,4\n", "rows of as many cells"),
        ("seconds;megabits\n0,5;1\n2;3\n", "row 1 has '0,5' as seconds"),
        ("client,seconds,megabits\n1,2,3\n1,1,1\n", "a row .* for each of the 2 clients"),
        (
            "client,seconds,megabits\na,2,3\nb,1,1\n",
            "row 1 has 'a' as client; write a number",
        ),
    ],
)
def test_speeds_that_could_be_anybodys_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "speeds.csv"
    path.write_text(text)
    with pytest.raises(DeltaflError, match=said):
        Measured(str(path)).begin(Population.from_sizes([1, 1]), 0)


@pytest.mark.parametrize(
    "names", [("1", "2", "3"), ("b", "St. Mary's, Köln", "a"), ("2", "1", "0")]
)
def test_files_name_clients_as_their_table_does(names: tuple[str, ...], tmp_path: Path) -> None:
    """Also where the names look like the numbers of other clients."""
    population = Population.from_sizes([1, 1, 1])
    texts = {
        "trace": "client,start,end\n{2},0,10\n{0},5,20\n{1},18,20\n",
        "speeds": "client,seconds,megabits\n{1},2,3\n{2},4,5\n{0},6,7\n",
        "costs": "hour,client,value\n0,{0},1\n0,{1},2\n5,{1},4\n0,{2},3\n",
    }
    seen = []
    for known in ((), names):
        path = {of: str(tmp_path / f"{of}.csv") for of in texts}
        for of, text in texts.items():
            written = [f'"{name}"' for name in known or ("0", "1", "2")]
            Path(path[of]).write_text(text.format(*written))
        present = find_availability(path["trace"], known).begin(population, 0)
        costs = costs_of(path["costs"], population, known)
        assert costs is not None
        there = [np.asarray(present(0, at)[0]).tolist() for at in (0.0, 7.0, 15.0)]
        speeds = np.array(Measured(path["speeds"], known).begin(population, 0)).tolist()
        seen.append((there, speeds, costs.value_m(0).tolist(), costs.mean_m().tolist()))
    assert seen[0] == seen[1]
    Path(path["trace"]).write_text("client,start,end\n7,0,3\n")
    with pytest.raises(DeltaflError, match=f"is of client '7'; clients are the 3 .* as {names[0]}"):
        find_availability(path["trace"], names).begin(population, 0)
