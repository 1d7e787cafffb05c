"""``deltafl reproduce``: run an experiment and write its page. Most are sweeps; two have a way of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DeltaflError
from .spec import Experiment, load_experiment
from .sweep import OnProgress, Progress, make_sweep, records_of, run_sweep


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        name: The experiment.
        scale: One of ``spec.SCALES``.
        out: The experiment's folder; those whose runs it shows in another way are looked for beside it.
        parts: Parts to run; None for all of the scale.
        seeds: Number of seeds, instead of the experiment's own.
        processes: Runs side by side.
        data_dir: Folder with data sets.
        only_page: Run nothing, write the page from what is there.
        command: The command as a reader would give it, for the page.
    """

    name: str
    scale: str
    out: Path
    parts: tuple[str, ...] | None = None
    seeds: int | None = None
    processes: int = 1
    data_dir: str | None = None
    only_page: bool = False
    command: str = ""


def reproduce(request: Request, on_progress: OnProgress) -> str:
    """Run what is missing and write the page.

    Returns:
        The page, Markdown; it is ``README.md`` in the folder, beside table, pictures and records.
    """
    experiment = load_experiment(request.name)
    if experiment.kind in OWN_WAY:
        return _own_way(experiment, request, on_progress)
    return _sweep(experiment, request, on_progress)


def _sweep(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    from .pages import write_page

    own: dict[str, Any] = {"data_dir": request.data_dir, "seeds": request.seeds}
    source, folder = experiment, request.out
    if experiment.runs_of is not None:
        source, folder = load_experiment(experiment.runs_of), request.out.parent / experiment.runs_of
    sweep = make_sweep(
        source, request.scale, request.parts, **{key: value for key, value in own.items() if value is not None}
    )
    not_run = {} if request.only_page else run_sweep(sweep, folder, request.processes, on_progress)
    records = records_of(sweep, folder)
    if not records:
        raise DeltaflError(f"{folder} has no finished run yet; leave out --only-page to run some")
    request.out.mkdir(parents=True, exist_ok=True)
    shown = sweep if source is experiment else make_sweep_shown(sweep, experiment)
    return write_page(shown, records, request.out, not_run, request.command)


def make_sweep_shown(sweep: Any, experiment: Experiment) -> Any:
    """The sweep of other runs under the experiment that shows them."""
    from dataclasses import replace

    parts = {part: settings for part, settings in sweep.comparisons.items() if part in experiment.parts}
    return replace(sweep, experiment=experiment, comparisons=parts or sweep.comparisons)


def _run_rates(experiment: Experiment, request: Request, on_step: Callable[[int, int], None]) -> str:
    from .rates import RatesSettings, run_rates
    from .rates_report import report_rates

    settings = RatesSettings.model_validate(experiment.own_settings(request.scale))
    if not request.only_page:
        run_rates(settings, request.out, on_step)
    return report_rates(settings, request.out)


def _run_toy(experiment: Experiment, request: Request, on_step: Callable[[int, int], None]) -> str:
    from .toy import report_toy, run_toy

    if not request.only_page:
        run_toy(request.out, on_step)
    return report_toy(request.out)


#: Kinds of experiment that are no sweep over samplers and seeds.
OWN_WAY: dict[str, Callable[[Experiment, Request, Callable[[int, int], None]], str]] = {
    "rates": _run_rates,
    "toy": _run_toy,
}


def _own_way(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    """Run a kind that is no sweep; its text goes on a page of the same form."""
    request.out.mkdir(parents=True, exist_ok=True)

    def on_step(done: int, total: int) -> None:
        on_progress(Progress(done, total, 0, 1, (experiment.name,)))

    return OWN_WAY[experiment.kind](experiment, request, on_step)


def default_folder(name: str, scale: str) -> Path:
    """Where results go unless told otherwise."""
    return Path("results") / scale / name


def listing(names: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """For each experiment: name, title, what it needs, and how long each scale takes on two cores."""
    rows = []
    for name in names:
        experiment = load_experiment(name)
        times = ", ".join(f"{scale} {_duration(minutes)}" for scale, minutes in experiment.minutes.items())
        rows.append((name, experiment.title, experiment.needs, times))
    return rows


def _duration(minutes: float) -> str:
    if minutes < 90:
        return f"{minutes:.0f} min" if minutes >= 1 else "under 1 min"
    return f"{minutes / 60:.0f} h"
