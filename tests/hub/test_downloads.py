"""Files of the hub over real sockets, from a hub of our own that breaks on demand."""

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants

from banyan.base.errors import CapacityError, ModelError
from banyan.config.schema import LoadConfig
from banyan.hub import downloads, metadata
from banyan.hub.metadata import Place, check_host
from banyan.hub.sources import fetch
from tests.support.fake_hub import COMMIT, REPO, FakeHub, Fault, fake_hub

FILE = "model.gguf"
BODY = random.Random(7).randbytes(300_000)
SOURCE = LoadConfig(f"{REPO}/{FILE}")


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub({FILE: BODY, "README.md": b"hello"}, large=(FILE,)) as served:
        yield served


def part_of(cache: Path, hub: FakeHub) -> Path:
    return cache / "models--owner--name" / "blobs" / f"{hub.sha256(FILE)}.incomplete"


def left_over(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("*.incomplete")]


def test_a_file_lands_in_the_cache_of_the_hubs_library(tmp_path: Path, hub: FakeHub) -> None:
    path = fetch(SOURCE, hub.environment(tmp_path))
    assert path == str(tmp_path / "models--owner--name" / "snapshots" / COMMIT / FILE)
    assert Path(path).read_bytes() == BODY
    blob = tmp_path / "models--owner--name" / "blobs" / hub.sha256(FILE)
    assert Path(path).resolve() == blob.resolve()
    assert hub.ranges() == ["bytes=0-"] and not left_over(tmp_path)


def test_a_second_start_fetches_nothing(tmp_path: Path, hub: FakeHub) -> None:
    first = fetch(SOURCE, hub.environment(tmp_path))
    assert fetch(SOURCE, hub.environment(tmp_path)) == first
    assert len(hub.ranges()) == 1


def test_a_folder_comes_with_its_large_files_checked(tmp_path: Path) -> None:
    files = {
        "config.json": b"{}",
        "model-1.safetensors": BODY,
        "model-2.safetensors": BODY[::-1],
        "tokenizer.json": b"{}" * 999,
        "pytorch_model.bin": b"x",
    }
    large = ("model-1.safetensors", "model-2.safetensors", "tokenizer.json")
    with fake_hub(files, large) as hub:
        folder = Path(fetch(LoadConfig(REPO), hub.environment(tmp_path)))
        assert len(hub.ranges()) == 3
    there = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert there == {name: body for name, body in files.items() if name != "pytorch_model.bin"}


