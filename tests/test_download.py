"""Fetching and checking, against a real HTTP server on this machine that can cut connections."""

import gzip
import hashlib
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deltafl.errors import DeltaflError
from deltafl.tasks.download import Patience, check, fetch
from deltafl.tasks.idx import read_pieces
from deltafl.tasks.sources import (
    ARCHIVES,
    LARGEST,
    SOURCES,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    Archive,
    Source,
)

CONTENT = bytes(range(256)) * 2000
PATIENCE = Patience(attempts=3, wait_s=0.0, timeout_s=5.0)


@dataclass
class Behaviour:
    """What the server does; tests set it and read what was asked for."""

    files: dict[str, bytes]
    ranges: bool = True
    wrong_range: bool = False
    cut_after: list[int] = field(default_factory=list)  # bytes sent before closing, one entry a request
    status: int = 200
    asked: list[tuple[str, str | None]] = field(default_factory=list)


def make_handler(behaviour: Behaviour) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            behaviour.asked.append((self.path, wanted))
            body = behaviour.files.get(self.path.lstrip("/"))
            if body is None or behaviour.status != 200:
                self.send_error(behaviour.status if body is not None else 404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and behaviour.ranges else 0
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                first = 0 if behaviour.wrong_range else start
                self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            cut = behaviour.cut_after.pop(0) if behaviour.cut_after else len(body)
            self.wfile.write(body[start : start + cut])

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


Serve = Callable[[Behaviour], str]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a server with a behaviour; gives its address."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
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


def sources_at(url: str, content: bytes = CONTENT, **sizes: int) -> dict[str, Source]:
    return {"tiny": Source(url, {"numbers": hashlib.sha256(content).hexdigest()}, sizes=sizes)}


def packed(content: bytes = CONTENT) -> dict[str, bytes]:
    # Level 0 keeps the size, so that a cut in the middle is one.
    return {"numbers.gz": gzip.compress(content, compresslevel=0, mtime=0)}


def fetch_tiny(url: str, folder: Path) -> list[Path]:
    return fetch("tiny", folder, progress=False, sources=sources_at(url), patience=PATIENCE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tiny").iterdir())


def test_a_whole_download_then_nothing_more_to_do(serve: Serve, tmp_path: Path) -> None:
    behaviour = Behaviour(packed())
    url = serve(behaviour)
    (path,) = fetch_tiny(url, tmp_path)
    assert path == tmp_path / "tiny" / "numbers.gz"
    assert gzip.decompress(path.read_bytes()) == CONTENT
    assert names(tmp_path) == ["numbers.gz"]
    assert fetch_tiny(url, tmp_path) == [path]
    assert behaviour.asked == [("/numbers.gz", None)]


def test_the_bar_reaches_the_end(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(Behaviour(packed()))
    fetch("tiny", tmp_path, sources=sources_at(url), patience=PATIENCE)
    assert "numbers.gz" in capsys.readouterr().out


def test_a_cut_connection_is_continued_where_it_was_cut(serve: Serve, tmp_path: Path) -> None:
    behaviour = Behaviour(packed(), cut_after=[100_000, 50_000])
    (path,) = fetch_tiny(serve(behaviour), tmp_path)
    assert gzip.decompress(path.read_bytes()) == CONTENT
    assert [wanted for _, wanted in behaviour.asked] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_part_left_by_an_earlier_call_is_continued(serve: Serve, tmp_path: Path) -> None:
    behaviour = Behaviour(packed(), cut_after=[100_000, 1, 1])
    url = serve(behaviour)
    with pytest.raises(DeltaflError, match=r"after 3 attempts .*100002 of"):
        fetch_tiny(url, tmp_path)
    assert names(tmp_path) == ["numbers.gz.part"]
    (path,) = fetch_tiny(url, tmp_path)
    assert behaviour.asked[-1] == ("/numbers.gz", "bytes=100002-")
    assert gzip.decompress(path.read_bytes()) == CONTENT
    assert names(tmp_path) == ["numbers.gz"]


@pytest.mark.parametrize("how", ["no ranges", "another range"])
def test_a_server_that_cannot_continue_is_asked_for_everything(how: str, serve: Serve, tmp_path: Path) -> None:
    behaviour = Behaviour(packed(), ranges=how != "no ranges", wrong_range=how == "another range", cut_after=[100_000])
    (path,) = fetch_tiny(serve(behaviour), tmp_path)
    assert gzip.decompress(path.read_bytes()) == CONTENT
    assert len(behaviour.asked) == (2 if how == "no ranges" else 3)


def test_a_part_longer_than_the_file_is_dropped(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "numbers.gz.part").write_bytes(bytes(1_000_000))
    behaviour = Behaviour(packed())
    (path,) = fetch_tiny(serve(behaviour), tmp_path)
    assert gzip.decompress(path.read_bytes()) == CONTENT
    assert [wanted for _, wanted in behaviour.asked] == ["bytes=1000000-", None]


@pytest.mark.parametrize(
    "body", [gzip.compress(b"something else", mtime=0), b"<html>blocked</html>", packed()["numbers.gz"][:-9]]
)
def test_wrong_content_is_removed(body: bytes, serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match=r"numbers\.gz does not have the published content.*removed"):
        fetch_tiny(serve(Behaviour({"numbers.gz": body})), tmp_path)
    assert names(tmp_path) == []


def test_a_wrong_file_that_is_there_already_is_replaced(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "numbers").write_bytes(b"wrong")
    fetch_tiny(serve(Behaviour(packed())), tmp_path)
    assert names(tmp_path) == ["numbers.gz"]


def test_a_right_unpacked_file_is_kept(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "numbers").write_bytes(CONTENT)
    behaviour = Behaviour(packed())
    assert fetch_tiny(serve(behaviour), tmp_path) == [tmp_path / "tiny" / "numbers"]
    assert behaviour.asked == []


def test_no_more_is_unpacked_than_the_content_can_be(serve: Serve, tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(64 << 20), mtime=0)
    sources = sources_at(serve(Behaviour({"numbers.gz": bomb})), numbers=len(CONTENT))
    tracemalloc.start()
    with pytest.raises(DeltaflError, match="does not have the published content"):
        fetch("tiny", tmp_path, progress=False, sources=sources, patience=PATIENCE)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 << 20
    assert names(tmp_path) == []
    (tmp_path / "tiny" / "numbers.gz").write_bytes(bomb)
    with pytest.raises(DeltaflError, match=r"numbers\.gz holds more than 512000 bytes"):
        list(read_pieces(tmp_path / "tiny" / "numbers.gz", len(CONTENT)))


def test_no_more_is_taken_than_the_file_can_have(serve: Serve, tmp_path: Path) -> None:
    url = serve(Behaviour({"numbers.gz": bytes(8 << 20)}))
    with pytest.raises(DeltaflError, match=r"sends more than 1560576 bytes.*removed"):
        fetch("tiny", tmp_path, progress=False, sources=sources_at(url, numbers=len(CONTENT)), patience=PATIENCE)
    assert names(tmp_path) == []


def test_published_sizes_are_those_of_the_headers() -> None:
    for source in SOURCES.values():
        assert {file: source.limit(file) for file in source.sha256} == {
            TRAIN_IMAGES: 47_040_016,
            TRAIN_LABELS: 60_008,
            TEST_IMAGES: 7_840_016,
            TEST_LABELS: 10_008,
        }
    assert Source("", {"a": ""}).limit("a") == LARGEST


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_cannot_be_written_to_is_told_at_once(serve: Serve, tmp_path: Path) -> None:
    behaviour = Behaviour(packed())
    url = serve(behaviour)
    part = tmp_path / "tiny" / "numbers.gz.part"
    part.mkdir(parents=True)
    with pytest.raises(DeltaflError, match=r"cannot write .*numbers\.gz\.part: Is a directory; make room, or give"):
        fetch_tiny(url, tmp_path)
    part.rmdir()
    part.symlink_to("/dev/full")
    with pytest.raises(DeltaflError, match=r"cannot write .*tiny: No space left on device; make room"):
        fetch_tiny(url, tmp_path)
    assert len(behaviour.asked) == 2


def test_a_missing_file_is_not_asked_for_again(serve: Serve, tmp_path: Path) -> None:
    behaviour = Behaviour({})
    with pytest.raises(DeltaflError, match=r"numbers\.gz cannot be had: the server answers 404"):
        fetch_tiny(serve(behaviour), tmp_path)
    assert len(behaviour.asked) == 1


def test_a_busy_server_is_asked_again(serve: Serve, tmp_path: Path) -> None:
    behaviour = Behaviour(packed(), status=503)
    with pytest.raises(DeltaflError, match=r"after 3 attempts .*503"):
        fetch_tiny(serve(behaviour), tmp_path)
    assert len(behaviour.asked) == 3


def test_nobody_listens(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(DeltaflError, match="after 3 attempts"):
        fetch_tiny("http://127.0.0.1:9/", tmp_path)


def test_names_and_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mistakes: list[tuple[Callable[[], object], str]] = [
        (lambda: fetch("digits", tmp_path), "unknown data set with files 'digits'"),
        (lambda: fetch("fashion_mnist", tmp_path), "did you mean 'fashion-mnist'"),
        (lambda: check("fashion_mnist", tmp_path), "did you mean 'fashion-mnist'"),
        (lambda: fetch("mnist", tmp_path / "file"), "cannot make the folder"),
        (lambda: check("mnist", tmp_path / "nowhere"), "not a folder"),
    ]
    for make, words in mistakes:
        with pytest.raises(DeltaflError, match=words):
            make()


def test_without_a_folder_the_users_cache_is_used(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)
    sources = sources_at(serve(Behaviour(packed())))
    assert [status.state for status in check("tiny", sources=sources)] == ["missing"]
    (path,) = fetch("tiny", progress=False, sources=sources, patience=PATIENCE)
    assert path == tmp_path / "deltafl" / "tiny" / "numbers.gz"
    assert check("tiny", sources=sources) == [("numbers", path, "ok")]


def test_check_says_where_and_whether(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)
    sha256 = {
        name: hashlib.sha256(name.encode()).hexdigest() for name in ("packed", "plain", "spoilt", "cut", "absent")
    }
    sources = {"tiny": Source("http://127.0.0.1:9/", sha256)}
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "packed.gz").write_bytes(gzip.compress(b"packed"))
    (folder / "plain").write_bytes(b"plain")
    (folder / "spoilt.gz").write_bytes(gzip.compress(b"spoiled"))
    (folder / "cut.gz").write_bytes(gzip.compress(b"cut")[:-4])
    assert check("tiny", tmp_path, sources=sources) == [
        ("packed", folder / "packed.gz", "ok"),
        ("plain", folder / "plain", "ok"),
        ("spoilt", folder / "spoilt.gz", "corrupt"),
        ("cut", folder / "cut.gz", "corrupt"),
        ("absent", None, "missing"),
    ]


def test_a_data_set_that_is_one_file_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTAFL_DATA", raising=False)
    known = Archive("letters.npz", hashlib.sha256(b"letters").hexdigest(), "letters")
    monkeypatch.setitem(ARCHIVES, "letters", known)
    assert check("letters", tmp_path) == [("letters.npz", None, "missing")]
    path = tmp_path / "letters.npz"
    for content, state in ((b"letters", "ok"), (b"numbers", "corrupt")):
        path.write_bytes(content)
        assert check("letters", tmp_path) == [("letters.npz", path, state)]
