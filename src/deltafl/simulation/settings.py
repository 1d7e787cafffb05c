"""Settings: every option of a run, typed and checked; from the command line, from TOML, or from
Python.

What is left out is filled from the task's own defaults by ``resolve``, so that a record holds every
value used. All mistakes end in one sentence (``DeltaflError``) before anything is written.
"""

import os
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from ..calls import Named
from ..errors import DeltaflError, bounds_of, counted, unknown_name
from ..estimators.control_variates import ControlVariate
from ..estimators.table import find_estimator
from ..samplers.base import RunFacts, Sampler
from ..samplers.label import (
    OF_TRAINING,
    make_sampler,
    needs_value,
    parse_label,
    spelled_among,
    split_labels,
    split_settings,
    unknown_setting,
)
from ..server.optimizers import Momentum
from ..server.part import ServerPart
from ..server.size import AUTO, USUAL_ERROR, RelativeError
from ..server.table import IN_TEXT, ROW_OF, SETTINGS, make_parts, sized_by
from ..store.own_python import OwnCodeError
from ..store.values import LARGEST_FLOAT, read_toml, sentence
from ..tasks.base import Task
from ..tasks.metrics import AnyMetric, Metric, metric_of, metrics_of
from ..tasks.own import check_picklable, is_own, is_table, load_own, own_spec, registered_spec
from ..tasks.partitions import find_partition, partition_name
from ..tasks.registry import TaskSpec, known_tasks
from ..types import Json, Population
from .conditions import Trace, find_availability, find_speeds
from .schedules import as_text, factors_of
from .setting_types import (
    Columns,
    Count,
    Device,
    Finite,
    Folder,
    FolderHere,
    Memory,
    Metrics,
    Name,
    NotNegative,
    Numbers,
    Positive,
    Rates,
    Seed,
    Seeds,
    Share,
    as_recorded,
    once,
)

Labels = Annotated[
    tuple[Name, ...],
    Field(min_length=1),
    BeforeValidator(lambda v: tuple(split_labels(v)) if isinstance(v, str) else v),
    AfterValidator(once),
]

#: Settings that may differ when a run is continued: they do not change its result.
FREE_ON_RESUME = {"workers", "data_dir", "checkpoint_every"}

#: Settings of a comparison that grow: what is recorded stays, what is new is added.
UNION = {"samplers", "seeds"}

#: Settings that say what a table means.
ONLY_OF_TABLES = ("label", "task_type", "test_share", "sep", "encoding", "strata")
OF_TABLES = (*ONLY_OF_TABLES, "column", "partition", "clients", "alpha")

#: Settings of the server alone: how clients train does not depend on them.
OF_SERVER = (*(name for name in IN_TEXT if not ROW_OF[name].kind.changes_training), "sample")

#: Settings that a sampler may have of its own: ``uniform+average=0.5``.
OF_LABELS = (
    *IN_TEXT,
    "sample",
    *OF_TRAINING,
)

#: ``public`` would give the runs of a comparison different data.
OF_A_RUN = (*OF_LABELS, "public")

#: Settings that a task fills in, and the names of its defaults.
TASK_DEFAULTS = {
    "clients": "num_clients",
    "sample": "sample_size",
    "rounds": "rounds",
    "local_epochs": "local_epochs",
    "local_steps": "local_steps",
    "batch_size": "batch_size",
    "local_lr": "local_lr",
    "partition": "partition",
    "alpha": "alpha",
    "threshold": "threshold",
}


def _field(name: str) -> tuple[Any, Any]:
    """Type and field of a setting of the server's parts."""
    values, default, meaning = SETTINGS[name]
    kind: Any = values
    if isinstance(values, tuple):
        kind = Literal[values]
    elif not isinstance(values, type):
        low, high = bounds_of(values)
        least = {"[": "ge", "(": "gt"}[values[0]]
        most = {"]": "le", ")": "lt"}[values[-1]]
        limits: Any = {least: low, most: min(high, LARGEST_FLOAT)}
        is_whole = type(default) is int or name in ROW_OF[name].kind.whole_numbers()
        kind = Annotated[int if is_whole else Finite, Field(**limits)]
    if default is None:
        kind = kind | None
    return kind, Field(default, description=meaning)