def test_torch_files_come_where_there_are_no_safetensors(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": BODY, "training_args.bin": b"x"}
    with fake_hub(files, ("pytorch_model.bin",)) as hub:
        folder = Path(fetch(LoadConfig(REPO), hub.environment(tmp_path)))
    assert {path.name for path in folder.iterdir()} == {"config.json", "pytorch_model.bin"}


@pytest.mark.parametrize("stalls", [False, True])
def test_a_cut_in_the_middle_goes_on_where_it_was(
    tmp_path: Path, hub: FakeHub, stalls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.faults += [Fault(keeps=100_000, stalls=stalls), Fault(keeps=50_000, stalls=stalls)]
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY
    assert hub.ranges() == ["bytes=0-", "bytes=100000-", "bytes=150000-"]


def test_the_next_start_goes_on_where_the_last_one_ended(tmp_path: Path, hub: FakeHub) -> None:
    part = part_of(tmp_path, hub)
    part.parent.mkdir(parents=True)
    part.write_bytes(BODY[:123_456])
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY
    assert hub.ranges() == ["bytes=123456-"] and not left_over(tmp_path)


def test_a_hub_that_ignores_ranges_sends_it_all_again(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults += [Fault(keeps=100_000), Fault(whole=True)]
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY


def test_an_address_that_is_too_old_is_asked_for_again(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults += [Fault(keeps=100_000), Fault(status=403)]
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY
    asked = [path for method, path, _ in hub.asked if method == "HEAD" and "/resolve/" in path]
    assert len(asked) >= 3


def test_a_hub_that_leads_to_a_stranger_is_not_followed(tmp_path: Path, hub: FakeHub) -> None:
    with fake_hub({FILE: BODY}) as other:
        hub.elsewhere = other.url
        with pytest.raises(ModelError, match="not one of the hub's hosts"):
            fetch(SOURCE, hub.environment(tmp_path))
        assert not other.asked


def test_bytes_that_are_not_the_stated_ones_are_deleted(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults.append(Fault(damages=True))
    with pytest.raises(ModelError, match="has the sha256 .* the hub states .* Fetch it again"):
        fetch(SOURCE, hub.environment(tmp_path))
    assert not list(tmp_path.rglob(FILE)) and not left_over(tmp_path)
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY


def test_a_damaged_part_of_an_earlier_start_is_found_out(tmp_path: Path, hub: FakeHub) -> None:
    part = part_of(tmp_path, hub)
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1000))
    with pytest.raises(ModelError, match="has the sha256"):
        fetch(SOURCE, hub.environment(tmp_path))
    assert not left_over(tmp_path)


def test_a_busy_hub_is_given_the_time_it_asks_for(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(downloads.time, "sleep", waited.append)
    hub.faults += [Fault(status=429, headers={"Retry-After": "7"}), Fault(status=503)]
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY
    assert waited == [7.0, 1.0]


def test_a_hub_that_asks_for_an_hour_is_reported_to_people(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults.append(Fault(status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(ModelError, match=r"answers 429; the hub asks to wait 3600 s"):
        fetch(SOURCE, hub.environment(tmp_path))


def test_a_hub_that_sends_nothing_any_more_ends_with_what_is_kept(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads.time, "sleep", lambda _: None)
    hub.faults += [Fault(keeps=200_000), *[Fault(keeps=0)] * 6]
    with pytest.raises(ModelError, match="no data received in 6 .* 200 kB of 300 kB of .* kept"):
        fetch(SOURCE, hub.environment(tmp_path))
    assert part_of(tmp_path, hub).stat().st_size == 200_000
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY


def test_a_full_disk_is_seen_before_the_first_byte(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = downloads.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CapacityError, match="needs 300 kB more .* has 1 kB free.*--download-dir"):
        fetch(SOURCE, hub.environment(tmp_path))
    assert hub.ranges() == []


def test_a_disk_that_fills_up_keeps_what_there_is(tmp_path: Path, hub: FakeHub) -> None:
    code = f"""
import resource, sys
from banyan.base.errors import CapacityError
from banyan.config.env import read_environment
from banyan.config.schema import LoadConfig
from banyan.hub.sources import fetch
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    fetch(LoadConfig({SOURCE.source!r}), read_environment())
except CapacityError as error:
    sys.exit(str(error))
"""
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "the disk is full at 100 kB of 300 kB" in done.stderr, done.stderr
    assert part_of(tmp_path, hub).read_bytes() == BODY[:100_000]
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY
    assert hub.ranges()[-1] == "bytes=100000-"


def test_an_error_of_the_disk_that_is_not_room_is_not_called_so(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(downloads.os, "replace", replace)
    with pytest.raises(ModelError, match="Input/output error"):
        fetch(SOURCE, hub.environment(tmp_path))


def test_ctrl_c_leaves_a_part_that_the_same_command_goes_on_with(
    tmp_path: Path, hub: FakeHub
) -> None:
    hub.faults.append(Fault(keeps=100_000, stalls=True))
    code = f"""
from banyan.base.log import start_logging
from banyan.config.env import read_environment
from banyan.config.schema import LoadConfig
from banyan.hub.sources import fetch
start_logging("test", "warning")
fetch(LoadConfig({SOURCE.source!r}), read_environment())
"""
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        stderr=subprocess.PIPE,
        text=True,
    )
    part = part_of(tmp_path, hub)
    while not part.exists() or part.stat().st_size < 100_000:
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert "stopped at 100 kB of 300 kB of model.gguf; run the same command to resume" in said
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY
    assert hub.ranges()[-1] == "bytes=100000-"


def test_a_file_without_a_stated_hash_is_said_to_be_unchecked(
    tmp_path: Path, hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.states_no_hash = True
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY
    assert "states no hash of model.gguf" in caplog.text


@pytest.mark.parametrize(
    ("address", "endpoint", "is_taken"),
    [
        ("https://cdn-lfs.huggingface.co/x", "https://huggingface.co", True),
        ("https://cas-bridge.xethub.hf.co/x", "https://huggingface.co", True),
        ("https://huggingface.co/other", "https://huggingface.co", True),
        ("http://cdn-lfs.huggingface.co/x", "https://huggingface.co", False),
        ("https://example.com/x", "https://huggingface.co", False),
        ("https://nothf.co/x", "https://huggingface.co", False),
        ("https://169.254.169.254/x", "https://huggingface.co", False),
        ("file:///etc/passwd", "https://huggingface.co", False),
        ("https://bucket.example.com/x", "https://mirror.example.org", True),
        ("http://127.0.0.1/x", "https://mirror.example.org", False),
        ("http://mirror.local:8080/x", "http://mirror.local:8080", True),
    ],
)
def test_bytes_come_from_the_hubs_hosts_only(address: str, endpoint: str, is_taken: bool) -> None:
    place = Place(REPO, COMMIT, Path())
    if is_taken:
        check_host(f"{endpoint}/owner/name/resolve/x", address, place)
        return
    with pytest.raises(ModelError, match="not one of the hub's hosts"):
        check_host(f"{endpoint}/owner/name/resolve/x", address, place)


def test_an_endless_redirect_ends(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults += [Fault(status=302, headers={"Location": f"/bytes/{FILE}"})] * 9
    with pytest.raises(ModelError, match="redirected more than 5 times"):
        fetch(SOURCE, hub.environment(tmp_path))


def test_bytes_from_another_place_than_asked_are_refused(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults += [Fault(keeps=1000), Fault(shifts=1)]
    with pytest.raises(ModelError, match=r"asked for byte 1,000 .* sends 'bytes 1001-"):
        fetch(SOURCE, hub.environment(tmp_path))
    assert part_of(tmp_path, hub).read_bytes() == BODY[:1000]


def test_more_bytes_than_stated_are_refused(tmp_path: Path, hub: FakeHub) -> None:
    hub.faults.append(Fault(more=1 << 20))
    with pytest.raises(ModelError, match="should have 300,000 bytes, and more are sent"):
        fetch(SOURCE, hub.environment(tmp_path))
    assert part_of(tmp_path, hub).stat().st_size <= len(BODY)


def test_a_part_that_is_longer_than_the_file_is_begun_anew(tmp_path: Path, hub: FakeHub) -> None:
    part = part_of(tmp_path, hub)
    part.parent.mkdir(parents=True)
    part.write_bytes(BODY + b"more")
    assert Path(fetch(SOURCE, hub.environment(tmp_path))).read_bytes() == BODY
    assert hub.ranges() == ["bytes=0-"]


def test_the_token_does_not_go_where_the_hub_leads(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (downloads, metadata):
        monkeypatch.setattr(module, "check_host", lambda *_: None)
    with fake_hub({FILE: BODY}) as other:
        hub.elsewhere = other.url
        path = fetch(SOURCE, hub.environment(tmp_path, token="hf_1"))
    assert Path(path).read_bytes() == BODY
    assert other.ranges() == ["bytes=0-"] and {token for _, token in other.tokens} == {""}


def test_two_starts_at_once_fetch_a_file_once(tmp_path: Path, hub: FakeHub) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(fetch, SOURCE, hub.environment(tmp_path)) for _ in range(2)]
        paths = {each.result() for each in both}
    assert len(paths) == 1 and Path(paths.pop()).read_bytes() == BODY
    assert hub.ranges() == ["bytes=0-"]


def test_the_token_goes_to_the_hub(tmp_path: Path, hub: FakeHub) -> None:
    fetch(SOURCE, hub.environment(tmp_path, token="hf_1"))
    assert {token for _, token in hub.tokens} == {"Bearer hf_1"}
