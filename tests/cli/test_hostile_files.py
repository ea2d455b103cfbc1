"""Commands that read files of strangers: whatever stands in them, there is an answer or one error.

Each value of each file is replaced by what does not belong there; files are cut and damaged at
random. An exception that leaves `main` would be a traceback.
"""

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banyan.cli.main import main
from tests.support.lora import write_adapter
from tests.system.checkpoint import write_tiny_model

JOURNAL = Path(__file__).parents[1] / "engine" / "data" / "before_renames.journal"
VALUES = (
    *(None, True, -1, 0, 2**31, 2**53, 2**63, 2**64, 10**400, 1e308, -0.5, "", "../x"),
    *([], {}, [1, "a", None], {"a": {"b": [1]}}),
)
DAMAGED = 25
Change = Callable[[bytes, random.Random], bytes]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_tiny_model(folder / "model")
    write_adapter(folder / "adapter", 1, 2, ("q_proj",))
    shutil.copy(JOURNAL, folder / "journal")
    line = {"timestamp": 100, "input_length": 30, "output_length": 3, "hash_ids": [1, 2]}
    (folder / "trace").write_text(json.dumps(line))
    (folder / "hardware").write_text(json.dumps(HARDWARE))
    return folder


HARDWARE = {"name": "x", "tflops": 100, "gb_s": 1000, "memory_gib": 40}


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    for key, one in inner.items() if isinstance(inner, dict) else ():
        yield from places(one, (*path, key))


def replaced(text: bytes, dice: random.Random) -> bytes:
    """JSON with another value at one place."""
    whole = json.loads(text)
    path = dice.choice(list(places(whole)))
    new = copy.deepcopy(dice.choice(VALUES))
    if not path:
        return json.dumps(new).encode()
    at = whole
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return json.dumps(whole).encode()


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Cut, or with other bytes in it."""
    at = dice.randrange(len(data))
    if dice.random() < 0.4:
        return data[:at]
    return data[:at] + dice.randbytes(dice.choice((1, 3, 500))) + data[at + dice.randrange(4) :]


def text(data: bytes, dice: random.Random) -> bytes:
    return (replaced if dice.random() < 0.75 else damaged)(data, dice)


def tensors(data: bytes, dice: random.Random) -> bytes:
    """A safetensors file with another header, or another size of it."""
    size = struct.unpack("<Q", data[:8])[0]
    header = text(data[8 : 8 + size], dice)
    stated = dice.choice((len(header), len(header), 0, 2**31, 2**63, 2**64 - 1))
    return struct.pack("<Q", stated) + header + data[8 + size :]


DUMMY = ("{}/model", "--load-format", "dummy")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Change]]] = {
    "plan": (("plan", *DUMMY), {"model/config.json": text}),
    "plan with weights": (("plan", "{}/model"), {"model/model.safetensors": tensors}),
    "simulate": (("simulate", *DUMMY, "--requests", "3"), {"model/config.json": text}),
    "simulate a device": (
        ("simulate", *DUMMY, "--requests", "3", "--hardware", "{}/hardware"),
        {"hardware": text},
    ),
    "simulate a trace": (("simulate", *DUMMY, "--trace", "{}/trace"), {"trace": text}),
    "replay": (("replay", "{}/journal", "--check"), {"journal": damaged}),
    "lora inspect": (
        ("lora", "inspect", "{}/adapter", "--model-path", "{}/model"),
        {"adapter/adapter_config.json": text, "adapter/adapter_model.safetensors": tensors},
    ),
    "quantize": (
        ("quantize", "{}/model", "{}/out", "--type", "w8a16", "--no-report"),
        {"model/config.json": text, "model/model.safetensors": tensors},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_read_or_refused_in_words(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words, changes = CASES[name]
    dice = random.Random(name)
    for number in range(DAMAGED):
        folder = tmp_path / str(number)
        shutil.copytree(files, folder)
        path, change = dice.choice(list(changes.items()))
        given = change((files / path).read_bytes(), dice)
        (folder / path).write_bytes(given)
        code = main([word.format(folder) for word in words])
        said = capsys.readouterr()
        assert code in (0, 1, 2, 3), (code, given[:200])
        assert "Traceback" not in said.err + said.out
        assert not code or said.err or said.out, "a refusal says why"
        shutil.rmtree(folder)


@pytest.mark.parametrize("value", [10**400, -(10**400)])
@pytest.mark.parametrize(
    ("path", "member", "case"),
    [
        ("adapter/adapter_config.json", "lora_alpha", "lora inspect"),
        ("model/config.json", "rope_theta", "plan"),
        ("model/config.json", "rms_norm_eps", "simulate"),
        ("trace", "timestamp", "simulate a trace"),
        ("trace", "output_length", "simulate a trace"),
        ("trace", "input_length", "simulate a trace"),
    ],
)
def test_a_number_beyond_floats_is_refused_by_name(
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: str,
    member: str,
    case: str,
    value: int,
) -> None:
    folder = tmp_path / "files"
    shutil.copytree(files, folder)
    (folder / path).write_text(json.dumps(json.loads((files / path).read_text()) | {member: value}))
    assert main([word.format(folder) for word in CASES[case][0]]) in (1, 2, 3)
    said = capsys.readouterr()
    assert member in said.err + said.out
