"""``deltafl audit``: hold every claim of unbiasedness against enumeration or simulation."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from ..errors import DeltaflError
from ..settings import RunSettings, make_settings
from . import options as o

if TYPE_CHECKING:
    from ..audit import AuditRow


def audit(
    samplers: Annotated[str, typer.Option(help="names, or all", metavar="A,B")] = "all",
    designs: Annotated[str, typer.Option(help="names, or all", metavar="A,B")] = "all",
    estimators: Annotated[str, typer.Option(help="names, or all", metavar="A,B")] = "all",
    task: Annotated[str, typer.Option(help="whose updates are audited", metavar="NAME")] = "toy",
    clients: o.Clients = None,
    sample: o.Sample = None,
    weights: o.Weights = None,
    floor: o.Floor = None,
    draws: Annotated[int, typer.Option(help="cohorts drawn where they cannot be enumerated", min=100)] = 4000,
    seed: Annotated[int, typer.Option(help="fixes task, warm-up and draws", min=0)] = 0,
    data_dir: o.DataDir = None,
) -> None:
    """Check which methods are unbiased, and how good they are, on a task's real updates.

    MSE is E norm(D - ubar)^2 / norm(ubar)^2. Exit code 1 if a method that claims to be unbiased is not.

    Example: deltafl audit --samplers all
    """
    names = ("clients", clients), ("sample", sample), ("weights", weights), ("floor", floor), ("data_dir", data_dir)
    given = {"task": task, "seed": seed} | {key: value for key, value in names if value is not None}
    settings = make_settings(RunSettings, given)
    from ..audit import all_samplers, gram_of
    from ..audit import audit as audit_methods
    from ..least import least_mse
    from ..simulation.experiment import subject_of

    subject = subject_of(settings)
    m, design = subject.population.num_clients, None
    rows = list(
        audit_methods(
            subject,
            all_samplers() if samplers == "all" else _names(samplers),
            designs=None if designs == "all" else _names(designs),
            estimators=None if estimators == "all" else _names(estimators),
            settings=settings.sampler_settings(m, float(subject.population.num_examples_m.mean()), design),
            draws=draws,
            seed=seed,
        )
    )
    if not rows:
        raise DeltaflError("none of these combinations of sampler, design and estimator can be drawn; try 'all'")
    mean_d = subject.population.weight_m @ subject.update_md
    least, over_designs = least_mse(gram_of(subject.update_md), subject.population.weight_m, subject.n)
    relative = least / float(mean_d @ mean_d)
    table = Table(box=None, pad_edge=False)
    for heading in ("sampler", "design", "estimator", "bias", "MSE", "ratio", "finding"):
        justify: Literal["left", "right"] = "right" if heading in {"bias", "MSE", "ratio"} else "left"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row in rows:
        bias = f"{row.bias:.1e}" if row.exact else f"{row.bias:.1e} ({row.z:.1f} se)"
        ratio = f"{row.mse / relative:.2f}" if relative > 0 and row.mse > 0 else "-"
        table.add_row(row.sampler, row.design, row.estimator, bias, f"{row.mse:.4g}", ratio, _finding(row))
    console = Console()
    console.print(table)
    failed = [row for row in rows if not row.passes]
    kind = "least MSE of any design of fixed size" if over_designs else "a lower bound for any unbiased scheme"
    console.print(
        f"\n{len(rows)} methods, {m} clients, {subject.n} asked; {len(failed)} claims fail. "
        f"Ratio: to {relative:.4g}, {kind}, without controls.",
        highlight=False,
    )
    if failed:
        raise typer.Exit(1)


def _finding(row: "AuditRow") -> str:
    """In words: what was claimed and what was found."""
    if not row.passes:
        return "[bold red]CLAIM FAILS[/]"
    if row.is_unbiased:
        return "unbiased" if row.claims_unbiased else "no bias here"
    return "biased"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
