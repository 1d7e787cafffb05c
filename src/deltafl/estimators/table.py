"""Estimators: how the replies of a cohort become one estimate D of the full-participation update ubar.

Every estimate has the form ``D = sum_j w_j c_j + sum_S coef_i (u_i - c_i)``: coefficients, and control values c known
before the draw (zero for the plain estimators). ``a_i`` is count_i / (expected_i q_i), q_i the client's response rate.

================== ================================ =============== ======== ===========================================
name               coef_i                           control         unbiased
================== ================================ =============== ======== ===========================================
horvitz-thompson   w_i a_i                          0               yes      with replacement: Hansen and Hurwitz 1943
hajek              w_i a_i / sum_S w_j a_j          0               **no**   the ratio estimator; bias of order 1 / n
plain-mean         count_i / sum_S count_j          0               **no**   FedAvg as it is often written
weighted-mean      w_i count_i / sum_S w_j count_j  0               **no**   FedAvg as its authors write it
difference         w_i a_i                          common c        yes
difference-own     w_i a_i                          own c_i         yes      FedVARP with unbiased weights
innovation         w_i a_i                          own c_i, else c yes      c for new clients
regression         w_i a_i                          B x_i           yes      x_i auxiliary variables, B learned
...-damped         w_i a_i                          beta c          yes      the last four, beta learned:
                                                                             ``learned_coefficient.py``
fedstale           w_i a_i                          beta own c_i    yes      beta 0.5; ``fedstale(beta=0.8)``
...-remote         w_i a_i                          as above        yes      as ``difference-own`` and ``innovation``;
                                                                             clients keep c_i: ``remote.py``
fedvarp            w_i                              own c_i         **no**   FedVARP as the DELTA paper combines it, in
                                                                             its appendix: ``average_of_all``
================== ================================ =============== ======== ===========================================

``count / expected`` is 1 / pi_i where a client is drawn once at most and count_i / (n p_i) with replacement, hence one
formula serves both: sum_S (w_i / pi_i) u_i and (1/n) sum_draws (w_i / p_i) u_i. ``hansen-hurwitz`` is an alias.
``mifa`` is an alias of ``fedvarp``: MIFA's update is that very average, see ``average_of_all``.
"""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeltaflError, unknown_name
from ..io import load_class
from ..types import Cohort, FloatArray
from .calls import check_options, parse_call
from .control_variates import (
    CommonControl,
    ControlVariate,
    InnovationControl,
    NoControl,
    OwnControl,
    RegressionControl,
)
from .learned_coefficient import FixedCoefficient, LearnedCoefficient
from .remote import RemoteControl

Coefficients = Callable[[Cohort, FloatArray, FloatArray], FloatArray]


def horvitz_thompson(cohort: Cohort, weight_n: FloatArray, response_n: FloatArray) -> FloatArray:
    """coef_i = w_i count_i / (expected_i q_i): unbiased for every exact design.

    Args:
        cohort: The clients that replied, with the expectations they were drawn with.
        weight_n: (n,) their weights w_i in the target.
        response_n: (n,) their response rates q_i in (0, 1]; 1 where clients always reply.

    Raises:
        DeltaflError: If an expectation is unknown: such a sampler cannot be weighed without bias.
    """
    if not np.all(np.isfinite(cohort.expected_n)):
        raise DeltaflError(
            "this sampler does not know how likely its clients were, so no unbiased weight exists; "
            "use the estimator 'plain-mean' or 'fedvarp'"
        )
    return weight_n * cohort.count_n / (cohort.expected_n * response_n)


def hajek(cohort: Cohort, weight_n: FloatArray, response_n: FloatArray) -> FloatArray:
    """The Horvitz-Thompson coefficients divided by their sum. Biased by O(1/n); constant updates are exact."""
    return _summing_to_1(horvitz_thompson(cohort, weight_n, response_n))


def plain_mean(cohort: Cohort, weight_n: FloatArray, response_n: FloatArray) -> FloatArray:
    """count_i / sum_S count_j, whatever the weights and probabilities. Biased."""
    return cohort.count_n / max(int(cohort.count_n.sum()), 1)


def weighted_mean(cohort: Cohort, weight_n: FloatArray, response_n: FloatArray) -> FloatArray:
    """w_i count_i / sum_S w_j count_j, whatever the probabilities. Biased; 0 where all weights are 0."""
    return _summing_to_1(weight_n * cohort.count_n)


def _summing_to_1(coef_n: FloatArray) -> FloatArray:
    """Coefficients divided by their sum; as they are if it is 0."""
    total = coef_n.sum()
    return coef_n / total if total > 0 else coef_n


def average_of_all(cohort: Cohort, weight_n: FloatArray, response_n: FloatArray) -> FloatArray:
    """coef_i = w_i: with own c_i, D = sum_j w_j c_j after the replies have replaced the cohort's c_i. Biased.

    The DELTA paper: "instead of reassigning weights in the aggregation step, we use [p] to select the current round
    update clients and then average aggregate the updates of all clients", those not selected counting with their last
    update, as in FedVARP. That is SAG's average (Le Roux, Schmidt and Bach 2012), where FedVARP itself is SAGA's. We
    take the average with the target's weights (the plain mean of all m clients if these are equal), so that a memory
    without staleness gives ubar. E[D] = sum_j w_j ((1 - pi_j) c_j + pi_j u_j): it lags behind ubar, and a client that
    has not replied counts as zero, hence the first m / n rounds or so take short steps. Counts and probabilities are
    not used.

    MIFA (Gu, Huang, Zhang and Huang, NeurIPS 2021) steps along the same average of everybody's latest update, whoever
    replied; with w_i = 1 / m it is theirs to the letter. It needs a reply of every client in the first round. We do not
    wait for that: the sampler ``mifa`` selects all clients once in the first rounds; they count as zero until then.
    """
    return weight_n.copy()


