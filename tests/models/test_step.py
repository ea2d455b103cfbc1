"""Step-3 and Step-3.5, 3.7: their makers' configurations, and the first one's arithmetic, which
transformers does not have, written out from its report (arXiv 2507.19427)."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu

import banyan
from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from tests.models.families import rewrite_config, tiny
from tests.runner.test_recorded_families import open_runner, requests, scores
from tests.support.logits import PROMPT, expected_logits, load
from tests.support.runner_driver import Driver

FIRST = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_attention_groups": 1,
    "head_dim": 10,
    "share_q_dim": 22,
    "vocab_size": 97,
    "max_position_embedding": 128,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "moe_layers_enum": "1,2",
    "moe_num_experts": 5,
    "moe_top_k": 3,
    "moe_intermediate_size": 20,
    "share_expert_dim": 12,
    "norm_expert_weight": True,
    "torch_dtype": "float32",
}


def shapes(head_dim: int) -> dict[str, tuple[int, ...]]:
    dim, heads, rank, inner, count, shared = 48, 6 * head_dim, 22, 20, 5, 12
    found = {"model.embed_tokens": (97, dim), "model.norm": (dim,), "lm_head": (97, dim)}
    for layer in range(3):
        block = {"input_layernorm": (dim,), "post_attention_layernorm": (dim,)}
        block |= {f"self_attn.{name}_proj": (head_dim, dim) for name in "kv"}
        block |= {"self_attn.q_proj": (rank, dim), "self_attn.inter_norm": (rank,)}
        block |= {"self_attn.wq": (heads, rank), "self_attn.o_proj": (dim, heads)}
        if layer:
            block |= {"moe.gate": (count, dim), "moe.down_proj": (count, dim, inner)}
            block |= {f"moe.{name}_proj": (count, inner, dim) for name in ("gate", "up")}
            block |= {f"share_expert.{name}_proj": (shared, dim) for name in ("gate", "up")}
            block |= {"share_expert.down_proj": (dim, shared)}
        else:
            block |= {f"mlp.{name}_proj": (40, dim) for name in ("gate", "up")}
            block |= {"mlp.down_proj": (dim, 40)}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


def first(folder, sees: bool = False, **changes) -> dict[str, torch.Tensor]:
    """A random checkpoint as published, of the model for text or of the one that sees."""
    torch.manual_seed(3)
    draws = {
        n: torch.randn(shape) * (0.2 if len(shape) > 1 else 0.5)
        for n, shape in shapes(changes.get("head_dim", 10)).items()
    }
    folder.mkdir(exist_ok=True)
    text, name = FIRST | changes, "Step3TextForCausalLM"
    config = text | {"model_type": "step3_text", "architectures": [name]}
    stored = dict(draws)
    if sees:
        name = "Step3VLForConditionalGeneration"
        config = {"model_type": "step3_vl", "architectures": [name], "text_config": text}
        stored["vision_model.conv1.weight"] = torch.zeros(3, 3)
        stored["vit_downsampler2.weight"] = torch.zeros(3, 3)
        stored["vit_large_projector.weight"] = torch.zeros(3, 3)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return draws


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turned(x, theta=1e4):
    """x: [heads, tokens, dim]"""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    left, right = x.split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def attended(x, w, block):
    squeezed = normed(linear(x, w(f"{block}.q_proj")), w(f"{block}.inter_norm"))
    q = turned(linear(squeezed, w(f"{block}.wq")).unflatten(-1, (6, 10)).transpose(0, 1))
    k = turned(linear(x, w(f"{block}.k_proj"))[None])
    v = linear(x, w(f"{block}.v_proj"))[None]
    hidden = torch.ones(len(x), len(x)).triu(1).bool()
    weights = (q @ k.mT * 10**-0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    return linear((weights @ v).transpose(0, 1).flatten(1), w(f"{block}.o_proj"))


def fed(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def first_logits(draws, prompt=PROMPT, is_normalised=True):
    def w(name):
        return draws[f"{name}.weight"]

    x = w("model.embed_tokens")[prompt]
    for layer in range(3):
        at = f"model.layers.{layer}"
        x = x + attended(normed(x, w(f"{at}.input_layernorm")), w, f"{at}.self_attn")
        given = normed(x, w(f"{at}.post_attention_layernorm"))
        names = ("gate_proj", "up_proj", "down_proj")
        plain = "share_expert" if layer else "mlp"
        x = x + fed(given, *(w(f"{at}.{plain}.{name}") for name in names))
        if layer:
            shares, chosen = linear(given, w(f"{at}.moe.gate")).softmax(-1).topk(3)
            shares = shares / shares.sum(-1, keepdim=True) if is_normalised else shares
            stacks = [w(f"{at}.moe.{name}") for name in names]
            x = x + torch.stack(
                [
                    sum(
                        s * fed(row, *(stack[e] for stack in stacks))
                        for s, e in zip(*pair, strict=True)
                    )
                    for row, *pair in zip(given, shares, chosen, strict=True)
                ]
            )
    return linear(normed(x, w("model.norm")), w("lm_head"))


@pytest.mark.parametrize("sees", [False, True])
def test_the_first_one_gives_the_logits_of_its_report(sees, ops, paged, tmp_path):
    draws = first(tmp_path, sees, norm_expert_weight=not sees)
    model = load(tmp_path, ops)

    (logits,) = paged(model).step([(0, PROMPT)])

    expected = first_logits(draws, is_normalised=not sees)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    pages = paged(model, num_requests=2)
    chunks = [
        pages.step([(1, PROMPT[at + 3 : at + 3 + n]), (0, PROMPT[at : at + n])])[1]
        for at, n in ((0, 13), (13, 1), (14, 30))
    ]
    torch.testing.assert_close(torch.cat(chunks), logits[:44], atol=1e-4, rtol=0)


def checkpoint(name: str, folder) -> None:
    """Of sizes that the compiled attention takes."""
    if name == "first":
        first(folder, head_dim=16)
    else:
        tiny("step 3.7", folder, head_dim=40)


def test_recorded_steps_of_the_first_one_have_the_same_bits_in_any_batch(tmp_path):
    checkpoint("first", tmp_path)
    recorded, eager = open_runner(tmp_path), open_runner(tmp_path, max_tokens=0)
    assert (recorded.forward.how, eager.forward.how) == ("recorded", "eager")
    together, anew, alone = requests(), requests(), requests()

    Driver(recorded).run(together, chunk=7)
    Driver(eager).run(anew, chunk=16)
    driver = Driver(open_runner(tmp_path))
    for request in alone:
        driver.run([request])

    for one, two, three in zip(together, anew, alone, strict=True):
        assert one.output == two.output == three.output
        assert scores(one) == scores(two) == scores(three)


@pytest.mark.parametrize("name", ["first", "flash"])
def test_what_is_read_from_the_cache_gives_the_same_bits(name, tmp_path):
    checkpoint(name, tmp_path)
    asked = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    usual = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "page_size": 8, "threads": 1}
    with banyan.Engine(str(tmp_path), engine_mode="inprocess", **usual) as engine:
        anew, cached = (
            engine.generate(input_ids=[PROMPT], sampling_params=asked, return_logprob=True)[0]
            for _ in range(2)
        )

    assert anew["output_ids"] == cached["output_ids"]
    assert anew["meta_info"]["cached_tokens"] == 0 < cached["meta_info"]["cached_tokens"]
    key = "output_token_logprobs"
    assert anew["meta_info"][key] == cached["meta_info"][key]


def test_the_first_one_keeps_one_head_of_keys_and_values(ops, tmp_path):
    first(tmp_path)

    caches = load(tmp_path, ops).caches

    assert [cache.tensors["k"].shape for cache in caches] == [(1, 10)] * 3


def test_layers_of_more_heads_lie_next_to_those_of_fewer(ops, tmp_path):
    tiny("step 3.7", tmp_path)
    model_config = read_model_config(str(tmp_path))

    model = load_model(model_config, Build(ops))

    heads = [layer.attention.spec.heads for layer in model.layers]
    assert heads == [4, 6, 6, 4] == [model_config.heads_of(layer) for layer in range(4)]
    assert [rotary.dim for rotary in model.rotaries.values()] == [6, 10]
    assert {cache.tensors["k"].shape for cache in model.caches} == {(2, 10)}


def in_makers_words(folder) -> None:
    """Flat, with lists by layer that speak of a layer for drafting too."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    ropes = text.pop("rope_parameters")
    full, window = ropes["full_attention"], ropes["sliding_attention"]
    scaling = {k: v for k, v in full.items() if k not in ("rope_theta", "partial_rotary_factor")}
    kinds = text["layer_types"] + ["sliding_attention"]
    is_full = [kind == "full_attention" for kind in kinds]
    sparse = [at for at, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"]
    heads = text.pop("num_sliding_attention_heads")
    text.pop("per_layer_config")
    theirs = {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "num_nextn_predict_layers": 1,
        "layer_types": kinds,
        "rope_theta": [full["rope_theta"] if one else window["rope_theta"] for one in is_full],
        "partial_rotary_factors": [
            full["partial_rotary_factor"] if one else 1.0 for one in is_full
        ],
        "rope_scaling": scaling,
        "yarn_only_types": ["full_attention"],
        "moe_layers_enum": ",".join(map(str, sparse)),
        "num_attention_groups": text.pop("num_key_value_heads"),
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": heads,
            "num_attention_groups": 2,
            "head_dim": 10,
        },
        "moe_num_experts": text.pop("n_routed_experts"),
        "moe_top_k": text.pop("num_experts_per_tok"),
        "swiglu_limits": text["swiglu_limits"] + [0.0],
        "swiglu_limits_shared": text["swiglu_limits_shared"] + [0.0],
        "use_head_wise_attn_gate": True,
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
        "use_moe_router_bias": True,
    }
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", **text, **theirs}))


