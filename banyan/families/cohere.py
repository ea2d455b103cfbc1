"""Cohere 2 (Command R7B, Command A): one norm feeds attention and feed-forward side by side.

Window layers rotate in pairs 2i, 2i + 1; full layers have no position embedding at all.
Source: the published configuration of CohereForAI/c4ai-command-r7b; GGUF architecture "cohere2".
"""

from dataclasses import replace
from functools import partial

from banyan.families.base import Family, GgufForm, HubForm, full_at_every
from banyan.families.names import GGUF_NAMES, HUB_NAMES, QK, NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig, RopeFacts


def _positions_in_windows(
    fields: CheckpointFields, model_config: ModelConfig, default_scale: float
) -> ModelConfig:
    """Only window layers have a position embedding."""
    return replace(
        model_config,
        logit_scale=fields.number("logit_scale", 1e-6, 1e6, default=default_scale),
        rope=RopeFacts(kind="none"),
        window_rope=model_config.rope,
    )


COHERE2 = Family(
    hub=HubForm(
        eps_key="layer_norm_eps",
        eps=1e-5,
        tied=True,
        kinds=partial(full_at_every, period=4),
        more=partial(_positions_in_windows, default_scale=0.0625),
    ),
    gguf=GgufForm(
        "Cohere2ForCausalLM",
        eps_key="attention.layer_norm_epsilon",
        window_period=4,
        more=partial(_positions_in_windows, default_scale=1.0),
    ),
    names={
        "safetensors": NameMap(HUB_NAMES, paired=QK),
        "gguf": NameMap(GGUF_NAMES, paired=QK),
    },
    norm="layer",
    parallel=True,
)
