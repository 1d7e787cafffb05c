"""How an experiment is shown: the settings below ``[view]`` of its file, one model a kind.

Every kind takes ``baseline``, ``names``, ``rows_of``, ``order_by_part``, ``thresholds`` and ``best`` (see ``View``).

==================  =============================================================================================
kind                shows
==================  =============================================================================================
``table``           the paper's table, a part each, and accuracy curves
``thresholds``      the same under other thresholds; parts without one are left out
``curves``          curves (``y``, ``smoothing``, ``columns``) and final values
``best-accuracies`` mean of the best ``best`` accuracies within the first ``rounds``, as bars
``probes``          probe columns over rounds (``columns``, ``panels``, ``log``, ``larger``, ``ratio``, ``bounds``)
==================  =============================================================================================
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from deltafl.errors import DeltaflError, unknown_name

from ..spec import Experiment

Y = Literal["accuracy", "loss", "log10-loss"]


class View(BaseModel):
    """What every kind takes, and all that a table takes.

    Attributes:
        baseline: Label that speed-ups compare with; by default fedavg, else uniform, else the last of the order.
        names: Readable names by label, instead of the built-in ones.
        rows_of: Parts whose runs are rows of another part: variants of a setting. There a run's label is
            ``SAMPLER+PART``; orders, baselines, names and reported numbers may use it.
        order_by_part: The paper's ordering where it differs from the experiment's, by part.
        thresholds: Thresholds by part, instead of those of the settings.
        best: k of "mean of the k best accuracies within the last 4 % of the rounds", for all parts or by part.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    baseline: str | None = None
    names: dict[str, str] = {}
    rows_of: dict[str, str] = {}
    order_by_part: dict[str, tuple[str, ...]] = {}
    thresholds: dict[str, float] = {}
    best: int | dict[str, int] = 5

    def best_of(self, part: str) -> int:
        """The k of a part's accuracy."""
        return self.best if isinstance(self.best, int) else self.best.get(part, 5)


class ThresholdsView(View):
    """Runs of another experiment under other thresholds, which must be given."""

    thresholds: dict[str, float] = Field(min_length=1)


class CurvesView(View):
    """Curves.

    Attributes:
        y: What is drawn, a row of panels each; the first decides what the verdict compares.
        smoothing: Evaluations in the moving average, in the picture only.
        columns: Panels a row.
    """

    y: tuple[Y, ...] = Field(min_length=1)
    smoothing: int = Field(1, ge=1)
    columns: int = Field(3, ge=1)

    @field_validator("y", mode="before")
    @classmethod
    def _one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class BestView(View):
    """Mean of the best accuracies up to some rounds.

    Attributes:
        rounds: Up to which rounds; those beyond the end of the runs are left out.
        best: How many of the best accuracies.
    """

    rounds: tuple[int, ...] = (100, 300, 500)
    best: int = 10


class ProbesView(View):
    """Probe columns over rounds.

    Attributes:
        columns: Probe columns by their name for people.
        panels: ``"column"``: a panel for each part and column, a line a sampler; ``"part"``: a panel a part.
        log: Whether the axis is logarithmic.
        larger: With an order: whether its first has the larger numbers.
        ratio: Two columns whose ratio is tabulated.
        bounds: By column, the two numbers between which the paper says that it stays.
    """

    columns: dict[str, str] = Field(min_length=1)
    panels: Literal["column", "part"] = "column"
    log: bool = True
    larger: bool = True
    ratio: tuple[str, str] | None = None
    bounds: dict[str, tuple[float, float]] = {}


VIEWS: dict[str, type[View]] = {
    "table": View,
    "thresholds": ThresholdsView,
    "curves": CurvesView,
    "best-accuracies": BestView,
    "probes": ProbesView,
}


def read_view(experiment: Experiment) -> View:
    """The view of an experiment, checked.

    Raises:
        DeltaflError: If the kind is unknown, or a key or value below ``[view]`` is impossible.
    """
    if experiment.kind not in VIEWS:
        raise unknown_name("kind of experiment", experiment.kind, VIEWS)
    try:
        return VIEWS[experiment.kind].model_validate(experiment.view)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["view", *map(str, first["loc"])])
        allowed = ", ".join(VIEWS[experiment.kind].model_fields)
        raise DeltaflError(f"experiment {experiment.name}: {where}: {first['msg']}; allowed are {allowed}") from None