def test_its_makers_words_give_the_same_card(tmp_path):
    tiny("step 3.7", tmp_path)
    model_config = read_model_config(str(tmp_path))

    in_makers_words(tmp_path)

    found = read_model_config(str(tmp_path))
    assert found.num_mtp_layers == 1
    same = {
        "architecture": model_config.architecture,
        "model_type": model_config.model_type,
        "num_mtp_layers": 0,
        "outer": model_config.outer,
    }
    assert replace(found, **same) == model_config


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_theta": [1e4] * 3}, "rope_theta must be a list of 4 values"),
        ({"rope_theta": [1e4, 1e4, 2e4, 1e4, 1e4]}, "rope_theta.*all layers of sliding_attention"),
        ({"partial_rotary_factors": [0.5] * 5}, "partial_rotary_factor must be an even part of 10"),
        ({"sliding_window": None}, "sliding_window must be a number of tokens"),
        ({"swiglu_limits": [0.0, -1.0, 0.0, 0.0]}, "swiglu_limits must be null or in"),
        ({"swiglu_limits_shared": [0.0, True, 0.0, 0.0]}, "swiglu_limits_shared must be null"),
        ({"moe_layers_enum": "1,x"}, "moe_layers_enum must be numbers of layers"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation must be 'sigmoid'"),
        ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types must be full_attention"),
        ({"use_rope_layers": [1]}, "use_rope_layers"),
        ({"moe_top_k": 6}, "moe_top_k must be in"),
        ({"share_expert_dim": None}, "share_expert_dim must be .*missing"),
        ({"attention_other_setting": {"num_attention_heads": 5}}, "multiple of 2 key"),
        ({"attention_other_setting": {"num_attention_groups": 1}}, "2, as in all layers"),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(changes, match, tmp_path):
    tiny("step 3.7", tmp_path)
    in_makers_words(tmp_path)
    rewrite_config(tmp_path, **changes)

    with pytest.raises(ModelError, match=match):
        read_model_config(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_attention_groups": 2}, "num_attention_groups must be 1 head"),
        ({"share_q_dim": 0}, "share_q_dim must be in"),
        ({"moe_num_experts": 2**31}, "moe_num_experts must be in"),
    ],
)
def test_what_the_first_one_cannot_be_is_refused_by_name(changes, match, tmp_path):
    first(tmp_path, **changes)

    with pytest.raises(ModelError, match=match):
        read_model_config(str(tmp_path))


