"""Hospitals where few patients fall ill again, judged by AUC: ``python examples/hospitals.py``."""

import numpy as np
import pandas as pd

import deltafl

if __name__ == "__main__":
    rng = np.random.default_rng(0)
    hospital = (30 * rng.random(4000) ** 2).astype(int)  # the first are the largest
    age = rng.normal(40 + hospital, 10)
    pressure = rng.normal(130, 15, size=4000)
    risk = 1 / (1 + np.exp(13 - 0.1 * age - 0.03 * pressure))
    outcome = np.where(rng.random(4000) < risk, "ill again", "well")
    visits = pd.DataFrame({"age": age, "pressure": pressure, "outcome": outcome})
    visits["hospital"] = np.char.add("hospital ", hospital.astype(str))
    print(visits["outcome"].value_counts(normalize=True))

    who = deltafl.compare(
        visits, "uniform,full,census", seeds=3, rounds=20,
        label="outcome", column="hospital", metric="roc_auc", local_lr=0.02,
    )  # fmt: skip
    print(who)
