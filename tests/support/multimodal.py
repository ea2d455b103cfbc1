"""Tiny random multimodal checkpoints with tokenizers and processor files, made offline.

The processor files are written by hand, so neither Pillow nor torchvision is needed.
"""

import json
from collections.abc import Callable, Mapping
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
{% elif part.type == 'video' %}VIDEO{% elif part.type == 'text' %}{{ part.text }}{% endif %}\
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
        image, video: what the template writes for a part.
        files: further files of the folder, without ".json".
        outer: further fields of config.json.
    """

    name: str
    text: Mapping[str, object]
    vision: Mapping[str, object]
    tokens: Mapping[str, str]
    image: str
    video: str = ""
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


Features = Callable[[transformers.PreTrainedModel, Tensor, tuple[int, int, int]], Tensor]


def qwen_features(
    model: transformers.PreTrainedModel, pixels: Tensor, grid: tuple[int, int, int]
) -> Tensor:
    """Feature rows with DeepStack parts as transformers' Qwen-VL towers compute them."""
    visual = model.model.visual
    with torch.no_grad():
        found = visual(pixels, grid_thw=torch.tensor([grid]))
    parts = getattr(found, "deepstack_features", None) or []
    return torch.cat([found.pooler_output, *parts], dim=1)
