"""Is it about weather? A transformer reads sentences: ``python examples/text_transformer.py``."""

import numpy as np
from torch import nn

import deltafl
from deltafl.tasks import Dataset, Task, cross_entropy


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 32), layer, nn.Flatten(), nn.Linear(64, 2))


def texts(seed: int) -> Task:
    rng = np.random.default_rng(seed)  # sentences of an article (0, 1, 2) and a noun (3, ..., 10)
    x = np.stack([rng.integers(0, 3, 600), rng.integers(3, 11, 600)], axis=1)
    y = (x[:, 1] < 7).astype(np.int64)  # rain, snow, wind, sun; not train, tea, cat, piano
    data = Dataset("sentences", x[:500], y[:500], x[500:], y[500:], num_classes=2)
    return Task("text", data, np.split(np.arange(500), 20), transformer, cross_entropy, tokens=True)


if __name__ == "__main__":
    print(deltafl.compare(texts, ["full", "uniform"], sample=5, rounds=10, seeds=1))
