"""Finding, fetching and checking files, against a real HTTP server on this machine that can cut connections."""

import gzip
import hashlib
import io
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from deltafl.errors import DeltaflError
from deltafl.tasks import cached_images, check, data_folders, fetch, read_arrays
from deltafl.tasks.files import RETRIES, Source

CONTENT = bytes(range(256)) * 2000


@dataclass
class Behaviour:
    """What the server does; tests set it and read what was requested."""

    files: dict[str, bytes]
    cuts: int = 0  # so many first answers end in the middle
    status: int = 200
    requests: list[str] = field(default_factory=list)


def make_handler(behaviour: Behaviour) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            behaviour.requests.append(self.path)
            body = behaviour.files.get(self.path.lstrip("/"))
            if body is None or behaviour.status != 200:
                self.send_error(404 if body is None else behaviour.status)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            behaviour.cuts -= 1
            self.wfile.write(body if behaviour.cuts < 0 else body[: len(body) // 2])

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


Serve = Callable[[Behaviour], str]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a server with a behaviour; gives its address."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda _: None)
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(behaviour: Behaviour) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(behaviour))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def sources_at(url: str, gzipped: bool = True) -> dict[str, Source]:
    checksum = hashlib.sha256(CONTENT).hexdigest() if gzipped else f"md5:{hashlib.md5(CONTENT).hexdigest()}"
    return {"tiny": Source(url, {"numbers": checksum}, gzipped)}


def packed(content: bytes = CONTENT) -> dict[str, bytes]:
    return {"numbers.gz": gzip.compress(content, mtime=0)}


def fetch_tiny(url: str, folder: Path) -> list[Path]:
    return fetch("tiny", folder, progress=False, sources=sources_at(url))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tiny").iterdir())


@pytest.mark.parametrize("gzipped", [True, False])
def test_a_file_is_downloaded_once_and_stored_unpacked(gzipped: bool, serve: Serve, tmp_path: Path) -> None:
    behaviour = Behaviour(packed() if gzipped else {"numbers": CONTENT})
    sources = sources_at(serve(behaviour), gzipped)
    for _ in range(2):
        (path,) = fetch("tiny", tmp_path, progress=False, sources=sources)
        assert path == tmp_path / "tiny" / "numbers"
        assert path.read_bytes() == CONTENT
    assert names(tmp_path) == ["numbers"]
    assert len(behaviour.requests) == 1
    assert check("tiny", tmp_path, sources=sources) == [("numbers", path, "ok")]


def test_the_progress_bar_is_shown_on_stderr(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch("tiny", tmp_path, sources=sources_at(serve(Behaviour(packed()))))
    assert "100%" in capsys.readouterr().err


def test_a_cut_connection_is_tried_again(serve: Serve, tmp_path: Path) -> None:
    behaviour = Behaviour(packed(), cuts=2)
    (path,) = fetch_tiny(serve(behaviour), tmp_path)
    assert path.read_bytes() == CONTENT
    assert len(behaviour.requests) == 3


@pytest.mark.parametrize(
    "body", [gzip.compress(b"other", mtime=0), b"<html>blocked</html>", packed()["numbers.gz"][:-9]]
)
def test_wrong_content_is_not_kept(body: bytes, serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match=r"numbers\.gz does not have the published content.*nothing was kept"):
        fetch_tiny(serve(Behaviour({"numbers.gz": body})), tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("name", "content"), [("numbers", b"wrong"), ("numbers.gz", packed(b"wrong")["numbers.gz"])])
def test_a_wrong_file_is_replaced(name: str, content: bytes, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / name).write_bytes(content)
    url = serve(Behaviour(packed()))
    assert [status.state for status in check("tiny", tmp_path, sources=sources_at(url))] == ["corrupt"]
    fetch_tiny(url, tmp_path)
    assert [status.state for status in check("tiny", tmp_path, sources=sources_at(url))] == ["ok"]


@pytest.mark.parametrize(("name", "content"), [("numbers", CONTENT), ("numbers.gz", packed()["numbers.gz"])])
def test_a_right_file_is_kept(name: str, content: bytes, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / name).write_bytes(content)
    behaviour = Behaviour({})
    assert fetch_tiny(serve(behaviour), tmp_path) == [tmp_path / "tiny" / name]
    assert behaviour.requests == []


@pytest.mark.parametrize(("status", "words"), [(404, "404"), (503, "503")])
def test_a_server_that_refuses_is_reported(status: int, words: str, serve: Serve, tmp_path: Path) -> None:
    behaviour = Behaviour({} if status == 404 else packed(), status=status)
    with pytest.raises(DeltaflError, match=rf"numbers\.gz cannot be downloaded \({words}.*try again later"):
        fetch_tiny(serve(behaviour), tmp_path)
    assert len(behaviour.requests) == 1 + RETRIES


def test_a_folder_that_cannot_be_made(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeltaflError, match=r"cannot write .*file.*give another directory"):
        fetch_tiny(serve(Behaviour(packed())), tmp_path / "file")


def test_unknown_names_and_folders() -> None:
    mistakes: list[tuple[Callable[[], object], str]] = [
        (lambda: fetch("digits"), "unknown data set that can be fetched 'digits'"),
        (lambda: check("fashion_mnist"), "did you mean 'fashion-mnist'"),
        (lambda: check("mnist", Path("nowhere")), "nowhere, which is not a folder"),
    ]
    for make, words in mistakes:
        with pytest.raises(DeltaflError, match=words):
            make()


def test_without_a_folder_the_users_cache_is_used(serve: Serve, tmp_path: Path) -> None:
    sources = sources_at(serve(Behaviour(packed())))
    assert check("tiny", sources=sources) == [("numbers", None, "missing")]
    (path,) = fetch("tiny", progress=False, sources=sources)
    assert path == tmp_path / "cache" / "deltafl" / "tiny" / "numbers"
    assert check("tiny", sources=sources) == [("numbers", path, "ok")]


def test_check_returns_place_and_state_of_each_file(tmp_path: Path) -> None:
    checksums = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("packed", "plain", "cut", "absent")}
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "packed.gz").write_bytes(gzip.compress(b"packed"))
    (folder / "plain").write_bytes(b"plain")
    (folder / "cut.gz").write_bytes(gzip.compress(b"cut")[:-4])
    assert check("tiny", tmp_path, sources={"tiny": Source("", checksums)}) == [
        ("packed", folder / "packed.gz", "ok"),
        ("plain", folder / "plain", "ok"),
        ("cut", folder / "cut.gz", "corrupt"),
        ("absent", None, "missing"),
    ]


