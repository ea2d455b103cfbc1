"""Text, tokens and scores do not depend on how the engine cuts its answer; stops are exact."""

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.engine_client.text_generator import TextGenerator
from banyan.messages.requests import Abort, Generate, StopAt
from banyan.requests.generation import (
    CoalescedChunks,
    TokenScore,
    collect,
    join,
)
from banyan.requests.request_spec import ALL_HIDDEN, LAST_HIDDEN, ScoreOptions
from banyan.tokenizer.stop_strings import TextOptions
from tests.support.clients import asynchronous
from tests.support.fake_engine import EOS, VOCAB, ids_of, logprob_of, serving, until
from tests.support.text_requests import LIMITS, TOKENIZER, request


def say(text, ends=True):
    return lambda message: ids_of(text) + ([EOS] if ends else [])


async def chunks_of(answer, asked, seed=0, tokenizer=TOKENIZER):
    """All chunks, and what the engine received."""
    async with serving(answer, seed=seed) as (client, engine):
        generator = TextGenerator(client, tokenizer, LIMITS)
        chunks = [chunk async for chunk in generator.generate(asked)]
        await until(lambda: len(client.streams) == 0)
        return chunks, engine.received


def run(answer, asked, seed=0, tokenizer=TOKENIZER):
    """The whole answer as one chunk, and what the engine received."""
    chunks, received = asyncio.run(chunks_of(answer, asked, seed, tokenizer))
    assert [c.finish is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    return join(chunks), received


def test_end_of_sequence_ends_the_text_and_counts_as_a_token():
    answer, _ = run(say("hello"), request())
    assert answer.text == "hello" and answer.tokens == [*ids_of("hello"), EOS]
    assert answer.finish.reason == "stop" and answer.finish.matched == EOS
    assert answer.usage.output_tokens == 6 and answer.usage.prompt_tokens == 2
    assert answer.usage.cached_tokens == 2


def test_the_length_bound_ends_the_text():
    answer, _ = run(say("hello"), request(max_new_tokens=3))
    assert (answer.text, answer.finish.reason, answer.finish.matched) == ("hel", "length", None)


def test_no_new_tokens_gives_an_empty_answer():
    answer, _ = run(say("hello"), request(max_new_tokens=0))
    assert (answer.text, answer.tokens, answer.finish.reason) == ("", [], "length")


def test_a_stop_string_cuts_text_and_tokens_and_tells_the_engine_where():
    answer, received = run(say("one, two; three"), request(stop=("; t",)))
    assert answer.text == "one, two" and answer.tokens == ids_of("one, two; t")
    assert answer.finish.reason == "stop" and answer.finish.matched == "; t"
    assert answer.usage.output_tokens == len("one, two; t")
    assert StopAt(RequestId("r"), len("one, two; t")) in received


def test_a_stop_string_may_stay_in_the_text():
    answer, _ = run(say("one, two"), request(stop=(", ",), no_stop_trim=True))
    assert answer.text == "one, " and answer.finish.matched == ", "


def test_a_stop_regex_names_its_pattern():
    answer, _ = run(say("call 0815 now"), request(stop_regex=("[0-9]{3}",)))
    assert answer.text == "call " and answer.finish.matched == "[0-9]{3}"
    assert answer.usage.output_tokens == len("call 081")


def test_text_held_back_for_a_stop_that_never_comes_is_given_at_the_end():
    answer, _ = run(say("the en"), request(stop=("end",)))
    assert answer.text == "the en" and answer.finish.matched == EOS


def test_a_stop_token_of_the_caller_is_trimmed_or_kept():
    bang = ids_of("!")[0]
    asked = request(stop_ids=(EOS, bang))
    answer, _ = run(say("stop! go"), asked)
    assert (answer.text, answer.finish.matched) == ("stop", bang)
    assert answer.tokens == ids_of("stop!")
    kept, _ = run(say("stop! go"), replace(asked, text=TextOptions(no_stop_trim=True)))
    assert kept.text == "stop!"


def test_a_stop_token_below_the_minimum_is_text():
    bang = ids_of("!")[0]
    answer, _ = run(say("a!b!c"), request(stop_ids=(EOS, bang), min_new_tokens=2))
    assert answer.text == "a!b" and answer.usage.output_tokens == 4


def test_a_character_cut_by_the_length_bound_shows_as_replacement():
    answer, _ = run(say("né"), request(max_new_tokens=2))
    assert answer.text == "n�"


def test_no_chunk_shows_half_a_character():
    for seed in range(10):
        chunks, _ = asyncio.run(chunks_of(say("naïve café 日本"), request(), seed))
        assert all("�" not in c.text for c in chunks)
        assert join(chunks).text == "naïve café 日本"


def test_scores_follow_positions_from_the_start_of_the_prompt():
    asked = request(scores=ScoreOptions(start=0, top=2, ids=(7, 9)))
    answer, _ = run(say("ok"), asked)
    prompt = ids_of("Hi")
    first, second = answer.prompt_scores
    assert first == TokenScore(None, prompt[0]) and first.top == []
    assert (second.logprob, second.token) == (logprob_of(1), prompt[1])
    assert second.top == [(0.0, 0), (-1.0, 1)] and second.picked == [(-7.0, 7), (-9.0, 9)]
    assert [s.token for s in answer.output_scores] == [*ids_of("ok"), EOS]
    assert [s.logprob for s in answer.output_scores] == [logprob_of(p) for p in (2, 3, 4)]


def test_scores_of_the_output_alone_leave_the_prompt_out():
    answer, _ = run(say("ok"), request(scores=ScoreOptions(start=2)))
    assert answer.prompt_scores == [] and len(answer.output_scores) == 3


def test_prompt_scores_come_without_any_output():
    answer, _ = run(say("ok"), request("abc", 0, scores=ScoreOptions(start=1)))
    assert [s.logprob for s in answer.prompt_scores] == [logprob_of(1), logprob_of(2)]
    assert answer.output_scores == []


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from("abé日!\n"), max_size=20),
    stop=st.lists(st.text(st.sampled_from("abé!"), min_size=1, max_size=3), max_size=2),
    keep=st.booleans(),
    bound=st.integers(0, 30),
    seeds=st.tuples(st.integers(0, 999), st.integers(0, 999)),
)
def test_splits_change_neither_text_nor_tokens_nor_scores(text, stop, keep, bound, seeds):
    asked = request(
        max_new_tokens=bound,
        stop=tuple(stop),
        no_stop_trim=keep,
        scores=ScoreOptions(start=1, top=1),
    )
    one, other = (run(say(text), asked, seed)[0] for seed in seeds)
    assert structs.replace(one, usage=other.usage) == other
    assert one.usage.output_tokens == len(one.tokens) == len(one.output_scores)


