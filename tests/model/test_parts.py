"""What a model is made of: ties, frozen and local arrays, buffers; and what cannot be read."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import deltafl
from deltafl import DeltaflError
from deltafl.federation.local_work import LocalSteps
from deltafl.model.arrays import NamedArrays
from deltafl.model.parts import ModelParts, parts_of_copies
from deltafl.model.vectors import mean_rest

torch = pytest.importorskip("torch")
nn = torch.nn


def tied() -> Any:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    return model


def with_mask() -> Any:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    model[0].register_buffer("scale", torch.ones(2))
    return model


@pytest.mark.parametrize("form", [lambda m: m, lambda m: m.state_dict(), lambda m: m.parameters()])
def test_a_tied_tensor_is_in_the_vector_once(form: Callable[[Any], Any]) -> None:
    model = tied()
    vector_d = deltafl.flatten(form(model))
    assert vector_d.tolist() == model[0].weight.detach().numpy().ravel().tolist()


def test_both_names_of_a_tied_tensor_move() -> None:
    moved = deltafl.unflatten(np.arange(24.0), tied())
    assert moved[0].weight is moved[1].weight
    assert moved[1].weight.detach().numpy().ravel().tolist() == list(range(24))
    state = deltafl.unflatten(np.arange(24.0), tied().state_dict())
    assert torch.equal(state["0.weight"], state["1.weight"])


@pytest.mark.parametrize("form", ["module", "one memory", "state dict", "dict", "list"])
@pytest.mark.parametrize("numbers", [np.ones(3), torch.ones(3), np.ones((), np.float16)])
def test_what_unflatten_made_is_tied_as_before(form: str, numbers: Any) -> None:
    model: Any = tied()
    if form == "one memory":
        model = sharing(lambda w: w)
        model.register_buffer("old", model[0].weight.detach())
    elif form == "state dict":
        model = model.state_dict()
    elif form == "dict":
        model = {1: numbers, "b": numbers, "c": np.zeros(2)}
    elif form == "list":
        model = [np.zeros(2), numbers, numbers]
    vector_d = np.arange(len(deltafl.flatten(model)), dtype=np.float32)
    again_d = deltafl.flatten(deltafl.unflatten(vector_d, model))
    assert again_d.tolist() == vector_d.tolist()


@pytest.mark.parametrize("names", [(1, "1"), ("a", "a "), ("0", 0)])
def test_names_that_are_written_alike_are_refused(names: tuple[Any, Any]) -> None:
    model = {names[0]: np.ones(2), names[1]: np.zeros(3)}
    for call in (deltafl.flatten, lambda like: deltafl.unflatten(np.ones(5), like)):
        with pytest.raises(DeltaflError, match=r"the model holds .* may be one name or two"):
            call(model)


def test_arrays_that_only_share_numbers_are_not_tied() -> None:
    layer = nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert len(deltafl.flatten(model)) == sum(part.numel() for part in model.parameters())
    whole = np.zeros((4, 2), np.float32)
    rows = {"all": whole, "first": whole[:2], "last": whole[2:]}
    assert len(deltafl.flatten(rows)) == 16
    bits = {"floats": whole, "bits": whole.view(np.int32)}
    assert ModelParts.of(bits).names("counter") == ["bits"]


def test_kinds_of_a_module_and_of_its_patterns() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    found = ModelParts.of(model, local=["2.*"])
    assert {entry.name: entry.kind for entry in found.entries} == {
        "0.weight": "trained",
        "0.bias": "frozen",
        "1.weight": "trained",
        "1.bias": "trained",
        "1.running_mean": "buffer",
        "1.running_var": "buffer",
        "1.num_batches_tracked": "counter",
        "2.weight": "local",
        "2.bias": "local",
    }
    assert found.num_params == 6 + 3 + 3
    only = ModelParts.of(model, trainable=["2.*"])
    assert list(only.trained) == ["2.weight", "2.bias"]
    assert set(only.names("frozen")) == {e.name for e in only.entries} - set(only.trained)


def test_a_name_is_a_pattern_of_itself() -> None:
    """As JAX writes the path of an array."""
    arrays = {"['dense']['bias']": np.ones(2), "['head']['bias']": np.ones(3)}
    found = ModelParts.of(arrays, local=["['head']['bias']"])
    assert list(found.trained) == ["['dense']['bias']"]


def named(parameter: str, buffer: str) -> Any:
    model = nn.Module()
    model.layer = nn.Linear(2, 1)
    model.register_parameter(parameter, nn.Parameter(torch.ones(4)))
    model.register_buffer(buffer, torch.ones(3))
    return model


def wrapped(inside: Any) -> Any:
    """Its state dict has the names of the module inside."""
    model = nn.Module()
    model.inside = inside
    model.state_dict = inside.state_dict
    model.load_state_dict = inside.load_state_dict
    return model


@pytest.mark.parametrize("wrap", [lambda model: model, wrapped])
@pytest.mark.parametrize(
    "name", ["moving_mean", "running_var", "my_extra_state", "num_batches_tracked"]
)
def test_a_module_tells_parameters_from_buffers_whatever_their_names(
    name: str, wrap: Callable[[Any], Any]
) -> None:
    model = wrap(named(name, "weight"))
    assert {entry.name: entry.kind for entry in ModelParts.of(model).entries} == {
        name: "trained",
        "weight": "buffer",
        "layer.weight": "trained",
        "layer.bias": "trained",
    }
    moved = deltafl.unflatten(np.arange(7.0), model)
    assert moved.state_dict()[name].tolist() == [0, 1, 2, 3]
    kinds = {entry.name: entry.kind for entry in ModelParts.of(model, buffers=[name]).entries}
    assert kinds[name] == "buffer"
    model.requires_grad_(False)
    with pytest.raises(DeltaflError, match="no floating-point array to train"):
        deltafl.flatten(model)


class WithExtra(nn.Linear):  # type: ignore[name-defined,misc]
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]


def test_what_a_module_adds_to_its_state_dict_is_no_array_of_either() -> None:
    model = nn.Sequential(WithExtra(2, 2), nn.Linear(2, 1))
    state = model.state_dict()
    assert deltafl.flatten(state).tolist() == deltafl.flatten(model).tolist()
    moved = deltafl.unflatten(np.arange(9.0), state)
    assert moved["0._extra_state"] == {"version": 3} and moved["1.bias"].tolist() == [8]
    model.load_state_dict(moved)


def with_state(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A module whose state dict is changed by a hook, of which its ``load_state_dict`` knows
    nothing.
    """
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False))
    model[2].weight.requires_grad_(False)
    model._register_state_dict_hook(lambda module, state, prefix, local: change(state))
    return model


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("0.", "first."): part for name, part in state.items()}