Kind = TypeVar("Kind", bound=BaseModel)


def with_parts(kind: type[Kind]) -> type[Kind]:
    """The class with a field for every setting of the server's parts."""
    fields: Json = {name: _field(name) for name in IN_TEXT}
    made = create_model(kind.__name__, __base__=kind, __doc__=kind.__doc__, **fields)
    made.__module__ = kind.__module__
    return made


@with_parts
class Settings(BaseModel):
    """What ``deltafl run`` and ``deltafl compare`` have in common. None means: the task's
    default.
    """

    # What stands below a field says what it is, in ``--help`` and in ``deltafl settings``.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    task: Name = "digits"
    """what is learnt: a name of `deltafl tasks`, FILE.py:FUNCTION or table.csv"""
    clients: Count | None = None
    """number of clients m"""
    sample: Count | None = None
    """clients selected per round, n"""
    rounds: Count | None = None
    """communication rounds T"""
    local_epochs: Count | None = None
    """passes over the client's data per round"""
    local_steps: Count | None = None
    """minibatch steps per round, not epochs"""
    batch_size: Count | None = None
    """examples per minibatch"""
    local_lr: Positive | None = None
    """local learning rate"""
    lr_schedule: Annotated[Name, BeforeValidator(as_text)] | None = None
    """factor of the local rate by round: cosine, step(every=10,factor=0.5), FILE.py:NAME"""
    local_momentum: Memory = 0.0
    """local momentum gamma, new in every round of a client"""
    proximal: NotNegative = 0.0
    """proximal term mu (FedProx)"""
    fixed_order: bool = False
    """same minibatches in every round; needs a whole pass"""
    partition: Annotated[Name, BeforeValidator(partition_name)] | None = None
    """how clients share examples; `deltafl tasks`, FILE.py:NAME"""
    alpha: Positive | None = None
    """how alike clients are in Dirichlet partitions; 0.1: few labels each"""
    column: str | None = None
    """column that names the client: tables, natural partition"""
    label: Columns | None = None
    """column of the label, for tables, or several: y1,y2; 'label' if not set"""
    task_type: Literal["classification", "regression"] | None = None
    """what a table's label is; words and up to 20 whole numbers are classes"""
    test_share: Share | None = None
    """share of a table's rows in the test set; 0.1 if not set"""
    sep: str | None = None
    """separates a text table's columns: ';', tab, ..."""
    strata: str | None = None
    """column of the client's region or the like, for tables"""
    encoding: str | None = None
    """of a text table, such as latin-1; UTF-8 if not set"""
    weights: Literal["data", "uniform"] = "data"
    """clients count by their numbers of examples, or all the same"""
    memory_dtype: Literal["float32", "bfloat16"] = "float32"
    """of the update per client that some samplers keep"""
    memory_path: FolderHere | None = None
    """folder on a disk for these updates; in RAM if not set"""
    metric: Metrics | None = None
    """what judges runs, then what else is recorded: roc_auc,f1; the task's if not set"""
    threshold: Finite | None = None
    """value of the metric that counts as reached"""
    stop_at_threshold: bool = False
    """end a run that reaches the threshold"""
    patience: Count | None = None
    """end a run after so many evaluations without a better one"""
    evaluate_every: Count = 1
    """rounds between two evaluations"""
    test_examples: Count | None = None
    """test examples to evaluate on, drawn from your data; all if not set"""
    validation: Share | None = None
    """judge by this share of training examples"""
    public: Count | None = None
    """public examples per class, for twins"""
    availability: str = "always"
    """who is there; docs/how-to/world.md"""
    speeds: str | None = None
    """how fast clients are; no clock if not set"""
    dropout: Memory = 0.0
    """share that never replies"""
    deadline: Positive | None = None
    """seconds until a round is closed"""
    over_select: Annotated[Finite, Field(ge=1, le=100)] = 1.0
    """ask n times this, keep the first n"""
    client_costs: str | None = None
    """FILE.csv of what a client's round costs: per_cost, budget, plan"""
    device: Device = "cpu"
    """where clients train: cpu, cuda, cuda:N, or auto (CUDA where there is any)"""
    # Not in ``--help``, as it has a use on GPUs alone; ``deltafl settings`` shows it.
    precision: Annotated[
        Literal["float32", "tf32", "bfloat16"], Field(json_schema_extra={"hidden": True})
    ] = "float32"
    """of products in training: float32; on a GPU tf32 or bfloat16"""
    data_dir: Folder | None = None
    """folder with data sets; DELTAFL_DATA does the same"""
    noise: NotNegative = 20.0
    """nu (synthetic task only)"""
    truth: Numbers = (8.0, 2.0)
    """(synthetic task only)"""
    checkpoint_every: Count = 10
    """rounds between two checkpoints"""

    @model_validator(mode="before")
    @classmethod
    def _in_other_words(cls, given: Json) -> Json:
        """``sample = "auto"``, and files as records name them."""
        given = {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in given.items()
        }
        if given.get("sample") != AUTO:
            return given
        given = {**given, "sample": None}
        if sized_by(given) is None:
            given[RelativeError.name] = USUAL_ERROR
        return given

    def resolve(self) -> Self:
        """Fill in the task's defaults; a ``DeltaflError`` for unknown names and what does not go
        together.
        """
        spec = self._spec()
        resolved = self.model_copy(update=self._missing(spec))
        resolved._check(spec)
        return resolved

    def _missing(self, spec: TaskSpec) -> Json:
        """The values that the task has for what is not set."""
        partition = find_partition(
            self.partition if self.partition is not None else spec.partition or "natural"
        )
        not_its = set[str]()
        # They exclude each other: whoever sets one gets no default for the other.
        if self.local_epochs is not None or self.local_steps is not None:
            not_its |= {"local_epochs", "local_steps"}
        if partition.knows_clients and (self.partition is not None or spec.all_owners):
            not_its.add("clients")  # all owners, however many there are
        if is_own(self.task):
            not_its.add("clients")
            if not partition.uses_alpha:
                not_its.add("alpha")
        missing = {
            key: getattr(spec, name)
            for key, name in TASK_DEFAULTS.items()
            if getattr(self, key) is None and key not in not_its
        }
        clients = self.clients or spec.num_clients
        # The task's own n is then only what cohorts begin with, and nobody has chosen it.
        if self.finds_n() and "sample" in missing and clients is not None:
            missing["sample"] = min(missing["sample"], clients)
        return self._missing_momentum() | missing

    def finds_n(self) -> bool:
        """Whether n is not fixed, but to be found."""
        return sized_by(self.part_settings()) is not None

    def _missing_momentum(self) -> Json:
        """Momentum's own beta where it is used and not set: a record has every value."""
        given = self.part_settings()
        if given["server_optimizer"] == "momentum" and given["server_momentum"] is None:
            return {"server_momentum": Momentum.beta}
        return {}

    def part_settings(self) -> Json:
        """The settings of the server's parts."""
        return {name: self.__dict__[name] for name in IN_TEXT}

    def parts(self) -> tuple[ServerPart, ...]:
        """The server's parts that these settings make."""
        return make_parts(self.part_settings())

    def _spec(self) -> TaskSpec:
        """The task's defaults; an own task is made once to know its clients and its metric."""
        registered = None if is_own(self.task) else registered_spec(self.task)
        for setting in OF_TABLES if registered is None else ONLY_OF_TABLES:
            if getattr(self, setting) is not None and not is_table(self.task):
                raise DeltaflError(
                    f"{setting} is a setting of tables, and the task {self.task!r} says itself who "
                    "holds what: leave it out"
                )
        if registered is None:
            # A table's model is ours, and is tried out before anything is written, where it is
            # trained: this process may do without torch.
            return own_spec(self.task, self.own_task(try_out=not is_table(self.task)))
        if self.metric is None:
            return registered
        metric = metrics_of(self.own_metrics())[0]
        threshold = registered.threshold if metric == metric_of(registered.metric) else None
        return replace(registered, metric=metric, threshold=threshold)

    def own_metrics(self) -> tuple[AnyMetric, ...]:
        """The metrics that take the place of the task's: names and objects."""
        return tuple(part.of if isinstance(part, Named) else part for part in self.metric or ())

    def own_task(self, seed: int = 0, try_out: bool = True) -> Task:
        """The task of a user's file or table."""
        return load_own(
            self.task,
            seed,
            self.own_metrics(),
            try_out,
            **{name: getattr(self, name) for name in OF_TABLES},
        )

    def _check(self, spec: TaskSpec) -> None:
        """Refuse unknown names, and values that do not go together."""
        self.parts()
        if self.local_epochs is not None and self.local_steps is not None:
            raise DeltaflError(
                "local_epochs and local_steps are both set; two ways to say one thing, keep one"
            )
        factors_of(self.lr_schedule, self.rounds or 0)
        clients = spec.num_clients if is_own(self.task) else self.clients
        if clients is not None:
            self.require_clients(clients)
        metric = metric_of(spec.metric)
        require_share("threshold", self.threshold, metric)
        needs_clock = self.deadline is not None or self.over_select > 1
        # A trace has its intervals in seconds.
        needs_clock |= isinstance(find_availability(self.availability), Trace)
        if find_speeds(self.speeds) is None and needs_clock:
            raise DeltaflError(
                "a deadline, over_select and a trace of availability need a clock: write speeds = "
                "'lognormal', or a file"
            )
        sizing = sized_by(self.part_settings())
        if self.over_select > 1 and sizing is not None:
            raise DeltaflError(
                f"over_select asks more than n clients, and with {sizing} n is not fixed: leave "
                "out one of them"
            )
        if self.stop_at_threshold and self.threshold is None:
            raise DeltaflError(
                "stop_at_threshold needs a threshold: set one, such as threshold = 0.7"
            )

    def require_clients(self, clients: int) -> None:
        """Refuse to select more clients than there are."""
        if self.sample is not None and self.sample > clients:
            raise DeltaflError(
                f"cannot sample {self.sample} of {counted(clients, 'client')}; lower 'sample'"
            )

    def run_facts(
        self,
        population: Population,
        num_classes: int | None = None,
    ) -> RunFacts:
        """What the options of samplers may take from the run; ``num_classes``: 0 for regression,
        None if unknown.
        """
        mean_examples = float(population.num_examples_m.mean())
        # Without a size of minibatches, all examples of a client are one.
        batches = ceil(mean_examples / (self.batch_size or mean_examples))
        return RunFacts(
            rounds=self.rounds or RunFacts().rounds,
            local_steps=self.local_steps or (self.local_epochs or 1) * batches,
            local_lr=self.local_lr or RunFacts().local_lr,
            num_classes=num_classes,
            n=self.sample or 1,
            m=population.num_clients,
        )

    def require_used(self, given: Json) -> None:
        """Refuse what is given and is no setting of this command alone."""

    def deciding(self, beside: Self) -> Json:
        """What decides the results, and so has to be the same in ``beside``."""
        free = FREE_ON_RESUME | UNION
        if not (self.stop_at_threshold or beside.stop_at_threshold):
            free |= {"threshold"}  # it marks a place on the curve and ends no run
        return self.model_dump(exclude=free)

    def with_those_of(self, before: Self) -> Self:
        """These settings with the samplers and seeds of ``before``, too."""
        return self

    def spelled_as(self, before: Self) -> Json:
        """The labels of methods, as they are spelled in ``before``, where they are there."""
        return {}

    def labels(self) -> tuple[str, ...]:
        """The samplers that are played."""
        return ()


