"""Adapters on the emulated NPU against the CPU: in one batch, in graphs, in chunks, from the cache,
beside drafts and 8-bit weights, over ranks, and while they come and go.

The device computes in float16 and the CPU in float32; what one adapter more does to an answer is a
hundred times what rounding does.
"""

import shutil
from pathlib import Path

import pytest

import banyan
from banyan.base.errors import BanyanError
from tests.ascend.emulation.device import EmulatedNpu
from tests.ascend.emulation.test_quantised import MADE
from tests.models.families import tiny
from tests.models.quantised_checkpoints import rewrite_weights
from tests.support.emulated import IN_ALL, LATENT, ROOM, compare, start
from tests.support.lora import write_adapter
from tests.system.checkpoint import write_tiny_model
from tests.system.test_lora_beside import random_adapter

NEAR = 0.04
EXACT = {"dtype": "float32", "cpu_activations": "fp32"}
STEPS = {"eager": {"disable_cuda_graph": True}, "captured": {"cuda_graph_bs": [1, 2, 4, 8]}}
NAMES = ["a", None, "b", "a", None, "c"]
LENGTHS = (5, 40, 150, 21, 9, 33)
TARGETS = {"b": ("q_proj", "v_proj", "down_proj"), "c": ("o_proj", "gate_proj")}
RANKS = {"a": 8, "b": 4, "c": 3}
PAGE = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("npu") / "model")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, seed, RANKS[name], **_targets(name))
        for seed, name in enumerate("abc")
    }


def _targets(name: str) -> dict[str, tuple[str, ...]]:
    return {"targets": TARGETS[name]} if name in TARGETS else {}


@pytest.fixture(scope="module")
def named(folders) -> dict[str, object]:
    return {"lora_paths": [f"{name}={folder}" for name, folder in folders.items()]}


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [[(7 * i * i + 3 * i + n) % 95 + 2 for i in range(n)] for n in lengths]


def answers(
    engine: banyan.Engine,
    names: list[str | None] = NAMES,
    ids: list[list[int]] | None = None,
    tokens: int = 12,
    **params: object,
) -> list[dict]:
    asked = {"return_logprob": True, "top_logprobs_num": 2, "lora_path": names}
    params = {"temperature": 0, "max_new_tokens": tokens} | (params or {"ignore_eos": True})
    return engine.generate(input_ids=ids or prompts(), sampling_params=params, **asked)


@pytest.fixture(scope="module")
def cpu(model, named):
    with start(model, "cpu", **EXACT, **named) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(cpu) -> list[dict]:
    found, plain = answers(cpu), answers(cpu, [None] * len(NAMES))
    for name, one, other in zip(NAMES, found, plain, strict=True):
        pairs = zip(*(a["meta_info"]["output_token_logprobs"] for a in (one, other)), strict=True)
        assert (max(abs(a - b) for (a, *_), (b, *_) in pairs) > 25 * NEAR) == (name is not None)
    return found


@pytest.fixture(scope="module", params=STEPS)
def engine(npu, model, named, request):
    with start(model, "npu", dtype="float16", **named, **STEPS[request.param]) as engine:
        yield engine


def test_rows_of_several_adapters_and_of_none_say_what_they_say_on_the_cpu(engine, wanted) -> None:
    assert compare(answers(engine), wanted, NEAR) > 4 * len(NAMES)
    for at in (0, 1, 2):
        (alone,) = answers(engine, [NAMES[at]], [prompts()[at]])
        assert compare([alone], [wanted[at]], NEAR) > 0


def test_a_prefix_is_taken_from_the_cache_within_one_adapter(engine, cpu) -> None:
    (ids,) = prompts((2 * PAGE + 30,))
    for name in ("a", "b", None):
        for is_again in (False, True):
            (found,) = answers(engine, [name], [ids])
            assert (found["meta_info"]["cached_tokens"] >= 2 * PAGE) == is_again
            assert is_again or not found["meta_info"]["cached_tokens"]
            compare([found], answers(cpu, [name], [ids]), NEAR)


@pytest.mark.full
@pytest.mark.parametrize("steps", [pytest.param("eager", marks=IN_ALL), "captured"])
def test_prompts_in_chunks_and_requests_retracted_give_the_same_answers(
    npu, model, named, cpu, steps
) -> None:
    ids = prompts((200, 199, 198, 197, 196, 195))
    length = {"tokens": 120, "min_new_tokens": 120}
    few = {"chunked_prefill_size": 64, "max_total_tokens": 8 * PAGE}
    more = STEPS[steps] | {"schedule_conservativeness": 0.0}
    with start(model, "npu", dtype="float16", **named, **few, **more) as engine:
        found = answers(engine, ids=ids, **length)
    assert sum(a["meta_info"]["num_retractions"] for a in found) > 0
    assert compare(found, answers(cpu, ids=ids, **length), NEAR) > 2 * len(ids)


