"""Model families by Hugging Face class name."""

from banyan.base.table import Table
from banyan.models.spec import ArchSpec

ARCHITECTURES: Table[ArchSpec] = Table(
    "model architecture",
    {
        "LlamaForCausalLM": "banyan.models.llama:LLAMA",
        "MistralForCausalLM": "banyan.models.llama:LLAMA",
    },
    plugins="banyan.architectures",
)
