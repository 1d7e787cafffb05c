"""Models that are more than one vector: in the simulator the answer of an own loop, and of a plain
twin of torch alone; the same bytes after a resume and with two workers.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import deltafl
from deltafl.errors import DeltaflError
from deltafl.model.arrays import NamedArrays
from deltafl.model.parts import ModelParts
from deltafl.model.vectors import flatten, mean_rest, unflatten
from deltafl.simulation import RunDirectory, RunSettings, export_model, make_settings, run_single
from deltafl.simulation.engine import Engine
from deltafl.simulation.runner import new_model
from deltafl.simulation.training.route import Route
from deltafl.simulation.training.serial import LocalWork, minibatches, train_serial
from deltafl.streams import stream
from deltafl.tasks import Dataset, Task
from tools.simulation import StopError, quiet, stop_after

#: Rows of the clients: one of them has a last minibatch of one example.
SIZES = (9, 14, 6, 11)
RATE = 0.1
BATCH = 8
ROUNDS = 3


def images(shape: tuple[int, ...] = (1, 8, 8), tokens: int = 0) -> Dataset:
    rng = np.random.default_rng(0)
    m = sum(SIZES)
    if tokens:
        x = rng.integers(0, tokens, (m + 20, *shape))
        y = x[:, 0] % 3
    else:
        x = rng.normal(2, 3, (m + 20, *shape)).astype(np.float32)
        y = np.digitize(x.reshape(len(x), -1).mean(axis=1), [1.8, 2.2])
    return Dataset("random", x[:m], y[:m], x[m:], y[m:], 3)


class Block(nn.Module):
    """A residual block with batch normalisation, or any other norm."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = norm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.bn(self.conv(x)))


def resnet(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    named: list[tuple[str, nn.Module]] = [
        ("conv", nn.Conv2d(1, 4, 3, bias=False)),
        ("bn", norm(4)),
        ("relu", nn.ReLU()),
        ("block", Block(4, norm)),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flat", nn.Flatten()),
        ("head", nn.Linear(4, 3)),
    ]
    return nn.Sequential(OrderedDict(named))


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 3))


def group_resnet() -> nn.Module:
    return resnet(lambda channels: nn.GroupNorm(2, channels))


def normed_mlp() -> nn.Module:
    """A channel of a minibatch of one example has one value."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Attention(nn.Module):
    """One head over tokens, which look back alone: a mask of -inf; the output is the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 7, bias=False)
        if tied:
            self.out.weight = self.embed.weight
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        weight = torch.softmax(h @ h.transpose(1, 2) + self.mask, dim=-1)
        logits: torch.Tensor = self.out(torch.tanh(self.mix(weight @ h)).mean(dim=1))
        return logits[:, :3]


def with_lora(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    small: dict[str, Any] = {"vocab_size": 11, "num_labels": 3, "pad_token_id": 0}
    is_gpt2 = kind == "gpt2"
    if is_gpt2:
        config = transformers.GPT2Config(
            n_embd=8, n_layer=2, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2, **small
        )
        model = transformers.GPT2ForSequenceClassification(config)
        target = ["c_attn"]
    else:
        config = transformers.DistilBertConfig(
            dim=8, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=8, **small
        )
        model = transformers.DistilBertForSequenceClassification(config)
        target = ["q_lin", "v_lin"]
    lora = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=target, fan_in_fan_out=is_gpt2, lora_dropout=0.0
    )
    return Logits(peft.get_peft_model(model, lora))


