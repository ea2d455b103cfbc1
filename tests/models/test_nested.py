"""Text models inside multimodal checkpoints, against transformers' answers to text alone."""

import json
import logging
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from banyan.base.errors import ConfigError, ModelError
from banyan.config.env import Environment
from banyan.config.rules.model import limit_context
from banyan.layers.build import Build
from banyan.lora.load import load_adapter
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from tests.models.family_experts import LLAMA4
from tests.models.family_sizes import SCALED, SIZES
from tests.support.flags import config_of
from tests.support.peft import enter, opened, random_peft, show

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
_GLM_VIT = _VIT | {"out_hidden_size": 48, "image_size": 28}
_SIGLIP = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_CLIP = _SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 8}
_SIGLIP2 = _SIGLIP | {"model_type": "siglip_vision_model"}
_PIXTRAL = _SIGLIP | {"model_type": "pixtral", "head_dim": 4}
_SQUARE = _SIGLIP | {"image_size": [28, 28], "patch_size": [14, 14]}
_FOUR = {"num_attention_heads": 4, "head_dim": None}
_FOUR_WIDE = {"num_attention_heads": 4}
_HALF = {"partial_rotary_factor": 0.5}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 6,
    "head_dim": None,
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
    "gemma3": ("Gemma3", {"sliding_window": 7, "num_hidden_layers": 7}, _SIGLIP),
    "mistral3": ("Mistral3", {"model_type": "mistral"}, _PIXTRAL),
    "mistral3, ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "rope_parameters": SCALED},
        _PIXTRAL,
    ),
    "aya vision": ("AyaVision", {"model_type": "cohere2", "sliding_window": 7}, _SIGLIP2),
    "command a vision": ("Cohere2Vision", {"model_type": "cohere2", "sliding_window": 7}, _SIGLIP2),
    "lfm2 vl": (
        "Lfm2Vl",
        {"model_type": "lfm2", **_FOUR, "layer_types": ["conv", "full_attention"] * 2},
        _SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 4},
    ),
    "got ocr 2": (
        "GotOcr2",
        {"model_type": "qwen2", **_FOUR},
        {
            "hidden_size": 8,
            "output_channels": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "mlp_dim": 16,
            "window_size": 2,
            "global_attn_indexes": [0],
        },
    ),
    "lighton ocr": ("LightOnOcr", {"model_type": "qwen3"}, _PIXTRAL),
    "llama4": (
        "Llama4",
        {**LLAMA4, "num_local_experts": 3},
        _SIGLIP
        | {
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "pixel_shuffle_ratio": 0.5,
        },
    ),
    "vip llava": ("VipLlava", {"model_type": "llama"}, _CLIP),
    "qwen2 audio": (
        "Qwen2Audio",
        {"model_type": "qwen2", **_FOUR},
        {
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
        },
    ),
    "voxtral": (
        "Voxtral",
        {"model_type": "llama"},
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
    ),
    "llava, llama": ("Llava", {"model_type": "llama"}, _CLIP),
    "llava, qwen2": ("Llava", {"model_type": "qwen2", **_FOUR}, _CLIP),
    "llava next": ("LlavaNext", {"model_type": "mistral"}, _CLIP),
    "llava onevision": (
        "LlavaOnevision",
        {"model_type": "qwen2", **_FOUR},
        _SIGLIP2,
    ),
    "internvl, qwen3": ("InternVL", {"model_type": "qwen3"}, _SQUARE),
    "internvl, experts": (
        "InternVL",
        {"model_type": "qwen3_moe", "norm_topk_prob": True, **_MOE},
        _SQUARE,
    ),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, _SIGLIP),
    "idefics3": ("Idefics3", {"model_type": "llama"}, _SIGLIP),
    "glm4v": ("Glm4v", {"rope_parameters": _AXES, **_FOUR_WIDE}, _GLM_VIT),
    "glm4.6v": (
        "Glm46V",
        {"model_type": "glm4v_text", "rope_parameters": _AXES, **_FOUR_WIDE},
        _GLM_VIT | {"model_type": "glm4v_vision"},
    ),
    "glm4v, half of a head rotates": (
        "Glm4v",
        {"rope_parameters": _AXES | {"mrope_section": [1, 1, 1], **_HALF}, **_FOUR_WIDE},
        _GLM_VIT,
    ),
    "glm4v moe": (
        "Glm4vMoe",
        {"rope_parameters": _AXES | {"mrope_section": [1, 1, 1], **_HALF}, **_DEEPSEEK},
        _GLM_VIT,
    ),
    "paddleocr vl": ("PaddleOCRVL", {"rope_parameters": _AXES | {"rope_theta": 5e5}}, _SIGLIP),
    "kimi k2.5": ("Kimi_K25", {**_DEEPSEEK, **_LATENT}, _VIT | {"num_attention_heads": 2}),
}
"""Name -> transformers' name of the model, changes of its text part, and its tower."""