class Estimator(NamedTuple):
    """A rule for coefficients, and the control variate it subtracts.

    Attributes:
        name: Its name in settings.
        coefficients: ``(cohort of those who replied, weight_n, response_n) -> coef_n``.
        control: Where c comes from.
        unbiased: Whether E[D] = ubar for every exact design.
        needs_expected: Whether it must know how likely each client of the cohort was.
        ratio: Whether its coefficients sum to 1, so that what all updates have in common is no error of it.
        source: The paper, as in ``docs/references.md``; empty where none is known.
    """

    name: str
    coefficients: Coefficients
    control: ControlVariate
    unbiased: bool
    needs_expected: bool = True
    ratio: bool = False
    source: str = ""


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator("horvitz-thompson", horvitz_thompson, NoControl(), unbiased=True, source="Horvitz, Thompson 1952"),
        Estimator("hajek", hajek, NoControl(), unbiased=False, ratio=True, source="Hajek 1971"),
        Estimator("plain-mean", plain_mean, NoControl(), unbiased=False, needs_expected=False, ratio=True),
        Estimator(
            "weighted-mean",
            weighted_mean,
            NoControl(),
            unbiased=False,
            needs_expected=False,
            ratio=True,
            source="McMahan et al. 2017",
        ),
        Estimator(
            "difference", horvitz_thompson, CommonControl(), unbiased=True, source="Cassel, Sarndal, Wretman 1976"
        ),
        Estimator("difference-own", horvitz_thompson, OwnControl(), unbiased=True, source="Jhunjhunwala et al. 2022"),
        Estimator("innovation", horvitz_thompson, InnovationControl(), unbiased=True, source="this project"),
        Estimator(
            "regression", horvitz_thompson, RegressionControl(), unbiased=True, source="Cassel, Sarndal, Wretman 1976"
        ),
        Estimator(
            "difference-damped",
            horvitz_thompson,
            LearnedCoefficient(CommonControl()),
            unbiased=True,
            source="Montanari 1987",
        ),
        Estimator(
            "difference-own-damped",
            horvitz_thompson,
            LearnedCoefficient(OwnControl()),
            unbiased=True,
            source="Montanari 1987",
        ),
        Estimator(
            "innovation-damped",
            horvitz_thompson,
            LearnedCoefficient(InnovationControl()),
            unbiased=True,
            source="Montanari 1987",
        ),
        Estimator(
            "regression-damped",
            horvitz_thompson,
            LearnedCoefficient(RegressionControl()),
            unbiased=True,
            source="Montanari 1987",
        ),
        Estimator(
            "fedstale", horvitz_thompson, FixedCoefficient(OwnControl()), unbiased=True, source="Rodio, Neglia 2024"
        ),
        Estimator(
            "fedvarp", average_of_all, OwnControl(), unbiased=False, needs_expected=False, source="Gu et al. 2021"
        ),
    )
}
#: For hosts whose clients keep their last update and send the difference (``remote.py``); not for simulated clients.
REMOTE_ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        Estimator("difference-own-remote", horvitz_thompson, RemoteControl(), unbiased=True, source="this project"),
        Estimator(
            "innovation-remote", horvitz_thompson, RemoteControl(memory=0.7), unbiased=True, source="this project"
        ),
    )
}
_ALIASES = {"hansen-hurwitz": "horvitz-thompson", "ratio": "hajek", "mifa": "fedvarp"}
#: The spelling of older versions.
_OLD_FEDSTALE = re.compile(r"^fedstale-([-+.\w]+)$")


def find_estimator(given: str | Estimator | ControlVariate) -> Estimator:
    """Look an estimator up.

    Args:
        given: A name or alias, with options of its control variate where it has some: ``fedstale(beta=0.8)``, also
            written ``fedstale-0.8``; or ``FILE.py:Class(...)`` for a control variate of your own, which is used with
            the Horvitz-Thompson coefficients, as is an instance; or an estimator, which is returned as it is.

    Raises:
        DeltaflError: If the name or an option is unknown; the message suggests the nearest.
    """
    if isinstance(given, Estimator):
        return given
    if isinstance(given, ControlVariate):
        return Estimator(repr(given), horvitz_thompson, given, unbiased=True)
    name = _ALIASES.get(given, given)
    return ESTIMATORS.get(name) or REMOTE_ESTIMATORS.get(name) or _with_options(given)


@cache
def _with_options(text: str) -> Estimator:
    """The estimator of a text that is no name."""
    name, options = parse_call(_OLD_FEDSTALE.sub(r"fedstale(beta=\1)", text))
    name = _ALIASES.get(name, name)
    if ".py:" in name:
        kind = load_class(name, ControlVariate)
        check_options(kind, options, name)
        return Estimator(text, horvitz_thompson, kind(**options), unbiased=True)
    every = ESTIMATORS | REMOTE_ESTIMATORS
    if name not in every:
        raise unknown_name("estimator", name, [*every, *_ALIASES])
    control: Any = every[name].control
    parts = [field.name for field in fields(control) if field.type is not float]  # such as another control variate
    check_options(type(control), options, name, hidden=parts)
    return every[name]._replace(name=text, control=replace(control, **options))