class Logits(nn.Module):
    """The logits of a model of transformers, without random layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=x).logits
        return logits


def gpt2() -> nn.Module:
    return with_lora("gpt2")


def distilbert() -> nn.Module:
    return with_lora("distilbert")


class Moving(nn.Module):
    """Layers with buffers that a forward pass counts, moves in place and puts others in place of;
    a parameter that is a buffer, too.
    """

    steps: torch.Tensor
    seen: torch.Tensor
    centre: torch.Tensor
    same_centre: torch.Tensor
    spread: torch.Tensor
    turn: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        self.head = nn.Linear(8, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int32))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("centre", torch.zeros(8))
        self.register_buffer("same_centre", self.centre)
        self.register_buffer("spread", torch.ones(8))
        self.register_buffer("same_head", self.head.weight)
        self.register_buffer("turn", torch.ones(8, dtype=torch.complex64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x) * self.turn.real
        if self.training:
            self.steps += 1
            self.seen[0] = True
            self.centre.lerp_(h.detach().mean(0), 0.1)
            self.spread = 0.9 * self.spread + 0.1 * h.detach().abs().mean(0)
        logits: torch.Tensor = self.head((h - self.same_centre) / self.spread)
        return logits


class Lists(nn.Module):
    """Parameters in lists and dicts; a number, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.randn(64, 8) / 8, torch.randn(8, 3) / 8])
        self.more = nn.ParameterDict({"scale": torch.tensor(1.5), "none": torch.zeros(0, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x.flatten(1) @ self.layers[0])
        logits: torch.Tensor = (h @ self.layers[1]) * self.more["scale"]
        return logits


class EncoderDecoder(nn.Module):
    """One tensor is both embeddings and the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(7, 6)
        self.decoder = nn.Embedding(7, 6)
        self.out = nn.Linear(6, 7, bias=False)
        self.decoder.weight = self.out.weight = self.encoder.weight
        self.mix = nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.mix(self.encoder(x), self.decoder(x)).mean(dim=1))
        return logits[:, :3]


def instance_resnet() -> nn.Module:
    return resnet(lambda channels: nn.InstanceNorm2d(channels, track_running_stats=True))


def cumulative_resnet() -> nn.Module:
    return resnet(lambda channels: nn.BatchNorm2d(channels, momentum=None))


def layers(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *middle, nn.Linear(8, 3))


def spectral() -> nn.Module:
    return layers(spectral_norm(nn.Linear(8, 8)), weight_norm(nn.Linear(8, 8)))


def shared_layer() -> nn.Module:
    layer = nn.BatchNorm1d(8)
    return layers(layer, nn.Tanh(), layer)


class Limited(nn.Linear):
    """Each pass puts rows of limited norm in the place of its weight, as models of EEG do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.2)
        return super().forward(x)


def limited() -> nn.Module:
    return layers(nn.Tanh(), Limited(8, 8))


def limited_and_normed() -> nn.Module:
    return layers(nn.BatchNorm1d(8), Limited(8, 8))


def half_base() -> nn.Module:
    return layers(Half(), nn.Tanh())


class Half(nn.Module):
    """A layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x.bfloat16())
        return y.float()


def task_of(make_model: Callable[[], nn.Module], **more: Any) -> Task:
    data = images()
    if make_model in (Attention, EncoderDecoder, gpt2, distilbert):
        data = images((5,), tokens=7)
        more |= {"tokens": True}
    rows = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return Task("random", data, rows, make_model, cross_entropy, **more)


#: What is tried in every way: the model, what is local, what is trained.
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "batch norm": (resnet, {}),
    "group norm": (group_resnet, {}),
    "batch norm of one value": (normed_mlp, {}),
    "FedBN": (resnet, {"local": ["*bn*"]}),
    "SiloBN": (resnet, {"local": ["*running_*", "*num_batches*"]}),
    "personal head": (resnet, {"local": ["head*"]}),
    "body alone": (resnet, {"trainable": ["block*", "head*"]}),
    "mask and tied": (Attention, {}),
    "tied, one name trained": (Attention, {"trainable": ["out*", "mix*"]}),
    "tied, one name local": (Attention, {"local": ["out*"]}),
    "encoder and decoder": (EncoderDecoder, {}),
    "cumulative batch norm": (cumulative_resnet, {}),
    "instance norm": (instance_resnet, {}),
    "spectral and weight norm": (spectral, {}),
    "a layer used twice": (shared_layer, {}),
    "limited norms": (limited, {}),
    "limited norms of a local layer": (limited_and_normed, {"local": ["3.*"]}),
    "moving buffers": (Moving, {}),
    "moving buffers, local": (Moving, {"local": ["s*", "centre"], "trainable": ["body*", "s*"]}),
    "lists of parameters": (Lists, {}),
    "base in bfloat16": (half_base, {"trainable": ["[14].*"]}),
    "local in bfloat16": (half_base, {"local": ["2.*"]}),
    "LoRA of GPT-2": (gpt2, {"trainable": "lora"}),
    "LoRA of DistilBERT": (distilbert, {"trainable": "lora"}),
}
WORK = LocalWork(lr=RATE, epochs=1, batch_size=BATCH)


def trained(model: Any, task: Task, round: int, client: int, seed: int) -> Any:
    """A client's local training, as a user writes it."""
    model = copy.deepcopy(model).train()
    if task.trainable == ["block*", "head*"]:
        model.bn.eval()  # statistics that are frozen are used as they are
    parts = task.parts_of(model)
    for name, param in model.named_parameters():
        param.requires_grad_(name in parts.names("trained", "local"))
    rows = np.asarray(task.client_rows[client])
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, RATE)
    for batch in minibatches(len(rows), WORK, stream(seed, "batches", round, client)):
        x = torch.from_numpy(task.dataset.train_x[rows[batch]])
        y = torch.from_numpy(task.dataset.train_y[rows[batch]])
        optimizer.zero_grad()
        layers = [part for part in model.modules() if isinstance(part, nn.BatchNorm1d)]
        for layer in layers:
            layer.train(len(batch) > 1)
        task.loss(model(x), y).backward()
        optimizer.step()
    return model


