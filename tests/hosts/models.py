"""Kinds of models, what each of them sends, and their rounds without any host or ``ModelParts``.

Client i has eight rows of its own and takes two SGD steps, so many times its own steps, and the
drift.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from fnmatch import fnmatch
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from deltafl import Population, Reports, close_round, init_round, make_plan, open_round
from deltafl.federation.exchange import Correction
from deltafl.model.arrays import Arrays
from deltafl.model.parts import split
from deltafl.samplers.census import output_layer
from deltafl.types import Params

from .rounds import SEED, N, Take, Work

M = 6
ROUNDS = 4


class Kind(NamedTuple):
    """A model; ``trained`` and ``averaged`` are patterns of the names that the core is to have."""

    make: Callable[[], Any]
    loss: Callable[[Any, torch.Generator], torch.Tensor]
    settings: dict[str, Any]
    trained: tuple[str, ...]
    averaged: tuple[str, ...] = ()
    #: Sent, but neither trained nor averaged; copies of one tensor: the further name -> the first.
    constant: tuple[str, ...] = ()
    same_as: Mapping[str, str] = MappingProxyType({})

    def names(self, arrays: Arrays, *patterns: str) -> list[str]:
        return [name for name in arrays if any(fnmatch(name, pattern) for pattern in patterns)]

    def sent(self, arrays: Arrays) -> list[str]:
        return self.names(arrays, *self.trained, *self.averaged, *self.constant, *self.same_as)


def table_loss(model: Any, rng: torch.Generator) -> torch.Tensor:
    x = torch.randn(8, 4, generator=rng)
    y = torch.randint(3, (8,), generator=rng)
    return nn.functional.cross_entropy(model(x), y)


def text_loss(model: Any, rng: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(11, (8, 6), generator=rng)
    scores = model(tokens)
    scores = getattr(scores, "logits", scores)
    return nn.functional.cross_entropy(scores[:, :-1].reshape(-1, 11), tokens[:, 1:].reshape(-1))


def with_batch_norm() -> Any:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def tied() -> Any:
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11, bias=False))
    model[2].weight = model[0].weight
    return model


class Masked(nn.Module):
    """An attention that sees what is before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 11)
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        return self.out(self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0])


class Scaled(nn.Module):
    """A number, and an array without numbers, as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Any) -> Any:
        return self.scale * self.body(x)


def with_adapters() -> Any:
    """A GPT-2 of random weights."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=6, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    for name, part in model.named_parameters():
        if "lora_B" in name:  # begins as 0, where A has no gradient
            nn.init.normal_(part, std=0.1)
    return model


EVERYTHING = ("*weight*", "*bias*")
KINDS = {
    "BatchNorm": Kind(
        with_batch_norm,
        table_loss,
        {},
        trained=("[013].weight", "[013].bias"),
        averaged=("1.running_*", "1.num_batches_tracked"),
    ),
    "tied weights": Kind(
        tied,
        text_loss,
        {"tied": True},
        trained=("[01].*",),
        same_as={"2.weight": "0.weight"},
    ),
    "tied weights of which one is named": Kind(
        tied,
        text_loss,
        {"tied": True, "trainable": ["2.weight"]},
        trained=("0.*",),
        same_as={"2.weight": "0.weight"},
    ),
    "cumulative BatchNorm": Kind(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)),
        table_loss,
        {},
        trained=("[012].weight", "[012].bias"),
        averaged=("1.running_*", "1.num_batches_tracked"),
    ),
    "spectral norm": Kind(
        lambda: nn.Sequential(spectral_norm(nn.Linear(4, 5)), nn.Linear(5, 3)),
        table_loss,
        {"buffers": ["*._[uv]"]},
        trained=("*original", *EVERYTHING[1:], "1.weight"),
        averaged=("*._[uv]",),
    ),
    "scalars and empty arrays": Kind(Scaled, table_loss, {}, trained=("*",)),
    "masked attention": Kind(
        Masked,
        text_loss,
        {"buffers": ["mask"]},
        trained=EVERYTHING,
        constant=("mask",),
    ),
    "LoRA": Kind(with_adapters, text_loss, {"trainable": "lora"}, trained=("*lora_*",)),
    "FedBN": Kind(
        with_batch_norm,
        table_loss,
        {"local": ["1.*"]},
        trained=("[03].weight", "[03].bias"),
    ),
    "personal head": Kind(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        table_loss,
        {"local": ["2.*"]},
        trained=("0.*",),
    ),
    "frozen layers": Kind(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        table_loss,
        {"trainable": ["2.*"]},
        trained=("2.*",),
    ),
}


