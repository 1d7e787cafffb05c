"""How often a damaged or exchanged file of a Flower federation is used without a word: must be
never.

    python benchmarks/flower_damage.py [PLACES]

Damages a saved state (with the clients' updates in it, or in a file of their own), one file at one
random place each time: a bit is flipped, bytes are overwritten, the file is cut, or exchanged with
that of another round or federation, or an entry of the state is forged under a right checksum.
Then the server loads its state and plays on. *Refused* is one sentence, *harmless* the same results
as without damage; *finite* are other ones of a forged state, *WRONG* other results of any other,
*CRASHED* any other error. An older state in the place of the last one is how a person goes back.
"""

import shutil
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from damage import damage, forge
from deltafl import DeltaflError
from deltafl.federation.clients import ClientInfo
from deltafl.federation.federation import Federation
from deltafl.federation.replies import ClientReply
from deltafl.federation.saved import load, save
from deltafl.flower import DeltaStrategy
from deltafl.scale.named_arrays import named_arrays

KINDS = ("flip", "overwrite", "cut", "other round", "other federation", "forge")


def make(root: Path, mapped: bool) -> Federation:
    strategy = DeltaStrategy(
        "innovation",
        3,
        state_path=root / "state",
        seed=1,
        memory_path=root / "disk" if mapped else None,
    )
    model = {
        "x": np.zeros(40, np.float32),
        "running_mean": np.zeros(3, np.float32),
        "steps": np.array(0),
    }
    return Federation(strategy.rules, model)


def play(federation: Federation, rounds: int, start: int, root: Path | None = None) -> None:
    for number in range(rounds):
        cohort = federation.open(federation.keys)
        rng = np.random.default_rng([start, federation.current.round])
        replies = {
            key: ClientReply(
                {
                    n: (a + rng.normal(size=a.shape)).astype(a.dtype)
                    for n, a in federation.arrays().items()
                }
            )
            for key in federation.keys_of(cohort)
        }
        federation.close(cohort, replies)
        if root is not None:
            save(root / "state", federation)
            shutil.copytree(root, root.with_name(f"{root.name}-{number}"))


def results(root: Path, mapped: bool) -> list[bytes]:
    """What follows from the files: the state and what it gives in two more rounds."""
    federation = make(root, mapped)
    assert load(root / "state", federation)
    rows = federation.current.control.control.own.control_md
    before = [np.asarray(rows[client]).tobytes() for client in range(len(federation.keys))]
    play(federation, 2, 9)
    if not np.isfinite(federation.params_d).all():
        raise ArithmeticError("the model is not finite")
    federation.scales.known.pop("", None)
    return [*before, repr((federation.keys, federation.scales.known)).encode()] + [
        array.tobytes()
        for name, array in named_arrays(federation.current)
        if "control_md" not in name
    ]


def judged(action: Any, expected: list[bytes]) -> str:
    try:
        with np.errstate(all="ignore"):
            return "harmless" if action() == expected else "WRONG"
    except DeltaflError:
        return "refused"
    except Exception as error:
        return f"CRASHED {type(error).__name__}: {error}"[:100]


def main(places: int) -> None:
    rng = np.random.default_rng(0)
    counts = Counter[tuple[str, str, str]]()
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for mapped in (False, True):
            for start, label in ((1, "own"), (2, "other")):
                root = top / f"{mapped}" / label / "now"
                federation = make(root, mapped)
                federation.admit({f"client:{i}": ClientInfo(10 + 5 * i) for i in range(6)})
                play(federation, 5, start, root)
            own = top / f"{mapped}" / "own"
            place = own / "now"
            shutil.copytree(place, top / "backup")
            expected = results(place, mapped)
            shutil.rmtree(place)
            (top / "backup").rename(place)
            for number in range(places):
                kind = KINDS[number % len(KINDS)]
                backup = shutil.copytree(place, top / "backup")
                files = [
                    p
                    for p in sorted(place.rglob("*"))
                    if p.is_file() and p.suffix != ".lock" and p.stat().st_size
                ]
                file = files[rng.integers(len(files))]
                twin = (
                    top / f"{mapped}" / "other" / "now"
                    if kind == "other federation"
                    else own / "now-2"
                )
                names = list(twin.rglob(file.name))
                if kind == "forge":
                    file = place / "state" / "federation.safetensors"
                    forge(file, rng)
                else:
                    other = names[0].read_bytes() if names else b""
                    damage(file, kind if names else "cut", other, rng)
                same = (
                    kind == "other round" and file.name == "federation.safetensors" and not mapped
                )
                outcome = judged(partial(results, place, mapped), expected)
                if same and outcome == "WRONG":
                    outcome = "went back"  # that is how a person goes back
                if kind == "forge" and outcome == "WRONG":
                    outcome = "finite"  # ``results`` has looked
                counts[
                    f"state, updates in {'a file' if mapped else 'the state'}: {file.name}",
                    kind,
                    outcome,
                ] += 1
                shutil.rmtree(place)
                backup.rename(place)
    for (what, kind, outcome), count in sorted(counts.items()):
        print(f"{what:60} {kind:18} {outcome:10} {count}")
    total = Counter[str]()
    for (_, _, outcome), count in counts.items():
        total[outcome] += count
    print(", ".join(f"{outcome} {count}" for outcome, count in total.most_common()))
    if any(outcome.isupper() or outcome.startswith("CRASHED") for outcome in total):
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 250)
