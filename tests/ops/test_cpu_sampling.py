"""Compiled sampling against its definition, token for token, in every instruction set of this
machine."""

import ctypes
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from banyan.ops import reference, tensor_sampling
from banyan.ops.cpu.library import ISAS, Library
from banyan.ops.cpu.sampling import Sampling
from banyan.ops.cuda import triton_sampling
from banyan.ops.sampling import PARAMS, Addends, Masks, SampleRows, quantile, sample_row, support
from tests.ops.conftest import MACHINES, open_library

FILTERS = [
    {"greedy": True},
    {},
    {"temperature": 0.3},
    {"temperature": 1e6},
    {"temperature": 1e-5, "top_p": 0.5},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 3000},
    {"top_p": 1e-6},
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 0.7},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_p": 0.8, "top_k": 40, "min_p": 0.01},
    {"temperature": 1e6, "top_k": 7, "top_p": 0.5},
]
PENALTIES = {"penalised": True, "frequency": 0.5, "presence": -0.25, "repetition": 1.3}
LENGTH = 60


class Tensors:
    """The same ops written in torch."""

    sample = staticmethod(tensor_sampling.sample.run)
    logprobs = staticmethod(tensor_sampling.logprobs.run)


class Triton:
    """The kernel of CUDA devices, on one or in Triton's interpreter."""

    logprobs = staticmethod(tensor_sampling.logprobs.run)

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def sample(self, logits, rows):
        device = self._device
        there = replace(
            rows,
            params=rows.params.to(device),
            positions=rows.positions.to(device),
            slots=rows.slots.to(device),
            history=rows.history.to(device),
            addends=None if rows.addends is None else rows.addends.to(device),
            masks=None if rows.masks is None else rows.masks.to(device),
        )
        tokens, best = triton_sampling.sample.run(logits.to(device), there)
        rows.history.copy_(there.history)
        return tokens.cpu(), best.cpu()


@pytest.fixture(params=["torch", "triton", *MACHINES], ids=str)
def ops(request):
    if request.param == "torch":
        yield Tensors
        return
    if request.param == "triton":
        pytest.importorskip("triton")
        is_interpreted = bool(os.environ.get("TRITON_INTERPRET"))
        if not is_interpreted and not torch.cuda.is_available():
            pytest.skip("no CUDA device, and TRITON_INTERPRET is not set")
        yield Triton("cpu" if is_interpreted else "cuda")
        return
    for library in open_library(request):
        yield Sampling(library)


def make_logits(rows: int, vocab: int, spread: float, seed: int = 0) -> torch.Tensor:
    """Random rows; the second has many ties, the third has banned tokens."""
    generator = np.random.default_rng([seed, rows, vocab])
    x = (generator.standard_normal((rows, vocab)) * spread).astype(np.float32)
    x[1:2] = np.round(x[1:2])
    x[2:3, 1::2] = -np.inf
    return torch.from_numpy(x)


def make_rows(count: int, vocab: int, **given: object) -> SampleRows:
    params = np.zeros(count + 1, PARAMS)
    slots = np.arange(count, 0, -1)
    params["temperature"] = params["top_p"] = params["repetition"] = 1.0
    params["top_k"], params["prompt_len"] = -1, 10
    params["seed"][slots] = np.arange(count, dtype=np.uint64) + np.uint64(2**63)
    for name, value in given.items():
        params[name][slots] = value
    history = torch.randint(
        0, vocab, (count + 1, LENGTH + 4), dtype=torch.int32, generator=torch.Generator()
    )
    return SampleRows.of(params, np.full(count, LENGTH), slots, history)


def assert_equal_to_definition(ops: Sampling, logits: torch.Tensor, rows: SampleRows) -> None:
    tokens, best = ops.sample(logits, rows)
    for i, row in enumerate(logits.numpy()):
        assert (int(tokens[i]), float(best[i])) == sample_row(row, rows, i)


@pytest.mark.parametrize("vocab", [1, 2, 9, 255, 257, 4099])
@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_tokens_are_those_of_the_definition(ops, vocab, given):
    for spread in (0.3, 3.0, 12.0):
        assert_equal_to_definition(ops, make_logits(4, vocab, spread), make_rows(4, vocab, **given))


