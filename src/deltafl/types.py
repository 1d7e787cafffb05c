"""The types that samplers, estimators and hosts share, and the legend of letters.

Letters (also the suffixes that give an array's shape, as in ``weight_m`` or ``update_nd``):

====== ===========================================================================================
m      clients in the population
n      clients of one cohort (distinct), or rows aligned with them
d      parameters of the model
w_i    weight of client i in the target f = sum_i w_i F_i; the weights sum to 1 and *define it*
u_i    the update of client i: local model after its training minus global model, u_i = x_K - x_0
ubar   sum_i w_i u_i: what full participation would give
pi_i   expectation of how often client i is drawn in this round (its inclusion probability)
p_i    probability of client i in one draw, p_i = pi_i / n for designs with replacement
zeta_i norm(u_i - ubar), the diversity of client i
====== ===========================================================================================

Everything is in *update units*: norms are norms of u_i, so that the learning rate cancels in every
score.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import nan
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from .errors import OWN_ERRORS, DeltaflError, counted, is_in, printable, require_no_twins

Rng = np.random.Generator
AnyPath = str | os.PathLike[str]
Json = dict[str, Any]  #: an object of a JSON or TOML file
Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Params = npt.NDArray[np.float32]
Floats = npt.NDArray[np.floating]  #: of any precision
#: What a host may give as a column of ``Reports``; None is an entry that is not known.
Column = npt.ArrayLike | Sequence[float | None] | None
#: Auxiliary variables are squared and summed.
LARGEST_AUX = 1e100
#: Where claims are capped no client costs more than so many times the median.
DEAREST = 100
#: Entries of a model, and of what moves it, in a saved state: sums of them stay in float32.
LARGEST_STEP = 1e30
TINY = np.finfo(np.float64).tiny  #: the least number by which to divide
NOBODY = np.zeros(0, np.int64)
ALWAYS = np.zeros(0)
#: ``Cohort.kind`` of a round without a draw, in which all clients that are there are selected.
EVERYONE = "everyone"


class Within(NamedTuple):
    """What a field of a state may hold, by which a saved one is judged (``scale/sound.py``)."""

    #: such as ``"[0, round]"``; ``round`` is the state's own, ``next`` the one after it
    interval: str
    unknown: bool = False  #: whether NaN stands for what is not known


#: Types of fields of states: counts of rounds, shares, sizes, and sizes of which some are unknown.
Counts = Annotated[IntArray, Within("[0, round]")]
Shares = Annotated[FloatArray, Within("[0, 1]")]
Sizes = Annotated[FloatArray, Within("[0, 1e100]")]
KnownSizes = Annotated[FloatArray, Within("[0, 1e100]", unknown=True)]


@dataclass(frozen=True)
class Judge:
    """How the values of a metric are read.

    Attributes:
        name: As in records and tables.
        higher: Whether higher is better.
        share: Whether they are shares between 0 and 1, which are shown as percent.
        written: The name in headings and sentences, such as "ROC AUC"; ``name`` if empty.
    """

    name: str
    _: KW_ONLY
    higher: bool = True
    share: bool = False
    # Records from before it was written down are judged alike.
    written: str = field(default="", compare=False)

    @property
    def heading(self) -> str:
        """The name in headings and sentences, one short line whatever it is."""
        return printable(self.written or self.name, limit=60)

    def text(self, value: float | None) -> str:
        """A value as a sentence has it: ``12.34%`` or ``0.1234``; None is nan."""
        if value is None:
            return "nan"
        return f"{value:.2%}" if self.share else f"{value:.4g}"

    @property
    def sign(self) -> float:
        """By what a value is multiplied so that more is better."""
        return 1.0 if self.higher else -1.0

    @property
    def factor(self) -> int:
        """By what a value is multiplied where it is shown."""
        return 100 if self.share else 1

    @property
    def unit(self) -> str:
        """What stands behind a value."""
        return " %" if self.share else ""

    @property
    def title(self) -> str:
        """An axis of its values."""
        return f"test {self.heading}, %" if self.share else f"test {self.heading}"

    @property
    def missing(self) -> float:
        """What counts where a run has no value: the worst one, NaN where there is none."""
        return 0.0 if self.higher and self.share else nan


#: What every run may know, whatever else it is judged by.
ACCURACY = Judge("accuracy", share=True)
LOSS = Judge("loss", higher=False)


def judge_of(name: str, judges: Sequence[Judge] = ()) -> Judge:
    """The judge of this name, among those of a run."""
    return {judge.name: judge for judge in (ACCURACY, LOSS, *judges)}[name]


class Strata(NamedTuple):
    """A name for each client that it shares with others: its region, hospital chain, device."""

    code_m: IntArray  #: index of the client's name among ``names``
    names: tuple[str, ...]  #: in sorted order

    @classmethod
    def of(cls, name_m: Sequence[Any], m: int) -> "Strata":
        """Strata by the names of m clients; a ``DeltaflError`` for another number, or no names."""
        # Of a dict the names would be its keys.
        if isinstance(name_m, str | Mapping) or not np.iterable(name_m):
            raise DeltaflError(
                f"strata is {name_m!r:.60}; give a list with a name for each client, such as "
                "['north', 'south', 'north']"
            )
        given = list(name_m)
        if len(given) != m:
            raise DeltaflError(
                f"strata has {len(given)} names for {m} clients; give one for each, such as "
                "['north', 'south', 'north']"
            )
        texts = [str(name) if isinstance(name, str | int | np.integer) else "" for name in given]
        for client, text in enumerate(texts):
            if not text.strip():
                raise DeltaflError(
                    f"the stratum of client {client} is {given[client]!r:.60}; write a name, or a "
                    "whole number"
                )
        require_no_twins("strata", given)
        names, code_m = np.unique(texts, return_inverse=True)
        return cls(code_m, tuple(names.tolist()))


Record = TypeVar("Record", bound=tuple[Any, ...])


def locked(record: Record) -> Record:
    """A NamedTuple whose arrays whoever gets it cannot write into."""
    fields: Any = record
    views = {}
    for name, part in fields._asdict().items():
        if isinstance(part, np.ndarray):
            views[name] = read_only(part)
    found: Record = fields._replace(**views)
    return found


def read_only(array: Array) -> Array:
    """A view that cannot be written into; the array itself if it cannot."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


