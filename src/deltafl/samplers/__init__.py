"""The samplers by name. A method is a sampler (score), its design and an estimator; each row accepts others.

A *label* names a method: ``name``, ``name@design`` or ``name@design@estimator``, such as ``fedis@multinomial`` (the
DELTA paper's own draws and weights) or ``pracdelta@pivotal@difference``.
"""

from typing import NamedTuple

from ..designs.table import find_design
from ..errors import DeltaflError, unknown_name
from ..estimators.control_variates import ControlVariate, NoControl
from ..estimators.table import ESTIMATORS, find_estimator
from ..types import Sampler
from .active_fl import ActiveFL
from .balanced import Balanced
from .centred import Centred
from .cluster import ClusterIS
from .clustered import ClusteredBySimilarity, ClusteredBySize
from .delta import Delta, PracDelta, theory_constants
from .divfl import DivFL
from .fed_cbs import FedCBS
from .fixed import Fixed, Full
from .hics import HicsFL
from .importance import FedIS, FedPracIS
from .mifa import NewFirst
from .ocs import ApproximateOCS
from .online import MirrorDescent, VarianceBandit
from .oort import Oort
from .options import SamplerSettings
from .power_of_choice import PowerOfChoice
from .table import SAMPLERS, SamplerEntry

__all__ = [
    "SAMPLERS",
    "ActiveFL",
    "ApproximateOCS",
    "Balanced",
    "Centred",
    "ClusterIS",
    "ClusteredBySimilarity",
    "ClusteredBySize",
    "Delta",
    "DivFL",
    "FedCBS",
    "FedIS",
    "FedPracIS",
    "Fixed",
    "Full",
    "HicsFL",
    "Label",
    "MirrorDescent",
    "NewFirst",
    "Oort",
    "PowerOfChoice",
    "PracDelta",
    "SamplerEntry",
    "SamplerSettings",
    "VarianceBandit",
    "bias_of",
    "find_sampler",
    "is_unbiased",
    "make_sampler",
    "parse_label",
    "theory_constants",
    "uses_known",
]


class Label(NamedTuple):
    """A label taken apart, defaults filled in; ``design`` is None where no design is involved."""

    name: str
    design: str | None
    estimator: str


def find_sampler(name: str) -> SamplerEntry:
    """Look a sampler up by name; an unknown one is a ``DeltaflError`` that suggests the nearest."""
    if name not in SAMPLERS:
        raise unknown_name("sampler", name, SAMPLERS)
    return SAMPLERS[name]


def parse_label(label: str) -> Label:
    """Take ``name[@design[@estimator]]`` apart and check every part.

    Raises:
        DeltaflError: If it is no text, a part is unknown, or does not fit the others.
    """
    if not isinstance(label, str):
        raise DeltaflError(f"a label is text such as 'innovation', this is {type(label).__name__}")
    name, _, rest = label.partition("@")
    design, _, weights = rest.partition("@")
    entry = find_sampler(name)
    if design:
        find_design(design)
        if entry.design is None:
            raise DeltaflError(f"{name!r} draws in its own way; write {name!r} without the design {design!r}")
        if design == "simple-random" and entry.scores != "equal":
            raise DeltaflError(
                f"simple-random draws need equal scores, {name!r} has unequal ones; write {name}@systematic"
            )
    estimator = find_estimator(weights or entry.estimator)
    if entry.scores == "unknown" and estimator.needs_expected:
        fitting = ", ".join(repr(e.name) for e in ESTIMATORS.values() if not e.needs_expected)
        raise DeltaflError(f"{name!r} does not know how likely its clients were; only these can follow it: {fitting}")
    return Label(name, design or entry.design, estimator.name)


def bias_of(label: str, settings: SamplerSettings | None = None) -> str | None:
    """The part of a method that makes it biased, in a person's words: its estimator, design or draws; None if none.

    Some draws leave clients out: those of practical samplers with ``floor`` = 0, of cluster-is with
    ``drop_small_after``, and of theoretical ones without a floor where there is a control, see ``leaves_out``.
    """
    parsed = parse_label(label)
    if not find_estimator(parsed.estimator).unbiased:
        return f"estimator {parsed.estimator}"
    if parsed.design is not None and not find_design(parsed.design).exact:
        return f"design {parsed.design}"
    leaving = leaves_out(make_sampler(label, settings), find_estimator(parsed.estimator).control)
    return "draws that leave clients out" if leaving else None


def leaves_out(sampler: Sampler, control: ControlVariate) -> bool:
    """Whether draws leave clients out whom the estimate needs.

    A theoretical sampler without a floor never asks a client whose update is 0. Without a control nothing is missed;
    with one it is that client's 0 - c_i (docs/theory.md, section 10).
    """
    blind = sampler.needs_oracle and not getattr(sampler, "floor", 0.0)
    return not sampler.unbiased or (blind and not isinstance(control, NoControl))


def is_unbiased(label: str) -> bool:
    """Whether the method of a label is unbiased: sampler, design and estimator."""
    return bias_of(label) is None


def uses_known(sampler: Sampler, estimator: str) -> bool:
    """Whether a method goes by ``Population.aux_mq``: by its sampler, or by its control."""
    return getattr(sampler, "uses_known", False) or find_estimator(estimator).control.uses_aux


def make_sampler(label: str, settings: SamplerSettings | None = None) -> Sampler:
    """Make the sampler of a label; its estimator belongs to the plan, see ``make_plan``.

    Example:
        >>> make_sampler("fedpracis@pivotal").design
        'pivotal'
    """
    parsed = parse_label(label)
    return find_sampler(parsed.name).make(settings or SamplerSettings(), parsed.design or "systematic")
