"""The sampler against plain float64 definitions of every parameter."""

import numpy as np
import pytest
import torch

from banyan.messages.plan import Join
from banyan.messages.sampling import SamplingParams
from banyan.runner.kvstore import GroupLayout
from banyan.runner.sampling.draw import draw, support, uniform
from banyan.runner.sampling.masks import banned
from banyan.runner.sampling.penalties import penalise
from banyan.runner.sampling.sampler import Choice, Sampler
from banyan.runner.slots import SlotTable

VOCAB = 1000
FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 2},
    {"top_k": 40},
    {"top_k": 5000},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 30, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 200, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.7, "top_p": 0.6, "min_p": 0.3},
    {"temperature": 1e-5},
    {"temperature": 1e6},
]


def random_logits(seed: int, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * spread).astype(np.float32)


def filters(**given) -> dict[str, float]:
    return {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0} | given


def reference_probabilities(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The textbook: softmax, then three filters on the sorted probabilities, then normalise."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    keep = np.zeros(VOCAB, bool)
    for rank, token in enumerate(order):
        in_k = top_k < 0 or rank < top_k
        in_p = top_p >= 1.0 or before[rank] < top_p
        keep[token] = in_k and in_p and p[token] >= min_p * p.max()
    p = np.where(keep, p, 0.0)
    return p / p.sum()


@pytest.mark.parametrize("given", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.3, 2.0, 12.0])
def test_support_and_probabilities_are_those_of_the_definition(given, spread):
    for seed in range(5):
        logits = random_logits(seed, spread)
        want = reference_probabilities(logits, **filters(**given))
        ids, weights = support(logits, **filters(**given))
        got = np.zeros(VOCAB)
        got[ids] = weights / weights.sum()
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-12)
        visible = want > 1e-18
        assert set(np.flatnonzero(visible)) <= set(ids.tolist())
        assert set(ids.tolist()) <= set(np.flatnonzero(want > 0).tolist())


@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_draws_over_many_seeds_follow_the_distribution(given):
    logits = random_logits(3, 2.0)
    want = reference_probabilities(logits, **filters(**given))
    count = 6000
    drawn = [draw(logits, **filters(**given), at=uniform(seed, 17)) for seed in range(count)]
    seen = np.bincount(drawn, minlength=VOCAB)
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


def test_tokens_of_equal_logit_stay_together():
    logits = np.full(VOCAB, -5.0, np.float32)
    logits[[3, 9, 700]] = 2.0
    assert support(logits, **filters(top_k=2))[0].tolist() == [3, 9, 700]
    assert support(logits, **filters(top_p=0.1))[0].tolist() == [3, 9, 700]


def test_banned_tokens_are_never_in_the_support():
    logits = random_logits(1)
    logits[::2] = -np.inf
    ids, weights = support(logits, **filters(temperature=1e6))
    assert ids.tolist() == list(range(1, VOCAB, 2))
    assert np.isfinite(weights).all()


def test_the_ends_of_the_uniform_choose_the_first_and_last_token_of_the_support():
    logits = random_logits(2, 0.5)
    ids, _ = support(logits, **filters(top_k=10))
    assert draw(logits, **filters(top_k=10), at=2.0**-49) == ids[0]
    assert draw(logits, **filters(top_k=10), at=1 - 2.0**-49) == ids[-1]


def test_uniforms_are_uniform_over_seeds_and_over_positions():
    for values in (
        [uniform(seed, 5) for seed in range(20000)],
        [uniform(11, position) for position in range(20000)],
        [uniform(-(2**63) + 7 * i, i) for i in range(20000)],
    ):
        assert min(values) > 0 and max(values) < 1
        counts, _ = np.histogram(values, 64, (0, 1))
        assert ((counts - 312.5) ** 2 / 312.5).sum() < 120  # 63 degrees of freedom
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def naive_penalties(logits, prompt, output, frequency, presence, repetition) -> list[float]:
    out = []
    for token, x in enumerate(logits.tolist()):
        count = output.count(token)
        x -= frequency * count + (presence if count else 0.0)
        if count or token in prompt:
            x = x / repetition if x > 0 else x * repetition
        out.append(x)
    return out


@pytest.mark.parametrize(
    "values",
    [(0.5, 0, 1.0), (0, 1.5, 1.0), (-2, 0, 1.0), (0, 0, 1.7), (0, 0, 0.5), (0.3, -0.4, 1.2)],
)
def test_penalties_equal_a_naive_count(values):
    source = np.random.default_rng(0)
    prompt, output = source.integers(0, 60, 40).tolist(), source.integers(30, 90, 50).tolist()
    logits = random_logits(8)
    want = naive_penalties(logits, prompt, output, *values)
    penalise(logits, np.array(prompt + output, np.int32), len(prompt), *values)
    np.testing.assert_allclose(logits, want, atol=1e-5)


def test_mask_bits_are_little_endian():
    bits = bytearray(17)
    bits[0], bits[16] = 0b0000_0101, 0b0000_0010
    assert np.flatnonzero(~banned(bytes(bits), 131)).tolist() == [0, 2, 129]


