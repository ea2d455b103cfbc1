"""Delta nets, and Mamba-2 beside attention, experts and rotation, from GGUF: tensors and keys as
published converters write them, names by the gguf package's own map."""

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from banyan.base.errors import ConfigError, ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import StateFacts
from banyan.models.weights.checkpoint_layouts import with_heads_of_keys
from banyan.models.weights.loader import load_model
from banyan.ops.stored import StoredWeight
from tests.models.families import tiny
from tests.models.test_tensor_parallel import shared_by_two
from tests.support.gguf import interleave
from tests.support.logits import PROMPT, assert_as_expected, expected_logits
from tests.support.torch_calls import torch_calls

WHOLE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
BY_TURNS = {"layer_types": None}
CASES = {
    "qwen3 next": ("qwen3next", {"linear_num_value_heads": 8}),
    "qwen3.5": ("qwen35", {}),
    "qwen3.5 moe": ("qwen35moe", BY_TURNS),
    "granite hybrid": ("granitehybrid", {"shared_intermediate_size": 80}),
    "granite hybrid, experts, rope": ("granitehybrid", {"position_embedding_type": "nope"}),
    "bamba": ("granitehybrid", {"rope_parameters": WHOLE}),
    "kimi linear": ("kimi-linear", {"linear_num_heads": 6, "n_group": 1, "topk_group": 1}),
    "nemotron h": (
        "nemotron_h_moe",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"] * 2},
    ),
    "nemotron h, dense, biases": ("nemotron_h", {}),
}
"""Variant of `families.py` -> GGUF architecture and changes to its configuration."""
HAS_DELTA = ("qwen3next", "qwen35", "qwen35moe")


def in_turns(values: np.ndarray, config, width: int) -> np.ndarray:
    """Value heads along the first dimension: one of each key head, then the next ones."""
    keys, rest = config.linear_num_key_heads, values.shape[1:]
    heads = values.reshape(keys, -1, width, *rest)
    return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(-1, *rest)


def tiled(config, name: str, values: np.ndarray) -> np.ndarray:
    """Of a delta net of Qwen3.5."""
    width, key = config.linear_value_head_dim, config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        first = 2 * key * config.linear_num_key_heads
        return np.concatenate([values[:first], in_turns(values[first:], config, width)])
    if "out_proj" in name:
        return in_turns(values.T, config, width).T
    if "in_proj_z" in name:
        return in_turns(values, config, width)
    return values if ".norm." in name else in_turns(values, config, 1)


def apart(config, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """What Qwen3-Next's projection holds key head by key head: all queries, keys, values; gates."""
    keys, shared = config.linear_num_key_heads, config.linear_num_value_heads
    value = config.linear_value_head_dim * shared // keys
    edges = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, value])
    parts = np.split(values.reshape(keys, -1, values.shape[1]), edges, axis=1)
    *qkv, z = (part.reshape(-1, values.shape[1]) for part in parts)
    yield "attn_qkv.weight", np.concatenate(qkv)
    yield "attn_gate.weight", z


def halves(values: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(half) for half in np.split(values, 2, axis=-2)]


