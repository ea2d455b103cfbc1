"""How the files of a model are read: by several threads, by a configuration from elsewhere."""

import json
import logging
import shutil
import threading
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError, ConfigError
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.resolve import prepare
from banyan.formats.shards import parallel_reads
from banyan.llm import Engine
from tests.system.checkpoint import write_tiny_model

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
THREADS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("read") / "model", 0)


def threads_of(model: Path, options: object) -> int:
    flags = [str(model), "--device", "cpu", "--model-loader-extra-config", json.dumps(options)]
    return prepare(parse(flags, Environment()), Environment())[0].model.loader_threads


def test_keys_of_the_loader_are_those_of_sglang(model: Path) -> None:
    assert threads_of(model, {"enable_multithread_load": True}) == 8
    assert threads_of(model, {"enable_multithread_load": True, "num_threads": 3}) == 3
    assert threads_of(model, {"num_threads": 3}) == 0
    for options, message in (
        ({"no_such_key": True}, "nothing reads 'no_such_key'"),
        ({"enable_multithread_load": 1}, "must be true or false"),
        ({"num_threads": 0}, r"a whole number in \[1, 64\]"),
        ({"num_threads": 1 << 63}, r"a whole number in \[1, 64\]"),
        ({"num_threads": True}, r"a whole number in \[1, 64\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            threads_of(model, options)


def test_as_many_pieces_are_read_at_once_as_there_are_threads(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(THREADS * (8 << 20))
    together, offsets = threading.Barrier(THREADS), list[int]()

    def read(descriptor: int, size: int, at: int) -> bytes:
        together.wait(60)  # broken unless all threads are here
        offsets.append(at)
        return b""

    with parallel_reads(str(tmp_path), THREADS, read=read):
        pass
    assert not together.broken and sorted(offsets) == [n * (8 << 20) for n in range(THREADS)]


def test_processes_that_load_the_same_files_read_different_parts(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(5 * (8 << 20))
    read_by = dict[int, list[int]]()
    for share in range(2):
        mine = read_by.setdefault(share, [])
        done = threading.Event()

        def read(_: int, size: int, at: int, mine: list[int] = mine) -> bytes:
            mine.append(at >> 23)
            if len(mine) == (3, 2)[share]:  # noqa: B023
                done.set()  # noqa: B023
            return b""

        with parallel_reads(str(tmp_path), 1, share, 2, read):
            assert done.wait(60)
    assert read_by == {0: [0, 2, 4], 1: [1, 3]}


def test_threads_read_the_weights_of_a_start(model: Path, caplog, monkeypatch) -> None:
    log = logging.getLogger("banyan.engine.model_loader")
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level(logging.INFO, log.name)
    options = {"enable_multithread_load": True, "num_threads": 3}
    with Engine(
        str(model), engine_mode="inprocess", threads=1, model_loader_extra_config=options
    ) as it:
        assert len(it.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"]) == 4
    assert "3 threads read the weights" in caplog.text


def test_a_model_is_served_by_the_configuration_that_was_named(model: Path, tmp_path: Path) -> None:
    hidden = Path(shutil.copytree(model, tmp_path / "hidden"))
    plain = (hidden / "config.json").rename(tmp_path / "decrypted.json")
    (hidden / "config.json").write_bytes(bytes(range(256)))
    flags = {"engine_mode": "inprocess", "threads": 1}
    with pytest.raises(BanyanError, match="is not JSON"):
        Engine(str(hidden), **flags)
    with Engine(str(model), **flags) as it:
        right = it.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"]
    with Engine(str(hidden), decrypted_config_file=str(plain), **flags) as it:
        assert it.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"] == right