class RunSettings(Settings):
    """One run: one sampler, one seed."""

    workers: Count = 1
    """processes that train clients"""
    sampler: Name = "census"
    """name@design@estimator+setting; see `deltafl samplers`"""
    seed: Seed = 0
    """fixes split, initial model, draws and minibatches"""

    def labels(self) -> tuple[str, ...]:
        """The sampler."""
        return (self.sampler,)

    def spelled_as(self, before: Self) -> Json:
        """The label, as it is spelled in ``before``, if it is the same method."""
        return {"sampler": spelled_among([before.sampler])(self.sampler)}

    def own_task(self, seed: int = 0, try_out: bool = True) -> Task:
        """The task of a user's file or table with the run's seed; it can be sent to workers."""
        task = super().own_task(self.seed, try_out)
        if self.workers > 1:
            check_picklable(task, self.task)
        return task

    def resolve(self) -> Self:
        """Take the settings in the label, then fill in the task's defaults."""
        own = own_settings(self.sampler, OF_A_RUN)
        # Made anew, so that the label's settings are checked as all others are.
        settings = type(self)(**self.model_dump() | own)
        return super(RunSettings, settings).resolve()

    def _check(self, spec: TaskSpec) -> None:
        super()._check(spec)
        if len(split_labels(self.sampler)) > 1:
            raise DeltaflError(
                f"a run has one sampler; write: deltafl compare --samplers {self.sampler}"
            )
        parse_label(self.sampler)
        if self.workers > 1 and (self.device, self.precision) != ("cpu", "float32"):
            raise DeltaflError(
                f"workers is {self.workers}, but with device {self.device!r} and precision "
                f"{self.precision!r} one process trains the whole cohort; write workers = 1"
            )


