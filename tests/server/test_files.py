"""/v1/files through the official client: kept, listed, given back, bounded, and never a path."""

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import FileDeleted, FileObject

from banyan.base.errors import RequestError
from banyan.config.schema import ServerConfig
from banyan.server.openai.files import read_form
from banyan.server.store.files import PIECE_BYTES
from banyan.server.store.storage import Storage, storage_path
from tests.server.fakes import Site
from tests.support.flags import config_of

CONTENT = b'{"custom_id": "a"}\r\n--not-a-boundary\r\n\x00\xff\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    monkeypatch.setenv("HOME", str(folder.parent))
    config = config_of("--file-storage-path", str(folder), "--max-body-bytes", "4096").server
    with (
        Site(config).serving() as site,
        openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def upload(client: openai.OpenAI, name: str = "in.jsonl", content: bytes = CONTENT) -> FileObject:
    made = client.files.create(file=(name, content), purpose="batch")
    FileObject.model_validate(made.model_dump(), strict=True)
    return made


def test_a_file_comes_back_byte_for_byte(client: openai.OpenAI) -> None:
    made = upload(client)
    assert (made.filename, made.bytes, made.purpose) == ("in.jsonl", len(CONTENT), "batch")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == CONTENT


def test_files_lie_in_the_folder_that_the_flag_names(client: openai.OpenAI, folder: Path) -> None:
    assert not folder.exists(), "nothing is made before something is kept"
    made = upload(client)
    assert (folder / made.id).read_bytes() == CONTENT
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / made.id).stat().st_mode & 0o777 == 0o600


def test_without_the_flag_every_port_has_a_folder_of_its_own() -> None:
    assert storage_path(ServerConfig(port=1)) != storage_path(ServerConfig(port=2))


def test_a_name_is_only_a_name(client: openai.OpenAI, folder: Path) -> None:
    made = upload(client, "../../etc/pass wd\u00e9.jsonl")
    assert made.filename == "../../etc/pass wd\u00e9.jsonl"
    assert [p.name for p in folder.iterdir() if made.id in p.name] != []
    assert {p.parent for p in folder.parent.rglob("*") if p.is_file()} == {folder}


@pytest.mark.parametrize("id", ["..", "%2e%2e", "lock", "file-0", "../kept/lock", "file-%00"])
def test_what_is_no_id_is_no_file(client: openai.OpenAI, id: str) -> None:
    upload(client)
    answer = httpx.get(f"{client.base_url}files/{id}/content")
    assert answer.status_code == 404


def test_a_list_has_pages(client: openai.OpenAI) -> None:
    made = [upload(client, f"{i}.jsonl").id for i in range(5)]
    assert [f.id for f in client.files.list(limit=2, order="asc")] == made
    assert [f.id for f in client.files.list(limit=2)] == made[::-1]
    assert client.files.list(purpose="batch_output").data == []


def test_a_deleted_file_is_gone(client: openai.OpenAI, folder: Path) -> None:
    made = upload(client)
    gone = client.files.delete(made.id)
    FileDeleted.model_validate(gone.model_dump(), strict=True)
    assert not list(folder.glob("file-*"))
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


def test_a_file_that_is_too_large_is_413(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, content=b"x" * 5000)
    assert caught.value.status_code == 413


def test_files_beyond_the_bound_are_refused(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banyan.server.store.files.MAX_FILES", 1)
    upload(client)
    with pytest.raises(openai.APIStatusError, match="at most 1 files") as caught:
        upload(client)
    assert caught.value.status_code == 507


def test_parallel_uploads_do_not_pass_the_bound_together(folder: Path) -> None:
    async def scenario() -> list[object]:
        storage = await Storage(folder).ready()
        adds = (storage.files.add("f", "batch", b"x" * 60, "") for _ in range(5))
        return await asyncio.gather(*adds, return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("banyan.server.store.files.MAX_TOTAL_BYTES", 130)
        found = asyncio.run(scenario())
    refused = [f for f in found if isinstance(f, RequestError)]
    assert len(refused) == 3 and {error.status for error in refused} == {507}
    assert sum(p.stat().st_size for p in folder.iterdir() if p.suffix == "") == 120


def test_a_file_is_given_in_pieces_however_slowly_it_is_taken(folder: Path) -> None:
    content = os.urandom(PIECE_BYTES * 2 + 5)

    async def scenario() -> list[bytes]:
        files = (await Storage(folder).ready()).files
        stored = await files.add("f", "batch", content, "")
        async with aclosing(files.pieces(stored)) as pieces:
            return [piece async for piece in pieces]

    found = asyncio.run(scenario())
    assert [len(piece) for piece in found] == [PIECE_BYTES, PIECE_BYTES, 5]
    assert b"".join(found) == content


def test_a_disk_that_hangs_holds_up_nobody_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop answers while a thread waits for the disk, whatever it waits for."""
    gate, reached = threading.Event(), threading.Event()
    monkeypatch.setattr(Storage, "open", lambda _: (reached.set(), gate.wait(60)))
    config = config_of("--file-storage-path", str(folder)).server
    folder.mkdir()
    (folder / "lock").touch()
    with Site(config).serving() as site, ThreadPoolExecutor(1) as pool:
        listing = pool.submit(httpx.get, f"{site.url}/v1/files", timeout=60)
        try:
            assert reached.wait(60)
            assert site.http.get("/livez").status_code == 200
        finally:
            gate.set()
        assert listing.result(60).status_code == 200


def test_a_file_for_another_purpose_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        client.files.create(file=("a", CONTENT), purpose="user_data")


def test_a_field_without_effect_is_reported(client: openai.OpenAI) -> None:
    answer = client.files.with_raw_response.create(
        file=("a", CONTENT),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert "expires_after" in answer.headers["x-banyan-warnings"]


def test_files_outlive_the_server_and_torn_uploads_do_not(folder: Path) -> None:
    for name in ("file-aa", "file-bb", "file-bb.json.draft"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"torn")
    (folder / "file-cc").write_bytes(b"whole")
    facts = b'{"id":"file-cc","filename":"f","purpose":"batch","num_bytes":5,"created_at":7}'
    (folder / "file-cc.json").write_bytes(facts)
    storage = Storage(folder).open()
    assert [f.id for f in storage.files.all("")] == ["file-cc"]
    assert sorted(p.name for p in folder.iterdir()) == ["file-cc", "file-cc.json", "lock"]


def test_a_folder_with_foreign_content_is_named(folder: Path) -> None:
    folder.mkdir()
    (folder / "batch_0.json").write_text("{")
    with pytest.raises(RequestError, match="batch_0.json cannot be read"):
        Storage(folder).open()


def test_two_servers_do_not_share_a_folder(folder: Path) -> None:
    first = Storage(folder).open()
    with pytest.raises(RequestError, match="another server"):
        Storage(folder).open()
    first.release()
    Storage(folder).open()


FORM = "multipart/form-data; boundary=b"
NAMELESS = b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--"
OPEN_ENDED = b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\nx"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", FORM),
        (b"--b\r\n\r\n--b--", "multipart/form-data"),
        (OPEN_ENDED, FORM),
        (b"--b\r\nX: y\r\n\r\nx\r\n--b--", FORM),
        (NAMELESS, FORM),
        (b"--b\r\n" * 99, FORM),
        (b"{}", "application/json"),
    ],
)
def test_a_broken_form_is_refused(body: bytes, kind: str) -> None:
    with pytest.raises(RequestError):
        read_form(body, kind)
