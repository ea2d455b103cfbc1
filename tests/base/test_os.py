"""Files of a model that are none: a pipe or a device has no end, and nothing waits for it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError
from banyan.base.os import num_gpus, open_regular, read_whole
from banyan.lora.adapter_files import read_adapter
from banyan.model_config.checkpoint import read_model_config
from banyan.tokenizer.load import load_tokenizer
from tests.system.checkpoint import write_tiny_model


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, device])
@pytest.mark.parametrize("read", [open_regular, lambda path: read_whole(path, 9)])
def test_what_is_no_file_is_not_read(
    tmp_path: Path, make: Callable[[Path], None], read: Callable[[str], object]
) -> None:
    make(tmp_path / "x")
    with pytest.raises(OSError, match="not a regular file"):
        read(str(tmp_path / "x"))


@pytest.mark.parametrize("make", [pipe, device])
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        *("chat_template.jinja", "modules.json", "special_tokens_map.json", "vocab.json"),
    ],
)
def test_a_file_of_a_checkpoint_that_is_none_is_refused_or_not_needed(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    make(folder / name)
    try:
        read_model_config(str(folder))
        load_tokenizer(str(folder))
    except BanyanError as error:
        assert name in str(error)


@pytest.mark.parametrize("make", [pipe, device])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_of_an_adapter_that_is_none_is_refused(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    settings = '{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}'
    (tmp_path / "adapter_config.json").write_text(settings)
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(8))
    make(tmp_path / name)
    with pytest.raises(BanyanError, match=name):
        read_adapter(str(tmp_path))


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        *((None, 4), ("", 0), ("2", 1), ("3, 0", 2), ("0,4,1", 1), ("-1", 0), (f"{1 << 64}", 0)),
        *(("GPU-8932f937,GPU-1", 2), ("MIG-8932f937,MIG-1", 1)),
    ],
)
def test_the_gpus_that_a_process_may_use_are_counted(
    tmp_path: Path, visible: str | None, count: int
) -> None:
    assert num_gpus(visible, tmp_path) is None
    for name in ("nvidia0", "nvidia1", "nvidia3", "nvidia5", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_gpus(visible, tmp_path) == count
