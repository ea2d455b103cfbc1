"""ModelCard: plain facts of a checkpoint, the same whether it came as GGUF or safetensors.

Knows no tensors and no devices. `config/checkpoint.py` reads cards from files.
"""

from dataclasses import dataclass, field

FULL = "full"
WINDOW = "window"


@dataclass(frozen=True)
class RopeFacts:
    """Rotary embedding: base frequency and how it is stretched beyond the trained length.

    `kind` is default | linear | dynamic | llama3 | yarn; the other numbers keep the names and
    meaning of the Hugging Face `rope_scaling` dictionary (Llama 3 and YaRN papers).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelCard:
    """What every room may know about the model.

    Attributes:
        path: local file (GGUF) or folder (safetensors) that holds the weights.
        format: "gguf" | "safetensors".
        architecture: Hugging Face class name ("LlamaForCausalLM"); GGUF names are mapped to it.
        layer_kinds: "full" or "window" per layer.
        dtype: dtype of the stored weights as text ("float32", "bfloat16", "q4_1" …).
    """

    path: str
    format: str
    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    rope: RopeFacts = field(default_factory=RopeFacts)
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Bias on the q, k, v projections."""
    output_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    layer_kinds: tuple[str, ...] = ()
    window: int = 0
    """Tokens that a "window" layer sees, its own position included."""
    dtype: str = "float32"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def kind_of(self, layer: int) -> str:
        return self.layer_kinds[layer] if self.layer_kinds else FULL
