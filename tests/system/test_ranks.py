"""Several ranks give the tokens of one."""

import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from banyan.llm import Engine
from banyan.ops.cpu.build import compilers
from tests.system.test_numerics import GREEDY, ROOM, SEEDED, alone, check, crowded

PROMPTS = [[2 + (i * j * 5 + i) % 390 for i in range(5 + 40 * j)] for j in range(4)]


def answers(model: Path, **flags: object) -> tuple[list[dict], int]:
    """What the engine answers, and how many processes it has."""
    with Engine(
        model_path=str(model), threads=1, max_total_tokens=4096, log_level="error", **flags
    ) as engine:
        mine = psutil.Process().children(recursive=True)
        params = {"max_new_tokens": 24, "ignore_eos": True}
        greedy = engine.generate(
            input_ids=PROMPTS, sampling_params=params | {"temperature": 0}, return_logprob=True
        )
        seeded = engine.generate(
            input_ids=PROMPTS,
            sampling_params=params | {"temperature": 0.8, "sampling_seed": 5},
            return_logprob=True,
        )
        return greedy + seeded, len(mine)


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one(tiny_model):
    one, processes = answers(tiny_model)
    two, more = answers(tiny_model, tp_size=2)
    assert more == processes + 1
    assert [a["output_ids"] for a in two] == [a["output_ids"] for a in one]
    # Two ranks add in another order, and last bits decide some roundings: 4e-4 is seen.
    for a, b in zip(one, two, strict=True):
        ours, theirs = (x["meta_info"]["output_token_logprobs"] for x in (a, b))
        assert all(abs(p[0] - q[0]) <= 2e-3 for p, q in zip(ours, theirs, strict=True))


def where_torch_lies(pid: int) -> set[int]:
    """First addresses of its library, which the system draws anew for each program."""
    maps = psutil.Process(pid).memory_maps(grouped=False)
    return {int(m.addr.split("-")[0], 16) for m in maps if m.path.endswith("libtorch_cpu.so")}


@pytest.mark.slow
def test_ranks_are_copies_of_an_engine_that_has_loaded_its_libraries(server):
    with server("--tp-size", "2", "--pp-size", "2", "--max-total-tokens", "4096") as running:
        engine, ranks = running.engine_pid(), running.rank_pids()
        assert len(ranks) == 3 and where_torch_lies(engine)
        assert all(where_torch_lies(rank) == where_torch_lies(engine) for rank in ranks)
        assert where_torch_lies(engine).isdisjoint(where_torch_lies(os.getpid()))


@pytest.mark.slow
def test_two_ranks_read_embeddings_and_tell_hidden_states(tiny_model):
    """Embeddings of a prompt reach both ranks; the states come from the first alone."""
    table = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"]
    flags = {"threads": 1, "max_total_tokens": 4096, "enable_return_hidden_states": True}
    asked = {"sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    found = []
    for ranks in (1, 2):
        with Engine(str(tiny_model), tp_size=ranks, cpu_activations="fp32", **flags) as engine:
            answer = engine.generate(
                input_embeds=table[PROMPTS[1]].tolist(), return_hidden_states=True, **asked
            )
        states = answer["meta_info"]["hidden_states"]
        found.append((answer["output_ids"], np.vstack([states[0], *states[1:]])))
    assert found[0][0] == found[1][0]
    assert np.allclose(found[0][1], found[1][1], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not any(compilers()), reason="no C++ compiler is here")
def test_company_changes_no_bit_of_what_four_ranks_answer(tiny_model):
    flags = {"threads": 1, "tp_size": 4, "enable_deterministic_inference": True}
    with Engine(str(tiny_model), log_level="error", **ROOM, **flags) as engine:
        for kind, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
            expected = alone(engine, sampling)
            check(alone(engine, sampling), expected, f"{kind}, after a cache hit")
            engine.flush_cache()
            check(crowded(engine, sampling), expected, f"{kind}, in a batch")


@pytest.mark.slow
def test_two_ranks_give_the_vectors_of_one(tiny_model):
    found = []
    for ranks in (1, 2):
        flags = {"is_embedding": True, "tp_size": ranks, "cpu_activations": "fp32"}
        with Engine(str(tiny_model), threads=1, log_level="error", **ROOM, **flags) as engine:
            found.append(np.array([answer["embedding"] for answer in engine.encode(PROMPTS)]))
    assert np.allclose(found[0], found[1], rtol=0, atol=1e-5)
    assert np.abs(found[0]).max() > 1e-3
