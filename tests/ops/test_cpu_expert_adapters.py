"""Adapters beside compiled experts and routers, against plain ones, in every instruction set."""

import numpy as np
import pytest
import torch

from banyan.ops import reference
from banyan.ops.cpu.experts import Experts, make_route
from banyan.ops.cpu.weights import Arena
from banyan.ops.experts_api import Routing
from banyan.ops.lora import (
    AdapterPart,
    AdapterTable,
    AdapterTokens,
    ExpertPart,
    ExpertSides,
    ExpertTable,
)
from tests.ops.test_cpu_experts import experts_of, library, routed
from tests.support.stored_weights import random

CPU = torch.device("cpu")
DIM, INNER, COUNT = 96, 72, 5
assert library


def part(which, inputs, outputs, rank, seed, dtype=torch.float32):
    down = random(rank, inputs, seed=seed) * inputs**-0.5
    return ExpertPart(which, down.to(dtype), random(outputs, rank, seed=seed + 1).to(dtype), 0.5)


def sides(max_tokens, gated=True, is_rounded=False):
    """1 has all experts in ranks of their own, 2 some in bf16, 3 one part of one in fp16; 4 has
    nothing here."""
    tables = []
    for side, (inputs, outputs) in enumerate([(DIM, INNER), (INNER, DIM)]):
        table = ExpertTable(inputs, COUNT, 40, 4, is_rounded)
        which = [0] if side else [0, 1] if gated else [1]

        def parts(expert, rank, dtype=torch.float32, which=which, own=(inputs, outputs, side)):
            seed = 100 * expert + own[2]
            return [part(w, *own[:2], rank + w, seed + 10 * w, dtype) for w in which]

        table.enter(1, {expert: parts(expert, 3 + 4 * expert) for expert in range(COUNT)})
        table.enter(2, {expert: parts(expert, 8, torch.bfloat16) for expert in (0, 3)})
        table.enter(3, {2: parts(2, 1, torch.float16)[-1:]})
        tables.append(table)
    return ExpertSides(*tables, AdapterTokens(max_tokens))


ADAPTERS = [1, 0, 2, 2, 3, 1, 4, 1, *[1] * 40, *[0] * 3, 2, 3, 1]


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize(
    ("name", "activation"), [("F32", "silu"), ("F32", "relu2"), ("BF16", "gelu")]
)
def test_pairs_go_through_the_adapters_of_their_tokens(library, name, activation, is_rounded):
    experts = experts_of(name, COUNT, DIM, INNER, activation=activation)
    tokens = len(ADAPTERS)
    x, (ids, weights) = random(tokens, DIM, seed=3), routed(tokens, COUNT, 2)
    beside = sides(tokens, gated=activation != "relu2", is_rounded=is_rounded)
    beside.tokens.fill(np.array(ADAPTERS))
    want = reference.pack_experts(experts, torch.float32, CPU)(x, ids, weights, beside)
    run = Experts(library, Arena(), experts, is_exact=True)

    got, plain = run(x, ids, weights, beside), run(x, ids, weights)

    close = 2e-2 if is_rounded else 2e-5
    torch.testing.assert_close(got, want, atol=close * float(want.abs().max()), rtol=0)
    without = [at for at, number in enumerate(ADAPTERS) if number in (0, 4)]
    assert torch.equal(got[without], plain[without]) and not torch.equal(got[0], plain[0])


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("name", ["Q8_0", "BF16"])
def test_a_token_is_the_same_bits_alone_and_in_any_batch(library, name, is_exact):
    experts = experts_of(name, COUNT, DIM, 2 * DIM)
    tokens, beside = len(ADAPTERS), AdapterTokens(len(ADAPTERS))
    tables = [ExpertTable(inputs, COUNT, 40, 4, not is_exact) for inputs in (DIM, 2 * DIM)]
    for number in (1, 2, 3):
        for table, which, size in ((tables[0], (0, 1), 2 * DIM), (tables[1], (0,), DIM)):
            own = {
                e: [part(w, table.inputs, size, 9, 7 * number + e + 50 * w) for w in which]
                for e in range(number - 1, COUNT)
            }
            table.enter(number, own)
    x, (ids, weights) = random(tokens, DIM, seed=4), routed(tokens, COUNT, 3)
    run, both = Experts(library, Arena(), experts, is_exact), ExpertSides(*tables, beside)
    beside.fill(np.array(ADAPTERS))
    together = run(x, ids, weights, both)
    for at in (0, 1, 2, 4, 6, 30, tokens - 1):
        beside.fill(np.array(ADAPTERS[at : at + 1]))
        alone = run(x[at : at + 1], ids[at : at + 1], weights[at : at + 1], both)
        assert torch.equal(alone[0], together[at]), at


def test_recorded_experts_take_other_adapters_and_tokens_later(library):
    experts, tokens = experts_of("F32", COUNT, DIM, INNER), 9
    run, beside = Experts(library, Arena(), experts, is_exact=True), sides(tokens)
    x, (ids, weights) = random(tokens, DIM, seed=5), routed(tokens, COUNT, 2)
    recording = library.record(lambda: run(x, ids, weights, beside), tokens, 3)
    for adapters in ([1, 0, 2, 3], [0] * 5, [2] * 9, [4]):
        if adapters == [4]:
            beside.gate_up.enter(4, {0: [part(0, DIM, INNER, 2, 30), part(1, DIM, INNER, 2, 40)]})
        beside.tokens.fill(np.array(adapters))
        recording.run(len(adapters), 1, 0)
        found, n = recording.result[: len(adapters)].clone(), len(adapters)
        assert torch.equal(found, run(x[:n], ids[:n], weights[:n], beside))
    recording.run(0, 0, 1)  # logits of the step before: its tokens are not taken again


def test_an_adapter_of_a_router_changes_what_its_tokens_choose(library):
    x, weight, rule = random(30, DIM, seed=6), random(11, DIM, seed=7) * DIM**-0.5, Routing(3)
    table, tokens = AdapterTable(DIM, 8, 3), AdapterTokens(30)
    table.enter(2, [AdapterPart(0, random(4, DIM, seed=8), random(11, 4, seed=9), 0.1)])
    adapters = np.array([2 if at % 3 else 0 for at in range(30)])
    tokens.fill(adapters)
    route = make_route(library)
    ids, weights = route(x, weight, None, rule, None, (table, tokens))
    want_ids, want = reference.route(x, weight, None, rule, None, (table, tokens))
    plain, _ = route(x, weight, None, rule)
    assert torch.equal(ids, want_ids) and not torch.equal(ids, plain)
    assert torch.equal(ids[::3], plain[::3])
    torch.testing.assert_close(weights, want, atol=5e-6, rtol=5e-6)
