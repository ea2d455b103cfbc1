"""Tiny random multimodal checkpoints with tokenizers and processor files, made offline.

The processor files are written by hand, so neither Pillow nor torchvision is needed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

VOCAB = 640
TEXT: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_NAMED = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
_QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
_CHAT = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}{% if part.type == 'image' %}IMAGE\
{% elif part.type == 'video' %}VIDEO{% elif part.type == 'audio' %}SOUND\
{% elif part.type == 'text' %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Recipe:
    """One family.

    Attributes:
        name: of its classes in transformers.
        text, vision: changes of the text part, and the tower.
        tokens: key in config.json -> special token.
        image, video, sound: what the template writes for a part.
        files: further files of the folder, without ".json".
        outer: further fields of config.json.
    """

    name: str
    text: Mapping[str, object]
    vision: Mapping[str, object]
    tokens: Mapping[str, str]
    image: str
    video: str = ""
    sound: str = ""
    files: Mapping[str, object] = field(default_factory=dict[str, object])
    outer: Mapping[str, object] = field(default_factory=dict[str, object])


def _rope(theta: float, *sections: int, **more: object) -> dict[str, object]:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "mrope_section": list(sections),
            **more,
        }
    }


_VISION_PAD = "<|vision_start|><|image_pad|><|vision_end|>"
_VIDEO_PAD = "<|vision_start|><|video_pad|><|vision_end|>"
_CLIP_NORM = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF_NORM = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _qwen_files(patch: int, norm: Mapping[str, object]) -> dict[str, object]:
    factor = (2 * patch) ** 2
    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, **norm}
    bounds = {"size": {"shortest_edge": 4 * factor, "longest_edge": 64 * factor}}
    image = {"image_processor_type": "Qwen2VLImageProcessor", **sizes, **bounds}
    return {"preprocessor_config": image, "video_preprocessor_config": {**sizes, **bounds}}


_QWEN3_VISION = {
    "depth": 4,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 49,
}
_QWEN = {"tokens": _QWEN_TOKENS, "image": _VISION_PAD, "video": _VIDEO_PAD}
_INTERLEAVED = _rope(5e6, 4, 2, 2, mrope_interleaved=True) | {"head_dim": 16}
_GLM_VISION = {
    "depth": 3,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 70,
    "patch_size": 14,
    "attention_bias": True,
}
_GLM_TOKENS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "image_token_id": "<|image|>",
}
_GLM_PAD = "<|begin_of_image|><|image|><|end_of_image|>"
_VIT = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 84,
    "patch_size": 14,
}
_PIXTRAL = _VIT | {"model_type": "pixtral", "image_size": 196, "hidden_act": "silu"}
_ROWS = {"break_token_id": "[IMG_BREAK]", "end_token_id": "[IMG_END]"}
_RAGGED = {"size": {"longest_edge": 196}, "patch_size": 14, **_CLIP_NORM}


def _square(side: int) -> dict[str, object]:
    return {"size": {"height": side, "width": side}, **_HALF_NORM}


RECIPES: Mapping[str, Recipe] = {
    "qwen2_vl": Recipe(
        "Qwen2VL",
        _rope(1e6, 2, 3, 3),
        {"depth": 3, "embed_dim": 40, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
        files=_qwen_files(14, _CLIP_NORM),
        **_QWEN,
    ),
    "qwen2_5_vl": Recipe(
        "Qwen2_5_VL",
        _rope(1e6, 2, 3, 3),
        {
            "depth": 4,
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 2,
        },
        files=_qwen_files(14, _CLIP_NORM),
        **_QWEN,
    ),
    "qwen3_vl": Recipe(
        "Qwen3VL",
        _INTERLEAVED,
        _QWEN3_VISION | {"deepstack_visual_indexes": [0, 2]},
        files=_qwen_files(16, _HALF_NORM),
        **_QWEN,
    ),
    "qwen3_vl_moe": Recipe(
        "Qwen3VLMoe",
        _INTERLEAVED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        _QWEN3_VISION | {"deepstack_visual_indexes": [1]},
        files=_qwen_files(16, _HALF_NORM),
        **_QWEN,
    ),
    "qwen3_5": Recipe(
        "Qwen3_5",
        _rope(1e7, 2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25)
        | {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        _QWEN3_VISION | {"depth": 2},
        files=_qwen_files(16, _HALF_NORM),
        **_QWEN,
    ),
    "glm4v": Recipe(
        "Glm4v",
        _rope(1e4, 2, 3, 3, partial_rotary_factor=1.0) | {"head_dim": 16, "pad_token_id": 0},
        _GLM_VISION,
        _GLM_TOKENS,
        _GLM_PAD,
        files=_qwen_files(14, _CLIP_NORM),
    ),
    "glm4v_moe": Recipe(
        "Glm4vMoe",
        _rope(1e4, 2, 1, 1, partial_rotary_factor=0.5)
        | {
            "head_dim": 16,
            "pad_token_id": 0,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        _GLM_VISION,
        _GLM_TOKENS,
        _GLM_PAD,
        files=_qwen_files(14, _CLIP_NORM),
    ),
    "paddleocr_vl": Recipe(
        "PaddleOCRVL",
        _rope(5e5, 2, 3, 3) | {"head_dim": 16},
        _VIT,
        {
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "begin_id": "<|IMAGE_START|>",
            "end_id": "<|IMAGE_END|>",
        },
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        files=_qwen_files(14, _CLIP_NORM),
    ),
    "llama4": Recipe(
        "Llama4",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 512,
            "pad_token_id": 0,
        },
        _VIT
        | {
            "vision_output_dim": 48,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "pixel_shuffle_ratio": 0.5,
            "intermediate_size": 160,
        },
        {
            "image_token_index": "<|patch|>",
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
            "x_id": "<|tile_x_separator|>",
            "y_id": "<|tile_y_separator|>",
            "whole_id": "<|image|>",
        },
        "<|image|>",
        files={"preprocessor_config": _square(84) | {"max_patches": 4}},
    ),
    "gemma3": Recipe(
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        _VIT | {"model_type": "siglip_vision_model"},
        {
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        "<start_of_image>",
        files={"preprocessor_config": _square(84)},
        outer={"mm_tokens_per_image": 9},
    ),
    "llava": Recipe(
        "Llava",
        {"model_type": "llama"},
        _VIT | {"model_type": "clip_vision_model", "projection_dim": 8},
        {"image_token_index": "<image>"},
        "<image>",
        files={
            "preprocessor_config": {
                "size": {"shortest_edge": 84},
                "crop_size": {"height": 84, "width": 84},
                **_CLIP_NORM,
            }
        },
    ),
    "llava_next": Recipe(
        "LlavaNext",
        {"model_type": "llama"},
        _VIT | {"model_type": "clip_vision_model", "projection_dim": 8},
        {"image_token_index": "<image>"},
        "<image>",
        files={
            "preprocessor_config": {
                "size": {"shortest_edge": 84},
                "crop_size": {"height": 84, "width": 84},
                "image_grid_pinpoints": [[84, 168], [168, 84], [168, 168], [84, 252]],
                **_CLIP_NORM,
            }
        },
        outer={"image_grid_pinpoints": [[84, 168], [168, 84], [168, 168], [84, 252]]},
    ),
    "llava_siglip": Recipe(
        "Llava",
        {"model_type": "qwen2"},
        _VIT | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_token_index": "<image>"},
        "<image>",
        files={"preprocessor_config": _square(84)},
        outer={"vision_feature_select_strategy": "full"},
    ),
    "pixtral": Recipe(
        "Llava",
        {"model_type": "mistral", "head_dim": 16},
        _PIXTRAL,
        {"image_token_index": "[IMG]", **_ROWS},
        "[IMG]",
        files={"preprocessor_config": _RAGGED},
        outer={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": Recipe(
        "Mistral3",
        {"model_type": "mistral", "head_dim": 16},
        _PIXTRAL,
        {"image_token_index": "[IMG]", **_ROWS},
        "[IMG]",
        files={"preprocessor_config": _RAGGED},
        outer={"spatial_merge_size": 2},
    ),
    "smolvlm": Recipe(
        "SmolVLM",
        {"model_type": "llama"},
        _VIT,
        {
            "image_token_id": "<image>",
            "fake_token_id": "<fake_token_around_image>",
            "global_token_id": "<global-img>",
            **{f"place_{r}_{c}": f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)},
        },
        "<image>",
        files={
            "preprocessor_config": {
                "size": {"longest_edge": 168},
                "max_image_size": {"longest_edge": 84},
                **_HALF_NORM,
            }
        },
        outer={"scale_factor": 3},
    ),
    "internvl": Recipe(
        "InternVL",
        {"model_type": "qwen3", "head_dim": 16},
        _VIT | {"image_size": [84, 84], "patch_size": [14, 14], "attention_bias": True},
        {"image_token_id": "<IMG_CONTEXT>", "begin_id": "<img>", "end_id": "</img>"},
        "<IMG_CONTEXT>",
        files={"preprocessor_config": _square(84) | {"min_patches": 1, "max_patches": 4}},
    ),
    "internvl_6b": Recipe(
        "InternVL",
        {"model_type": "qwen2"},
        _VIT
        | {
            "image_size": [84, 84],
            "patch_size": [14, 14],
            "use_qk_norm": True,
            "norm_type": "rms_norm",
            "use_mean_pooling": False,
        },
        {"image_token_id": "<IMG_CONTEXT>", "begin_id": "<img>", "end_id": "</img>"},
        "<IMG_CONTEXT>",
        files={"preprocessor_config": _square(84) | {"min_patches": 1, "max_patches": 4}},
    ),
}
"""Family -> how it is built."""


def tiny(family: str, folder: Path, seed: int = 0) -> transformers.PreTrainedModel:
    """A random model of a family, saved to `folder` with its tokenizer and processor files."""
    recipe = RECIPES[family]
    folder.mkdir(parents=True, exist_ok=True)
    specials = (*_NAMED, *dict.fromkeys(recipe.tokens.values()))
    write_tokenizer(folder, specials, recipe)
    ids = {key: 256 + specials.index(token) for key, token in recipe.tokens.items()}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{recipe.name}Config")(
        text_config=TEXT | recipe.text, vision_config=dict(recipe.vision), **ids, **recipe.outer
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{recipe.name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread, mean = (0.2, 0.0) if parameter.dim() > 1 else (0.3, 1.0)
            parameter.copy_(torch.randn_like(parameter) * spread + mean)
    model.tie_weights()
    model.save_pretrained(folder)
    for name, content in recipe.files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return model


def write_tokenizer(folder: Path, specials: tuple[str, ...], recipe: Recipe) -> None:
    """A tokenizer of single bytes, the special tokens behind them, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = _CHAT.replace("IMAGE", recipe.image).replace("VIDEO", recipe.video)
    template = template.replace("SOUND", recipe.sound)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_content(patches: int, values: int, seed: int = 0) -> Tensor:
    """Pixels of patches, uint8 [patches, values]: smooth from patch to patch, with noise."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 96, (patches, values), generator=generator)
    slope = (torch.arange(patches) * 131 % 160).unsqueeze(1)
    return (noise + slope).to(torch.uint8)


def normalized(content: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """What transformers' processors make of those pixels; a patch is [channels, …] flattened."""
    values = content.float().unflatten(1, (len(mean), -1)) / 255
    means, stds = (torch.tensor(each).view(1, -1, 1) for each in (mean, std))
    return ((values - means) / stds).flatten(1)


