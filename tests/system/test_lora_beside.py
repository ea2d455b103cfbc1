"""Adapters beside what else a start may ask for: stages, replicas, ranks, experts, a store of the
cache, and weights that are taken at run time."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.models.families import tiny
from tests.support.lora import write_adapter
from tests.system.checkpoint import write_tiny_model
from tests.system.serving import wait_until

PROMPT = [i * 7 % 90 + 3 for i in range(70)]
LONG = [i * 7 % 400 + 5 for i in range(900)]
"""As much as is worth a look into a store."""
PARAMS = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
EXACT = {"threads": 1, "max_total_tokens": 2048, "cpu_activations": "fp32"}
IS_ALL = os.environ.get("PARALLEL") == "all"


def ids(engine: Engine, adapter: str | None) -> list[int]:
    asked = {"input_ids": PROMPT, "sampling_params": PARAMS, "lora_path": adapter}
    return engine.generate(**asked)["output_ids"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("beside")
    return {name: write_adapter(root / name, seed) for seed, name in enumerate("ab")}


def paths(folders: dict[str, Path]) -> list[str]:
    return [f"{name}={folder}" for name, folder in folders.items()]


def random_adapter(
    model: torch.nn.Module, folder: Path, *targets: str, seed: int = 2, **more: object
) -> Path:
    """targets: modules, or parameters, which have a dot in their names."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        init_lora_weights=False,
        target_modules=[name for name in targets if "." not in name],
        target_parameters=[name for name in targets if "." in name],
        r=4,
        **more,
    )
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder)
    return folder