class CompareSettings(Settings):
    """A comparison: several samplers, each with the same seeds."""

    samplers: Labels = (
        "full",
        "census",
        "balanced",
        "innovation",
        "pracdelta",
        "fedavg",
        "uniform",
    )
    """names of `deltafl samplers`, comma separated; with settings: uniform+average=0.5"""
    seeds: Seeds = Field(5, validate_default=True)
    """number of seeds, which are 0, 1, ..., or a list: 3,5,8"""
    rates: dict[Name, Rates] | None = None
    """by label, where they are not those of all samplers"""

    #: Settings that are not handed on to runs, which have others of these names.
    not_of_runs: ClassVar[frozenset[str]] = frozenset()

    def labels(self) -> tuple[str, ...]:
        """The samplers that are compared."""
        return self.samplers

    def _missing(self, spec: TaskSpec) -> Json:
        missing = super()._missing(spec)
        if not spec.has_classes and "samplers" not in self.model_fields_set:
            # ``balanced`` needs labels.
            missing["samplers"] = tuple(label for label in self.samplers if label != "balanced")
        if self.rates is not None:
            missing["rates"] = self._by_labels(self.rates, self.samplers)
        return missing

    @staticmethod
    def _by_labels(rates: dict[str, Rates], labels: Iterable[str]) -> dict[str, Rates]:
        """Rates by labels as they are spelled there."""
        written = spelled_among(labels)
        found = dict[str, Rates]()
        for label, own in rates.items():
            name = written(label)
            if name in found:
                raise DeltaflError(f"rates has {name} in two spellings; name each method once")
            found[name] = own
        return found

    def spelled_as(self, before: Self) -> Json:
        """The labels, and those of ``rates``, as they are spelled in ``before``, where they are."""
        samplers = tuple(map(spelled_among(before.samplers), self.samplers))
        rates = self.rates and self._by_labels(self.rates, (*before.samplers, *samplers))
        return {"samplers": samplers, "rates": rates}

    def _check(self, spec: TaskSpec) -> None:
        super()._check(spec)
        # A label in ``rates`` may be text alone, where that in ``samplers`` carries its class.
        carrying = {label: label for label in self.samplers}
        for label, own in (self.rates or {}).items():
            refuse_twice(label, own, "stands in rates, too")
        for label in (*self.samplers, *(self.rates or ())):
            parse_label(carrying.get(label, label))
            # With its own settings a method may be impossible where the common ones are not.
            if own_settings(label):
                self.run(label, self.seeds[0])._check(spec)

    def deciding(self, beside: Self) -> Json:
        """What decides the results, and so has to be the same in ``beside``."""
        return super().deciding(beside) | {"rates": self.rates_of(beside.samplers)}

    def with_those_of(self, before: Self) -> Self:
        """These settings with the samplers, seeds and rates of ``before``, too."""
        own = before.rates_of(before.samplers) | self.rates_of(self.samplers)
        both = {
            "samplers": tuple(dict.fromkeys(before.samplers + self.samplers)),
            "seeds": tuple(dict.fromkeys(before.seeds + self.seeds)),
            "rates": own or None,
        }
        return self.model_copy(update=both)

    def rates_of(self, samplers: Container[str]) -> dict[str, Rates]:
        """``rates`` of those of the samplers that are compared."""
        return {
            label: own
            for label, own in (self.rates or {}).items()
            if label in samplers and label in self.samplers
        }

    def run(self, sampler: str, seed: int) -> RunSettings:
        """The settings of one run of the comparison."""
        own: dict[Any, float] = self.rates_of([sampler]).get(sampler, {})
        of_runs = {*Settings.model_fields} - self.not_of_runs
        common = self.model_dump(include=of_runs)
        # Beside a method with corrected steps, ``uniform`` goes without: it knows no clients. And a
        # census is a full first round itself.
        # A class of another process, whose runs are only read, is not known here.
        for name in [name for name in IN_TEXT if name in of_runs]:
            usual = SETTINGS[name].default
            # What is not known is taken to fit.
            with suppress(OwnCodeError):
                if common[name] != usual and not ROW_OF[name].kind.fits(*_made_of(sampler)):
                    common[name] = usual
        run = RunSettings(
            **{**common, **own, **own_settings(sampler)},
            sampler=sampler,
            seed=seed,
        )
        # A label may choose the momentum where the comparison has none.
        missing = run._missing_momentum()
        # And cohorts that size themselves, which begin with the comparison's n.
        if run.sample is None:
            missing["sample"] = self.sample
        return run.model_copy(update=missing)