class Population(NamedTuple):
    """Who takes part, and how much each client counts in the target ``f = sum_i weight_m[i] F_i``.

    Auxiliary variables are what else is known of the clients before the first round, such as the
    shares of each label in their data. Columns are used as they are: the larger its numbers, the
    more a column counts.
    """

    weight_m: FloatArray  #: >= 0, sum 1
    num_examples_m: IntArray  #: >= 1, sizes of the clients' data
    aux_mq: FloatArray | None = None  #: auxiliary variables
    #: norms of updates of the initial model, from a census; NaN where unknown
    norm_m: FloatArray | None = None
    #: > 0, expected seconds of a client's round: ``per_second``, ``oort``
    seconds_m: FloatArray | None = None
    #: updates of the initial model, from a census, encoded (``two_bits.py``); or 0
    code_mc: FloatArray | None = None
    #: a name for each client, such as its region: ``at_least``, ``allocation``, ``stages``
    strata: Strata | None = None
    #: > 0, what a round of each client costs, in any unit: ``per_cost``, ``budget``
    cost_m: FloatArray | None = None

    def __repr__(self) -> str:
        known = "" if self.aux_mq is None else f", {self.aux_mq.shape[1]} auxiliary variables"
        return f"Population({counted(self.num_clients, 'client')}{known})"

    @property
    def num_clients(self) -> int:
        """The number of clients m."""
        return len(self.weight_m)

    def design_mq(self) -> FloatArray:
        """Float64 (m, 1 + q): a column of ones, then the auxiliary variables (q = 0 without
        any).
        """
        one_m1 = np.ones((self.num_clients, 1))
        if self.aux_mq is None:
            return one_m1
        return np.hstack([one_m1, self.aux_mq])

    def check(self) -> None:
        """Raise a ``DeltaflError`` for bad weights, or what else does not fit them."""
        weight_m: Any = self.weight_m
        flat = (
            isinstance(weight_m, np.ndarray) and weight_m.ndim == 1 and weight_m.dtype.kind == "f"
        )
        if not (flat and np.all(weight_m >= 0) and abs(weight_m.sum() - 1) <= 1e-6):
            raise DeltaflError(
                "the weights of the population must be an array of numbers >= 0 with sum 1"
            )
        if len(self.weight_m) != len(self.num_examples_m):
            sizes = f"{len(self.weight_m)} weights and {len(self.num_examples_m)} sizes"
            raise DeltaflError(
                f"the population has {sizes}, not one of each for a client; see "
                "Population.from_sizes"
            )
        if self.aux_mq is not None:
            _checked_aux(self.aux_mq, self.num_clients)
        for name, column_m in (("seconds_m", self.seconds_m), ("cost_m", self.cost_m)):
            if column_m is None:
                continue
            # One number may stand for all.
            fits = np.shape(column_m) in ((), weight_m.shape)
            if not fits or not np.all((column_m > 0) & np.isfinite(column_m)):
                raise DeltaflError(
                    f"{name} must hold a number above 0 for each of the {self.num_clients} clients"
                )

    def priced(self, cost: npt.ArrayLike) -> "Population":
        """These clients, of whom a round of each costs so much, (m,); a ``DeltaflError`` if that is
        no number above 0.
        """
        population = self._replace(cost_m=_numbers_of("cost", cost))
        population.check()
        return population

    def costs(self, cohort: "Cohort | None" = None) -> FloatArray:
        """What a round of each client costs, float64 (m,), or cost those of a cohort, (n,); 1 if
        nobody said.
        """
        if cohort is not None and len(cohort.cost_n):
            return cohort.cost_n
        cost_m = np.ones(self.num_clients)
        if self.cost_m is not None:
            cost_m = cost_m * self.cost_m  # one number may stand for all
        return cost_m if cohort is None else cost_m[cohort.client_n]

    @classmethod
    def from_sizes(
        cls,
        num_examples_m: npt.ArrayLike,
        weights: str = "data",
        aux: npt.ArrayLike | None = None,
        max_ratio: float | None = None,
        *,
        strata: Sequence[Any] | None = None,
        cost: npt.ArrayLike | None = None,
    ) -> "Population":
        """Make a population from the clients' numbers of examples; another argument is a
        ``DeltaflError``.

        Args:
            num_examples_m: (m,) whole numbers, 1 to 2^53.
            weights: ``"data"`` for w_i = n_i / N, ``"uniform"`` for w_i = 1 / m.
            aux: (m, q) finite numbers, auxiliary variables of each client; see ``aux_mq``.
            max_ratio: >= 1; no size counts more than so many times the median of all, and no cost
                less than the median over it, or more than ``DEAREST`` medians: for what nobody
                checked. None for no limit.
            strata: m names, such as the clients' regions, or numbers; see ``server/strata.py``.
            cost: (m,) numbers > 0, what a round of each client costs, in any unit.
        """
        try:
            size_m = np.asarray(num_examples_m)
        except OWN_ERRORS:  # whatever somebody's arrays raise
            size_m = np.zeros(())
        if size_m.ndim != 1 or len(size_m) == 0:
            raise DeltaflError(
                f"num_examples_m is {num_examples_m!r:.60}; write a list of at least one size"
            )
        if size_m.dtype.kind not in "iu":
            raise DeltaflError(
                "num_examples_m must hold whole numbers, 1 to 2^53, and is of type "
                f"{size_m.dtype}; write np.array(sizes).astype(int)"
            )
        # float64 holds no more than 2^53.
        for client in np.flatnonzero((size_m < 1) | (size_m > 2**53))[:1]:
            raise DeltaflError(
                f"client {client} has {size_m[client]} examples; give whole numbers, 1 to 2^53, "
                "and leave out clients without examples"
            )
        if str(weights) not in {"data", "uniform"}:
            raise DeltaflError(
                f"weights is {weights!r}; write 'data' (w_i = n_i / N) or 'uniform' (w_i = 1 / m)"
            )
        if max_ratio is not None:
            if not is_in(max_ratio, "[1, inf)"):
                raise DeltaflError(
                    f"max_ratio is {max_ratio!r}; write a number >= 1, or None for no limit"
                )
            size_m = np.minimum(size_m, max_ratio * np.median(size_m))
        size_m = size_m.astype(np.int64)
        share_m: Array = size_m
        if weights == "uniform":
            share_m = np.ones(len(size_m))
        # In float64, as a sum of large int64 could overflow.
        population = cls(share_m / share_m.sum(dtype=np.float64), size_m)
        m = len(size_m)
        if aux is not None:
            population = population._replace(aux_mq=_checked_aux(aux, m))
        if strata is not None:
            population = population._replace(strata=Strata.of(strata, m))
        if cost is not None:
            cost_m = _numbers_of("cost", cost)
            population = population.priced(cost_m)
            if max_ratio is not None:
                middle = np.median(cost_m)
                counted_m = np.clip(cost_m, middle / max_ratio, DEAREST * middle)
                population = population._replace(cost_m=counted_m)
        return population


