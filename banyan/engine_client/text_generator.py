"""TextGenerator: sends a RequestSpec to an engine and turns its events into TextChunks.

It detokenizes, finds stop strings and regexes, and collects log-probabilities and hidden states.
The result does not depend on how the engine groups tokens into events: text and stops are decided
token by token, scores by position.
"""

from array import array
from collections.abc import Callable, Sequence

from banyan.base.log import logger
from banyan.config.schema import ObserveConfig
from banyan.engine_client.client import Engines
from banyan.engine_client.event_stream import EventStream, StreamEvent
from banyan.engine_client.metrics_observer import MetricsObserver, ObservedGenerator
from banyan.engine_client.request_log import RequestLog, metrics_observers_of
from banyan.messages.events import Finished, Tokens
from banyan.messages.plan import RowScores
from banyan.messages.requests import NO_SCORES
from banyan.requests.admission import check_budget, check_spec
from banyan.requests.bootstrap import with_room
from banyan.requests.generation import (
    Chunks,
    Finish,
    Generator,
    TextChunk,
    TokenScore,
    Usage,
)
from banyan.requests.request_spec import LAST_HIDDEN, RequestSpec
from banyan.requests.sampling_params import Limits
from banyan.tokenizer.detokenizer import PROMPT_TAIL_TOKENS, Detokenizer
from banyan.tokenizer.stop_strings import StopChecker, TextOptions
from banyan.tokenizer.tokenizer import Tokenizer

log = logger(__name__)

FLOAT_BYTES = 4

WeightOf = Callable[[bytes], float]


def _equal(caller: bytes) -> float:
    return 1.0


class TextGenerator:
    """Implements Generator on one engine.

    Args:
        tokenizer: None = ids only; requests with stop strings are then refused.
        weight_of: weight of a caller in the fair queue.
    """

    def __init__(
        self,
        client: Engines,
        tokenizer: Tokenizer | None,
        limits: Limits,
        weight_of: WeightOf = _equal,
    ) -> None:
        self._weight_of = weight_of
        self._client = client
        self._tokenizer = tokenizer
        self._limits = limits

    def generate(self, request: RequestSpec) -> Chunks[TextChunk]:
        """Start the request; chunks until one has `finish`. Closing early aborts.

        Raises:
            RequestError: the request is refused.
        """
        check_spec(request, self._limits, self._tokenizer is not None)
        decoder = None
        if self._tokenizer is not None and not request.message.pool:
            decoder = TextDecoder(request, self._tokenizer)
        reader = OutputReader(request, decoder, position_width(request, self._limits))
        if self._limits.role:
            request = with_room(request, self._limits)
        weight = self._weight_of(request.message.caller)
        if weight != request.message.weight:
            request = request.with_message(weight=weight)
        return _Output(self._client, self._client.submit(request.message), reader)

    def check(self, requests: Sequence[RequestSpec]) -> None:
        check_budget(requests, self._limits)


class _Output(Chunks[TextChunk]):
    """The output of one request, in chunks of everything new."""

    def __init__(self, client: Engines, stream: EventStream, reader: "OutputReader") -> None:
        self._client = client
        self._stream = stream
        self._reader = reader
        self._has_stopped = False

    @property
    def is_over(self) -> bool:
        return self._stream.is_over

    @property
    def is_quiet(self) -> bool:
        return self._stream.is_quiet

    def take(self) -> TextChunk | None:
        stream, reader = self._stream, self._reader
        event = stream.take()
        if event is None:
            return None
        while event is not None:
            reader.take(event)
            event = stream.take()
        if reader.stopped_by is not None and not self._has_stopped:
            self._has_stopped = True
            self._client.stop_at(stream.request, reader.num_tokens)
        return reader.chunk()

    def on_more(self, more: Callable[[], None] | None) -> None:
        self._stream.on_more(more)

    def close(self) -> None:
        self._stream.close()


