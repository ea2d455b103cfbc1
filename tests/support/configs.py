"""A model's configuration and what checks of flags need."""

from banyan.config.env import Environment
from banyan.model_config.model_config import ModelConfig

NOTHING = Environment()

MODEL_CONFIG = ModelConfig(
    path="/weights",
    format="gguf",
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=2048,
)
