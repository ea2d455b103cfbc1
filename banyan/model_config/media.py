"""MediaConfig: how a multimodal checkpoint takes pictures, video and sound, read from its folder.

Sources: config.json (`vision_config`), preprocessor_config.json and video_preprocessor_config.json,
or processor_config.json, which holds both as parts.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from banyan.model_config.checkpoint_fields import CheckpointFields, read_json

_MAX_WIDTH = 1 << 20
_MAX_BLOCKS = 1024
_MAX_PIXELS = 1 << 32
_MAX_SIDE = 1 << 16
_MAX_ID = 1 << 31

Setting = int | float | str | tuple[float, ...]


@dataclass(frozen=True)
class TowerConfig:
    """Sizes and kinds of a tower: the encoder that turns patches into feature rows.

    Attributes:
        blocks, width, heads, inner: transformer blocks, hidden size, attention heads, and inner
            width of the feed-forward blocks.
        out: width of one feature row, the hidden size of the text model.
        patch, temporal_patch, channels: sides of a patch in pixels and frames.
        merge: patches per side that become one feature row.
        mean, std: of each channel, after the rescaling of bytes to 0 … 1.
        norm: "layer" | "rms", with `eps`.
        mlp: "plain" | "gated", with `activation` by its Hugging Face name.
        positions: "" = none | "bilinear": a learned grid of `side`² rows that is interpolated.
        rope_theta: base of the rotation by row and column; 0 = none.
        window: side of a window of attention in feature rows; 0 = none. A block sees one window
            unless it is in `full_blocks`.
        deep_blocks: blocks after which a merger makes another part of each feature row
            (DeepStack, arXiv 2406.04334).
    """

    blocks: int
    width: int
    heads: int
    inner: int
    out: int
    patch: int
    temporal_patch: int = 1
    channels: int = 3
    merge: int = 1
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    norm: str = "layer"
    eps: float = 1e-6
    mlp: str = "plain"
    activation: str = "gelu_pytorch_tanh"
    positions: str = ""
    side: int = 0
    rope_theta: float = 0.0
    has_patch_bias: bool = True
    window: int = 0
    full_blocks: tuple[int, ...] = ()
    deep_blocks: tuple[int, ...] = ()

    @property
    def feature_width(self) -> int:
        """Width of a feature row with its DeepStack parts."""
        return self.out * (1 + len(self.deep_blocks))


@dataclass(frozen=True)
class MediaConfig:
    """How prompts of a multimodal model hold pictures and video.

    Attributes:
        rule: name of the resolution rule: size of a picture → grid of patches and ids.
        settings: numbers of the rule ("patch", "merge", "min_pixels" …), of the checkpoint.
        video: the same for video; empty = the model takes none.
        image_token, video_token: placeholders; the chat template writes one per part.
        begin, end: ids around each stretch that the processor adds, not the template.
        is_mutual: tokens of one picture see each other in both directions.
        axes: axis (0 time, 1 row, 2 column) of each rotary pair; () = ordinary positions.
    """

    rule: str
    tower: TowerConfig
    image_token: int
    video_token: int | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    video: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    is_mutual: bool = False
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Source:
    """The files of one checkpoint.

    Attributes:
        whole: config.json.
        text: fields of the text model.
        vision: the configuration of the tower.
        image, video: of the processors; empty where the checkpoint has none.
        hidden_size: of the text model.
    """

    whole: CheckpointFields
    text: CheckpointFields
    vision: CheckpointFields
    image: CheckpointFields
    video: CheckpointFields
    hidden_size: int


def read_media(
    outer: str, whole: CheckpointFields, text: CheckpointFields, path: str, hidden_size: int
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
    vision = whole.part("vision_config")
    if reader is None or vision is None:
        return None
    image, video = _processors(path)
    return reader(_Source(whole, text, vision, image, video, hidden_size))


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
_HALF = (0.5, 0.5, 0.5)


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
    processor: CheckpointFields, pixels: tuple[int, int], tower: TowerConfig
) -> dict[str, Setting]:
    """Bounds of the area in pixels, under either of their two names, and the sides of a patch."""
    size = processor.part("size")
    low, high = pixels
    if size is not None:
        low = size.integer("shortest_edge", 1, _MAX_PIXELS, default=low)
        high = size.integer("longest_edge", 1, _MAX_PIXELS, default=high)
    low = processor.integer("min_pixels", 1, _MAX_PIXELS, default=low)
    high = processor.integer("max_pixels", 1, _MAX_PIXELS, default=high)
    if low > high:
        raise processor.error("min_pixels", low, f"at most max_pixels, {high:,}")
    return {
        "patch": tower.patch,
        "merge": tower.merge,
        "temporal": tower.temporal_patch,
        "min_pixels": low,
        "max_pixels": high,
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
    tower = replace(tower, positions="bilinear", side=side, deep_blocks=blocks)
    return _qwen(source, _QWEN3, tower)


def _qwen3_5(source: _Source) -> MediaConfig:
    return _qwen3_vl(source, deep=())


_READERS: Mapping[str, Callable[[_Source], MediaConfig]] = {
    "Qwen2VLForConditionalGeneration": _qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5,
}
"""Class in config.json -> reader."""
