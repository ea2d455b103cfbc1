"""MediaConfig: how a multimodal model takes pictures and sound, and the sizes of its towers.

`media_from_hf.py` and `sound_from_hf.py` read them from a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Setting = int | float | str | tuple[float | tuple[int, int], ...]


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
        positions: "" = none | "learned": a grid of `side`² rows | "buckets": the nearest of them |
            "bilinear", "bicubic": interpolated between them.
        aligns_corners: corners of the grid lie on corners of the table, else half a cell inside.
        adds_positions_last: positions are added after the first norm.
        class_token: "" = none | "first" | "last": before or after the patches of a frame.
        rope_theta: base of the rotation by row and column; 0 = none.
        rope_first: of the first row and column.
        turns_columns_first: the first half of the pairs turns by the column (Llama 4).
        alternates_axes: rows and columns take turns over the frequencies of a head (Pixtral).
        is_patch_flat: the patch matrix is stored as a matrix, not as a convolution's kernel.
        is_by_block: patches come by blocks of `merge` x `merge`; otherwise row by row.
        has_layer_scale: the outputs of both parts of a block have learned factors.
        has_qk_norm: queries and keys are normed over all heads.
        has_first_norm: there is a norm before the blocks.
        last_norm: kind of the norm after the blocks, as of `norm`; "" = none.
        merger: name of a class in `models/towers/mergers.py`; `merger_eps`, of its norm, if it
            differs from the blocks', and `merger_inner`, the width inside.
        has_newline: a learned row comes after the feature rows (LLaVA 1.6).
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
    aligns_corners: bool = False
    adds_positions_last: bool = False
    class_token: str = ""
    rope_theta: float = 0.0
    rope_first: int = 0
    turns_columns_first: bool = False
    alternates_axes: bool = False
    is_by_block: bool = True
    is_patch_flat: bool = False
    has_patch_bias: bool = True
    has_qkv_bias: bool = True
    has_output_bias: bool = True
    has_mlp_bias: bool = True
    has_layer_scale: bool = False
    has_qk_norm: bool = False
    has_first_norm: bool = False
    last_norm: str = ""
    merger: str = "qwen"
    merger_eps: float = 0.0
    merger_inner: int = 0
    has_merger_bias: bool = True
    has_newline: bool = False
    window: int = 0
    full_blocks: tuple[int, ...] = ()
    deep_blocks: tuple[int, ...] = ()

    @property
    def feature_width(self) -> int:
        """Width of a feature row with its DeepStack parts."""
        return self.out * (1 + len(self.deep_blocks))


PATCHES, MEL = "patches", "mel"
"""Kinds of contents that towers read."""
FRAMES_PER_SECOND = 100
"""Mel frames."""
SAMPLE_RATE = 16_000
"""Samples per second that mel frames are computed from."""


@dataclass(frozen=True)
class SoundTowerConfig:
    """Sizes of a sound tower: two convolutions over mel frames, where the second halves their
    number, then transformer blocks (Whisper's encoder, arXiv 2212.04356).

    Attributes:
        blocks, width, heads, inner: as in TowerConfig.
        out: width of one feature row.
        bands: of the mel spectrogram.
        window: mel frames that are encoded together, at most.
        pool: neighbouring states whose mean becomes one, before the last norm.
        stack: neighbouring states that are concatenated to one, after it.
        merger: "linear" | "mlp": one or two projections of a state | "cross": the keys and values
            that each layer of the decoder reads.
        layers: of that decoder.
    """

    blocks: int
    width: int
    heads: int
    inner: int
    out: int
    bands: int = 128
    window: int = 3000
    activation: str = "gelu"
    pool: int = 1
    stack: int = 1
    merger: str = "linear"
    has_merger_bias: bool = True
    layers: int = 0


@dataclass(frozen=True)
class SoundConfig:
    """How prompts of a model hold sound.

    Attributes:
        token: placeholder; the chat template writes one per part.
        is_whole: a window that is not full is encoded with the silence after it.
        max_windows: windows of one sound; longer sounds are refused.
        is_cross: the decoder reads the features by cross attention, and a prompt has one place
            for all of them.
        is_multilingual: prompts name the language and the task.
        suppressed, suppressed_first: ids that are never chosen, and not as the first.
    """

    token: int
    tower: SoundTowerConfig
    is_whole: bool = True
    max_windows: int = 1
    is_cross: bool = False
    is_multilingual: bool = False
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    def rows(self, windows: int, frames: int) -> int:
        """Feature rows of a sound of `windows` windows with `frames` mel frames each."""
        tower = self.tower
        return windows * ((frames + 1) // 2 // tower.pool // tower.stack)


@dataclass(frozen=True)
class MediaConfig:
    """How prompts of a multimodal model hold pictures, video and sound.

    Attributes:
        rule: name of the resolution rule: size of a picture → grid of patches and ids.
        tower: of pictures; None = the model takes none.
        settings: numbers of the rule ("patch", "merge", "min_pixels" …), of the checkpoint.
        video: the same for video; empty = the model takes none.
        image_token, video_token: placeholders; the chat template writes one per part.
        begin, end: ids around each stretch that the processor adds, not the template.
        is_mutual: tokens of one picture see each other in both directions.
        axes: axis (0 time, 1 row, 2 column) of each rotary pair; () = ordinary positions.
        sound: how prompts hold sound; None = the model takes none.
    """

    rule: str = ""
    tower: TowerConfig | None = None
    image_token: int | None = None
    video_token: int | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    video: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    is_mutual: bool = False
    axes: tuple[int, ...] = ()
    sound: SoundConfig | None = None

    @property
    def deep_blocks(self) -> tuple[int, ...]:
        """`TowerConfig.deep_blocks`."""
        return () if self.tower is None else self.tower.deep_blocks

    @property
    def towers(self) -> Mapping[str, TowerConfig | SoundTowerConfig]:
        """By the kind of content that each reads (`messages/spans.py`)."""
        both = {PATCHES: self.tower, MEL: None if self.sound is None else self.sound.tower}
        return {kind: config for kind, config in both.items() if config is not None}

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Ids that a prompt may hold only with content."""
        sound = None if self.sound is None or self.sound.is_cross else self.sound.token
        found = (self.image_token, self.video_token, sound)
        return tuple(token for token in found if token is not None)


def is_cross(media: MediaConfig | None) -> bool:
    """Whether the layers of a model read the features of contents by cross attention."""
    return media is not None and media.sound is not None and media.sound.is_cross
