import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from isoscale.data.tools import downloads as fetch
from isoscale.data.tools.published import Entry
from isoscale.science.images import downloads as catalog
from tests import warm

CONTENTS = {"first": b"one" * 100_000, "second": b"two" * 1000}
HASHES = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}


def archive(contents: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


class Server:
    """A web server in a thread; `answer` says what it does with each path."""

    def __init__(self) -> None:
        self.files = {f"/{name}.gz": gzip.compress(content, mtime=0) for name, content in CONTENTS.items()}
        self.files["/packed.tar.gz"] = archive({f"inner/{name}": content for name, content in CONTENTS.items()})
        self.asked: list[str] = []
        self.drop_after: int | None = None
        self.silent = threading.Event()
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *words: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append(handler.path)
        if self.silent.is_set():
            self.release.wait(30)
            return
        content = self.files.get(handler.path)
        if content is None:
            handler.send_error(404)
            return
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: self.drop_after])
        handler.wfile.flush()
        if self.drop_after is not None:
            handler.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.release.set()
    running.http.shutdown()
    running.http.server_close()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small things to fetch: one file by file, one packed."""
    monkeypatch.delenv("ISOSCALE_DATA", raising=False)
    nowhere = ("http://127.0.0.1:9/",)
    loose = Entry("loose", "two files", "loose", HASHES, nowhere, "look at {folder}", suffix=".gz")
    packed = Entry("packed", "an archive", "packed", HASHES, nowhere, "go", archive="packed.tar.gz", inside="inner")
    for entry in (loose, packed):
        monkeypatch.setitem(catalog.CATALOG, entry.name, entry)


def whole(folder: Path) -> bool:
    """Whether a folder holds the two files and nothing else."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS


@pytest.mark.parametrize(("name", "home"), [("loose", "data/loose"), ("packed", "data/packed/inner")])
def test_what_is_fetched_is_unpacked_in_the_data_folder(isoscale, tmp_path: Path, server: Server, name, home):
    done = isoscale("data", "get", name, "--mirror", server.address)
    assert done.code == 0 and f"{name} is in {home}\nnext: " in done.out
    assert whole(tmp_path / home)


def test_the_next_step_names_the_folder(isoscale, server: Server):
    assert (
        "next: look at elsewhere/loose"
        in isoscale("data", "get", "loose", "--to", "elsewhere", "--mirror", server.address + "/").out
    )


def test_the_data_folder_can_be_set_for_all_commands(isoscale, tmp_path: Path, server: Server, monkeypatch):
    monkeypatch.setenv("ISOSCALE_DATA", str(tmp_path / "big disk"))
    isoscale("data", "get", "loose", "--mirror", server.address)
    assert whole(tmp_path / "big disk" / "loose")


def test_what_is_there_and_right_is_not_fetched_again(isoscale, tmp_path: Path, server: Server):
    isoscale("data", "get", "loose", "--mirror", server.address)
    server.asked.clear()
    assert "already, and whole" in isoscale("data", "get", "loose", "--mirror", server.address).out
    assert server.asked == []
    (tmp_path / "data/loose/first").write_bytes(b"damaged")
    again = isoscale("data", "get", "loose", "--mirror", server.address)
    assert again.code == 0 and "data/loose/first is damaged and will be replaced" in again.out
    assert server.asked == ["/first.gz"] and whole(tmp_path / "data/loose")


def test_the_second_address_is_asked_where_the_first_fails(isoscale, tmp_path: Path, server: Server, monkeypatch):
    nowhere_first = Entry("loose", "", "loose", HASHES, ("http://127.0.0.1:9/", server.address), "", suffix=".gz")
    monkeypatch.setitem(catalog.CATALOG, "loose", nowhere_first)
    assert isoscale("data", "get", "loose").code == 0
    assert whole(tmp_path / "data/loose")


