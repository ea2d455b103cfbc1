"""Families of experts from GGUF, equal to their safetensors form: stacked as published converters
stack them, names by the gguf package's own map, keys by its writer."""

import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from banyan.parallel.groups import ALONE, Group
from tests.models.families import EXPERTS, tiny
from tests.support.gguf import interleave
from tests.support.logits import PROMPT, load

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
MOE = {"moe_intermediate_size": 32}
LATENT = {
    **MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 8,
    "head_dim": 6,
    "routed_scaling_factor": 1.3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.8,
    "mscale_all_dim": 0.8,
}
WRITES_WIDTH = (
    *("qwen2moe", "qwen3moe", "deepseek2", "glm4moe", "dots1", "ernie4_5-moe"),
    *("minimax-m2", "hunyuan-moe"),
)
"""Architectures whose files give the width of an expert by itself."""
CASES = {
    "mixtral": ("llama", {"sliding_window": None}),
    "mixtral, a tensor per expert": ("llama", {"sliding_window": None}),
    "olmoe": ("olmoe", {"norm_topk_prob": False}),
    "qwen2 moe": ("qwen2moe", {**MOE, "shared_expert_intermediate_size": 32}),
    "qwen3 moe": ("qwen3moe", {**MOE, "head_dim": 16}),
    "glm4 moe": ("glm4moe", {**MOE, "head_dim": 16, "num_nextn_predict_layers": 1}),
    "glm4 moe, groups, no norm": ("glm4moe", {**MOE, "head_dim": 16}),
    "dots1": ("dots1", {**MOE, "head_dim": 16}),
    "ernie 4.5 moe": ("ernie4_5-moe", {**MOE, "head_dim": 16}),
    "granite moe": ("granitemoe", {}),
    "minimax m2": ("minimax-m2", {"head_dim": 16}),
    "hunyuan moe": ("hunyuan-moe", {"head_dim": 16}),
    "deepseek v2": ("deepseek2", LATENT),
    "deepseek v2, groups, yarn": (
        "deepseek2",
        {**LATENT, "q_lora_rank": 32, "rope_parameters": YARN},
    ),
    "deepseek v3": ("deepseek2", {**LATENT, "q_lora_rank": 32}),
    "deepseek v3, split expansion": ("deepseek2", {**LATENT, "q_lora_rank": 32}),
}


def variant_of(case: str) -> str:
    return case if case in EXPERTS else case.partition(",")[0]


def rounded(values: np.ndarray):
    """(raw, type, values that it means): Q8_0 where it fits."""
    if values.ndim < 2 or values.shape[-1] % 32:
        return np.ascontiguousarray(values), None, values
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quantize(values, kind)
    return raw, kind, gguf.dequantize(raw, kind)