@pytest.mark.parametrize(
    "change",
    [renamed, lambda state: {name: part.clone() for name, part in state.items()}],
)
def test_a_state_dict_may_have_other_names_or_copies(
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    plain = ModelParts.of(with_state(dict))
    found = ModelParts.of(with_state(change))
    assert [entry.kind for entry in found.entries] == [entry.kind for entry in plain.entries]


def sharing(view: Callable[[Any], Any]) -> Any:
    """Two parameters that share memory."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    model.to(torch.bfloat16)
    model[1].weight = nn.Parameter(view(model[0].weight.detach()))
    return model


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[:2], lambda w: w[3:, 1:]])
def test_other_views_of_a_trained_parameter_are_refused(view: Callable[[Any], Any]) -> None:
    model = sharing(view)
    for call in (deltafl.flatten, lambda like: deltafl.unflatten(np.ones(32), like)):
        with pytest.raises(DeltaflError, match=r"'0.weight' and '1.weight' share memory"):
            call(model)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda w: w, 16),
        (lambda w: w.clone().t(), 32),
        (lambda w: w.new_ones(1).expand(4), 20),
    ],
)
def test_what_is_one_tensor_or_none_is_read(view: Callable[[Any], Any], expected: int) -> None:
    assert len(deltafl.flatten(sharing(view))) == expected


def test_parameters_may_be_parts_of_one_buffer() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    model = nn.ParameterList([whole[:, :2], whole[:2, 2:], whole[2:, 2:], whole[:0]])
    assert sorted(deltafl.flatten(model)) == [*range(12)]
    frozen = nn.ParameterList([whole, whole.t(), torch.ones(1)])
    for place in (0, 1):
        frozen[place].requires_grad_(False)
    assert deltafl.flatten(frozen).tolist() == [1]
    frozen[1].requires_grad_(True)
    with pytest.raises(DeltaflError, match="share memory"):
        deltafl.flatten(frozen)


def test_a_model_that_cannot_be_copied_is_one_sentence() -> None:
    model = nn.Linear(2, 1)
    model.package = np
    with pytest.raises(DeltaflError, match=r"the model cannot be copied: .*; give its state dict"):
        deltafl.unflatten(np.ones(3), model)


def test_what_load_state_dict_does_not_load_is_no_copy_of_the_model() -> None:
    like = with_state(renamed)
    with pytest.raises(DeltaflError, match=r"load_state_dict does not load 'first.weight'"):
        deltafl.unflatten(np.arange(15.0), like)
    assert deltafl.flatten(deltafl.unflatten(np.arange(15.0), with_state(dict))).tolist() == [
        *range(15)
    ]


@pytest.mark.parametrize("left", ["0.bias", "1.weight", "2.weight"])
def test_a_parameter_with_a_gradient_is_in_the_state_dict(left: str) -> None:
    model = with_state(lambda state: {name: state[name] for name in state if name != left})
    if left == "2.weight":
        assert len(deltafl.flatten(model)) == 15  # it is frozen
        return
    with pytest.raises(DeltaflError, match=rf"trains '{left}', which its state dict leaves out"):
        deltafl.flatten(model)


class Flat(nn.Module):  # type: ignore[name-defined,misc]
    """All parameters in one, as FSDP has them, and their parts in the state dict."""

    def __init__(self, form: Callable[[Any], Any], last: int) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.arange(15.0))
        self.form = form
        self.last = last

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Up to the last number."""
        bounds = {"weight": slice(12), "bias": slice(12, self.last)}
        return {name: self.form(self.flat[bound]) for name, bound in bounds.items()}


@pytest.mark.parametrize("form", [torch.Tensor.detach, torch.Tensor.clone])
def test_a_state_dict_may_have_parameters_in_parts(form: Callable[[Any], Any]) -> None:
    assert deltafl.flatten(Flat(form, 15)).tolist() == [*range(15)]
    with pytest.raises(DeltaflError, match="trains 'flat', which its state dict leaves out"):
        deltafl.flatten(Flat(form, 14))


@pytest.fixture
def divided() -> Iterator[Any]:
    """A model as FSDP2 leaves it, in a group of one process."""
    for name in ("fsdp", "checkpoint.state_dict"):
        pytest.importorskip(f"torch.distributed.{name}")
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    yield distributed.fsdp.fully_shard(model, mesh=mesh)
    distributed.destroy_process_group()


def correct(model: Any) -> None:
    correction = {name: np.ones(param.shape) for name, param in model.named_parameters()}
    with deltafl.corrected_steps(correction, model, torch.optim.SGD(model.parameters(), 0.1), 1):
        pass


@pytest.mark.parametrize(
    "call",
    [
        deltafl.flatten,
        lambda model: deltafl.flatten(model.state_dict()),
        lambda model: deltafl.flatten([*model.parameters()]),
        lambda model: deltafl.unflatten(np.zeros(14), model),
        lambda model: deltafl.init_round(deltafl.make_plan("uniform", [1, 1], n=1), model),
        lambda model: LocalSteps(0.1).add(1.0, model.parameters()),
        correct,
    ],
)
def test_a_model_of_which_each_process_has_a_part_is_gathered_first(
    divided: Any, call: Callable[[Any], Any]
) -> None:
    with pytest.raises(DeltaflError, match=r"part of a DTensor, .* give its \.full_tensor\(\)"):
        call(divided)
    whole = torch.distributed.checkpoint.state_dict
    options = whole.StateDictOptions(full_state_dict=True)
    state = deltafl.unflatten(np.arange(14.0), whole.get_model_state_dict(divided, options=options))
    whole.set_model_state_dict(divided, state, options=options)
    found = [param.full_tensor().detach().numpy().ravel() for param in divided.parameters()]
    assert np.concatenate(found).tolist() == [*range(14)]


def test_a_state_dict_of_ones_own_takes_the_options() -> None:
    model = nn.Linear(2, 1)
    model.state_dict = lambda: {}
    with pytest.raises(DeltaflError, match=r"state_dict\(keep_vars=True\) failed: TypeError"):
        deltafl.flatten(model)


def test_adapters_are_known_by_the_names_that_peft_gives_them() -> None:
    arrays = {
        "base.q.weight": np.ones((2, 2)),
        "base.q.lora_A.default.weight": np.ones((1, 2)),
        "base.q.lora_B.default.weight": np.ones((2, 1)),
        "base.modules_to_save.default.head": np.ones(3),
    }
    assert list(ModelParts.of(arrays, trainable="lora").trained) == list(arrays)[1:]
    assert len(deltafl.flatten(arrays, trainable="lora")) == 7
    back = deltafl.unflatten(np.arange(7.0), arrays, trainable="lora")
    assert back["base.q.weight"].tolist() == [[1, 1], [1, 1]]
    assert back["base.modules_to_save.default.head"].tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"local": ["head.*"]}, "local has 'head.*', which no array of the model matches"),
        ({"trainable": ["1.*"]}, "its names are '0.weight', '0.bias', '0.mask' and 1 more"),
        ({"trainable": "lora"}, "no floating-point array to train"),
        ({"local": ["*"]}, "no floating-point array to train"),
    ],
)
def test_patterns_that_match_nothing_or_leave_nothing_are_refused(
    options: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(DeltaflError) as error:
        ModelParts.of(with_mask(), **options)
    assert fragment in str(error.value)


def test_a_mask_of_minus_infinity_stays_as_it_is() -> None:
    named = NamedArrays.of(with_mask())
    found = ModelParts.of(named)
    kinds = {entry.name: entry.kind for entry in found.entries}
    assert (kinds["0.mask"], kinds["0.scale"]) == ("constant", "buffer")
    assert found.fault(named.arrays) is None
    liar = named.arrays | {"0.mask": np.zeros((3, 3), np.float32)}
    rest = mean_rest(found, named.arrays, [liar], np.ones(1))
    assert np.array_equal(rest["0.mask"], named.arrays["0.mask"])
    deltafl.init_round(deltafl.make_plan("uniform", [5] * 6, n=3), with_mask())


def test_named_buffers_come_beside_those_of_batch_normalisation() -> None:
    """A pattern that is added, as for a mask, must not make running variances trained."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    arrays = {**model.state_dict(), "mask": torch.full((2,), float("-inf"))}
    found = ModelParts.of(arrays, buffers=["mask"])
    kinds = {entry.name: entry.kind for entry in found.entries}
    assert (kinds["1.running_mean"], kinds["1.running_var"]) == ("buffer", "buffer")
    assert kinds["mask"] == "constant"
    with pytest.raises(DeltaflError, match=r"buffers has 'batchnorm\*', which no array"):
        ModelParts.of(arrays, buffers=["batchnorm*"])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda reply: reply.pop("bias"), "the reply lacks 'bias'"),
        (lambda reply: reply.update(local=np.zeros(1)), "has 'local', which nobody sent"),
        (lambda reply: reply.update({"w\x1b[2J" * 40: reply.pop("bias")}), r"'w\x1b[2Jw"),
        (lambda reply: reply.update(copy=np.ones(3, np.float32)), "are one tensor, and differ"),
        (lambda reply: reply.update(head=np.full(9, np.nan)), None),
        (lambda reply: reply.pop("head"), None),
    ],
)
def test_a_reply_is_judged_by_what_was_sent(
    change: Callable[[dict[str, Any]], object], fault: str | None
) -> None:
    weight = np.zeros(3, np.float32)
    arrays = {
        "weight": weight,
        "bias": np.zeros(2, np.float32),
        "copy": weight,
        "head": np.zeros(1, np.float32),
    }
    found = ModelParts.of(arrays, local=["head"])
    assert list(found.sent(arrays)) == ["weight", "bias", "copy"]
    reply = {name: np.array(array) for name, array in arrays.items()}
    change(reply)
    said = found.fault(reply)
    if fault is None:
        assert said is None
    else:
        assert said is not None
        assert fault in said
        assert len(said) < 200


def test_copies_in_a_message_may_be_one_tensor_which_only_the_user_can_tell() -> None:
    arrays = {name: value.numpy().copy() for name, value in tied().state_dict().items()}
    found = ModelParts.of(arrays)
    assert found.num_params == 48
    with pytest.raises(DeltaflError, match=r"'0.weight' and '1.weight' hold the same numbers"):
        parts_of_copies(arrays, None)
    assert parts_of_copies(arrays, True).num_params == 24
    assert parts_of_copies(arrays, False) == found
    # One name stands for the tensor, and what is left alone may have copies.
    for only in ("0.*", "1.*"):
        with pytest.raises(DeltaflError, match=r"'0.weight' and '1.weight' hold the same numbers"):
            parts_of_copies(arrays, None, trainable=[only])
        one = parts_of_copies(arrays, True, trainable=[only])
        assert list(one.trained) == ["0.weight"] and one.names("trained") == list(arrays)
        with pytest.raises(DeltaflError, match="no floating-point array to train"):
            parts_of_copies(arrays, True, local=[only])
    more = {**arrays, "head": np.arange(3.0)}
    assert list(parts_of_copies(more, None, trainable=["head"]).trained) == ["head"]
    constant = {"a": np.ones(3), "b": np.ones(3), "c": np.zeros(())}
    assert parts_of_copies(constant, None).num_params == 7


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LazyLinear(3),
        lambda: nn.Linear(2, 2, device="meta"),
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}),
        lambda: nn.Linear(2, 2, dtype=torch.complex64),
        lambda: {"a": np.array(["b"])},
        lambda: {"a": None, "b": np.ones(2)},
        lambda: [np.ones(2), "text"],
    ],
)
def test_what_has_no_numbers_is_refused_by_name(make: Callable[[], Any]) -> None:
    with pytest.raises(DeltaflError, match=r"array '.*' of the model has no numbers to train on"):
        deltafl.flatten(make())


@pytest.mark.parametrize(
    "nested",
    [
        {"layer": {"w": np.ones(2), "b": np.ones(1)}},
        {"layer": (np.ones(2), np.ones(1))},
        [[np.ones((2, 2)), np.ones(2)]],
    ],
)
def test_arrays_in_several_levels_are_refused_in_words(nested: Any) -> None:
    with pytest.raises(DeltaflError, match=r"is a (dict|list|tuple), no array; give one dict"):
        deltafl.flatten(nested)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_what_a_mask_hides_is_no_part_of_a_model(dtype: Any) -> None:
    masked = np.ma.array(np.ones(2, dtype), mask=[False, True])
    for model in ({"a": np.ones(2), "b": masked}, [np.ones(2), masked]):
        for call in (deltafl.flatten, lambda like: deltafl.unflatten(np.ones(4), like)):
            with pytest.raises(DeltaflError, match=r"array '\w' of the model is a masked array"):
                call(model)