def test_a_connection_that_ends_half_way_leaves_nothing_and_can_be_started_again(isoscale, tmp_path, server: Server):
    server.drop_after = 200
    failed = isoscale("data", "get", "loose", "--mirror", server.address)
    length = len(server.files["/first.gz"])
    assert failed.code == 2 and f"the connection ended after 200 of {length} bytes" in failed.err
    assert list((tmp_path / "data/loose").iterdir()) == []
    server.drop_after = None
    assert isoscale("data", "get", "loose", "--mirror", server.address).code == 0
    assert whole(tmp_path / "data/loose")


@pytest.mark.parametrize("name", ["loose", "packed"])
@pytest.mark.parametrize("damage", ["wrong", "page", "cut"])
def test_wrong_bytes_never_get_a_name(isoscale, tmp_path: Path, server: Server, name, damage):
    whole_archive = server.files["/packed.tar.gz"]
    wrong = dict.fromkeys(CONTENTS, b"wrong")
    answers = {
        "wrong": {"/first.gz": gzip.compress(b"wrong"), "/packed.tar.gz": archive(wrong)},
        "page": {"/first.gz": b"<html>log in first</html>", "/packed.tar.gz": b"<html>log in first</html>"},
        "cut": {
            "/first.gz": server.files["/first.gz"][:-30],
            "/packed.tar.gz": whole_archive[: len(whole_archive) // 4],
        },
    }
    server.files |= answers[damage]
    failed = isoscale("data", "get", name, "--mirror", server.address)
    assert failed.code == 2 and f"cannot fetch {name} from here" in failed.err and "Traceback" not in failed.err
    assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []


def test_an_answer_of_the_server_is_said(isoscale, tmp_path: Path, server: Server):
    del server.files["/second.gz"]
    failed = isoscale("data", "get", "loose", "--mirror", server.address)
    assert failed.code == 2 and f"{server.address}/second.gz: the server answers 404 Not Found" in failed.err
    assert (tmp_path / "data/loose/first").exists(), "what came is kept"


def test_a_server_that_never_answers_is_given_up(isoscale, server: Server, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.5)
    server.silent.set()
    failed = isoscale("data", "get", "loose", "--mirror", server.address)
    assert failed.code == 2 and "no answer for 0 s" in failed.err


def test_without_a_network_the_message_says_what_to_bring_from_where_to_where(isoscale, tmp_path: Path):
    failed = isoscale("data", "get", "loose")
    lines = [line.strip() for line in failed.err.splitlines()]
    assert failed.code == 2 and lines[1] == "http://127.0.0.1:9/first.gz: Connection refused"
    assert "http://127.0.0.1:9/first.gz  →  data/loose/first.gz" in lines
    assert "http://127.0.0.1:9/second.gz  →  data/loose/second.gz" in lines
    assert lines[-1].endswith("isoscale data get loose --from DIR")
    packed = isoscale("data", "get", "packed").err
    assert "http://127.0.0.1:9/packed.tar.gz  →  data/packed/packed.tar.gz" in packed and "unpack it there" in packed
    assert not (tmp_path / "data").exists(), "a failure leaves no empty folders"


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "resnet18-imagenet"])
def test_the_addresses_of_all_that_is_published_are_well_formed(name):
    entry = catalog.CATALOG[name]
    assert all(address.startswith("http") and address.endswith("/") for address in entry.addresses)
    lengths = {len(digest) for digest in entry.files.values()}
    assert lengths == ({8} if name in catalog.WEIGHTS else {64})


def test_staged_files_are_found_below_a_folder_by_name_and_content(isoscale, tmp_path: Path):
    staged = tmp_path / "staged"
    (staged / "a").mkdir(parents=True)
    (staged / "b").mkdir()
    (staged / "a" / "first").write_bytes(b"a file of another data set under the same name")
    (staged / "b" / "first").write_bytes(CONTENTS["first"])
    (staged / "b" / "second.gz").write_bytes(gzip.compress(CONTENTS["second"]))
    assert isoscale("data", "get", "loose", "--from", str(staged)).code == 0
    assert whole(tmp_path / "data/loose")