def accuracies(models: Sequence[nn.Module], task: Task, owner_e: Any) -> tuple[float, float]:
    """Accuracy and loss of the test examples, each judged by its model."""
    x = torch.from_numpy(task.dataset.test_x)
    y = torch.from_numpy(task.dataset.test_y)
    outputs = []
    for place, owner in enumerate(owner_e):
        with torch.no_grad():
            outputs.append(copy.deepcopy(models[owner]).eval()(x[place : place + 1]))
    output = torch.cat(outputs)
    right = (output.argmax(dim=1) == y).float().mean()
    return float(right), float(cross_entropy(output, y))


def own_loop(task: Task, label: str, sample: int, seed: int) -> list[dict[str, float]]:
    """Rounds with flatten, unflatten and mean_rest; local arrays in a list."""
    how = {"local": task.local, "trainable": task.trainable}
    model = new_model(task.make_model, seed)
    named = NamedArrays.of(model)
    parts = ModelParts.of(named, **how)
    sent = parts.rest({name: array.copy() for name, array in named.arrays.items()})
    own_m = [{name: sent[name] for name in parts.names("local")} for _ in SIZES]
    plan = deltafl.make_plan(label, list(SIZES), sample, seed=seed)
    state = deltafl.init_round(plan, flatten(model, **how))
    owner_e = task.test_clients if task.test_clients is not None else [0] * 20

    def model_of(client: int) -> nn.Module:
        arrays = {**sent, **own_m[client]}
        whole: nn.Module = unflatten(state.params_d, model, **how)
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        whole.load_state_dict(tensors, strict=False)
        return whole

    found = []
    for round in range(ROUNDS):
        cohort = deltafl.open_round(plan, state)
        locals_n = [trained(model_of(i), task, round, i, seed) for i in cohort.client_n.tolist()]
        update_nd = [flatten(local, **how) - state.params_d for local in locals_n]
        coef_n = plan.collect_replies(state, cohort).coef_n
        state, _ = deltafl.close_round(plan, state, cohort, update_nd)
        received = [NamedArrays.of(local).arrays for local in locals_n]
        sent = mean_rest(parts, sent, received, coef_n)
        for client, arrays in zip(cohort.client_n.tolist(), received, strict=True):
            own_m[client] = {name: arrays[name].copy() for name in own_m[client]}
        accuracy, loss = accuracies([model_of(i) for i in range(len(SIZES))], task, owner_e)
        found.append({"accuracy": accuracy, "loss": loss})
    return found


