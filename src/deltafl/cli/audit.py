"""``deltafl audit``: hold every claim of unbiasedness against enumeration or simulation."""

from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ..audit.conformance import check_sampler
from ..audit.methods import AuditRow, KnownUpdates, Subject
from ..audit.methods import audit as audit_methods
from ..audit.mse_bounds import least_mse
from ..errors import DeltaflError, in_one_line
from ..samplers.base import RunFacts
from ..samplers.label import base_name, make_sampler, split_labels
from ..samplers.table import SAMPLERS
from ..simulation.settings import RunSettings, make_settings
from . import options as o
from .own_code import own_code_explained

app = typer.Typer(rich_markup_mode=None)


@app.command(cls=o.settings_command(RunSettings, ("clients", "sample", "weights", "data_dir")))
def audit(
    ctx: typer.Context,
    samplers: Annotated[str, typer.Option(help="names, or all", metavar="A,B")] = "all",
    designs: Annotated[str, typer.Option(help="names, or all", metavar="A,B")] = "all",
    estimators: Annotated[str, typer.Option(help="names, or all", metavar="A,B")] = "all",
    task: Annotated[str, typer.Option(help="whose updates are audited", metavar="NAME")] = "toy",
    draws: Annotated[
        int, typer.Option(help="cohorts drawn where they cannot be enumerated", min=100)
    ] = 4000,
    seed: Annotated[int, typer.Option(help="fixes task, warm-up and draws", min=0)] = 0,
) -> None:
    """Check which methods are unbiased, and how good they are, on a task's real updates.

    MSE is E norm(D - ubar)^2 / norm(ubar)^2. Exit code 1 if a method that claims to be unbiased is
    not.

    Example: deltafl audit --samplers all
    """
    settings = make_settings(RunSettings, {"task": task, "seed": seed, **ctx.obj})
    subject = subject_of(settings)
    population = subject.population
    mean_d = population.weight_m @ subject.known.update_md
    wide_md = subject.known.update_md.astype(float)
    least, over_designs = least_mse(wide_md @ wide_md.T, population.weight_m, subject.n)
    relative = least / float(mean_d @ mean_d)
    facts = settings.run_facts(population, subject.num_classes or None)
    names = {"designs": designs, "estimators": estimators}
    chosen = {kind: None if text == "all" else split_labels(text) for kind, text in names.items()}
    console = Console()
    rows = list["AuditRow"]()
    left_out = list[str]()
    for label in SAMPLERS if samplers == "all" else split_labels(samplers):
        _check_own(label, facts)
        with own_code_explained(task, [label, *(chosen["estimators"] or ())]):
            found = list(
                audit_methods(subject, [label], facts=facts, draws=draws, seed=seed, **chosen)
            )
        if found:
            console.print(_table(label, found, relative), "")
        else:
            left_out.append(label)
        rows += found
    if not rows:
        raise DeltaflError(
            "none of these combinations of sampler, design and estimator can be drawn on task "
            f"{task!r}; try 'all', "
            "or, for a sampler that looks at labels, --task digits"
        )
    kind = (
        "least MSE of any design of fixed size"
        if over_designs
        else "a lower bound for any unbiased scheme"
    )
    failed = sum(not row.passes for row in rows)
    typer.echo(
        f"{len(rows)} method{'' if len(rows) == 1 else 's'}, {population.num_clients} clients, "
        f"{subject.n} selected; "
        f"{failed} claims fail.\n"
        f"Ratio: to {relative:.4g}, {kind}, without control variates."
    )
    if any(row.needs_scores and row.claims_unbiased for row in rows):
        typer.echo(
            "if R > 0: unbiased in rounds where no client's score is 0. With one such client, "
            "whose update is 0 or the "
            "mean of all, the bias is up to "
            f"{max(row.bias_at_zero for row in rows if row.claims_unbiased):.2g}."
        )
    if left_out:
        typer.echo(
            "Not audited, as they cannot be drawn on these updates or with these designs and "
            "estimators: "
            f"{', '.join(left_out)}. For samplers that look at labels write --task digits."
        )
    if failed:
        raise typer.Exit(1)


def _check_own(label: str, facts: "RunFacts") -> None:
    """Refuse a sampler in a user's file that breaks the protocol, or its claim where sizes
    differ.
    """
    if base_name(label) in SAMPLERS or (sampler := make_sampler(label, facts)).needs_oracle:
        return
    try:
        check_sampler(sampler)
    except DeltaflError:
        raise
    except Exception as error:  # whatever the user's own code raises
        what = error if isinstance(error, AssertionError) else in_one_line(error)
        raise DeltaflError(
            f"{label}: {what} (with 12 clients of unequal sizes; see docs/add-a-method.md)"
        ) from error


def _table(sampler: str, rows: "list[AuditRow]", least: float) -> "Table":
    """The findings on one sampler."""
    table = Table(
        title=f"[bold]{sampler}[/]",
        title_justify="left",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("design", no_wrap=True, min_width=13)
    table.add_column("estimator", no_wrap=True, min_width=16)
    for heading, width in (("bias", 7), ("in se", 5), ("MSE", 9), ("ratio", 6)):
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    table.add_column("finding", no_wrap=True)
    for row in rows:
        ratio = f"{row.mse / least:.2f}" if least > 0 and row.mse > 0 else "-"
        error = "exact" if row.exact else f"{row.z:.1f}" if row.z < 100 else ">99"
        table.add_row(
            row.design,
            row.estimator,
            f"{row.bias:.1e}",
            error,
            f"{row.mse:.4g}",
            ratio,
            _finding(row),
        )
    return table


def _finding(row: "AuditRow") -> str:
    """In words: what was claimed and what was found."""
    if not row.passes:
        return "[bold red]CLAIM FAILS[/]"
    if row.is_unbiased:
        return (
            ("if R > 0" if row.needs_scores else "unbiased") if row.claims_unbiased else "none seen"
        )
    return "biased"


def subject_of(settings: RunSettings) -> Subject:
    """One round of a task for the audit: every client trained once from the initial model."""
    from ..simulation.setup import engine_of, plan_of  # loads torch

    engine = engine_of(settings)
    population = engine.task.population(settings.weights)
    params_d = engine.initial_params()
    client_m = np.arange(population.num_clients)
    update_md, reports = engine.train(params_d, 0, client_m)
    losses_m = engine.losses(params_d, client_m)
    return Subject(
        population=population,
        known=KnownUpdates(
            update_md, population.weight_m, reports.step_variance_n, losses_m, reports.num_steps_n
        ),
        n=plan_of(settings, population).n,
        num_classes=engine.task.dataset.num_classes,
    )
