"""The definition of sampling against textbook versions of every parameter, in float64."""

import numpy as np
import pytest

from banyan.ops.sampling import (
    banned,
    draw,
    log_softmax_at,
    penalise,
    quantile,
    support,
    top_tokens,
    weights,
)

VOCAB = 1000


def random_logits(seed: int, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * spread).astype(np.float32)


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
        got = support(logits, **filters(**given))
        # A distance of 30 nats keeps 30 * 2**-23 of rounding; a weight is a multiple of 2**-44.
        np.testing.assert_allclose(got / got.sum(), want, rtol=5e-6, atol=1e-13)
        assert got[want > 1e-13].all()
        assert not got[want == 0].any()


@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_draws_over_many_seeds_follow_the_distribution(given):
    logits = random_logits(3, 2.0)
    want = reference_probabilities(logits, **filters(**given))
    count = 6000
    at = [quantile(seed, 17) for seed in range(count)]
    mass = np.cumsum(support(logits, **filters(**given)))
    drawn = np.searchsorted(mass, [int(mass[-1]) * q >> 64 for q in at], side="right")
    assert drawn[:50].tolist() == [draw(logits, **filters(**given), at=q) for q in at[:50]]
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
    assert np.flatnonzero(support(logits, **filters(top_k=2))).tolist() == [3, 9, 700]
    assert np.flatnonzero(support(logits, **filters(top_p=0.1))).tolist() == [3, 9, 700]


def test_banned_tokens_are_never_in_the_support():
    logits = random_logits(1)
    logits[::2] = -np.inf
    allowed = np.flatnonzero(support(logits, **filters(temperature=1e6)))
    assert allowed.tolist() == list(range(1, VOCAB, 2))


def test_the_ends_of_the_quantile_choose_the_first_and_last_token_of_the_support():
    logits = random_logits(2, 0.5)
    allowed = np.flatnonzero(support(logits, **filters(top_k=10)))
    assert draw(logits, **filters(top_k=10), at=0) == allowed[0]
    assert draw(logits, **filters(top_k=10), at=2**64 - 1) == allowed[-1]


def test_quantiles_are_uniform_over_seeds_and_over_positions():
    for values in (
        [quantile(seed, 5) / 2**64 for seed in range(20000)],
        [quantile(11, position) / 2**64 for position in range(20000)],
        [quantile(-(2**63) + 7 * i, i) / 2**64 for i in range(20000)],
    ):
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
    assert np.flatnonzero(~banned(np.frombuffer(bits, np.uint8), 131)).tolist() == [0, 2, 129]


@pytest.mark.parametrize("vocab", [1, 2, 511, 512, 513, 50_000])
def test_a_draw_from_the_whole_vocabulary_lies_at_its_quantile(vocab):
    generator = np.random.default_rng(vocab)
    logits = (3 * generator.standard_normal(vocab)).astype(np.float32)
    logits[generator.random(vocab) < 0.3] = -np.inf
    logits[0] = 1.0
    weights = np.exp((logits.astype(np.float64) - logits.max()) / 0.8)
    ends = np.cumsum(weights) / weights.sum()
    for at in (1e-9, *generator.random(200), 1 - 1e-9):
        token = draw(logits, 0.8, -1, 1.0, 0.0, int(at * 2**64))
        assert np.isfinite(logits[token])
        assert ends[token] - weights[token] / weights.sum() - 1e-6 <= at <= ends[token] + 1e-6


def test_weights_are_exponentials_that_never_rise_with_the_distance():
    below = np.linspace(0, 45, 200_001, dtype=np.float32)
    got = weights(below, 0.9)
    want = np.exp(-below.astype(np.float64) / 0.9) * 2**44
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=0.51)
    np.testing.assert_allclose(got[below < 0.9], want[below < 0.9], rtol=4e-7)
    assert got[0] == 2**44 and got[-1] == 0
    assert (np.diff(got) <= 0).all()
    assert weights(np.array([0, np.inf], np.float32), 1e-6).tolist() == [2**44, 0]


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_log_probabilities_are_those_of_a_float64_softmax(temperature):
    logits = random_logits(4, 5.0)
    logits[7] = -np.inf
    x = logits.astype(np.float64) / temperature
    want = x - x.max() - np.log(np.exp(x - x.max()).sum())
    got = log_softmax_at(logits, temperature, np.arange(VOCAB))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_top_tokens_are_in_falling_order_and_equal_ones_by_id():
    logits = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 0.0], np.float32)
    assert top_tokens(logits, 4).tolist() == [1, 3, 2, 4]


def test_log_probabilities_of_a_row_that_is_no_numbers_are_none():
    logits = random_logits(1)
    logits[5] = np.nan
    assert np.isnan(log_softmax_at(logits, 1.0, np.arange(3))).all()