def settings_of(task: Any, **more: Any) -> dict[str, Any]:
    own = {"sample": 4, "rounds": ROUNDS, "batch_size": BATCH, "local_lr": RATE}
    return {"task": task, "local_epochs": 1, **own, **more}


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")  # of transformers
@pytest.mark.parametrize(
    ("name", "label", "sample"),
    [
        *((name, "uniform", 2) for name in MODELS),
        *((name, "full", 4) for name in ("FedBN", "mask and tied", "LoRA of GPT-2")),
    ],
)
def test_a_comparison_is_an_own_loop(name: str, label: str, sample: int) -> None:
    make_model, parts = MODELS[name]
    task = task_of(make_model, **parts)
    if parts.get("local"):
        task = replace(task, test_clients=np.arange(20) % 4)
    result = deltafl.compare(
        **settings_of(lambda: task, sample=sample), samplers=[label], seeds=1, processes=1
    )
    runs = result.runs()
    own = own_loop(task, label, sample, int(runs["seed"].iloc[0]))
    for row in own:
        assert np.isfinite(row["loss"])
    last = runs[runs["round"] > 0]
    np.testing.assert_allclose(last["loss"], [row["loss"] for row in own], rtol=1e-6)
    np.testing.assert_allclose(last["accuracy"], [row["accuracy"] for row in own], atol=1e-6)


def plain_fedavg(task: Task, seed: int) -> float:
    """The accuracy of FedAvg of all clients by data size, in torch alone: a mean of state dicts."""
    model = new_model(task.make_model, seed)
    for round in range(ROUNDS):
        states = [
            trained(model, task, round, client, seed).state_dict() for client in range(len(SIZES))
        ]
        mean = {}
        for name, tensor in model.state_dict().items():
            total = sum(
                size / sum(SIZES) * state[name].double()
                for size, state in zip(SIZES, states, strict=True)
            )
            if not tensor.is_floating_point():
                total = total.round()
            mean[name] = tensor if tensor.dtype == torch.bool else total.to(tensor.dtype)
        model.load_state_dict(mean)
    return accuracies([model], task, [0] * 20)[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "make_model",
    [
        *(resnet, group_resnet, normed_mlp, cumulative_resnet, instance_resnet),
        *(spectral, shared_layer, limited, limited_and_normed, Moving, Lists, EncoderDecoder),
    ],
)
def test_full_participation_is_fedavg_of_state_dicts(make_model: Callable[[], nn.Module]) -> None:
    task = task_of(make_model)
    result = deltafl.compare(**settings_of(lambda: task), samplers=["full"], seeds=[3], processes=1)
    np.testing.assert_allclose(
        result.runs()["loss"].iloc[-1], plain_fedavg(task, seed=3), rtol=1e-6
    )


OWN = """
import numpy as np
from simulation import test_models

def make_task():
    owners = np.arange(20) % 4
    return test_models.task_of(test_models.resnet, local=["head*"], test_clients=owners)
"""


HUGE = """
make_usual = make_task

def make_task():
    task = make_usual()
    task.dataset.train_x[task.client_rows[2]] *= np.float32(1e15)
    return task
"""


def settings_in(folder: Path, own: str = OWN, **more: Any) -> RunSettings:
    (folder / "own_models.py").write_text(own)
    given = settings_of(str(folder / "own_models.py"), sampler="innovation", sample=2)
    return make_settings(RunSettings, {**given, "rounds": 5, "checkpoint_every": 2, **more})


def content(folder: Path) -> dict[str, bytes]:
    names = ("rounds.jsonl", "clients.json")
    return {name: (folder / name).read_bytes() for name in names}


def arrays_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    saved = RunDirectory(folder).saved()
    assert saved is not None
    return saved[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("local", ['["head*"]', "()"])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_run_that_was_interrupted_ends_in_the_same_bytes(
    tmp_path: Path, memory: bool, rounds: int, local: str
) -> None:
    own = {"own": OWN.replace('["head*"]', local)}
    more: list[dict[str, Any]] = [own, own]
    if memory:
        more = [{**own, "memory_path": str(tmp_path / name)} for name in ("a", "b")]
    run_single(settings_in(tmp_path, **more[0]), tmp_path / "whole", quiet)
    with pytest.raises(StopError):
        run_single(settings_in(tmp_path, **more[1]), tmp_path / "broken", stop_after(rounds))
    run_single(settings_in(tmp_path, **more[1]), tmp_path / "broken", quiet)
    assert content(tmp_path / "whole") == content(tmp_path / "broken")
    one, two = (arrays_of(tmp_path / name) for name in ("whole", "broken"))
    assert one.keys() == two.keys() and any("running_mean" in name for name in one)
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name])
    if memory and local != "()":
        rows = [next((tmp_path / name).glob("*/local/rows.bin")).read_bytes() for name in "ab"]
        assert rows[0] == rows[1] and any(rows[0])