def _paddle_features(
    model: transformers.PreTrainedModel, pixels: Tensor, grid: tuple[int, int, int]
) -> Tensor:
    """PaddleOCR-VL takes patches row by row; these come by blocks of 2 x 2."""
    frames, height, width = grid
    blocks = pixels.view(frames, height // 2, width // 2, 2, 2, -1).transpose(2, 3)
    side = round((pixels.shape[1] // 3) ** 0.5)
    rows = blocks.reshape(frames * height * width, 3, side, side)
    with torch.no_grad():
        found = model.model.get_image_features(rows, torch.tensor([grid]))
    return torch.cat(list(found.pooler_output))


def picture_features(
    model: transformers.PreTrainedModel, pixels: Tensor, grid: tuple[int, int, int]
) -> Tensor:
    """Feature rows as transformers computes them from whole tiles; patches come row by row."""
    tiles, height, width = grid
    patches = pixels.unflatten(0, grid).unflatten(3, (3, -1))
    side = round(patches.shape[-1] ** 0.5)
    pictures = patches.unflatten(4, (side, side)).permute(0, 3, 1, 4, 2, 5)
    pictures = pictures.reshape(tiles, 3, height * side, width * side)
    vision, more = model.config.vision_config.model_type, {}
    if vision == "pixtral":
        more["image_sizes"] = torch.tensor([[height * side, width * side]] * tiles)
    if hasattr(model.config, "vision_feature_layer"):
        more["vision_feature_layer"] = model.config.vision_feature_layer
    if hasattr(model.config, "vision_feature_select_strategy"):
        more["vision_feature_select_strategy"] = model.config.vision_feature_select_strategy
    if model.config.model_type in ("smolvlm", "idefics3"):
        pictures = pictures.unsqueeze(0)
    with torch.no_grad():
        if model.config.model_type == "llama4":
            found = model.multi_modal_projector(model.vision_model(pictures).last_hidden_state)
        else:
            found = model.model.get_image_features(pictures, **more).pooler_output
    return torch.cat([tile.reshape(-1, tile.shape[-1]) for tile in found])


def qwen_features(
    model: transformers.PreTrainedModel, pixels: Tensor, grid: tuple[int, int, int]
) -> Tensor:
    """Feature rows with DeepStack parts as transformers' Qwen-VL towers compute them."""
    grids = torch.tensor([grid])
    if model.config.model_type == "paddleocr_vl":
        return _paddle_features(model, pixels, grid)
    visual = model.model.visual
    if model.config.model_type.startswith("glm"):  # its class wants each time step by itself
        grids = torch.tensor([(1, *grid[1:])] * grid[0])
    with torch.no_grad():
        found = visual(pixels, grid_thw=grids)
    parts = getattr(found, "deepstack_features", None) or []
    return torch.cat([found.pooler_output, *parts], dim=1)
