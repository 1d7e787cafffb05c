"""Files of values over time: who is available, what a client costs."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import deltafl as dl
from deltafl import DeltaflError, Population
from deltafl.simulation.conditions import costs_of, find_availability
from deltafl.simulation.run import run_single
from deltafl.simulation.settings import RunSettings, make_settings
from deltafl.simulation.setup import engine_of, plan_of, population_of
from deltafl.simulation.traces import Columns, read_trace

ROOT = Path(__file__).parents[2]
POPULATION = Population.from_sizes([1] * 4, strata=["north", "south", "north", "south"])
BY_REGION = "hour,region,value\n6,north,310\n0,north,120\n2,south,80\n0,elsewhere,9\n"


def written(folder: Path, text: str) -> str:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_values_hold_until_the_next_one_and_the_file_begins_anew(tmp_path: Path) -> None:
    trace = read_trace(Columns(written(tmp_path, BY_REGION)), POPULATION)
    assert trace.second_t.tolist() == [0, 7200, 21600]
    assert trace.length == 21600 + 7200  # one step, the least of 2 and 4 hours, after the last
    for hour, north in [(0, 120), (1.9, 120), (2, 120), (6, 310), (7.9, 310), (8, 120), (14, 310)]:
        values_m = trace.value_m(trace.row(3600 * hour))
        assert values_m.tolist() == [north, 80, north, 80]


def test_costs_are_means_over_time(tmp_path: Path) -> None:
    timeline = costs_of(written(tmp_path, BY_REGION), POPULATION)
    assert timeline is not None
    # 120 for six hours and 310 for the two of the last step.
    np.testing.assert_allclose(timeline.mean_m(), [(6 * 120 + 2 * 310) / 8, 80] * 2)
    rng = np.random.default_rng(0)
    rows = [
        f"{second},{client},{rng.integers(1, 99)}" for second in (5, 9, 30) for client in range(4)
    ]
    text = written(tmp_path, "second,client,value\n" + "\n".join(rows))
    trace = read_trace(Columns(text), POPULATION)
    # By brute force, one second after the other.
    every = [trace.value_m(trace.row(float(second))) for second in range(int(trace.length))]
    np.testing.assert_allclose(trace.mean_m(), np.mean(every, axis=0))
    assert costs_of(None, POPULATION) is None
    # A name as others, not one that is missing.
    america = Population.from_sizes([1], strata=["NA"])
    timeline = costs_of(written(tmp_path, '"hour";"region";"value"\n0;NA;7\n'), america)
    assert timeline is not None and timeline.mean_m() == [7]


def test_availability_by_values(tmp_path: Path) -> None:
    text = "second,region,value\n0,north,1\n10,north,0\n20,south,1\n30,south,0\n0,south,0\n"
    present = find_availability(written(tmp_path, text)).begin(POPULATION, 0)
    north = [True, False, True, False]
    # A turn has 40 seconds; while nobody is there the server waits.
    for clock, waited, there in [
        (0.0, 0.0, north),
        (9.9, 9.9, north),
        (10.0, 20.0, [not one for one in north]),
        (29.0, 29.0, [not one for one in north]),
        (31.0, 40.0, north),
        (52.0, 60.0, [not one for one in north]),
    ]:
        mask_m, after = present(0, clock)
        assert mask_m is not None
        assert (mask_m.tolist(), after) == (there, waited)


def test_clients_that_all_have_times_of_their_own_fit_into_memory(tmp_path: Path) -> None:
    """3000 come and go once: each time with a value of each client would take 144 MB."""
    m = 3000
    rng = np.random.default_rng(0)
    time_m2 = rng.permutation(2 * m).reshape(m, 2)
    rows = [f"{come},{client},1\n{go},{client},0" for client, (come, go) in enumerate(time_m2)]
    text = written(tmp_path, "second,client,value\n" + "\n".join(rows))
    population = Population.from_sizes([1] * m)
    tracemalloc.start()
    try:
        present = find_availability(text).begin(population, 0)
        masks = {second: present(0, float(second))[0] for second in rng.integers(2 * m, size=20)}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2e7
    come_m, go_m = time_m2.T
    for second, there_m in masks.items():
        within_m = (np.minimum(come_m, go_m) <= second) & (second < np.maximum(come_m, go_m))
        np.testing.assert_array_equal(there_m, within_m == (come_m < go_m))


@pytest.mark.parametrize("seed", range(8))
def test_values_are_those_of_a_table_of_all_times(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = POPULATION.num_clients
    given_mt = np.full((m, 50), np.nan)
    for client in range(m):
        second_k = rng.choice(50, client + 1, replace=False)
        given_mt[client, second_k] = rng.integers(0, 3, size=client + 1)
    rows = [
        f"{second},{client},{given_mt[client, second]}"
        for client, second in rng.permutation(np.argwhere(~np.isnan(given_mt)))
    ]
    text = written(tmp_path, "second,client,value\n" + "\n".join(rows))
    trace = read_trace(Columns(text), POPULATION)
    # Second by second: each value holds until the client's next one, the last one in the next turn.
    length = round(trace.length)
    held_mt = np.empty((m, length))
    for client in range(m):
        for second in range(length):
            before = [(second - back) % length for back in range(length)]
            held = next(at for at in before if at < 50 and not np.isnan(given_mt[client, at]))
            held_mt[client, second] = given_mt[client, held]
    for second in range(length):
        np.testing.assert_array_equal(trace.value_m(trace.row(second)), held_mt[:, second])
    np.testing.assert_allclose(trace.mean_m(), held_mt.mean(axis=1), rtol=1e-12)
    np.testing.assert_array_equal(trace.least_m(), held_mt.min(axis=1))
    somebody = held_mt[:, trace.second_t.astype(int)].any(axis=0)
    np.testing.assert_array_equal(trace.times_of_any(), np.flatnonzero(somebody))


@pytest.mark.parametrize("pace", [0.05, 0.37, 3.3])
@pytest.mark.parametrize("times", [(1.4, 9.5), (0.1, 0.3), (0.7, 2.1)])
def test_somebody_is_there_whatever_the_last_bits_of_the_clock(
    tmp_path: Path, times: tuple[float, float], pace: float
) -> None:
    rows = [
        f"{second},{client},{int(client == place)}"
        for place, second in enumerate(times)
        for client in range(4)
    ]
    rows += [f"{2 * times[1]},{client},0" for client in range(4)]
    text = written(tmp_path, "second,client,value\n" + "\n".join(rows))
    present = find_availability(text).begin(POPULATION, 0)
    clock = 0.0
    for round in range(400):
        there_m, at = present(round, clock)
        assert np.any(there_m) and at >= clock
        clock = at + pace


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hour,region\n0,north\n", "columns hour or second"),
        ("hour,second,region,value\n0,0,north,1\n", "has the columns hour, "),
        ("hour,region,client,value\n0,north,1,1\n", "has the columns hour, "),
        ("hour,region,value\n", "and a row at least"),
        ("hour,region,value,value\n0,north,1,2\n0,south,1,2\n", "two columns value"),
        ("hour;region ;value; region\n0;north;1;south\n", "two columns region"),
        ("hour,region,value\n0,north,1_0\n", "row 1 has '1_0' as value"),
        ("hour,region,value\n1_0,north,1\n", "row 1 has '1_0' as hour"),
        ("hour,region,value\n0,north,x\n", "row 1 has 'x' as value"),
        ("hour,region,value\n0,north,\n", "row 1 has '' as value"),
        ("hour,region,value\n-1,north,1\n", "'-1' as hour"),
        ("hour,region,value\n0,north,-1\n", "a number from 0"),
        ("hour,region,value\n0,north,inf\n", "a number from 0"),
        ("hour,region,value\n0,north,1\n", "no value for region 'south'"),
        ("hour,region,value\n0,north,1\n0,north,2\n0,south,1\n", "row 2 has a second value"),
        ("hour,region,value\n0,west,1\n", "no value for region 'north'"),
        ("hour,client,value\n0,0,1\n0,4,1\n", "row 2 is of client '4'"),
        ("hour,client,value\n0,north,1\n", "row 1 has 'north' as client"),
        ("hour,client,value\n0,0,1\n0,1.0,1\n1,1,1\n0,2,1\n", "no value for client '3'"),
        ("hour,client,value\n0,1,1\n0,0,1\n0,1.0,1\n", "row 3 has a second value of client '1'"),
        ("hour,region,value\n0,north,0\n0,south,2\n", "costs 0 at some time"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DeltaflError, match=said):
        costs_of(written(tmp_path, text), POPULATION)


@pytest.mark.parametrize("names", [(), ("a", "b", "0", "c")])
def test_a_client_is_named_as_its_file_does(tmp_path: Path, names: tuple[str, ...]) -> None:
    others = names or [str(client) for client in range(4)]
    last = others[2]
    rows = "".join(f"0,{name},{int(name != last)}\n" for name in others)
    with pytest.raises(DeltaflError, match=f"client '?{last}'? costs 0"):
        costs_of(written(tmp_path, f"hour,client,value\n{rows}"), POPULATION, names)
    there = "".join(f"{name},0,1\n" for name in others if name != last)
    file = written(tmp_path, f"client,start,end\n{there}")
    with pytest.raises(DeltaflError, match=f"no interval of client '?{last}'?;"):
        find_availability(file, names).begin(POPULATION, 0)


def test_other_mistakes_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="write a file"):
        costs_of("carbon.txt", POPULATION)
    with pytest.raises(DeltaflError, match="of which region"):
        costs_of(written(tmp_path, BY_REGION), POPULATION._replace(strata=None))
    for value, said in (("0", "nobody is ever there"), ("0.5", "row 2 must have the value 1 for")):
        text = f"hour,region,value\n0,south,0\n0,north,{value}\n"
        with pytest.raises(DeltaflError, match=said):
            find_availability(written(tmp_path, text)).begin(POPULATION, 0)


@pytest.mark.parametrize(
    ("option", "said"), [("per_cost", "client_costs='FILE.csv'"), ("per_second", "speeds=")]
)
def test_prices_that_nobody_knows_are_refused_before_a_run(option: str, said: str) -> None:
    for method in ("uniform", "innovation"):
        settings = make_settings(
            RunSettings, {"task": "synthetic", "sampler": f"{method}({option}=True)"}
        )
        with pytest.raises(DeltaflError, match=said):
            plan_of(settings, POPULATION)


def test_a_run_notes_what_the_clients_cost_that_were_asked(tmp_path: Path) -> None:
    """The census, too, and those who drop out; and the record and the table have it."""
    rows = [f"0,{client},{cost}" for client, cost in enumerate([1, 2, 4, 8, 16, 32])]
    costs = written(tmp_path, "hour,client,value\n" + "\n".join(rows))
    result = dl.compare(
        "digits", "uniform,full,census", clients=6, sample=2, rounds=3, seeds=1, dropout=0.3,
        client_costs=costs, out=tmp_path / "runs", processes=1, progress=False, report=False,
    )  # fmt: skip
    for run in result.curves:
        assert run.cost_r is not None
        assert run.cost_r[-1] == run.draws_m @ 2 ** np.arange(6)
    by_label = {run.sampler: run.cost_r for run in result.curves}
    np.testing.assert_array_equal(by_label["full"], [63, 126, 189])
    first = np.asarray(by_label["census"])[0]
    assert first == 63
    assert "clients' cost" in " ".join(str(result).split())
    assert result.plot(x="cost") is not None


@pytest.mark.parametrize("sampler", ["uniform(per_cost=True)+budget=90", "census"])
def test_costs_follow_the_clock(tmp_path: Path, sampler: str) -> None:
    """Each round is drawn, and paid, by what clients cost when it begins."""
    text = "second,client,value\n"
    text += "".join(f"{10 * hour},{client},{(hour + client) % 3 + 1}\n" for hour in range(3)
                    for client in range(6))  # fmt: skip
    costs = written(tmp_path, text)
    given = {
        "task": "digits", "sampler": sampler, "clients": 6, "sample": 2, "rounds": 12,
        "speeds": "lognormal(seconds=1,sigma=0.1)", "client_costs": costs,
    }  # fmt: skip
    out = tmp_path / "run"
    run_single(make_settings(RunSettings, given), out, lambda done: None)
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    clock = 0.0
    seen = set()
    for line in lines[1:]:
        step = int(clock % 30 // 10)
        seen.add(step)
        assert line["cost"] == sum((step + client) % 3 + 1 for client in line["cohort"])
        clock = line["clock"]
    assert seen == {0, 1, 2}
    total = sum(line.get("cost", 0) for line in lines)
    assert "budget" not in sampler or 80 <= total <= 93


def test_the_example_costs_a_run(tmp_path: Path) -> None:
    """The file that ships, for clients of a table with regions."""
    rng = np.random.default_rng(0)
    rows = [
        f"{rng.normal():.3f},{rng.integers(2)},{client},{region}"
        for client, region in enumerate(["east", "north", "south", "west"] * 2)
        for _ in range(12)
    ]
    table = tmp_path / "clinics.csv"
    table.write_text("\n".join(["a,ill,clinic,region", *rows]))
    settings = make_settings(
        RunSettings,
        {
            "task": str(table),
            "label": "ill",
            "column": "clinic",
            "strata": "region",
            "client_costs": str(ROOT / "examples" / "carbon.csv"),
            "sampler": "uniform(per_cost=True)",
            "sample": 4,
            "at_least": 1,
        },
    )
    task = engine_of(settings).task
    population = population_of(settings, task)
    assert population.strata is not None
    assert population.strata.names == ("east", "north", "south", "west")
    assert population.cost_m is not None
    assert len({*population.cost_m}) == 4
    assert plan_of(settings, population, task).part("at_least") is not None