AnySettings = TypeVar("AnySettings", bound=Settings)


def make_settings(
    kind: type[AnySettings],
    given: Json,
    config: Path | None = None,
) -> AnySettings:
    """Settings from a TOML file and options; options win. Resolved and checked; every mistake is
    a ``DeltaflError``.
    """
    values = dict(given)
    if config is not None:
        values = read_toml(config, users=True) | values
    for key, value in values.items():
        if key not in kind.model_fields:
            if key in ("model", "loss"):
                raise DeltaflError(
                    f"{key} is no setting: a {key} of your own goes into the task, "
                    f"deltafl.tasks.table_task(..., {key}=...)"
                )
            if key == "n":
                raise DeltaflError(f"n is no setting: the clients of a round are sample={value!r}")
            raise unknown_setting(key, value, kind.model_fields)
        # pydantic would take True for 1.
        if isinstance(value, bool) and kind.model_fields[key].annotation is not bool:
            raise DeltaflError(f"{key} is {value}; only switches are true or false: write a value")
        # Names of files that are no text reach Python with surrogates, which no settings file
        # holds.
        if isinstance(value, str) and value.encode(errors="ignore").decode() != value:
            raise DeltaflError(
                f"{key} is {value!r}, which is not text in UTF-8; rename what it names"
            )
    if values.get("metric") is not None:
        values["metric"] = as_recorded(values["metric"])
    try:
        return kind.model_validate(values).resolve()
    except ValidationError as error:
        raise DeltaflError(sentence(error.errors()[0], kind.model_json_schema())) from None


