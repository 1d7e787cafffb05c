"""Labels: a method in one line of text, ``name(option=value,...)@design@estimator+setting=value``.

Examples: ``pracdelta``, ``fedis@multinomial`` (the DELTA paper's own draws and weights),
``osmd(mixing=0.3)@poisson``, ``uniform@@difference`` (default design),
``my_sampler.py:ByLoss(power=2)``, ``census+average=0.5+scaffold``. Options are the fields of the
sampler's class. Settings are those of a plan or a run, and override what is set for all samplers;
``+scaffold`` means ``+scaffold=True``. Values are Python literals, and text needs no quotes:
``delta(alpha=theory)``.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..calls import Named, cut_outside, parse_call, split_outside, write_call, write_setting
from ..designs.table import find_design
from ..errors import DeltaflError, unknown_name
from ..estimators.control_variates import ControlVariate, NoControl
from ..estimators.table import ESTIMATORS, find_estimator, is_estimator
from ..server.table import kinds_of
from .base import RunFacts, Sampler
from .table import SAMPLERS, SamplerEntry, find_sampler


class Label(NamedTuple):
    """A label taken apart, with defaults filled in. ``str(label)`` is its shortest form, without
    spaces.
    """

    name: str  #: in ``deltafl.SAMPLERS``, or ``FILE.py:CLASS``
    options: Mapping[str, Any]
    design: str | None  #: in ``deltafl.DESIGNS``; None if the sampler does not draw by a design
    estimator: str  #: in ``deltafl.ESTIMATORS``
    settings: Mapping[str, Any] = MappingProxyType({})  #: of ``Plan``, or of ``deltafl run``
    kind: type[Sampler] | None = None  #: the user's class, if the name is that of an object

    @property
    def entry(self) -> SamplerEntry:
        """The row of its sampler."""
        return find_sampler(self.name, self.kind)

    def __str__(self) -> str:
        entry = self.entry
        design = ""
        if self.design != entry.design:
            design = self.design or ""
        estimator = ""
        if self.estimator != entry.estimator:
            estimator = self.estimator
        # Empty places at the end are not written.
        text = f"{write_call(self.name, self.options)}@{design}@{estimator}".rstrip("@")
        for name, value in sorted(self.settings.items()):
            setting = write_setting(name, value)
            if value is True:  # a switch: ``+scaffold``
                setting = name
            text = f"{text}+{setting}"
        if self.kind is None:
            return text
        return Named(text, self.kind)


def parse_label(label: "str | Label") -> Label:
    """Parse a label; raises a ``DeltaflError`` if a part is wrong or does not fit.

    Example:
        >>> parse_label("osmd(mixing=0.3)@poisson")[:4]
        ('osmd', {'mixing': 0.3}, 'poisson', 'horvitz-thompson')
    """
    if isinstance(label, Label):
        return label
    if not isinstance(label, str):
        raise DeltaflError(
            f"a label is text such as 'innovation', not {label!r:.60}; a recommendation has it as "
            ".label + .settings, and samplers go into Plan(...)"
        )
    method, settings = split_settings(label)
    call, design, weights, *rest = [*split_outside(method, "@"), "", ""]
    if any(rest):
        raise DeltaflError(
            f"{label!r} is no label; write name(option=value)@design@estimator, such as innovation"
        )
    name, options = parse_call(call)
    kind = None
    if isinstance(label, Named):
        kind = label.of
    entry = find_sampler(name, kind)
    if design:
        if is_estimator(design):
            raise DeltaflError(f"{design!r} is an estimator, not a design; write {call}@@{design}")
        find_design(design)
        if entry.design is None:
            raise DeltaflError(
                f"{name!r} draws in its own way; write {name!r} without the design {design!r}"
            )
        has_prices = bool(options.get("per_second") or options.get("per_cost"))
        if design == "simple-random" and (entry.scores != "equal" or has_prices):
            raise DeltaflError(
                f"simple-random draws need equal scores, {name!r} has others; write "
                f"{name}@systematic"
            )
    # Made to check the options, and not kept.
    entry.make(options, design or None)
    estimator = find_estimator(weights or entry.estimator)
    if entry.scores == "unknown" and estimator.needs_expected:
        fitting = ", ".join(repr(e.name) for e in ESTIMATORS.values() if not e.needs_expected)
        raise DeltaflError(
            f"{name!r} does not know its selection probabilities; only these can follow it: "
            f"{fitting}"
        )
    return Label(name, options, design or entry.design, estimator.name, settings, kind)


#: Settings of local training, which only the simulator does itself.
OF_TRAINING = (
    "local_lr",
    "lr_schedule",
    "local_epochs",
    "batch_size",
    "local_momentum",
    "proximal",
    "fixed_order",
)

#: A setting, alone or with a value.
_SETTING = re.compile(r"\s*[a-z_]+\s*(=('[^']*'|[^+()@']+(\([^()]*\)\s*)?))?")


def split_settings(label: str) -> tuple[str, dict[str, Any]]:
    """The label without its settings, and the settings.

    Example:
        >>> split_settings("census+average=0.5+scaffold")
        ('census', {'average': 0.5, 'scaffold': True})
    """
    pieces = cut_outside(label, "+")
    # From the end, as a file's name may have a plus, too.
    first = len(pieces)
    while first > 1 and _SETTING.fullmatch(pieces[first - 1]):
        first -= 1
    parts = []
    for part in pieces[first:]:
        name, equals, value = part.strip().partition("=")
        # A schedule with its options, or of a file, is text until it is used.
        if "'" not in value and (value.endswith(")") or ".py:" in value):
            value = repr(value.strip())
        parts.append(f"{name}={value if equals else True}")
    return "+".join(pieces[:first]).strip(), parse_call(f"label({','.join(parts)})")[1]


def unknown_setting(name: str, value: object, allowed: Iterable[str]) -> DeltaflError:
    """The error for a setting that is none of those that are allowed where it stands."""
    for sampler, entry in SAMPLERS.items():
        if name in entry.options:
            return DeltaflError(
                f"{name} is an option of samplers; write it in the label, as in "
                f"{sampler}({name}={value})"
            )
    if name in OF_TRAINING:
        return DeltaflError(
            f"{name} is of the simulator's local training, and here clients train by your own "
            "code; leave it out, and set it there"
        )
    return unknown_name("setting", name, allowed)


def needs_value(name: str, label: object) -> DeltaflError:
    """The error for a setting that needs a value and has none."""
    return DeltaflError(f"{name} has no value in {str(label)!r}: write +{name}=VALUE")


def label_of(
    sampler: "str | Label | Sampler | type[Sampler]",
    estimator: str | None = None,
) -> str:
    """The label of a sampler that is given as a label, an instance or a class; of several names
    one that stands for this estimator.

    That of a class of yours is ``Named``: text that carries the class.

    Example:
        >>> from deltafl import PracDelta
        >>> label_of(PracDelta(floor=0.2, design="pivotal"))
        'pracdelta(floor=0.2)@pivotal'
    """
    if isinstance(sampler, str | Label):
        return str(sampler)
    kind = type(sampler)
    if isinstance(sampler, type):
        kind = sampler
    if not issubclass(kind, Sampler):
        raise DeltaflError(
            "a sampler is a label such as 'census', or a class or an instance of deltafl.Sampler; "
            f"this is {sampler!r}"
        )
    rows = [row for row in SAMPLERS.values() if row.kind is kind]
    own = None
    if not rows:
        own = kind
        if kind.__name__ in SAMPLERS:
            raise DeltaflError(
                f"the library has a sampler {kind.__name__!r}; give your class another name"
            )
        rows = [find_sampler(kind.__name__, kind)]
    made: Any = sampler
    if isinstance(sampler, type):
        made = rows[0].make({})
    design = vars(made).get("design")
    # Several rows may share a class, such as ``uniform`` and ``md``: the first one that makes the
    # same sampler, by this estimator, by its default design, and else without bias.
    for row in sorted(
        rows,
        key=lambda row: (
            row.estimator != (estimator or row.estimator),
            row.design != design,
            row.estimator != "horvitz-thompson",
        ),
    ):
        default = vars(row.make({}))
        options = {}
        for name in row.options:
            value = vars(made)[name]
            # Labels are read as Python literals, and NumPy's scalars are not printed as such.
            if value != default[name]:
                options[name] = value.item() if isinstance(value, np.generic) else value
        label = Label(row.name, options, design, row.estimator, kind=own)
        with suppress(DeltaflError):  # such as a list among the options
            # Text may lose something: only what makes the same sampler again is its label.
            if make_sampler(str(label)) == made:
                return str(label)
    raise DeltaflError(
        f"{made!r} has no label: its options must be numbers, words, None, or tuples of them"
    )


def method_of(sampler: Sampler, estimator: str | None = None) -> str:
    """The label of a sampler, which is what users write; if it has none, its class's name."""
    try:
        return str(label_of(sampler, estimator))
    except DeltaflError:
        return type(sampler).__name__


