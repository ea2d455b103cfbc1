"""MediaService: from the parts of a request to contents and token ids.

A request's pictures and sounds are fetched, counted against the limits, and then decoded in worker
processes (worker.py). The event loop only moves bytes. `NeedsMedia` is how the reading of a
request, which runs in a thread, reports the parts that it cannot go on without.
"""

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from banyan.base.errors import ConfigError, RequestError
from banyan.base.os import num_cores
from banyan.config.schema import MediaOptions
from banyan.media.parts import AUDIO, IMAGE, NOUNS, MediaPart
from banyan.media.processes import (
    DecodedPicture,
    DecodedSound,
    MediaProcesses,
    PictureTask,
    SoundTask,
    WorkerEnded,
)
from banyan.media.rules import OPTIONS, RULES, Layout, layout_of, with_options
from banyan.media.sources import SourceLimits, fetch
from banyan.messages.spans import Content, ContentKind, Span
from banyan.model_config.media import MediaConfig
from banyan.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")
D = TypeVar("D", DecodedPicture, DecodedSound)

MAX_PIXELS = 40_000_000
"""Largest picture without `max_image_pixels` in --mm-process-config."""
MAX_PARTS = 256
"""Pictures of one request without --limit-mm-data-per-request."""
NO_LIMIT_S = 600.0
"""Longest time for the pictures of a request under --mm-per-request-timeout 0."""
_FETCHES = 4
"""Files that one request fetches at a time."""


@dataclass(frozen=True)
class PreparedItem:
    """One picture or sound, ready for a prompt.

    Attributes:
        content: its patches or spectrogram, and the digest that every key contains.
        placeholder: id that the prompt has once for it; also the id at the feature places.
        stretch: ids in place of the placeholder.
        runs: (first, count, first feature row) of the feature places in `stretch`.
        shape: the merged grid, if there is one run.
        is_mutual: its places attend to each other in both directions.
    """

    content: Content
    placeholder: int
    stretch: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    shape: tuple[int, int, int]
    is_mutual: bool = False


class NeedsMedia(Exception):
    """A request cannot be read on before these parts are prepared."""

    def __init__(self, parts: Sequence[MediaPart]) -> None:
        super().__init__(f"{len(parts)} pictures are not prepared")
        self.parts = parts


@dataclass
class PreparedMedia:
    """The prepared pictures of a request, by `MediaPart.key`; empty until something needs them."""

    items: dict[bytes, PreparedItem] = field(default_factory=dict[bytes, PreparedItem])

    def of(self, parts: Sequence[MediaPart]) -> list[PreparedItem]:
        """The pictures of `parts`. Raises NeedsMedia if one is not prepared."""
        missing = {p.key: p for p in parts if p.key not in self.items}
        if missing:
            raise NeedsMedia(list(missing.values()))
        return [self.items[p.key] for p in parts]


@dataclass(frozen=True)
class Expanded:
    """A prompt with its pictures.

    Attributes:
        ids: placeholders stand at the feature places.
        spans, contents: of `Generate`.
    """

    ids: list[int]
    spans: tuple[Span, ...] = ()
    contents: tuple[Content, ...] = ()


def expanded(
    ids: Sequence[int],
    items: Sequence[PreparedItem],
    places: Mapping[int, str],
    texts: Mapping[int, str] | None = None,
) -> Expanded:
    """The prompt with the stretch of each item in place of its placeholder.

    Args:
        places: placeholder -> what stands there ("pictures").
        texts: placeholder -> its text, for clients that write it into their prompts.

    Raises:
        RequestError: the prompt has another number of placeholders.
    """
    rest: dict[int, Iterator[PreparedItem]] = {}
    for placeholder, noun in places.items():
        own = [item for item in items if item.placeholder == placeholder]
        count = sum(id == placeholder for id in ids)
        if count != len(own):
            hint = f"Put {noun} into messages of the user; the chat template shows no others"
            if texts is not None:
                hint = f"Write {texts[placeholder]!r} once for each of the {noun}"
            raise RequestError(
                f"the prompt has {count} places for {noun}, and {len(own)} {noun} came",
                param="messages" if texts is None else "image_data",
                code="unsupported_content",
                hint=hint,
            )
        rest[placeholder] = iter(own)
    found: list[int] = []
    spans: list[Span] = []
    contents: dict[bytes, Content] = {}
    for id in ids:
        if id not in rest:
            found.append(id)
            continue
        item = next(rest[id])
        content = item.content
        contents.setdefault(content.digest, content)
        for first, size, offset in item.runs:
            is_whole = len(item.runs) == 1
            spans.append(
                Span(
                    len(found) + first,
                    size,
                    content.digest,
                    offset,
                    item.shape if is_whole else (1, 1, size),
                    content.kind,
                    item.is_mutual,
                )
            )
        found += item.stretch
    return Expanded(found, tuple(spans), tuple(contents.values()))


