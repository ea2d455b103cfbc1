"""BailingMoE against transformers' models of the same arithmetic under other names: version 2 is
GLM-4.5's block, version 1 is ERNIE 4.5's without a correction, which rotates pairs."""

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from tests.models.families import rewrite_config, tiny
from tests.support.logits import PROMPT, expected_logits, load

RENAMED = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "e_score_correction_bias": "expert_bias",
}
COMMON = {"use_qkv_bias": False, "use_bias": False}


def rename(folder, is_paired: bool, heads: int) -> None:
    """q, k and v in one tensor, and the other names."""
    path = folder / "model.safetensors"
    tensors, renamed = load_file(path), {}
    for name, tensor in tensors.items():
        if ".self_attn.k_proj" in name or ".self_attn.v_proj" in name or "moe_statics" in name:
            continue
        if ".self_attn.q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            if is_paired:
                dim = parts[0].shape[0] // heads
                turned = [part.view(-1, dim // 2, 2, part.shape[1]) for part in parts[:2]]
                parts[:2] = [part.transpose(1, 2).flatten(0, 2) for part in turned]
            last = name.rpartition(".")[2]
            stem = name.replace(f"self_attn.q_proj.{last}", "attention.query_key_value")
            renamed[f"{stem}.{last}"] = torch.cat(parts)
            continue
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in renamed.items()}, path)


def second(folder):
    variant = "glm4 moe, groups, no norm"
    changes = {"use_qk_norm": True, "norm_topk_prob": True, "routed_scaling_factor": 1.7}
    reference = tiny(variant, folder, **changes)
    rename(folder, False, 6)
    rewrite_config(
        folder,
        architectures=["BailingMoeV2ForCausalLM"],
        model_type="bailing_moe_v2",
        num_experts=12,
        n_routed_experts=None,
        num_shared_experts=2,
        n_shared_experts=None,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        **COMMON,
    )
    return reference


def first(folder, **more):
    reference = tiny("ernie 4.5 moe", folder, head_dim=8, tie_word_embeddings=False)
    with torch.no_grad():
        for name, parameter in reference.state_dict().items():
            if "moe_statics" in name:
                parameter.zero_()
    rename(folder, True, 6)
    rewrite_config(
        folder,
        architectures=["BailingMoeForCausalLM"],
        model_type="bailing_moe",
        num_experts=5,
        num_experts_per_tok=3,
        num_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        **COMMON,
        **more,
    )
    return reference


@pytest.mark.parametrize("make", [first, second])
def test_logits_equal_those_of_transformers(make, ops, paged, tmp_path):
    reference = make(tmp_path)
    model = load(tmp_path, ops)

    (logits,) = paged(model).step([(0, PROMPT)])

    torch.testing.assert_close(logits, expected_logits(reference), atol=1e-4, rtol=0)
    pages = paged(model, num_requests=2)
    chunks = [
        pages.step([(1, PROMPT[at + 3 : at + 3 + n]), (0, PROMPT[at : at + n])])[1]
        for at, n in ((0, 13), (13, 1), (14, 30))
    ]
    torch.testing.assert_close(torch.cat(chunks), logits[:44], atol=1e-4, rtol=0)


def test_a_normed_head_has_columns_of_length_one(ops, paged, tmp_path):
    reference = first(tmp_path, norm_head=True)
    with torch.no_grad():
        head = reference.lm_head.weight
        plain = expected_logits(reference)
        head.copy_(head / head.norm(dim=0, keepdim=True))

    (logits,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])

    torch.testing.assert_close(logits, expected_logits(reference), atol=1e-4, rtol=0)
    assert (logits - plain).abs().max() > 0.1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_group": 5}, "n_group must be a divisor of 12 experts"),
        ({"n_group": 12}, "n_group must be .*two to each"),
        ({"score_function": "softmax"}, "score_function must be sigmoid"),
        ({"num_experts": None}, "num_experts must be .*missing"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok must be in"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes, match, tmp_path):
    second(tmp_path)
    rewrite_config(tmp_path, **changes)

    with pytest.raises(ModelError, match=match):
        read_model_config(str(tmp_path))


def test_a_router_of_two_chooses_two(tmp_path):
    tiny("phi moe", tmp_path)
    rewrite_config(tmp_path, num_experts_per_tok=3)

    with pytest.raises(ModelError, match="num_experts_per_tok must be 2"):
        read_model_config(str(tmp_path))


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_file_of_llama_cpp_says_what_the_configuration_says(is_whole, ops, paged, tmp_path):
    """Of several shared blocks, a file gives the width of one or of all."""
    second(tmp_path)
    path, hub = tmp_path / "model.gguf", read_model_config(str(tmp_path))
    writer = gguf.GGUFWriter(path, "bailingmoe2")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BAILINGMOE2, hub.num_layers)
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        head, found, rest = name.partition(".experts.")
        if found:
            number, _, part = rest.partition(".")
            stacks.setdefault(f"{head}.experts.{part}", {})[int(number)] = tensor
            continue
        plain = name.replace(".expert_bias", ".expert_bias.bias")
        writer.add_tensor(names.get_name(plain, (".weight", ".bias")), tensor.numpy())
    for name, stack in stacks.items():
        stacked = torch.stack([stack[number] for number in sorted(stack)])
        writer.add_tensor(names.get_name(name, (".weight",)), stacked.numpy())
    experts, inner = hub.experts, hub.experts.inner
    writer.add_context_length(hub.context_length)
    writer.add_embedding_length(hub.hidden_size)
    writer.add_block_count(hub.num_layers)
    writer.add_feed_forward_length(hub.intermediate_size)
    writer.add_head_count(hub.num_heads)
    writer.add_head_count_kv(hub.num_kv_heads)
    writer.add_key_length(hub.head_dim)
    writer.add_value_length(hub.head_dim)
    writer.add_rope_dimension_count(hub.rotary_dim)
    writer.add_layer_norm_rms_eps(hub.norm_eps)
    writer.add_rope_freq_base(hub.rope.theta)
    writer.add_leading_dense_block_count(len(experts.dense_layers))
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    writer.add_expert_feed_forward_length(inner)
    writer.add_expert_shared_count(2)
    writer.add_expert_shared_feed_forward_length(2 * inner if is_whole else inner)
    writer.add_expert_weights_scale(experts.scale)
    writer.add_expert_weights_norm(experts.is_normalised)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(experts.groups)
    writer.add_expert_group_used_count(experts.top_groups)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    model_config = read_model_config(str(path))
    assert (model_config.experts, model_config.qk_norm) == (experts, "head")
    (expected,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])
    (logits,) = paged(load_model(model_config, Build(ops))).step([(0, PROMPT)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