def open_generator(
    client: Engines,
    tokenizer: Tokenizer | None,
    limits: Limits,
    observe: ObserveConfig,
    metrics_observers: Sequence[MetricsObserver] = (),
    weight_of: WeightOf = _equal,
    watch: Callable[[Generator], Generator] | None = None,
) -> Generator:
    """The generator of a server, with metrics, tracing and request logs if they are enabled."""
    generator: Generator = TextGenerator(client, tokenizer, limits, weight_of)
    if all_metrics_observers := (*metrics_observers, *metrics_observers_of(observe)):
        generator = ObservedGenerator(generator, all_metrics_observers)
    if watch is not None:
        generator = watch(generator)
    return with_log(generator, tokenizer, observe)


def with_log(
    generator: Generator, tokenizer: Tokenizer | None, observe: ObserveConfig
) -> Generator:
    """`generator` with a log line for each finished request under --log-requests."""
    if not observe.log_requests:
        return generator
    return RequestLog(generator, observe, None if tokenizer is None else tokenizer.decode)


class TextDecoder:
    """Turns token ids into text that is cut at stops."""

    def __init__(self, request: RequestSpec, tokenizer: Tokenizer) -> None:
        options, spans = request.text, request.message.spans
        tail = request.prompt[spans[-1].end if spans else 0 :][-PROMPT_TAIL_TOKENS:]
        self._detokenizer = Detokenizer(tokenizer, tail, options)
        self._hidden = HiddenTokens(tokenizer, options)
        self._keeps_stop = options.no_stop_trim
        self._checker = StopChecker(
            (*options.stop, *self._hidden.stops), options.stop_regex, options.no_stop_trim
        )
        self.has_stops = bool(options.stop or options.stop_regex)
        self.push = self._push if self.has_stops else self._detokenizer.push
        """Text that these tokens make final. Without stops, several tokens at once."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string or regex that was found."""
        match = self._checker.match
        return None if match is None else self._hidden.stops.get(match.matched, match.matched)

    def _push(self, tokens: Sequence[int]) -> str:
        text = self._detokenizer.push(tokens)
        if self._hidden.stops:
            text += self._hidden.marks_of(tokens)
        return self._shown(self._checker.push(text))

    def finish(self) -> str:
        """The text that was held back, after the last token."""
        text = self._checker.push(self._detokenizer.finish()) + self._checker.finish()
        return self._shown(text)

    def _shown(self, text: str) -> str:
        """Final text without marks. In a stop that stays in the answer, marks become text."""
        if not self._hidden.stops:
            return text
        match = self._checker.match if self._keeps_stop else None
        end = len(text) if match is None else max(0, len(text) - (match.end - match.start))
        return self._hidden.without_marks(text[:end]) + self._hidden.with_texts(text[end:])


