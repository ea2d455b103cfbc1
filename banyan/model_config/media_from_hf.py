"""MediaConfig of a multimodal checkpoint in Hugging Face's form.

Sources: config.json (`vision_config`), preprocessor_config.json and video_preprocessor_config.json,
or processor_config.json, which holds both as parts.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from banyan.base.errors import ModelError
from banyan.base.json_types import is_list, is_object
from banyan.model_config.checkpoint_fields import CheckpointFields, read_json
from banyan.model_config.media import MediaConfig, Setting, TowerConfig

_MAX_WIDTH = 1 << 20
_MAX_BLOCKS = 1024
_MAX_PIXELS = 1 << 32
_MAX_SIDE = 1 << 16
_MAX_ID = 1 << 31
_MAX_TOKENIZER = 256 << 20
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class _Source:
    """The files of one checkpoint.

    Attributes:
        whole: config.json.
        text: fields of the text model.
        vision: the configuration of the tower.
        image, video: of the processors; empty where the checkpoint has none.
        hidden_size: of the text model.
        path: the folder.
    """

    whole: CheckpointFields
    text: CheckpointFields
    vision: CheckpointFields
    image: CheckpointFields
    video: CheckpointFields
    hidden_size: int
    path: str


def read_media(
    outer: str,
    whole: CheckpointFields,
    text: CheckpointFields,
    path: str,
    hidden_size: int,
) -> MediaConfig | None:
    """The MediaConfig of a multimodal checkpoint; None if its tower is not supported.

    Args:
        outer: class in config.json.
        whole: the fields of config.json.
        text: the fields of its text model.
        hidden_size: of the text model.

    Raises:
        ModelError: names the key that is wrong.
    """
    reader = _READERS.get(outer)
    if outer in _NAMED_BY_TOKENIZER and not os.path.isfile(os.path.join(path, _TOKENIZER)):
        return None
    vision = whole.part("vision_config")
    if reader is None or vision is None:
        return None
    try:
        image, video = _processors(path)
        return reader(_Source(whole, text, vision, image, video, hidden_size, path))
    except ModelError as error:
        hint = f"{error.hint}, or serve its text alone with --language-model-only"
        raise ModelError(error.text, hint=hint.removeprefix(", or ")) from None


def _processors(path: str) -> tuple[CheckpointFields, CheckpointFields]:
    """Settings of the image and the video processor."""
    whole = os.path.join(path, "processor_config.json")
    both = CheckpointFields(read_json(whole, is_needed=False), whole)

    def one(part: str, name: str) -> CheckpointFields:
        own = both.part(part)
        if own is not None:
            return own
        file = os.path.join(path, name)
        return CheckpointFields(read_json(file, is_needed=False), file)

    image = one("image_processor", "preprocessor_config.json")
    return image, one("video_processor", "video_preprocessor_config.json")


_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5)
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3
"""Numbers of Pillow's filters."""


@dataclass(frozen=True)
class _QwenForm:
    """How a Qwen-VL model differs from the others.

    Attributes:
        pixels, video_pixels: default bounds of the area of a picture and of a video.
        width_key, out_key, act: keys and default of `vision_config`.
        has_stamps: each time step of a video is a picture of its own, after its time as text.
    """

    patch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixels: tuple[int, int]
    video_pixels: tuple[int, int]
    width_key: str = "hidden_size"
    out_key: str = "out_hidden_size"
    act: str = "gelu_pytorch_tanh"
    has_stamps: bool = False
    has_patch_bias: bool = False


_QWEN2 = _QwenForm(
    14,
    _CLIP_MEAN,
    _CLIP_STD,
    pixels=(56 * 56, 28 * 28 * 1280),
    video_pixels=(128 * 28 * 28, 28 * 28 * 768),
    width_key="embed_dim",
    out_key="hidden_size",
    act="quick_gelu",
)
_QWEN2_5 = replace(_QWEN2, width_key="hidden_size", out_key="out_hidden_size", act="silu")
_QWEN3 = _QwenForm(
    16,
    _HALF,
    _HALF,
    pixels=(256 * 256, 4096 * 4096),
    video_pixels=(128 * 32 * 32, 32 * 32 * 768),
    has_stamps=True,
    has_patch_bias=True,
)