_TOWERS = (
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
_NEWER = ("language_model.model.", "model.language_model.")


def tiny(variant: str, folder, **outer):
    """A random multimodal model, saved to `folder`."""
    name, text, vision = VARIANTS[variant]
    text = {key: value for key, value in (TEXT | text).items() if value is not None}
    torch.manual_seed(11)
    made = getattr(transformers, f"{name}Config")
    tower = "audio_config" if "audio_config" in made.sub_configs_defaults else "vision_config"
    config = made(text_config=text, **{tower: vision}, **outer)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn_like(parameter) * spread)
    model.tie_weights()
    model.save_pretrained(folder)
    if (
        name == "Kimi_K25"
    ):  # transformers 5.23 renames the text model's layers along with the tower's
        rename(folder, ("language_model.model.blocks.", "language_model.model.layers."))
    return model


def rename(folder, *changes: tuple[str, str]) -> None:
    """Change the beginnings of weights' names."""
    weights = load_file(folder / "model.safetensors")
    for old, new in changes:
        weights = {
            new + name.removeprefix(old) if name.startswith(old) else name: weight
            for name, weight in weights.items()
        }
    save_file(weights, folder / "model.safetensors")


def rewrite(folder, change) -> None:
    """Apply a change to config.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def assert_as_transformers(reference, folder, ops, paged, scale: float = 1.0) -> None:
    """Logits of a prompt of text within 1e-4 of the reference's.

    Args:
        scale: factor on the reference's logits; transformers' multimodal classes leave out
            `logit_scale` of Cohere 2, which its class for text applies.
    """
    name = type(reference).__name__.removesuffix("ForConditionalGeneration")
    with torch.no_grad():  # Llama 4's own forward pass needs an image
        text = reference.language_model if name == "Llama4" else reference
        expected = text(torch.tensor([PROMPT])).logits[0] * scale
    (logits,) = paged(
        load_model(read_model_config(str(folder), with_media=False), Build(ops))
    ).step([(0, PROMPT)])
    assert expected.std() > 0.02
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_text_equal_those_of_transformers(variant, ops, paged, tmp_path):
    reference = tiny(variant, tmp_path)

    scale = 0.0625 if "cohere2" in VARIANTS[variant][1].values() else 1.0
    assert_as_transformers(reference, tmp_path, ops, paged, scale)


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
        load_model(read_model_config(str(tmp_path), with_media=False), Build(ops))

    (line,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    weights = load_file(tmp_path / "model.safetensors")
    towers = [name for name in weights if name.startswith(("visual.", "model.visual."))]
    assert f": {len(towers)} of its {len(weights)} weights are left out (visual)" in line


@pytest.mark.parametrize("is_tied", [True, False, None])
def test_the_whole_models_word_on_its_head_counts_and_else_the_weights(is_tied, tmp_path):
    """The text part of many configurations states a class's default."""
    tiny("qwen3 vl", tmp_path)

    def state(config):
        config["text_config"]["tie_word_embeddings"] = None if is_tied is None else not is_tied
        config["tie_word_embeddings"] = is_tied

    rewrite(tmp_path, state)

    assert read_model_config(str(tmp_path), with_media=False).tie_embeddings is bool(is_tied)


def test_weights_of_no_known_place_are_an_error(ops, tmp_path):
    tiny("qwen3 vl", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.other.weight": torch.ones(3)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=r"model\.other"):
        load_model(read_model_config(str(tmp_path), with_media=False), Build(ops))


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("qwen2.5 vl", [("model.language_model.", "model."), ("model.visual.", "visual.")]),
        ("gemma3", [("language_model.model.", "model.language_model."), *_TOWERS]),
        ("llava, llama", [("language_model.lm_head", "lm_head"), _NEWER, *_TOWERS]),
        ("smolvlm", [("model.text_model.", "model.language_model.")]),
    ],
)
def test_names_of_other_versions_of_transformers_are_read(variant, changes, ops, paged, tmp_path):
    reference = tiny(variant, tmp_path)
    rename(tmp_path, *changes)

    assert_as_transformers(reference, tmp_path, ops, paged)