@pytest.mark.parametrize("steps", STEPS)
def test_a_decode_step_copies_as_much_as_without_adapters(
    npu: EmulatedNpu, model, named, steps
) -> None:
    """As `test_engine.py` counts it: slots have their adapters on the device."""
    params, counted = {"temperature": 0, "ignore_eos": True}, []
    with start(model, "npu", dtype="float16", **named, **STEPS[steps]) as engine:
        for tokens in (20, 60):
            before = npu.counters()
            engine.generate(
                input_ids=prompts((7, 7)),
                sampling_params=params | {"max_new_tokens": tokens},
                lora_path=["a", None],
            )
            after = npu.counters()
            counted.append({name: after[name] - before[name] for name in after})
    by_step = {name: (counted[1][name] - counted[0][name]) / 40 for name in counted[0]}
    by_step.pop("operators")
    into = {"eager": 2, "captured": 1}[steps]
    assert by_step == {"to_host": 2, "to_host_late": 2, "to_device": into, "waits": 1}


@pytest.mark.parametrize("steps", STEPS)
def test_graphs_follow_adapters_that_come_and_go(npu, model, folders, wanted, steps) -> None:
    """Of three there is room for two, so each load takes another one's place."""
    room = {"enable_lora": True, "max_lora_rank": 8, "max_loaded_loras": 2}
    flags = room | {"max_loras_per_batch": 2} | STEPS[steps]
    with start(model, "npu", dtype="float16", **flags) as engine:
        for name in "abc":
            engine.load_lora_adapter(name, str(folders[name]))
        for at in (2, 5, 0, 1, 5, 2):
            compare(answers(engine, [NAMES[at]], [prompts()[at]]), [wanted[at]], NEAR)
        compare(answers(engine), wanted, NEAR)
        assert engine.stats().adapters == 2
        engine.unload_lora_adapter("a")
        with pytest.raises(BanyanError, match="'a' is not loaded. There are: b, c"):
            answers(engine, ["a"], [prompts()[0]])
        engine.load_lora_adapter("a", str(folders["b"]))  # the name is another adapter's now
        compare(answers(engine, ["a"], [prompts()[2]]), [wanted[2]], NEAR)
        compare(answers(engine, [None], [prompts()[1]]), [wanted[1]], NEAR)


def test_an_answer_that_is_given_up_leaves_its_slot_to_another_adapter(engine, wanted) -> None:
    params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    for _ in range(3):
        asked = {"input_ids": prompts()[0], "sampling_params": params, "lora_path": "b"}
        stream = engine.generate(**asked, stream=True)
        next(stream)
        stream.close()
        compare(answers(engine), wanted, NEAR)


@pytest.mark.parametrize("steps", ["captured", pytest.param("eager", marks=IN_ALL)])
def test_with_drafts_it_says_the_same(npu, model, named, steps) -> None:
    ids = [[5 + 3 * (i % 7) + n % 5 for i in range(n)] for n in LENGTHS]
    drafts = {"speculative_algorithm": "NGRAM", "disable_adaptive_drafts": True}
    found = []
    for more in ({}, drafts | {"speculative_num_draft_tokens": 4}):
        with start(model, "npu", dtype="float16", **named, **STEPS[steps], **more) as engine:
            found.append(answers(engine, ids=ids, tokens=30))
    assert compare(found[1], found[0], NEAR) > 4 * len(ids)
    assert sum(one["meta_info"]["spec_num_correct_drafts"] for one in found[1]) > 0


def test_next_to_weights_of_8_bits_adapters_add_the_same(npu, model, named, tmp_path, cpu) -> None:
    """Of what they do to scores, not more is lost than of the scores."""
    eight = Path(shutil.copytree(model, tmp_path / "eight"))
    rewrite_weights(eight, MADE["modelslim, dynamic"])
    ids, names = [prompts((60,))[0]] * 3, ["a", "b", None]

    def scores(engine: banyan.Engine) -> list[list[float]]:
        asked = {"return_logprob": True, "logprob_start_len": 0, "lora_path": names}
        params = {"temperature": 0, "max_new_tokens": 1}
        found = engine.generate(input_ids=ids, sampling_params=params, **asked)
        return [[p[0] for p in one["meta_info"]["input_token_logprobs"][1:]] for one in found]

    exact = scores(cpu)
    with start(eight, "npu", dtype="bfloat16", **named) as engine:
        rounded = scores(engine)
    for mine, true, plain in zip(rounded, exact, [exact[2], exact[2], exact[0]], strict=True):
        near = sum(abs(a - b) for a, b in zip(mine, true, strict=True)) / len(true)
        far = sum(abs(a - b) for a, b in zip(mine, plain, strict=True)) / len(true)
        assert near < 0.2 * far