class Cohort(NamedTuple):
    """The clients selected in one round, how often each was drawn, and the expectation it was drawn
    with.

    ``count / expected`` has mean 1 for every exact design: this one number is what makes an
    estimate unbiased.
    """

    client_n: IntArray  #: distinct client indices in increasing order
    count_n: IntArray  #: >= 1; above 1 only in designs with replacement
    expected_n: FloatArray  #: > 0, the expectation of the count before the draw; NaN if unknown
    #: or "fixed-size", "poisson", "replacement": how it was drawn, for variance estimates;
    #: ``EVERYONE``: it was not drawn
    kind: str = "unknown"
    absent: IntArray = NOBODY  #: clients that were not available to the draw
    #: of the state that it was drawn from; None if ``open_round`` did not draw it
    round: int | None = None
    #: the stratum that each was drawn from, where these were drawn one by one; else (0,)
    stratum_n: IntArray = NOBODY
    #: how likely that stratum was drawn before its clients were, or (0,) where all strata are
    stage_n: FloatArray = ALWAYS
    #: what a round of each cost when it was drawn; (0,) if that is ``Population.cost_m``
    cost_n: FloatArray = ALWAYS

    def part(self, which_n: Any) -> "Cohort":
        """The rows that an index or a mask names, such as those of the clients that replied."""
        columns = {
            name: column[which_n]
            for name, column in self._asdict().items()
            # Empty where there is nothing to say, or nobody.
            if name.endswith("_n") and len(column)
        }
        return self._replace(**columns)