@pytest.mark.parametrize("vocab", [1, 300, 5000])
@pytest.mark.parametrize("given", [{"greedy": True}, {"top_p": 0.9, "top_k": 30}])
def test_penalties_masks_bans_and_biases_are_those_of_the_definition(ops, vocab, given):
    generator = np.random.default_rng(3)
    rows = make_rows(5, vocab, **PENALTIES, **given)
    ids = generator.integers(0, vocab, 12).astype(np.int32)
    values = np.where(generator.random(12) < 0.3, -np.inf, 3 * generator.standard_normal(12))
    bits = generator.integers(0, 256, (2, -(-vocab // 8) + 3), dtype=np.uint8)
    bits[:, 0] |= 1
    edited = replace(
        rows,
        addends=Addends.of(np.array([0, 4, 4, 9, 12, 12]), ids, values.astype(np.float32)),
        masks=Masks.of(np.array([-1, 1, -1, 0, 0], np.int32), bits),
    )
    logits = make_logits(5, vocab, 2.0)
    before = logits.clone()
    assert_equal_to_definition(ops, logits, edited)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_cannot_be_chosen_from_leaves_the_others_alone(ops, bad):
    logits = make_logits(4, 777, 2.0)
    rows = make_rows(4, 777, top_p=0.9)
    tokens, _ = ops.sample(logits, rows)
    spoiled = logits.clone()
    spoiled[1, :] = -np.inf
    spoiled[1, 400] = bad
    spoiled_tokens, best = ops.sample(spoiled, rows)
    np.testing.assert_equal(float(best[1]), float(bad))
    assert spoiled_tokens[[0, 2, 3]].tolist() == tokens[[0, 2, 3]].tolist()


@pytest.mark.parametrize("at", [0, 5, 250, 776])
def test_one_logit_that_is_no_number_is_found_wherever_it_stands(ops, at):
    logits = make_logits(1, 777, 2.0)
    logits[0, at] = np.nan
    assert np.isnan(float(ops.sample(logits, make_rows(1, 777))[1]))


def test_a_row_gives_the_same_token_alone_and_among_any_others(ops):
    logits = make_logits(67, 4099, 3.0)
    rows = make_rows(67, 4099, top_p=0.95, **PENALTIES)
    together = ops.sample(logits, rows)[0].tolist()
    for i in range(67):
        part = slice(i, i + 1)
        alone = replace(
            rows,
            positions=rows.positions[part],
            slots=rows.slots[part],
            host_slots=rows.host_slots[part],
        )
        assert int(ops.sample(logits[part], alone)[0]) == together[i]


def test_rows_may_lie_apart(ops):
    wide = make_logits(6, 2000, 3.0)
    part = wide[::2, :777]
    rows = make_rows(3, 777, top_k=20)
    assert ops.sample(part, rows)[0].tolist() == ops.sample(part.contiguous(), rows)[0].tolist()


@pytest.mark.parametrize("given", [g for g in FILTERS if "greedy" not in g], ids=str)
def test_draws_over_many_seeds_follow_the_probabilities(path, given):
    library = Library(path, 1)
    logits = make_logits(1, 1000, 2.0)
    count = 6000
    rows = make_rows(count, 1000, **given)
    seen = np.bincount(
        Sampling(library).sample(logits.expand(count, -1), rows)[0].numpy(), minlength=1000
    )
    library.close()
    one = rows.host_params[1]
    weight = support(
        logits[0].numpy(), *(one[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    )
    want = weight / weight.sum()
    assert not seen[want == 0].any()
    often = want * count >= 5  # the chi-square test needs five expected in each cell
    cells = [*zip(seen[often], want[often] * count, strict=True)]
    rest = float(want[~often].sum()) * count
    if rest >= 5:
        cells.append((int(seen[~often].sum()), rest))
    statistic = sum((s - e) ** 2 / e for s, e in cells)
    freedom = max(1, len(cells) - 1)
    # Wilson-Hilferty: (x/n)^(1/3) is near normal; 4.5 sigma never fails by chance here.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 4.5


def test_neighbouring_positions_and_seeds_draw_independently(path):
    library = Library(path, 1)
    rows = make_rows(4096, 64)
    rows.host_params["seed"][rows.host_slots] = np.repeat(np.arange(64), 64)
    rows.positions[:] = torch.arange(64).repeat(64) + 1
    tokens = Sampling(library).sample(torch.zeros(4096, 64), rows)[0].numpy()
    library.close()
    assert tokens[:64].tolist() == [quantile(0, p) * 64 >> 64 for p in range(1, 65)]
    for shift in (1, 64):
        together = np.histogram2d(tokens[:-shift], tokens[shift:], 8)[0]
        assert ((together - together.mean()) ** 2 / together.mean()).sum() < 120  # 63 degrees


@pytest.mark.parametrize("vocab", [1, 6, 255, 4099])
@pytest.mark.parametrize("top", [0, 1, 5, 300])
def test_log_probabilities_are_those_of_the_definition(ops, vocab, top):
    generator = np.random.default_rng(2)
    logits = make_logits(5, vocab, 3.0)
    logits[3, vocab // 2] = np.nan
    picked = generator.integers(0, vocab, (7, 3))
    entries = (
        torch.tensor([4, 3, 2, 1, 0, 0, 2]),
        torch.tensor([1.0, 0.5, 2.0, 1e-5, 1e6, 0.7, 1.0], dtype=torch.float64),
        torch.from_numpy(generator.integers(0, vocab, 7)),
        min(top, vocab),
        torch.from_numpy(picked),
    )
    got, want = ops.logprobs(logits, *entries), reference.logprobs(logits, *entries)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_the_self_check_passes_in_every_instruction_set_of_this_machine(path):
    library = Library(path, 1)
    why = ctypes.create_string_buffer(200)
    for level in range(ISAS.index(library.isa) + 1):
        assert library.function("bn_check_sample")(level, why, len(why)) == 0, why.value
    library.close()