@asynchronous
async def test_closing_the_iterator_early_aborts_the_request():
    async with serving(say("hello")) as (client, engine):
        chunks = TextGenerator(client, TOKENIZER, LIMITS).generate(request())
        await anext(chunks)
        engine.hold = True
        await chunks.aclose()
        await until(lambda: len(client.streams) == 0)
        assert any(isinstance(m, Abort) for m in engine.received) or engine.live == {}


@asynchronous
async def test_a_failed_request_ends_in_an_abort_with_its_status():
    async with serving(say("x")) as (client, engine):
        engine.failure = (503, "The request queue is full.")
        generator = TextGenerator(client, TOKENIZER, LIMITS)
        [finish] = [chunk.finish async for chunk in generator.generate(request())]
        assert (finish.reason, finish.status, finish.text) == (
            "abort",
            503,
            "The request queue is full.",
        )


@asynchronous
async def test_the_engines_death_mid_stream_ends_the_stream_once():
    async with serving(say("hello" * 50)) as (client, engine):
        chunks = TextGenerator(client, TOKENIZER, LIMITS).generate(request(max_new_tokens=250))
        await anext(chunks)
        engine.hold = True
        client.engine_lost("killed")
        rest = [chunk async for chunk in chunks]
        assert [c.finish.status for c in rest if c.finish] == [503]


@asynchronous
async def test_an_abort_from_elsewhere_keeps_the_text_so_far():
    async with serving(say("hello")) as (client, engine):
        engine.hold = True
        chunks = TextGenerator(client, TOKENIZER, LIMITS).generate(request())
        waiting = asyncio.ensure_future(anext(chunks))
        await until(lambda: engine.live)
        client.abort(RequestId("r"))
        chunk = await waiting
        assert (chunk.finish.reason, chunk.finish.status) == ("abort", 0)
        await chunks.aclose()


def test_without_a_tokenizer_ids_come_and_stops_are_refused():
    answer, _ = run(say("hi"), request(), tokenizer=None)
    assert (answer.text, answer.tokens) == ("", [*ids_of("hi"), EOS])
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        run(say("hi"), request(stop=("x",)), tokenizer=None)


@pytest.mark.parametrize("prompt", [[], [-1], [VOCAB], [3, 10**6, 4]])
def test_prompts_outside_the_vocabulary_are_refused(prompt):
    with pytest.raises(RequestError) as caught:
        run(say("hi"), replace(request(), prompt=prompt))
    assert caught.value.status == 400


