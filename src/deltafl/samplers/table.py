"""The table of methods: a sampler (score), with the design and the estimator it has unless a label says otherwise."""

from collections.abc import Callable
from typing import NamedTuple

from ..estimators.table import find_estimator
from ..types import Sampler
from .active_fl import ActiveFL
from .balanced import Balanced
from .centred import Centred
from .cluster import ClusterIS
from .clustered import ClusteredBySimilarity, ClusteredBySize
from .delta import Delta, PracDelta
from .divfl import DivFL
from .fed_cbs import FedCBS
from .fixed import Fixed, Full
from .hics import HicsFL
from .importance import FedIS, FedPracIS
from .mifa import NewFirst
from .ocs import ApproximateOCS
from .online import MirrorDescent, VarianceBandit
from .oort import Oort
from .options import SamplerSettings, options_read
from .power_of_choice import PowerOfChoice

#: What a server must know for a sampler, in the words of the table.
NEEDS = {
    "nothing": "who is there",
    "sizes": "every client's number of examples",
    "cohort": "sizes, and what those asked before have sent: updates, for active-fl and oort their losses",
    "known": "sizes, and some numbers of every client before the first round, such as its shares of labels; for "
    "balanced also what those asked before have sent",
    "losses": "the losses of candidates on the current model, before the draw",
    "oracle": "all clients' updates of this round, before the draw (ocs and aocs: their norms): everybody trains",
    "everyone": "nothing, for it asks everyone",
}


class SamplerEntry(NamedTuple):
    """A row of the table of methods.

    Attributes:
        name: Its name.
        make: ``(settings, design) -> Sampler``.
        design: Default design; None where no design is involved.
        estimator: Default estimator.
        scores: ``"equal"`` for ever, ``"unequal"``, or ``"unknown"``: then no design and no weight fit.
        needs: What the server must know: a word of ``NEEDS``.
        source: The paper.
    """

    name: str
    make: Callable[[SamplerSettings, str], Sampler]
    design: str | None
    estimator: str
    scores: str
    needs: str
    source: str

    @property
    def options(self) -> frozenset[str]:
        """The names of the ``SamplerSettings`` that it looks at."""
        return options_read(lambda settings: self.make(settings, self.design or "systematic"))

    @property
    def unbiased(self) -> bool:
        """Whether the default form is unbiased."""
        sampler = self.make(SamplerSettings(), self.design or "systematic")
        return sampler.unbiased and find_estimator(self.estimator).unbiased


def _fedis(settings: SamplerSettings, design: str) -> Sampler:
    return FedIS(design, settings.floor_or(0.0))


def _fedpracis(settings: SamplerSettings, design: str) -> Sampler:
    return FedPracIS(design, settings.floor_or(0.1))


def _delta(settings: SamplerSettings, design: str) -> Sampler:
    a1, a2 = settings.constants
    return Delta(design, settings.floor_or(0.0), a1, a2, settings.sigma_scale)


def _pracdelta(settings: SamplerSettings, design: str) -> Sampler:
    a1, a2 = settings.constants
    return PracDelta(design, settings.floor_or(0.1), a1, a2, settings.sigma_scale)


def _cluster(settings: SamplerSettings, design: str) -> Sampler:
    return ClusterIS(False, settings.clusters, design, settings.floor_or(0.1), settings.drop_small_after)


def _cluster_oracle(settings: SamplerSettings, design: str) -> Sampler:
    return ClusterIS(True, settings.clusters, design, settings.floor_or(0.0), settings.drop_small_after)


def _delta_centred(settings: SamplerSettings, design: str) -> Sampler:
    return Centred(design=design, floor=settings.floor_or(0.2))


def _innovation(settings: SamplerSettings, design: str) -> Sampler:
    return Centred(own_memory=True, design=design, floor=settings.floor_or(0.2))


def _spread(settings: SamplerSettings, design: str) -> Sampler:
    return Centred(by_norm=False, design=design, floor=settings.floor_or(0.2))


def _balanced(settings: SamplerSettings, design: str) -> Sampler:
    return Balanced(design)


def _equal(settings: SamplerSettings, design: str) -> Sampler:
    return Fixed(False, design)


def _weight(settings: SamplerSettings, design: str) -> Sampler:
    return Fixed(True, design)


def _full(settings: SamplerSettings, design: str) -> Sampler:
    return Full()


def _power(settings: SamplerSettings, design: str) -> Sampler:
    return PowerOfChoice(settings.candidates)


def _mifa(settings: SamplerSettings, design: str) -> Sampler:
    return NewFirst()


def _active(settings: SamplerSettings, design: str) -> Sampler:
    return ActiveFL(*settings.active_alphas)


def _divfl(settings: SamplerSettings, design: str) -> Sampler:
    return DivFL()


def _oort(settings: SamplerSettings, design: str) -> Sampler:
    return Oort()


def _hics(settings: SamplerSettings, design: str) -> Sampler:
    return HicsFL(settings.classes, settings.hics_temperature, rounds=settings.horizon)


def _cbs(settings: SamplerSettings, design: str) -> Sampler:
    return FedCBS()