def convert(folder: Path, case: str, config) -> Path:
    """Write the folder's checkpoint as GGUF; its own weights become those that are rounded."""
    architecture = CASES[case][0]
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(
        arch, config.num_hidden_layers + drafting(config, architecture)
    )
    tensors = load_file(folder / "model.safetensors")
    stacks: dict[str, dict[int, np.ndarray]] = {}

    def add(name, values):
        raw, kind, _ = rounded(values)
        writer.add_tensor(name, raw, raw_dtype=kind)

    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        tensors[name] = torch.from_numpy(np.array(rounded(values)[2]))
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert:
            plain = name.replace(expert.group(), ".experts.")
            plain = plain.replace("model.layers", "layers").replace(
                "block_sparse_moe", "feed_forward"
            )
            plain = plain if architecture in ("llama", "minimax-m2") else f"model.{plain}"
            stored = names.get_name(plain, try_suffixes=(".weight",))
            stacks.setdefault(stored, {})[int(expert.group(1))] = values
            continue
        if name.endswith("block_sparse_moe.input_linear.weight"):
            block = name.partition(".block_sparse_moe")[0].replace("model.layers", "blk")
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                add(f"{block}.ffn_{part}_exps.weight", half)
            continue
        plain = name.replace("e_score_correction_bias", "e_score_correction.bias")
        stored = names.get_name(plain, try_suffixes=(".weight", ".bias")) or of_the_draft(name)
        assert stored, name
        if architecture in ("llama", "granitemoe") and (".q_proj." in name or ".k_proj." in name):
            values = interleave(values, config.hidden_size // 4)
        if stored.endswith("ffn_gate_inp_shexp.weight"):
            values, tensors[name] = values.squeeze(), tensor
        if "split" in case and "attn_kv_b" in stored:
            heads = tensors[name].view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            add(stored.replace("kv_b", "k_b"), keys.transpose(1, 2).contiguous().numpy())
            add(stored.replace("kv_b", "v_b"), values.contiguous().numpy())
            continue
        add(stored, values)
    for stored, experts in stacks.items():
        if "per expert" in case:
            for number, values in experts.items():
                add(stored.replace("_exps.", f".{number}."), values)
        else:
            add(stored, np.stack([experts[number] for number in sorted(experts)]))
    save_file(tensors, folder / "model.safetensors")
    describe(config, case, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def drafting(config, architecture: str) -> int:
    """Layers behind the last one; files of DeepSeek's counted none for long."""
    if architecture not in ("glm4moe", "deepseek2"):
        return 0
    return getattr(config, "num_nextn_predict_layers", 0) or 0


def of_the_draft(name: str) -> str:
    """As llama.cpp calls what a layer that drafts has beside those of a block."""
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.nextn.{part.replace('.', '_')}.weight"


def describe(config, case, writer) -> None:
    """The keys that published converters write."""
    architecture = CASES[case][0]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    more = drafting(config, architecture)
    writer.add_block_count(config.num_hidden_layers + more)
    if more:
        writer.add_nextn_predict_layers(more)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(of(config, "num_local_experts", "n_routed_experts", "num_experts"))
    writer.add_expert_used_count(of(config, "num_experts_per_tok", "moe_topk", "moe_k"))
    if architecture in WRITES_WIDTH:
        writer.add_expert_feed_forward_length(
            of(config, "moe_intermediate_size", "intermediate_size")
        )
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "deepseek2":
        describe_deepseek(config, case, writer)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // 4
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    describe_own(config, architecture, head_dim, writer)


def of(config, *names):
    """The first of these settings that there is."""
    return next(value for name in names if (value := getattr(config, name, None)) is not None)


def describe_own(config, architecture, head_dim, writer) -> None:
    if architecture in ("glm4moe", "minimax-m2"):
        share = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(head_dim * share))
    if architecture in ("glm4moe", "dots1"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        heads = config.num_key_value_heads
        writer.add_expert_shared_feed_forward_length(config.intermediate_size // heads)
    if architecture == "hunyuan-moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    if architecture == "granitemoe":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def describe_deepseek(config, case, writer) -> None:
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    is_split, is_third = "split" in case, "v3" in case
    writer.add_head_count_kv(1 if is_split else config.num_attention_heads)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim if is_split else head_dim)
    writer.add_value_length(config.kv_lora_rank if is_split else config.v_head_dim)
    if is_split:
        writer.add_key_length_mla(head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_third else kinds.SOFTMAX)
    if config.n_group and (is_third or "groups" in case):
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def make(case: str, folder: Path) -> Path:
    changes = CASES[case][1]
    reference = tiny(variant_of(case), folder, **{**SIZES, **changes})
    return convert(folder, case, reference.config)


@pytest.fixture
def ops():
    """That round nothing."""
    return bind("cpu", CPU, torch.float32, frozenset(), 16, forced={"linear": "reference"})


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_safetensors_form(case, ops, paged, tmp_path):
    path = make(case, tmp_path)
    (expected,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])

    model_config = read_model_config(str(path))
    (logits,) = paged(load_model(model_config, Build(ops))).step([(0, PROMPT)])

    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    hub = read_model_config(str(tmp_path))
    assert (model_config.architecture, model_config.experts, model_config.latent) == (
        hub.architecture,
        hub.experts,
        hub.latent,
    )
    assert model_config.num_kv_heads == hub.num_kv_heads


@pytest.mark.parametrize("case", ["mixtral", "deepseek v3"])
def test_ranks_take_their_own_experts_of_a_stack(case, ops, tmp_path):
    path = make(case, tmp_path)
    model_config = read_model_config(str(path))
    count = model_config.experts.count

    held = []
    for rank in range(count):
        groups = replace(ALONE, experts=Group(rank, count, object()))
        model = load_model(model_config, Build(ops, groups))
        packed = model.layers[2].mlp.experts.packed
        held.append((packed.first, len(packed.gate_up), len(packed.down)))

    assert held == [(expert, 1, 1) for expert in range(count)]


def test_a_stack_of_too_few_experts_is_refused(ops, tmp_path):
    path = make("mixtral", tmp_path)
    overrides = {"llama.expert_count": 4}

    with pytest.raises(ModelError, match=r"router|ffn_gate_inp"):
        load_model(read_model_config(str(path), overrides=overrides), Build(ops))


def test_half_of_an_expansion_is_named(ops, tmp_path):
    from banyan.models.weights.checkpoint_layouts import with_whole_expansions
    from banyan.ops.stored import StoredWeight

    half = StoredWeight.from_tensor(torch.ones(2, 3, 4))
    with pytest.raises(ModelError, match=r"blk\.0 has \.attn_k_b"):
        list(with_whole_expansions(iter([("blk.0.attn_k_b.weight", half)])))
    other = StoredWeight.from_tensor(torch.ones(2, 5, 7))
    pair = [("blk.0.attn_k_b.weight", half), ("blk.0.attn_v_b.weight", other)]
    with pytest.raises(ModelError, match=r"\[2, 3, 4\] and attn_v_b \[2, 5, 7\]"):
        list(with_whole_expansions(iter(pair)))