@asynchronous
async def test_what_the_sequences_of_a_request_ask_for_together_is_bounded_with_the_numbers():
    wide = replace(LIMITS, hidden_size=2048, hidden_states=True)
    narrow = replace(wide, max_prompt_tokens=1025)
    scored = ScoreOptions(start=0, top=255)
    for asked, reported, limits in (
        (
            request("abc", 900, scores=ScoreOptions(start=3, ids=(1,) * 500)),
            "4509000 log-probabilities of its 10 outputs",
            wide,
        ),
        (request("a" * 400, 1, scores=scored), "1024000 log-probabilities of its prompts", wide),
        (replace(request("abc", 900), hidden=ALL_HIDDEN), "18493440 values of hidden states", wide),
        (request("a" * 103, 1), "1025 tokens in all", narrow),
    ):
        async with serving(say("hi")) as (client, engine):
            several = [asked.with_message(request=RequestId(f"r{i}")) for i in range(10)]
            generator = TextGenerator(client, TOKENIZER, limits)
            with pytest.raises(RequestError, match=reported):
                await collect(generator, several)
            assert len(client.streams) == 0 and not engine.received, "nothing was begun"


def test_hidden_states_need_the_flag_and_the_last_one_is_never_too_much():
    async def ask(hidden, limits):
        async with serving(say("hi")) as (client, _):
            asked = replace(request("abc", 900), hidden=hidden)
            return await anext(TextGenerator(client, TOKENIZER, limits).generate(asked))

    wide = replace(LIMITS, hidden_size=8192, hidden_states=True)
    with pytest.raises(RequestError, match="--enable-return-hidden-states"):
        asyncio.run(ask(LAST_HIDDEN, LIMITS))
    assert asyncio.run(ask(LAST_HIDDEN, wide)).tokens, "the last one alone is never too much"


def test_the_engine_gets_what_the_request_says():
    asked = request(scores=ScoreOptions(start=1, top=3, ids=(4,)))
    asked = asked.with_message(namespace=b"n", priority=5)
    _, received = run(say("ok"), asked)
    sent = received[0]
    assert isinstance(sent, Generate)
    assert (sent.namespace, sent.priority, sent.score_from) == (b"n", 5, 1)
    assert (sent.score_top, sent.score_ids, sent.sampling) == (3, (4,), asked.sampling)


def test_strides_give_the_first_token_at_once_and_lose_nothing():
    async def scenario(seed):
        async with serving(say("hello world, this is long"), seed=seed) as (client, _):
            chunks = TextGenerator(client, TOKENIZER, LIMITS).generate(request())
            return [chunk async for chunk in CoalescedChunks(chunks, 8)]

    rng = random.Random(3)
    for _ in range(5):
        chunks = asyncio.run(scenario(rng.randrange(999)))
        assert join(chunks).text == "hello world, this is long"
        assert 1 <= len(chunks[0].tokens) <= 3 + 8
        assert all(len(c.tokens) >= 8 for c in chunks[1:-1])


def numbered(count, **options):
    return [request(**options).with_message(request=RequestId(f"r{i}")) for i in range(count)]


@asynchronous
async def test_requests_run_side_by_side_are_answered_in_their_order():
    async with serving(lambda message: ids_of(f"to {message.request}")) as (client, _):
        chunks = await collect(TextGenerator(client, TOKENIZER, LIMITS), numbered(5))
    assert [c.text for c in chunks] == [f"to r{i}" for i in range(5)]


@asynchronous
async def test_one_request_that_is_refused_ends_those_next_to_it():
    async with serving(say("hello", ends=False)) as (client, engine):
        engine.hold = True
        asked = numbered(3)
        asked[2] = replace(asked[2], prompt=[])
        with pytest.raises(RequestError, match="empty"):
            await collect(TextGenerator(client, TOKENIZER, LIMITS), asked)
        await until(lambda: len(client.streams) == 0)
        kinds = [type(m) for m in engine.received]
        assert kinds.count(Generate) == kinds.count(Abort) == 2


def test_every_chunk_tells_how_much_of_the_prompt_was_cached():
    chunks, _ = asyncio.run(chunks_of(say("hello world"), request()))
    assert len(chunks) > 1
    assert [c.usage.cached_tokens for c in chunks] == [2] * len(chunks)


@asynchronous
async def test_the_engine_gets_who_asks_and_with_which_weight():
    asked = request().with_message(caller=b"research")
    async with serving(say("x")) as (client, engine):
        generator = TextGenerator(client, TOKENIZER, LIMITS, {b"research": 2.0}.__getitem__)
        await collect(generator, [asked])
        (message,) = [m for m in engine.received if isinstance(m, Generate)]
    assert (message.caller, message.weight) == (b"research", 2.0)
