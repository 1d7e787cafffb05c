"""What ``import deltafl`` gives, and what it costs."""

import subprocess
import sys
import tomllib
from pathlib import Path

import deltafl

PUBLIC = {
    *("DESIGNS", "ESTIMATORS", "SAMPLERS"),
    *(
        "Adaptive",
        "Broadcast",
        "Centred",
        "ClientMemory",
        "ClusterIS",
        "ControlValue",
        "ControlVariate",
        "Cohort",
        "Delta",
        "DeltaflError",
        "Design",
        "Estimator",
        "FedIS",
        "FedPracIS",
    ),
    *(
        "Fixed",
        "Full",
        "KnownUpdates",
        "MissingExtraError",
        "Momentum",
        "Oracle",
        "Plan",
        "Population",
        "PowerOfChoice",
        "PracDelta",
    ),
    *("RejectedReply", "RemoteReply", "Replies", "Reports", "RoundInfo", "RoundState", "RunFacts", "Sampler"),
    *("ServerOptimizer", "Sgd"),
    *("Accumulator", "load_state", "save_state"),
    *("broadcast", "close_round", "draw_cohort", "inclusion_probabilities", "init_round", "make_plan", "make_sampler"),
    *("make_server_optimizer", "open_round", "stream", "with_floor"),
}
HEAVY = {"torch", "scipy", "sklearn", "matplotlib", "typer", "rich", "pydantic", "flwr", "pandas"}


def test_public_names_are_pinned() -> None:
    assert set(deltafl.__all__) == PUBLIC
    assert list(deltafl.__all__) == sorted(
        deltafl.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    assert all(hasattr(deltafl, name) for name in PUBLIC)


def test_names_in_tables_are_pinned() -> None:
    designs = [
        "systematic",
        "pivotal",
        "local-pivotal",
        "cube",
        "ordered-pivotal",
        "simple-random",
        "poisson",
        "multinomial",
        "successive",
    ]
    assert list(deltafl.DESIGNS) == designs
    estimators = [
        "horvitz-thompson",
        "hajek",
        "plain-mean",
        "weighted-mean",
        "difference",
        "difference-own",
        "innovation",
    ]
    estimators += [
        "regression",
        "difference-damped",
        "difference-own-damped",
        "innovation-damped",
        "regression-damped",
        "fedstale",
        "fedvarp",
    ]
    assert list(deltafl.ESTIMATORS) == estimators
    samplers = ["full", "fedavg", "uniform", "md", "md-fixed", "fedis", "fedpracis", "delta", "pracdelta"]
    samplers += ["cluster-is", "cluster-is-oracle", "delta-centred", "spread", "innovation", "balanced"]
    unbiased_rivals = ["ocs", "aocs", "clustered-sampling-1", "clustered-sampling-2", "osmd", "k-vib", "vrb"]
    others = ["fedvarp", "fedstale", "mifa", "power-of-choice", "active-fl", "divfl", "oort", "hics-fl"]
    others += ["fed-cbs"]
    assert list(deltafl.SAMPLERS) == [*samplers, *unbiased_rivals, *others]


def test_importing_needs_numpy_alone() -> None:
    """In a fresh process: neither the core nor the check for samplers of one's own loads anything heavy."""
    imports = "import sys, deltafl, deltafl.audit.conformance, deltafl.designs.exact"
    code = f"{imports}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in loaded
    assert HEAVY & set(loaded) == set()


def test_public_objects_are_documented() -> None:
    undocumented = [name for name in PUBLIC if not name.isupper() and not getattr(deltafl, name).__doc__]
    assert undocumented == []


def test_errors_are_value_errors() -> None:
    assert issubclass(deltafl.DeltaflError, ValueError)
    error = deltafl.MissingExtraError("torch", "sim")
    assert isinstance(error, deltafl.DeltaflError)
    assert str(error) == "this needs the package 'torch': pip install 'deltafl[sim]'"


def test_everything_is_in_the_wheel() -> None:
    """What is not Python goes into a wheel only if the project file names it; an editable install hides that."""
    root = Path(deltafl.__file__).parent
    project = tomllib.loads((root.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    named = {
        path for pattern in project["tool"]["setuptools"]["package-data"]["deltafl"] for path in root.glob(pattern)
    }
    others = {path for path in root.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
    assert others == named
    assert others
