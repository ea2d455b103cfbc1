"""/v1/audio/transcriptions and /v1/audio/translations: speech in a file → text (Whisper).

A file is cut in pauses into windows of at most 30 seconds; each is a sequence of its own. With
times a sequence is text between tokens of times, as in arXiv 2212.04356.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from banyan.base.errors import RequestError
from banyan.base.thread_pool import off_loop
from banyan.media.processes import DecodedSound, SoundPart
from banyan.messages.spans import Content, ContentKind, Span
from banyan.model_config.media import SoundConfig
from banyan.requests.generation import TextChunk, collect, run
from banyan.requests.request_spec import Fields, PromptSpec, RequestSpec, ScoreOptions, build_specs
from banyan.requests.sampling_params import parse_sampling
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.files import Part, read_form
from banyan.server.openai.models import model_and_adapters
from banyan.server.state import ServerState, Service
from banyan.tokenizer.tokenizer import Tokenizer

PROCESSOR = "whisper"
FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
_TIMED = ("srt", "vtt", "verbose_json")
_READ = ("file", "model", "language", "prompt", "response_format", "temperature", "stream")
_GRANULARITIES = "timestamp_granularities"
_STEP_S = 0.02
"""Seconds between two tokens of times."""
_FIRST_TIMES = 50
"""The first time of a window is within its first second."""
_MAX_PROMPT = 223
"""Tokens of the text before, as in Whisper: half of the context less one."""


@dataclass(frozen=True)
class Asked:
    """The fields of a form."""

    data: bytes
    model: str
    language: str = ""
    prompt: str = ""
    form: str = "json"
    temperature: float = 0.0
    is_streamed: bool = False

    @property
    def is_timed(self) -> bool:
        return self.form in _TIMED


@dataclass(frozen=True)
class SpokenSegment:
    """Text and its time in the file."""

    start_s: float
    end_s: float
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class SpeechTokens:
    """Special tokens of a Whisper vocabulary; None = it has none."""

    start: int
    before: int | None
    task: int | None
    no_times: int | None
    first_time: int | None

    @staticmethod
    def of(tokenizer: Tokenizer, sound: SoundConfig, is_translation: bool) -> "SpeechTokens":
        find = tokenizer.token_to_id
        return SpeechTokens(
            sound.token,
            find("<|startofprev|>"),
            find("<|translate|>" if is_translation else "<|transcribe|>"),
            no_times := find("<|notimestamps|>"),
            find("<|0.00|>") or (None if no_times is None else no_times + 1),
        )


async def transcriptions(exchange: HttpExchange, state: ServerState) -> None:
    """The text of a file of speech, in its language."""
    await _answer(exchange, state, is_translation=False)


async def translations(exchange: HttpExchange, state: ServerState) -> None:
    """The text of a file of speech, in English."""
    await _answer(exchange, state, is_translation=True)


async def _answer(exchange: HttpExchange, state: ServerState, is_translation: bool) -> None:
    service = state.admit_to_queue(exchange.context.id)
    sound = None if service.media is None else service.media.model.sound
    if service.media is None or sound is None or not sound.is_cross:
        exchange.request.drop_body()
        raise RequestError(
            "this model does not transcribe",
            code="not_available",
            hint="Serve a Whisper model, or send the sound as a part of /v1/chat/completions",
        )
    body, kind = exchange.request.body, exchange.request.header(b"content-type")
    parts = await off_loop(len(body) + len(kind), lambda: read_form(body, kind))
    exchange.request.drop_body()
    asked = _asked(exchange, parts)
    model, _ = model_and_adapters(asked.model, state, exchange.context, None, 1)
    if is_translation and not sound.is_multilingual:
        raise RequestError("this model knows English only", param="model", code="not_available")
    work = _Transcription(exchange, state, service, asked, is_translation)
    await work.run(await service.media.windows(asked.data, "file", exchange.context.tenant))


def _asked(exchange: HttpExchange, parts: Sequence[Part]) -> Asked:
    found: dict[str, Part] = {}
    for part in parts:
        name = part.name.removesuffix("[]")
        if name == _GRANULARITIES:
            if part.text != "segment":
                raise RequestError(
                    f"{_GRANULARITIES}: only segment is available, got {part.text[:40]!r}",
                    param=_GRANULARITIES,
                    code="not_available",
                )
        elif name not in _READ:
            exchange.context.warn_or_refuse(name, "not used")
        elif name in found:
            raise RequestError(f"the form has {name} twice", param=name)
        else:
            found[name] = part
    text = {name: part.text for name, part in found.items() if name != "file"}
    if "file" not in found or not found["file"].content:
        raise RequestError("the form must have one file with content", param="file")
    form = text.get("response_format", "json")
    if form not in FORMATS:
        raise RequestError(
            f"response_format must be one of {', '.join(FORMATS)}, got {form[:40]!r}",
            param="response_format",
        )
    streamed = text.get("stream", "false").lower()
    if streamed not in ("true", "false", "1", "0"):
        raise RequestError("stream must be true or false", param="stream")
    is_streamed = streamed in ("true", "1")
    if is_streamed and form not in ("json", "text"):
        raise RequestError(
            f"a stream has no response_format {form}", param="stream", hint="Use json or text"
        )
    try:
        temperature = float(text.get("temperature") or 0)
    except ValueError:
        raise RequestError("temperature must be a number", param="temperature") from None
    return Asked(
        data=found["file"].content,
        model=text.get("model", ""),
        language=text.get("language", "").lower(),
        prompt=text.get("prompt", ""),
        form=form,
        temperature=temperature,
        is_streamed=is_streamed,
    )


class _Transcription:
    """One request."""

    def __init__(
        self,
        exchange: HttpExchange,
        state: ServerState,
        service: Service,
        asked: Asked,
        is_translation: bool,
    ) -> None:
        assert service.media is not None and service.media.model.sound is not None
        self._exchange, self._state, self._service = exchange, state, service
        self._asked, self._is_translation = asked, is_translation
        self._sound = service.media.model.sound
        self._tokenizer = service.required_tokenizer()
        self._known = SpeechTokens.of(self._tokenizer, self._sound, is_translation)

    async def run(self, sound: DecodedSound) -> None:
        language = await self._language(sound.parts[0])
        specs = [self._spec(part, language, at) for at, part in enumerate(sound.parts)]
        with self._state.open.holding(specs, self._exchange.context.tenant):
            if self._asked.is_streamed:
                await self._stream(specs, sound)
                return
            chunks = await collect(self._service.generator, specs)
        await self._respond(chunks, sound, language)

    async def _language(self, part: SoundPart) -> str:
        """The language: as asked, or what the model finds in the first window."""
        asked, find = self._asked.language, self._tokenizer.token_to_id
        if not self._sound.is_multilingual:
            if asked not in ("", "en"):
                raise RequestError("this model knows English only", param="language")
            return "en"
        if asked:
            if find(f"<|{asked[:20]}|>") is None or len(asked) > 4:
                raise RequestError(
                    f"language {asked[:20]!r} is not one of the model's; send a code like en",
                    param="language",
                )
            return asked
        known = _languages(self._tokenizer, self._sound)
        spec = self._of(part, [self._known.start], 0, 1, {"only": sorted(known)}, "language")
        with self._state.open.holding([spec], self._exchange.context.tenant):
            (chunk,) = await collect(self._service.generator, [spec])
        return known.get(chunk.tokens[0], "en") if chunk.tokens else "en"

    def _spec(self, part: SoundPart, language: str, at: int) -> RequestSpec:
        known, prompt = self._known, list[int]()
        if self._asked.prompt and known.before is not None:
            text = self._tokenizer.encode(f" {self._asked.prompt.strip()}", False)
            prompt = [known.before, *text[-_MAX_PROMPT:]]
        ids = [*prompt, known.start]
        if self._sound.is_multilingual:
            ids += [self._tokenizer.token_to_id(f"<|{language}|>"), known.task]
        rules: dict[str, object] = {
            "suppress": list(self._sound.suppressed),
            "suppress_first": list(self._sound.suppressed_first),
        }
        if self._asked.is_timed and known.first_time is not None:
            rules |= {
                "first_time": known.first_time,
                "no_times": known.no_times,
                "end": self._service.limits.eos_ids[0],
                "last_first": known.first_time + _FIRST_TIMES,
            }
        elif known.no_times is not None:
            ids.append(known.no_times)
        prompt_ids = [id for id in ids if id is not None]
        return self._of(part, prompt_ids, at, None, rules)

    def _of(
        self,
        part: SoundPart,
        ids: list[int],
        at: int,
        max_tokens: int | None,
        rules: Mapping[str, object],
        purpose: str = "",
    ) -> RequestSpec:
        """A sequence whose first place reads the sound."""
        limits, context = self._service.limits, self._exchange.context
        tower = self._sound.tower
        rows = self._sound.rows(part.windows, part.frames)
        grid = (part.windows, tower.bands, part.frames)
        content = Content(part.digest, ContentKind.MEL, part.mel, grid, rows)
        span = Span(0, 1, part.digest, kind=ContentKind.MEL, token=ids[0])
        parsed = parse_sampling(
            {
                "max_new_tokens": max_tokens,
                "temperature": self._asked.temperature,
                "skip_special_tokens": True,
            },
            prompt_len=len(ids),
            limits=limits,
            draw_seed=self._service.draw_seed,
        ).with_processor(PROCESSOR, json.dumps(rules).encode())
        scores = ScoreOptions(len(ids)) if self._asked.form == "verbose_json" else ScoreOptions()
        prompt = PromptSpec(ids, parsed, scores, spans=(span,), contents=(content,))
        fields = Fields({"rid": f"{context.id}{purpose and f'-{purpose}'}-{at}"})
        return build_specs(context, fields, [prompt], "transcription")[0]

    async def _stream(self, specs: Sequence[RequestSpec], sound: DecodedSound) -> None:
        exchange, whole = self._exchange, list[str]()
        await exchange.begin_events()
        for spec in specs:
            async with aclosing(run(self._service.generator, [spec])) as chunks:
                async for _, chunk in chunks:
                    text = chunk.text if whole else chunk.text.lstrip()
                    if text:
                        whole.append(text)
                        await exchange.event({"type": "transcript.text.delta", "delta": text})
        text = "".join(whole).strip()
        done: Json = {"type": "transcript.text.done", "text": text, "usage": _usage(sound)}
        await exchange.event(done)
        await exchange.end_events()

    async def _respond(
        self, chunks: Sequence[TextChunk], sound: DecodedSound, language: str
    ) -> None:
        exchange, form = self._exchange, self._asked.form
        segments: list[SpokenSegment] = []
        details: list[Json] = []
        for chunk, part in zip(chunks, sound.parts, strict=True):
            found = self._segments(chunk, part)
            mean = _mean_logprob(chunk)
            details += [_shown(one, len(details) + i, mean) for i, one in enumerate(found)]
            segments += found
        text = "".join([s.text for s in segments] or [chunk.text for chunk in chunks]).strip()
        if form == "text":
            await exchange.text(f"{text}\n")
        elif form in ("srt", "vtt"):
            await exchange.text(subtitles(segments, is_vtt=form == "vtt"))
        elif form == "json":
            await exchange.json({"text": text, "usage": _usage(sound)})
        else:
            await exchange.json(
                {
                    "task": "translate" if self._is_translation else "transcribe",
                    "language": language,
                    "duration": round(sound.seconds, 3),
                    "text": text,
                    "segments": details,
                    "usage": _usage(sound),
                }
            )

    def _segments(self, chunk: TextChunk, part: SoundPart) -> list[SpokenSegment]:
        first = self._known.first_time
        if first is None or not self._asked.is_timed:
            return []
        found, tokens, start_s = list[SpokenSegment](), list[int](), part.start_s
        for token in [*chunk.tokens, None]:
            is_time = token is not None and token >= first
            if token is not None and not is_time:
                tokens.append(token)
                continue
            end_s = part.end_s
            if is_time and token is not None:
                end_s = min(part.end_s, part.start_s + (token - first) * _STEP_S)
            text = self._tokenizer.decode(tokens, True)
            if text.strip():
                found.append(SpokenSegment(start_s, end_s, text, tokens))
            tokens, start_s = [], end_s
        return found


def _languages(tokenizer: Tokenizer, sound: SoundConfig) -> dict[int, str]:
    """Token -> code of each language: they follow the start of a transcript."""
    found: dict[int, str] = {}
    for id in range(sound.token + 1, sound.token + 200):
        text = tokenizer.id_to_token(id) or ""
        code = text.removeprefix("<|").removesuffix("|>")
        if not (text == f"<|{code}|>" and code.isalpha() and 2 <= len(code) <= 3):
            break
        found[id] = code
    return found


def _usage(sound: DecodedSound) -> Json:
    return {"type": "duration", "seconds": round(sound.seconds, 3)}


def _mean_logprob(chunk: TextChunk) -> float:
    logprobs = [s.logprob for s in chunk.output_scores if s.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


def _shown(one: SpokenSegment, number: int, mean_logprob: float) -> Json:
    data = one.text.encode()
    return {
        "id": number,
        "start": round(one.start_s, 2),
        "end": round(one.end_s, 2),
        "text": one.text,
        "tokens": one.tokens,
        "avg_logprob": round(mean_logprob, 4),
        "compression_ratio": round(len(data) / len(zlib.compress(data)), 3),
    }


def subtitles(segments: Sequence[SpokenSegment], is_vtt: bool) -> str:
    """The segments as SubRip or WebVTT."""
    mark = "." if is_vtt else ","
    found = ["WEBVTT\n"] if is_vtt else []
    for number, one in enumerate(segments, 1):
        times = f"{_clock(one.start_s, mark)} --> {_clock(one.end_s, mark)}"
        head = times if is_vtt else f"{number}\n{times}"
        found.append(f"{head}\n{one.text.strip().replace('-->', '->')}\n")
    return "\n".join(found)


def _clock(seconds: float, mark: str) -> str:
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
