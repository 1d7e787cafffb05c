"""The table of server parts: one row each, in the order in which they act in a round.

Everything that names a part derives from it: the keywords of ``make_plan``, settings in labels, the
options of the command line, ``deltafl settings``, the arguments of the hosts, the headers of saved
states, the docs.
"""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from ..errors import DeltaflError, is_in, unknown_name
from .average import Average
from .clipping import Clip
from .first_round import CODE, EXACT, FirstRound
from .ghbm import Ghbm
from .mime import Mime
from .norm_guard import NormGuard
from .optimizers import ServerOptimizer, make_server_optimizer
from .part import ServerPart
from .privacy import DifferentialPrivacy
from .scaffold import Scaffold
from .size import Budget, RelativeError
from .strata import ALLOCATIONS, ByStrata


class Setting(NamedTuple):
    """One value that users give.

    ``values`` is an interval such as ``"[0, 1)"``, of whole numbers if the default is one, a tuple
    of words, ``bool`` for a switch, ``str`` for a name, or a class for what can only be given in
    Python.
    """

    values: Any
    default: Any  #: None, 0 or False where it switches the part off
    meaning: str


class Row(NamedTuple):
    """A part, the settings it is made of, and how; the first setting has its name."""

    kind: type[ServerPart]
    settings: Mapping[str, Setting]
    make: Callable[..., ServerPart | None] | None = None

    def part(self, given: Mapping[str, Any]) -> ServerPart | None:
        """The part that these settings make; None if it is switched off."""
        kind = self.kind
        name = kind.name
        values = {key: given.get(key, s.default) for key, s in self.settings.items()}
        first = values[name]
        for key, value in values.items():
            # An array would be compared entry by entry.
            if not isinstance(value, str | Real | kind | None):
                raise DeltaflError(f"{key} is {value!r:.60}; write a plain number, or a word")
            interval = self.settings[key].values
            # An object may do what no user wants: the audit's step of 0 leaves the model as it is.
            if isinstance(value, Real) and isinstance(interval, str) and not is_in(value, interval):
                raise DeltaflError(f"{key} is {value!r:.60}; it must be in {interval}")
        more = [
            f"{key} is {value!r:.60}"
            for key, value in values.items()
            if key != name and value != self.settings[key].default
        ]
        # In Python a part may be given itself, with all that its settings would say.
        if isinstance(first, kind):
            if more:
                raise DeltaflError(
                    f"{more[0]}, and {name} is {first!r:.60}; set it there, and leave it out here"
                )
            return first
        if self.make is not None:
            return self.make(*values.values())
        setting = self.settings[name]
        if setting.values is bool and not isinstance(first, bool):
            raise DeltaflError(f"{name} is {first!r:.60}; write True or False")
        if setting.values is kind and first is not None:
            raise DeltaflError(f"{name} is {first!r:.60}; write {kind.__name__}(...)")
        # What is written out as it is by default makes no part, and no other header of a state.
        if first == setting.default:
            if more:
                raise DeltaflError(f"{more[0]} and {name} is not set; write both, or none of them")
            return None
        if setting.values is bool:
            return kind()
        return kind(*values.values())


def _strata(
    at_least: int,
    allocation: str | None,
    stages: int,
) -> ByStrata | None:
    if not (at_least or allocation or stages):
        return None
    return ByStrata(at_least or ByStrata.at_least, allocation, stages)


def _row(
    kind: type[ServerPart],
    default: Any,
    meaning: str,
    values: Any = None,
) -> Row:
    """The row of a part with one setting; the interval of a number is that of the part's field."""
    if values is None:
        values = kind.ranges[kind.name]
    return Row(kind, {kind.name: Setting(values, default, meaning)})