def split_labels(text: str) -> list[str]:
    """The labels in a comma-separated list; commas inside parentheses belong to a label."""
    return [part for part in split_outside(text, ",") if part]


def base_name(label: str) -> str:
    """The sampler's bare name: of ``pracdelta(floor=0.1)@pivotal`` and of ``pracdelta+part`` it
    is ``pracdelta``.
    """
    return label.partition("+")[0].partition("@")[0].partition("(")[0]


def spelled(label: str) -> str:
    """A label in its usual spelling, in which two that mean the same are one: the same options in
    another order, 2 for 2.0, or one file by several paths. Nothing of the user's is imported for
    it; what is his own may tell 2 from 2.0.
    """
    # A class has no other spelling than that of ``label_of``.
    if isinstance(label, Named):
        return label
    # What is no label is refused where it is used.
    with suppress(DeltaflError):
        method, settings = split_settings(label)
        if ".py:" not in method:
            method = str(parse_label(method))
        return _tidy(method, settings, os.path.realpath, _usual)
    return label


def _usual(value: Any) -> Any:
    """A value of which two that are equal are written alike, such as 2 and 2.0, or True and 1."""
    if isinstance(value, tuple):
        return tuple(map(_usual, value))
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    # Of a schedule of the library: step(every=5).
    if isinstance(value, str) and value.endswith(")") and ".py:" not in value:
        name, options = parse_call(value)
        return write_call(name, {key: _usual(own) for key, own in options.items()})
    return value