def test_the_first_qwen_vl_models_keep_their_fields_at_the_top(ops, paged, tmp_path):
    reference = tiny("qwen2 vl", tmp_path)

    def flatten(config):
        text = config.pop("text_config")
        scaling = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
        config |= text | {"rope_scaling": scaling, "rope_theta": 1e4, "model_type": "qwen2_vl"}

    rewrite(tmp_path, flatten)

    assert_as_transformers(reference, tmp_path, ops, paged)


def test_the_makers_form_of_internvl_is_read(ops, paged, tmp_path):
    reference = tiny("internvl, qwen3", tmp_path)
    rename(tmp_path, ("vision_tower.", "vision_model."), ("multi_modal_projector.", "mlp1."))

    def as_published(config):
        config["llm_config"] = config.pop("text_config") | {"architectures": ["Qwen3ForCausalLM"]}
        config["architectures"] = ["InternVLChatModel"]
        config["auto_map"] = {"AutoModel": "modeling_internvl_chat.InternVLChatModel"}

    rewrite(tmp_path, as_published)

    assert_as_transformers(reference, tmp_path, ops, paged)


@pytest.mark.parametrize(
    ("variant", "listed"),
    [
        ("llava, llama", transformers.LlamaConfig),
        ("llava next", transformers.MistralConfig),
        ("mistral3, ministral3", transformers.Ministral3Config),
        ("gemma3", transformers.Gemma3TextConfig),
    ],
)
def test_sizes_that_a_text_part_leaves_out_are_those_of_its_class(variant, listed, tmp_path):
    tiny(variant, tmp_path)
    kept = ("model_type", "architectures", "sliding_window")
    rewrite(
        tmp_path,
        lambda config: config.update(
            text_config={k: v for k, v in config["text_config"].items() if k in kept}
        ),
    )

    model_config, expected = read_model_config(str(tmp_path), with_media=False), listed()

    assert model_config.context_length == expected.max_position_embeddings
    assert model_config.num_layers == expected.num_hidden_layers
    for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"):
        assert getattr(model_config, name) == getattr(expected, name), name
    assert model_config.num_heads == expected.num_attention_heads
    assert model_config.num_kv_heads == expected.num_key_value_heads


def test_an_unknown_text_model_is_refused_with_the_known_ones(tmp_path):
    tiny("llava, llama", tmp_path)
    rewrite(tmp_path, lambda config: config["text_config"].update(model_type="opt"))

    with pytest.raises(ModelError, match="LlavaForConditionalGeneration.*'?opt") as caught:
        read_model_config(str(tmp_path), with_media=False)

    assert "qwen3_moe" in caught.value.hint


def test_adapters_name_layers_as_the_checkpoint_does(ops, paged, tmp_path):
    reference = tiny("qwen3 vl", tmp_path / "base")
    adapted = random_peft(reference, tmp_path / "adapter", target_modules=["q_proj", "o_proj"], r=4)
    with torch.no_grad():
        expected = adapted(torch.tensor([PROMPT])).logits[0]
    model, base = opened(tmp_path / "base", ops)

    enter(base, 1, load_adapter(str(tmp_path / "adapter"), base))
    show(base, [1] * len(PROMPT))

    (logits,) = paged(model).step([(0, PROMPT)])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("allows", [False, True])
def test_requests_end_where_queries_would_be_scaled_by_position(allows, tmp_path):
    tiny("mistral3, ministral3", tmp_path)
    model_config = read_model_config(str(tmp_path), with_media=False)
    assert model_config.context_length == 64
    environment = replace(Environment(), allow_longer_context=allows)

    asked = config_of("--model-path", str(tmp_path), "--context-length", "65")

    with pytest.raises(ConfigError, match="65 is more than 64: queries are not scaled"):
        limit_context(asked, model_config, environment)


def test_requests_of_llama4_end_with_the_first_chunk_and_before_queries_are_scaled(tmp_path):
    tiny("llama4", tmp_path)
    assert read_model_config(str(tmp_path), with_media=False).context_length == 64

    rewrite(tmp_path, lambda config: config["text_config"].update(floor_scale=50))

    assert read_model_config(str(tmp_path), with_media=False).context_length == 49