def _qwen(source: _Source, form: _QwenForm, tower: TowerConfig) -> MediaConfig:
    settings = _qwen_settings(source.image, form.pixels, tower)
    video = _qwen_settings(source.video, form.video_pixels, tower)
    video |= {
        "fps": source.video.number("fps", 0.01, 1000.0, default=2.0),
        "min_frames": source.video.integer("min_frames", 1, _MAX_SIDE, default=4),
        "max_frames": source.video.integer("max_frames", 1, _MAX_SIDE, default=768),
        "has_stamps": int(form.has_stamps),
        "tokens_per_second": source.vision.number("tokens_per_second", 0.0, 1e3, default=0.0),
    }
    return MediaConfig(
        rule="qwen",
        tower=tower,
        image_token=source.whole.integer("image_token_id", 0, _MAX_ID, default=151655),
        video_token=source.whole.integer("video_token_id", 0, _MAX_ID, default=151656),
        settings=settings,
        video=video,
        axes=_axes(source.text),
    )


def _qwen_settings(
    processor: CheckpointFields,
    pixels: tuple[int, int],
    tower: TowerConfig,
    counts_frames: bool = False,
) -> dict[str, Setting]:
    """Bounds of the area in pixels, under either of their two names, and the sides of a patch.

    Args:
        counts_frames: a picture counts as the frames of one time step.
    """
    size = processor.part("size")
    low, high = pixels
    if size is not None:
        low = size.integer("shortest_edge", 1, _MAX_PIXELS, default=low)
        high = size.integer("longest_edge", 1, _MAX_PIXELS, default=high)
    low = processor.integer("min_pixels", 1, _MAX_PIXELS, default=low)
    high = processor.integer("max_pixels", 1, _MAX_PIXELS, default=high)
    if low > high:
        raise processor.error("min_pixels", low, f"at most max_pixels, {high:,}")
    frames = tower.temporal_patch if counts_frames else 1
    return {
        "patch": tower.patch,
        "merge": tower.merge,
        "temporal": tower.temporal_patch,
        "min_pixels": -(-low // frames),
        "max_pixels": max(high // frames, 1),
        **_resample(processor),
    }


def _qwen_tower(source: _Source, form: _QwenForm) -> TowerConfig:
    vision = source.vision
    width = vision.integer(form.width_key, 1, _MAX_WIDTH)
    heads = vision.integer("num_heads", 1, _MAX_WIDTH)
    if width % (4 * heads):
        rule = f"a multiple of 4 · {heads} heads, for the rotation by row and column"
        raise vision.error(form.width_key, width, rule)
    out = vision.integer(form.out_key, 1, _MAX_WIDTH, default=source.hidden_size)
    if out != source.hidden_size:
        raise vision.error(form.out_key, out, f"the text model's width, {source.hidden_size:,}")
    ratio = vision.integer("mlp_ratio", 1, 64, default=4)
    return TowerConfig(
        blocks=vision.integer("depth", 1, _MAX_BLOCKS),
        width=width,
        heads=heads,
        inner=vision.integer("intermediate_size", 1, _MAX_WIDTH, default=width * ratio),
        out=out,
        patch=vision.integer("patch_size", 1, 512, default=form.patch),
        temporal_patch=vision.integer("temporal_patch_size", 1, 16, default=2),
        merge=vision.integer("spatial_merge_size", 1, 16, default=2),
        mean=_channels(source.image, "image_mean", form.mean),
        std=_channels(source.image, "image_std", form.std),
        activation=vision.text("hidden_act", default=form.act),
        rope_theta=10000.0,
        has_patch_bias=form.has_patch_bias,
    )


def _channels(
    processor: CheckpointFields, key: str, default: tuple[float, ...]
) -> tuple[float, ...]:
    listed = processor.listed(key) or list(default)
    numbers = tuple(
        float(value)
        for value in listed
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6
    )
    is_good = len(numbers) == len(listed) == len(default)
    if not is_good or (key == "image_std" and min(numbers) < 1e-6):
        raise processor.error(key, listed, f"{len(default)} numbers")
    return numbers


def _blocks_of(
    vision: CheckpointFields, key: str, blocks: int, default: tuple[int, ...]
) -> tuple[int, ...]:
    """Numbers of blocks, ascending."""
    if not vision.states(key):
        return tuple(block for block in default if block < blocks)
    listed = vision.listed(key)
    numbers = [n for n in listed if isinstance(n, int) and not isinstance(n, bool)]
    if len(numbers) != len(listed) or not all(0 <= n < blocks for n in numbers):
        raise vision.error(key, listed, f"numbers of {blocks} blocks")
    return tuple(sorted(set(numbers)))


def _axes(text: CheckpointFields) -> tuple[int, ...]:
    """Axis of each rotary pair: whole sections, or interleaved (Qwen3-VL).

    In the interleaved order pair i follows axis i % 3 while that axis has pairs left, else time.
    """
    rope = text.part("rope_parameters") or text.part("rope_scaling")
    if rope is None or not rope.has("mrope_section"):
        return ()
    listed = rope.listed("mrope_section")
    sections = [n for n in listed if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    if len(sections) != 3 or len(listed) != 3 or not 1 <= sum(sections) <= 4096:
        raise rope.error("mrope_section", listed, "three numbers of rotary pairs")
    if rope.flag("mrope_interleaved", default=False):
        return tuple(
            i % 3 if i < 3 * sections[i % 3] and i % 3 else 0 for i in range(sum(sections))
        )
    return tuple(axis for axis, pairs in enumerate(sections) for _ in range(pairs))


def _qwen2_vl(source: _Source) -> MediaConfig:
    return _qwen(source, _QWEN2, _qwen_tower(source, _QWEN2))


def _qwen2_5_vl(source: _Source) -> MediaConfig:
    tower, vision = _qwen_tower(source, _QWEN2_5), source.vision
    cell = tower.patch * tower.merge
    window = vision.integer("window_size", cell, _MAX_SIDE, default=112)
    blocks = _blocks_of(vision, "fullatt_block_indexes", tower.blocks, (7, 15, 23, 31))
    tower = replace(
        tower,
        norm="rms",
        mlp="gated",
        window=window // cell,
        full_blocks=blocks,
    )
    return _qwen(source, _QWEN2_5, tower)


def _qwen3_vl(source: _Source, deep: tuple[int, ...] = (8, 16, 24)) -> MediaConfig:
    tower, vision = _qwen_tower(source, _QWEN3), source.vision
    rows = vision.integer("num_position_embeddings", 1, _MAX_PIXELS, default=2304)
    side = round(rows**0.5)
    if side * side != rows:
        raise vision.error("num_position_embeddings", rows, "a square")
    blocks = _blocks_of(vision, "deepstack_visual_indexes", tower.blocks, deep)
    tower = replace(tower, positions="bilinear", aligns_corners=True, side=side, deep_blocks=blocks)
    return _qwen(source, _QWEN3, tower)


def _qwen3_5(source: _Source) -> MediaConfig:
    return _qwen3_vl(source, deep=())


def _glm4v(source: _Source) -> MediaConfig:
    """GLM-4.1V, 4.5V and 4.6V (arXiv 2507.01006)."""
    vision = source.vision
    form = replace(
        _QWEN2,
        patch=14,
        width_key="hidden_size",
        out_key="out_hidden_size",
        act="silu",
        pixels=(112 * 112, 28 * 28 * 15000),
    )
    tower, out = _qwen_tower(source, form), source.hidden_size
    size = vision.integer("image_size", tower.patch, _MAX_SIDE, default=336)
    tower = replace(
        tower,
        inner=out,
        norm="rms",
        eps=vision.number("rms_norm_eps", 0.0, 1.0, default=1e-5),
        mlp="gated",
        positions="bicubic",
        side=size // tower.patch,
        adds_positions_last=True,
        has_patch_bias=True,
        has_qkv_bias=vision.flag("attention_bias", default=False),
        has_output_bias=False,
        has_mlp_bias=False,
        has_first_norm=True,
        last_norm="rms",
        merger="glm4v",
        merger_inner=vision.integer("intermediate_size", 1, _MAX_WIDTH, default=13696),
    )
    return MediaConfig(
        rule="qwen",
        tower=tower,
        image_token=_image_token(source, 151343),
        settings=_qwen_settings(source.image, form.pixels, tower, counts_frames=True),
        axes=_axes(source.text),
    )


def _paddleocr_vl(source: _Source) -> MediaConfig:
    """PaddleOCR-VL (arXiv 2510.14528)."""
    tower = _vit(
        source,
        merge=source.vision.integer("spatial_merge_size", 1, 16, default=2),
        mean=_channels(source.image, "image_mean", _CLIP_MEAN),
        std=_channels(source.image, "image_std", _CLIP_STD),
        positions="bilinear",
        rope_theta=10000.0,
        is_by_block=True,
        last_norm="layer",
        merger_eps=1e-5,
    )
    pixels = (384 * 384, 1536 * 1536)
    return MediaConfig(
        rule="qwen",
        tower=tower,
        image_token=_image_token(source, 100295),
        settings=_qwen_settings(source.image, pixels, tower),
        axes=_axes(source.text),
    )


def _vit(source: _Source, **more: Any) -> TowerConfig:
    """The sizes that most towers name as text models do; `more` replaces fields."""
    vision = source.vision
    width = vision.integer("hidden_size", 1, _MAX_WIDTH, default=768)
    heads = vision.integer("num_attention_heads", 1, _MAX_WIDTH, default=12)
    if width % heads:
        raise vision.error("hidden_size", width, f"a multiple of {heads} heads")
    tower = TowerConfig(
        blocks=vision.integer("num_hidden_layers", 1, _MAX_BLOCKS, default=12),
        width=width,
        heads=heads,
        inner=vision.integer("intermediate_size", 1, _MAX_WIDTH, default=4 * width),
        out=source.hidden_size,
        patch=_side(vision, "patch_size", 16),
        mean=_channels(source.image, "image_mean", _HALF),
        std=_channels(source.image, "image_std", _HALF),
        eps=vision.number("layer_norm_eps", 0.0, 1.0, default=1e-6),
        activation=vision.text("hidden_act", default="gelu_pytorch_tanh"),
        is_by_block=False,
    )
    tower = replace(tower, **more)
    if tower.positions:
        size = _side(vision, "image_size", 224)
        if size % tower.patch:
            raise vision.error("image_size", size, f"a multiple of the patch, {tower.patch}")
        tower = replace(tower, side=size // tower.patch)
    return tower


def _side(fields: CheckpointFields, key: str, default: int) -> int:
    """A side in pixels, given as one number or twice."""
    listed = fields.any(key)
    if is_list(listed) and len(listed) == 2 and listed[0] == listed[1]:
        fields = fields.with_values({key: listed[0]})
    return fields.integer(key, 1, _MAX_SIDE, default=default)


def _resample(processor: CheckpointFields, default: int = _BICUBIC) -> dict[str, Setting]:
    """Pillow's number of the filter that resizes pictures."""
    return {"resample": processor.integer("resample", 0, 5, default=default)}


def _edge(processor: CheckpointFields, part: str, key: str, default: int) -> int:
    """One side of a size in a processor's settings."""
    size = processor.part(part)
    return default if size is None else size.integer(key, 1, _MAX_SIDE, default=default)


def _image_token(source: _Source, default: int) -> int:
    key = "image_token_id" if source.whole.has("image_token_id") else "image_token_index"
    return source.whole.integer(key, 0, _MAX_ID, default=default)


def _added_token(source: _Source, content: str) -> int:
    """The id of a special token that config.json does not name."""
    file = os.path.join(source.path, _TOKENIZER)
    fields = CheckpointFields(read_json(file, is_needed=True, limit=_MAX_TOKENIZER), file)
    listed = fields.listed("added_tokens")
    for token in listed:
        if is_object(token) and token.get("content") == content:
            return CheckpointFields(token, file).integer("id", 0, _MAX_ID)
    raise fields.error("added_tokens", None, f"a list that has {content}")


def _gemma3(source: _Source) -> MediaConfig:
    """Gemma 3 (arXiv 2503.19786): one square, whose features are the means of smaller squares."""
    tower = _vit(source, positions="learned", last_norm="layer", merger="pooling")
    rows = source.whole.integer("mm_tokens_per_image", 1, 1 << 20, default=256)
    across = round(rows**0.5)
    if across * across != rows or tower.side % across:
        raise source.whole.error("mm_tokens_per_image", rows, f"a square within {tower.side}²")
    tower = replace(tower, merge=tower.side // across)
    size = tower.side * tower.patch
    sides = {key: _edge(source.image, "size", key, size) for key in ("height", "width")}
    if set(sides.values()) != {size}:
        raise source.image.error("size", sides, f"{size} x {size}, the tower's own")
    if source.image.any("do_pan_and_scan"):
        raise source.image.error("do_pan_and_scan", True, "false: crops are not supported")
    begin = source.whole.integer("boi_token_index", 0, _MAX_ID, default=255_999)
    end = source.whole.integer("eoi_token_index", 0, _MAX_ID, default=256_000)
    return MediaConfig(
        rule="fixed",
        tower=tower,
        image_token=begin,
        settings={
            **sides,
            "patch": tower.patch,
            "merge": tower.merge,
            **_resample(source.image, _BILINEAR),
        },
        begin=(begin,),
        end=(end,),
        is_mutual=True,
    )


def _llava(source: _Source) -> MediaConfig | None:
    """LLaVA 1.5 (arXiv 2310.03744): features of a block before the last of CLIP or SigLIP.

    Features of several blocks are not supported.
    """
    kind = source.vision.text("model_type", default="clip_vision_model")
    if not isinstance(source.whole.any("vision_feature_layer"), int | None):
        return None
    if kind == "pixtral":
        return _pixtral(source, merge=1)
    is_clip = kind == "clip_vision_model"
    strategy = source.whole.text("vision_feature_select_strategy", default="default")
    if kind not in ("clip_vision_model", "siglip_vision_model") or is_clip != (
        strategy == "default"
    ):
        return None
    more = {
        "positions": "learned",
        "merger": "projector",
        "has_merger_bias": source.whole.flag("multimodal_projector_bias", default=True),
    }
    if is_clip:
        more |= {
            "activation": source.vision.text("hidden_act", default="quick_gelu"),
            "eps": source.vision.number("layer_norm_eps", 0.0, 1.0, default=1e-5),
            "class_token": "first",
            "has_patch_bias": False,
            "has_first_norm": True,
            "mean": _channels(source.image, "image_mean", _CLIP_MEAN),
            "std": _channels(source.image, "image_std", _CLIP_STD),
        }
    tower = _vit(source, **more)
    tower = _until(source, tower, default=-2)
    size = tower.side * tower.patch
    settings = {"height": size, "width": size, "patch": tower.patch, "merge": 1}
    settings |= _resample(source.image)
    crop = source.image.part("crop_size")
    is_cropped = is_clip and source.image.flag("do_center_crop", default=True)
    if is_cropped:
        settings["shortest_edge"] = _edge(source.image, "size", "shortest_edge", size)
        sides = (
            {key: crop.integer(key, 1, _MAX_SIDE) for key in ("height", "width")} if crop else {}
        )
        if sides and set(sides.values()) != {size}:
            raise source.image.error("crop_size", sides, f"{size} x {size}, the tower's own")
    return MediaConfig(
        rule="cropped" if is_cropped else "fixed",
        tower=tower,
        image_token=_image_token(source, 32000),
        settings=settings,
    )


def _llava_next(source: _Source) -> MediaConfig | None:
    """LLaVA 1.6: tiles of one of several canvases, whose features go row by row into the prompt."""
    found = _llava(source)
    if found is None or found.tower is None or found.rule == "pixtral":
        return None
    tower = replace(found.tower, has_newline=True)
    tile = tower.side * tower.patch
    fields = source.image if source.image.has("image_grid_pinpoints") else source.whole
    listed = fields.listed("image_grid_pinpoints")
    pairs = [
        [side for side in each if isinstance(side, int) and 0 < side <= _MAX_SIDE]
        for each in listed
        if is_list(each) and len(each) == 2
    ]
    pinpoints = tuple(
        (pair[0], pair[1])
        for pair in pairs
        if len(pair) == 2 and not (pair[0] % tile or pair[1] % tile)
    )
    if not pinpoints or len(pinpoints) != len(listed):
        rule = f"[height, width] of canvases, multiples of {tile}"
        raise fields.error("image_grid_pinpoints", listed, rule)
    settings = {
        "tile": tile,
        "patch": tower.patch,
        "merge": 1,
        "pinpoints": pinpoints,
        **_resample(source.image),
    }
    return replace(found, rule="llava_next", tower=tower, settings=settings)


def _until(source: _Source, tower: TowerConfig, default: int) -> TowerConfig:
    """The tower up to the block whose hidden states are the features."""
    most = tower.blocks
    layer = source.whole.integer("vision_feature_layer", -most, most, default=default)
    blocks = layer if layer >= 0 else most + 1 + layer
    if not blocks:
        raise source.whole.error("vision_feature_layer", layer, f"one of {most} blocks")
    return replace(tower, blocks=blocks, last_norm=tower.last_norm if blocks == most else "")


def _internvl(source: _Source) -> MediaConfig:
    """InternVL 3 (arXiv 2504.10479): tiles; each block of patches makes a feature row."""
    vision = source.vision
    ratio = source.whole.number("downsample_ratio", 0.01, 1.0, default=0.5)
    norm = vision.text("norm_type", default="layer_norm")
    if norm not in ("layer_norm", "rms_norm"):
        raise vision.error("norm_type", norm, "layer_norm or rms_norm")
    tower = _vit(
        source,
        merge=round(1 / ratio),
        activation=vision.text("hidden_act", default="gelu"),
        mean=_channels(source.image, "image_mean", _IMAGENET_MEAN),
        std=_channels(source.image, "image_std", _IMAGENET_STD),
        norm=norm.removesuffix("_norm"),
        positions="learned",
        class_token="first",
        has_qkv_bias=vision.flag("attention_bias", default=False),
        has_qk_norm=vision.flag("use_qk_norm", default=False),
        has_layer_scale=True,
        last_norm="" if vision.flag("use_mean_pooling", default=True) else "layer",
        merger="projector",
    )
    tower = _until(source, tower, default=-1)
    if tower.side % tower.merge:
        raise source.whole.error("downsample_ratio", ratio, f"a part of {tower.side} patches")
    return MediaConfig(
        rule="tiles",
        tower=tower,
        image_token=_image_token(source, 151667),
        settings={
            "tile": tower.side * tower.patch,
            "patch": tower.patch,
            "merge": tower.merge,
            "min_tiles": source.image.integer("min_patches", 1, 4096, default=1),
            "max_tiles": source.image.integer("max_patches", 1, 4096, default=12),
            **_resample(source.image),
        },
        begin=(_added_token(source, "<img>"),),
        end=(_added_token(source, "</img>"),),
    )


def _idefics3(source: _Source) -> MediaConfig:
    """Idefics 3 (arXiv 2408.12637) and SmolVLM: tiles, each with its place as text."""
    merge = source.whole.integer("scale_factor", 1, 64, default=2)
    tower = _vit(
        source,
        merge=merge,
        positions="buckets",
        last_norm="layer",
        merger="concatenation",
    )
    if tower.side % merge:
        raise source.whole.error("scale_factor", merge, f"a divisor of {tower.side} patches")
    tile = _edge(source.image, "max_image_size", "longest_edge", tower.side * tower.patch)
    if tile != tower.side * tower.patch:
        raise source.image.error("max_image_size", tile, f"{tower.side * tower.patch}")
    return MediaConfig(
        rule="idefics3",
        tower=tower,
        image_token=_image_token(source, 128257),
        settings={
            "longest_edge": _edge(source.image, "size", "longest_edge", 4 * tile),
            "tile": tile,
            "patch": tower.patch,
            "merge": merge,
            "splits": int(source.image.flag("do_image_splitting", default=True)),
            "fake_token": "<fake_token_around_image>",
            "global_token": "<global-img>",
            "row_column": "<row_{row}_col_{column}>",
            **_resample(source.image, _LANCZOS),
        },
    )


def _llama4(source: _Source) -> MediaConfig:
    """Llama 4: tiles; each block of patches makes a feature row."""
    vision = source.vision
    ratio = vision.number("pixel_shuffle_ratio", 0.01, 1.0, default=0.5)
    rope = vision.part("rope_parameters") or vision
    tower = _vit(
        source,
        merge=round(1 / ratio),
        eps=1e-5,
        activation="gelu",
        positions="learned",
        class_token="last",
        rope_theta=rope.number("rope_theta", 1.0, 1e12, default=10000.0),
        rope_first=1,
        turns_columns_first=True,
        is_patch_flat=True,
        has_patch_bias=False,
        has_first_norm=True,
        last_norm="layer",
        merger="llama4",
        merger_inner=vision.integer("projector_output_dim", 1, _MAX_WIDTH, default=4096),
    )
    if tower.side % tower.merge or tower.width % (4 * tower.heads):
        raise vision.error("hidden_size", tower.width, "a tower that rows and columns can turn")
    return MediaConfig(
        rule="llama4",
        tower=tower,
        image_token=_added_token(source, "<|image|>"),
        settings={
            "tile": tower.side * tower.patch,
            "patch": tower.patch,
            "merge": tower.merge,
            "max_tiles": source.image.integer("max_patches", 1, 4096, default=16),
            **_resample(source.image, _BILINEAR),
            "start_token": "<|image_start|>",
            "column_token": "<|tile_x_separator|>",
            "row_token": "<|tile_y_separator|>",
            "global_token": "<|image|>",
            "end_token": "<|image_end|>",
        },
    )


def _mistral3(source: _Source) -> MediaConfig:
    merge = source.whole.integer("spatial_merge_size", 1, 16, default=2)
    return _pixtral(source, merge)


def _pixtral(source: _Source, merge: int) -> MediaConfig:
    """Pixtral (arXiv 2410.07073) and Mistral 3: any aspect, with a token after each row."""
    vision = source.vision
    rope = vision.part("rope_parameters") or vision
    tower = _vit(
        source,
        merge=merge,
        norm="rms",
        eps=1e-5,
        mlp="gated",
        activation=vision.text("hidden_act", default="gelu"),
        mean=_channels(source.image, "image_mean", _CLIP_MEAN),
        std=_channels(source.image, "image_std", _CLIP_STD),
        rope_theta=rope.number("rope_theta", 1.0, 1e12, default=10000.0),
        alternates_axes=True,
        has_patch_bias=False,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_first_norm=True,
        merger="mistral3" if merge > 1 else "projector",
        merger_eps=source.text.number("rms_norm_eps", 0.0, 1.0, default=1e-5),
        has_merger_bias=source.whole.flag("multimodal_projector_bias", default=merge == 1),
    )
    if tower.width % (4 * tower.heads):
        rule = f"a multiple of 4 · {tower.heads} heads, for the rotation by row and column"
        raise vision.error("hidden_size", tower.width, rule)
    tower = _until(source, tower, default=-1)
    edge = vision.integer("image_size", tower.patch, _MAX_SIDE, default=1024)
    return MediaConfig(
        rule="pixtral",
        tower=tower,
        image_token=_image_token(source, 10),
        settings={
            "longest_edge": _edge(source.image, "size", "longest_edge", edge),
            "patch": tower.patch,
            "merge": merge,
            "break_token": "[IMG_BREAK]",
            "end_token": "[IMG_END]",
            **_resample(source.image),
        },
    )


_READERS: Mapping[str, Callable[[_Source], MediaConfig | None]] = {
    "Qwen2VLForConditionalGeneration": _qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5,
    "Glm4vForConditionalGeneration": _glm4v,
    "Glm46VForConditionalGeneration": _glm4v,
    "Glm4vMoeForConditionalGeneration": _glm4v,
    "PaddleOCRVLForConditionalGeneration": _paddleocr_vl,
    "Gemma3ForConditionalGeneration": _gemma3,
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": _llava_next,
    "InternVLForConditionalGeneration": _internvl,
    "SmolVLMForConditionalGeneration": _idefics3,
    "Idefics3ForConditionalGeneration": _idefics3,
    "Mistral3ForConditionalGeneration": _mistral3,
    "Llama4ForConditionalGeneration": _llama4,
}
"""Class in config.json -> reader."""
_NAMED_BY_TOKENIZER = ("InternVLForConditionalGeneration", "Llama4ForConditionalGeneration")
"""Classes whose placeholders only the tokenizer names."""
