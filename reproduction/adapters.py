"""The base of ``roles-lora`` and its adapters. ``python -m reproduction.adapters`` trains the base
again: two minutes of one core, the same bits on the same processor.
"""

import io
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional

from deltafl.store import write_atomically

from .data import TINY_ALPHABET
from .reading import BASE, LENGTH, READ, texts, tokens_of

WIDTH = 64
HEADS = 4
LAYERS = 2
RANK = 4
STEPS = 4000
BATCH = 32


class Layer(nn.Module):
    """Causal attention, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm_of_mixed = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        z = self.norm(x)
        query, key, value = (
            part(z).view(heads).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(x.shape))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm_of_mixed(x))))
        return out


class Characters(nn.Module):
    """Logits of the next character after each of (N, LENGTH) tokens: (N, characters, LENGTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(len(TINY_ALPHABET), WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(TINY_ALPHABET))

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        x = self.token(token) + self.place.weight
        out: torch.Tensor = self.head(self.norm(self.layers(x))).transpose(1, 2)
        return out


def train_base(text: str, steps: int = STEPS) -> Characters:
    """The base after steps of Adam on random pieces of a text; the same every time."""
    token_k = torch.from_numpy(tokens_of(text)).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Characters()
        adam = torch.optim.Adam(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
        for _ in range(steps):
            start_n1 = torch.randint(len(token_k) - LENGTH, (BATCH, 1))
            piece_nk = token_k[start_n1 + torch.arange(LENGTH + 1)]
            loss = functional.cross_entropy(model(piece_nk[:, :-1]), piece_nk[:, 1:])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            schedule.step()
    return model


def write_base(path: Path, model: nn.Module) -> None:
    """In half precision, of which each run reads the same numbers."""
    content = io.BytesIO()
    arrays = {name: array.numpy().astype(np.float16) for name, array in model.state_dict().items()}
    np.savez(content, **arrays)
    write_atomically(path, content.getvalue())


def adapted(path: Path) -> nn.Module:
    """The base with LoRA beside the attention and the perceptrons, which alone is trained."""
    model = Characters()
    with np.load(path, allow_pickle=False) as arrays:
        state = {name: torch.from_numpy(arrays[name]).float() for name in arrays.files}
    model.load_state_dict(state)
    lora = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=["query", "value", "mix", "up", "down"]
    )
    return inject_adapter_in_model(lora, model)


def main() -> None:
    torch.set_num_threads(1)
    write_base(BASE, train_base("".join(texts()[:READ])))


if __name__ == "__main__":
    main()
