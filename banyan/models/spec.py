"""ArchSpec: what a dense family must say about itself. Everything else is in the model card."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NameMap:
    """Checkpoint names of one format.

    Attributes:
        modules: name without its last part and with {} for the layer -> module of DecoderLM,
            "module:part" when several tensors make one weight.
        ignored: names, {} for the layer, that carry nothing the model needs.
        paired: modules ("module:part") whose rows come in interleaved RoPE pairs.
        rope_divisors: tensor that holds factors for the RoPE frequencies, "" for none.
    """

    modules: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    paired: tuple[str, ...] = ()
    rope_divisors: str = ""


@dataclass(frozen=True)
class ArchSpec:
    """A family of dense decoders.

    Attributes:
        names: checkpoint format ("gguf", "safetensors") -> its names.
    """

    names: Mapping[str, NameMap] = field(default_factory=dict)
