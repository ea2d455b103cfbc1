"""Llama's relatives with other norms or feed-forward blocks.

StableLM 1 / 2 (arXiv 2402.17834): layer norms with bias, RoPE on a quarter of a head; attention and
feed-forward may be parallel, heads of q and k may have norms of their own. Persimmon: a norm that
all heads share, squared ReLU without a gate. Jais 2: layer norms with bias, squared ReLU. Apertus
(arXiv 2509.14233): xIELU, whose factors are learned. Nanochat: norms without weights, also after
the embedding; rotation in the other direction.
"""

from dataclasses import replace

from banyan.families.base import Biases, Family, GgufForm, HubForm
from banyan.families.llama import HUB_PLAIN
from banyan.families.names import GGUF_NAMES, HUB_NAMES, HUB_QK_NORM, NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig


def _stablelm(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    is_parallel = fields.flag("use_parallel_residual", default=False)
    is_normed = fields.flag("qk_layernorm", default=False)
    return replace(
        model_config,
        parallel="one norm" if is_parallel else "",
        qk_norm="each head" if is_normed else "",
    )


def _stablelm_biases(fields: CheckpointFields) -> Biases:
    return Biases(qkv=fields.flag("use_qkv_bias", default=False))


STABLELM = Family(
    hub=HubForm(
        eps_key="layer_norm_eps",
        eps=1e-5,
        rotary=0.25,
        biases=_stablelm_biases,
        more=_stablelm,
    ),
    gguf=GgufForm("StableLmForCausalLM", eps_key="attention.layer_norm_epsilon"),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                f"model.layers.{{}}.self_attn.{each}_layernorm.norms.{{}}": (
                    f"layers.{{}}.attention.{each}_norm:{{}}"
                )
                for each in "qk"
            }
        ),
        "gguf": NameMap(GGUF_NAMES),
    },
    norm="layer+bias",
)


def _persimmon(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    is_normed = fields.flag("qk_layernorm", default=True)
    return replace(model_config, qk_norm="layer+bias" if is_normed else "")


_QKV = "model.layers.{}.self_attn.query_key_value"
PERSIMMON = Family(
    hub=HubForm(
        eps_key="layer_norm_eps",
        eps=1e-5,
        activation="relu2",
        rotary=0.5,
        rope_theta=25000.0,
        biases=lambda fields: Biases(True, True, True),
        more=_persimmon,
    ),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                "model.final_layernorm": "norm",
                _QKV: "layers.{}.attention.qkv:q+k+v",
                "model.layers.{}.self_attn.dense": "layers.{}.attention.out",
                "model.layers.{}.self_attn.q_layernorm": "layers.{}.attention.q_norm",
                "model.layers.{}.self_attn.k_layernorm": "layers.{}.attention.k_norm",
                "model.layers.{}.mlp.dense_h_to_4h": "layers.{}.mlp.up",
                "model.layers.{}.mlp.dense_4h_to_h": "layers.{}.mlp.down",
            },
            grouped=(_QKV,),
        )
    },
    norm="layer+bias",
    gated=False,
)


def _jais2_biases(fields: CheckpointFields) -> Biases:
    has_bias = fields.flag("attention_bias", default=True)
    return Biases(has_bias, has_bias, fields.flag("mlp_bias", default=True))


JAIS2 = Family(
    hub=HubForm(eps_key="layer_norm_eps", eps=1e-5, activation="relu2", biases=_jais2_biases),
    names={"safetensors": NameMap(HUB_PLAIN)},
    norm="layer+bias",
    gated=False,
)

_APERTUS = {
    "model.layers.{}.attention_layernorm": "layers.{}.attention_norm",
    "model.layers.{}.feedforward_layernorm": "layers.{}.mlp_norm",
    "model.layers.{}.mlp.act_fn": "layers.{}.mlp.curve",
}
APERTUS = Family(
    hub=HubForm(
        eps=1e-5,
        activation="xielu",
        rope_theta=12e6,
        biases=lambda fields: Biases(*[fields.flag("attention_bias", default=False)] * 2),
    ),
    names={"safetensors": NameMap(HUB_PLAIN | HUB_QK_NORM | _APERTUS)},
    gated=False,
    qk_norm="head",
)


def _nanochat(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    rope = replace(model_config.rope, is_backward=True)
    cap = fields.number("final_logit_softcapping", 0.0, 1e9, default=15.0)
    return replace(model_config, logit_cap=cap, rope=rope)


NANOCHAT = Family(
    hub=HubForm(activation="relu2", more=_nanochat),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                "model.layers.{}.mlp.fc1": "layers.{}.mlp.up",
                "model.layers.{}.mlp.fc2": "layers.{}.mlp.down",
            }
        )
    },
    norm="bare rms",
    embedding_norm=True,
    gated=False,
    qk_norm="unit",
)
