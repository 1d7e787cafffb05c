"""From Python: ``deltafl.compare``, ``deltafl.tune``, ``deltafl.plan_for`` and ``deltafl.load``."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...analysis.advice import Advice
from ...analysis.prices import Prices
from ...calls import Named
from ...errors import DeltaflError, require
from ...samplers.base import Sampler
from ...samplers.label import base_name, label_of, split_labels
from ...store.files import with_home
from ...store.own_python import forget_edited
from ...tasks.base import Task
from ...tasks.registry import known_tasks
from ...types import AnyPath, Population
from ..callbacks.callback import OnRound
from ..callbacks.own_rules import OwnCallback
from ..folder.directory import new_folder
from ..folder.own_code import with_object
from ..parallel.player import require_simulator
from ..parallel.sweep import count_processes
from ..settings import AnySettings, CompareSettings, make_settings, refuse_ignored
from ..view.progress import sweep_progress
from .comparing import run_comparison
from .comparison import Comparison, joined
from .pilot import PlanSettings, play_pilot
from .tune import TuneSettings, tune_rates

#: A task's name or file, a ``Task``, a function that makes one, a data frame, or a Hugging Face
#: data set.
AnyTask = str | os.PathLike[str] | Task | Callable[..., Task] | Any
#: What the answers to a census can be judged by.
WITHOUT_MEMORY = ("uniform", "uniform@poisson", "census@@horvitz-thompson")
AnySampler = str | Sampler | type[Sampler]


def compare(
    task: AnyTask = "digits",
    samplers: "str | AnySampler | Iterable[AnySampler] | None" = None,
    seeds: int | str | Iterable[int] | None = None,
    *,
    out: AnyPath | None = None,
    processes: int | None = None,
    progress: bool = True,
    report: bool = True,
    on_round: OnRound | None = None,
    trust_code: bool = False,
    executor: Any = None,
    callbacks: Iterable[OwnCallback] = (),
    **settings: Any,
) -> Comparison:
    """Compare samplers on one task, seed by seed, under the same split, initial model and
    minibatches.

    Args:
        task: A name of ``deltafl tasks``; a table's path; ``"FILE.py:FUNCTION"``; a
            ``deltafl.tasks.Task``; a function ``make_task(seed)`` or ``make_task()`` that returns
            one; a data frame or a Hugging Face data set, with ``label=`` and ``column=`` (who holds
            a row) or ``partition=``.
        samplers: Labels, instances such as ``ByLoss(power=2)``, or classes; seven of the library's
            if left out.
        seeds: A number of seeds 0, 1, ..., or a list of them, such as ``[3, 5]`` or ``"3,5"``; 5 if
            left out.
        out: The folder of the results; a new one below ``runs/`` if left out. The same call with
            the same folder goes on where it was interrupted, and with more samplers, seeds or
            rounds it runs what is missing.
        processes: Runs side by side; as many as there are cores if left out, 1 on a GPU.
        progress: Whether a bar is shown.
        report: Whether ``report.html`` is written into the folder.
        on_round: Called here with a ``deltafl.simulation.RoundDone`` for each round of each run;
            with several processes up to a second later and in batches, those of one run in their
            order.
        trust_code: Whether Python files that only the settings recorded in ``out`` name may be
            imported, and so run.
        executor: What plays the runs in place of processes: any ``concurrent.futures.Executor``,
            such as ``client.get_executor()`` of Dask, or an executor of submitit
            (docs/how-to/cluster.md).
        callbacks: Rules that end single runs: functions of the lines of ``rounds.jsonl`` so far
            that return why, or nothing; and ``deltafl.simulation.Callback`` objects, of which each
            run has copies (docs/how-to/stop-early.md). Any process of any machine decides alike.
        settings: The settings of ``deltafl compare``: ``rounds=50``, ``sample=10``,
            ``local_lr=0.1``, ...

    Raises:
        DeltaflError: If something cannot be played, in one sentence; or if ``on_round`` raises.

    Example:
        >>> result = deltafl.compare("digits", ["uniform", "census"], rounds=20)  # doctest: +SKIP
        >>> result.summary(); result.plot("accuracy.pdf")  # doctest: +SKIP
    """
    # Now and not in ``Comparison.summary``, after hours of work.
    require("pandas", "sim")
    if seeds is not None:
        settings["seeds"] = seeds
        # A text is one as on the command line.
        if isinstance(seeds, Iterable) and not isinstance(seeds, str):
            settings["seeds"] = list(seeds)
    resolved, count = _resolved(CompareSettings, task, samplers, processes, settings)
    folder = _folder(out, "compare", resolved.task)
    told = on_round or (lambda _: None)
    with sweep_progress(progress) as on_progress:
        return run_comparison(
            resolved,
            folder,
            on_progress,
            count,
            told,
            report,
            trust_code,
            executor,
            callbacks,
        )


def tune(
    task: AnyTask = "digits",
    samplers: "str | AnySampler | Iterable[AnySampler] | None" = None,
    *,
    out: AnyPath | None = None,
    processes: int | None = None,
    progress: bool = True,
    trust_code: bool = False,
    **settings: Any,
) -> dict[str, dict[str, float]]:
    """Find the learning rates of each sampler, on seeds and a validation part that no comparison
    judges by.

    Args:
        task: As in ``compare``.
        samplers: As in ``compare``.
        out: The folder of the tuning runs; a new one below ``runs/`` if left out. None is played
            twice there.
        processes: As in ``compare``.
        progress: Whether a bar is shown.
        trust_code: As in ``compare``.
        settings: The settings of ``deltafl tune``: ``local_rates=[0.1, 0.2, 0.4]``,
            ``server_rates=[0.5, 1, 2]``, ``tuning_seeds=3``, ``validation=0.2``, and those of
            ``compare``.

    Returns:
        The rates by label, for ``compare``.

    Raises:
        DeltaflError: If something cannot be played, in one sentence.

    Example:
        >>> rates = deltafl.tune("digits", ["uniform", "innovation"], rounds=20)  # doctest: +SKIP
        >>> deltafl.compare("digits", ["uniform", "innovation"], rates=rates)  # doctest: +SKIP
    """
    resolved, count = _resolved(TuneSettings, task, samplers, processes, settings)
    folder = _folder(out, "tune", resolved.task)
    with sweep_progress(progress) as on_progress:
        return tune_rates(resolved, folder, on_progress, count, trust_code).rates


def plan_for(
    task: AnyTask | Population = "digits",
    goal: float | None = None,
    cost: Mapping[str, float] | str | None = None,
    *,
    samplers: "str | AnySampler | Iterable[AnySampler] | None" = None,
    out: AnyPath | None = None,
    processes: int | None = None,
    progress: bool = True,
    trust_code: bool = False,
    **settings: Any,
) -> Advice:
    """Plan a federation: which method, how many clients n, how many rounds, at what cost.

    Args:
        task: As in ``compare``; or the ``Population`` of ``plan.with_census(answers)`` of a real
            federation, which tells the errors of estimates alone, without rounds and cost.
        goal: What the metric is to reach: in (0, 1] for a share such as accuracy, else any number;
            the task's threshold if left out.
        cost: Prices > 0 in a unit of yours, of what ``analysis.Prices`` names, such as
            ``{"training": 1, "mb_up": 0.1, "round": 5}``; trainings alone if left out.
        samplers: The methods under consideration, as in ``compare``; ``uniform`` always is.
        out: The folder of the pilot; a new one below ``runs/`` if left out. Another goal or cost
            with the same folder plays only what is missing.
        processes: As in ``compare``.
        progress: Whether a bar is shown.
        trust_code: As in ``compare``.
        settings: The settings of ``deltafl plan``: ``budget=500``, ``cohorts=[5, 10, 20]``, and
            those of ``compare``.

    Returns:
        The answer; ``print`` it, or read ``forecasts`` and ``errors``.

    Raises:
        DeltaflError: If the pilot says that the goal cannot be reached, or something cannot be
            played, in one sentence.

    Example:
        >>> print(deltafl.plan_for("digits", 0.8, {"training": 1, "round": 5}))  # doctest: +SKIP
    """
    if isinstance(task, Population):
        methods = WITHOUT_MEMORY if samplers is None else _labels(samplers)
        return Advice.of_census(task, methods)
    given = {"goal": goal, "cost": cost if cost is None else Prices.read(cost).text}
    settings |= {name: value for name, value in given.items() if value is not None}
    resolved, count = _resolved(PlanSettings, task, samplers, processes, settings)
    folder = _folder(out, "plan", resolved.task)
    with sweep_progress(progress) as on_progress:
        return play_pilot(resolved, folder, on_progress, count, trust_code)


def _resolved(
    kind: type[AnySettings],
    task: AnyTask,
    samplers: Any,
    processes: int | None,
    settings: dict[str, Any],
) -> tuple[AnySettings, int]:
    """The settings of a call, and how many runs are played side by side."""
    require_simulator()
    forget_edited()  # in a notebook
    given = {"task": _task_name(task), **settings}
    if samplers is not None:
        given["samplers"] = _labels(samplers)
    resolved = make_settings(kind, given)
    refuse_ignored(resolved, settings)
    return resolved, count_processes(processes, resolved.device)


def load(*folders: AnyPath) -> Comparison:
    """The comparison of finished folders, of ``deltafl.compare``, ``deltafl compare`` or
    ``deltafl run``.

    Args:
        folders: One, or several that are joined: they share task and settings; samplers and seeds
            may differ.

    Raises:
        DeltaflError: If a folder holds no finished runs, or two of them differ in more than
            samplers and seeds.
    """
    if not folders:
        raise DeltaflError("load needs a folder: deltafl.load('runs/compare-digits-...')")
    return joined([_folder(folder) for folder in folders])


def _folder(given: Any, command: str = "", task: str = "") -> Path:
    """The folder that was named, or else a new one."""
    if given is None and command:
        return new_folder(command, task)
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise DeltaflError(f"{given!r} is no folder; write its name, such as 'my-results'")
    # A shell does so; a folder that is called ~ nobody wants.
    return with_home(given)


def _labels(samplers: "AnySampler | Iterable[AnySampler]") -> list[str]:
    """The labels of samplers; text may name a class that is given beside it."""
    # A ``Named`` is one label, whatever commas its text has.
    if isinstance(samplers, str) and not isinstance(samplers, Named):
        return split_labels(samplers)
    if isinstance(samplers, str) or not isinstance(samplers, Iterable):
        samplers = [samplers]
    labels = [label_of(sampler) for sampler in samplers]
    classes: dict[str, type[Sampler]] = {}
    for label in labels:
        if isinstance(label, Named):
            name = base_name(label)
            if classes.setdefault(name, label.of) is not label.of:
                raise DeltaflError(
                    f"two different classes are called {name!r}; give one of them another name"
                )
    return [with_object(label, classes) for label in labels]


def _task_name(task: AnyTask) -> str:
    """The name of a task in settings; an object is known by its own."""
    if isinstance(task, str):
        return task
    if isinstance(task, os.PathLike):
        return os.fspath(task)
    if isinstance(task, Task):
        name = task.name
    elif hasattr(task, "__name__"):
        name = task.__name__
    elif callable(task):
        name = type(task).__name__
    elif hasattr(task, "columns"):
        name = "frame"
    elif hasattr(task, "column_names"):
        name = "dataset"
    else:
        raise DeltaflError(
            f"task is {type(task).__name__}; it must be a name, a file, a deltafl.tasks.Task, a "
            "function that makes one, a data frame, or a Hugging Face data set; "
            "deltafl.tasks.from_torch makes a task of PyTorch data sets"
        )
    if not isinstance(name, str):
        raise DeltaflError(f"the name of the task is {name!r}; it must be a text, such as 'mine'")
    # It becomes a part of folders' names.
    name = re.sub(r"[^\w.+-]", "", name)
    # No record may take it for the library's task.
    if name in known_tasks():
        name = f"my-{name}"
    return Named(name, task)
