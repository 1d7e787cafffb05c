"""From Python: ``deltafl.compare`` and ``deltafl.load``, the ``Comparison`` that they return, and ``deltafl.tune``."""

import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .. import given
from ..analysis.plots import draw_curves, small_png
from ..analysis.runs import Run
from ..analysis.summary import SamplerSummary, Summary
from ..analysis.table import comparison_table
from ..errors import DeltaflError, require
from ..samplers import Sampler, label_of, split_labels
from ..tasks.base import Task
from ..tasks.registry import known_tasks
from .callback import OnRound
from .compare import joined, play_comparison, write_comparison
from .directory import new_folder
from .progress import sweep_progress
from .settings import AnySettings, CompareSettings, make_settings, refuse_ignored
from .sweep import count_processes, require_simulator
from .tune import TuneSettings, tune_rates

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

#: A task's name or file, a ``Task``, a function that makes one, a data frame, or a Hugging Face data set.
AnyTask = str | os.PathLike[str] | Task | Callable[..., Task] | Any
AnySampler = str | Sampler | type[Sampler]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Finished runs of several samplers; printed, or shown by a notebook, it is their table with remarks.

    Attributes:
        folders: Where the runs are recorded.
        numbers: The numbers of the table, as in ``summary.json``.
        curves: One ``analysis.Run`` for each sampler and seed.
    """

    folders: tuple[Path, ...]
    numbers: Summary
    curves: Sequence[Run]

    @property
    def folder(self) -> Path:
        """The folder of the comparison; the first, if several were joined."""
        return self.folders[0]

    def summary(self) -> "pd.DataFrame":
        """One row a sampler: the columns are those of the table, with intervals as ``_low`` and ``_high``."""
        import pandas as pd

        def row(entry: SamplerSummary) -> dict[str, Any]:
            metric, gap, reached = self.numbers.metric, entry.gap_closed, entry.to_threshold
            value, speedup = entry.top5 if metric == "accuracy" else entry.final, reached and reached.speedup
            found = {"sampler": entry.sampler, "seeds": len(entry.seeds), metric: value.mean, f"{metric}_sd": value.sd}
            found |= {"gap_closed": gap and gap.value, "gap_low": gap and gap.low, "gap_high": gap and gap.high}
            if (fair := entry.fairness) is not None:
                found |= {"client_mean": fair.mean.mean, "client_sd": fair.sd.mean}
                found |= {"worst_tenth": fair.worst_tenth.mean, "worst_tenth_sd": fair.worst_tenth.sd}
            found |= {"rounds_to_threshold": reached and reached.rounds and reached.rounds.mean}
            found |= {"reached": reached and reached.num_reached, "speedup": speedup and speedup.ratio}
            found |= {"speedup_low": speedup and speedup.low, "speedup_high": speedup and speedup.high}
            if entry.total_clock is not None:
                found |= {"clock_to_threshold": reached and reached.clock, "clock": entry.total_clock}
            return found | {"seconds": entry.total_seconds, "bytes": entry.total_bytes, "diverged": entry.num_diverged}

        exact = {"sampler", "seeds", "reached", "diverged"}
        table = pd.DataFrame(map(row, self.numbers.samplers))
        return table.astype({name: float for name in table.columns if name not in exact}).set_index("sampler")

    def runs(self) -> "pd.DataFrame":
        """One row for each sampler, seed and evaluation; seconds, bytes and clock are of all rounds up to there."""
        import pandas as pd

        columns = ["round", "accuracy", "loss", "seconds", "bytes"]
        columns += [] if self.curves[0].clock_r is None else ["clock"]
        parts = [
            pd.DataFrame(
                {"sampler": run.sampler, "seed": run.seed} | {key: getattr(run, f"{key}_r") for key in columns}
            )
            for run in self.curves
        ]
        return pd.concat(parts, ignore_index=True)

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """The curves of the metric over rounds: mean over seeds, and a band from the lowest to the highest.

        Args:
            path: Where the figure is saved too: a name that ends in ``.png``, ``.pdf``, ``.svg`` or what else
                Matplotlib writes.
        """
        figure = draw_curves(self.curves, self.numbers, self.numbers.metric, None if path is None else Path(path))
        assert figure is not None, "a comparison has its metric"
        figure._repr_png_ = partial(small_png, figure)  # type: ignore[attr-defined]  # what a notebook shows
        return figure

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the page that shows the comparison: one HTML file, which asks the network for nothing."""
        write_comparison(self.curves, self.numbers, Path(path))

    def _repr_html_(self) -> str:
        return self._printed().export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def __repr__(self) -> str:
        return f"{self._printed().export_text().rstrip()}\n\nResults: {', '.join(map(str, self.folders))}"

    def _printed(self) -> Console:
        """A console that has printed the table."""
        console = Console(record=True, file=io.StringIO(), width=100, force_jupyter=False)
        console.print(comparison_table(self.numbers))
        return console