@dataclass(frozen=True)
class _Measured:
    """A file, and what becomes of its picture."""

    part: MediaPart
    data: bytes
    settings: dict[str, object]
    layout: Layout


class MediaService:
    """Prepares the pictures of requests for one model.

    Args:
        model: how it takes pictures.
        max_tokens: context length; a request whose pictures alone are longer is refused.
    """

    def __init__(
        self, model: MediaConfig, media: MediaOptions, tokenizer: Tokenizer, max_tokens: int
    ) -> None:
        if model.tower is not None and model.rule not in RULES:
            raise ConfigError(
                f"the model's resolution rule {model.rule!r} is not known",
                f"known: {', '.join(RULES)}; --language-model-only serves its text",
            )
        self.model = model
        self.media = media
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._settings = _settings(model, media.process)
        self._max_pixels = _max_pixels(media.process)
        self._sources = SourceLimits(
            media.max_file_mb << 20,
            tuple(domain.lower().rstrip(".") for domain in media.domains),
            os.path.realpath(media.folder) if media.folder else "",
        )
        self._slots = asyncio.Semaphore(media.max_concurrent or 1)
        self._decoding = asyncio.Semaphore(1)
        """Base64 is decoded next to the event loop: each thread makes that wait longer."""
        self._cache = ItemCache(media.cache_mb << 20)
        self._workers = MediaProcesses(media.workers or max(1, min(4, num_cores() - 1)))
        self._encoded: dict[str, tuple[int, ...]] = {}

    @property
    def takes(self) -> Mapping[str, int]:
        """Kinds of parts that prompts may have -> the token that the chat template writes."""
        sound = self.model.sound
        found = {IMAGE: self.model.image_token if self.model.tower is not None else None}
        found[AUDIO] = None if sound is None or sound.is_cross else sound.token
        return {kind: token for kind, token in found.items() if token is not None}

    @property
    def placeholders(self) -> Mapping[int, str]:
        """Placeholder -> what stands there, for `expanded`."""
        return {token: NOUNS[kind] for kind, token in self.takes.items()}

    @property
    def placeholder_texts(self) -> Mapping[int, str]:
        """Placeholder -> its text."""
        return {token: self._tokenizer.id_to_token(token) or "" for token in self.takes.values()}

    async def prepare(
        self, parts: Sequence[MediaPart], tenant: bytes = b""
    ) -> dict[bytes, PreparedItem]:
        """The items of a request's parts, by their keys.

        Args:
            tenant: the caller; nothing that was prepared for another one is used.

        Raises:
            RequestError: 400; too many parts, or one cannot be fetched, read or decoded in time.
        """
        for kind in {part.kind for part in parts}:
            self.check_count(sum(part.kind == kind for part in parts), kind)
        return await self._in_time(
            len(parts), lambda deadline_s: self._prepare(parts, tenant, deadline_s)
        )

    async def windows(self, data: bytes, param: str, tenant: bytes = b"") -> DecodedSound:
        """The windows of a file of sound, each a content of its own.

        Raises:
            RequestError: 400; it cannot be read or decoded in time.
        """
        part = MediaPart(AUDIO, data, param)
        self._check_bytes(part, data)
        found = await self._in_time(
            1, lambda deadline_s: self._decode_sound(part, data, deadline_s)
        )
        if not tenant:
            return found
        owned = [
            msgspec.structs.replace(one, digest=hashlib.sha256(tenant + one.digest).digest())
            for one in found.parts
        ]
        return msgspec.structs.replace(found, parts=owned)

    async def _in_time(self, count: int, work: Callable[[float], Awaitable[T]]) -> T:
        """Run `work` when its turn comes, with its deadline."""
        limit_s = self.media.timeout_s or NO_LIMIT_S
        async with self._slots:
            try:
                async with asyncio.timeout(limit_s):
                    return await work(time.monotonic() + limit_s)
            except TimeoutError:
                raise RequestError(
                    f"the {count} files were not fetched and decoded within "
                    f"{self.media.timeout_s:g} s",
                    param="messages",
                    code="media_timed_out",
                    hint="Send fewer or smaller ones, or start with a longer "
                    "--mm-per-request-timeout",
                ) from None

    def check_count(self, count: int, kind: str) -> None:
        """RequestError if a request has more pictures or sounds than it may have."""
        given = self.media.limits.get(kind)
        most = given if isinstance(given, int) else MAX_PARTS
        if count > most:
            raise RequestError(
                f"a request may have {most} {NOUNS[kind]}, this one has {count:,}",
                param="messages",
                code="too_many_images" if kind == IMAGE else "too_many_sounds",
                hint="Send fewer, or start with a larger --limit-mm-data-per-request",
            )

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()

    async def _prepare(
        self, parts: Sequence[MediaPart], tenant: bytes, deadline_s: float
    ) -> dict[bytes, PreparedItem]:
        few = asyncio.Semaphore(_FETCHES)

        async def load(part: MediaPart) -> bytes:
            async with few:
                if isinstance(part.source, str):
                    return await fetch(part.source, self._sources, part.param)
                if isinstance(part.source, bytes):
                    return part.source
            async with self._decoding:
                return await asyncio.to_thread(part.source.decoded)

        files = await _all(load(part) for part in parts)
        found: dict[bytes, PreparedItem] = {}
        keys: dict[bytes, bytes] = {}
        measured: list[_Measured] = []
        for part, data in zip(parts, files, strict=True):
            self._check_bytes(part, data)
            keys[part.key] = await asyncio.to_thread(_cache_key, part, data, tenant)
            item = self._cache.get(keys[part.key])
            if item is None and part.kind == AUDIO:
                item = await self._hear(part, data, deadline_s)
                item = owned(item, tenant) if tenant else item
                self._cache.put(keys[part.key], item)
            if item is None:
                measured.append(await self._measure(part, data, deadline_s))
            else:
                found[part.key] = item
        self._check_tokens([*(i.stretch for i in found.values())], measured)
        items = await _all(self._decode(one, deadline_s) for one in measured)
        for one, item in zip(measured, items, strict=True):
            if tenant:
                item = owned(item, tenant)
            self._cache.put(keys[one.part.key], item)
            found[one.part.key] = item
        return found

    def _check_bytes(self, part: MediaPart, data: bytes) -> None:
        if len(data) > self._sources.max_bytes:
            raise RequestError(
                f"{part.param}: the file has {len(data):,} bytes, limit "
                f"{self._sources.max_bytes:,} (--media-url-max-file-size-mb)",
                param="messages",
                code="invalid_image",
            )

    def _check_tokens(
        self, stretches: Sequence[tuple[int, ...]], measured: Sequence[_Measured]
    ) -> None:
        count = sum(map(len, stretches)) + sum(one.layout.num_places for one in measured)
        if count >= self._max_tokens:
            raise RequestError(
                f"The pictures and sounds ({count} tokens) are longer than the model's context "
                f"length ({self._max_tokens} tokens).",
                param="messages",
                code="context_length_exceeded",
                hint='Send fewer or smaller ones, or set "detail": "low"',
            )

    async def _measure(self, part: MediaPart, data: bytes, deadline_s: float) -> _Measured:
        answer = await self._ask_picture(part, PictureTask(data, self._max_pixels), deadline_s)
        settings = dict(with_options(self.model.rule, self._settings, part.options))
        layout = layout_of(self.model.rule, answer.width, answer.height, settings)
        return _Measured(part, data, settings, layout)

    async def _decode(self, one: _Measured, deadline_s: float) -> PreparedItem:
        task = PictureTask(one.data, self._max_pixels, self.model.rule, one.settings)
        answer = await self._ask_picture(one.part, task, deadline_s)
        layout = layout_of(self.model.rule, answer.width, answer.height, one.settings)
        content = Content(
            answer.digest, ContentKind.PATCHES, answer.patches, layout.grid, layout.rows
        )
        placeholder = self.model.image_token
        assert placeholder is not None, "a model without a tower takes no pictures"
        ids: list[int] = list(self.model.begin)
        runs: list[tuple[int, int, int]] = []
        rows = iter(layout.runs)
        for piece in layout.stretch:
            if isinstance(piece, str):
                ids += await self._ids(piece)
            else:
                first, count = next(rows)
                runs.append((len(ids), count, first))
                ids += [placeholder] * count
        ids += self.model.end
        return PreparedItem(
            content, placeholder, tuple(ids), tuple(runs), layout.shape, self.model.is_mutual
        )

    async def _hear(self, part: MediaPart, data: bytes, deadline_s: float) -> PreparedItem:
        sound = self.model.sound
        assert sound is not None, "a model without a sound tower takes no sounds"
        (found,) = (await self._decode_sound(part, data, deadline_s)).parts
        rows = sound.rows(found.windows, found.frames)
        if not rows:
            raise RequestError(
                f"{part.param}: the sound is too short: {found.end_s:g} s",
                param="messages",
                code="invalid_audio",
            )
        grid = (found.windows, sound.tower.bands, found.frames)
        content = Content(found.digest, ContentKind.MEL, found.mel, grid, rows)
        return PreparedItem(
            content, sound.token, (sound.token,) * rows, ((0, rows, 0),), (1, 1, rows)
        )

    async def _decode_sound(self, part: MediaPart, data: bytes, deadline_s: float) -> DecodedSound:
        sound = self.model.sound
        assert sound is not None, "a model without a sound tower takes no sounds"
        task = SoundTask(
            data,
            sound.tower.bands,
            sound.tower.window,
            is_whole=sound.is_whole,
            is_cut=sound.is_cross,
            max_windows=sound.max_windows,
        )
        answer = await self._ask(task, DecodedSound, deadline_s)
        if answer.error:
            raise RequestError(
                f"{part.param}: the sound is refused: {answer.error}",
                param="messages",
                code="invalid_audio",
            )
        return answer

    async def _ids(self, text: str) -> tuple[int, ...]:
        if text not in self._encoded:
            encode = self._tokenizer.encode
            self._encoded[text] = tuple(await asyncio.to_thread(encode, text, False))
        return self._encoded[text]

    async def _ask(
        self,
        task: PictureTask | SoundTask,
        answer: type[D],
        deadline_s: float,
    ) -> D:
        try:
            return await self._workers.run(task, answer, deadline_s)
        except WorkerEnded:
            return answer(error="it takes too long or too much memory, or breaks its decoder")

    async def _ask_picture(
        self, part: MediaPart, task: PictureTask, deadline_s: float
    ) -> DecodedPicture:
        answer = await self._ask(task, DecodedPicture, deadline_s)
        if answer.error:
            raise RequestError(
                f"{part.param}: the picture is refused: {answer.error}",
                param="messages",
                code="invalid_image",
            )
        return answer


