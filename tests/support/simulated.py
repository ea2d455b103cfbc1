"""A simulated device, and a trace for it."""

from dataclasses import dataclass
from pathlib import Path

from banyan.model_config.model_config import ModelConfig
from banyan.sim.layout import Hardware
from banyan.sim.replica import RequestTimes, SimulationReport

MODEL_CONFIG = ModelConfig(
    path="",
    format="safetensors",
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=16,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    context_length=32_768,
)
DEVICE = Hardware(memory_gib=16, bytes_per_s=50e9, flops_per_s=1e12, overhead_s=1e-4)

TRACE = Path(__file__).parents[3] / "shared" / "data" / "traces" / "mooncake_conversation.jsonl"


@dataclass(frozen=True)
class Outcome:
    report: SimulationReport
    visits: list[RequestTimes]
    plan_hashes: list[bytes]
