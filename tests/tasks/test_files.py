"""Finding, fetching and checking files, against a real HTTP server on this machine that can cut
connections.
"""

import gzip
import hashlib
import io
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from deltafl.simulation.folder.provenance import report
from deltafl.store import room
from deltafl.tasks import cached_images, check, data_folders, fetch, read_arrays
from deltafl.tasks.data import files, images, leaf
from deltafl.tasks.data.files import RETRIES, SOURCES, Source

CONTENT = bytes(range(256)) * 2000


@dataclass
class Behaviour:
    """What the server does; tests set it and read what was requested."""

    files: dict[str, bytes]
    cuts: int = 0  # so many first answers end in the middle
    requests: list[str] = field(default_factory=list)


def make_handler(behaviour: Behaviour) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            behaviour.requests.append(self.path)
            body = behaviour.files.get(self.path.lstrip("/"))
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            behaviour.cuts -= 1
            self.wfile.write(body if behaviour.cuts < 0 else body[: len(body) // 2])

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


Publish = Callable[..., Behaviour]


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publish]:
    """Make ``tiny`` a data set that is published on a server with this behaviour."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda _: None)
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(behaviour: Behaviour, gzipped: bool = True) -> Behaviour:
        server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(behaviour))
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        servers.append((server, thread))
        checksum = (
            hashlib.sha256(CONTENT).hexdigest()
            if gzipped
            else f"md5:{hashlib.md5(CONTENT).hexdigest()}"
        )
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        monkeypatch.setitem(SOURCES, "tiny", Source(url, {"numbers": checksum}, gzipped))
        return behaviour

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def packed(content: bytes = CONTENT) -> dict[str, bytes]:
    return {"numbers.gz": gzip.compress(content, mtime=0)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tiny").iterdir())


@pytest.mark.parametrize(("files", "gzipped"), [(packed(), True), ({"numbers": CONTENT}, False)])
def test_a_file_is_downloaded_once(
    files: dict[str, bytes], gzipped: bool, publish: Publish, tmp_path: Path
) -> None:
    behaviour = publish(Behaviour(files), gzipped)
    for _ in range(2):
        (path,) = fetch("tiny", tmp_path, progress=False)
        assert path.read_bytes() == files[path.name]
    assert names(tmp_path) == list(files)
    assert len(behaviour.requests) == 1
    assert check("tiny", tmp_path) == [("numbers", path, "ok")]


def test_a_cut_connection_is_tried_again(
    publish: Publish, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = publish(Behaviour(packed(), cuts=2))
    (path,) = fetch("tiny", tmp_path)
    assert gzip.decompress(path.read_bytes()) == CONTENT
    assert len(behaviour.requests) == 3
    assert "100%" in capsys.readouterr().err  # the progress bar


@pytest.mark.parametrize(
    "body", [gzip.compress(b"other", mtime=0), b"<html>blocked</html>", packed()["numbers.gz"][:-9]]
)
def test_wrong_content_is_not_kept(body: bytes, publish: Publish, tmp_path: Path) -> None:
    publish(Behaviour({"numbers.gz": body}))
    with pytest.raises(
        DeltaflError, match=r"numbers\.gz does not have the published content; nothing was kept"
    ):
        fetch("tiny", tmp_path, progress=False)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["numbers", "numbers.gz"])
@pytest.mark.parametrize("right", [True, False])
def test_a_right_file_is_kept_and_a_wrong_one_replaced(
    name: str, right: bool, publish: Publish, tmp_path: Path
) -> None:
    content = CONTENT if right else b"wrong"
    file = tmp_path / "tiny" / name
    file.parent.mkdir()
    file.write_bytes(content if name == "numbers" else packed(content)["numbers.gz"])
    behaviour = publish(Behaviour(packed()))
    assert [status.state for status in check("tiny", tmp_path)] == ["ok" if right else "corrupt"]
    fetch("tiny", tmp_path, progress=False)
    assert [status.state for status in check("tiny", tmp_path)] == ["ok"]
    assert len(behaviour.requests) == (0 if right else 1)


def test_a_server_that_refuses_is_reported(publish: Publish, tmp_path: Path) -> None:
    behaviour = publish(Behaviour({}))
    with pytest.raises(
        DeltaflError, match=r"numbers\.gz cannot be downloaded \(404.*try again later"
    ):
        fetch("tiny", tmp_path / "new" / "data", progress=False)
    assert len(behaviour.requests) == 1 + RETRIES
    assert not any(tmp_path.iterdir())


def test_mistakes_are_named(publish: Publish, tmp_path: Path) -> None:
    publish(Behaviour(packed()))
    (tmp_path / "file").write_text("")
    with pytest.raises(DeltaflError, match=r"cannot write to .*file.*give another folder"):
        fetch("tiny", tmp_path / "file", progress=False)
    with pytest.raises(
        DeltaflError, match=r"'digits' is no data set that .*are mnist, fashion-mnist, cifar10"
    ):
        fetch("digits")
    with pytest.raises(DeltaflError, match="nowhere, which is not a folder"):
        check("mnist", Path("nowhere"))


def test_without_a_folder_the_users_cache_is_used(publish: Publish, tmp_path: Path) -> None:
    publish(Behaviour(packed()))
    assert check("tiny") == [("numbers", None, "missing")]
    (path,) = fetch("tiny", progress=False)
    assert path == tmp_path / "cache" / "deltafl" / "tiny" / "numbers.gz"
    assert check("tiny") == [("numbers", path, "ok")]


def test_a_home_that_nobody_has_is_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable)
    # The number of a user of a container, whom the system does not know.
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    monkeypatch.chdir(tmp_path)
    assert data_folders("tiny", tmp_path)[:2] == [tmp_path / "tiny", tmp_path]
    assert report()["cache"] == "outside the home folder"
    with pytest.raises(DeltaflError, match="data_dir is ~nobody-here/data, which is not a folder"):
        check("mnist", Path("~nobody-here/data"))


def test_folders_are_searched_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path))
    monkeypatch.setitem(SOURCES, "tiny", Source("", {}, system_folders=(Path("/system"),)))
    given = tmp_path / "data"
    given.mkdir()
    own = [given / "tiny", given, tmp_path / "tiny", tmp_path]
    assert data_folders("tiny", given) == [
        *own,
        Path("/system"),
        tmp_path / "cache" / "deltafl" / "tiny",
    ]


def test_broken_archives_of_arrays_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.arange(3), y=np.array([None]))
    whole = path.read_bytes()
    assert read_arrays(path, ("x",))["x"].tolist() == [0, 1, 2]
    for key in ("y", "z"):  # a pickle, and one that is not there
        with pytest.raises(DeltaflError, match=f"is not an NPZ archive of {key}"):
            read_arrays(path, (key,))
    np.save(tmp_path / "x.npy", np.arange(3))
    single = (tmp_path / "x.npy").read_bytes()
    for content in (whole[:-100], b"PK no zip", b"", single):
        path.write_bytes(content)
        with pytest.raises(DeltaflError, match=r"x\.npz is not an NPZ archive of plain arrays: "):
            read_arrays(path)


def test_images_are_decoded_once_and_a_broken_cache_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decode = Mock(return_value=np.full((2, 3), 7, np.uint8))
    file = tmp_path / "folder" / "a.npy"
    for content, expected in ((None, 1), (None, 1), (b"", 2), (b"no array", 3)):
        if content is not None:
            file.write_bytes(content)
        assert (cached_images(file, (2, 3), decode) == 7).all()
        assert decode.call_count == expected
    assert [path.name for path in file.parent.iterdir()] == [
        "a.npy"
    ]  # nothing half written is left
    (tmp_path / "file").write_text("where the folder should be")
    assert len(cached_images(tmp_path / "file" / "a.npy", (2, 3), decode)) == 2
    assert "cannot be kept" in caplog.text


def test_archives_that_unpack_to_more_than_is_free_are_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (files, room):
        monkeypatch.setattr(module, "free_ram", lambda: 10**6)
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros(10**6))
    with pytest.raises(
        DeltaflError, match=r"x\.npz.* does not fit .*8 MB, and 1 MB of memory are free"
    ):
        read_arrays(tmp_path / "x.npz")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        member = tarfile.TarInfo("data_batch_1.bin")
        member.size = 10**7
        archive.addfile(member, io.BytesIO(bytes(10**7)))
    (tmp_path / files.CIFAR_ARCHIVE).write_bytes(content.getvalue())
    with pytest.raises(DeltaflError, match="it unpacks to more than 1 MB"):
        images.load_cifar10(tmp_path)
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / leaf.H5_FILES[0], "w") as file:
        file.create_dataset("examples/f0/pixels", (10**6, 28, 28), np.float32)
        file.create_dataset("examples/f0/label", (10**6,), np.int32)
    shutil.copy(tmp_path / leaf.H5_FILES[0], tmp_path / leaf.H5_FILES[1])
    with pytest.raises(DeltaflError, match=r"does not fit into memory .it takes 3\.14 GB"):
        leaf.load_femnist(tmp_path)
