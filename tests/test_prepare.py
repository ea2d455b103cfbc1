"""What cannot work is refused before a model is looked for, however the engine is started."""

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError, ConfigError
from banyan.cli.main import main
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.prepare import check_names, prepare
from banyan.llm import Engine
from tests.support.checkpoints import LLAMA, folder

NOWHERE = "./no-such-model"
NONSENSE = {
    "--tool-call-parser=nonsense": "--tool-call-parser 'nonsense' is unknown.*qwen25",
    "--reasoning-parser=nonsense": "--reasoning-parser 'nonsense' is unknown.*qwen3",
    "--grammar-backend=nonsense": "--grammar-backend 'nonsense' is unknown.*none",
    "--chat-template=nonsense": "--chat-template 'nonsense' is neither.*chatml",
    "--completion-template=nonsense": "--completion-template 'nonsense' is neither.*star_coder",
    "--warmups=chunk,nonsense": "--warmups 'nonsense' is unknown.*constraint",
    "--tool-server=nonsense": "--tool-server takes demo.*'nonsense' is none",
    "--custom-weight-loader=non.sense:f": "--custom-weight-loader .*no module 'non.sense'",
    "--custom-weight-loader=json:sense": "--custom-weight-loader .*json has no function 'sense'",
    '--preferred-sampling-params={"temprature": 1}': "--preferred-sampling-params: .*temperature",
    '--preferred-sampling-params={"max_tokens": 1}': "--preferred-sampling-params: .*max_tokens",
    '--preferred-sampling-params={"top_p": 7}': "--preferred-sampling-params: .*top_p",
}


def _serve(word: str) -> None:
    prepare(parse([NOWHERE, word], Environment()), Environment())


def _engine(word: str) -> None:
    name, _, value = word.removeprefix("--").partition("=")
    Engine(NOWHERE, **{name.replace("-", "_"): value})


def _verb(*verb: str) -> Callable[[str], None]:
    def run(word: str) -> None:
        before = sys.stderr
        assert main([*verb, NOWHERE, word]) == ConfigError.exit_code
        raise ConfigError(before.getvalue())  # type: ignore[attr-defined]

    return run


WAYS = {"serve": _serve, "Engine": _engine, "config": _verb("config")}
WAYS["bench"] = _verb("bench", "batch")


@pytest.mark.parametrize("word", NONSENSE)
@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_nothing_has_is_refused_before_the_model_is_looked_for(
    word: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(ConfigError, match=NONSENSE[word]):
        WAYS[way](word)


def test_names_that_there_are_pass() -> None:
    words = "--tool-call-parser qwen25 --reasoning-parser none --grammar-backend none "
    words += "--warmups chunk,constraint --tool-server demo --chat-template chatml "
    words += "--completion-template star_coder --custom-weight-loader json:loads json.decoder:scan"
    check_names(parse(words.replace(":scan", ":scanstring").split(), Environment()))


def test_a_function_is_looked_for_without_running_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('was run')")
    (package / "loader.py").write_text("raise SystemExit('was run')\n\ndef scale(tensors): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_names(parse(["--custom-weight-loader", "mine.loader:scale"], Environment()))
    with pytest.raises(ConfigError, match="mine.loader has no function 'shrink'"):
        check_names(parse(["--custom-weight-loader", "mine.loader:shrink"], Environment()))


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ("demo --delete-ckpt-after-loading", "--delete-ckpt-after-loading: 'demo' is an installed"),
        ("demo --model-impl transformers", "transformers"),
        (
            "demo --is-embedding --model-impl transformers",
            "--is-embedding cannot be combined with --model-impl",
        ),
        ("demo --model-impl transformers --tp 3", "cannot share a model"),
        ("demo --load-format safetensors", "is a GGUF file"),
        ("demo --host 0.0.0.0 --require-key", "under --require-key"),
    ],
)
def test_config_refuses_what_serve_refuses(
    words: str, culprit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *words.split()]) in (2, 3)
    assert culprit in capsys.readouterr().err


def test_config_takes_a_family_that_only_the_library_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = folder(tmp_path, {**LLAMA, "model_type": "unheard", "architectures": ["UnheardLM"]})
    assert main(["config", path]) != 0
    assert "--model-impl transformers" in capsys.readouterr().err
    assert main(["config", path, "--model-impl", "transformers"]) == 0


@pytest.mark.parametrize("level", ["error", "info"])
@pytest.mark.parametrize("verb", ["serve", "bench batch", "bench throughput"])
def test_notes_are_shown_whatever_the_level(
    verb: str,
    level: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "banyan.server.processes.waiting_engines", lambda *_: contextlib.nullcontext()
    )
    words = f"{verb} demo --enable-p2p-check --log-level {level} --context-length 99999999"
    if verb == "bench throughput":
        words += (
            " --dataset-name random-ids --num-prompts 1 --random-input-len 4 --random-output-len 4"
        )
    assert main(words.split()) == ConfigError.exit_code
    shown = capsys.readouterr().err
    assert shown.count("--enable-p2p-check is accepted but has no effect") == 1
    assert "--context-length 99,999,999 is more" in shown


@pytest.mark.parametrize(
    "words",
    ["--tp 2", "--pp 2", "--dp 2", "--base-gpu-id 1", "--tp 2 --dp 2 --enable-dp-attention"],
)
def test_ranks_without_a_gpu_are_refused_before_anything_is_opened(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banyan.config.devices.num_gpus", lambda visible: 1)
    config = parse([NOWHERE, "--device", "cuda", *words.split()], Environment())
    with pytest.raises(ConfigError, match="take GPUs up to number 1, and it has 1 from 0 on"):
        prepare(config, Environment())
    monkeypatch.setattr("banyan.config.devices.num_gpus", lambda visible: None)
    with pytest.raises(BanyanError, match="no-such-model"):
        prepare(config, Environment())