def initial(kind: Kind) -> Any:
    torch.manual_seed(0)
    return kind.make()


def arrays_of(model: Any) -> Arrays:
    return {name: part.detach().numpy().copy() for name, part in model.state_dict().items()}


class Clients:
    """The clients of a run; each has a module, which keeps what it does not send."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.start = initial(kind)
        self.own = {client: deepcopy(self.start) for client in range(M)}

    def work(self, client: int, fault: str, sent: Arrays, take: Take) -> Arrays:
        """What a client sends after training."""
        kind = self.kind
        model = self.own[client]
        correction = take()
        load(model, sent)
        trained = kind.names(sent, *kind.trained)
        named = dict(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for part in model.parameters():
            part.requires_grad_(True)
        for name in named.keys() - set(trained) - set(self.local(model)):
            named[name].requires_grad_(False)  # as the user's own code does
        for step in range(2):
            optimizer.zero_grad()
            loss: Any = kind.loss(model, torch.Generator().manual_seed(10 * client + step))
            loss.backward()
            optimizer.step()
        reply = {name: array for name, array in arrays_of(model).items() if name in sent}
        for name in trained:
            change = np.float32(correction.step_factor) * (reply[name] - sent[name])
            moved = sent[name] + change + correction.get(name, np.float32(0))
            reply[name] = np.asarray(moved)
        for name, first in kind.same_as.items():
            reply[name] = reply[first]
        return reply

    def local(self, model: Any) -> list[str]:
        return self.kind.names(arrays_of(model), *self.kind.settings.get("local", ()))


def load(model: Any, arrays: Arrays) -> None:
    state = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    model.load_state_dict(state, strict=False)


@cache
def core(label: str, name_of_kind: str) -> tuple[list[Arrays], Clients, int]:
    """The models after each round, by ``open_round`` and ``close_round``; the length of their
    vector.
    """
    kind = KINDS[name_of_kind]
    clients = Clients(kind)
    model = arrays_of(clients.start)
    trained = kind.names(model, *kind.trained)
    averaged = kind.names(model, *kind.averaged)
    shapes = {name: model[name].shape for name in trained}
    plan = make_plan(label, Population.from_sizes([10 + 5 * i for i in range(M)]), N, seed=SEED)
    work: Work = clients.work

    def flat(arrays: Arrays) -> Params:
        return np.concatenate([arrays[name].ravel() for name in trained])

    def reply_of(client: int, own: Correction) -> Any:
        return work(client, "", {name: model[name] for name in kind.sent(model)}, lambda: own)

    start_d = flat(model)
    if plan.census is not None:
        layer = output_layer(list(shapes.values()))
        own = Correction({}, plan.step_factor)
        first = [flat(reply_of(i, own)) - start_d for i in range(M)]
        plan = plan.with_census([plan.census.answer(update_d, layer) for update_d in first])
    state = init_round(plan, start_d)
    model = put(kind, model, split(state.params_d, shapes))
    models = [model] * state.round
    while state.round < ROUNDS:
        cohort = open_round(plan, state)
        n = len(cohort.client_n)
        drift = plan.drifts(state, cohort.client_n)
        drift_nd = np.broadcast_to(np.float32(0) if drift is None else drift, (n, len(start_d)))
        replies = [
            reply_of(i, Correction(split(drift_d, shapes), plan.step_factor))
            for i, drift_d in zip(cohort.client_n.tolist(), drift_nd, strict=True)
        ]
        coef_n = plan.collect_replies(state, cohort, np.ones(n, bool)).coef_n
        share_n = coef_n / coef_n.sum()
        updates = [flat(reply) - flat(model) for reply in replies]
        updates = [*plan.as_sent(cohort, np.array(updates))]
        state, _ = close_round(plan, state, cohort, updates, Reports.make(n, loss=[1.0] * n))
        new = split(state.params_d, shapes)
        for name in averaged:
            mean = sum(
                share * reply[name].astype(float)
                for share, reply in zip(share_n, replies, strict=True)
            )
            is_float = model[name].dtype.kind == "f"
            new[name] = np.asarray(mean if is_float else np.rint(mean)).astype(model[name].dtype)
        model = put(kind, model, new)
        models.append(model)
    return models, clients, len(start_d)


def put(kind: Kind, model: Arrays, new: Arrays) -> Arrays:
    following = {**model, **new}
    return {**following, **{name: following[first] for name, first in kind.same_as.items()}}
