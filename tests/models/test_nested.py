"""Text models inside multimodal checkpoints, against transformers' answers to text alone."""

import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from tests.models.family_sizes import SIZES

PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(40)]
TEXT = SIZES | {"head_dim": 12}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_VIT = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 14,
}
_QWEN3_VIT = _VIT | {
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
VARIANTS: dict[str, tuple[str, dict, dict]] = {
    "qwen2 vl": (
        "Qwen2VL",
        {"rope_parameters": _AXES, "head_dim": None, "num_attention_heads": 4},
        {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48, "mlp_ratio": 1},
    ),
    "qwen2.5 vl": (
        "Qwen2_5_VL",
        {"rope_parameters": _AXES, "head_dim": None, "num_attention_heads": 4},
        _VIT | {"out_hidden_size": 48, "fullatt_block_indexes": [1]},
    ),
    "qwen3 vl": (
        "Qwen3VL",
        {"rope_parameters": _AXES | {"mrope_interleaved": True}},
        _QWEN3_VIT,
    ),
    "qwen3 vl moe": (
        "Qwen3VLMoe",
        {"rope_parameters": _AXES | {"mrope_interleaved": True}, **_MOE},
        _QWEN3_VIT,
    ),
}
"""Name -> transformers' name of the model, changes of its text part, and its vision part."""


def tiny(variant: str, folder, **outer):
    """A random multimodal model, saved to `folder`."""
    name, text, vision = VARIANTS[variant]
    text = {key: value for key, value in (TEXT | text).items() if value is not None}
    torch.manual_seed(11)
    made = getattr(transformers, f"{name}Config")
    config = made(text_config=text, vision_config=vision, **outer)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn_like(parameter) * spread)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def assert_as_transformers(reference, folder, ops, paged) -> None:
    """Logits of a prompt of text within 1e-4 of the reference's."""
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    (logits,) = paged(load_model(read_model_config(str(folder)), Build(ops))).step([(0, PROMPT)])
    assert expected.std() > 0.02
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_text_equal_those_of_transformers(variant, ops, paged, tmp_path):
    reference = tiny(variant, tmp_path)

    assert_as_transformers(reference, tmp_path, ops, paged)


def test_stacks_of_experts_with_their_inputs_first_are_read(ops, paged, tmp_path):
    reference = tiny("qwen3 vl moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    stacks = {n: w.transpose(1, 2).contiguous() for n, w in weights.items() if ".experts." in n}
    save_file(weights | {n: w for n, w in stacks.items()}, tmp_path / "model.safetensors")

    assert_as_transformers(reference, tmp_path, ops, paged)


def test_a_start_line_counts_the_weights_that_are_left_out(ops, tmp_path, caplog, monkeypatch):
    tiny("qwen2.5 vl", tmp_path)
    monkeypatch.setattr(logging.getLogger("banyan.models.weights.loader"), "propagate", True)

    with caplog.at_level(logging.INFO):
        load_model(read_model_config(str(tmp_path)), Build(ops))

    (line,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    weights = load_file(tmp_path / "model.safetensors")
    towers = [name for name in weights if name.startswith(("visual.", "model.visual."))]
    assert f": {len(towers)} of its {len(weights)} weights are left out (visual)" in line


@pytest.mark.parametrize("is_tied", [True, False, None])
def test_the_whole_models_word_on_its_head_counts_and_else_the_weights(is_tied, tmp_path):
    """The text part of many configurations states a class's default."""
    tiny("qwen3 vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = None if is_tied is None else not is_tied
    config["tie_word_embeddings"] = is_tied
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert read_model_config(str(tmp_path)).tie_embeddings is bool(is_tied)


def test_weights_of_no_known_place_are_an_error(ops, tmp_path):
    tiny("qwen3 vl", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.other.weight": torch.ones(3)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=r"model\.other"):
        load_model(read_model_config(str(tmp_path)), Build(ops))
