"""The catalogue: its facts are whole, its names lead to a repository, near ones are asked after."""

from dataclasses import replace
from pathlib import Path

import pytest

from banyan.base.errors import ModelError
from banyan.config.env import Environment
from banyan.config.resolve import set_embedding
from banyan.config.rules.model import use_recommended_sampling
from banyan.config.schema import LoadConfig
from banyan.hub.catalogue import entries, find, near, recognise
from banyan.hub.sources import fetch, kind_of
from banyan.model_config.model_config import ModelConfig
from banyan.requests.defaults import check_preferred
from tests.support.fake_hub import COMMIT
from tests.support.flags import config_of

NOTHING = Environment()
KINDS = ("chat", "thinking", "code", "embedding")


def model_config_of(path: str, format: str) -> ModelConfig:
    sizes = (64, 8, 16, 1, 1, 1, 8, 128)
    return ModelConfig(path, format, "Qwen3ForCausalLM", "qwen3", *sizes)


def test_every_model_has_what_is_needed_to_fetch_and_to_judge_it() -> None:
    assert len(entries()) >= 12
    assert len({e.name for e in entries()}) == len(entries())
    for entry in entries():
        assert entry.name == entry.name.lower() and "/" not in entry.name
        assert kind_of(entry.source, NOTHING) == ("hub file" if entry.file else "hub")
        assert kind_of(entry.name, NOTHING) == "catalogue"
        assert entry.is_served, f"{entry.architecture} is no family of this build"
        assert entry.architecture.startswith("gguf/") == bool(entry.file)
        assert entry.kind in KINDS and entry.licence
        assert 10**7 < entry.size_bytes < entry.needed_bytes < 10**10


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_something_of_each_kind(kind: str) -> None:
    assert any(entry.kind == kind for entry in entries())


@pytest.mark.parametrize("entry", entries(), ids=lambda e: e.name)
def test_what_makers_advise_is_what_a_request_may_have(entry: object) -> None:
    advised = dict(entry.sampling)  # type: ignore[attr-defined]
    check_preferred(replace(config_of("M").server, preferred_sampling=advised))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("qwen3:0.6b", "qwen3-0.6b"),
        ("Qwen3-0.6B-GGUF", "qwen3-0.6b"),
        ("smolm2-360m", "smollm2-360m"),
        ("llama3.2:1b", "llama-3.2-1b"),
        ("qwen3", "qwen3-1.7b"),
        ("dmeo", "demo"),
    ],
)
def test_a_name_that_is_nearly_right_is_asked_after(typed: str, meant: str) -> None:
    assert meant in near(typed)
    with pytest.raises(ModelError, match=f"there is no model .* Did you mean .*{meant}"):
        fetch(LoadConfig(typed), NOTHING)


def test_a_name_may_be_written_in_large_letters() -> None:
    assert find("Qwen3-0.6B") == find("qwen3-0.6b") != None  # noqa: E711


def cached_file(cache: Path, repo: str, name: str) -> Path:
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / name).write_text("")
    return snapshot / name


def test_a_short_name_leads_to_the_makers_file(tmp_path: Path) -> None:
    entry = find("qwen3-0.6b")
    assert entry is not None
    there = cached_file(tmp_path, entry.repo, entry.file)
    offline = Environment(hf_offline=True, hf_cache=str(tmp_path))
    assert fetch(LoadConfig("qwen3-0.6b"), offline) == str(there)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen3-0.6b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert fetch(LoadConfig("qwen3-0.6b"), NOTHING) == str(tmp_path / "qwen3-0.6b")


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("qwen3-0.6b", "/x/whatever.gguf"),
        ("Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf", "/x/whatever.gguf"),
        ("./Qwen3-0.6B-Q8_0.gguf", "/x/Qwen3-0.6B-Q8_0.gguf"),
    ],
)
def test_a_file_of_the_catalogue_is_sampled_as_its_makers_advise(source: str, path: str) -> None:
    found = recognise(source, path)
    assert found is not None and found.name == "qwen3-0.6b"
    model_config = model_config_of(path, "gguf")
    config = use_recommended_sampling(config_of(source), model_config, NOTHING)
    assert config.server.preferred_sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.mark.parametrize(
    "flags",
    [
        ("--preferred-sampling-params", '{"temperature": 0.1}'),
        ("--sampling-defaults", "openai"),
    ],
)
def test_what_people_say_wins_over_the_makers(flags: tuple[str, ...]) -> None:
    before = config_of("qwen3-0.6b", *flags)
    after = use_recommended_sampling(before, model_config_of("/x/m.gguf", "gguf"), NOTHING)
    assert after == before


def test_a_folder_says_itself_how_it_is_sampled() -> None:
    before = config_of("Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf")
    after = use_recommended_sampling(before, model_config_of("/x", "safetensors"), NOTHING)
    assert after == before


@pytest.mark.parametrize(
    ("source", "is_embedding"), [("qwen3-embedding-0.6b", True), ("qwen3-0.6b", False)]
)
def test_an_embedding_model_needs_no_flag(source: str, is_embedding: bool) -> None:
    config = set_embedding(config_of(source), "/x/m.gguf")
    assert config.model.is_embedding == is_embedding