BY_THREE = {"num_key_value_heads": 3, "intermediate_size": 84}
LAYOUTS = [
    ("qwen2", BY_THREE, {"tp_size": 3}),
    ("qwen2 moe", {"num_experts": 6}, {"tp_size": 2, "ep_size": 2}),
    ("qwen2", {}, {"tp_size": 2, "pp_size": 2}),
    ("deepseek v3", {}, {"tp_size": 2}),
    ("qwen3 moe", {**BY_THREE, "moe_intermediate_size": 24}, {"tp_size": 3}),
    ("deepseek v2", {"n_routed_experts": 6}, {"tp_size": 2}),
    ("mixtral", {}, {"pp_size": 2}),
]
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
TARGETS = {
    "qwen2": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
    "qwen2 moe": ("q_proj", "o_proj", *EXPERTS, "gate.weight"),
    "qwen3 moe": ("v_proj", *EXPERTS, "gate.weight"),
    "deepseek v2": ("q_proj", *EXPERTS),
    "mixtral": ("o_proj", *EXPERTS, "gate.weight"),
    "deepseek v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}


@pytest.mark.parametrize(("variant", "more", "layout"), LAYOUTS if IS_ALL else LAYOUTS[:1])
def test_ranks_answer_as_one_does(variant, more, layout, tmp_path) -> None:
    model = tiny(variant, tmp_path / "base", **more)
    path = random_adapter(model, tmp_path / "a", *TARGETS[variant])
    flags = {**EXACT, "skip_tokenizer_init": True, "lora_paths": [f"a={path}"]}
    with Engine(str(tmp_path / "base"), engine_mode="inprocess", **flags) as alone:
        expected = {name: ids(alone, name) for name in ("a", None)}
    assert expected["a"] != expected[None]
    with Engine(str(tmp_path / "base"), **flags, **layout) as shared:
        assert {name: ids(shared, name) for name in expected} == expected


DIVIDED = {"tp_size": 2, "attn_cp_size": 2}
JOINED = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
SHARING = {
    "qwen2 moe": [
        {**DIVIDED, "ep_size": 2},
        JOINED,
        {**DIVIDED, "cp_strategy": "interleave"},
        {**JOINED, "moe_a2a_backend": "deepep"},
        {**DIVIDED, "disable_cuda_graph": True},
        {**DIVIDED, "speculative_algorithm": "NGRAM"},
        {**JOINED, "disable_cuda_graph": True},
    ],
    "deepseek v3": [DIVIDED, {**JOINED, "moe_dense_tp_size": 1}],
}


@pytest.mark.parametrize("variant", SHARING if IS_ALL else ["qwen2 moe"])
def test_ranks_that_share_out_a_step_give_each_token_what_its_own_adapter_adds(
    variant, tmp_path
) -> None:
    base, targets = tmp_path / "base", TARGETS[variant]
    more = {"num_experts": 6} if variant == "qwen2 moe" else {}
    folders = {
        name: random_adapter(tiny(variant, base, **more), tmp_path / name, *targets, seed=seed)
        for seed, name in enumerate("ab", 2)
    }
    flags = {**EXACT, "skip_tokenizer_init": True, "lora_paths": paths(folders)}
    names = ["a", None, "b", "a", "b", None]
    prompts = [PROMPT[at : 20 + 9 * at] for at in range(6)]

    def answers(engine: Engine, names: list[str | None]) -> tuple[list[list[int]], np.ndarray]:
        """Tokens, and their log-probabilities."""
        asked = {"sampling_params": PARAMS, "lora_path": names, "return_logprob": True}
        found = engine.generate(input_ids=prompts, **asked)
        values = [[v for v, *_ in one["meta_info"]["output_token_logprobs"]] for one in found]
        return [one["output_ids"] for one in found], np.array(values)

    with Engine(str(base), engine_mode="inprocess", **flags) as alone:
        tokens, values = answers(alone, names)
        changed = np.abs(values - answers(alone, [None] * 6)[1]).max(1) > 1e-2
    assert changed.tolist() == [name is not None for name in names]
    for layout in SHARING[variant] if IS_ALL else SHARING[variant][1:2]:
        with Engine(str(base), **flags, **layout, chunked_prefill_size=32) as shared:
            for _ in range(2):  # then from the cache
                same, close = answers(shared, names)
                assert same == tokens and np.abs(close - values).max() < 1e-5, layout
            if "dp_size" in layout:
                with pytest.raises(BanyanError, match="adapters and memory stay as they are"):
                    shared.unload_lora_adapter("a")


ALIKE = [
    ("deepseek v3", ("kv_b_proj",), {}),
    ("deepseek v2", (*EXPERTS, "gate.weight"), {}),
    ("mixtral", EXPERTS, {"quantization": "q8_0", "cpu_activations": "auto"}),
]


@pytest.mark.parametrize(("variant", "targets", "more"), ALIKE)
def test_an_adapter_answers_alike_recorded_in_chunks_and_in_any_company(
    variant, targets, more, tmp_path
) -> None:
    model = tiny(variant, tmp_path / "base")
    path = random_adapter(model, tmp_path / "a", *targets)
    flags = {**EXACT, "skip_tokenizer_init": True, "lora_paths": [f"a={path}"], **more}
    own = {"engine_mode": "inprocess"}
    with Engine(str(tmp_path / "base"), **flags, **own, disable_cuda_graph=True) as eager:
        expected = {name: ids(eager, name) for name in ("a", None)}
    assert expected["a"] != expected[None]
    with Engine(str(tmp_path / "base"), **flags, **own, chunked_prefill_size=16) as recorded:
        assert recorded.get_server_info()["facts"]["steps"] == "recorded"
        names = ["a", None, "a", None]
        asked = {"input_ids": [PROMPT] * 4, "sampling_params": PARAMS, "lora_path": names}
        found = [answer["output_ids"] for answer in recorded.generate(**asked)]
        assert found == [expected[name] for name in names]
        assert ids(recorded, "a") == expected["a"], "from the cache"


def test_stages_and_replicas_answer_as_one_does(folders, tiny_model) -> None:
    flags = {**EXACT, "lora_paths": paths(folders)}
    with Engine(str(tiny_model), engine_mode="inprocess", **flags) as alone:
        expected = {name: ids(alone, name) for name in ("a", "b", None)}
    with Engine(str(tiny_model), pp_size=2, **flags) as staged:
        assert {name: ids(staged, name) for name in expected} == expected
    with Engine(str(tiny_model), dp_size=2, **{**flags, "lora_paths": paths(folders)[:1]}) as many:
        many.load_lora_adapter("b", str(folders["b"]))
        for name in ("a", "b", None) * 3:  # more often than there are replicas
            assert ids(many, name) == expected[name]


def test_a_store_keeps_prefixes_of_adapters_and_of_their_versions_apart(
    folders, tiny_model, tmp_path
) -> None:
    mine = Path(shutil.copytree(folders["a"], tmp_path / "mine"))
    pages = tmp_path / "pages"
    flags = {
        **EXACT,
        "max_total_tokens": 4096,
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": {"path": str(pages)},
        "hicache_storage_prefetch_policy": "wait_complete",
        "lora_paths": [f"mine={mine}", f"b={folders['b']}"],
    }

    def asked(name: str | None) -> tuple[list[int], int]:
        """The answer, and the tokens whose pages came from the store. An engine for each, as one
        that has measured both may find computing quicker than reading."""
        before = len([*pages.rglob("*.page")])
        with Engine(str(tiny_model), engine_mode="inprocess", **flags) as engine:
            answer = engine.generate(input_ids=LONG, sampling_params=PARAMS, lora_path=name)
            stored = answer["meta_info"]["cached_tokens_details"]["storage"]
            all_now = before + (0 if stored else 56)
            wait_until(lambda: len([*pages.rglob("*.page")]) >= all_now, 60, "all to be stored")
            return answer["output_ids"], stored

    def started() -> dict[str | None, tuple[list[int], int]]:
        return {name: asked(name) for name in ("mine", "b", None)}

    first, again = started(), started()
    assert [tokens for _, tokens in first.values()] == [0, 0, 0]
    assert [tokens for _, tokens in again.values()] == [896, 896, 896]
    assert {name: got[0] for name, got in again.items()} == {n: g[0] for n, g in first.items()}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folders["b"] / name, mine / name)
    other = started()
    assert [tokens for _, tokens in other.values()] == [0, 896, 896]
    assert other["mine"][0] == first["b"][0] != first["mine"][0]


def test_adapters_lie_next_to_weights_that_are_taken_at_run_time(
    folders, tiny_model, tmp_path
) -> None:
    other = write_tiny_model(tmp_path / "other", seed=7)
    flags = {**EXACT, "lora_paths": paths(folders), "engine_mode": "inprocess"}
    with Engine(str(other), **flags) as engine:
        expected = {name: ids(engine, name) for name in ("a", "b", None)}
    with Engine(str(tiny_model), **flags) as engine:
        before = {name: ids(engine, name) for name in expected}
        taken, why = engine.update_weights_from_disk(str(other))
        assert taken, why
        assert {name: ids(engine, name) for name in expected} == expected
        assert all(before[name] != expected[name] for name in expected)
