"""What the label of a run says of its method, such as whether a census comes first."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from ..designs.table import DESIGNS
from ..errors import DeltaflError
from ..estimators.table import find_estimator
from ..samplers.label import Label, base_name, make_sampler, parse_label
from ..samplers.table import SAMPLERS
from ..store.own_python import only
from .runs import Run


def find_label(name: str, labels: Sequence[str]) -> str | None:
    """The label called ``name``, else the only one that is a variant of it (``name@...``,
    ``name(...)``), else None.
    """
    if name in labels:
        return name
    variants = [label for label in labels if base_name(label) == name]
    return variants[0] if len(variants) == 1 else None


def method_of(label: str) -> Label | None:
    """The method of a row of a table; None if the row is called something else, or is of the
    user's own code and nothing has played it here.

    A row may have more in its name than a label has, after a "+".
    """
    for text in (label, label.partition("+")[0]):
        with suppress(DeltaflError), only(frozenset()):
            return parse_label(text)
    return None


@cache
def begins_with_census(label: str) -> bool:
    """Whether the sampler of a label asks every client once before it draws."""
    entry = SAMPLERS.get(base_name(label))
    return entry is not None and entry.needs == "census"


@cache
def only_asks_first(label: str) -> bool:
    """Whether it does so for numbers that do not move the model, so that a round is lost."""
    method = method_of(label)
    if method is None or not begins_with_census(label):
        return False
    census = make_sampler(method).census
    control = find_estimator(method.estimator).control
    return census is None or not census.for_control(control).first_update


@cache
def asks_each_once(label: str) -> bool:
    """Whether a sampler of all clients, n = m, is nothing but full participation: without settings
    of its own, and with draws in which nobody is drawn twice or left to chance.
    """
    method = method_of(label)
    # In the round of a census updates come in few bits, or none come.
    if method is None or method.settings or begins_with_census(label):
        return False
    if method.design is None:
        return base_name(label) == "full"
    return DESIGNS[method.design].kind == "fixed-size" and make_sampler(method).unbiased


def rounds_until(run: Run, at: int) -> int:
    """Rounds up to an evaluation, that of a census included."""
    return int(run.round_r[at]) + only_asks_first(run.sampler)
