"""Models whose layers keep a state from GGUF: tensors and keys as published converters write them,
names by the gguf package's own map."""

import gguf
import numpy as np
import pytest
import torch

from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from tests.models.families import tiny
from tests.support.logits import PROMPT, expected_logits

CASES = {
    "lfm2": ("lfm2", {}),
    "lfm2, attention first, biases": ("lfm2", {}),
    "lfm2 moe": ("lfm2moe", {"routed_scaling_factor": 1.0}),
    "mamba": ("mamba", {"intermediate_size": 96}),
    "mamba2": ("mamba2", {}),
    "falcon h1": ("falcon-h1", {"head_dim": 8}),
    "falcon h1, no norm, biases": ("falcon-h1", {"head_dim": 8, "tie_word_embeddings": False}),
    "jamba": ("jamba", {}),
    "jamba, dense, biases": ("jamba", {}),
}
"""Variant of `families.py` -> GGUF architecture and changes to its configuration."""
SECOND = ("mamba2", "falcon-h1")
FACTORS = {
    "embed_tokens.": "embedding_multiplier",
    "lm_head.": "lm_head_multiplier",
    ".q_proj.": "attention_in_multiplier",
    ".k_proj.": "attention_in_multiplier",
    ".v_proj.": "attention_in_multiplier",
    ".o_proj.": "attention_out_multiplier",
    ".out_proj.": "ssm_out_multiplier",
}


def scaled(config, name: str, values: np.ndarray) -> np.ndarray:
    """Files of Falcon-H1 have its constant factors in the weights."""
    for part, key in FACTORS.items():
        if part in name:
            values = values * getattr(config, key)
    gate, down = config.mlp_multipliers
    if ".in_proj." in name:
        keys = config.mamba_n_groups * config.mamba_d_state
        inner = (values.shape[0] - 2 * keys - config.mamba_n_heads) // 2
        widths = (inner, inner, keys, keys, config.mamba_n_heads)
        by_row = np.repeat(np.float32(config.ssm_multipliers), widths)
        values = (values.T * by_row).T * config.ssm_in_multiplier
    factor = {".k_proj.": config.key_multiplier, ".gate_proj.": gate, ".down_proj.": down}
    return values * next((f for part, f in factor.items() if part in name), 1.0)


def stored(config, architecture: str, name: str, values: np.ndarray) -> np.ndarray:
    """A tensor of a state as files have it."""
    if name.endswith(".A_log"):
        values = -np.exp(values)
    if name.endswith((".A_log", ".D")) and architecture in SECOND:
        values = values.reshape(-1, 1)
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        values = values.squeeze(1)
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        values = values.reshape(groups, -1)
    return values


def convert(model, architecture: str, path) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        layer = (name + "..").split(".")[2]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            writer.add_tensor(f"blk.{layer}.ffn_gate_exps.weight", np.ascontiguousarray(gate))
            writer.add_tensor(f"blk.{layer}.ffn_up_exps.weight", np.ascontiguousarray(up))
            continue
        if name.endswith("expert_bias"):
            writer.add_tensor(f"blk.{layer}.exp_probs_b.bias", values)
            continue
        if architecture == "falcon-h1":
            values = scaled(config, name, values)
        values = np.ascontiguousarray(stored(config, architecture, name, values), np.float32)
        place = name.replace(".dt_bias", ".dt_proj.bias").replace("lm_head", "output")
        found = names.get_name(place, try_suffixes=(".weight", ".bias")) or place
        is_stack = name.endswith("experts.down_proj")
        writer.add_tensor(f"{found}.weight" if is_stack else found, values)
    describe(config, architecture, writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(config, architecture: str, writer, model) -> None:
    """The keys that published converters write for these families."""
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    eps = "norm_eps" if "lfm" in architecture else "rms_norm_eps"
    has_attention = not architecture.startswith("mamba")
    writer.add_layer_norm_rms_eps(getattr(config, eps if has_attention else "layer_norm_epsilon"))
    kinds = getattr(config, "layer_types", [])
    heads = [config.num_key_value_heads * (k == "full_attention") for k in kinds]
    if has_attention:
        inner = config.intermediate_size
        if architecture == "lfm2":
            inner = model.model.layers[0].feed_forward.w1.weight.shape[0]
        writer.add_feed_forward_length(inner)
        writer.add_head_count(config.num_attention_heads)
        is_same = architecture == "falcon-h1"
        writer.add_head_count_kv(config.num_key_value_heads if is_same else heads)
    else:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    if getattr(config, "rope_parameters", None):
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if count := getattr(config, "num_experts", 0):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "lfm2moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "lfm" in architecture:
        writer.add_shortconv_l_cache(config.conv_L_cache)
        return
    mixer = next(m for m in model.modules() if hasattr(m, "A_log"))
    is_second = architecture in SECOND
    writer.add_ssm_conv_kernel(mixer.conv_kernel_size)
    writer.add_ssm_inner_size(mixer.intermediate_size)
    writer.add_ssm_state_size(mixer.ssm_state_size)
    writer.add_ssm_time_step_rank(mixer.num_heads if is_second else mixer.time_step_rank)
    if is_second:
        writer.add_ssm_group_count(mixer.n_groups)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case, ops, paged, tmp_path):
    architecture, changes = CASES[case]
    reference = tiny(case, tmp_path / "hub", **changes)
    path = tmp_path / "model.gguf"
    convert(reference, architecture, path)

    model_config = read_model_config(str(path))
    (logits,) = paged(load_model(model_config, Build(ops))).step([(0, PROMPT)])

    torch.testing.assert_close(logits, expected_logits(reference), atol=1e-4, rtol=0)
    hub = read_model_config(str(tmp_path / "hub"))
    assert model_config.architecture == hub.architecture
    assert model_config.layer_kinds == hub.layer_kinds


@pytest.mark.parametrize("listed", [[2, 0], [2, 0, 3, 0], [-2, 0, -2, 0]])
def test_layers_whose_heads_make_no_sense_are_refused(listed, tmp_path):
    reference, path = tiny("lfm2", tmp_path / "hub"), tmp_path / "model.gguf"
    convert(reference, "lfm2", path)

    with pytest.raises(ModelError, match=r"attention\.head_count_kv"):
        read_model_config(str(path), overrides={"lfm2.attention.head_count_kv": listed})
