"""Made-up experiments and their finished runs."""

from typing import Any

import numpy as np

from deltafl.analysis import Run
from reproduction.spec import Sweep, parse_experiment

#: Round in which a sampler reaches its last accuracy from 0.1, and that accuracy; a seed comes one
#: round later.
REACHES = {
    "fedavg": (30, 0.80),
    "pracdelta": (15, 0.84),
    "uniform": (28, 0.80),
    "fedis": (20, 0.82),
    "delta": (10, 0.85),
}


def sweep_of(kind: str = "table", **more: Any) -> Sweep:
    """A sweep with two parts of two seeds; ``more`` changes the file."""
    content = {
        "title": "Table X",
        "claim": "FedPracDELTA is best.",
        "kind": kind,
        "order": ["pracdelta", "fedavg"],
        "notes": ["A decision."],
        "settings": {
            "task": "digits",
            "samplers": ["fedavg", "pracdelta"],
            "seeds": 2,
            "rounds": 50,
            "threshold": 0.7,
        },
        "parts": {"one": {"title": "First"}, "two": {"title": "Second", "local_lr": 0.25}},
        "cpu": {},
        "paper": {"rounds": 500},
        **more,
    }
    experiment = parse_experiment("table-x", content)
    parts = experiment.part_names("cpu")
    return Sweep(experiment, "cpu", {part: experiment.comparison(part, "cpu") for part in parts})


def runs_of_sweep(sweep: Sweep) -> list[Run]:
    """Finished runs of all jobs of a sweep."""
    return [_run(job.part, job.settings) for job in sweep.jobs()]


def _run(part: str, settings: Any) -> Run:
    at, top = REACHES[settings.sampler.split("@")[0]]
    at += settings.seed * (2 if settings.sampler == "fedavg" else 1)
    round_r = np.arange(1, (settings.rounds or 50) + 1)
    worse = 1 + 0.1 * settings.seed * (settings.sampler == "fedavg")
    return Run(
        sampler=settings.sampler,
        seed=settings.seed,
        metric="accuracy",
        round_r=round_r,
        accuracy_r=np.where(round_r < at, 0.1, top - 0.001 * settings.seed),
        loss_r=10.0 ** (-round_r / 50 - top) * worse,
        seconds_r=9.0 * round_r,
        cpu_seconds_r=2.0 * round_r,
        bytes_r=100.0 * round_r,
        draws_m=np.full(20, 3),
        part=part,
        settings=settings.model_dump(mode="json", exclude_none=True),
        data="digits (scikit-learn)",
        environment={
            "python": "3.12",
            "torch": "2.9",
            "processor": "Some CPU",
            "cores": 2,
            "command": "secret",
        },
    )
