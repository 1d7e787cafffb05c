"""A benchmark of seconds: two methods on a few clients of digits."""

from typing import Any


def small_benchmark(rounds: int, threshold: float, seeds: int) -> dict[str, Any]:
    """What its TOML file would hold."""
    return {
        "title": "Benchmark",
        "claim": "the target.",
        "kind": "benchmark",
        "view": {"core": ["full", "uniform"]},
        "settings": {
            "task": "digits",
            "clients": 6,
            "sample": 2,
            "rounds": rounds,
            "local_epochs": 1,
            "threshold": threshold,
            "tiers": {"all": {"methods": ["full", "uniform"], "rates": [0.1], "extensions": 0}},
            "tuning_seeds": [1000],
            "seeds": seeds,
        },
        "parts": {"digits": {"tier": "all", "title": "digits"}},
        "smoke": {},
        "cpu": {},
        "paper": {},
    }