def compare(
    task: AnyTask = "digits",
    samplers: "str | AnySampler | Iterable[AnySampler] | None" = None,
    seeds: int | Iterable[int] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    processes: int | None = None,
    progress: bool = True,
    report: bool = True,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Comparison:
    """Compare samplers on one task, seed by seed, under the same split, initial model and minibatches.

    Args:
        task: A name of ``deltafl tasks``; a table's path; ``"FILE.py:FUNCTION"``; a ``deltafl.tasks.Task``; a function
            ``make_task(seed)`` or ``make_task()`` that returns one; a data frame or a Hugging Face data set, with
            ``label=`` and ``column=`` (who holds a row) or ``partition=``.
        samplers: Labels, instances such as ``ByLoss(power=2)``, or classes; six of the library's if left out.
        seeds: A number of seeds 0, 1, ..., or a list of them; 5 if left out.
        out: The folder of the results; a new one below ``runs/`` if left out. The same call with the same folder goes
            on where it was interrupted, and with more samplers, seeds or rounds it plays what is missing.
        processes: Runs side by side; as many as there are cores if left out, 1 on a GPU.
        progress: Whether a bar is shown.
        report: Whether ``report.html`` is written into the folder.
        on_round: Called here with a ``deltafl.simulation.RoundDone`` for each round of each run; with several processes
            up to a second later and in batches, those of one run in their order.
        settings: The settings of ``deltafl compare``: ``rounds=50``, ``sample=10``, ``local_lr=0.1``, ...

    Raises:
        DeltaflError: If something cannot be played, in one sentence; or if ``on_round`` raises.

    Example:
        >>> result = deltafl.compare("digits", ["uniform", "innovation"], seeds=3, rounds=20)  # doctest: +SKIP
        >>> result.summary(); result.plot("accuracy.pdf")  # doctest: +SKIP
    """
    require("pandas", "sim")
    if seeds is not None:
        settings["seeds"] = seeds if isinstance(seeds, int) else list(seeds)
    resolved, count = _resolved(CompareSettings, task, samplers, processes, settings)
    folder = new_folder("compare", resolved.task) if out is None else Path(out)
    with sweep_progress() if progress else nullcontext(lambda _: None) as on_progress:
        together = play_comparison(resolved, folder, on_progress, count, on_round or (lambda _: None))
    return Comparison((folder,), together.write(folder, report), together.runs)


def tune(
    task: AnyTask = "digits",
    samplers: "str | AnySampler | Iterable[AnySampler] | None" = None,
    *,
    out: str | os.PathLike[str] | None = None,
    processes: int | None = None,
    progress: bool = True,
    **settings: Any,
) -> dict[str, dict[str, float]]:
    """Find the learning rates of each sampler, on seeds and a validation part that no comparison judges by.

    Args:
        task: As in ``compare``.
        samplers: As in ``compare``.
        out: The folder of the tuning runs; a new one below ``runs/`` if left out. None is played twice there.
        processes: As in ``compare``.
        progress: Whether a bar is shown.
        settings: The settings of ``deltafl tune``: ``local_rates=[0.1, 0.2, 0.4]``, ``server_rates=[0.5, 1, 2]``,
            ``tuning_seeds=3``, ``validation=0.2``, and those of ``compare``.

    Returns:
        The rates by label, for ``compare``.

    Raises:
        DeltaflError: If something cannot be played, in one sentence.

    Example:
        >>> rates = deltafl.tune("digits", ["uniform", "innovation"], rounds=20)  # doctest: +SKIP
        >>> deltafl.compare("digits", ["uniform", "innovation"], rounds=20, rates=rates)  # doctest: +SKIP
    """
    resolved, count = _resolved(TuneSettings, task, samplers, processes, settings)
    folder = new_folder("tune", resolved.task) if out is None else Path(out)
    with sweep_progress() if progress else nullcontext(lambda _: None) as on_progress:
        return tune_rates(resolved, folder, on_progress, count).rates


def _resolved(
    kind: type[AnySettings], task: AnyTask, samplers: Any, processes: int | None, settings: dict[str, Any]
) -> tuple[AnySettings, int]:
    """The settings of a call, and how many runs are played side by side."""
    require_simulator()
    named = {} if samplers is None else {"samplers": _labels(samplers)}
    given.TASKS.clear()
    resolved = make_settings(kind, {"task": _task_name(task), **settings, **named})
    refuse_ignored(resolved, settings)
    return resolved, count_processes(processes, resolved.device)


def load(*folders: str | os.PathLike[str]) -> Comparison:
    """The comparison of finished folders, of ``deltafl.compare``, ``deltafl compare`` or ``deltafl run``.

    Args:
        folders: One, or several that are joined: they share task and settings; samplers and seeds may differ.

    Raises:
        DeltaflError: If a folder holds no finished runs, or two of them differ in more than samplers and seeds.
    """
    places = tuple(map(Path, folders))
    if not places:
        raise DeltaflError("load needs a folder: deltafl.load('runs/compare-digits-...')")
    together = joined(places)
    return Comparison(places, together.summary(), together.runs)


def _labels(samplers: "AnySampler | Iterable[AnySampler]") -> list[str]:
    if isinstance(samplers, str):
        return split_labels(samplers)
    if isinstance(samplers, Sampler | type):
        return [label_of(samplers)]
    found: dict[str, Any] = {}
    labels = []
    for sampler in samplers:
        labels.append(label_of(sampler))
        kind = sampler if isinstance(sampler, str | type) else type(sampler)
        name = labels[-1] if isinstance(kind, str) else kind.__name__
        if found.setdefault(name, kind) is not kind and not isinstance(kind, str):
            raise DeltaflError(f"two different classes are called {name!r}; give one of them another name")
    return labels


def _task_name(task: AnyTask) -> str:
    """The name of a task in settings; an object is known by its own."""
    if isinstance(task, str | os.PathLike):
        return os.fspath(task)
    if isinstance(task, Task):
        name = task.name
    elif callable(task):
        name = getattr(task, "__name__", type(task).__name__)
    elif hasattr(task, "columns") or hasattr(task, "column_names"):
        name = "frame" if hasattr(task, "columns") else "dataset"
    else:
        raise DeltaflError(
            f"task is {type(task).__name__}; it must be a name, a file, a deltafl.tasks.Task, a function that makes "
            "one, a data frame, or a Hugging Face data set"
        )
    name = re.sub(r"[^\w.+-]", "", name)
    name = f"my-{name}" if name in known_tasks() else name
    given.TASKS[name] = task
    return name
