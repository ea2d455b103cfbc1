"""`banyan lora inspect`: what it says of an adapter, and that its verdict is the server's."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from banyan.base.errors import ConfigError
from banyan.cli.main import main
from tests.models.families import tiny
from tests.support.lora import write_adapter
from tests.system.checkpoint import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("inspect") / "model")


def test_what_an_adapter_brings_is_reported(model: Path, tmp_path: Path, capsys) -> None:
    targets = ("q_proj", "v_proj", "down_proj")
    path = write_adapter(
        tmp_path / "a", 1, 4, targets, np.float16, rank_pattern={"v_proj": 2}, use_rslora=True
    )
    assert main(["lora", "inspect", str(path), "--model-path", str(model)]) == 0
    output = capsys.readouterr().out
    assert "PEFT, F16" in output and "down_proj, q_proj, v_proj" in output
    assert "2 (2), 4 (4) of 6 projections" in output
    rows = [line.split() for line in output.splitlines()]
    assert ["down_proj", "2", "4", "8", "4", "128", "64", "F16"] in rows
    assert ["v_proj", "2", "2", "8", "5.657", "64", "32", "F16"] in rows
    assert output.splitlines()[-1].startswith(f"FITS {model}: banyan serve")
    assert main(["lora", "inspect", str(path)]) == 0
    assert "CAN BE SERVED" in capsys.readouterr().out


def test_weights_that_an_adapter_brings_whole_are_reported(model, tmp_path, capsys) -> None:
    path = write_adapter(tmp_path / "a", 1, modules_to_save=["lm_head"])
    weights = path / "adapter_model.safetensors"
    head = np.ones((512, 64), np.float32)
    save_file(load_file(weights) | {"base_model.model.lm_head.weight": head}, weights)
    code = main(["lora", "inspect", str(path), "--model-path", str(model)])
    output = capsys.readouterr().out
    assert "lm_head [512, 64], in the base's place" in output and "room for lm_head" in output
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    assert code == (vocabulary != 512) and (code == 0 or "lm_head: it " in output)


def test_an_adapter_of_another_base_gets_a_verdict(model: Path, tmp_path: Path, capsys) -> None:
    path = write_adapter(tmp_path / "a", 1)
    tiny("qwen2", tmp_path / "other")
    assert main(["lora", "inspect", str(path), "--model-path", str(tmp_path / "other")]) == 1
    assert "CANNOT BE SERVED: adapter" in (output := capsys.readouterr().out)
    assert "is of another base" in output and "projections" in output


def test_what_cannot_be_served_ends_with_one(tmp_path: Path, capsys) -> None:
    path = write_adapter(tmp_path / "a", 1)
    weights = path / "adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, weights)
    assert main(["lora", "inspect", str(path)]) == 1
    assert "1 numbers of" in (output := capsys.readouterr().out) and "not finite" in output
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    assert main(["lora", "inspect", str(path)]) == 1
    assert "CANNOT BE SERVED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["look"], "has no 'look'"),
        (["inspect"], "takes one path"),
        (["inspect", "a", "b"], "takes one path"),
        (["inspect", "/nowhere"], "nothing at"),
    ],
)
def test_a_command_that_names_no_adapter_is_a_mistake(words: list[str], text: str, capsys) -> None:
    assert main(["lora", *words]) == ConfigError.exit_code
    assert text in capsys.readouterr().err
