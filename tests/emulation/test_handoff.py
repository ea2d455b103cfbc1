"""Two servers on emulated NPUs share the work: pages leave one device and come to another."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.system.checkpoint import write_tiny_model
from tests.system.handing import FLAGS, WAIT_S, Pair, engines
from tests.system.serving import free_port, wait_until
from tests.system.test_handoff import is_whole
from tests.system.test_transfer_engines import needs

ON_NPU = {**FLAGS, "device": "npu", "dtype": "bfloat16", "page_size": 128, "max_total_tokens": 2048}
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 8, "ignore_eos": True}
PROMPT = [2 + 7 * i % 60 for i in range(300)]


@pytest.fixture(autouse=True)
def emulated(npu: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_NPU", "emulated")
    monkeypatch.setenv("BANYAN_NPU_CHECKS", "1")


@contextmanager
def both(model: Path, **flags: object) -> Iterator[tuple[Pair, Engine]]:
    given = {**ON_NPU, **flags}
    with (
        Engine(str(model), **given) as single,
        engines(model, {**given, "chunked_prefill_size": 128}, given) as pair,
    ):
        yield pair, single


def computed(engine: Engine) -> int:
    (state,) = engine.get_server_info()["internal_states"]
    return state["stats"]["computed_tokens"]


def by(transfer: str, patch: pytest.MonkeyPatch) -> dict[str, object]:
    """The flags of a transfer backend, and the variables that it needs."""
    if transfer == "ascend":
        needs(transfer)
        patch.setenv("ASCEND_MF_STORE_URL", f"tcp://127.0.0.1:{free_port()}")
    return {"disaggregation_transfer_backend": transfer}


@pytest.mark.parametrize("transfer", ["tcp", "ascend"])
def test_a_pair_of_npus_answers_like_one(
    tmp_path: Path, transfer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = by(transfer, monkeypatch)
    with both(write_tiny_model(tmp_path / "model"), **flags) as (pair, single):
        for params in (GREEDY, SEEDED):
            for prompt in (PROMPT, PROMPT[:256], PROMPT):
                body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
                found, right = pair.ask(**body), single.generate(**body)
                assert found["output_ids"] == right["output_ids"]
        wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all back")
        before = computed(pair.decode)
        pair.ask(input_ids=[9, *PROMPT], sampling_params=GREEDY)
        wait_until(lambda: is_whole(pair.decode), WAIT_S, "rest")
        assert computed(pair.decode) - before < 301 - 256 + 16, "the prompt came as pages"


def test_several_ranks_of_a_device_are_refused_by_name(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    flags = {**ON_NPU, "disaggregation_mode": "decode", "tp_size": 2}
    with pytest.raises(BanyanError, match="with 2 ranks is not available on npu"):
        Engine(str(model), **flags)
