"""Families of experts, and latent attention, against transformers and against themselves."""

import pytest
import torch

from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.ops import reference
from banyan.ops.bind import bind
from banyan.ops.experts_api import Routing
from banyan.parallel.groups import Groups, GroupsConfig, open_groups
from tests.models.conftest import PagedModel
from tests.models.families import rewrite_config, tiny
from tests.models.test_step import first
from tests.parallel.ranks import rank_processes
from tests.support.logits import PROMPT, expected_logits, load

CPU = torch.device("cpu")


def test_latent_attention_keeps_one_vector_per_token(ops, tmp_path):
    tiny("deepseek v3", tmp_path)
    model_config = read_model_config(str(tmp_path))

    caches = load_model(model_config, Build(ops)).caches

    kept = [{name: tensor.shape for name, tensor in c.tensors.items()} for c in caches]
    assert kept == [{"latent": (14,), "key": (6,)}] * model_config.num_layers
    assert model_config.kept_per_token == 20 < 2 * model_config.num_kv_heads * 8


@pytest.mark.parametrize("taken", ["tp", "experts apart"])
def test_two_ranks_give_the_logits_of_one(taken, ops, tmp_path):
    variants = ["deepseek v3", "qwen3 moe, all eight", "minimax m2"]
    if taken == "experts apart":
        variants.append("qwen2 moe, some dense")
    else:
        variants += [
            "gpt-oss",
            "glm moe dsa",
            "phi moe, all biases, longrope",
            "mixtral",
            "deepseek v2",
            "qwen2 moe",
            "ernie 4.5 moe",
            "granite moe",
            "step 3.7",
        ]
    for variant in variants:
        tiny(variant, tmp_path / variant)
    if taken == "tp":
        variants.append("step 3")
        first(tmp_path / "step 3")
    model_configs = [read_model_config(str(tmp_path / variant)) for variant in variants]
    context = rank_processes()
    results = context.Queue()
    address = f"file://{tmp_path}/meet"
    ranks = [
        context.Process(target=_rank, args=(r, model_configs, taken, address, results))
        for r in range(2)
    ]
    for rank in ranks:
        rank.start()

    answers = dict(results.get(timeout=120) for _ in ranks)

    for rank in ranks:
        rank.join(60)
    for index, model_config in enumerate(model_configs):
        (expected,) = PagedModel(load_model(model_config, Build(ops))).step([(0, PROMPT)])
        for rank in range(2):
            logits = torch.tensor(answers[rank][index])
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


def _rank(rank, model_configs, taken, address, results):
    torch.set_num_threads(1)
    groups = open_groups(GroupsConfig(rank, 2, address, timeout_s=60))
    if taken == "experts apart":
        groups = Groups.with_experts_apart(groups.world)
    ops = bind("cpu", CPU, torch.float32, frozenset(), 16)
    found = []
    for model_config in model_configs:
        model = load_model(model_config, Build(ops, groups))
        found.append(PagedModel(model).step([(0, PROMPT)])[0].tolist())
    results.put((rank, found))


def test_the_lower_expert_wins_a_tie():
    x, weight = torch.ones(2, 3), torch.ones(5, 3)

    ids, weights = reference.route(x, weight, None, Routing(per_token=2))

    assert ids.tolist() == [[0, 1], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_layers_past_the_last_are_for_drafting_and_not_read(ops, paged, tmp_path):
    model = tiny("deepseek v3", tmp_path)
    with torch.no_grad():
        whole = expected_logits(model)
        del model.model.layers[3]
        less = expected_logits(model)
    rewrite_config(tmp_path, num_hidden_layers=3)

    (logits,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])

    torch.testing.assert_close(logits, less, atol=1e-4, rtol=0)
    assert (logits - whole).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_group": 5}, "n_group.*divisor of 12 experts"),
        ({"topk_group": 9}, "topk_group"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim.*even"),
        ({"scoring_func": "softmax"}, "scoring_func.*sigmoid"),
        ({"n_routed_experts": 0}, "n_routed_experts"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
    ],
)
def test_experts_that_cannot_be_are_refused_by_name(changes, match, tmp_path):
    tiny("deepseek v3", tmp_path)
    rewrite_config(tmp_path, **changes)

    with pytest.raises(ModelError, match=match):
        read_model_config(str(tmp_path))


def test_a_missing_expert_is_named(ops, tmp_path):
    from safetensors.torch import load_file, save_file

    tiny("qwen3 moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.mlp.experts.4.up_proj.weight"]
    save_file(tensors, path)

    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.2\.mlp.*up4"):
        load(tmp_path, ops)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"index_topk": 0}, "index_topk must be in"),
        ({"index_n_heads": None}, "index_n_heads must be .*missing"),
        ({"index_head_dim": 6}, "index_head_dim must be in"),
        ({"q_lora_rank": None}, "q_lora_rank must be a whole number.*low-rank queries"),
        ({"indexer_types": ["full", "shared"] * 2}, "indexer_types.*no layer takes the choice"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 4 of dense, sparse"),
    ],
)
def test_an_indexer_that_cannot_be_is_refused_by_name(changes, match, tmp_path):
    tiny("deepseek v3.2", tmp_path)
    rewrite_config(tmp_path, **changes)

    with pytest.raises(ModelError, match=match):
        read_model_config(str(tmp_path))


def test_an_indexer_keeps_its_keys_in_the_pages_of_the_latents(ops, tmp_path):
    tiny("deepseek v3.2", tmp_path)
    model_config = read_model_config(str(tmp_path))

    caches = load_model(model_config, Build(ops)).caches

    kept = [{name: tensor.shape for name, tensor in c.tensors.items()} for c in caches]
    of_layer = {"latent": (14,), "key": (6,), "index": (4,), "index_turned": (6,)}
    assert kept == [of_layer] * model_config.num_layers
    assert model_config.kept_per_token == 30


def test_a_context_within_the_choice_gives_the_logits_of_dense_attention(ops, paged, tmp_path):
    tiny("deepseek v3.2", tmp_path, index_topk=len(PROMPT))
    sparse = load(tmp_path, ops)
    (logits,) = paged(sparse).step([(0, PROMPT)])
    for layer in sparse.layers:
        layer.attention.indexer = None

    (dense,) = paged(sparse).step([(0, PROMPT)])

    assert torch.equal(logits, dense)