def test_a_staged_archive_cannot_write_outside(isoscale, tmp_path: Path):
    (tmp_path / "staged").mkdir()
    outside = {"../../first": CONTENTS["first"], "/tmp/second": CONTENTS["second"], "../evil": b"evil"}
    (tmp_path / "staged/packed.tar.gz").write_bytes(archive(outside))
    assert isoscale("data", "get", "packed", "--from", "staged").code == 0
    assert whole(tmp_path / "data/packed/inner")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "staged"}


def test_staged_files_that_are_missing_or_wrong_are_named(isoscale, tmp_path: Path):
    (tmp_path / "staged").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "staged/first").write_bytes(b"wrong")
    failed = isoscale("data", "get", "loose", "--from", "staged")
    assert failed.code == 2 and "--from staged: did not find first, second" in failed.err
    assert "staged/first: the content of first is not the published one" in failed.err
    assert "there is no such folder" in isoscale("data", "get", "loose", "--from", "nowhere").err
    assert (
        "expected there or in a folder below, packed.tar.gz" in isoscale("data", "get", "packed", "--from", "empty").err
    )


def test_a_wrong_name_is_answered_with_the_nearest(isoscale):
    refused = isoscale("data", "get", "mnits")
    assert refused.code == 2 and 'did you mean "mnist"?' in refused.err
    assert 'did you mean "cifar10"?' in isoscale("data", "info", "cifar").err
    assert 'did you mean "images/digits"?' in isoscale("data", "info", "images/digit").err


def test_two_origins_at_once_are_refused(isoscale, server: Server):
    refused = isoscale("data", "get", "loose", "--from", ".", "--mirror", server.address)
    assert refused.code == 2 and "leave one of them out" in refused.err
    assert "begins with http://" in isoscale("data", "get", "loose", "--mirror", "example.org").err


def test_a_list_names_all_that_can_be_fetched(isoscale):
    listed = isoscale("data", "get")
    assert listed.code == 0
    assert {"mnist", "fashion-mnist", "cifar10", "resnet50-imagenet"} <= {
        line.split(" ")[0] for line in listed.out.splitlines()
    }


def test_a_full_disk_is_said_and_leaves_nothing_half(isoscale, tmp_path: Path, server: Server):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        failed = isoscale("data", "get", "loose", "--mirror", server.address)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.code == 2 and "cannot write into data/loose: File too large" in failed.err
    assert list((tmp_path / "data/loose").iterdir()) == []


def test_a_folder_that_may_not_be_written_is_said(isoscale, tmp_path: Path, server: Server):
    (tmp_path / "data").write_text("a file where the folder should be")
    failed = isoscale("data", "get", "loose", "--mirror", server.address)
    assert failed.code == 2 and "cannot write into data/loose: Not a directory" in failed.err


def test_a_download_that_was_killed_can_be_started_again(isoscale, tmp_path: Path, server: Server):
    server.silent.set()
    words = "import sys; from isoscale.science.images.downloads import CATALOG; "
    words += "from isoscale.data.tools.published import Entry; "
    words += f"CATALOG['loose'] = Entry('loose', '', 'loose', {HASHES!r}, (), '', suffix='.gz'); "
    words += f"sys.argv = ['isoscale', 'data', 'get', 'loose', '--mirror', {server.address!r}]; "
    words += "from isoscale.cli.main import run; run()"
    process = warm.Popen([sys.executable, "-c", words], cwd=tmp_path)
    while not server.asked:
        time.sleep(0.05)
    process.kill()
    process.wait()
    server.silent.clear()
    left = tmp_path / "data/loose/.incoming-left"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    assert isoscale("data", "get", "loose", "--mirror", server.address).code == 0
    assert whole(tmp_path / "data/loose"), "what was left behind long ago is swept away"


