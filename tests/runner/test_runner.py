"""Tokens and log-probabilities of plans, against transformers and against each other."""

import numpy as np
import pytest
import torch

from banyan.messages.plan import (
    SAMPLE,
    SCORE,
    Join,
    PageCopy,
    PageGrant,
    Row,
    StepPlan,
    device_page,
)
from banyan.messages.sampling_params import SamplingParams
from tests.support.runner_driver import PAGE, Driver, Request, greedy, ids

VOCAB = 131
SAME = 5e-5 if torch.cuda.is_available() else 1e-5
"""Log-probabilities of a token alone and among others; products of a CUDA device add in an order
that the size of a step decides."""


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB, int(n)).tolist() for n in draw.integers(3, 90, count)]


def reference_greedy(llama, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        tokens = torch.tensor([prompt])
        seen = torch.ones_like(tokens)
        out = llama.generate(tokens, attention_mask=seen, max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def reference_logprobs(llama, tokens: list[int], scale: np.ndarray) -> torch.Tensor:
    """[positions, vocab]; entry p − 1 belongs to the token at position p."""
    with torch.inference_mode():
        logits = llama(torch.tensor([tokens])).logits[0, :-1]
        return (logits / torch.from_numpy(scale[1:, None])).log_softmax(-1)


def sampled(count: int, seed: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.9, top_p=0.95, top_k=60, seed=seed)


def mixed_requests(count: int = 32) -> list[Request]:
    """Greedy, sampled and penalised requests with all their log-probabilities."""
    requests = []
    for i, prompt in enumerate(prompts(count)):
        kinds = (
            greedy(12),
            sampled(12, i),
            SamplingParams(max_new_tokens=12, seed=i, repetition_penalty=1.3, presence_penalty=0.5),
        )
        requests.append(Request(prompt, kinds[i % 3], score_from=0, score_top=3))
    return requests


def check_same(requests: list[Request], expected: list[Request], first: int = 1) -> None:
    for got, want in zip(requests, expected, strict=True):
        assert not got.failure
        assert got.output == want.output
        end = got.known
        mine = [got.scores[p] for p in range(max(first, 1), end)]
        theirs = [want.scores[p] for p in range(max(first, 1), end)]
        np.testing.assert_allclose(mine, theirs, atol=SAME)


@pytest.fixture(scope="module")
def expected(make_runner) -> list[Request]:
    """What each mixed request gives when it runs alone."""
    driver = Driver(make_runner())
    requests = mixed_requests()
    for request in requests:
        driver.run([request])
    return requests


def test_greedy_tokens_equal_transformers(llama, make_runner):
    requests = [Request(p, greedy(24)) for p in prompts(6, seed=1)]
    Driver(make_runner()).run(requests, chunk=32)
    for request in requests:
        assert request.output == reference_greedy(llama, request.prompt, 24)


@pytest.mark.parametrize("chunk", [16, 64, 1 << 30])
def test_a_batch_of_32_in_chunks_gives_what_each_gives_alone(make_runner, expected, chunk):
    requests = mixed_requests()
    Driver(make_runner()).run(requests, chunk)
    check_same(requests, expected)


def test_a_prefix_on_shared_pages_changes_nothing(make_runner, expected):
    driver = Driver(make_runner())
    for want in [e for e in expected if len(e.prompt) > 2 * PAGE][:6]:
        first = Request(want.prompt, greedy(1))
        driver.run([first])
        shared = first.pages[: (len(want.prompt) - 1) // PAGE]
        again = Request(want.prompt, want.sampling, score_from=len(shared) * PAGE + 1)
        driver.run([again], shared=shared)
        check_same([again], [want], first=again.score_from)


def test_rows_of_one_plan_share_pages_that_the_plan_itself_fills(make_runner, expected):
    want = next(e for e in expected if len(e.prompt) > 3 * PAGE)
    driver = Driver(make_runner())
    filler, reader = (Request(want.prompt, want.sampling) for _ in range(2))
    enter_filler = driver.enter(filler)
    enter_reader = driver.enter(reader, shared=filler.pages[:3])
    rows = [driver.row(filler), driver.row(reader)]
    plan = driver.plan(
        joins=[enter_filler[0], enter_reader[0]],
        grants=[enter_filler[1], enter_reader[1]],
        rows=rows,
    )
    driver.accept([filler, reader], rows, driver.runner.launch(plan).result())
    assert filler.output == reader.output == want.output[:1]


def test_a_retracted_request_goes_on_as_if_nothing_had_happened(make_runner, expected):
    driver = Driver(make_runner())
    requests = mixed_requests()[:9]
    driver.run(requests, limit=5)
    for request in requests:
        request.score_from = request.known
    left = [r.slot for r in requests]
    driver.runner.launch(driver.plan(leaves=left)).result()
    driver.next_slot = 1  # the slots come back with prompt + output
    driver.run(requests)
    check_same(requests, expected[:9])


def test_a_slot_changes_owner_within_one_plan(make_runner, expected):
    driver = Driver(make_runner())
    first, second = mixed_requests()[:2]
    driver.run([first], limit=4)
    join, grant = driver.enter(second, slot=first.slot)
    rows = [driver.row(second)]
    plan = driver.plan(leaves=[first.slot], joins=[join], grants=[grant], rows=rows)
    driver.accept([second], rows, driver.runner.launch(plan).result())
    assert second.output == expected[1].output[:1]


def test_plans_launched_ahead_take_the_tokens_from_the_slot(make_runner, expected):
    driver = Driver(make_runner())
    request = mixed_requests()[1]
    join, grant = driver.enter(request)
    length = len(request.prompt)
    plans = [
        driver.plan(joins=[join], grants=[grant], rows=[Row(join.slot, 0, length, want=SAMPLE)])
    ]
    for i in range(11):
        plans.append(driver.plan(rows=[Row(join.slot, length + i, 1, want=SAMPLE)]))
    pending = [driver.runner.launch(plan) for plan in plans]
    tokens = b"".join(p.result().tokens[0] for p in pending)
    assert tokens == ids(expected[1].output)


def test_scoring_leaves_the_tokens_of_other_requests_alone(make_runner, expected):
    driver = Driver(make_runner())
    request = Request(expected[0].prompt, greedy(12))
    join, grant = driver.enter(request)
    parts = {"joins": [join], "grants": [grant]}
    while not request.is_over:
        rows = [driver.row(request)]
        driver.accept(
            [request], rows, driver.runner.launch(driver.plan(rows=rows, **parts)).result()
        )
        parts = {}
        driver.run([Request([1, 2, 3], greedy(1), score_from=0)])
    assert request.output == expected[0].output


def test_prompt_and_output_logprobs_equal_transformers(llama, make_runner):
    requests = [
        Request(p, s, score_from=0, score_top=5, score_ids=(3, 77))
        for p, s in zip(prompts(3, seed=4), (greedy(8), sampled(8, 5), sampled(8, 6)), strict=True)
    ]
    Driver(make_runner()).run(requests, chunk=20)
    for request in requests:
        temperature = 1.0 if request.sampling.is_greedy else request.sampling.temperature
        scale = np.ones(request.known, np.float32)
        scale[len(request.prompt) :] = temperature
        want = reference_logprobs(llama, request.prompt + request.output, scale)
        assert sorted(request.scores) == list(range(1, request.known))
        for position, token in enumerate(request.prompt + request.output):
            if position == 0:
                continue
            row = want[position - 1]
            assert request.scores[position] == pytest.approx(float(row[token]), abs=1e-4)
            best, order = row.topk(5)
            assert [i for i, _ in request.tops[position]] == order.tolist()
            np.testing.assert_allclose([v for _, v in request.tops[position]], best, atol=1e-4)
            np.testing.assert_allclose(request.picked[position], row[[3, 77]], atol=1e-4)


def test_scoring_a_long_prompt_never_makes_all_its_logits_at_once(make_wrapped, monkeypatch):
    sizes = []

    def watch(model):
        logits = model.logits
        model.logits = lambda hidden: (sizes.append(len(hidden)), logits(hidden))[1]
        return model

    monkeypatch.setattr("banyan.runner.runner.CHUNK_ELEMENTS", 16 * VOCAB)
    request = Request(list(range(100)), greedy(1), score_from=0)
    Driver(make_wrapped(watch)).run([request])
    assert len(request.scores) == 100
    assert max(sizes) == 16


def test_only_the_wanted_positions_get_logits(make_wrapped):
    sizes = []

    def watch(model):
        logits = model.logits
        model.logits = lambda hidden: (sizes.append(len(hidden)), logits(hidden))[1]
        return model

    Driver(make_wrapped(watch)).run([Request(list(range(90)), greedy(2))], chunk=40)
    assert sizes == [1, 1]


def test_given_tokens_take_the_place_of_sampled_ones(llama, make_runner):
    driver = Driver(make_runner())
    request = Request(prompts(1)[0], greedy(9))
    driver.run([request], limit=1)
    forced = [5, 6, 7]
    start = len(request.prompt)
    row = Row(request.slot, start, 4, given=ids([request.output[0], *forced]), want=SAMPLE)
    result = driver.runner.launch(driver.plan(rows=[row])).result()
    context = [*request.prompt, request.output[0], *forced]
    assert result.tokens[0] == ids(reference_greedy(llama, context, 1))


def test_masked_rows_take_allowed_tokens_only(make_runner):
    driver = Driver(make_runner())
    requests = [Request(p, greedy(1)) for p in prompts(3)]
    entered = [driver.enter(r) for r in requests]
    rows = [driver.row(r, masked=i < 2) for i, r in enumerate(requests)]
    allow = [np.isin(np.arange(VOCAB), some) for some in ([17, 99], [130])]
    masks = [np.packbits(a, bitorder="little").tobytes() for a in allow]
    plan = driver.plan(joins=[e[0] for e in entered], grants=[e[1] for e in entered], rows=rows)
    driver.accept(requests, rows, driver.runner.launch(plan, lambda row: masks[row]).result())
    assert requests[0].output[0] in (17, 99)
    assert requests[1].output == [130]
    free = Request(requests[2].prompt, greedy(1))
    driver.run([free])
    assert requests[2].output == free.output


def bad_mask(row: int) -> bytes:
    raise ValueError("grammar broke")


@pytest.mark.parametrize(
    ("mask_of", "text"),
    [
        (lambda row: bytes(17), "every token is banned"),
        (lambda row: b"\xff", "the grammar mask has 1 bytes"),
        (bad_mask, "grammar broke"),
        (None, "nothing delivers masks"),
    ],
)
def test_a_row_whose_mask_is_bad_fails_alone(make_runner, expected, mask_of, text):
    driver = Driver(make_runner())
    requests = mixed_requests()[:3]
    entered = [driver.enter(r) for r in requests]
    rows = [driver.row(r, masked=i == 1) for i, r in enumerate(requests)]
    plan = driver.plan(joins=[e[0] for e in entered], grants=[e[1] for e in entered], rows=rows)
    driver.accept(requests, rows, driver.runner.launch(plan, mask_of).result())
    assert text in requests[1].failure
    assert requests[1].output == []
    assert requests[0].output + requests[2].output == [
        expected[0].output[0],
        expected[2].output[0],
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_row_of_logits_that_are_no_numbers_fails_alone(make_wrapped, expected, value, is_mixed):
    def spoil(model):
        logits = model.logits
        poison = torch.zeros(1, VOCAB).index_fill(0, torch.tensor([0]), value)

        def spoiled(hidden):
            out = logits(hidden)
            return torch.cat([out[:1] + poison, out[1:]]) if len(out) == 4 else out

        model.logits = spoiled
        return model

    chosen = range(4) if is_mixed else (0, 3, 6, 9)  # every third is plain greedy
    requests = [Request(r.prompt, r.sampling) for r in (mixed_requests()[i] for i in chosen)]
    driver = Driver(make_wrapped(spoil))
    entered = [driver.enter(r) for r in requests]
    rows = [driver.row(r) for r in requests]
    plan = driver.plan(joins=[e[0] for e in entered], grants=[e[1] for e in entered], rows=rows)
    driver.accept(requests, rows, driver.runner.launch(plan).result())
    assert "not finite" in requests[0].failure or "banned" in requests[0].failure
    assert [r.output for r in requests] == [[], *([expected[i].output[0]] for i in chosen[1:])]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda r: Row(39, 0, 4, want=SAMPLE), "slot 39"),
        (lambda r: Row(r.slot, 0, 500, want=SAMPLE), "tokens are known below"),
        (lambda r: Row(r.slot, 0, 2, want=SAMPLE), "known already"),
        (lambda r: Row(r.slot, 0, 4, drafts=2, want=SAMPLE), "no drafter"),
        (lambda r: Row(r.slot, 0, 1, given=ids([999])), "outside the vocabulary"),
        (lambda r: Row(r.slot, 0, 3, want=4), "not served"),
    ],
)
def test_a_row_that_cannot_run_fails_alone(make_runner, expected, spoil, text):
    driver = Driver(make_runner())
    requests = mixed_requests()[:3]
    entered = [driver.enter(r) for r in requests]
    rows = [driver.row(r) for r in requests]
    rows[1] = spoil(requests[1])
    plan = driver.plan(joins=[e[0] for e in entered], grants=[e[1] for e in entered], rows=rows)
    driver.accept(requests, rows, driver.runner.launch(plan).result())
    assert text in requests[1].failure
    assert [r.output for r in requests] == [expected[0].output[:1], [], expected[2].output[:1]]


@pytest.mark.parametrize(
    ("tokens", "score_ids", "text"),
    [([1] * 400, (), "400 tokens"), ([1, 131], (), "token id 131"), ([1], (-4,), "token id -4")],
)
def test_a_request_that_cannot_join_fails_with_its_rows(make_runner, tokens, score_ids, text):
    driver = Driver(make_runner())
    grant = PageGrant(1, 0, 0, [1, 2])
    join = Join(1, ids(tokens), len(tokens), greedy(1), 0, score_ids)
    row = Row(1, 0, len(tokens), want=SAMPLE)
    result = driver.runner.launch(driver.plan(joins=[join], grants=[grant], rows=[row])).result()
    assert text in result.failed[0].text


def test_a_request_for_an_adapter_fails_with_its_rows(make_runner):
    join = Join(1, ids([1, 2]), 2, greedy(1), adapter=3)
    plan = StepPlan(step=1, joins=[join], grants=[PageGrant(1, 0, 0, [1])], rows=[Row(1, 0, 2)])
    assert "wants adapter 3" in make_runner().launch(plan).result().failed[0].text


def test_a_row_beyond_its_pages_fails_and_touches_no_page(make_runner):
    driver = Driver(make_runner())
    join = Join(1, ids(range(40)), 40, greedy(1))
    plan = driver.plan(
        joins=[join], grants=[PageGrant(1, 0, 0, [3, 4])], rows=[Row(1, 0, 40, want=1)]
    )
    result = driver.runner.launch(plan).result()
    assert "needs 3 pages of group 0; it has 2" in result.failed[0].text


def test_an_error_in_the_forward_fails_the_step_and_the_next_step_runs(make_wrapped, expected):
    broken = []

    def wrap(model):
        forward = model.forward

        def failing(step):
            if not broken:
                broken.append(True)
                raise RuntimeError("device on fire")
            return forward(step)

        model.forward = failing
        return model

    driver = Driver(make_wrapped(wrap))
    request = mixed_requests()[0]
    join, grant = driver.enter(request)
    rows = [driver.row(request)]
    result = driver.runner.launch(driver.plan(joins=[join], grants=[grant], rows=rows)).result()
    assert result.error == "RuntimeError: device on fire"
    assert result.tokens == [] and result.failed == []
    driver.accept([request], rows, driver.runner.launch(driver.plan(rows=rows)).result())
    assert request.output == expected[0].output[:1]


def test_the_copies_of_a_failed_step_are_reported_as_failed(make_wrapped):
    def wrap(model):
        def failing(step):
            raise RuntimeError("device on fire")

        model.forward = failing
        return model

    driver = Driver(make_wrapped(wrap))
    request = mixed_requests()[0]
    join, grant = driver.enter(request)
    copies = [PageCopy(3, 0, device_page(1), device_page(900), "after")]
    plan = driver.plan(joins=[join], grants=[grant], rows=[driver.row(request)], copies=copies)
    reported = driver.runner.launch(plan).copies()
    assert (reported.ids, reported.failed) == ([], [3])


def test_an_empty_plan_gives_an_empty_result(make_runner):
    pending = make_runner().launch(StepPlan(step=9))
    result = pending.result()
    assert (result.step, result.tokens, result.failed, result.error) == (9, [], [], "")
    assert pending.copies() is None
    assert result.seconds > 0


def test_copied_pages_continue_like_their_source(make_runner, expected):
    want = next(e for e in expected if len(e.prompt) > 2 * PAGE)
    driver = Driver(make_runner())
    first = Request(want.prompt, greedy(1))
    join, grant = driver.enter(first)
    after = [
        PageCopy(i, 0, device_page(grant.pages[i]), device_page(900 + i), "after") for i in range(2)
    ]
    pending = driver.runner.launch(
        driver.plan(joins=[join], grants=[grant], rows=[driver.row(first)], copies=after)
    )
    assert pending.copies().ids == [0, 1]
    before = [
        PageCopy(7 + i, 0, device_page(900 + i), device_page(910 + i), "before") for i in range(2)
    ]
    again = Request(want.prompt, want.sampling)
    join, grant = driver.enter(again, shared=[910, 911])
    rows = [driver.row(again)]
    plan = driver.plan(joins=[join], grants=[grant], rows=rows, copies=before)
    driver.accept([again], rows, driver.runner.launch(plan).result())
    assert again.output == want.output[:1]


def test_a_page_of_the_former_owner_is_never_written_through_a_missing_grant(make_runner):
    runner = make_runner()
    driver = Driver(runner)
    first = Request(list(range(16)), greedy(1))
    driver.run([first])
    kept = runner.store.tensors(0)["k"][first.pages[0]].clone()
    join = Join(1, ids(range(50, 66)), 16, greedy(1))
    plan = driver.plan(
        leaves=[1],
        joins=[join],
        grants=[PageGrant(1, 0, 1, [9])],
        rows=[Row(1, 0, 16, want=SAMPLE)],
    )
    runner.launch(plan).result()
    assert torch.equal(runner.store.tensors(0)["k"][first.pages[0]], kept)


def test_stop_ids_are_banned_until_min_new_tokens(make_runner):
    driver = Driver(make_runner())
    free = Request(prompts(1)[0], greedy(6))
    driver.run([free])
    stop = free.output[0]
    held = Request(free.prompt, greedy(6, min_new_tokens=3, stop_ids=(stop,)))
    driver.run([held])
    assert stop not in held.output[:3]
    late = Request(free.prompt, greedy(6, min_new_tokens=0, stop_ids=(stop,)))
    driver.run([late])
    assert late.output[0] == stop


def test_scores_of_a_chunk_reach_the_first_token_of_the_next(make_runner):
    driver = Driver(make_runner())
    request = Request(list(range(40)), greedy(1), score_from=10)
    join, grant = driver.enter(request)
    rows = [Row(1, 0, 16, want=SCORE, score_from=10)]
    result = driver.runner.launch(driver.plan(joins=[join], grants=[grant], rows=rows)).result()
    assert result.scores[0].first == 10
    assert len(result.scores[0].logprobs) == 4 * 7  # positions 10 … 16
