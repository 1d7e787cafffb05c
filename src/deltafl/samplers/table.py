"""The table of methods: a sampler (score), with the design and the estimator it has unless a
label names others.
"""

from collections.abc import Mapping
from dataclasses import fields
from inspect import get_annotations, signature
from typing import Any, NamedTuple

from ..calls import check_options
from ..errors import DeltaflError, entry, explained
from ..store.own_python import load_class
from .base import NewFirst, Sampler
from .centred import Balanced, BalancedByCensus, Centred
from .cluster import ClusterIS, ClusterISOracle, FedSTaS
from .delta import Delta, FedIS, FedPracIS, PracDelta
from .fed_gs import FedGS
from .fixed import Fixed, Full
from .hics import HicsFL
from .intervals import FedAU, FedAWE
from .large_loss import ActiveFL, FedLECC, PowerOfChoice
from .ocs import ApproximateOCS
from .online import MirrorDescent, VarianceBandit
from .oort import Oort
from .pooled_labels import FedCBS, FedEntOpt
from .representatives import DivFL, LongFed
from .reshuffling import ClientReshuffling
from .urns import ClusteredBySimilarity, ClusteredBySize

#: What a server must know for a sampler, in the words of the table.
NEEDS = {
    "nothing": "which clients are available",
    "sizes": "every client's number of examples",
    "cohort": (
        "sizes, and what earlier cohorts have sent: updates, for active-fl and oort their losses"
    ),
    "known": "sizes, and auxiliary variables of every client before the first round, such as its "
    "shares of labels; for "
    "balanced also what earlier cohorts have sent",
    "census": (
        "sizes, an answer of every client in the first round, and what earlier cohorts have sent"
    ),
    "losses": (
        "the losses of candidates on the current model, before the draw; for fedlecc also "
        "shares of labels"
    ),
    "oracle": (
        "all clients' updates of this round, before the draw (ocs and aocs: their norms): "
        "everybody trains"
    ),
    "everyone": "nothing, for it selects everyone",
}

#: The same in a few words.
SHORT_NEEDS = {
    "nothing": "nothing",
    "sizes": "sizes",
    "cohort": "sizes, earlier updates",
    "known": "labels",
    "census": "one answer of each client",
    "losses": "losses of this round",
    "oracle": "all updates of this round",
    "everyone": "all updates",
}


class SamplerEntry(NamedTuple):
    """A row of the table of methods."""

    name: str
    kind: type[Sampler]
    design: str | None  #: the default; None if the sampler does not draw by a design
    estimator: str  #: the default
    scores: str  #: "equal" and constant, "unequal", or "unknown": then no design and no weight fit
    needs: str  #: what the server must know: a key of ``NEEDS``
    source: str  #: the paper
    fixed: Mapping[str, Any] = {}  #: fields of the class that make this row; they are no options

    @property
    def options(self) -> tuple[str, ...]:
        """The names of its options."""
        kind: Any = self.kind
        return tuple(
            field.name for field in fields(kind) if field.name not in {"design", *self.fixed}
        )

    def make(
        self,
        options: Mapping[str, Any],
        design: str | None = None,
    ) -> Sampler:
        """The sampler with some options; a ``DeltaflError`` if one is unknown, of the wrong type
        or out of range.
        """
        if "design" in options:
            raise DeltaflError(f"the design is no option; write {self.name}@{options['design']}")
        check_options(self.kind, options, self.name, {"design", *self.fixed})
        chosen = design or self.design
        drawn = {} if chosen is None else {"design": chosen}
        with explained(f"{self.name} cannot be made"):
            return self.kind(**self.fixed, **options, **drawn)


