"""The engine on the emulated NPU: a tiny Llama, from a prompt to its tokens, against the CPU.

Both compute in bfloat16 and round at different places, so log-probabilities are near each other,
and tokens are equal where the CPU's best is clear of the second.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import banyan
from banyan.base.errors import BanyanError
from tests.ascend.emulation.device import MEMORY_BYTES, EmulatedNpu
from tests.system.checkpoint import LAYERS, write_tiny_model

NEAR = 0.06
"""How far apart two log-probabilities may be; CLEAR is how far the best must be from the second.
The most that was seen is 0.036."""
CLEAR = 2 * NEAR
PAGE = 128
STEPS = {
    "eager": {"disable_cuda_graph": True},
    "captured": {"cuda_graph_bs": [1, 2, 4, 8]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("npu") / "model")


@pytest.fixture(scope="module")
def start(model, npu):
    @contextlib.contextmanager
    def start(device: str = "npu", **flags: object) -> Iterator[banyan.Engine]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BANYAN_NPU", "tests.ascend.emulation")
            patch.setenv("BANYAN_NPU_CHECKS", "1")
            with banyan.Engine(
                str(model),
                **{"device": device, "dtype": "bfloat16", "max_total_tokens": 2048}
                | {"engine_mode": "inprocess", "page_size": PAGE, "threads": 1}
                | flags,
            ) as engine:
                yield engine

    return start


@pytest.fixture(scope="module")
def cpu(start):
    with start("cpu") as engine:
        yield engine


@pytest.fixture(scope="module", params=STEPS)
def engine(start, request):
    with start(**STEPS[request.param]) as engine:
        yield engine


def prompts(count: int, length: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(2, 300, (count, length), generator=draw).tolist()


def answer(engine: banyan.Engine, ids: list[list[int]], tokens: int = 12) -> list[dict]:
    params = {"temperature": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    return engine.generate(input_ids=ids, sampling_params=params, **asked)


def clear_part(found: dict) -> int:
    """Tokens before the first whose runner-up is near."""
    for at, pair in enumerate(found["meta_info"]["output_top_logprobs"]):
        if pair[0][0] - pair[1][0] < CLEAR:
            return at
    return len(found["output_ids"])


def compare(mine: list[dict], theirs: list[dict]) -> int:
    """Hold answers against those of the CPU; returns how many tokens were compared."""
    compared = 0
    for got, wanted in zip(mine, theirs, strict=True):
        count = clear_part(wanted)
        assert got["output_ids"][:count] == wanted["output_ids"][:count]
        for part in ("output_token_logprobs", "input_token_logprobs"):
            pairs = zip(got["meta_info"][part][:count], wanted["meta_info"][part], strict=False)
            for (a, *_), (b, *_) in pairs:
                assert a is b is None or abs(a - b) < NEAR
        compared += count
    return compared


@pytest.mark.parametrize(("count", "length"), [(1, 5), (3, 40), (6, 150), (9, 20)])
def test_a_tiny_llama_says_what_it_says_on_the_cpu(engine, cpu, count, length):
    ids = prompts(count, length)
    assert compare(answer(engine, ids), answer(cpu, ids)) > 2 * count


def test_a_prefix_is_taken_from_the_cache_and_changes_nothing(engine, cpu):
    first, second = prompts(2, 300)
    second = first[: 2 * PAGE] + second[:30]
    answer(engine, [first])
    (again,) = answer(engine, [second])
    assert again["meta_info"]["cached_tokens"] >= 2 * PAGE
    compare([again], answer(cpu, [second]))


@pytest.mark.parametrize("steps", [pytest.param("eager", marks=pytest.mark.full), "captured"])
def test_prompts_in_chunks_and_requests_retracted_give_the_same_answers(start, cpu, steps):
    ids = prompts(6, 200)
    few = {"chunked_prefill_size": 64, "max_total_tokens": 8 * PAGE}
    with start(**STEPS[steps], **few, schedule_conservativeness=0.0) as engine:
        found = answer(engine, ids, 120)
    assert sum(a["meta_info"]["num_retractions"] for a in found) > 0
    assert compare(found, answer(cpu, ids, 120)) > 8


def test_penalties_masks_and_temperatures_are_sampled(engine, cpu):
    params = [
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 1e-3, "top_k": 3, "sampling_seed": 7},
        {"temperature": 0.0, "regex": "(one|two) three"},
        {"temperature": 0.0, "logit_bias": {"17": 50.0}},
    ]
    params = [p | {"max_new_tokens": 20} for p in params]
    ids = prompts(4, 9)
    mine, theirs = (e.generate(input_ids=ids, sampling_params=params) for e in (engine, cpu))
    masked = (found[2]["text"][-9:] for found in (mine, theirs))  # a cut character may come first
    assert {*masked} <= {"one three", "two three"}
    assert mine[3]["output_ids"] == theirs[3]["output_ids"] == [17] * 20
    for at in (0, 1):
        assert mine[at]["output_ids"][0] == theirs[at]["output_ids"][0]


@pytest.mark.parametrize("steps", STEPS)
def test_a_decode_step_copies_slot_numbers_in_and_tokens_out(start, npu: EmulatedNpu, steps):
    """By step: what comes in are the rows (and, uncaptured, which of them are read out), what goes
    out are tokens and their logits, both late. The host waits once, for the result."""
    params = {"temperature": 0, "ignore_eos": True}
    counted = []
    with start(**STEPS[steps], page_size=512, max_total_tokens=4096) as engine:
        for tokens in (20, 60):
            before = npu.counters()
            engine.generate(
                input_ids=prompts(2, 7), sampling_params=params | {"max_new_tokens": tokens}
            )
            after = npu.counters()
            counted.append({name: after[name] - before[name] for name in after})
    short, long = counted
    by_step = {name: (long[name] - short[name]) / 40 for name in short}
    operators = by_step.pop("operators")
    into = {"eager": 2, "captured": 1}[steps]
    assert by_step == {"to_host": 2, "to_host_late": 2, "to_device": into, "waits": 1}
    assert operators > 10 * LAYERS


@pytest.mark.parametrize("is_unpadded", [False, True])
def test_a_step_is_filled_up_unless_that_is_switched_off(
    start, npu: EmulatedNpu, is_unpadded: bool
):
    """Filled up it brings slot numbers in, launched anew also which rows are read out."""
    params, counted = {"temperature": 0, "ignore_eos": True}, []
    with start(cuda_graph_bs=[2], disable_cuda_graph_padding=is_unpadded) as engine:
        for ids in (prompts(1, 7), prompts(2, 7)):
            for tokens in (5, 25):
                before = npu.counters()["to_device"]
                engine.generate(input_ids=ids, sampling_params=params | {"max_new_tokens": tokens})
                counted.append(npu.counters()["to_device"] - before)
    one, two = counted[1] - counted[0], counted[3] - counted[2]
    assert two == 20 and one == (40 if is_unpadded else 20)


@pytest.mark.parametrize(("steps", "number"), [("eager", 5), ("captured", 6)])
def test_a_device_of_another_number_says_the_same(start, cpu, steps, number):
    """All that it keeps lies there."""
    before = [torch.npu.memory_reserved(device) for device in (0, number)]
    with start(**STEPS[steps], base_gpu_id=number) as engine:
        ids = prompts(3, 40)
        assert compare(answer(engine, ids), answer(cpu, ids)) > 6
        assert torch.npu.memory_reserved(number) > before[1] + (1 << 20)
        assert torch.npu.memory_reserved(0) <= before[0]


def test_the_cache_is_as_large_as_the_memory_of_the_device_allows(start, npu: EmulatedNpu):
    before = torch.npu.memory_reserved()
    npu.set_memory(before + (64 << 20))
    try:
        with start(**STEPS["eager"], max_total_tokens=None):
            taken = torch.npu.memory_reserved() - before
    finally:
        npu.set_memory(MEMORY_BYTES)
    assert 32 << 20 < taken <= 64 << 20


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"dtype": "float32"}, "no operator of this device computes on such activations"),
        ({"quantization": "int8"}, "no operator of Ascend NPUs multiplies weights of this form"),
        ({"page_size": 16}, "pages of 128, 256, 384 or 512 tokens"),
        ({"base_gpu_id": 16}, r"takes npu 16, and it has (8|16) from 0 on"),
        ({"device": "cpu", "base_gpu_id": 1}, "a CPU has no devices by number"),
        ({"device": "cpu", "gpu_id_step": 2}, "a CPU has no devices by number"),
    ],
)
def test_what_the_device_cannot_do_is_refused_at_the_start(start, flags, why):
    with pytest.raises(BanyanError, match=why), start(**flags):
        pass
