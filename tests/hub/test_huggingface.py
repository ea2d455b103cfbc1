"""What the hub refuses, and what is done when it is away."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.base.errors import ModelError
from banyan.config.env import Environment
from banyan.config.schema import LoadConfig
from banyan.hub.sources import fetch
from tests.support.fake_hub import REPO, FakeHub, fake_hub

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "model.gguf": b"g" * 5000}
NOBODY = "http://127.0.0.1:9"
"""Nothing listens there: connections are refused at once."""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub(FILES, large=("model.safetensors", "model.gguf")) as served:
        yield served


@pytest.mark.parametrize("source", [REPO, f"{REPO}/model.gguf", f"hf:{REPO}/model.gguf"])
def test_what_lies_in_the_cache_is_used_when_the_hub_is_away(
    tmp_path: Path, hub: FakeHub, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = fetch(LoadConfig(source), hub.environment(tmp_path))
    away = Environment(hf_endpoint=NOBODY, hf_cache=str(tmp_path))
    assert fetch(LoadConfig(source), away) == first
    assert (
        "using the copy in the cache (0123456789ab), because the hub is unreachable" in caplog.text
    )


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_in_trouble_is_away(tmp_path: Path, hub: FakeHub, status: int) -> None:
    first = fetch(LoadConfig(REPO), hub.environment(tmp_path))
    hub.refusal = (status, {})
    assert fetch(LoadConfig(REPO), hub.environment(tmp_path)) == first


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_a_model_that_lies_there_in_part_is_not_used(
    tmp_path: Path, hub: FakeHub, missing: str
) -> None:
    folder = fetch(LoadConfig(REPO), hub.environment(tmp_path))
    (Path(folder) / missing).unlink()
    away = Environment(hf_endpoint=NOBODY, hf_cache=str(tmp_path))
    with pytest.raises(ModelError, match="cannot fetch 'owner/name'"):
        fetch(LoadConfig(REPO), away)
    offline = LoadConfig(REPO, offline=True)
    with pytest.raises(ModelError, match="is only partly in the cache on this machine"):
        fetch(offline, away)


def test_what_the_hub_refuses_is_not_taken_from_the_cache(tmp_path: Path, hub: FakeHub) -> None:
    fetch(LoadConfig(REPO), hub.environment(tmp_path))
    hub.refusal = (404, {"X-Error-Code": "RepoNotFound"})
    with pytest.raises(ModelError, match="the hub has no 'owner/name', or keeps it private"):
        fetch(LoadConfig(REPO), hub.environment(tmp_path))


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("token", "who"), [("", "an anonymous user"), ("hf_1", "the account of this")]
)
def test_a_gated_model_says_how_to_log_in(
    tmp_path: Path, hub: FakeHub, status: int, token: str, who: str
) -> None:
    hub.file_refusal = (status, {"X-Error-Code": "GatedRepo"})
    with pytest.raises(ModelError) as caught:
        fetch(LoadConfig(REPO), hub.environment(tmp_path, token))
    text = str(caught.value)
    assert "is gated" in text and who in text
    assert f"{hub.url}/owner/name" in text and "hf auth login" in text and "HF_TOKEN" in text


def test_a_repository_that_is_unknown_without_an_account_says_so(
    tmp_path: Path, hub: FakeHub
) -> None:
    hub.refusal = (401, {"X-Error-Message": "Invalid username or password."})
    with pytest.raises(ModelError, match="no 'owner/name', or keeps it private.*hf auth login"):
        fetch(LoadConfig(REPO), hub.environment(tmp_path))


def test_a_repository_near_a_known_one_is_asked_after(tmp_path: Path, hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="Did you mean qwen3-0.6b"):
        fetch(LoadConfig("Qwen/Qwen3-0.6"), hub.environment(tmp_path))


def test_a_file_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, hub: FakeHub
) -> None:
    with pytest.raises(ModelError, match=r"has no file 'other.gguf'; it has model.gguf\. Name one"):
        fetch(LoadConfig(f"{REPO}/other.gguf"), hub.environment(tmp_path))


def test_too_many_requests_are_reported_with_the_time_to_wait(tmp_path: Path, hub: FakeHub) -> None:
    hub.refusal = (429, {"Retry-After": "42"})
    with pytest.raises(ModelError, match="429: too many requests, wait 42 s"):
        fetch(LoadConfig(REPO), hub.environment(tmp_path))


@pytest.mark.parametrize("status", [400, 404, 418, 500])
def test_no_sentence_ends_in_two_dots(tmp_path: Path, hub: FakeHub, status: int) -> None:
    hub.refusal = (status, {})
    with pytest.raises(ModelError) as caught:
        fetch(LoadConfig(REPO), hub.environment(tmp_path))
    assert ".." not in str(caught.value)
