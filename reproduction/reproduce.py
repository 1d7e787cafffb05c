"""``python -m reproduction NAME``: run what is missing of an experiment and write its page."""

from types import ModuleType

from deltafl.errors import DeltaflError, require
from deltafl.simulation import OnProgress, Progress

from . import limits, rates, toy
from .benchmark.costs import reproduce_costs
from .benchmark.page import reproduce_benchmark
from .page import OwnPage, require_own, write
from .records import PackedRuns
from .running import Request, no_run, read_rows, write_rows
from .spec import Experiment, load_experiment
from .sweeps import reproduce_sweep
from .text import sentence_case

#: Experiments that are no sweep, by their kind: ``cells(settings)`` says what is to be measured,
#: ``measure(settings, cell)`` makes rows that begin with the cell, and
#: ``show(settings, rows, folder)`` draws and returns an ``OwnPage``.
_MODULES: dict[str, ModuleType] = {"toy": toy, "rates": rates, "limits": limits}

#: Those whose methods have tuned rates, by their kind.
_PLAYED = {"benchmark": reproduce_benchmark, "costs": reproduce_costs}


def reproduce(request: Request, on_progress: OnProgress) -> str:
    """Run what is missing, write the page, ``README.md`` beside table, picture and records, and
    return it.
    """
    experiment = load_experiment(request.name)
    require("matplotlib", "plot")
    require("scipy", "sim")
    require_own(request.out, experiment.name)
    if experiment.kind in _PLAYED:
        return _PLAYED[experiment.kind](experiment, request, on_progress)
    if experiment.kind in _MODULES:
        return _reproduce_rows(experiment, request, on_progress)
    return reproduce_sweep(experiment, request, on_progress)


def _reproduce_rows(experiment: Experiment, request: Request, on_progress: OnProgress) -> str:
    """Run an experiment that is no sweep; its rows are kept as they come."""
    if request.parts is not None or request.seeds is not None:
        raise DeltaflError(
            f"{experiment.name} has no parts and no seeds to choose; leave out --part and --seeds"
        )
    if request.only_page and not request.out.is_dir():
        raise no_run(request.out)
    module = _MODULES[experiment.kind]
    path = request.out / "runs.jsonl.gz"
    settings = {**experiment.settings, **experiment.scales[request.scale].settings}
    request.out.mkdir(parents=True, exist_ok=True)
    with PackedRuns(request.out).lock():
        head, rows = read_rows(path)
        # Files of earlier versions hold some of the settings.
        if head and any(settings.get(key) != value for key, value in head["settings"].items()):
            raise DeltaflError(
                f"{path} holds rows of other settings; give its --scale or choose another --out"
            )
        if not request.only_page:
            cells = module.cells(settings)
            for done, cell in enumerate(cells, start=1):
                if not any(cell.items() <= row.items() for row in rows):
                    rows += module.measure(settings, cell)
                    write_rows(path, {"settings": settings}, rows)
                on_progress(Progress(done, len(cells), 0, 1, (experiment.name,)))
        on_progress(Progress(1, 1, 1, 1, ()))
        shown: OwnPage = module.show(settings, rows, request.out)
        verdict = f"**{sentence_case(shown.verdict)}.** {shown.number}"
        page = shown._replace(blocks=["## Verdict", verdict, *shown.blocks])
        return write(experiment, page, request.scale, (1, 1), request.command, request.out)
