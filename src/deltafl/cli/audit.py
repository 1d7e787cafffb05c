"""``deltafl audit``: hold every claim of unbiasedness against enumeration or simulation."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer
from pydantic import Field
from rich.text import Text

from .. import simulation
from ..analysis.narrow import NarrowTable, plain, show
from ..audit.conformance import check_sampler, check_work
from ..audit.control import check_control
from ..audit.methods import AuditRow, KnownUpdates, Subject, label_to_audit
from ..audit.methods import audit as audit_methods
from ..audit.mse_bounds import least_mse
from ..errors import OWN_ERRORS, DeltaflError, counted, explained, in_one_line, log
from ..estimators.table import find_estimator
from ..samplers.base import RunFacts
from ..samplers.label import base_name, make_sampler, parse_label, split_labels
from ..samplers.table import SAMPLERS
from ..simulation.setting_types import Name
from ..simulation.settings import RunSettings, make_settings
from . import options as o
from .common import say
from .own_code import own_code_explained

app = typer.Typer(rich_markup_mode=None)
#: With whom code of users is tried.
_UNEQUAL = "with 12 clients of unequal sizes"
#: Column -> its least width.
_COLUMNS = {
    "design": 13,
    "estimator": 16,
    "bias": 7,
    "in se": 5,
    "MSE": 9,
    "ratio": 6,
    "finding": 0,
}
_NUMBERS = ("bias", "in se", "MSE", "ratio")


class AuditSettings(RunSettings):
    """The task whose updates are audited, and what is audited on them."""

    task: Name = "toy"
    """whose updates are audited"""
    samplers: str = "all"
    """names, or all"""
    designs: str = "all"
    """names, or all"""
    estimators: str = "all"
    """names, or all"""
    draws: Annotated[int, Field(ge=100, le=10**8)] = 4000
    """cohorts drawn where they cannot be enumerated"""


OPTIONS = [
    "samplers",
    "designs",
    "estimators",
    "task",
    "draws",
    "seed",
    "clients",
    "sample",
    "weights",
    "data_dir",
]


@app.command(cls=o.settings_command(AuditSettings, OPTIONS, writes=False))
def audit(ctx: typer.Context) -> None:
    """Check which methods are unbiased, and how good they are, on a task's real updates.

    It goes through all cohorts that could be drawn, or through --draws of them. The table has the
    bias, also in standard errors ("exact" after all cohorts); the MSE, E norm(D - ubar)^2 /
    norm(ubar)^2 for an estimate D of all clients' mean update ubar; and its ratio to the least MSE
    without predictions. Exit code 1 if a method that claims to be unbiased is not.

    Example: deltafl audit --samplers all
    """
    settings = make_settings(AuditSettings, ctx.obj)
    labels = _chosen(settings.samplers)
    designs = _chosen(settings.designs)
    estimators = _chosen(settings.estimators)
    # Before the first table, which may take long.
    with own_code_explained(settings.task, labels or ()):
        for label in labels or ():
            label_to_audit(label)
    subject = subject_of(settings)
    population = subject.population
    mean_d = population.weight_m @ subject.known.update_md
    # In float64, as the bound asks whether the Gram matrix is singular.
    wide_md = subject.known.update_md.astype(float)
    least, over_designs = least_mse(
        wide_md @ wide_md.T,
        population.weight_m,
        subject.n,
    )
    relative = least / float(mean_d @ mean_d)
    facts = settings.run_facts(population, subject.num_classes or None)
    rows = list[AuditRow]()
    left_out = list[str]()
    tried = set[str]()
    # Each table is shown as soon as it is known.
    for label in labels or SAMPLERS:
        _check_own(label, facts)
        with own_code_explained(settings.task, [label, *(estimators or ())]):
            for estimator in {parse_label(label).estimator, *(estimators or ())} - tried:
                _check_own_control(estimator)
                tried.add(estimator)
            audited = audit_methods(
                subject,
                [label],
                designs=designs,
                estimators=estimators,
                facts=facts,
                draws=settings.draws,
                seed=settings.seed,
            )
            found = list(audited)
        if found:
            show(_table(label, found, relative), "")
        else:
            left_out.append(label)
        rows += found
    if not rows:
        raise DeltaflError(
            "none of these combinations of sampler, design and estimator can be drawn on task "
            f"{settings.task!r}; try 'all', or, for a sampler that looks at labels, --task digits"
        )
    kind = "a lower bound for any unbiased scheme"
    if over_designs:
        kind = "least MSE of any design of fixed size"
    failed = sum(not row.passes for row in rows)
    say(
        f"Methods: {len(rows)}, with {counted(population.num_clients, 'client')}, {subject.n} "
        f"selected; {failed} claims fail."
    )
    say(f"Ratio: to {relative:.4g}, {kind}, without control variates.")
    if any(row.needs_scores and row.claims_unbiased for row in rows):
        say(
            "if R > 0: unbiased in rounds where no client's score is 0. With one such client, "
            "whose update is 0 or the mean of all, the bias is up to "
            f"{max(row.bias_at_zero for row in rows if row.claims_unbiased):.2g}."
        )
    if left_out:
        say(
            "Not audited, as they cannot be drawn on these updates or with these designs and "
            f"estimators: {', '.join(left_out)}."
        )
    if left_out and subject.num_classes == 0:
        say("For samplers that look at labels write --task digits.")
    if failed:
        raise typer.Exit(1)


def _chosen(text: str) -> list[str] | None:
    if text == "all":
        return None
    names = list(dict.fromkeys(split_labels(text)))
    # An empty list would be taken for all of them.
    if not names:
        raise DeltaflError(f"{text!r} names no sampler, design or estimator; write names, or all")
    return names


def _check_own(label: str, facts: RunFacts) -> None:
    """Refuse a sampler in a user's file that breaks the protocol, or its claim where sizes
    differ.
    """
    if base_name(label) in SAMPLERS:
        return
    sampler = make_sampler(label, facts)
    # ``check_sampler`` would need an oracle that knows its clients.
    if sampler.needs_oracle:
        return
    with explained(label, cure=f" ({_UNEQUAL}; see docs/how-to/add-a-method.md)"):
        check_sampler(sampler)


def _check_own_control(estimator: str) -> None:
    """The same of a control variate."""
    if ".py:" not in estimator:
        return
    try:
        check_control(find_estimator(estimator).control)
    except AssertionError as error:
        raise DeltaflError(
            f"{estimator}: {error} ({_UNEQUAL}; see docs/how-to/add-a-control-variate.md)"
        ) from error
    # It may need what these clients lack, such as ten labels: the audit itself uses it, too.
    except OWN_ERRORS as error:
        log.info(f"{estimator} is not tried {_UNEQUAL}: {in_one_line(error)}")


def _table(sampler: str, rows: Sequence[AuditRow], least: float) -> NarrowTable:
    """The findings on one sampler."""
    cells = list[list[str | Text]]()
    for row in rows:
        ratio = "-"
        # Where updates are all alike the least error is 0, and so is that of many methods.
        if least > 0 and row.mse > 0:
            ratio = f"{row.mse / least:.2f}"
        error = f"{row.z:.1f}"
        if row.z >= 100:
            error = ">99"
        # Enumerated: there is no standard error to count in.
        if row.exact:
            error = "exact"
        cells.append(
            [
                row.design,
                row.estimator,
                f"{row.bias:.1e}",
                error,
                f"{row.mse:.4g}",
                ratio,
                _finding(row),
            ]
        )
    places = {heading: place for place, heading in enumerate(_COLUMNS)}
    return NarrowTable(
        [*_COLUMNS],
        cells,
        right=[places[heading] for heading in _NUMBERS],
        leaves=[places[heading] for heading in ("ratio", "MSE", "in se", "estimator", "bias")],
        least=[*_COLUMNS.values()],
        title=sampler,
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )


def _finding(row: AuditRow) -> str | Text:
    """In words: what was claimed and what was found."""
    if not row.passes:
        return plain("CLAIM FAILS", "bold red")
    if not row.is_unbiased:
        return "biased"
    if not row.claims_unbiased:
        return "none seen"
    return "if R > 0" if row.needs_scores else "unbiased"


def subject_of(settings: RunSettings) -> Subject:
    """One round of a task for the audit: every client trained once from the initial model."""
    engine = simulation.engine_of(settings)
    population = engine.task.population(settings.weights)
    # Before all of them are trained.
    check_work(population.num_clients, 1)
    params_d = engine.initial_params()
    client_m = np.arange(population.num_clients)
    update_md, reports, _ = engine.train(params_d, 0, client_m)
    losses_m = engine.losses(params_d, client_m)
    return Subject(
        population=population,
        known=KnownUpdates(
            update_md,
            population.weight_m,
            reports.step_variance_n,
            losses_m,
            reports.num_steps_n,
        ),
        n=simulation.plan_of(settings, population).n,
        num_classes=engine.task.dataset.num_classes,
    )
