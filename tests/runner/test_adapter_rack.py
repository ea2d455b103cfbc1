"""What a rank holds of adapters between the orders about them."""

import shutil

import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.config.checkpoint import read_card
from banyan.config.schema import LoraConfig
from banyan.layers.build import Build
from banyan.messages.orders import TakeAdapter
from banyan.models.weights.adapters import base_of, open_projections
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from banyan.platform.cpu import CpuPlatform
from banyan.runner import adapters
from banyan.runner.adapters import AdapterRack, open_seats
from banyan.runner.orders import NoRoom
from tests.adapters import write_adapter
from tests.system.checkpoint import write_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model_path = write_tiny_model(tmp_path_factory.mktemp("rack") / "model")
    ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 16)
    seats = open_seats(LoraConfig(True, max_rank=8, max_loaded=4), CpuPlatform().traits)
    assert seats is not None
    model = load_model(read_card(str(model_path)), Build(ops, adapters=seats))
    open_projections(model, seats, ops)
    return base_of(model, seats)


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
    rack = AdapterRack(base)
    path, other = (str(write_adapter(tmp_path / name, at)) for at, name in enumerate("ab"))
    for _ in range(2):
        with pytest.raises(NoRoom) as told:
            rack.prepare_take(TakeAdapter(1, path, room_bytes=100))
    size = told.value.size_bytes
    taken = rack.prepare_take(TakeAdapter(1, path, room_bytes=size))()
    assert read == [path] and rack.has(1) and taken.size_bytes == size
    rack.prepare_take(TakeAdapter(2, path))()
    assert read == [path, path], "what was taken is nobody else's"
    with pytest.raises(NoRoom):
        rack.prepare_take(TakeAdapter(3, path, room_bytes=0))
    rack.prepare_take(TakeAdapter(3, other))()
    with pytest.raises(ConfigError, match="is not what it was"):
        rack.prepare_take(TakeAdapter(4, other, digest="0"))
    assert read == [path, path, path, other, other]


def test_an_adapter_that_was_written_anew_while_it_waited_is_read_again(base, read, tmp_path):
    rack = AdapterRack(base)
    path, other = (write_adapter(tmp_path / name, at) for at, name in enumerate("ab"))
    expected = rack.prepare_take(TakeAdapter(1, str(other)))().body
    with pytest.raises(NoRoom):
        rack.prepare_take(TakeAdapter(2, str(path), room_bytes=0))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(other / name, path / name)
    assert rack.prepare_take(TakeAdapter(2, str(path)))().body == expected
    shutil.rmtree(path)
    with pytest.raises(ConfigError, match="it is not a folder"):
        rack.prepare_take(TakeAdapter(3, str(path)))
