"""Functions of the operator's own between layers, and dumps of what layers get and make."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.profiler.itt

from banyan.base.errors import BanyanError, ConfigError
from banyan.config.hooks import hook_specs
from banyan.formats.arrays import read_arrays, write_arrays
from banyan.llm import Engine
from tests.system.conftest import StartServer

PROMPT = [5, 6, 7, 8]
FOUR = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
CODE = """
def scaled(config):
    def hook(module, given, made):
        with open(config["record"], "a") as file:
            file.write(f"{tuple(made.shape)} ")
        return made * config["by"]
    return hook

def nothing(config):
    return None

def failing(config):
    raise OverflowError("no room")
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that hooks write to."""
    (tmp_path / "my_hooks.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "record"


def spec(record: Path, by: float, module: str = "layers.*.mlp", function: str = "scaled") -> str:
    return json.dumps(
        [
            {
                "target_modules": [module],
                "hook_factory": f"my_hooks:{function}",
                "config": {"record": str(record), "by": by},
            }
        ]
    )


def engine(model: Path, **flags: object) -> Engine:
    return Engine(str(model), engine_mode="inprocess", threads=1, max_total_tokens=2048, **flags)


def answer(it: Engine) -> list[int]:
    return it.generate(input_ids=PROMPT, sampling_params=FOUR)["output_ids"]


def passes(folder: Path) -> list[dict[str, np.ndarray]]:
    return [read_arrays(str(path)) for path in sorted(folder.glob("*/pass-??????.safetensors"))]


def test_a_hook_sees_and_changes_what_a_layer_makes(tiny_model: Path, own_code: Path) -> None:
    with engine(tiny_model) as it:
        plain = answer(it)
    with engine(tiny_model, forward_hooks=[spec(own_code, 1.0)]) as it:
        assert answer(it) == plain
    calls = own_code.read_text().split(") ")
    assert len(list(filter(None, calls))) == 2 * 4, "two layers, and four steps"
    assert calls[0].startswith(f"({len(PROMPT)}, ")
    with engine(tiny_model, forward_hooks=[spec(own_code, 0.0)]) as it:
        assert answer(it) != plain


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (("layers.9.mlp", "scaled"), "no module is called 'layers.9.mlp'"),
        (("layers.0.mlp_norm", "scaled"), "no module is called 'layers.0.mlp_norm'"),
        (("layers.0.mlp", "nothing"), "has made no function"),
        (("layers.0.mlp", "absent"), "has no function 'absent'"),
        (("layers.0.mlp", "failing"), "fails with OverflowError: no room"),
    ],
)
def test_a_hook_that_would_have_no_effect_is_refused(
    tiny_model: Path, own_code: Path, word: tuple[str, str], said: str
) -> None:
    with pytest.raises(BanyanError, match=said):
        engine(tiny_model, forward_hooks=[spec(own_code, 1.0, *word)])


def test_a_module_that_fails_as_it_is_imported_is_named(
    tiny_model: Path, own_code: Path, tmp_path: Path
) -> None:
    (tmp_path / "my_mistake.py").write_text("def hook(:\n")
    word = spec(own_code, 1.0).replace("my_hooks", "my_mistake")
    with pytest.raises(BanyanError, match="my_mistake.*its module fails with SyntaxError"):
        engine(tiny_model, forward_hooks=[word])


@pytest.mark.parametrize(
    "word",
    [
        "[1]",
        "[]",
        "[" * 100_000,
        "9" * 5000,
        "NaN",
        "[{}]",
        '{"target_modules": [], "hook_factory": "a:b"}',
    ],
)
def test_what_is_no_hook_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="forward-hooks"):
        hook_specs([word])


def test_each_pass_is_dumped_with_the_layers_that_were_chosen(
    tiny_model: Path, tmp_path: Path
) -> None:
    chosen = {"debug_tensor_dump_output_folder": str(tmp_path), "debug_tensor_dump_layers": [1]}
    with engine(tiny_model, **chosen) as it:
        answer(it)
    first, *others = passes(tmp_path)
    assert first["tokens"].tolist() == PROMPT and first["positions"].tolist() == [0, 1, 2, 3]
    assert len(others) == 3 and all(len(other["tokens"]) == 1 for other in others)
    names = {name for name in first if name.startswith("layers.")}
    parts = ("input", "residual", "attention", "mlp", "output", "output_residual")
    assert names == {f"layers.1.{part}" for part in parts}
    logits = read_arrays(str(next(tmp_path.glob("*/pass-000000-logits-0.safetensors"))))
    assert logits["logits"].argmax() == others[0]["tokens"][0]


def test_inputs_of_layers_come_from_the_file(tiny_model: Path, tmp_path: Path) -> None:
    dump = {"debug_tensor_dump_output_folder": str(tmp_path / "a")}
    with engine(tiny_model, **dump) as it:
        plain = answer(it)
    (dumped, *_) = passes(tmp_path / "a")
    inject = {
        "debug_tensor_dump_inject": True,
        "debug_tensor_dump_input_file": str(tmp_path / "in"),
    }
    write_arrays(str(tmp_path / "in"), dumped, {})
    with engine(tiny_model, **inject) as it:
        assert answer(it) == plain, "its own inputs change nothing"
    dumped["layers.1.input"] = -3 * dumped["layers.1.input"] + 1
    write_arrays(str(tmp_path / "in"), dumped, {})
    again = {"debug_tensor_dump_output_folder": str(tmp_path / "b")}
    with engine(tiny_model, **inject, **again) as it:
        assert answer(it) != plain
    (seen, *_) = passes(tmp_path / "b")
    assert np.array_equal(seen["layers.1.input"], dumped["layers.1.input"])
    assert np.array_equal(seen["layers.0.input"], dumped["layers.0.input"])


def test_the_warm_up_runs_the_prompt_of_the_file(server: StartServer, tmp_path: Path) -> None:
    write_arrays(str(tmp_path / "in"), {"tokens": np.array([9, 8, 7], np.int32)}, {})
    flags = ("--debug-tensor-dump-input-file", str(tmp_path / "in"))
    with server(*flags, "--debug-tensor-dump-output-folder", str(tmp_path / "out")):
        assert passes(tmp_path / "out")[0]["tokens"].tolist() == [9, 8, 7]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"debug_tensor_dump_layers": [0]}, "needs --debug-tensor-dump-output-folder"),
        ({"debug_tensor_dump_inject": True}, "needs --debug-tensor-dump-input-file"),
        ({"debug_tensor_dump_input_file": "/no/file"}, "no safetensors file with the ids"),
        (
            {"debug_tensor_dump_output_folder": "x", "num_continuous_decode_steps": 4},
            "steps are eager",
        ),
        (
            {"debug_tensor_dump_output_folder": "x", "debug_tensor_dump_layers": [2]},
            "layers are 0 to 1",
        ),
    ],
)
def test_what_cannot_be_dumped_is_refused(
    tiny_model: Path, tmp_path: Path, flags: dict[str, object], said: str
) -> None:
    with pytest.raises(BanyanError, match=said):
        engine(tiny_model, **flags)


def test_each_layer_is_a_range_for_profilers(tiny_model: Path, monkeypatch) -> None:
    marks = list[str]()
    monkeypatch.setattr(torch.profiler.itt, "is_available", lambda: True)
    monkeypatch.setattr(torch.profiler.itt, "range_push", marks.append)
    monkeypatch.setattr(torch.profiler.itt, "range_pop", lambda: marks.append("end"))
    with engine(tiny_model) as it:
        right = answer(it)
    assert not marks
    with engine(tiny_model, enable_layerwise_nvtx_marker=True, skip_server_warmup=True) as it:
        assert answer(it) == right
    assert marks[:2] == ["embedding", "end"] and marks[2] == "layers.0"
    depth, open_ranges = 0, list[str]()
    for mark in marks:
        depth += -1 if mark == "end" else 1
        open_ranges += [mark] if mark != "end" else []
        assert 0 <= depth <= 2
    assert depth == 0
    passes = open_ranges.count("embedding")
    assert passes >= 4 and open_ranges.count("layers.1.mlp") == passes