_HT = "horvitz-thompson"
_MEAN = "plain-mean"
_FIXED = "systematic"
_OURS = "this project"
_DELTA = "Wang et al. 2023 (DELTA)"
_SHEN = "Wang et al. 2023, after Shen et al. 2022"
_OCS = "Chen, Horvath, Richtarik 2022"
_FRABONI = "Fraboni et al. 2021"
_WEIGHT = {"by_weight": True}
_EQUAL = {"by_weight": False}
_COMMON = {"by_norm": True, "own_memory": False}
_OWN = {"by_norm": True, "own_memory": True}
_SPREAD = {"by_norm": False, "own_memory": False}
SAMPLERS: dict[str, SamplerEntry] = {
    entry.name: entry
    for entry in (
        SamplerEntry("full", Full, None, _HT, "equal", "everyone", "-"),
        SamplerEntry(
            "fedavg",
            Fixed,
            "simple-random",
            "hajek",
            "equal",
            "nothing",
            "McMahan et al. 2017",
            _EQUAL,
        ),
        SamplerEntry(
            "uniform",
            Fixed,
            _FIXED,
            _HT,
            "equal",
            "nothing",
            "Horvitz, Thompson 1952",
            _EQUAL,
        ),
        SamplerEntry(
            "md",
            Fixed,
            "multinomial",
            _HT,
            "unequal",
            "sizes",
            "Li et al. 2020",
            _WEIGHT,
        ),
        SamplerEntry(
            "md-fixed",
            Fixed,
            _FIXED,
            _HT,
            "unequal",
            "sizes",
            "Madow 1949",
            _WEIGHT,
        ),
        SamplerEntry("fedis", FedIS, _FIXED, _HT, "unequal", "oracle", _DELTA),
        SamplerEntry("fedpracis", FedPracIS, _FIXED, _HT, "unequal", "cohort", _DELTA),
        SamplerEntry("delta", Delta, _FIXED, _HT, "unequal", "oracle", _DELTA),
        SamplerEntry("pracdelta", PracDelta, _FIXED, _HT, "unequal", "cohort", _DELTA),
        SamplerEntry("cluster-is", ClusterIS, _FIXED, _HT, "unequal", "cohort", _SHEN),
        SamplerEntry(
            "cluster-is-oracle",
            ClusterISOracle,
            _FIXED,
            _HT,
            "unequal",
            "oracle",
            _SHEN,
        ),
        SamplerEntry(
            "delta-centred",
            Centred,
            _FIXED,
            "difference",
            "unequal",
            "cohort",
            _OURS,
            _COMMON,
        ),
        SamplerEntry(
            "spread",
            Centred,
            "local-pivotal",
            "difference",
            "unequal",
            "cohort",
            _OURS,
            _SPREAD,
        ),
        SamplerEntry(
            "innovation",
            Centred,
            _FIXED,
            "innovation-damped",
            "unequal",
            "cohort",
            _OURS,
            _OWN,
        ),
        SamplerEntry(
            "balanced",
            Balanced,
            "cube",
            "regression-damped",
            "unequal",
            "known",
            _OURS,
            {"sketch": 0},
        ),
        SamplerEntry(
            "census",
            BalancedByCensus,
            "anticluster",
            "two-phase",
            "unequal",
            "census",
            _OURS,
            {"sketch": 0},
        ),
        SamplerEntry(
            "ocs",
            FedIS,
            "poisson",
            _HT,
            "unequal",
            "oracle",
            _OCS,
        ),  # fedis@poisson, see ``ocs.py``
        SamplerEntry("aocs", ApproximateOCS, None, _HT, "unequal", "oracle", _OCS),
        SamplerEntry(
            "clustered-sampling-1",
            ClusteredBySize,
            None,
            _HT,
            "unequal",
            "sizes",
            _FRABONI,
        ),
        SamplerEntry(
            "clustered-sampling-2",
            ClusteredBySimilarity,
            None,
            _HT,
            "unequal",
            "cohort",
            _FRABONI,
        ),
        SamplerEntry(
            "fedstas",
            FedSTaS,
            _FIXED,
            _HT,
            "unequal",
            "cohort",
            "Slessor et al. 2024 (FedSTaS)",
        ),
        SamplerEntry(
            "osmd",
            MirrorDescent,
            "multinomial",
            _HT,
            "unequal",
            "cohort",
            "Zhao et al. 2025 (OSMD)",
        ),
        SamplerEntry(
            "k-vib",
            VarianceBandit,
            "poisson",
            _HT,
            "unequal",
            "cohort",
            "Zeng et al. 2025 (K-Vib)",
        ),
        SamplerEntry(
            "vrb",
            VarianceBandit,
            "multinomial",
            _HT,
            "unequal",
            "cohort",
            "Borsos, Krause, Levy 2018",
        ),
        SamplerEntry(
            "fedvarp",
            Fixed,
            _FIXED,
            "difference-own",
            "equal",
            "cohort",
            "Jhunjhunwala et al. 2022",
            _EQUAL,
        ),
        SamplerEntry(
            "fedstale",
            Fixed,
            _FIXED,
            "fedstale",
            "equal",
            "cohort",
            "Rodio, Neglia 2024",
            _EQUAL,
        ),
        SamplerEntry(
            "fedau",
            FedAU,
            "simple-random",
            _HT,
            "equal",
            "cohort",
            "Wang, Ji 2024 (FedAU)",
        ),
        SamplerEntry(
            "fedawe",
            FedAWE,
            "simple-random",
            _HT,
            "equal",
            "cohort",
            "Xiang et al. 2024 (FedAWE)",
        ),
        SamplerEntry(
            "mifa",
            NewFirst,
            None,
            "fedvarp",
            "unknown",
            "cohort",
            "Gu et al. 2021",
        ),
        SamplerEntry(
            "client-reshuffling",
            ClientReshuffling,
            None,
            "weighted-mean",
            "unknown",
            "sizes",
            "Malinovsky et al. 2023",
        ),
        SamplerEntry(
            "power-of-choice",
            PowerOfChoice,
            None,
            _MEAN,
            "unknown",
            "losses",
            "Cho, Wang, Joshi 2022",
        ),
        SamplerEntry(
            "active-fl",
            ActiveFL,
            None,
            _MEAN,
            "unknown",
            "cohort",
            "Goetz et al. 2019",
        ),
        SamplerEntry(
            "divfl",
            DivFL,
            None,
            _MEAN,
            "unknown",
            "cohort",
            "Balakrishnan et al. 2022",
        ),
        SamplerEntry(
            "longfed",
            LongFed,
            None,
            "weighted-mean",
            "unknown",
            "cohort",
            "Li et al. 2024 (LongFed)",
        ),
        SamplerEntry(
            "oort",
            Oort,
            None,
            _MEAN,
            "unknown",
            "cohort",
            "Lai et al. 2021",
        ),
        SamplerEntry(
            "hics-fl",
            HicsFL,
            None,
            _MEAN,
            "unknown",
            "cohort",
            "Chen, Vikalo 2024",
        ),
        SamplerEntry(
            "fed-cbs",
            FedCBS,
            None,
            "weighted-mean",
            "unknown",
            "known",
            "Zhang et al. 2023 (Fed-CBS)",
        ),
        SamplerEntry(
            "fedentopt",
            FedEntOpt,
            None,
            "weighted-mean",
            "unknown",
            "known",
            "Lutz et al. 2024 (FedEntOpt)",
        ),
        SamplerEntry(
            "fedgs",
            FedGS,
            None,
            "weighted-mean",
            "unknown",
            "known",
            "Wang, Fan et al. 2023 (FedGS)",
        ),
        SamplerEntry(
            "fedlecc",
            FedLECC,
            None,
            "weighted-mean",
            "unknown",
            "losses",
            "Jimenez-Gutierrez et al. 2026",
        ),
    )
}