OWN = {"engine_mode": "normal"}
"""Replicas have processes of their own."""
LAYOUTS = {
    "tp": ("qwen3", {"tp_size": 2}),
    "pp": ("qwen3", {"tp_size": 2, "pp_size": 2}),
    "cp": ("qwen3", {"tp_size": 2, "attn_cp_size": 2}),
    "ep": ("qwen3 moe", {"tp_size": 2, "ep_size": 2}),
    "dp": ("qwen3 moe", {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True} | OWN),
    "latents": ("deepseek v3", {"tp_size": 2}),
}
SIZES = {
    "qwen3": {"head_dim": 128},
    "qwen3 moe": {"head_dim": 16, "num_experts": 8},
    "deepseek v3": LATENT,
}
OF = {
    "qwen3": ("q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"),
    "qwen3 moe": ("q_proj", "v_proj", "gate.weight"),
    "deepseek v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "tp" else IN_ALL) for name in LAYOUTS]
)
@pytest.mark.parametrize("steps", [pytest.param("eager", marks=IN_ALL), "captured"])
def test_ranks_say_what_one_says_on_the_cpu(npu, tmp_path, layout, steps) -> None:
    variant, flags = LAYOUTS[layout]
    base = tmp_path / "base"
    folders = {
        name: random_adapter(
            tiny(variant, base, **ROOM, **SIZES[variant]), tmp_path / name, *OF[variant], seed=seed
        )
        for seed, name in enumerate("ab", 2)
    }
    own = {"lora_paths": [f"{name}={folder}" for name, folder in folders.items()]}
    names = ["a", None, "b", "a"]
    ids = prompts((150, 40, 21, 5))
    with start(base, "cpu", **EXACT, **own) as engine:
        wanted = answers(engine, names, ids)
        others = answers(engine, [None, "a", None, "b"], ids)
    with start(base, "npu", dtype="float16", **own, **STEPS[steps] | flags) as engine:
        found = answers(engine, names, ids)
    assert compare(found, wanted, NEAR) > 2 * len(names)
    with pytest.raises(AssertionError):
        compare(found, others, NEAR)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"lora_target_modules": ["all", "lm_head"]}, "adapters of lm_head on npu: projections"),
        ({"max_lora_rank": 64, "lora_memory_gib": 0.001}, "8 adapters of rank 64 have .* --lora"),
    ],
)
def test_what_the_device_has_no_room_for_is_refused_at_the_start(npu, model, flags, why) -> None:
    room = {"enable_lora": True, "max_lora_rank": 8}
    with pytest.raises(BanyanError, match=why), start(model, "npu", **room | flags):
        pass


def test_what_cannot_be_served_is_refused_when_it_comes(npu, model, tmp_path, wanted) -> None:
    """And leaves nothing behind."""
    large = write_adapter(tmp_path / "large", 1, 4, lora_alpha=10**7)
    wide = write_adapter(tmp_path / "wide", 1, 9)
    room = {"enable_lora": True, "max_lora_rank": 8}
    with start(model, "npu", dtype="float16", **room) as engine:
        with pytest.raises(BanyanError, match="too large for float16. Give --dtype bfloat16"):
            engine.load_lora_adapter("large", str(large))
        with pytest.raises(BanyanError, match="rank 9"):
            engine.load_lora_adapter("wide", str(wide))
        compare(answers(engine, [None], [prompts()[1]]), [wanted[1]], NEAR)


def test_where_nobody_says_how_many_there_is_room_for_those_that_run_at_once(
    npu, model, folders
) -> None:
    room = {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 3}
    with start(model, "npu", dtype="float16", **room) as engine:
        assert engine.get_server_info()["facts"]["adapters"]["max_loaded"] == 3
        engine.load_lora_adapter("a", str(folders["a"]))
        one = engine.stats().adapter_bytes
        engine.load_lora_adapter("b", str(folders["b"]))
        assert engine.stats().adapter_bytes == 2 * one > 0
