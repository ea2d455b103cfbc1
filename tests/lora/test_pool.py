"""What a rank holds of adapters between the orders about them."""

import shutil

import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.config.schema import LoraConfig
from banyan.layers.build import Build
from banyan.lora import pool as adapters
from banyan.lora.adapter_files import AdapterPlace
from banyan.lora.load import base_of, enable_lora
from banyan.lora.pool import LoRAPool, open_lora_targets
from banyan.messages.control_ops import TakeAdapter
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from banyan.parallel.groups import Group
from banyan.platform.cpu import CpuPlatform
from banyan.runner.control_ops import NoRoom
from tests.support.lora import write_adapter
from tests.system.checkpoint import write_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model_path = write_tiny_model(tmp_path_factory.mktemp("rack") / "model")
    ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 16)
    lora_targets = open_lora_targets(
        LoraConfig(True, max_rank=8, max_loaded=4), CpuPlatform().traits
    )
    assert lora_targets is not None
    model = load_model(read_model_config(str(model_path)), Build(ops, adapters=lora_targets))
    enable_lora(model, lora_targets, ops)
    return base_of(model, lora_targets)


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The paths of the adapters that were read, in turn."""
    paths, load = [], adapters.load_adapter

    def counted(path, base):
        paths.append(path)
        return load(path, base)

    monkeypatch.setattr(adapters, "load_adapter", counted)
    return paths


def test_an_adapter_that_waits_for_room_is_read_once(base, read, tmp_path):
    lora_pool = LoRAPool(base)
    path, other = (str(write_adapter(tmp_path / name, at)) for at, name in enumerate("ab"))
    for _ in range(2):
        with pytest.raises(NoRoom) as raised:
            lora_pool.prepare_load(TakeAdapter(1, path, room_bytes=100))
    size = raised.value.size_bytes
    taken = lora_pool.prepare_load(TakeAdapter(1, path, room_bytes=size))()
    assert read == [path] and lora_pool.has(1) and taken.size_bytes == size
    lora_pool.prepare_load(TakeAdapter(2, path))()
    assert read == [path, path], "what was taken is nobody else's"
    with pytest.raises(NoRoom):
        lora_pool.prepare_load(TakeAdapter(3, path, room_bytes=0))
    lora_pool.prepare_load(TakeAdapter(3, other))()
    with pytest.raises(ConfigError, match="is not what it was"):
        lora_pool.prepare_load(TakeAdapter(4, other, digest="0"))
    assert read == [path, path, path, other, other]


def test_an_adapter_that_was_written_anew_while_it_waited_is_read_again(base, read, tmp_path):
    lora_pool = LoRAPool(base)
    path, other = (write_adapter(tmp_path / name, at) for at, name in enumerate("ab"))
    expected = lora_pool.prepare_load(TakeAdapter(1, str(other)))().body
    with pytest.raises(NoRoom):
        lora_pool.prepare_load(TakeAdapter(2, str(path), room_bytes=0))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(other / name, path / name)
    assert lora_pool.prepare_load(TakeAdapter(2, str(path)))().body == expected
    shutil.rmtree(path)
    with pytest.raises(ConfigError, match="it is not a folder"):
        lora_pool.prepare_load(TakeAdapter(3, str(path)))


class Others(Group):
    """Another rank beside this one, which says the same but for some of its numbers."""

    def __init__(self, changes: dict[int, float]) -> None:
        self.rank, self.size, self.changes = 0, 2, changes

    def all_gather(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        other = x.clone()
        for at, value in self.changes.items():
            other[0, at] = value
        return torch.cat([x, other], dim=1)


def test_adapters_of_the_start_are_the_same_for_all_ranks(base, tmp_path):
    """Each says a size and the bytes of a digest."""
    lora_pool, cpu = LoRAPool(base), torch.device("cpu")
    places = [AdapterPlace(name, str(write_adapter(tmp_path / name, 0)), False) for name in "ab"]
    lora_pool.load_first(places)
    sizes = [first.size_bytes for first in lora_pool.first]
    lora_pool.check_ranks_agree(places, Others({17: sizes[1] / 1024 + 5}), cpu)
    assert [first.size_bytes for first in lora_pool.first] == [sizes[0], sizes[1] + 5120]
    wrong = 255 - bytes.fromhex(lora_pool.first[1].digest)[3]
    with pytest.raises(ConfigError, match="b' is another one for rank 1 than for rank 0. Copy"):
        lora_pool.check_ranks_agree(places, Others({17 + 1 + 3: wrong}), cpu)