ROWS = (
    _row(
        RelativeError,
        None,
        "ask as many clients as an estimate with this relative error needs; --sample in the first",
    ),
    Row(
        Budget,
        {
            "budget": Setting(
                Budget.ranges["budget"],
                None,
                "trainings of all rounds together; cohorts are sized by what is left",
            ),
            "budget_rounds": Setting(
                Budget.ranges["budget_rounds"],
                None,
                "rounds that budget is for, if not those of the run",
            ),
        },
    ),
    Row(
        ByStrata,
        {
            "at_least": Setting(
                "[0, 1e9]",
                0,
                "clients of each stratum in every cohort, at least",
            ),
            "allocation": Setting(
                ALLOCATIONS,
                None,
                "divide the cohort over strata by the sampler's scores, or by weight",
            ),
            "stages": Setting(
                ByStrata.ranges["stages"],
                0,
                "draw so many strata first, then clients of each",
            ),
        },
        _strata,
    ),
    _row(DifferentialPrivacy, None, "clip and add noise", DifferentialPrivacy),
    _row(
        FirstRound,
        None,
        "ask all clients in the first round: whole updates, or a code of 2.75 bits a parameter",
        (EXACT, CODE),
    ),
    _row(Clip, None, "clip long updates of hostile clients; biased", ("median",)),
    _row(Mime, 0.0, "beta of the momentum that all clients apply (FedMIME)"),
    Row(
        Ghbm,
        {
            "ghbm": Setting(
                Ghbm.ranges["ghbm"],
                0.0,
                "beta of the momentum of the last ghbm_tau steps that all clients apply (GHBM)",
            ),
            "ghbm_tau": Setting(
                Ghbm.ranges["ghbm_tau"],
                Ghbm.ghbm_tau,
                "tau of ghbm, best near m / n",
            ),
        },
    ),
    _row(Scaffold, False, "correct clients' local steps (SCAFFOLD)", bool),
    _row(
        NormGuard,
        None,
        "limit each step to this many medians of the last 20 step norms; biased",
    ),
    Row(
        ServerOptimizer,
        {
            "server_optimizer": Setting(
                str,
                "sgd",
                "sgd, fedexp, momentum, adagrad, adam or yogi",
            ),
            "server_lr": Setting("(0, inf)", None, "server learning rate"),
            "server_momentum": Setting(
                "[0, 1)",
                None,
                "gamma of momentum; 0.9 if not set",
            ),
        },
        make_server_optimizer,
    ),
    _row(Average, 0.0, "evaluate a running average of the models with this memory"),
)

#: Setting -> its row.
ROW_OF: dict[str, Row] = {name: row for row in ROWS for name in row.settings}
#: Setting -> what it is; in the order of the table.
SETTINGS: dict[str, Setting] = {
    name: setting for row in ROWS for name, setting in row.settings.items()
}
#: How a part is written where it is not used, by its name.
UNUSED: dict[str, str] = {row.kind.name: str(SETTINGS[row.kind.name].default) for row in ROWS}
#: Those that text can give: in labels, on the command line, in files.
IN_TEXT = tuple(
    name
    for name, setting in SETTINGS.items()
    if not isinstance(setting.values, type) or setting.values in (bool, str)
)


def make_parts(given: Mapping[str, Any]) -> tuple[ServerPart, ...]:
    """The parts that settings make; those that are left out, or None, have their defaults.

    Raises:
        DeltaflError: If a name is unknown or a value is not allowed.

    Example:
        >>> make_parts({"average": 0.5})
        (Sgd(lr=1.0), Average(average=0.5))
    """
    for name in given:
        if name not in SETTINGS:
            raise unknown_name("setting", name, SETTINGS)
    known = {name: value for name, value in given.items() if value is not None}
    parts = [row.part(known) for row in ROWS]
    return tuple(part for part in parts if part is not None)


def in_order(parts: tuple[ServerPart, ...]) -> tuple[ServerPart, ...]:
    """Parts in the order of the table, with the default optimizer if there is none; your own kinds
    come last, in the order in which they are given.
    """
    if not any(isinstance(part, ServerOptimizer) for part in parts):
        parts = (*parts, make_server_optimizer("sgd"))
    # Parts of a user's own come last.
    places = {row.kind.name: place for place, row in enumerate(ROWS)}
    return tuple(sorted(parts, key=lambda part: places.get(part.name, len(ROWS))))


def kinds_of(settings: Mapping[str, Any]) -> dict[str, type[ServerPart]]:
    """The kind of part that each of these settings is of, for those that are not as by default."""
    return {
        name: ROW_OF[name].kind
        for name, value in settings.items()
        if name in ROW_OF and value != SETTINGS[name].default
    }


def sized_by(settings: Mapping[str, Any]) -> str | None:
    """The first of these settings by which n changes from round to round; None if there is none."""
    kinds = kinds_of(settings)
    return next((name for name in kinds if kinds[name].sizes_cohorts()), None)