class HiddenTokens:
    """Special tokens that are no text in an answer, but part of its stop strings.

    Each has a mark, a lone surrogate, which no decoded text contains. A stop string is also
    searched with marks in place of these tokens.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        texts = tokenizer.special_texts if options.stop and options.skip_special_tokens else ()
        stops = "\0".join(options.stop)
        found = {text: tokenizer.added[text] for text in sorted(texts) if text in stops}
        hidden = {text: id for text, id in found.items() if id not in options.shown}
        self._marks = {text: chr(0xD800 + i) for i, text in enumerate(hidden)}
        self._mark_of = {id: self._marks[text] for text, id in hidden.items()}
        self.stops = {
            marked: stop for stop in options.stop if (marked := self._marked(stop)) != stop
        }
        """Stop string with marks -> as the client wrote it."""

    def marks_of(self, tokens: Sequence[int]) -> str:
        return "".join(self._mark_of.get(token, "") for token in tokens)

    def without_marks(self, text: str) -> str:
        for mark in self._marks.values():
            text = text.replace(mark, "")
        return text

    def with_texts(self, text: str) -> str:
        for special, mark in self._marks.items():
            text = text.replace(mark, special)
        return text

    def _marked(self, stop: str) -> str:
        for special in sorted(self._marks, key=len, reverse=True):
            stop = stop.replace(special, self._marks[special])
        return stop


class OutputReader:
    """Collects the events of one request; `chunk` returns everything new."""

    def __init__(self, request: RequestSpec, decoder: TextDecoder | None, width: int = 0) -> None:
        self.stopped_by: str | None = None
        """Stop string or regex that ended the request; later tokens are dropped."""
        self.num_tokens = 0
        self._request = request
        self._decoder = decoder
        self._watches = decoder is not None and decoder.has_stops
        self._stop_ids = frozenset(request.sampling.stop_ids)
        self._tokens: list[int] = []
        """Output so far; `chunk` has returned the first `_num_returned` of them."""
        self._num_returned = 0
        self._text: list[str] = []
        self._held: int | None = None
        """A token that ends the request: its text is kept only under no_stop_trim."""
        self._is_scored = request.message.score_from != NO_SCORES
        self._scored_to = max(0, request.message.score_from)
        """Positions below are scored or not wanted."""
        self._prompt_scores: list[TokenScore] = []
        self._output_scores: list[TokenScore] = []
        self._vector = b""
        self._hidden = PositionValues(request, width)
        self._latest: Tokens | Finished | None = None
        """Latest event with cache counts."""
        self._finish: Finish | None = None
        if request.message.score_from == 0:
            self._prompt_scores.append(TokenScore(None, request.prompt[0]))
            self._scored_to = 1

    def take(self, event: StreamEvent) -> None:
        if isinstance(event, Tokens):
            self._latest = event
            self._take_tokens(event)
            return
        if isinstance(event, Finished):
            self._latest = event
            self._end(Finish(event.reason, event.matched if event.matched >= 0 else None))
        else:
            self._end(Finish("abort", None, event.status, event.text, event.code))

    def chunk(self) -> TextChunk | None:
        """Everything since the last call; None if there is nothing."""
        new = self._tokens[self._num_returned :]
        text = self._text[0] if len(self._text) == 1 else "".join(self._text)
        if not (new or text or self._prompt_scores or self._output_scores or self._finish):
            return None
        usage, scores = self._usage(), self._output_scores
        if self._finish is None:
            chunk = TextChunk(text, new, usage, self._prompt_scores, scores)
        else:
            chunk = TextChunk(
                text,
                new,
                usage,
                self._prompt_scores,
                scores,
                self._finish,
                self._vector,
                **self._hidden.whole(self.num_tokens),
            )
        self._num_returned = len(self._tokens)
        self._text, self._prompt_scores, self._output_scores = [], [], []
        return chunk

    def _take_tokens(self, event: Tokens) -> None:
        tokens = array("i", event.tokens)
        if self.stopped_by is None:
            assert event.first == self.num_tokens, (
                f"{self._request.id}: token {event.first} came where {self.num_tokens} was due"
            )
            if not self._watches and self._held is None and self._stop_ids.isdisjoint(tokens):
                self._tokens.extend(tokens)
                self.num_tokens += len(tokens)
                if self._decoder is not None:
                    self._text.append(self._decoder.push(tokens))
            else:
                self._append_all(tokens)
        if self._is_scored:
            for scores in event.scores:
                self._take_scores(scores)
        self._vector = event.vector or self._vector
        if event.hidden:
            self._hidden.take(event, self.num_tokens)

    def _append_all(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)
            if self.stopped_by is not None:
                return

    def _append(self, token: int) -> None:
        self._release_held()
        if self.stopped_by is not None:
            return
        self._tokens.append(token)
        self.num_tokens += 1
        if token in self._stop_ids and self.num_tokens > self._request.sampling.min_new_tokens:
            self._held = token
        else:
            self._append_text(token)

    def _append_text(self, token: int) -> None:
        if self._decoder is not None:
            self._text.append(self._decoder.push((token,)))
            self.stopped_by = self._decoder.stopped_by

    def _release_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._append_text(held)

    def _take_scores(self, scores: RowScores) -> None:
        request, prompt_len = self._request, len(self._request.prompt)
        logprobs = array("f", scores.logprobs)
        num = len(logprobs)
        top_ids, top_logprobs = array("i", scores.top_ids), array("f", scores.top_logprobs)
        picked = array("f", scores.picked)
        num_top, num_picked = len(top_ids) // max(num, 1), len(picked) // max(num, 1)
        # A retracted request recomputes positions that are known. Positions past a stop are void.
        for i in range(max(0, self._scored_to - scores.first), num):
            position = scores.first + i
            index = position - prompt_len
            if index >= self.num_tokens:
                return
            assert position == self._scored_to, (
                f"{request.id}: score {position} came where {self._scored_to} was due"
            )
            top = slice(i * num_top, (i + 1) * num_top)
            own = slice(i * num_picked, (i + 1) * num_picked)
            score = TokenScore(
                logprobs[i],
                request.prompt[position] if index < 0 else self._tokens[index],
                top_logprobs[top] if num_top else (),
                top_ids[top] if num_top else (),
                picked[own] if num_picked else (),
                request.message.score_ids,
            )
            (self._prompt_scores if index < 0 else self._output_scores).append(score)
            self._scored_to = position + 1

    def _end(self, finish: Finish) -> None:
        is_trimmed = finish.reason == "stop" and finish.matched is not None
        if not is_trimmed or self._request.text.no_stop_trim:
            self._release_held()
        if self.stopped_by is None and self._decoder is not None:
            self._text.append(self._decoder.finish())
            self.stopped_by = self._decoder.stopped_by
        if self.stopped_by is not None:
            finish = Finish("stop", self.stopped_by)
        self._finish = finish

    def _usage(self) -> Usage:
        num_prompt, latest = len(self._request.prompt), self._latest
        if latest is None:
            return Usage(num_prompt, self.num_tokens)
        cached, stored, miss = latest.cached_tokens, latest.stored_tokens, latest.cache_miss
        if isinstance(latest, Tokens):
            return Usage(num_prompt, self.num_tokens, cached, 0, stored, miss)
        return Usage(
            num_prompt,
            self.num_tokens,
            cached,
            latest.retractions,
            stored,
            miss,
            latest.queue_s,
            latest.drafts,
        )


class PositionValues:
    """Collects the hidden states or the chosen experts of one request, position by position.

    Args:
        width: numbers of 4 bytes per position.
    """

    def __init__(self, request: RequestSpec, width: int) -> None:
        self._prompt_len = len(request.prompt)
        self._is_last_only = request.hidden == LAST_HIDDEN
        self._is_experts = not request.hidden
        self._state_bytes = width * FLOAT_BYTES
        self._parts: list[bytes] = []
        self._first = self._next = request.message.hidden_from
        """First position, and the next one that is due."""

    def take(self, event: Tokens, num_tokens: int) -> None:
        """Keep the positions up to output token `num_tokens`, which has no position itself yet.
        Positions past a stop are dropped."""
        end = self._prompt_len + max(num_tokens, 1) - 1
        first, size = event.hidden_first, self._state_bytes
        assert first <= self._next, f"state {first} came where {self._next} was due"
        kept = event.hidden[(self._next - first) * size : (end - first) * size]
        if not kept:
            return
        if self._is_last_only:
            self._parts = [kept[-size:]]
        else:
            self._parts.append(kept)
        self._next += len(kept) // size

    def whole(self, num_tokens: int) -> dict[str, bytes]:
        """Fields of the last chunk, for an output of `num_tokens`."""
        found = b"".join(self._parts)
        if not self._is_experts:
            return {"hidden": found}
        positions = max(0, self._prompt_len + num_tokens - 1 - self._first)  # not the last token's
        return {"experts": found[: positions * self._state_bytes]}


def position_width(request: RequestSpec, limits: Limits) -> int:
    """Numbers per position."""
    return limits.hidden_size if request.hidden else limits.expert_choices
