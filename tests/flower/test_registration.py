"""Who a client is: keys over node ids, and registrations that may hold anything."""

from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord
from flwr.proto.node_pb2 import NodeInfo

from deltafl import DeltaflError
from deltafl.flower.clients import ClientInfo
from deltafl.flower.registration import check_same_kind, client_key, read_registration


def registration(num_aux: int = 0, **values: Any) -> tuple[str, ClientInfo]:
    record = {"kind": "client", "client_id": "a", "num_examples": 5, **values}
    return read_registration(
        ConfigRecord({name.replace("_", "-"): value for name, value in record.items() if value is not None}), num_aux
    )


def test_a_client_cannot_choose_a_key_that_looks_verified() -> None:
    key, info = registration(client_id="key:abc")
    assert (key, info) == ("client:key:abc", ClientInfo(5))
    assert client_key("config", NodeInfo(node_id=1, public_key=b"k"), key, simulated=False) == key
    with pytest.raises(DeltaflError, match="kind"):
        registration(kind="key")


def test_keys_follow_the_identity_setting() -> None:
    anonymous, named = NodeInfo(node_id=1, public_key=b"k"), NodeInfo(node_id=1, public_key=b"k", name="hospital-a")
    assert client_key("auto", anonymous, "partition:3", simulated=True) == "partition:3"
    assert client_key("auto", anonymous, "partition:3", simulated=False) == "partition:3"
    signed = client_key("public-key", anonymous, "partition:3", simulated=False)
    assert signed.startswith("key:")
    assert client_key("public-key", NodeInfo(node_id=99, public_key=b"k"), "partition:3", False) == signed
    assert client_key("auto", named, "partition:3", False) == signed
    assert client_key("name", named, "partition:3", False) == "name:hospital-a"
    with pytest.raises(DeltaflError, match="no registered name"):
        client_key("name", anonymous, "partition:3", False)
    with pytest.raises(DeltaflError, match="no public key"):
        client_key("public-key", NodeInfo(node_id=1), "partition:3", False)


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        *(("num_examples", size, "number of examples") for size in (0, -1, 2.0, True, "5", None, 2**50)),
        *(("client_id", client_id, "printable") for client_id in ("", "a" * 201, "a\nb", 5, None)),
    ],
)
def test_faulty_registrations_are_refused(name: str, bad: Any, message: str) -> None:
    with pytest.raises(DeltaflError, match=message):
        registration(**{name: bad})


@pytest.mark.parametrize("aux", [None, [], [0.5], [0.5, 0.5, 0.0], [0.5, float("nan")], "ab", [1e30, 0.0]])
def test_auxiliary_variables_are_checked_where_the_server_wants_them(aux: Any) -> None:
    assert registration(2, aux=[0.25, 1.0])[1].aux == (0.25, 1.0)
    assert registration(aux=aux)[1].aux == ()
    with pytest.raises(DeltaflError, match=r"the server wants 2 auxiliary|an auxiliary variable"):
        registration(2, aux=aux)


def test_a_saved_state_needs_the_same_kind_of_keys() -> None:
    check_same_kind([], ["key:a"])
    check_same_kind(["client:a"], ["client:b"])
    with pytest.raises(DeltaflError, match="begin with 'client', and now they begin with 'key'"):
        check_same_kind(["client:a"], ["key:a"])