def owned(item: PreparedItem, tenant: bytes) -> PreparedItem:
    """The item under a digest that no other caller's pictures have."""
    digest = hashlib.sha256(tenant + item.content.digest).digest()
    return replace(item, content=msgspec.structs.replace(item.content, digest=digest))


def _cache_key(part: MediaPart, data: bytes, tenant: bytes) -> bytes:
    found = hashlib.sha256(repr((tenant, sorted(part.options.items()))).encode())
    found.update(data)
    return found.digest()


def unread_options(rule: str, part: MediaPart) -> list[str]:
    """Options of a part that change nothing with this rule."""
    if part.kind == AUDIO:
        return list(part.options)
    return [name for name in part.options if name != "detail" and name not in OPTIONS.get(rule, ())]


def check_media(media: MediaOptions) -> None:
    """ConfigError if a JSON flag or the folder cannot be meant."""
    for name in media.process:
        if name != "image" or not isinstance(media.process[name], Mapping):
            raise ConfigError(
                f"--mm-process-config: {name[:40]!r} must be image, with an object of settings",
                "models here take pictures only",
            )
    _max_pixels(media.process)
    for name, value in media.limits.items():
        if name not in ("image", "video", "audio") or type(value) is not int or value < 0:
            raise ConfigError(
                "--limit-mm-data-per-request must be numbers by kind, like "
                f'{{"image": 4}}, got {name[:40]!r}: {str(value)[:40]}'
            )
    if media.folder and not os.path.isdir(media.folder):
        raise ConfigError(f"--allowed-local-media-path {media.folder!r} is no folder here")