def own_settings(label: str, allowed: tuple[str, ...] = OF_LABELS) -> Json:
    """The settings in a label; a ``DeltaflError`` for those that belong to the whole comparison."""
    own = split_settings(label)[1]  # of a class that this process does not know, too
    for name, value in own.items():
        if name not in allowed:
            raise unknown_name("setting of one sampler", name, allowed)
        if value is True and Settings.model_fields[name].annotation is not bool:
            raise needs_value(name, label)
    return own


def require_share(name: str, value: float | None, metric: Metric) -> None:
    """Refuse a value that is to be reached, where the metric is a share and that is none."""
    if value is not None and metric.share and not 0 < value <= 1:
        raise DeltaflError(
            f"{name} is {value:g}; {metric.name} is a share between 0 and 1, write 0.7 for 70 %"
        )


def refuse_twice(label: str, rates: Iterable[str], why: str) -> None:
    """Refuse a label with a rate of its own, of those that come from elsewhere."""
    own = own_settings(label)
    for name in rates:
        if name in own:
            raise DeltaflError(
                f"{label} has a {name} of its own, which {why}: leave +{name}={own[name]} out"
            )


def _control_of(label: str) -> ControlVariate:
    return find_estimator(parse_label(label).estimator).control


def _made_of(label: str) -> tuple[Sampler, ControlVariate]:
    return make_sampler(label), _control_of(label)


