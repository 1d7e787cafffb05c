"""What the benchmark's page says of rates that were chosen at an edge of their grid."""

from pathlib import Path

from deltafl.simulation.record import RunStore, write_record
from made_up_benchmark import curve, part_of, record
from reproduction.benchmark.edges import edge_text
from reproduction.benchmark.results import Store, gather


def said(folder: Path, reached: dict[float, list[int]]) -> str:
    """By rate the rounds to the threshold on two tuning seeds."""
    tiers = {"all": {"methods": ["full", "uniform"], "rates": list(reached), "extensions": 0}}
    part = part_of(tiers=tiers, tuning_seeds=[1000, 1001], rounds=12)
    jobs = {part.tuning_job("uniform", rate, 1000 + i): at for rate, ats in reached.items() for i, at in enumerate(ats)}
    best = min(reached, key=lambda rate: sum(reached[rate]))
    jobs[part.test_job("uniform", best, 0)] = 5
    for job, at in jobs.items():
        write_record(record(job, curve(12, at, 12)), RunStore(folder).path(job))
    store = Store(folder)
    result = gather(part, store)
    assert result is not None
    return edge_text([result], store)


def test_an_edge_is_compared_with_the_best_rate_inside_seed_by_seed(tmp_path: Path) -> None:
    """Differences -1 and 0: mean -0.5, and t = 12.706 with one degree of freedom makes +- 6.35."""
    text = said(tmp_path, {0.1: [9, 9], 0.2: [7, 8], 0.4: [4, 3], 0.8: [3, 3]})
    assert text.splitlines()[-1] == "| digits | `uniform` | 0.8 | 3.0 | 0.4 | 3.5 | -0.5 [-6.9, 5.9] |"
    assert "the paired interval tells 0 of 1 from it" in text


def test_an_edge_that_every_seed_prefers_is_told_from_the_inside(tmp_path: Path) -> None:
    text = said(tmp_path, {0.1: [9, 9], 0.2: [8, 9], 0.4: [3, 4]})
    assert "the paired interval tells 1 of 1 from it" in text
    assert text.splitlines()[-1] == "| digits | `uniform` | 0.4 | 3.5 | 0.2 | 8.5 | -5.0 [-5.0, -5.0] |"


def test_a_run_that_never_gets_there_counts_twice_its_rounds(tmp_path: Path) -> None:
    text = said(tmp_path, {0.1: [3, 3], 0.2: [4, 99], 0.4: [99, 99]})
    assert "| 0.1 | 3.0 | 0.2 | 14.0 | -11.0 [" in text


def test_a_rate_inside_is_not_named(tmp_path: Path) -> None:
    assert said(tmp_path, {0.1: [9, 9], 0.2: [3, 3], 0.4: [4, 4]}) == "No chosen rate is at an edge of its grid."


def test_a_grid_without_an_inside_has_nothing_to_compare_with(tmp_path: Path) -> None:
    assert said(tmp_path, {0.1: [3, 3], 0.2: [4, 4]}).endswith("| 0.1 | 3.0 | – | – | – |")