def find_sampler(name: str, kind: type[Sampler] | None = None) -> SamplerEntry:
    """The row of a sampler: from the table, of ``FILE.py:CLASS``, or of the user's class
    ``kind``.
    """
    if kind is not None:
        return _own_entry(name, kind)
    if ".py:" in name:
        return _own_entry(name, load_class(name, Sampler))  # type: ignore[type-abstract]
    if name.endswith(".py"):
        raise DeltaflError(f"{name!r} names no class; write {name}:CLASS")
    if "+" in name:
        last = (
            "write settings last and with underscores, such as "
            "uniform@pivotal+local_lr=0.1+average=0.5"
        )
        raise DeltaflError(f"cannot read the settings in {name!r:.200}; {last}")
    return entry("sampler", name, SAMPLERS)


def _own_entry(name: str, kind: type[Sampler]) -> SamplerEntry:
    """The row of a user's class: its own default design, and weights by Horvitz and Thompson if
    it is unbiased.
    """
    # A class without options of its own may inherit those of another.
    inherits = hasattr(kind, "__dataclass_fields__") and not get_annotations(kind)
    if "__dataclass_fields__" not in vars(kind) and not inherits:
        raise DeltaflError(f"{name} is no dataclass; write @dataclass(frozen=True) above it")
    if missing := ", ".join(sorted(kind.__abstractmethods__)):
        raise DeltaflError(
            f"{name} does not define {missing}, as a sampler must; docs/how-to/add-a-method.md "
            "shows how"
        )
    with explained(f"{name} cannot be made", cure="; give every option a default"):
        sampler = kind()
        estimator = _HT if sampler.unbiased else "plain-mean"
    arguments = ("state", "available_m", "n", "rng", "oracle")
    try:
        signature(sampler.open).bind(*arguments)
    except TypeError:
        raise DeltaflError(
            f"{name}.open takes {signature(sampler.open)}; write open(self, "
            f"{', '.join(arguments)}=None)"
        ) from None
    # Only a dataclass field is a default that a label can replace.
    design = vars(sampler).get("design")
    return SamplerEntry(
        name,
        kind,
        design,
        estimator,
        "unequal",
        "oracle" if sampler.needs_oracle else "cohort",
        "-",
    )