def sampler_with(params: list[SamplingParams], prompt: list[int], output: list[int]) -> Sampler:
    """A sampler whose slots 1, 2 … hold the same tokens with different parameters."""
    group = GroupLayout(8, 4, (0,))
    table = SlotTable(len(params), 64, VOCAB, (group,), torch.device("cpu"))
    tokens = np.array(prompt + output, np.int32).tobytes()
    table.join([Join(i + 1, tokens, len(prompt), p) for i, p in enumerate(params)])
    return Sampler(table, VOCAB)


def choose(params: SamplingParams, logits: np.ndarray, mask: bytes | None = None) -> int:
    sampler = sampler_with([params], [1, 2, 3], [4, 4])
    sampled = sampler.sample(torch.from_numpy(logits)[None], [Choice(1, 5, mask)])
    assert not sampled.faults()
    return int(sampled.tokens[0])


def test_greedy_takes_the_best_token_after_bias_penalty_and_mask():
    logits = random_logits(5)
    order = np.argsort(-logits)
    best, second, third = order[:3].tolist()
    plain = SamplingParams(max_new_tokens=9, temperature=0.0)
    assert choose(plain, logits) == best
    assert choose(SamplingParams(max_new_tokens=9, temperature=0.7, top_k=1), logits) == best
    biased = SamplingParams(max_new_tokens=9, temperature=0.0, logit_bias={third: 50.0})
    assert choose(biased, logits) == third
    stopped = SamplingParams(
        max_new_tokens=9, temperature=0.0, min_new_tokens=3, stop_ids=(best, second)
    )
    assert choose(stopped, logits) == third
    free = SamplingParams(
        max_new_tokens=9, temperature=0.0, min_new_tokens=2, stop_ids=(best, second)
    )
    assert choose(free, logits) == best
    allowed = np.ones(VOCAB, bool)
    allowed[best] = False
    assert choose(plain, logits, np.packbits(allowed, bitorder="little").tobytes()) == second


def test_a_penalty_acts_on_output_tokens_and_repetition_on_the_prompt_too():
    logits = np.zeros(VOCAB, np.float32)
    logits[4], logits[2], logits[9] = 3.0, 2.5, 2.0
    free = {"max_new_tokens": 9, "temperature": 0.0}
    assert choose(SamplingParams(**free, frequency_penalty=0.4), logits) == 2
    assert choose(SamplingParams(**free, presence_penalty=0.4), logits) == 4
    assert choose(SamplingParams(**free, repetition_penalty=2.0), logits) == 9


def test_no_edit_reaches_the_logits_that_are_scored():
    logits = torch.from_numpy(random_logits(6))[None]
    before = logits.clone()
    params = SamplingParams(max_new_tokens=9, min_new_tokens=9, stop_ids=(1,), logit_bias={5: 3.0})
    sampler = sampler_with([params], [1, 2], [3])
    sampler.sample(logits, [Choice(1, 3, b"\xff" * 125)])
    assert torch.equal(logits, before)


def test_a_row_gives_the_same_token_alone_and_among_others():
    params = [
        SamplingParams(max_new_tokens=9, seed=i, temperature=0.5 + i / 8, top_p=0.9, top_k=i or -1)
        for i in range(16)
    ]
    logits = torch.from_numpy(np.stack([random_logits(i) for i in range(16)]))
    sampler = sampler_with(params, [1, 2], [3])
    together = sampler.sample(logits, [Choice(i + 1, 3) for i in range(16)]).tokens.tolist()
    alone = [int(sampler.sample(logits[i : i + 1], [Choice(i + 1, 3)]).tokens) for i in range(16)]
    assert together == alone


def test_the_token_depends_on_the_seed_and_on_the_position():
    logits = torch.from_numpy(random_logits(1, 0.5))[None]
    params = [SamplingParams(max_new_tokens=9, seed=s) for s in range(30)]
    sampler = sampler_with(params, [1, 2], [3])
    by_seed = {int(sampler.sample(logits, [Choice(s + 1, 3)]).tokens) for s in range(30)}
    by_position = {int(sampler.sample(logits, [Choice(1, p)]).tokens) for p in range(3, 33)}
    assert len(by_seed) > 20 and len(by_position) > 20


@pytest.mark.parametrize("vocab", [1, 2, 511, 512, 513, 50_000])
def test_a_draw_from_the_whole_vocabulary_lies_at_its_quantile(vocab):
    generator = np.random.default_rng(vocab)
    logits = (3 * generator.standard_normal(vocab)).astype(np.float32)
    logits[generator.random(vocab) < 0.3] = -np.inf
    logits[0] = 1.0
    weights = np.exp((logits.astype(np.float64) - logits.max()) / 0.8)
    ends = np.cumsum(weights) / weights.sum()
    for at in (1e-9, *generator.random(200), 1 - 1e-9):
        token = draw(logits, 0.8, -1, 1.0, 0.0, at)
        assert np.isfinite(logits[token])
        assert ends[token] - weights[token] / weights.sum() - 1e-6 <= at <= ends[token] + 1e-6
