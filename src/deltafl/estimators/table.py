"""Estimators: how the replies of a cohort become one estimate D of the full-participation update
ubar.

Every estimate has the form ``D = sum_j w_j c_j + sum_S coef_i (u_i - c_i)``: coefficients, and
control values c known before the draw (zero for the plain estimators). count / expected is 1 / pi_i
if a client is drawn at most once, and count_i / (n p_i) with replacement, so one formula covers
Horvitz-Thompson and Hansen-Hurwitz.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..calls import check_options, parse_call
from ..errors import DeltaflError, entry, explained
from ..store.own_python import load_class
from ..types import Cohort, FloatArray
from .control_variates import ControlVariate, NoControl
from .learned_coefficient import FixedCoefficient, LearnedCoefficient
from .own import CommonControl, InnovationControl, OwnControl
from .regression import RegressionControl
from .twin import Twin
from .two_phase import TwoPhase

#: Cohort of those who replied, (n,) weights w_i, (n,) response rates q_i in (0, 1] -> (n,)
#: coefficients.
Coefficients = Callable[[Cohort, FloatArray, FloatArray], FloatArray]


def horvitz_thompson(
    cohort: Cohort,
    weight_n: FloatArray,
    response_n: FloatArray,
) -> FloatArray:
    """coef_i = w_i count_i / (expected_i q_i), q_i the response rate: unbiased for every exact
    design.

    Raises:
        DeltaflError: If an expectation is unknown, so that no weights make the sampler unbiased.
    """
    if not np.all(np.isfinite(cohort.expected_n)):
        cure = "use the estimator 'plain-mean' or 'fedvarp'"
        raise DeltaflError(f"this sampler does not know how likely its clients were; {cure}")
    return weight_n * cohort.count_n / (cohort.expected_n * response_n)


def hajek(cohort: Cohort, weight_n: FloatArray, response_n: FloatArray) -> FloatArray:
    """The Horvitz-Thompson coefficients divided by their sum. Biased by O(1/n); constant updates
    are exact.
    """
    return _summing_to_1(horvitz_thompson(cohort, weight_n, response_n))


def plain_mean(
    cohort: Cohort,
    weight_n: FloatArray,
    response_n: FloatArray,
) -> FloatArray:
    """count_i / sum_S count_j, whatever the weights and probabilities. Biased."""
    # Perhaps nobody has replied: then there is no coefficient, and 1 keeps 0 / 0 away.
    return cohort.count_n / max(int(cohort.count_n.sum()), 1)


def weighted_mean(
    cohort: Cohort,
    weight_n: FloatArray,
    response_n: FloatArray,
) -> FloatArray:
    """w_i count_i / sum_S w_j count_j, whatever the probabilities. Biased; 0 where all weights
    are 0.
    """
    return _summing_to_1(weight_n * cohort.count_n)


def _summing_to_1(coef_n: FloatArray) -> FloatArray:
    total = coef_n.sum()
    if total > 0:
        coef_n = coef_n / total
    return coef_n


def average_of_all(
    cohort: Cohort,
    weight_n: FloatArray,
    response_n: FloatArray,
) -> FloatArray:
    """coef_i = w_i: with own c_i, D is the average of all clients' last updates. Biased.

    This is FedVARP as the DELTA paper combines it (docs/why/fedvarp.md), and the average of
    MIFA. E[D] = sum_j w_j ((1 - pi_j) c_j + pi_j u_j) lags behind ubar. A client that has not
    replied counts as zero, so about the first m / n rounds take short steps.
    """
    return weight_n.copy()


class Estimator(NamedTuple):
    """A rule for coefficients, and the control variate it subtracts."""

    name: str
    coefficients: Coefficients  #: ``(cohort of those who replied, weight_n, response_n) -> coef_n``
    control: ControlVariate  #: gives c
    unbiased: bool  #: whether E[D] = ubar for every exact design
    needs_expected: bool = True  #: whether it needs the inclusion probabilities of the cohort
    #: whether its coefficients sum to 1, so that the common part of all updates causes no error
    ratio: bool = False
    #: the paper, as in ``docs/reference/references.md``; empty where none is known
    source: str = ""


def _unbiased(name: str, control: ControlVariate, source: str) -> Estimator:
    return Estimator(name, horvitz_thompson, control, unbiased=True, source=source)


def _mean(
    name: str,
    rule: Coefficients,
    source: str = "",
    needs_expected: bool = False,
) -> Estimator:
    return Estimator(
        name,
        rule,
        NoControl(),
        unbiased=False,
        needs_expected=needs_expected,
        ratio=True,
        source=source,
    )


_CASSEL = "Cassel, Sarndal, Wretman 1976"
_OURS = "this project"
_DIFFERENCES = (
    _unbiased("difference", CommonControl(), _CASSEL),
    _unbiased("difference-own", OwnControl(), "Jhunjhunwala et al. 2022"),
    _unbiased("innovation", InnovationControl(), _OURS),
    _unbiased("regression", RegressionControl(), _CASSEL),
)
_ROWS = (
    _unbiased("horvitz-thompson", NoControl(), "Horvitz, Thompson 1952"),
    _mean("hajek", hajek, "Hajek 1971", needs_expected=True),
    _mean("plain-mean", plain_mean),
    _mean("weighted-mean", weighted_mean, "McMahan et al. 2017"),
    *_DIFFERENCES,
    *(
        _unbiased(
            f"{row.name}-damped",
            LearnedCoefficient(row.control),
            "Montanari 1987",
        )
        for row in _DIFFERENCES
    ),
    _unbiased("two-phase", TwoPhase(), "Sarndal, Swensson 1987"),
    _unbiased("fedstale", FixedCoefficient(OwnControl()), "Rodio, Neglia 2024"),
    # For samplers that do not know their probabilities: the memories that others have, with
    # coefficients that sum to 1.
    *(
        Estimator(
            f"mean-{row.name}",
            weighted_mean,
            row.control,
            unbiased=False,
            needs_expected=False,
            source=_OURS,
        )
        for row in _DIFFERENCES
        if row.control.knows_clients
    ),
    Estimator(
        "fedvarp",
        average_of_all,
        OwnControl(),
        False,
        needs_expected=False,
        source="Gu et al. 2021",
    ),
)
ESTIMATORS: dict[str, Estimator] = {row.name: row for row in _ROWS}
#: For the simulator, which supplies the simulation (``simulation/setup.py``); elsewhere write
#: ``Twin(simulate)``.
TWIN = _unbiased(
    "twin",
    LearnedCoefficient(Twin(residual=LearnedCoefficient(OwnControl()))),
    _OURS,
)
ALL_ESTIMATORS = {**ESTIMATORS, TWIN.name: TWIN}
_ALIASES = {"hansen-hurwitz": "horvitz-thompson", "ratio": "hajek", "mifa": "fedvarp"}


def is_estimator(text: str) -> bool:
    """Whether a part of a label, such as ``fedstale(beta=0.8)`` or ``mine.py:Control``, can only
    be an estimator.
    """
    return ".py:" in text or text.partition("(")[0].strip() in {*ALL_ESTIMATORS, *_ALIASES}


def find_estimator(given: str | Estimator | ControlVariate) -> Estimator:
    """Look an estimator up.

    Args:
        given: A name or alias, with any options of its control variate: ``fedstale(beta=0.8)``; or
            ``FILE.py:Class(...)`` or an instance for your own control variate, which is used with
            the Horvitz-Thompson coefficients; or an estimator, which is returned unchanged.

    Raises:
        DeltaflError: If the name or an option is unknown; the message suggests the nearest.
    """
    if isinstance(given, Estimator):
        return given
    if isinstance(given, ControlVariate):
        return _unbiased(repr(given), given, "")
    if not isinstance(given, str):
        raise DeltaflError(f"estimator is {given!r}; write its name, or an instance of it")
    name = _ALIASES.get(given, given)
    return ALL_ESTIMATORS.get(name) or _with_options(given)


@cache
def _with_options(text: str) -> Estimator:
    name, options = parse_call(text)
    name = _ALIASES.get(name, name)
    if ".py:" in name:
        kind = load_class(name, ControlVariate)  # type: ignore[type-abstract]
        check_options(kind, options, name)
        with explained(f"{name} cannot be made"):
            return _unbiased(text, kind(**options), "")
    rule = entry("estimator", name, ALL_ESTIMATORS, *_ALIASES)
    control: Any = rule.control
    parts = [
        field.name for field in fields(control) if field.type is not float
    ]  # such as another control variate
    check_options(type(control), options, name, hidden=parts)
    return rule._replace(
        name=text,
        control=replace(control, **options),
    )
