"""Two processes that share a model give the logits of one."""

from dataclasses import replace

import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.layers.build import Build
from banyan.layers.weight_slot import ShardRule, WeightSlot
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model, load_tower
from banyan.ops.bind import bind
from banyan.ops.stored import STORAGE_TYPES, StoredWeight
from banyan.parallel.groups import ALONE, Group, Groups, GroupsConfig, open_groups
from tests.models.conftest import PagedModel
from tests.models.families import tiny
from tests.parallel.ranks import rank_processes
from tests.support.gguf import convert
from tests.support.multimodal import random_content
from tests.support.multimodal import tiny as tiny_multimodal

CPU = torch.device("cpu")
PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(30)]


def _logits(model_config, groups=ALONE):
    ops = bind("cpu", CPU, torch.float32, frozenset(), model_config.head_dim)
    model = load_model(model_config, Build(ops, groups))
    return PagedModel(model).step([(0, PROMPT)])[0]


def _rank(rank, model_configs, address, results):
    torch.set_num_threads(1)
    groups = open_groups(GroupsConfig(rank, 2, address, timeout_s=60))
    results.put((rank, [_logits(model_config, groups).tolist() for model_config in model_configs]))


def test_two_ranks_give_the_logits_of_one(tiny_llama, tmp_path):
    """GQA, one shared kv head, biases, an odd vocabulary, ties, blocks, and other families."""
    variants = [
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128},
    ]
    model_configs = [
        tiny_llama(name=f"m{i}", **variant)[1] for i, variant in enumerate(variants[:2])
    ]
    quantised, model_config = tiny_llama(name="m2", **variants[2])
    convert(quantised, tmp_path / "m2.gguf", "Q4_1")
    model_configs.append(replace(model_config, path=str(tmp_path / "m2.gguf"), format="gguf"))
    alike = ("gemma2", "qwen3, bias", "starcoder2", "cohere2", "glm4", "phi3", "hunyuan")
    states = (
        "lfm2",
        "bamba",
        "bamba, one group, biases",
        "granite hybrid",
        "falcon h1",
        "kimi linear",
        "jamba",
        "minimax, all factors",
        "qwen3.5",
        "nemotron h",
        "qwen3 next",
        "zamba2",
    )
    for variant in (*alike, "olmo2", "olmo2, one kv head", *states):
        tiny(variant, tmp_path / variant)
        model_configs.append(read_model_config(str(tmp_path / variant)))
    context = rank_processes()
    results = context.Queue()
    address = f"file://{tmp_path}/meet"
    ranks = [
        context.Process(target=_rank, args=(r, model_configs, address, results)) for r in range(2)
    ]
    for rank in ranks:
        rank.start()

    answers = dict(results.get(timeout=120) for _ in ranks)

    for rank in ranks:
        rank.join(60)
    for index, model_config in enumerate(model_configs):
        expected = _logits(model_config)
        most = 1e-5 if model_config.state is None else 1e-4  # a state carries differences on
        for rank in range(2):
            logits = torch.tensor(answers[rank][index])
            torch.testing.assert_close(logits, expected, atol=most, rtol=0)


TOWERS = ("qwen2_5_vl", "qwen3_vl", "mistral3", "internvl_6b")
GRID = (2, 6, 6)


def _features(model_config, groups=ALONE):
    ops = bind("cpu", CPU, torch.float32, frozenset(), 16)
    tower = load_tower(model_config, Build(ops, groups))
    config = tower.config
    values = config.channels * config.temporal_patch * config.patch**2
    state = tower.begin(random_content(2 * 6 * 6, values), GRID)
    tower.run(state, 0, tower.blocks)
    return tower.end(state)


def _tower_rank(rank, model_configs, address, results):
    torch.set_num_threads(1)
    groups = open_groups(GroupsConfig(rank, 2, address, timeout_s=60))
    results.put(
        (rank, [_features(model_config, groups).tolist() for model_config in model_configs])
    )


def test_two_ranks_give_the_features_of_one(tmp_path):
    model_configs = []
    for family in TOWERS:
        tiny_multimodal(family, tmp_path / family)
        model_configs.append(read_model_config(str(tmp_path / family)))
    context = rank_processes()
    results = context.Queue()
    address = f"file://{tmp_path}/meet"
    ranks = [
        context.Process(target=_tower_rank, args=(r, model_configs, address, results))
        for r in range(2)
    ]
    for rank in ranks:
        rank.start()

    answers = dict(results.get(timeout=120) for _ in ranks)

    for rank in ranks:
        rank.join(60)
    assert answers[0] == answers[1]
    for family, features, model_config in zip(TOWERS, answers[0], model_configs, strict=True):
        expected = _features(model_config)
        error = (torch.tensor(features) - expected).abs().max() / expected.abs().max()
        assert 0 < error < 1e-5, family  # the sum over ranks has another order


def shared_by_two(ops) -> Build:
    """Of a rank that never talks: the refusal comes before."""
    return Build(ops, Groups.of(Group(0, 2, object())))


def test_heads_that_cannot_be_shared_are_refused(tiny_llama, ops):
    _, model_config = tiny_llama(num_attention_heads=3, num_key_value_heads=3)

    with pytest.raises(ConfigError, match="3 units of 16 cannot be shared by 2 ranks"):
        load_model(model_config, shared_by_two(ops))


@pytest.mark.parametrize(
    ("variant", "sizes", "units"),
    [
        ("qwen3 next", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}, "3 units"),
        ("bamba", {"mamba_n_heads": 3, "mamba_n_groups": 3}, "3 units"),
        (
            "lfm2",
            {"hidden_size": 33, "num_attention_heads": 3, "num_key_value_heads": 3},
            "33 units",
        ),
    ],
)
def test_states_that_cannot_be_shared_are_refused(variant, sizes, units, ops, tmp_path):
    more = {"head_dim": 12} if variant == "lfm2" else {}
    tiny(variant, tmp_path, **sizes, **more)

    with pytest.raises(ConfigError, match=f"{units}.* cannot be shared by 2 ranks"):
        load_model(read_model_config(str(tmp_path)), shared_by_two(ops))


@pytest.mark.parametrize(("type_name", "stays"), [("Q8_0", True), ("Q6_K", False), ("F32", True)])
def test_a_cut_through_blocks_is_known(type_name, stays):
    storage = STORAGE_TYPES[type_name]
    row_bytes = 256 // storage.values * storage.size_bytes
    raw = torch.zeros(4 * row_bytes, dtype=torch.uint8)
    weight = StoredWeight.from_bytes(type_name, (4, 256), raw)
    group = Group(1, 2, object())

    def slot(dim):
        return WeightSlot({"": (4, 256)}, {"": ShardRule(dim)}, group)

    assert slot(1).keeps_blocks("", weight) == stays
    assert (ShardRule(1).cut(weight, group).type == type_name) == stays
    assert slot(0).keeps_blocks("", weight)