@pytest.mark.slow
def test_real_files_served_over_http_train_a_recipe(isoscale, tmp_path: Path, server: Server, real_data: Callable):
    for path in real_data("mnist").iterdir():
        server.files[f"/{path.name}.gz"] = gzip.compress(path.read_bytes(), 1)
    assert isoscale("data", "get", "mnist", "--mirror", server.address).code == 0
    shown = json.loads(isoscale("data", "info", "mnist", "--json").out)
    assert shown["checksum"] is True and shown["path"] == "data/mnist" and shown["bytes"] == 54_950_048
    assert shown["roles"]["train"]["samples"] == 60_000
    assert shown["roles"]["train"]["classes"]["target"]["1"] == 6742
    keys = ["data.class=mnist", "~data.split", "data.val=100", "task.model.widths=[784,8,10]"]
    assert isoscale("train", "images/digits", *keys, "--dev", "2").code == 0


def test_real_cifar_10_is_taken_from_its_archive(isoscale, tmp_path: Path, real_data: Callable):
    folder = real_data("cifar10")
    (tmp_path / "staged").mkdir()
    with tarfile.open(tmp_path / "staged/cifar-10-binary.tar.gz", "w") as tar:
        tar.add(folder / "cifar-10-batches-bin", "cifar-10-batches-bin")
    assert isoscale("data", "get", "cifar10", "--from", "staged").code == 0
    shutil.rmtree(tmp_path / "staged")
    assert "checksum      the published files" in isoscale("data", "info", "cifar10").out


def test_info_says_what_is_there_and_how_to_get_the_rest(isoscale, tmp_path: Path, server: Server):
    isoscale("data", "get", "loose", "--mirror", server.address)
    shown = isoscale("data", "info").out
    assert "loose              there    data/loose, 0.3 MB" in shown
    assert "mnist              missing  isoscale data get mnist" in shown
    entries = json.loads(isoscale("data", "info", "--json").out)["entries"]
    assert entries["loose"] == {"present": True, "path": "data/loose", "bytes": 303_000}
    assert entries["packed"]["present"] is False


def test_info_finds_damage_and_says_how_to_repair_it(isoscale, tmp_path: Path, server: Server):
    isoscale("data", "get", "loose", "--mirror", server.address)
    assert "checksum      the published files" in isoscale("data", "info", "loose").out
    (tmp_path / "data/loose/second").write_bytes(b"damaged")
    shown = isoscale("data", "info", "loose").out
    assert "damaged: data/loose/second" in shown and "isoscale data get loose" in shown
    assert json.loads(isoscale("data", "info", "loose", "--json").out)["checksum"] is False


def test_info_on_a_recipe_says_what_the_task_will_be_fed(isoscale, tmp_path: Path):
    values = np.array([[1.0, 2.0], [3.0, np.nan], [5.0, 6.0], [7.0, 8.0]], np.float32)
    np.savez(tmp_path / "mine.npz", input=values, target=np.arange(4))
    keys = ["data.class=arrays", "data.path=mine.npz", "data.split={train: 4}"]
    facts = json.loads(isoscale("data", "info", "images/digits", *keys, "--json").out)
    assert facts["roles"].keys() == {"train"}
    assert facts["roles"]["train"]["tensors"] == {
        "input": {"shape": [2], "dtype": "float32", "min": "nan", "max": "nan"},
        "target": {"shape": [], "dtype": "int64", "min": 0, "max": 3},
    }
    shown = isoscale("data", "info", "images/digits").out.splitlines()
    assert "  train         1,438 samples" in shown and "    input       uint8, 8×8, 0 to 16" in shown
    assert "    classes     0 148, 1 147, 2 143, 3 141, 4 147" in shown


def test_a_path_without_a_data_set_is_refused(isoscale):
    refused = isoscale("data", "info", "images/digits", "--path", ".")
    assert refused.code == 2 and "--path says where a data set lies" in refused.err


def test_missing_data_is_said_before_training_starts(isoscale, tmp_path: Path):
    refused = isoscale("train", "images/digits", "data.class=mnist", "~data.split")
    assert refused.code == 2 and "type: isoscale data get mnist" in refused.err and "Traceback" not in refused.err
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("entry", catalog.DATA_SETS.values(), ids=catalog.DATA_SETS)
def test_the_recipe_to_train_next_is_there(isoscale, entry: Entry):
    assert isoscale("recipe", "check", entry.usage.rpartition(" ")[2]).code == 0