def _settings(model: MediaConfig, process: Mapping[str, object]) -> dict[str, object]:
    """The rule's settings, overridden by --mm-process-config."""
    settings: dict[str, object] = dict(model.settings)
    image = process.get("image", {})
    assert isinstance(image, Mapping)
    for name, value in image.items():
        if name == "max_image_pixels":
            continue
        if name not in settings or type(value) is not type(settings[name]):
            raise ConfigError(
                f"--mm-process-config: image.{name} = {str(value)[:40]!r} is not a setting of this "
                "model",
                f"its settings: {', '.join(sorted(settings))}, max_image_pixels",
            )
        if isinstance(value, int) and not 0 <= value < 2**31:
            raise ConfigError(f"--mm-process-config: image.{name} must be in [0, 2^31)")
        settings[name] = value
    return settings


def _max_pixels(process: Mapping[str, object]) -> int:
    image = process.get("image", {})
    assert isinstance(image, Mapping)
    value = image.get("max_image_pixels", MAX_PIXELS)
    if type(value) is not int or not 1 <= value <= 1 << 30:
        raise ConfigError("--mm-process-config: image.max_image_pixels must be in [1, 2^30]")
    return value


class ItemCache:
    """Prepared items by the digest of their file, caller and options; the oldest go first.

    Args:
        max_bytes: of their patches; 0 = nothing is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[bytes, PreparedItem] = OrderedDict()
        self.num_bytes = 0
        self.hits = 0

    def get(self, key: bytes) -> PreparedItem | None:
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
            self.hits += 1
        return item

    def put(self, key: bytes, item: PreparedItem) -> None:
        size = len(item.content.data)
        if size > self._max_bytes or key in self._items:
            return
        self._items[key] = item
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, oldest = self._items.popitem(last=False)
            self.num_bytes -= len(oldest.content.data)


async def _all(works: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """The results in order; the first error ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