class Replies(NamedTuple):
    """The usable replies of a round, and what each counts."""

    cohort: Cohort  #: the clients that replied
    selected: Cohort  #: all selected clients, these included
    coef_n: FloatArray  #: coefficient of each reply in the estimate
    #: how likely they are available and reply, in (0, 1], as assumed before the round
    response_n: FloatArray

    @property
    def client_n(self) -> IntArray:
        """Indices of the clients that replied."""
        return self.cohort.client_n


class Reports(NamedTuple):
    """What the clients of a cohort sent beside their updates; all columns are aligned with
    ``cohort.client_n``.

    The last five are filled by ``close_round``: ``squared_deviation_n``, zeta_i^2 in practice, with
    distances from the plain mean of the replies, each client once however often it was drawn unless
    ``Sampler.counts_draws``, or from ubar where all clients report to an oracle.
    """

    responded_n: BoolArray  #: False for a client whose reply is missing or was refused
    loss_n: FloatArray  #: mean training loss over the local work; NaN for a reply without one
    has_loss_n: BoolArray  #: True where a loss was reported; a reported NaN rejects the reply
    #: mean of the squared losses of single examples, >= loss_n^2; NaN if not reported
    square_loss_n: FloatArray
    #: variance of a local step (local_lr^2 sigma_i^2 for SGD); 0 if not measured
    step_variance_n: FloatArray
    num_steps_n: IntArray  #: local steps K_i >= 1
    squared_norm_n: FloatArray  #: norm(u_i)^2
    squared_deviation_n: FloatArray  #: norm(u_i - mean)^2
    #: norm(u_i - c_i)^2, c_i the control variate; 0 where clients report to an oracle
    squared_residual_n: FloatArray
    sketch_nq: FloatArray  #: sketch of u_i - c_i, q the sampler's ``sketch_size``
    #: the last k entries of u_i, k the sampler's ``output_bias_size``: one number per class
    output_bias_nk: FloatArray

    def part(self, which_n: Any) -> "Reports":
        """The rows that an index or a mask names, as ``Cohort.part``."""
        return Reports._make(column[which_n] for column in self)

    @classmethod
    def make(
        cls,
        n: int,
        *,
        responded: Column = None,
        loss: Column = None,
        square_loss: Column = None,
        step_variance: Column = None,
        num_steps: Column = None,
    ) -> "Reports":
        """Make reports of n clients from what a host knows; what is not given has a neutral value,
        losses None.

        Entries that are no numbers stand for a fault, for which ``close_round`` refuses the reply.

        Raises:
            DeltaflError: If a column does not have n entries.
        """
        if not is_whole(n) or n < 0:
            raise DeltaflError(f"n is {n!r:.60}; write the number of clients, len(cohort.client_n)")
        steps_n = _column("num_steps", num_steps, n, 1, bad=0)
        loss_n = _column("loss", loss, n, nan)
        has_loss_n = np.zeros(n, bool)
        if loss is not None:
            entries: Any = loss
            has_loss_n = np.array([entry is not None for entry in entries], bool)
        # Who replied is the host's to know; a list of clients, for instance, is no mask.
        replied_n = _column("responded", responded, n, 1)
        if not np.isin(replied_n, (0, 1)).all():
            raise DeltaflError(
                f"reports: responded is {responded!r:.60}; it must hold True or False for each of "
                f"{n} clients"
            )
        return cls(
            responded_n=replied_n.astype(bool),
            loss_n=loss_n,
            has_loss_n=has_loss_n,
            # NaN means that none was reported; what is no number at all has to be refused.
            square_loss_n=_column("square_loss", square_loss, n, nan, bad=-1),
            step_variance_n=_column("step_variance", step_variance, n, 0.0),
            # A cast of what does not fit could give any number. 0 is refused later.
            num_steps_n=np.where(np.abs(steps_n) < 2.0**63, steps_n, 0).astype(np.int64),
            squared_norm_n=np.zeros(n),
            squared_deviation_n=np.zeros(n),
            squared_residual_n=np.zeros(n),
            sketch_nq=np.zeros((n, 0)),
            output_bias_nk=np.zeros((n, 0)),
        )


