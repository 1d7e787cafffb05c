"""``deltafl reproduce``: run an experiment and write its page. Most are sweeps; two have a way of their own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from deltafl.errors import DeltaflError, require
from deltafl.io import write_atomically
from deltafl.simulation.lock import only_one
from deltafl.simulation.record import RunStore
from deltafl.simulation.sweep import OnProgress, Progress

from .environments import only_here, told
from .folders import require_ours
from .request import Request
from .spec import Experiment, Sweep, load_experiment
from .sweep import make_sweep, records_of, run_sweep


def reproduce(request: Request, on_progress: OnProgress) -> str:
    """Run what is missing and write the page.

    Returns:
        The page, Markdown; it is ``README.md`` in the folder, beside table, pictures and records.

    Raises:
        DeltaflError: If the experiment or a part is unknown, data are missing, or the folder holds something else.
    """
    experiment = load_experiment(request.name)
    require("matplotlib", "plot")
    require_ours(request.out, experiment.name)
    if experiment.kind == "benchmark":
        from .benchmark.run import reproduce_benchmark

        return reproduce_benchmark(experiment, request, on_progress)
    if experiment.kind in OWN_WAY:
        return _own_way(experiment, request, on_progress)
    return _sweep(experiment, request, on_progress)


def _sweep(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    from .pages.page import write_page

    source, folder = experiment, request.out
    if experiment.runs_of is not None:
        source, folder = load_experiment(experiment.runs_of), request.out.parent / experiment.runs_of
        require_ours(folder, source.name)
    sweep = make_sweep(source, request.scale, request.parts, **request.own)
    if source is not experiment:
        sweep = _shown_parts(sweep, experiment)
    not_run = {}
    if not request.only_page:
        not_run = run_sweep(sweep, folder, request.processes, on_progress)
        for part in sweep.comparisons:
            RunStore(folder).pack(part)
    records = records_of(sweep, folder)
    if not records:
        raise DeltaflError(f"{folder} has no finished run yet; leave out --only-page to run some")
    with RunStore(request.out).lock():
        return write_page(replace(sweep, experiment=experiment), records, request.out, not_run, request.command)


def _shown_parts(sweep: Sweep, experiment: Experiment) -> Sweep:
    """Of another experiment's runs, those that this one shows: its parts, or all if it names none."""
    parts = {part: settings for part, settings in sweep.comparisons.items() if part in experiment.parts}
    return replace(sweep, comparisons=parts or sweep.comparisons)


def _run_rates(experiment: Experiment, request: Request, on_step: Callable[[int, int], None]) -> None:
    from .rates.runs import RatesSettings, run_rates

    run_rates(RatesSettings.model_validate(experiment.own_settings(request.scale)), request.out, on_step)


def _show_rates(experiment: Experiment, request: Request) -> tuple[str, str, str]:
    from .rates.report import report_rates, summarise_rates
    from .rates.runs import RatesSettings

    settings = RatesSettings.model_validate(experiment.own_settings(request.scale))
    return report_rates(settings, request.out), *summarise_rates(settings, request.out)


def _run_toy(experiment: Experiment, request: Request, on_step: Callable[[int, int], None]) -> None:
    from .toy.page import run_toy

    run_toy(request.out, on_step)
    only_here(request.out)


def _show_toy(experiment: Experiment, request: Request) -> tuple[str, str, str]:
    from .toy.page import report_toy, summarise_toy

    return report_toy(request.out), *summarise_toy(request.out)


def _run_limits(experiment: Experiment, request: Request, on_step: Callable[[int, int], None]) -> None:
    from .limits.drifting import LimitsSettings
    from .limits.page import run_limits

    run_limits(LimitsSettings.model_validate(experiment.own_settings(request.scale)), request.out, on_step)
    only_here(request.out)


def _show_limits(experiment: Experiment, request: Request) -> tuple[str, str, str]:
    from .limits.drifting import LimitsSettings
    from .limits.page import report_limits, summarise_limits

    settings = LimitsSettings.model_validate(experiment.own_settings(request.scale))
    return report_limits(settings, request.out), *summarise_limits(settings, request.out)


Run = Callable[[Experiment, Request, Callable[[int, int], None]], None]
#: The page's body, what was measured in a line, and the verdict.
Show = Callable[[Experiment, Request], tuple[str, str, str]]
#: Kinds of experiment that are no sweep over samplers and seeds.
OWN_WAY: dict[str, tuple[Run, Show]] = {
    "rates": (_run_rates, _show_rates),
    "toy": (_run_toy, _show_toy),
    "limits": (_run_limits, _show_limits),
}


def _own_way(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    """Run a kind that is no sweep, and put what it shows on a page like the others."""
    if request.parts is not None or request.seeds is not None:
        raise DeltaflError(f"{experiment.name} has no parts and no seeds to choose; leave out --part and --seeds")
    run, show = OWN_WAY[experiment.kind]
    experiment.own_settings(request.scale)  # refuses an unknown scale before anything is written
    if request.only_page and not request.out.is_dir():
        raise DeltaflError(f"{request.out} has no finished run yet; leave out --only-page to run some")
    with only_one(request.out / ".playing") as ours:
        if not ours:
            raise DeltaflError(f"another process is running {experiment.name} in {request.out}; choose another --out")
        try:
            if not request.only_page:
                run(experiment, request, lambda i, n: on_progress(Progress(i, n, 0, 1, (experiment.name,))))
            body, measured, verdict = show(experiment, request)
        except ValidationError as error:
            raise DeltaflError(f"experiment {experiment.name}: {error.errors()[0]['msg']}") from None
        _write_finding(experiment, request, measured, verdict)
        page = _page(experiment, request, body, measured, verdict)
        write_atomically(request.out / "README.md", page)
    return page


def _write_finding(experiment: Experiment, request: Request, measured: str, verdict: str) -> None:
    from .pages.index import Finding, write_verdict

    finding = Finding(
        name=experiment.name,
        title=experiment.title,
        claim=experiment.claim,
        measured=measured,
        verdict=verdict,
        scale=request.scale,
        done=1,
        total=1,
        command=request.command,
    )
    write_verdict(request.out, finding)


def _page(experiment: Experiment, request: Request, body: str, measured: str, verdict: str) -> str:
    blocks = [f"# {experiment.title}", f"**The paper:** {experiment.claim}"]
    blocks += ["## Verdict", f"**{verdict[:1].upper()}{verdict[1:]}.** {measured}", body.strip()]
    blocks += told(request.out)
    blocks += [f"Command (scale {request.scale}):", f"```\n{request.command}\n```"]
    if experiment.notes:
        blocks += ["## Decisions", "\n".join(f"- {note}" for note in experiment.notes)]
    return "\n\n".join(blocks) + "\n"


def default_folder(name: str, scale: str) -> Path:
    """Where results go by default: the committed folder for the scale that it holds, ``runs`` for the others."""
    return Path("results") / name if scale == "cpu" else Path("runs") / scale / name


def listing(names: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """For each experiment: name, title, what it needs, and how long each scale takes on two cores."""
    rows = []
    for name in names:
        experiment = load_experiment(name)
        times = ", ".join(f"{scale} {_duration(minutes)}" for scale, minutes in experiment.minutes.items())
        if experiment.runs_of is not None:
            times += f" (the runs of {experiment.runs_of})"
        rows.append((name, experiment.title, experiment.needs, times))
    return rows


def _duration(minutes: float) -> str:
    if minutes < 1:
        return "under 1 min"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.0f} h"