def placed(config, architecture: str, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor by its names within a layer, {} where the package's map knows it as it is."""
    has_experts = bool(getattr(config, "num_local_experts", 0))
    _, _, last = name.partition("layers.")
    last = last.partition(".")[2]
    if last.endswith("in_proj_qkvz.weight"):
        return dict(apart(config, values))
    if last.endswith("experts.gate_up_proj"):
        gate, up = halves(values)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if last.endswith(("experts.up_proj", "experts.down_proj")):
        return {f"ffn_{'up' if 'up' in last else 'down'}_exps.weight": values}
    if last.endswith("kv_b_proj.weight"):
        heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
        keys, mine = np.split(heads, [config.qk_nope_head_dim], axis=1)
        return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": mine}
    if last.endswith("shared_mlp.input_linear.weight"):
        end = "_shexp" if has_experts else ""
        gate, up = halves(values)
        return {f"ffn_gate{end}.weight": gate, f"ffn_up{end}.weight": up}
    if last.endswith("shared_mlp.output_linear.weight"):
        return {f"ffn_down{'_shexp' if has_experts else ''}.weight": values}
    if last.endswith("e_score_correction_bias"):
        return {"exp_probs_b.bias": values}
    return {}


def stored(config, architecture: str, name: str, values: np.ndarray) -> np.ndarray:
    if architecture in HAS_DELTA and name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + 1
    if architecture.startswith("qwen35") and "linear_attn" in name:
        values = tiled(config, name, values)
    if name.endswith(".A_log"):
        values = -np.exp(values)
    if name.endswith((".A_log", ".D")) and architecture not in (*HAS_DELTA, "kimi-linear"):
        values = values.reshape(-1, 1)
    if name.endswith("conv1d.weight"):
        is_apart = architecture == "kimi-linear"
        values = values.reshape(1, *values.shape) if is_apart else values.squeeze(1)
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        values = values.reshape(groups, -1)
    if architecture == "granitehybrid" and name.endswith(("q_proj.weight", "k_proj.weight")):
        values = interleave(values, config.hidden_size // config.num_attention_heads)
    return np.ascontiguousarray(values, np.float32)


def tensors_of(model, folder) -> dict[str, torch.Tensor]:
    """With what mixes tokens under the names that checkpoints have."""
    saved = load_file(folder / "model.safetensors")
    own = {name: t for name, t in model.state_dict().items() if "self_attn" not in name}
    return own | {name: t for name, t in saved.items() if "self_attn" in name}


def convert(model, architecture: str, path, more: dict | None = None) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in tensors_of(model, path.parent / "hub").items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        layer = (name + "..").split(".")[2]
        found = placed(config, architecture, name, values)
        if not found:
            place = name.replace(".dt_bias", ".dt_proj.bias").replace("lm_head", "output")
            place = place.replace("router.weight", "router.layer.weight")
            place = place.replace("pre_ff_layernorm", "post_attention_layernorm")
            backbone = place.replace("model.", "backbone.").replace("embed_tokens", "embeddings")
            one = names.get_name(place, try_suffixes=(".weight", ".bias"))
            one = one or names.get_name(backbone, try_suffixes=(".weight", ".bias")) or place
            found = {one: stored(config, architecture, name, values)}
            writer.add_tensor(one, found[one])
            continue
        for part, mine in found.items():
            writer.add_tensor(f"blk.{layer}.{part}", np.ascontiguousarray(mine, np.float32))
    describe(config, architecture, writer)
    for key, value in (more or {}).items():
        writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(config, architecture: str, writer) -> None:
    """The keys that published converters write for these families."""
    kinds = getattr(config, "layer_types", None) or config.layers_block_type
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    eps = "layer_norm_epsilon" if "nemotron" in architecture else "rms_norm_eps"
    writer.add_layer_norm_rms_eps(getattr(config, eps))
    writer.add_head_count(config.num_attention_heads)
    heads = [config.num_key_value_heads * ("full" in kind) for kind in kinds]
    if architecture in HAS_DELTA:
        of_delta(config, architecture, writer)
    elif architecture == "kimi-linear":
        of_kimi(config, writer, [int(heads > 0) for heads in heads])
    elif architecture == "granitehybrid":
        writer.add_head_count_kv(heads)
        writer.add_feed_forward_length(config.intermediate_size)
        of_granite(config, writer)
    else:
        writer.add_head_count_kv(heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        of_nemotron(config, architecture, writer, kinds)
    if architecture not in (*HAS_DELTA, "kimi-linear"):
        of_scan(config, writer)
    if getattr(config, "rope_parameters", None):
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def of_delta(config, architecture: str, writer) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim // 4)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_full_attention_interval(4)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if architecture != "qwen35":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def of_kimi(config, writer, heads: list[int]) -> None:
    writer.add_head_count_kv(heads)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def of_granite(config, writer) -> None:
    is_bamba = config.model_type == "bamba"
    writer.add_rope_scaling_finetuned(is_bamba)
    if is_bamba:
        return
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def of_nemotron(config, architecture: str, writer, kinds) -> None:
    inner = config.moe_intermediate_size if "moe" in architecture else config.intermediate_size
    writer.add_feed_forward_length([inner * (kind in ("mlp", "moe")) for kind in kinds])
    if "moe" not in architecture:
        return
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    if config.moe_latent_size:
        writer.add_moe_latent_size(config.moe_latent_size)


def of_scan(config, writer) -> None:
    def first(*keys: str) -> int:
        return next(value for key in keys if (value := getattr(config, key, None)) is not None)

    heads = first("mamba_num_heads", "mamba_n_heads")
    writer.add_ssm_conv_kernel(first("conv_kernel", "mamba_d_conv"))
    writer.add_ssm_state_size(first("ssm_state_size", "mamba_d_state"))
    writer.add_ssm_group_count(first("n_groups", "mamba_n_groups"))
    writer.add_ssm_time_step_rank(heads)
    inner = heads * config.mamba_head_dim if hasattr(config, "mamba_head_dim") else None
    writer.add_ssm_inner_size(inner or 2 * config.hidden_size)


def made(case: str, tmp_path, more: dict | None = None):
    architecture, changes = CASES[case]
    reference = tiny(case, tmp_path / "hub", **changes)
    convert(reference, architecture, tmp_path / "model.gguf", more)
    return reference, str(tmp_path / "model.gguf")


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case, ops, paged, tmp_path):
    reference, path = made(case, tmp_path)

    model_config = read_model_config(path)
    (logits,) = paged(load_model(model_config, Build(ops))).step([(0, PROMPT)])

    assert_as_expected(logits, reference)
    assert model_config.latent is not None or torch_calls(model_config, ops) == []
    hub = read_model_config(str(tmp_path / "hub"))
    assert model_config.layer_kinds == hub.layer_kinds
    assert model_config.architecture == hub.architecture or case == "bamba"


def test_older_files_of_qwen3_next_hold_the_projections_of_a_key_head_together(
    ops, paged, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        f"{__name__}.apart", lambda config, values: iter([("ssm_in.weight", values)])
    )
    reference, path = made("qwen3 next", tmp_path)

    model_config = read_model_config(path)
    (logits,) = paged(load_model(model_config, Build(ops))).step([(0, PROMPT)])

    assert model_config.state.is_grouped
    assert_as_expected(logits, reference)


def test_layers_for_drafting_are_not_read(ops, paged, tmp_path):
    """Files count them among the blocks; here the last block stands for one."""
    reference, path = made("qwen3.5", tmp_path, {"qwen35.nextn_predict_layers": 1})
    del reference.model.layers[3:]

    model_config = read_model_config(path)
    (logits,) = paged(load_model(model_config, Build(ops))).step([(0, PROMPT)])

    assert model_config.num_layers == len(model_config.layer_kinds) == 3
    torch.testing.assert_close(logits, expected_logits(reference), atol=1e-4, rtol=0)


def test_ranks_cannot_share_value_heads_that_lie_in_turns(ops, tmp_path):
    model_config = read_model_config(made("qwen3.5", tmp_path)[1])

    with pytest.raises(ConfigError, match="2 ranks cannot share interleaved value heads"):
        load_model(model_config, shared_by_two(ops))


def test_rows_that_lie_in_turns_are_sorted_within_their_blocks():
    facts = StateFacts("delta", 3, heads=4, key_heads=2, key_dim=3, value_dim=5, is_tiled=True)
    values = np.random.default_rng(1).normal(size=(12 + 20, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    raw = torch.from_numpy(blocks).flatten()
    weight = StoredWeight.from_bytes("Q8_0", values.shape, raw)

    ((_, found),) = with_heads_of_keys(iter([("blk.0.attn_qkv.weight", weight)]), facts)

    heads = weight.dense[12:].view(4, 5, 64)
    assert found.type == "Q8_0"
    assert torch.equal(found.dense[:12], weight.dense[:12])
    assert torch.equal(found.dense[12:].view(4, 5, 64), heads[[0, 2, 1, 3]])


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("bamba", "granitehybrid.rope.dimension_count", 4),
        ("nemotron h", "nemotron_h_moe.feed_forward_length", [0, 8]),
        ("nemotron h", "nemotron_h_moe.attention.head_count_kv", 2),
        ("nemotron h", "nemotron_h_moe.expert_gating_func", 1),
        ("qwen3.5", "qwen35.ssm.time_step_rank", 5),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(case, key, value, tmp_path):
    _, path = made(case, tmp_path)

    with pytest.raises(ModelError, match=key.partition(".")[2]):
        read_model_config(path, overrides={key: value})
