"""A mirror that lies in any field: nothing leaves the cache, and no answer is endless."""

import gzip
import hashlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.base.errors import ModelError
from banyan.config.schema import LoadConfig
from banyan.hub import metadata
from banyan.hub.sources import fetch
from tests.support.fake_hub import COMMIT, REPO, FakeHub, Fault, fake_hub

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "sub/more.json": b"[1]"}
PLACES = ["{outside}/x", "../../../../x", "..", ".", "", "a/../../../../x", "a//x", "a/./x"]
PLACES += ["\\x", "..\\..\\x", "C:\\x", "a\0b", "a\nb", "x" * 300, "~/x", "/", "\u202ex"]
"""Names that lead elsewhere, or that no file has."""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub(FILES, large=("model.safetensors",)) as served:
        yield served


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A cache in a folder with a neighbour; nothing but the cache may change."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept.json").write_text("kept")
    yield tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "outside"]
    assert {p.name: p.read_text() for p in (tmp_path / "outside").iterdir()} == {
        "kept.json": "kept"
    }
    for path in (tmp_path / "cache").rglob("*"):
        assert path.resolve().is_relative_to(tmp_path / "cache"), path


def refused(hub: FakeHub, tree: Path, source: str = REPO, words: str | None = None) -> None:
    with pytest.raises(ModelError, match=words):
        fetch(LoadConfig(source), hub.environment(tree / "cache"))
    assert not list((tree / "cache").rglob("*.json"))


@pytest.mark.parametrize("source", [REPO, f"{REPO}/model.gguf"])
@pytest.mark.parametrize(
    "sha", [*PLACES, None, 7, [COMMIT], COMMIT.upper() + "a", COMMIT[:39], COMMIT + "\n", {"x": 1}]
)
def test_a_commit_that_is_none_is_refused(
    hub: FakeHub, tree: Path, sha: object, source: str
) -> None:
    is_text = isinstance(sha, str)
    hub.facts = {"sha": sha.replace("{outside}", str(tree / "outside")) if is_text else sha}
    refused(hub, tree, source, "names the commit .* 40 hexadecimal digits expected")


@pytest.mark.parametrize("name", [*(p for p in PLACES if p != "~/x"), None, 7, ["x"], {"x": 1}])
def test_a_name_that_leads_elsewhere_is_refused(hub: FakeHub, tree: Path, name: object) -> None:
    is_text = isinstance(name, str)
    bad = name.replace("{outside}", str(tree / "outside")) + ".json" if is_text and name else name
    listed: list[object] = [{"rfilename": known} for known in FILES]
    for item in ({"rfilename": bad}, bad, {}):
        hub.facts = {"siblings": [*listed, item]}
        if bad in ("..json", "...json") and item != {}:
            continue  # names like any other
        refused(hub, tree, words="is not a safe name")


@pytest.mark.parametrize("siblings", [None, {}, "x", 7, {"rfilename": "x"}])
def test_a_list_that_is_none_is_refused(hub: FakeHub, tree: Path, siblings: object) -> None:
    hub.facts = {"siblings": siblings}
    refused(hub, tree, words="lists no files")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.json", "a.json"], "lists a file twice"),
        (["a", "a/b.json"], "in a folder that is a file"),
        (["m/n/o.json", "m", "x"], "in a folder that is a file"),
    ],
)
def test_names_that_exclude_each_other_are_refused(
    hub: FakeHub, tree: Path, names: list[str], words: str
) -> None:
    hub.facts = {"siblings": [{"rfilename": name} for name in ["model.safetensors", *names]]}
    refused(hub, tree, words=words)


@pytest.mark.parametrize("size", [-1, 1.5, "7", True, 2**63, 2**64, 1e300, [1], {}])
def test_a_size_that_is_none_is_refused(hub: FakeHub, tree: Path, size: object) -> None:
    hub.item = {"size": size}
    refused(hub, tree, words="states the size")


@pytest.mark.parametrize("sha256", [7, "", "x" * 64, "../" * 21 + "x", "/" + "a" * 63, ["a"]])
def test_a_hash_that_is_none_is_refused(hub: FakeHub, tree: Path, sha256: object) -> None:
    hub.item = {"lfs": {"sha256": sha256, "size": 3}}
    refused(hub, tree, words="states the sha256")


@pytest.mark.parametrize("header", ["X-Repo-Commit", "ETag", "X-Linked-ETag"])
@pytest.mark.parametrize("place", ["{outside}/x", "../../../../x", "..", "a/b", '"../x"', "W/../x"])
def test_a_header_never_becomes_a_path(hub: FakeHub, tree: Path, header: str, place: str) -> None:
    hub.headers = {header: place.replace("{outside}", str(tree / "outside"))}
    if header == "X-Repo-Commit":
        return refused(hub, tree, words="answers for the commit")
    try:
        folder = Path(fetch(LoadConfig(REPO), hub.environment(tree / "cache")))
    except ModelError as error:
        assert "states two hashes" in str(error)
        return
    assert {n: (folder / n).read_bytes() for n in FILES} == FILES


