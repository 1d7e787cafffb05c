"""What ``import deltafl`` gives, and what it costs."""

import importlib
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import deltafl

PUBLIC = """
DESIGNS ESTIMATORS SAMPLERS Accumulator Adaptive Broadcast Census Centred ClusterIS Cohort Comparison
ControlValue ControlVariate Delta DeltaflError Design DifferentialPrivacy Estimator FedExP FedIS FedPracIS Fixed Full
KnownUpdates LearnedCoefficient Metric MissingExtraError Momentum Moves Oracle Plan Population PowerOfChoice PracDelta RejectedReply
Replies Reports RoundInfo RoundState RunFacts Sampler ServerOptimizer ServerPart Sgd Step Twin broadcast close_round
close_round_from_sum compare corrected_steps draw_cohort flatten inclusion_probabilities init_round load load_state
make_plan make_sampler make_server_optimizer open_round plan_for recommend resize_state save_state probabilities_for_budget stream tune unflatten with_floor
"""
HEAVY = {"torch", "scipy", "sklearn", "matplotlib", "typer", "rich", "pydantic", "flwr", "pandas"}


DESIGNS = """
systematic pivotal local-pivotal cube anticluster ordered-pivotal simple-random poisson multinomial successive
"""
ESTIMATORS = """
horvitz-thompson hajek plain-mean weighted-mean difference difference-own innovation regression difference-damped
difference-own-damped innovation-damped regression-damped two-phase fedstale fedvarp
"""
SAMPLERS = """
full fedavg uniform md md-fixed fedis fedpracis delta pracdelta cluster-is cluster-is-oracle delta-centred spread
innovation balanced census ocs aocs clustered-sampling-1 clustered-sampling-2 osmd k-vib vrb fedvarp fedstale fedau fedawe mifa
power-of-choice active-fl divfl longfed oort hics-fl fed-cbs fedentopt fedgs fedlecc
"""


def test_public_names_are_pinned() -> None:
    assert sorted(deltafl.__all__) == sorted(PUBLIC.split())
    # What a label may name stays; a new row needs no line here.
    assert set(DESIGNS.split()) <= set(deltafl.DESIGNS)
    assert set(ESTIMATORS.split()) <= set(deltafl.ESTIMATORS)
    assert set(SAMPLERS.split()) <= set(deltafl.SAMPLERS)


def test_importing_needs_numpy_alone() -> None:
    """In a fresh process: neither the core nor the check for samplers of one's own loads
    anything heavy.
    """
    imports = "import sys, deltafl, deltafl.audit.conformance, deltafl.designs.exact"
    code = f"{imports}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "numpy" in loaded
    assert HEAVY & set(loaded) == set()


def test_public_objects_are_documented() -> None:
    undocumented = [
        name
        for name in deltafl.__all__
        if not name.isupper() and not getattr(deltafl, name).__doc__
    ]
    assert undocumented == []


def test_errors_are_value_errors() -> None:
    assert issubclass(deltafl.DeltaflError, ValueError)
    error = deltafl.MissingExtraError("torch", "sim")
    assert isinstance(error, deltafl.DeltaflError)
    assert str(error).startswith("this needs the package 'torch': pip install 'deltafl[sim]', and")
    assert "https://download.pytorch.org/whl/cpu" in str(error)


def test_a_host_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    monkeypatch.delitem(sys.modules, "deltafl.pfl", raising=False)
    with pytest.raises(
        deltafl.MissingExtraError, match=r"needs the package 'pfl': pip install 'deltafl\[pfl\]'"
    ):
        importlib.import_module("deltafl.pfl")


def test_everything_is_in_the_wheel() -> None:
    """What is not Python goes into a wheel only if the project file names it; an editable
    install hides that.
    """
    root = Path(deltafl.__file__).parent
    project = tomllib.loads((root.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    named = {
        path
        for pattern in project["tool"]["setuptools"]["package-data"]["deltafl"]
        for path in root.glob(pattern)
    }
    others = {
        path for path in root.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    assert others == named
    assert others


def test_no_public_name_is_that_of_a_module_beside_it() -> None:
    """Whoever imports the module first would get it in place of the name."""
    root = Path(deltafl.__file__).parent
    for stub in root.rglob("__init__.pyi"):
        lines = stub.read_text().splitlines()
        public = {
            line.split()[-1]
            for line in lines
            if line.startswith("from .") and "from . " not in line
        }
        beside = {path.stem for path in stub.parent.iterdir() if path.suffix in ("", ".py")}
        assert not public & beside, stub