GGUF_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def in_gguf(folder, drafting: int = 0, divisors=None, **changes):
    """The folder's checkpoint as published converters write it."""
    path, model_config = folder / "model.gguf", read_model_config(str(folder))
    writer = gguf.GGUFWriter(path, "step35")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.STEP35, model_config.num_layers + drafting)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith(("vision_model.", "vit_")):
            continue
        tensor = tensor + 1.0 if name.endswith("norm.weight") else tensor
        plain = name.replace("router_bias", "router_bias.bias")
        writer.add_tensor(names.get_name(plain, (".weight", ".bias")), tensor.numpy())
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    more = [0.0] * drafting
    heads = [model_config.heads_of(layer) for layer in range(model_config.num_layers)] + [
        model_config.window_heads
    ] * drafting
    experts = model_config.experts
    writer.add_context_length(model_config.context_length)
    writer.add_embedding_length(model_config.hidden_size)
    writer.add_block_count(model_config.num_layers + drafting)
    if drafting:
        writer.add_nextn_predict_layers(drafting)
    writer.add_feed_forward_length(model_config.intermediate_size)
    writer.add_head_count(changes.get("heads", heads))
    writer.add_head_count_kv([model_config.num_kv_heads] * len(heads))
    writer.add_key_length(model_config.head_dim)
    writer.add_value_length(model_config.head_dim)
    writer.add_layer_norm_rms_eps(model_config.norm_eps)
    writer.add_rope_freq_base(model_config.rope.theta)
    writer.add_rope_freq_base_swa(model_config.window_rope.theta)
    writer.add_sliding_window(model_config.window)
    writer.add_sliding_window_pattern(
        [k == "window" for k in model_config.layer_kinds] + [True] * drafting
    )
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    writer.add_expert_feed_forward_length(experts.inner)
    writer.add_expert_shared_feed_forward_length(experts.shared_inner)
    writer.add_expert_weights_scale(experts.scale)
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(len(experts.dense_layers))
    writer.add_moe_every_n_layers(changes.get("every", 1))
    writer.add_swiglu_clamp_exp(list(experts.limits) + more)
    writer.add_swiglu_clamp_shexp(list(model_config.mlp_limits) + more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("drafting", [0, 1])
def test_a_file_of_llama_cpp_gives_the_same_logits(drafting, ops, paged, tmp_path):
    reference = tiny("step 3.7", tmp_path, head_dim=12, rope_parameters=GGUF_ROPES)
    hub = read_model_config(str(tmp_path))

    model_config = read_model_config(str(in_gguf(tmp_path, drafting)))

    ours = ("experts", "window_heads", "mlp_limits", "rotary_dim", "layer_kinds", "num_layers")
    assert [getattr(model_config, name) for name in ours] == [getattr(hub, name) for name in ours]
    assert model_config.num_mtp_layers == drafting
    (logits,) = paged(load_model(model_config, Build(ops))).step([(0, PROMPT)])
    torch.testing.assert_close(logits, expected_logits(reference), atol=1e-4, rtol=0)


def test_a_file_divides_the_frequencies_of_full_layers_alone(ops, tmp_path):
    """As llama.cpp does: by the first of the numbers that there are, whatever their rule."""
    tiny("step 3.7", tmp_path, head_dim=12, rope_parameters=GGUF_ROPES)
    divisors = [1.0, 1.5, 4.0, 7.0, 8.0, 9.0]

    model_config = read_model_config(str(in_gguf(tmp_path, divisors=divisors)))

    full, window = load_model(model_config, Build(ops)).rotaries.values()
    plain = 5e4 ** -(torch.arange(0, 6, 2) / 6)
    torch.testing.assert_close(full.frequencies, plain / torch.tensor(divisors[:3]))
    torch.testing.assert_close(window.frequencies, 1e4 ** -(torch.arange(0, 12, 2) / 12))
    assert full.magnitude == window.magnitude == 1.0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"heads": [4, 6, 5, 4]}, "attention.head_count must be one number for all layers"),
        ({"heads": [4, 6, 6]}, "attention.head_count must be a list of 4 values"),
        ({"heads": [4, 5, 5, 4]}, "attention.head_count must be a multiple of 2 key"),
        ({"every": 2}, "moe_every_n_layers must be 1"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(changes, match, tmp_path):
    tiny("step 3.7", tmp_path, head_dim=12, rope_parameters=GGUF_ROPES)

    with pytest.raises(ModelError, match=match):
        read_model_config(str(in_gguf(tmp_path, **changes)))