def spelled_among(labels: Iterable[str]) -> Callable[[str], str]:
    """A function that writes a label as it is spelled among these, or as it is if it is none."""
    # Records may have one method in two spellings: each of them is as it is there.
    known = {label: label for label in labels}
    usual = {spelled(label): label for label in known}
    return lambda label: known.get(label) or usual.get(spelled(label), label)


def file_name(label: str) -> str:
    """A label as part of a file name: its shortest form, files without folders, ``_`` for most
    punctuation.

    Example:
        >>> file_name("pracdelta(alpha=theory, floor=0)")
        'pracdelta(alpha=theory,floor=0)'
    """
    # Others are kept as they are: older records have them, and classes of another process are not
    # known here.
    if ".py:" in label:
        label = _tidy(*split_settings(label), lambda path: re.split(r"[/\\]", path)[-1])
    elif "(" in label and base_name(label) in SAMPLERS:
        label = str(parse_label(label))
    return re.sub(r"[^\w@()=,.+-]", "_", label)


def _tidy(
    method: str,
    settings: Mapping[str, Any],
    written: Callable[[str], str],
    usual: Callable[[Any], Any] = lambda value: value,
) -> str:
    """A label in a usual spelling, by its text alone; ``written`` is how paths of files are, and
    ``usual`` how values are.
    """

    def named(value: Any) -> Any:
        file, of_file, rest = str(value).partition(".py:")
        if of_file:
            return f"{written(f'{file}.py')}:{rest}"
        return value

    parts = []
    for part in split_outside(method, "@"):
        name, options = parse_call(part)
        if ".py:" not in name:
            options = {key: usual(value) for key, value in options.items()}
        parts.append(write_call(named(name), options))
    text = "@".join(parts).rstrip("@")
    for name, given in sorted(settings.items()):
        value = usual(given)
        setting = name
        if value is not True:
            setting = write_setting(name, named(value))
        text += f"+{setting}"
    return text


def make_sampler(label: str | Label, facts: RunFacts | None = None) -> Sampler:
    """Make the sampler of a label; its estimator belongs to the plan, see ``make_plan``.

    Options that are None are filled in from the facts of the run; a ``DeltaflError`` names those
    that do not fit it.

    Example:
        >>> make_sampler("fedpracis@pivotal").design
        'pivotal'
    """
    parsed = parse_label(label)
    sampler = parsed.entry.make(parsed.options, parsed.design)
    if facts is None:
        return sampler
    return sampler.for_run(facts)


def bias_of(label: str | Label) -> str | None:
    """The part that makes a method biased (estimator, design, draws or setting); None if it is
    unbiased.
    """
    parsed = parse_label(label)
    if not find_estimator(parsed.estimator).unbiased:
        return f"estimator {parsed.estimator}"
    if parsed.design is not None and not find_design(parsed.design).exact:
        return f"design {parsed.design}"
    for name, kind in kinds_of(parsed.settings).items():
        if kind.biased:
            return name
    sampler = make_sampler(parsed)
    if sampler.expects_absence:
        return "weights from past rounds"
    if not sampler.unbiased:
        return "draws that leave clients out"
    return None


def is_unbiased(label: str | Label) -> bool:
    """Whether the method of a label is unbiased, possibly only where every score is above 0
    (``needs_scores``).
    """
    return bias_of(label) is None


def needs_scores(sampler: Sampler, control: ControlVariate) -> bool:
    """Whether an unbiased method is so only where every client's score R_i of this round is above
    0.

    A theoretical sampler without a floor never selects a client with R_i = 0. For ``fedis`` this
    causes no bias, as then u_i = 0, unless a control variate needs 0 - c_i. For ``delta`` it does:
    R_i = 0 for u_i = ubar without noise.
    """
    return sampler.skips_zero_scores or (
        sampler.skips_zero_updates and not isinstance(control, NoControl)
    )


def uses_aux(sampler: Sampler, estimator: str) -> bool:
    """Whether a method reads the auxiliary variables ``Population.aux_mq``, in its sampler or
    its control variate.
    """
    return sampler.uses_aux or find_estimator(estimator).control.uses_aux