@pytest.mark.parametrize("size", ["-1", "1e9", "9" * 5000, "0x10", "٣", "5001", "1, 2"])
def test_a_header_never_becomes_another_size(hub: FakeHub, tree: Path, size: str) -> None:
    hub.headers = {"X-Linked-Size": size.encode().decode("latin-1")}
    with pytest.raises(ModelError, match="states (the size|two sizes)"):
        fetch(LoadConfig(REPO), hub.environment(tree / "cache"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_other_bytes_than_the_stated_ones_are_never_used(
    hub: FakeHub, tree: Path, name: str
) -> None:
    stated = hashlib.sha1(b"blob 2\0[]").hexdigest()
    if name == "config.json":
        hub.headers, hub.item = {"ETag": f'"{stated}"'}, {"blobId": stated, "size": None}
    else:
        hub.faults += [Fault(damages=True)]
    with pytest.raises(ModelError, match="the download is damaged and was deleted"):
        fetch(LoadConfig(REPO), hub.environment(tree / "cache"))
    assert not list((tree / "cache").rglob(name))


@pytest.mark.parametrize("path", ["/api/", f"/{REPO}/resolve/", "/bytes/"])
@pytest.mark.parametrize("knows_size", [True, False])
def test_an_endless_answer_is_cut_at_its_bound(
    hub: FakeHub, tree: Path, path: str, knows_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "_MAX_ANSWER_BYTES", 1 << 20)
    hub.endless = (path,)
    if not knows_size:
        hub.item = {"size": None}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match="in more than 1 MiB|and more are sent"):
        fetch(LoadConfig(REPO), hub.environment(tree / "cache"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert sum(p.stat().st_size for p in (tree / "cache").rglob("*") if p.is_file()) < 20_000
    assert hub.endless_bytes < 32 << 20


def test_an_endless_text_of_an_error_is_cut_at_its_bound(hub: FakeHub, tree: Path) -> None:
    hub.refusal = (418, {"X-Error-Message": "no"})
    refused(hub, tree)
    hub.refusal, hub.body = None, json.dumps({"error": "x" * (8 << 20)}).encode()
    refused(hub, tree, words="names the commit")


@pytest.mark.parametrize("count", [metadata.MAX_FILES + 1, 200_000])
def test_more_files_than_any_model_has_are_refused(hub: FakeHub, tree: Path, count: int) -> None:
    hub.facts = {"siblings": [{"rfilename": f"{n}.json"} for n in range(count)]}
    refused(hub, tree, words="10,000 are read")
    assert not [path for _, path, _ in hub.asked if "/resolve/" in path]


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 50_000, b"nul", b"[]", b'"x"', b"\xff", b"{}{}", b"1" * 9000],
)
def test_an_answer_that_is_no_object_is_refused(hub: FakeHub, tree: Path, body: bytes) -> None:
    hub.body = body
    refused(hub, tree, words="answers without a JSON object")


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "deflate"])
def test_a_compressed_answer_is_not_unpacked(hub: FakeHub, tree: Path, coding: str) -> None:
    hub.refusal = (200, {"Content-Encoding": coding})
    hub.body = gzip.compress(bytes(1 << 20))
    refused(hub, tree, words=f"sends '{coding}' where plain bytes were asked for")


@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.1:{port}/x", "https://evil.example/x", "//evil.example/x", "file:///etc/passwd",
     "https://hf.co@evil.example/x", "http://huggingface.co/x", "ftp://hf.co/x", "data:,x"],
)  # fmt: skip
def test_the_list_of_files_comes_from_no_other_host(
    hub: FakeHub, tree: Path, location: str
) -> None:
    with fake_hub(FILES) as other:
        hub.refusal = (302, {"Location": location.replace("{port}", str(other.server_port))})
        refused(hub, tree)
        assert not other.asked


def test_a_host_that_is_not_the_hubs_is_never_contacted(hub: FakeHub, tree: Path) -> None:
    with fake_hub(FILES) as other:
        hub.elsewhere = other.url
        with pytest.raises(ModelError, match="not one of the hub's hosts"):
            fetch(LoadConfig(REPO), hub.environment(tree / "cache"))
        hub.file_refusal = (302, {"Location": f"{other.url}/bytes/config.json"})
        with pytest.raises(ModelError, match="not one of the hub's hosts"):
            fetch(LoadConfig(REPO), hub.environment(tree / "cache"))
        assert not other.asked


@pytest.mark.parametrize("revision", ["../../../x", "/x", "a/../../x", "..", "a\nb"])
def test_a_revision_never_becomes_a_path(hub: FakeHub, tree: Path, revision: str) -> None:
    with pytest.raises(ModelError, match="is no name of a branch"):
        fetch(LoadConfig(REPO, revision=revision), hub.environment(tree / "cache"))


@pytest.mark.parametrize("revision", ["", "v1.0", "pr/7", COMMIT])
def test_the_library_finds_what_was_fetched(hub: FakeHub, tree: Path, revision: str) -> None:
    model = LoadConfig(REPO, revision=revision)
    online = fetch(model, hub.environment(tree / "cache"))
    asked = len(hub.asked)
    offline = fetch(
        LoadConfig(REPO, revision=revision, offline=True), hub.environment(tree / "cache")
    )
    assert offline == online and len(hub.asked) == asked
    links = [p for p in Path(online).rglob("*") if p.is_symlink()]
    assert len(links) == len(FILES) and not any(os.readlink(p).startswith("/") for p in links)