def test_memory_on_disk_and_in_ram_is_the_same_run(tmp_path: Path) -> None:
    run_single(settings_in(tmp_path), tmp_path / "ram", quiet)
    on_disk = settings_in(tmp_path, memory_path=str(tmp_path / "memory"))
    run_single(on_disk, tmp_path / "disk", quiet)
    assert content(tmp_path / "ram") == content(tmp_path / "disk")


def test_two_workers_are_one(tmp_path: Path) -> None:
    for workers in (1, 2):
        run_single(settings_in(tmp_path, workers=workers), tmp_path / str(workers), quiet)
    assert content(tmp_path / "1") == content(tmp_path / "2")


@pytest.mark.parametrize("sampler", ["oort", "delta", "census"])
def test_training_of_everybody_leaves_no_trace(tmp_path: Path, sampler: str) -> None:
    """Nobody but the cohort changes buffers or local arrays."""
    last = 2 if sampler == "census" else 1  # everybody's first updates are a round
    settings = settings_in(tmp_path, sampler=sampler, rounds=last)
    run_single(settings, tmp_path / "run", quiet)
    cohort = list(RunDirectory(tmp_path / "run").lines("rounds.jsonl"))[last]["cohort"]
    arrays = arrays_of(tmp_path / "run")
    own = arrays["state.rest.own"].any(axis=1)
    assert np.flatnonzero(own).tolist() == sorted(set(cohort))
    assert arrays["state.rest.shared.bn.num_batches_tracked"] in (1, 2)


def test_an_exported_model_has_the_statistics_and_the_mean_of_the_local_arrays(
    tmp_path: Path,
) -> None:
    run_single(settings_in(tmp_path, sampler="full", rounds=1), tmp_path / "run", quiet)
    to = tmp_path / "model.safetensors"
    export_model(tmp_path / "run", to)
    found = load_file(to)
    task = task_of(resnet)
    seed = make_settings(RunSettings, settings_of("digits")).seed
    model = new_model(resnet, seed)
    states = [trained(model, task, 0, client, seed).state_dict() for client in range(4)]
    for name in ("bn.running_mean", "head.bias", "conv.weight"):
        mean = sum(
            size / sum(SIZES) * state[name] for size, state in zip(SIZES, states, strict=True)
        )
        np.testing.assert_allclose(found[name], mean, rtol=1e-5, atol=1e-7)


def test_local_arrays_take_no_part_in_what_the_server_measures() -> None:
    """The update is that of the shared arrays; a step of mime shortens these alone."""
    task = task_of(resnet, local=["head*"])
    clients = np.arange(4)
    plain, shortened = (
        Engine(task, replace(WORK, epochs=None, steps=1, step_factor=factor), 0)
        for factor in (1.0, 0.5)
    )
    start_d = plain.initial_params()
    one, half = (engine.train(start_d, 0, clients) for engine in (plain, shortened))
    np.testing.assert_allclose(half.update_nd, 0.5 * one.update_nd, rtol=1e-4, atol=1e-7)
    for first, second in zip(one.rest_n, half.rest_n, strict=True):
        np.testing.assert_array_equal(first["head.weight"], second["head.weight"])
    assert len(start_d) == sum(p.numel() for p in resnet().parameters()) - 15


