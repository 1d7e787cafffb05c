"""A site's script for ``attacked.py``, with NVFlare's Client API; one of the sites lies."""

import argparse
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import nvflare.client as flare
from nvflare.app_common.np.np_downloader import ArrayDownloadable

from attacked_clients import LIAR, SIZES, be_late, loss, trained, turn
from deltafl.nvflare import DeltaClient
from hosts.hostile import ESCAPES, LONG, headed, npz

NAME = "numpy_key"
#: The server asks for the bytes of an array later, whenever it likes.
PRODUCE = ArrayDownloadable.produce_item


def of(make: Callable[[Any], bytes]) -> Callable[..., None]:
    """Bytes in the archive by which NVFlare moves arrays."""

    def spoil(reply: Any, seconds: float) -> None:
        def produce(self: Any, index: int) -> bytes:
            key = self.keys[index]
            file = BytesIO()
            with ZipFile(file, "w") as archive:
                archive.writestr(f"{key}.npy", make(self.base_obj[key]))
            return file.getvalue()

        ArrayDownloadable.produce_item = produce

    return spoil


def live(make: Callable[[Any], Any]) -> Callable[..., None]:
    def spoil(reply: Any, seconds: float) -> None:
        reply.params[NAME] = make(reply.params[NAME])

    return spoil


def many(reply: Any, seconds: float) -> None:
    reply.params = {f"{ESCAPES}{i}": np.ones(9, np.float32) for i in range(300)}
    reply.metrics = {ESCAPES: 1.0, "loss": 10**19, LONG: [1e300] * 10**4}


LIES: dict[str, Callable[..., None]] = {
    "64 MB": live(lambda x: np.zeros((4000, 4000), np.float32)),
    "npz": of(npz),
    "giant array": of(lambda x: headed(f"({10**12},)")),
    "wrong shape": live(lambda x: x[:-1]),
    "slow": lambda reply, seconds: be_late(seconds),
    "NaN": live(lambda x: x * np.nan),
    "far": live(lambda x: x + np.float32(1e30)),
    "names": many,
    "text": live(lambda x: ESCAPES + LONG),
}


def main(lies: Path, seconds: float) -> None:
    flare.init()
    number = int(flare.get_site_name().removeprefix("site-")) - 1
    client = DeltaClient(num_examples=SIZES[number])
    send = flare.send
    while flare.is_running():
        received = client.receive()
        if received is None:
            break
        x = received.params[NAME]
        reply = flare.FLModel(params={NAME: trained(x, number)}, metrics={"loss": loss(x, number)})
        if number == LIAR:
            # After ``DeltaClient``, so that nothing sets right what it sends.
            kind = LIES[turn([*LIES], lies)]

            def lie(model: Any, kind: Any = kind) -> None:
                flare.send = send
                ArrayDownloadable.produce_item = PRODUCE
                kind(model, seconds)
                send(model)

            flare.send = lie
        client.send(reply)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lies", type=Path)
    parser.add_argument("--seconds", type=float)
    main(**vars(parser.parse_args()))
