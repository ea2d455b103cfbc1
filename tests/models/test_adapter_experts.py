"""Adapters of experts and routers against PEFT, in the forms in which checkpoints have them."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from banyan.base.errors import ConfigError
from banyan.lora.adapter_config import KINDS, WEIGHTS
from banyan.lora.load import load_adapter
from tests.models.families import tiny
from tests.support.peft import PROMPT, edited, enter, opened, random_peft, show

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = "mlp.gate.weight"
STACKED = {
    "mixtral": {"target_parameters": [*EXPERTS, ROUTER], "target_modules": ["q_proj"]},
    "qwen3 moe": {"target_parameters": EXPERTS, "target_modules": []},
    "deepseek v2": {
        "target_parameters": [*EXPERTS, ROUTER],
        "target_modules": ["q_proj", "kv_a_proj_with_mqa"],
    },
    "gpt-oss": {"target_parameters": EXPERTS, "target_modules": ["o_proj"]},
}


def logits_of(adapted):
    """With the adapter, and without."""
    with torch.no_grad():
        expected = adapted(torch.tensor([PROMPT])).logits[0]
        with adapted.disable_adapter():
            plain = adapted(torch.tensor([PROMPT])).logits[0]
    assert (expected - plain).abs().max() > 0.02
    return expected, plain


def check(folder, base_folder, logits, ops, paged):
    """The model gives that with the adapter and without it, both in one step."""
    model, base = opened(base_folder, ops, max_rank=128, kinds=KINDS)
    loaded = load_adapter(str(folder), base)
    assert loaded.experts
    enter(base, 2, loaded)
    show(base, [2] * len(PROMPT) + [0] * len(PROMPT))
    found = paged(model, num_requests=2).step([(0, PROMPT), (1, PROMPT)])
    for mine, expected in zip(found, logits, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", STACKED)
def test_stacked_experts_give_the_logits_of_peft(variant, ops, paged, tmp_path):
    adapted = random_peft(
        tiny(variant, tmp_path / "base"),
        tmp_path / "a",
        r=3,
        lora_alpha=2,
        rank_pattern={"experts.down_proj": 5},
        alpha_pattern={"layers.1.mlp.experts.gate_up_proj": 4},
        **STACKED[variant],
    )
    check(tmp_path / "a", tmp_path / "base", logits_of(adapted), ops, paged)


@pytest.mark.parametrize("rank", [1, 64])
def test_experts_of_any_rank_are_served(rank, ops, paged, tmp_path):
    more = {"r": rank, "lora_alpha": 2, "target_modules": [], "use_rslora": True}
    reference = tiny("qwen3 moe", tmp_path / "base")
    adapted = random_peft(reference, tmp_path / "a", target_parameters=EXPERTS, **more)
    check(tmp_path / "a", tmp_path / "base", logits_of(adapted), ops, paged)


def test_targets_that_peft_turns_into_stacks_are_served(ops, paged, tmp_path):
    """It doubles rank and alpha of gate and up, by a pattern of its own."""
    reference = tiny("qwen3 moe", tmp_path / "base")
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj", "gate"]
    adapted = random_peft(reference, tmp_path / "a", target_modules=targets, r=2, lora_alpha=1)
    assert "gate_up_proj" in json.dumps(facts_of(tmp_path / "a")["rank_pattern"])
    check(tmp_path / "a", tmp_path / "base", logits_of(adapted), ops, paged)


def facts_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def apart(folder, count, names=("gate_proj", "up_proj", "down_proj"), block="mlp"):
    """The adapter with a module for each expert, as models without stacks have them."""
    tensors = load_file(folder / WEIGHTS)
    for stem in {n.partition(".mlp.experts")[0] for n in tensors if ".experts" in n}:
        pairs = [
            [tensors.pop(f"{stem}.mlp.experts{base}.lora_{part}.weight") for part in "AB"]
            for base in (".base_layer", "")
        ]
        for expert in range(count):
            (down, up), (last_down, last_up) = (
                (
                    a.reshape(count, -1, a.shape[1])[expert],
                    b.reshape(len(b), -1, count)[..., expert],
                )
                for a, b in pairs
            )
            halves = np.split(up, 2)
            both = [(down, halves[0]), (down, halves[1]), (last_down, last_up)]
            for name, matrices in zip(names, both, strict=True):
                for part, matrix in zip("AB", matrices, strict=True):
                    own = f"{stem}.{block}.experts.{expert}.{name}.lora_{part}.weight"
                    tensors[own] = np.ascontiguousarray(matrix)
    save_file(tensors, folder / WEIGHTS)
    facts = facts_of(folder)
    facts |= {"target_parameters": None, "target_modules": ["q_proj", *names]}
    (folder / "adapter_config.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("variant", ["mixtral", "qwen3 moe"])
def test_experts_one_by_one_give_the_logits_of_peft(variant, ops, paged, tmp_path):
    more = {"target_parameters": EXPERTS, "target_modules": ["q_proj"]}
    adapted = random_peft(tiny(variant, tmp_path / "base"), tmp_path / "a", r=3, **more)
    logits = logits_of(adapted)
    if variant == "mixtral":
        apart(tmp_path / "a", 3, ("w1", "w3", "w2"), "block_sparse_moe")
    else:
        apart(tmp_path / "a", 5)
    check(tmp_path / "a", tmp_path / "base", logits, ops, paged)


def one_by_one(ops, tmp_path, **more):
    """A base, and an adapter of its experts one by one that is alike in all of them but for B of
    gate and up, and A of down."""
    random_peft(
        tiny("qwen3 moe", tmp_path / "base"),
        tmp_path / "a",
        **{"target_parameters": EXPERTS, "target_modules": ["q_proj"], "r": 3, **more},
    )
    apart(tmp_path / "a", 5)
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    for name in [n for n in tensors if ".experts." in n]:
        block, _, rest = name.partition(".experts.")
        if ("lora_B" in name) == ("down_proj" in name):
            tensors[name] = tensors[f"{block}.experts.0{rest[1:]}"].copy()
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    _, base = opened(tmp_path / "base", ops, kinds=KINDS)
    return base, tensors


def assert_same(found, expected):
    assert found.experts.keys() == expected.experts.keys()
    for name, experts in expected.experts.items():
        assert found.experts[name].keys() == experts.keys()
        for expert, parts in experts.items():
            mine = sorted(found.experts[name][expert], key=lambda part: part.part)
            for own, its in zip(mine, sorted(parts, key=lambda part: part.part), strict=True):
                assert (own.part, own.scale) == (its.part, its.scale)
                assert torch.equal(own.down, its.down) and torch.equal(own.up, its.up)


def stack_of(tensors, name):
    """All experts of a tensor of the first one, in three dimensions."""
    block, _, rest = name.partition(".experts.0.")
    return np.stack([tensors[f"{block}.experts.{e}.{rest}"] for e in range(5)])


def test_experts_that_share_their_outer_matrices_are_served(ops, tmp_path):
    base, tensors = one_by_one(ops, tmp_path)
    expected = load_adapter(str(tmp_path / "a"), base)
    together = {n: t for n, t in tensors.items() if ".experts." not in n}
    for name in [n for n in tensors if ".experts.0." in n]:
        whole = stack_of(tensors, name)
        is_outer = ("lora_B" in name) == ("down_proj" in name)
        block, _, rest = name.partition(".experts.0.")
        together[f"{block}.experts.{rest}"] = whole[:1] if is_outer else whole
    save_file(together, tmp_path / "a" / WEIGHTS)
    found = load_adapter(str(tmp_path / "a"), base)
    assert_same(found, expected)


def test_a_gguf_adapter_of_experts_is_the_one_that_it_was_made_of(ops, tmp_path):
    import gguf

    base, tensors = one_by_one(ops, tmp_path)
    expected = load_adapter(str(tmp_path / "a"), base)
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name in [n for n in tensors if ".experts.0." in n]:
        layer, target = name.split(".")[4], name.split(".")[-3]
        stem = f"blk.{layer}.ffn_{target.removesuffix('_proj')}_exps.weight"
        writer.add_tensor(
            f"{stem}.lora_{name.split('lora_')[1][0].lower()}", stack_of(tensors, name)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same(load_adapter(str(path), base), expected)


def without(*parts):
    def change(tensors):
        for name in [n for n in tensors if all(part in n for part in parts)]:
            del tensors[name]

    return change


def cut(tensors):
    for name in [n for n in tensors if "experts.base_layer.lora_B" in n]:
        tensors[name] = tensors[name][:, :-1].copy()


def fewer(tensors):
    """One expert less in each stack."""
    for name in [n for n in tensors if ".experts" in n]:
        whole = tensors[name]
        rows = len(whole) // 5 * 4 if "lora_A" in name else whole.shape[1] // 5 * 4
        tensors[name] = (whole[:rows] if "lora_A" in name else whole[:, :rows]).copy()


def narrower(tensors):
    for name in [n for n in tensors if "experts.lora_A" in n]:
        tensors[name] = tensors[name][:, :-2].copy()


@pytest.mark.parametrize(
    ("kinds", "is_apart", "change", "text"),
    [
        ((), False, None, "experts.*started without memory for that.*modules all experts"),
        (KINDS, False, cut, "which do not match experts; its configuration says rank 3"),
        (KINDS, False, fewer, "it is of 4 experts, and the model has 5"),
        (KINDS, False, narrower, "it has 18 inputs and 48 outputs there, 20 and 48 here"),
        (KINDS, False, without("layers.1.", "experts"), "lacks the matrices of 2 projections"),
        (KINDS, False, without("base_layer"), "1 stacked parameters, and .* names 2"),
        (KINDS, True, without("layers.2.", "experts.3.up"), "lacks .*up_proj of expert 3"),
    ],
)
def test_experts_that_do_not_fit_say_why(kinds, is_apart, change, text, ops, tmp_path):
    more = {"target_parameters": EXPERTS, "target_modules": ["q_proj"]}
    random_peft(tiny("qwen3 moe", tmp_path / "base"), tmp_path / "a", r=3, **more)
    if is_apart:
        apart(tmp_path / "a", 5)
    if change is not None:
        edited(tmp_path / "a", change)
    _, base = opened(tmp_path / "base", ops, kinds=kinds)
    with pytest.raises(ConfigError, match=text):
        load_adapter(str(tmp_path / "a"), base)