def _aocs(settings: SamplerSettings, design: str) -> Sampler:
    return ApproximateOCS(settings.rescalings)


def _by_size(settings: SamplerSettings, design: str) -> Sampler:
    return ClusteredBySize()


def _by_similarity(settings: SamplerSettings, design: str) -> Sampler:
    return ClusteredBySimilarity(settings.similarity)


def _bandit(settings: SamplerSettings, design: str) -> Sampler:
    return VarianceBandit(design, settings.mixing, settings.horizon)


def _osmd(settings: SamplerSettings, design: str) -> Sampler:
    return MirrorDescent(design, 0.4 if settings.mixing is None else settings.mixing)


_HT = "horvitz-thompson"
_FIXED = "systematic"
_OURS = "this project"
_DELTA, _SHEN = "Wang et al. 2023 (DELTA)", "Wang et al. 2023, after Shen et al. 2022"
_OCS, _FRABONI = "Chen, Horvath, Richtarik 2022", "Fraboni et al. 2021"
SAMPLERS: dict[str, SamplerEntry] = {
    entry.name: entry
    for entry in (
        SamplerEntry("full", _full, None, _HT, "equal", "everyone", "-"),
        SamplerEntry("fedavg", _equal, "simple-random", "hajek", "equal", "nothing", "McMahan et al. 2017"),
        SamplerEntry("uniform", _equal, _FIXED, _HT, "equal", "nothing", "Horvitz, Thompson 1952"),
        SamplerEntry("md", _weight, "multinomial", _HT, "unequal", "sizes", "Li et al. 2020"),
        SamplerEntry("md-fixed", _weight, _FIXED, _HT, "unequal", "sizes", "Madow 1949"),
        SamplerEntry("fedis", _fedis, _FIXED, _HT, "unequal", "oracle", _DELTA),
        SamplerEntry("fedpracis", _fedpracis, _FIXED, _HT, "unequal", "cohort", _DELTA),
        SamplerEntry("delta", _delta, _FIXED, _HT, "unequal", "oracle", _DELTA),
        SamplerEntry("pracdelta", _pracdelta, _FIXED, _HT, "unequal", "cohort", _DELTA),
        SamplerEntry("cluster-is", _cluster, _FIXED, _HT, "unequal", "cohort", _SHEN),
        SamplerEntry("cluster-is-oracle", _cluster_oracle, _FIXED, _HT, "unequal", "oracle", _SHEN),
        SamplerEntry("delta-centred", _delta_centred, _FIXED, "difference", "unequal", "cohort", _OURS),
        SamplerEntry("spread", _spread, "local-pivotal", "difference", "unequal", "cohort", _OURS),
        SamplerEntry("innovation", _innovation, _FIXED, "innovation-damped", "unequal", "cohort", _OURS),
        SamplerEntry("balanced", _balanced, "cube", "regression-damped", "unequal", "known", _OURS),
        SamplerEntry("ocs", _fedis, "poisson", _HT, "unequal", "oracle", _OCS),  # fedis@poisson, see ``ocs.py``
        SamplerEntry("aocs", _aocs, None, _HT, "unequal", "oracle", _OCS),
        SamplerEntry("clustered-sampling-1", _by_size, None, _HT, "unequal", "sizes", _FRABONI),
        SamplerEntry("clustered-sampling-2", _by_similarity, None, _HT, "unequal", "cohort", _FRABONI),
        SamplerEntry("osmd", _osmd, "multinomial", _HT, "unequal", "cohort", "Zhao et al. 2025 (OSMD)"),
        SamplerEntry("k-vib", _bandit, "poisson", _HT, "unequal", "cohort", "Zeng et al. 2025 (K-Vib)"),
        SamplerEntry("vrb", _bandit, "multinomial", _HT, "unequal", "cohort", "Borsos, Krause, Levy 2018"),
        SamplerEntry("fedvarp", _equal, _FIXED, "difference-own", "equal", "cohort", "Jhunjhunwala et al. 2022"),
        SamplerEntry("fedstale", _equal, _FIXED, "fedstale", "equal", "cohort", "Rodio, Neglia 2024"),
        SamplerEntry("mifa", _mifa, None, "fedvarp", "unknown", "cohort", "Gu et al. 2021"),
        SamplerEntry("power-of-choice", _power, None, "plain-mean", "unknown", "losses", "Cho, Wang, Joshi 2022"),
        SamplerEntry("active-fl", _active, None, "plain-mean", "unknown", "cohort", "Goetz et al. 2019"),
        SamplerEntry("divfl", _divfl, None, "plain-mean", "unknown", "cohort", "Balakrishnan et al. 2022"),
        SamplerEntry("oort", _oort, None, "plain-mean", "unknown", "cohort", "Lai et al. 2021"),
        SamplerEntry("hics-fl", _hics, None, "plain-mean", "unknown", "cohort", "Chen, Vikalo 2024"),
        SamplerEntry("fed-cbs", _cbs, None, "weighted-mean", "unknown", "known", "Zhang et al. 2023 (Fed-CBS)"),
    )
}