def test_folders_are_searched_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path))
    given = tmp_path / "data"
    given.mkdir()
    sources = {"tiny": Source("", {}, system_folders=(Path("/system"),))}
    assert data_folders("tiny", given, sources) == [
        given / "tiny",
        given,
        tmp_path / "tiny",
        tmp_path,
        Path("/system"),
        tmp_path / "cache" / "deltafl" / "tiny",
    ]


def npz(shape: str) -> bytes:
    """An archive whose array ``x`` has a header of its own."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"abc")
    return file.getvalue()


def changed(content: bytes, local: int, central: int, value: int) -> bytes:
    """The archive with another byte in the header of its file, and in that of the directory."""
    new = bytearray(content)
    new[local] = new[content.index(b"PK\x01\x02") + central] = value
    return bytes(new)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npz(f"({10**15},)"), "Unable to allocate 909"),
        (npz(f"({2**70},)"), ""),
        (npz("('"), ""),
        (npz("(3,"), ""),
        (npz("(3,)")[:-100], ""),
        (b"", ""),
        (b"PK no zip", ""),
        (changed(npz("(3,)"), 6, 8, 1), "encrypted"),
        (changed(npz("(3,)"), 8, 10, 99), "compression method is not supported"),
        (changed(npz("(3,)"), 8, 10, 14), ""),  # no LZMA
    ],
)
def test_broken_archives_of_arrays_are_one_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(npz("(3,)"))
    assert read_arrays(path)["x"].tobytes() == b"abc"
    path.write_bytes(content)
    with pytest.raises(DeltaflError, match=rf"x\.npz is not an NPZ file of plain arrays: .*{words}"):
        read_arrays(path)


def test_archives_without_an_array_or_with_pickles(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for arrays in ({"y": np.zeros(1)}, {"x": np.array([None])}):
        np.savez(path, **arrays)
        with pytest.raises(DeltaflError, match="is not an archive with the arrays x"):
            read_arrays(path, ("x",))


def test_images_are_decoded_once_and_a_broken_cache_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def decode() -> np.ndarray:
        calls.append(1)
        return np.full((2, 3), 7, np.uint8)

    file = tmp_path / "folder" / "a.npy"
    for content, expected in ((None, 1), (None, 1), (b"", 2), (b"no array", 3)):
        if content is not None:
            file.write_bytes(content)
        assert (cached_images(file, (2, 3), decode) == 7).all()
        assert len(calls) == expected
    assert [path.name for path in file.parent.iterdir()] == ["a.npy"]  # nothing half written is left
    (tmp_path / "file").write_text("where the folder should be")
    assert len(cached_images(tmp_path / "file" / "a.npy", (2, 3), decode)) == 2
    assert "cannot be kept" in caplog.text