@runtime_checkable
class Oracle(Protocol):
    """What only a simulator can know before the draw. A host that cannot provide it passes
    ``None``.
    """

    def reports(self) -> Reports:
        """Train all m clients of this round and report, with ``squared_deviation`` about ubar."""

    def losses(self, client_k: IntArray) -> FloatArray:
        """Loss of the current global model on the data of the given clients, float64 (k,)."""


class Broadcast(NamedTuple):
    """What the server sends to every selected client: the global model, and a drift or None.

    With ``mime`` the drift is beta S, the momentum's: each client adds drift_d / K_i in each of its
    K_i local steps, and takes (1 - beta) times its usual steps. With ``scaffold`` (1 - beta) c is
    added to it, and each client takes its row of ``Plan.drifts``, drift_d - (1 - beta) c_i, in its
    place.
    """

    params_d: Params
    drift_d: Params | None


class Nothing(NamedTuple):
    """The state of a feature that is switched off, or that needs none."""


#: The reason that stands for a reply that never came.
NO_REPLY = "no reply"


class RejectedReply(NamedTuple):
    """A reply that was not used, and why."""

    client: int
    reason: str


class RoundInfo(NamedTuple):
    """Diagnostics of one round, which the next round does not need. NaN means unknown.

    ``mean_over_diversity`` is norm(D) / mean zeta of the replies: above about 1, DELTA's scores are
    worse than uniform. ``residual`` is sum_S coef_i norm(u_i - c_i)^2 / sum_S coef_i norm(u_i)^2: 1
    without a control variate; above 1, the c_i are further from the updates than 0 is.
    """

    round: int  #: from 0
    num_selected: int  #: distinct clients
    num_responded: int  #: replies used
    rejected: Sequence[RejectedReply]
    estimate_norm: float  #: norm(D), D the estimate of the full-participation update
    #: estimate of E norm(D - E D)^2 over draws, hence without a bias; how good: ``variance.py``
    variance: float
    effective_sample_size: float  #: (sum c)^2 / sum c^2 over the coefficients c of the replies
    largest_weight: float  #: the largest coefficient
    sum_of_weights: float  #: of the coefficients; its mean is 1 for an unbiased design
    mean_over_diversity: float
    loss: float  #: mean training loss of the replies that have one, weighted by the coefficients
    residual: float = nan
    control_coefficient: float = 1.0  #: beta of the control variate in [0, 1]; 1 if there is none
    #: the least by which ``clip`` or ``norm_guard`` shortened a reply or D; below 1: biased
    clip_factor: float = 1.0

    @property
    def refused(self) -> list[RejectedReply]:
        """The replies that came and were not used."""
        return [reply for reply in self.rejected if reply.reason != NO_REPLY]

    @property
    def warning(self) -> str | None:
        """A sentence, with the first reason, if replies came and all were refused; else None."""
        refused = self.refused
        if self.num_responded or not refused:
            return None
        first = f"the first of {len(refused)}, of client {refused[0].client}: {refused[0].reason}"
        return f"all replies were refused and nothing was learnt; {first}"


