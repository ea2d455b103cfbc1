"""Every family against transformers, from its saved checkpoint to logits over pages."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from tests.models.families import EXPERTS, STATES, VARIANTS, rewrite_config, tiny
from tests.support.logits import PROMPT, assert_as_expected, expected_logits, load
from tests.support.torch_calls import torch_calls

CPU = torch.device("cpu")


_MINIMAX_FACTORS = [
    *(("full", "alpha", 3.5), ("full", "beta", 1.2)),
    *(("linear", "alpha", 0.4), ("linear", "beta", 0.9)),
]


def _keys(folder):
    return list(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("variant", VARIANTS | EXPERTS | STATES)
def test_logits_equal_those_of_transformers(variant, ops, paged, tmp_path):
    reference = tiny(variant, tmp_path)

    (logits,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])

    assert_as_expected(logits, reference)


@pytest.mark.parametrize("variant", VARIANTS | EXPERTS | STATES)
def test_a_prompt_in_chunks_next_to_another_gives_the_same_logits(variant, ops, paged, tmp_path):
    tiny(variant, tmp_path)
    model = load(tmp_path, ops)
    (whole,) = paged(model).step([(0, PROMPT)])

    pages = paged(model, num_requests=2)
    chunks = [
        pages.step([(1, PROMPT[first + 3 : first + 3 + count]), (0, PROMPT[first : first + count])])
        for first, count in ((0, 13), (13, 1), (14, 30))
    ]

    torch.testing.assert_close(torch.cat([c[1] for c in chunks]), whole[:44], atol=1e-4, rtol=0)


# Latent attention copies in its plain form; recorded, it is proven in tests/runner.
@pytest.mark.parametrize("variant", [name for name in VARIANTS | STATES if "kimi" not in name])
def test_a_pass_consists_of_ops_and_views(variant, ops, tmp_path):
    tiny(variant, tmp_path)

    assert torch_calls(read_model_config(str(tmp_path)), ops) == []


def test_older_spellings_of_gemma3s_ropes_give_the_same_card(tmp_path):
    tiny("gemma3, stretched", tmp_path)
    model_config = read_model_config(str(tmp_path))

    rewrite_config(
        tmp_path,
        rope_parameters=None,
        rope_theta=1e6,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )

    assert read_model_config(str(tmp_path)) == model_config


def test_hunyuans_alpha_gives_its_rope_another_base(tmp_path):
    tiny("hunyuan moe", tmp_path)
    plain = read_model_config(str(tmp_path)).rope

    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    rewrite_config(tmp_path, rope_parameters=None, rope_scaling=scaling)

    rope = read_model_config(str(tmp_path)).rope
    assert rope.kind == "default"
    assert rope.theta == pytest.approx(plain.theta * 1000 ** (10 / 8))


@pytest.mark.parametrize("listed", [[3, 3, 2, 3], [], ["3"], [0, 0]])
def test_numbers_for_each_layer_must_be_equal(listed, tmp_path):
    tiny("hunyuan moe", tmp_path)
    rewrite_config(tmp_path, moe_topk=[3, 3])
    assert read_model_config(str(tmp_path)).experts.per_token == 3

    rewrite_config(tmp_path, moe_topk=listed)

    with pytest.raises(ModelError, match="moe_topk"):
        read_model_config(str(tmp_path))


def test_window_layers_are_declared_by_kind(tmp_path):
    tiny("gemma3", tmp_path)
    model_config = read_model_config(str(tmp_path))

    assert model_config.layer_kinds == (*["window"] * 5, "full", "window")
    assert model_config.window == 7
    assert model_config.rope_of(0).theta == 1e4 and model_config.rope_of(5).theta == 1e6


def test_longrope_serves_long_requests_with_its_long_factors(ops, paged, tmp_path):
    """transformers chooses by the longest prompt of a call, a server by its longest request."""
    reference = tiny("phi3, longrope on part of a head", tmp_path)
    model_config = read_model_config(str(tmp_path))
    prompt = [(5 * i * i + i) % 97 for i in range(140)]

    model = load_model(model_config, Build(ops), served_length=200)
    (logits,) = paged(model).step([(0, prompt)])

    torch.testing.assert_close(logits, expected_logits(reference, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", [name for name in EXPERTS if "," not in name])
def test_experts_are_read_as_transformers_holds_them_too(variant, ops, paged, tmp_path):
    """One tensor for all experts of a layer: what it saves when asked for its own form."""
    reference = tiny(variant, tmp_path / "published")
    reference.save_pretrained(tmp_path / "own", save_original_format=False)

    (logits,) = paged(load(tmp_path / "own", ops)).step([(0, PROMPT)])

    (expected,) = paged(load(tmp_path / "published", ops)).step([(0, PROMPT)])
    assert torch.equal(logits, expected)


def test_the_text_part_of_a_checkpoint_that_sees_is_read(ops, paged, tmp_path):
    reference = tiny("qwen3.5 moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in weights.items()
    }
    renamed["model.visual.patch_embed.proj.weight"] = torch.ones(3, 5)
    for layer in range(4):  # as the makers store experts: one tensor for all of them
        of = f"model.language_model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([renamed.pop(f"{of}.{e}.{kind}_proj.weight") for e in range(5)])
            for kind in ("gate", "up", "down")
        )
        renamed |= {f"{of}.gate_up_proj": torch.cat([gates, ups], 1), f"{of}.down_proj": downs}
    save_file(renamed, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"hidden_size": 5},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))

    text_model = load_model(read_model_config(str(tmp_path), with_media=False), Build(ops))
    (logits,) = paged(text_model).step([(0, PROMPT)])

    torch.testing.assert_close(logits, expected_logits(reference), atol=1e-4, rtol=0)


def test_a_model_of_states_alone_names_no_heads(tmp_path):
    tiny("mamba", tmp_path)
    model_config = read_model_config(str(tmp_path))

    rewrite_config(tmp_path, num_attention_heads=None, num_key_value_heads=None)

    assert replace(read_model_config(str(tmp_path)), num_heads=6, num_kv_heads=2) == model_config


def test_minimaxs_own_words_give_the_same_card(tmp_path):
    tiny("minimax, all factors", tmp_path)
    model_config = read_model_config(str(tmp_path))
    theirs = {
        **{f"layernorm_{kind}_attention_{n}": v for kind, n, v in _MINIMAX_FACTORS},
        "layernorm_mlp_alpha": 2.5,
        "layernorm_mlp_beta": 0.7,
        "attn_type_list": [0, 0, 1] * 2,
        "postnorm": True,
        "shared_intermediate_size": 0,
        "rotary_dim": 10,
    }
    of_transformers = [k for k in _keys(tmp_path) if k.endswith(("alpha_factor", "beta_factor"))]

    rewrite_config(tmp_path, **theirs, **dict.fromkeys((*of_transformers, "layer_types")))

    assert read_model_config(str(tmp_path)) == model_config
    for changes in ({"postnorm": False}, {"shared_intermediate_size": 8}, {"sliding_window": 4}):
        rewrite_config(tmp_path, **{**theirs, **changes})
        with pytest.raises(ModelError, match=next(iter(changes))):
            read_model_config(str(tmp_path))


def test_lightning_attention_is_a_plain_loop_over_tokens(ops, paged, tmp_path):
    """Its rates are those that the checkpoint brings, which are not read."""
    reference = tiny("minimax, all factors", tmp_path)
    model = load(tmp_path, ops)
    layer, theirs = model.layers[1].attention, reference.model.layers[1].self_attn
    torch.testing.assert_close(layer.rates, theirs.slope_rate.flatten(), atol=0, rtol=1e-6)
    x = torch.randn(40, 48)
    q, k, v = torch.nn.functional.silu(theirs.qkv_proj(x)).view(40, 6, 30).split(10, dim=-1)
    state, given = torch.zeros(6, 10, 10), []
    for at in range(40):
        state = layer.rates.neg().exp()[:, None, None] * state
        state = state + k[at, :, :, None] * v[at, :, None, :]
        given.append((q[at, :, None, :] @ state).flatten())
    normed = theirs.norm(torch.stack(given))
    expected = theirs.out_proj(theirs.output_gate(x).sigmoid() * normed) * (0.9 / 0.4)

    pages = paged(model)
    got = layer(x, None, pages.prepare([(0, PROMPT[:40])]))

    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


def test_a_block_that_several_layers_share_may_be_stored_under_each(ops, paged, tmp_path):
    reference = tiny("zamba2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    block = "model.layers.{}.shared_transformer."
    of_first = {name for name in weights if name.startswith(block.format(1))}
    assert of_first and not any(name.startswith(block.format(3)) for name in weights)
    again = {name.replace(block.format(1), block.format(3)): weights[name] for name in of_first}
    save_file({**weights, **{name: t.clone() for name, t in again.items()}}, tmp_path / "all")
    (tmp_path / "all").rename(tmp_path / "model.safetensors")

    model = load(tmp_path, ops)

    (logits,) = paged(model).step([(0, PROMPT)])
    torch.testing.assert_close(logits, expected_logits(reference), atol=1e-4, rtol=0)
    takings = [model.layers[at].shared for at in (1, 2, 3, 5, 6)]
    assert [taking.attention.out is takings[0].attention.out for taking in takings] == [
        *(True, False) * 2,
        True,
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"use_long_context": True},
        {"use_conv_bias": False},
        {"num_mem_blocks": 6},
        {"num_key_value_heads": 3},
        {"layers_block_type": ["mamba"] * 7},
        {"n_mamba_heads": 7},
    ],
)
def test_what_zamba2_cannot_be_is_refused_by_name(changes, tmp_path):
    tiny("zamba2", tmp_path)
    rewrite_config(tmp_path, **changes)

    with pytest.raises(ModelError, match=next(iter(changes))):
        read_model_config(str(tmp_path))


def test_kimis_own_way_to_list_layers_gives_the_same_card(tmp_path):
    tiny("kimi linear", tmp_path)
    model_config = read_model_config(str(tmp_path))
    own = {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "num_heads": 4,
        "head_dim": 10,
        "short_conv_kernel_size": 4,
    }
    names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "layer_types")
    plain = dict.fromkeys((*names, "mlp_layer_types"))

    rewrite_config(tmp_path, linear_attn_config=own, first_k_dense_replace=1, **plain)

    assert read_model_config(str(tmp_path)) == model_config