def test_a_reply_with_a_broken_buffer_does_not_count(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, OWN + HUGE, sampler="full", rounds=1)
    run_single(settings, tmp_path / "run", quiet)
    line = list(RunDirectory(tmp_path / "run").lines("rounds.jsonl"))[1]
    assert [client for client, _ in line["rejected"]] == [2]
    arrays = arrays_of(tmp_path / "run")
    assert np.isfinite(arrays["state.rest.shared.bn.running_var"]).all()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"local": ["head*", "hed*"]}, "hed"),
        ({"local": "*"}, "trainable"),
        ({"trainable": "lora"}, "trainable"),
        ({"local": None}, "local and trainable are patterns"),
        ({"trainable": ["head*"], "local": ["head*"]}, "no floating-point array to train"),
        ({"make_model": half_base}, r"'2.inner.weight' .* is torch.bfloat16"),
        ({"make_model": lambda: layers(nn.Tanh()).double()}, "Double|float64"),
        ({"make_model": lambda: layers(nn.Tanh()).to("meta")}, "meta"),
        ({"make_model": lambda: layers(nn.LazyLinear(8))}, "lazy"),
        ({"make_model": lambda: layers(nn.Tanh()).requires_grad_(False)}, "leave a parameter"),
        (
            {"make_model": lambda: layers(nn.BatchNorm1d(8, track_running_stats=False))},
            "have one example, by .* 1 value .* another batch_size",
        ),
        ({"make_model": lambda: nn.Sequential(nn.Flatten(), nn.RNN(64, 3))}, "one tensor"),
    ],
)
def test_what_cannot_be_is_one_sentence(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    task = replace(task_of(resnet), **more)
    with pytest.raises(DeltaflError, match=words):
        deltafl.compare(
            **settings_of(lambda: task), samplers=["uniform"], seeds=1, out=tmp_path / "a"
        )
    assert not (tmp_path / "a").exists()


def test_the_log_says_why_a_path_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        Engine(task_of(resnet), WORK, 0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "bn.running_mean" in said[0]


def test_layers_that_are_frozen_by_name_keep_the_fast_path() -> None:
    """Not the path of dense chains, which trains all layers."""
    data = images()
    rows = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    task = Task("dense", data, rows, dense, cross_entropy, trainable=["1.*", "3.bias"])
    fast = Engine(task, WORK, 0)
    batched = Engine(task, WORK, 0, kept=Route("batched"))
    params_d = fast.initial_params()
    assert (fast.route.path, len(params_d)) == ("loop", 64 * 6 + 6 + 3)
    parts = ModelParts.of(dense(), trainable=task.trainable)
    model = new_model(dense, 0)
    for engine in (fast, batched):
        update_nd = engine.train(params_d, 0, np.arange(4)).update_nd
        for client, update_d in enumerate(update_nd):
            x, y = (torch.from_numpy(part[rows[client]]) for part in (data.train_x, data.train_y))
            rng = stream(0, "batches", 0, client)
            twin = train_serial(model, cross_entropy, x, y, params_d, WORK, rng, parts=parts)
            np.testing.assert_allclose(update_d, twin.update_d, rtol=1e-4, atol=1e-6)


def test_one_name_of_tied_weights_stands_for_the_tensor() -> None:
    for name in ("embed*", "out*"):
        parts = ModelParts.of(Attention(), local=[name])
        assert parts.names("local") == ["embed.weight", "out.weight"]
        only = ModelParts.of(Attention(), trainable=[name])
        assert list(only.trained) == ["embed.weight"]


class TwoHeads(nn.Module):
    """A head for minibatches whose first number is positive, and another for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[int(x[0, 0] > 0)](torch.tanh(self.body(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_a_local_array_that_a_minibatch_does_not_use_stays_where_it_is(momentum: float) -> None:
    """But for its momentum: what is left of an earlier gradient is that alone."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(24, 4)), dtype=torch.float32)
    y = torch.tensor(rng.integers(0, 3, 24))
    work = LocalWork(lr=0.1, epochs=2, batch_size=4, momentum=momentum)
    torch.manual_seed(0)
    model = TwoHeads()
    parts = ModelParts.of(model, local=["heads.*"])
    start_d = parts.flatten(NamedArrays.of(model).arrays)
    trained = train_serial(
        model, cross_entropy, x, y, start_d, work, stream(0, "batches"), parts=parts
    )
    twin = copy.deepcopy(model)
    speed = {name: torch.zeros_like(tensor) for name, tensor in twin.named_parameters()}
    used = set()
    for rows in minibatches(len(x), work, stream(0, "batches")):
        twin.zero_grad()
        cross_entropy(twin(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        used.add(bool(x[rows][0, 0] > 0))
        for name, tensor in twin.named_parameters():
            grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            speed[name] = momentum * speed[name] + grad
            tensor.data -= 0.1 * speed[name]
    assert used == {False, True}
    for name, tensor in twin.named_parameters():
        if name.startswith("heads"):
            np.testing.assert_allclose(trained.rest[name], tensor.detach().numpy(), atol=1e-6)
