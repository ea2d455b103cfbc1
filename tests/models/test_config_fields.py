"""Every field of the configuration of a family with states is honoured, refused, or known to change
no answer."""

import json

import pytest
import transformers

from banyan.base.errors import BanyanError
from banyan.model_config.checkpoint import read_model_config
from tests.models.families import STATES, tiny

FAMILIES = dict.fromkeys(variant.partition(",")[0] for variant in STATES)
HARMLESS = {
    **dict.fromkeys(
        ("initializer_range", "rescale_prenorm_residual", "time_step_scale", "time_step_floor")
        + ("time_step_min", "time_step_max", "time_step_init_scheme"),
        "weights before training",
    ),
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "router_aux_loss_coef", "z_loss_coefficient")
        + ("output_router_logits", "router_jitter_noise", "pretraining_tp"),
        "training",
    ),
    **dict.fromkeys(
        ("use_cache", "num_logits_to_keep", "use_mamba_kernels", "use_mambapy", "chunk_size")
        + ("use_associative_scan", "mamba_chunk_size", "moe_shared_expert_overlap", "block_size")
        + ("use_mem_eff_path",),
        "how the library computes the same",
    ),
    **dict.fromkeys(("residual_in_fp32", "mamba_ssm_cache_dtype"), "precision of sums"),
    **dict.fromkeys(("mtp_layers_block_type",), "layers for drafting"),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), "tokenizer"),
    **dict.fromkeys(("model_type", "base_config_key"), "the class"),
}


ELSEWHERE = {
    "mamba": ("expand",),  # intermediate_size
    "mamba2": ("time_step_rank",),  # num_heads
    "nemotron h": (
        *("expand", "num_nextn_predict_layers", "sliding_window"),  # read by nothing
        "mamba_proj_bias",  # use_bias
    ),
    "kimi linear": (  # names that the library keeps beside those of the file
        *("max_position_embeddings", "norm_topk_prob", "n_group", "num_local_experts"),
        *("num_experts_per_tok", "n_shared_experts"),
    ),
}
"""Family -> fields that nothing of it reads, another one in their place where one is named."""


def other(value: object) -> list[object]:
    """Values that are not this one."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value * 2, value - 1]
        case float():
            return [value * 1.5 + 0.25]
        case str():
            return ["relu" if "lu" in value else "another"]
        case list():
            return [value[::-1], value[:-1]] if value else [[1]]
        case None:
            return [2, True, "gelu"]
        case _:
            return []


def unread(folder) -> list[str]:
    """Fields whose other values make the same card."""
    path = folder / "config.json"
    text = path.read_text()
    plain, model_config = json.loads(text), read_model_config(str(folder))
    config = transformers.AutoConfig.from_pretrained(folder)
    names = [n for kind in type(config).__mro__ for n in vars(kind).get("__annotations__", {})]
    names = [n for n in dict.fromkeys(names) if n in type(config).__annotations__]
    found = []
    for name in names:
        values = other(plain.get(name, getattr(config, name, None)))
        if name in HARMLESS or not values:
            continue
        is_read = False
        for value in values:
            path.write_text(json.dumps(plain | {name: value}))
            try:
                is_read |= read_model_config(str(folder)) != model_config
            except BanyanError:
                is_read = True
        if not is_read:
            found.append(name)
    path.write_text(text)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_is_without_an_effect_that_is_known(family, tmp_path):
    """Some variant of the family reads it."""
    found, expected = None, set(ELSEWHERE.get(family, ()))
    for variant in (v for v in STATES if v.partition(",")[0] == family):
        tiny(variant, tmp_path / variant)
        mine = set(unread(tmp_path / variant))
        found = mine if found is None else found & mine
        if found == expected:
            return
    assert found == expected
