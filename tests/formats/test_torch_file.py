"""Files of torch.save: read like safetensors, and nothing in them is run."""

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from banyan.base.errors import ModelError
from banyan.formats.torch_file import TorchFile
from banyan.llm import Engine
from tests.system.checkpoint import write_tiny_model

KINDS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {kind: (torch.randn(3, 5) * 9).to(dtype) for kind, dtype in KINDS.items()}
    base = torch.randn(8, 4)
    more = {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 7), "cut": base[2:5]}
    return {**found, **more, "tied": base, "parameter": torch.nn.Parameter(torch.ones(2))}


@pytest.mark.parametrize("wrap", [dict, OrderedDict, lambda t: {"state_dict": t}])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_tensors_have_the_bytes_that_torch_saved(tmp_path: Path, wrap, is_mapped: bool) -> None:
    saved = tensors()
    path = str(tmp_path / "pytorch_model.bin")
    torch.save(wrap(saved), path)
    with TorchFile.open(path, is_mapped) as file:
        assert set(file.tensors) == set(saved)
        for name, tensor in saved.items():
            info = file.tensors[name]
            assert info.shape == tuple(tensor.shape)
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert bytes(file.bytes_of(name)) == raw
            assert KINDS.get(info.type) == tensor.dtype


def test_the_state_of_a_module_is_read(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    with TorchFile.open(str(tmp_path / "pytorch_model.bin")) as file:
        assert set(file.tensors) == set(module.state_dict())


class Evil:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call


def write(path: Path, pickled: bytes, method: int = zipfile.ZIP_STORED, **more: bytes) -> str:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in more.items():
            archive.writestr(f"archive/{name.replace('__', '/')}", content)
    return str(path)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_code_in_a_file_is_refused_and_does_not_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "ran"
    for value in (
        Evil(os.mkdir, str(mark)),
        {"weight": Evil(os.mkdir, str(mark))},
        {"weight": Evil(eval, f"open({str(mark)!r}, 'w')")},
        [Evil(os.mkdir, str(mark))],
        {Evil(os.mkdir, str(mark)): 1},
    ):
        path = write(tmp_path / "pytorch_model.bin", pickle.dumps(value, protocol))
        with pytest.raises(ModelError):
            TorchFile.open(path)
        assert not mark.exists()


@pytest.mark.parametrize(
    "value",
    [
        [torch.ones(2)],
        {"a": 1},
        {1: torch.ones(2)},
        {"a": {"b": torch.ones(2)}},
        torch.ones(2),
        {"a": torch.ones(3, 4).t()},
        {"a": torch.ones(3, 8)[:, ::2]},
        {"a": torch.ones(2, dtype=torch.complex64)},
        {"a": torch.nn.Linear(2, 2)},
        {"a": torch.eye(2).to_sparse()},
    ],
    ids=range(10),
)
def test_other_objects_are_refused_by_name(tmp_path: Path, value: object) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(value, path)
    with pytest.raises(ModelError, match="torch file"):
        TorchFile.open(str(path))


def described(storage: tuple, offset: int, shape: tuple, stride: tuple) -> bytes:
    """A pickle of one tensor, written opcode by opcode."""

    class Persistent(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return ("storage", torch.FloatStorage, *storage) if obj is self else None

    out = io.BytesIO()
    pickler = Persistent(out, 2)
    rebuild = torch._utils._rebuild_tensor_v2
    arguments = (pickler, offset, shape, stride, False, OrderedDict())
    pickler.dump({"w": Evil(rebuild, *arguments)})
    return out.getvalue()


GOOD = (("0", "cpu", 4), 0, (4,), (1,))


@pytest.mark.parametrize(
    "storage, offset, shape, stride",
    [
        (("0", "cpu", 5), 0, (4,), (1,)),
        (("0", "cpu", 4), 1, (4,), (1,)),
        (("0", "cpu", 4), -1, (4,), (1,)),
        (("0", "cpu", 4), 0, (5,), (1,)),
        (("0", "cpu", 4), 0, (-4,), (1,)),
        (("0", "cpu", 4), 0, (2, 2), (1, 2)),
        (("0", "cpu", 4), 0, (4,), ()),
        (("../0", "cpu", 4), 0, (4,), (1,)),
        (("1", "cpu", 4), 0, (4,), (1,)),
        (("0", "cpu", 1 << 63), 0, (1 << 61,), (1,)),
        (("0", "cpu", 1 << 61), 0, (1 << 61,), (1,)),
        (("0", "cpu", 4), 1 << 64, (4,), (1,)),
        (("0", "cpu", 4), 0, (1,) * 9, (1,) * 9),
        (("0", "cpu", True), 0, (1,), (1,)),
    ],
)
def test_tensors_stay_in_their_storage(tmp_path: Path, storage, offset, shape, stride) -> None:
    content = struct.pack("<4f", 1, 2, 3, 4)
    path = tmp_path / "pytorch_model.bin"
    with TorchFile.open(write(path, described(*GOOD), data__0=content)) as file:
        assert bytes(file.bytes_of("w")) == content
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        pickled = described(storage, offset, shape, stride)
        with pytest.raises(ModelError):
            TorchFile.open(write(path, pickled, method, data__0=content))
    with pytest.raises(ModelError, match="compressed"):
        TorchFile.open(write(path, described(*GOOD), zipfile.ZIP_DEFLATED, data__0=content))
    with pytest.raises(ModelError, match="little-endian"):
        TorchFile.open(write(path, described(*GOOD), data__0=content, byteorder=b"big"))


def test_a_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(4), "b": torch.zeros(2, 3)}, path)
    whole, random_ = path.read_bytes(), random.Random(7)
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(random_.randint(1, 4)):
            content[random_.randrange(len(content))] = random_.randrange(256)
        path.write_bytes(
            content[: random_.choice((len(content), random_.randrange(len(content)))) or 1]
        )
        try:
            with TorchFile.open(str(path)) as file:
                for name in file.tensors:
                    file.bytes_of(name)
        except ModelError as error:
            assert "torch file" in str(error)


def test_a_model_in_torch_files_answers_as_in_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    safe, torch_folder = tmp_path / "safe", tmp_path / "torch"
    write_tiny_model(safe, 3)
    write_tiny_model(torch_folder, 3)
    weights = load_file(safe / "model.safetensors")
    (torch_folder / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for number, some in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{number + 1:05}-of-00002.bin"
        torch.save({name: weights[name] for name in some}, torch_folder / file)
        index |= dict.fromkeys(some, file)
    (torch_folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    torch.save({"epoch": 3}, torch_folder / "training_args.bin")
    answers = []
    for folder in (safe, torch_folder):
        with Engine(str(folder), engine_mode="inprocess", threads=1) as engine:
            params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            answers.append(engine.generate("The quick brown", params)["text"])
    assert answers[0] == answers[1]