def refuse_ignored(settings: Settings, given: Json) -> None:
    """Refuse settings that task, partition and method do not look at; a file of settings may
    serve several of them.
    """
    settings.require_used(given)
    is_synthetic = settings.task == "synthetic"
    partitions = [find_partition(settings.partition)] if settings.partition else []
    has_alpha = any(partition.uses_alpha for partition in partitions)
    own = is_own(settings.task)
    has_column = any(partition.uses_column for partition in partitions) or own
    has_files = False
    if not own:
        needs = known_tasks()[settings.task].needs
        has_files = not {"files", "archive"}.isdisjoint(needs)
    controls = [_control_of(label) for label in settings.labels()]
    remembers = any(control.remembers for control in controls)
    used = {
        "memory_path": (
            remembers or own,  # whose model may have local arrays
            "methods that remember one update per client have it, and models with local arrays",
        ),
        "data_dir": (has_files, "tasks with files of data have it"),
        "noise": (is_synthetic, "the task 'synthetic' has it"),
        "truth": (is_synthetic, "the task 'synthetic' has it"),
        "alpha": (has_alpha, "Dirichlet partitions have it"),
        "column": (has_column, "the partition 'natural' and tables have it"),
    }
    for name in IN_TEXT:
        kind = ROW_OF[name].kind
        # It is enough if one method of a comparison uses it.
        if name in given:
            fits = any(kind.fits(*_made_of(label)) for label in settings.labels())
            used[name] = (fits, f"{kind.fitting} have it")
    for key, (is_used, who) in used.items():
        if key in given and not is_used:
            raise DeltaflError(f"{key} does nothing here: only {who}; leave it out")


def differing(before: AnySettings, now: AnySettings) -> list[tuple[str, Any, Any]]:
    """The settings that decide what is played and differ, with both values; which samplers and
    seeds does not count.
    """
    old = before.deciding(now)
    new = now.deciding(before)
    # One method may be spelled in two ways.
    if "sampler" in new:
        old["sampler"] = spelled_among([new["sampler"]])(old["sampler"])
    return [(key, old[key], new[key]) for key in new if old[key] != new[key]]
