"""Cohere 2 (Command R7B, Command A): one norm feeds attention and feed-forward side by side.

Window layers rotate in pairs 2i, 2i + 1; full layers have no position embedding at all.
Source: the published configuration of CohereForAI/c4ai-command-r7b; GGUF architecture "cohere2".
"""

from banyan.models.spec import GGUF_NAMES, HUB_NAMES, QK, ArchSpec, NameMap

COHERE2 = ArchSpec(
    names={
        "safetensors": NameMap(HUB_NAMES, paired=QK),
        "gguf": NameMap(GGUF_NAMES, paired=QK),
    },
    norm="layer",
    parallel=True,
)