def _checked_aux(aux: npt.ArrayLike, num_clients: int) -> FloatArray:
    """Auxiliary variables, (m, q) numbers of size 1e100 at most; always a copy."""
    try:
        aux_mq = np.array(aux, float)
    except OWN_ERRORS:
        aux_mq = np.zeros(0)
    if aux_mq.ndim != 2 or len(aux_mq) != num_clients:
        raise DeltaflError(
            f"aux must hold one row of numbers, all of one length, for each of {num_clients} "
            "clients"
        )
    # Negated, as NaN is not above any bound.
    bad = np.flatnonzero(~(np.abs(aux_mq) <= LARGEST_AUX).all(axis=1))
    if len(bad):
        fault = f"a number that is not finite, or beyond {LARGEST_AUX:.0e}"
        raise DeltaflError(
            f"what is known of client {bad[0]} holds {fault}; write 0 in its place, or smaller "
            "units"
        )
    return aux_mq


def _numbers_of(name: str, given: npt.ArrayLike) -> FloatArray:
    """An array of float64; a ``DeltaflError`` for what is none."""
    try:
        return np.asarray(given, np.float64)
    except OWN_ERRORS:
        raise DeltaflError(f"{name} is {given!r:.60}; write a number for each client") from None


def _column(
    name: str,
    given: Column,
    n: int,
    default: float,
    bad: float = nan,
) -> FloatArray:
    """One number per client, float64 (n,); ``bad`` for an entry that is no number, such as text,
    and NaN for None.
    """
    if given is None:
        return np.full(n, default)
    rows: Any = given
    if np.ma.isMaskedArray(rows):
        raise DeltaflError(
            f"reports: {name} is masked, and what a mask hides would count; give a list with None "
            "in its place"
        )
    try:
        values = np.asarray(rows)
    except OWN_ERRORS:  # entries of several shapes
        values = np.zeros((len(rows), 0))
    if values.shape[:1] != (n,):
        raise DeltaflError(f"reports: {name} must have one number for each of {n} clients")
    if values.ndim == 1 and values.dtype.kind in "biuf":
        with np.errstate(over="ignore"):
            return values.astype(float)
    # Each alone, for what one client sends as its number may be an array.
    return np.array([nan if entry is None else as_number(entry, bad) for entry in rows], float)


def as_number(entry: Any, bad: float = nan) -> float:
    """What somebody else gives as a number, NumPy's and tensors too, as a float; ``bad`` for all
    else: text, an array, an integer out of range.
    """
    # Python reads numbers in texts, and NumPy takes a part of a complex one.
    if isinstance(entry, str | bytes | complex | np.complexfloating):
        return bad
    try:
        with np.errstate(over="ignore"):
            return float(entry) if np.shape(entry) == () else bad
    except OWN_ERRORS:
        return bad


def is_whole(value: object) -> bool:
    """Whether something is a whole number, NumPy's too; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_ours(value: object) -> bool:
    """Whether it is of a class of this package, and not of a user's."""
    return type(value).__module__.startswith("deltafl.")
