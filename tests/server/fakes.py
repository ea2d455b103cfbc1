"""A scripted service behind the real application, and the real application on a real socket."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import httpx
import tokenizers
import uvicorn
from msgspec import structs
from tokenizers import decoders, models, pre_tokenizers

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.chat_template.template import Chat, ChatTemplate
from banyan.config.schema import CacheConfig, Config, LoadConfig, ObserveConfig, ServerConfig
from banyan.engine_client.client import Health, Replica
from banyan.messages.events import Ready, Reply, Stats
from banyan.messages.requests import NO_SCORES
from banyan.messages.spans import check_spans
from banyan.model_config.model_config import ModelConfig
from banyan.requests.admission import check_budget
from banyan.requests.generation import Finish, TextChunk, TokenScore, Usage
from banyan.requests.request_spec import RequestSpec
from banyan.requests.sampling_params import Limits
from banyan.server.http.app import App
from banyan.server.http.listen import bind, connections
from banyan.server.routes import create_app
from banyan.server.state import ServerState, Service
from banyan.tokenizer.tokenizer import Tokenizer, TokenizerFacts
from tests.support import pictures
from tests.support.scripted import scripted

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

MODEL_CONFIG = ModelConfig(
    path="/nowhere/tiny",
    format="safetensors",
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=256 + len(SPECIAL),
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    context_length=4096,
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and five special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    facts = TokenizerFacts(
        source="tiny",
        named={"eos_token": "<|end|>"},
        eos_ids=(256,),
        chat_templates={"default": TEMPLATE},
    )
    return Tokenizer(backend, facts)


@dataclass
class Step:
    """One scripted chunk: text, and how it ends. The generator waits for `gate` before it."""

    text: str
    finish: Finish | None = None


READY = Ready(max_total_tokens=8192, max_request_tokens=4096, max_running=8)


class FakeGenerator:
    """Answers every request with `script`; remembers what it was asked and what was closed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.limits = Limits(MODEL_CONFIG.context_length, MODEL_CONFIG.vocab_size, (256,))
        self.script: Callable[[RequestSpec], list[Step]] = lambda _: steps("Hel", "lo")
        self.found = Usage(0, 0, cached_tokens=3)
        """What each prompt finds in the cache."""
        self.asked: list[RequestSpec] = []
        self.started = threading.Semaphore(0)
        self.closed = threading.Semaphore(0)
        self.open: dict[RequestId, None] = {}
        self.hold_after: int | None = None
        """Chunks after which generation waits for ever; None = it does not."""

    def check(self, requests: Sequence[RequestSpec]) -> None:
        check_budget(requests, self.limits)

    @scripted
    async def generate(self, request: RequestSpec) -> AsyncGenerator[TextChunk, None]:
        self.asked.append(request)
        self.open[request.id] = None
        self.started.release()
        try:
            async for chunk in self._chunks(request):
                yield chunk
        finally:
            del self.open[request.id]
            self.closed.release()

    async def _chunks(self, request: RequestSpec) -> AsyncGenerator[TextChunk, None]:
        num_output, message = 0, request.message
        top = message.score_top
        prompt_scores = [
            TokenScore(
                None if i == 0 else -float(i),
                t,
                (-0.5,) * message.score_top,
                (t,) * message.score_top,
            )
            for i, t in enumerate(request.prompt)
            if 0 <= message.score_from <= i
        ]
        for number, step in enumerate(self.script(request)):
            if number == self.hold_after:
                await asyncio.Event().wait()
            ids = self.tokenizer.encode(step.text, add_special_tokens=False)
            num_output += len(ids)
            output_scores = [TokenScore(-0.25, t, (-0.25, -2.0)[:top], (t, 1)[:top]) for t in ids]
            yield TextChunk(
                text=step.text,
                tokens=ids,
                usage=structs.replace(
                    self.found, prompt_tokens=len(request.prompt), output_tokens=num_output
                ),
                prompt_scores=prompt_scores,
                output_scores=[] if message.score_from == NO_SCORES else output_scores,
                finish=step.finish,
            )
            prompt_scores = []


def steps(*texts: str, finish: Finish | None = None) -> list[Step]:
    """Chunks with these texts; the last ends with `finish`, at a stop token unless given."""
    found = [Step(text) for text in texts]
    found[-1] = replace(found[-1], finish=finish or Finish("stop", 256))
    return found


class FakeClient:
    """Stands in for the EngineClient."""

    def __init__(self) -> None:
        self.stats = Stats(running=2, waiting=1, held_pages=4)
        self.now = Health(True, True, True)
        self.calls: list[str] = []
        self.aborted: list[RequestId] = []
        self.reply = Reply(1, True, "Cache flushed.")
        self.others: list[Replica] = []
        self.is_full = False

    def refuse_if_full(self, caller=b"") -> None:
        if self.is_full:
            raise RequestError("The request queue is full.", status=503, code="queue_full")

    def health(self) -> Health:
        return self.now

    def replicas(self) -> list[Replica]:
        return [Replica(0, self.now.alive, READY, self.stats), *self.others]

    async def ask(self, verb: str, timeout_s: float = 60.0, **args: object):
        return [(0, await self.control(verb, timeout_s, **args))]

    async def control(self, verb: str, timeout_s: float = 60.0, **args: object) -> Reply:
        self.calls.append(verb)
        return self.reply

    def abort(self, request: RequestId) -> None:
        self.aborted.append(request)


def chat_of(tokenizer: Tokenizer, source: str | None = None) -> Chat:
    """As `load_chat`, with the worker process of an earlier test: a start takes 0.1 s of CPU."""
    source = tokenizer.facts.chat_template if source is None else source
    assert source is not None
    named, special = tuple(tokenizer.facts.named.items()), tuple(tokenizer.special_texts)
    return Chat(tokenizer, _template(source, named, special, tuple(tokenizer.added)))


@lru_cache(maxsize=8)
def _template(
    source: str,
    named: tuple[tuple[str, str], ...],
    special: tuple[str, ...],
    added: tuple[str, ...],
) -> ChatTemplate:
    return ChatTemplate(source, dict(named), special, added)


class Site:
    """The application with its fakes, served on a loopback port by a thread of its own."""

    def __init__(
        self,
        config: ServerConfig | None = None,
        send_timeout_s: float = 30.0,
        observe: ObserveConfig | None = None,
    ) -> None:
        self.tokenizer = byte_tokenizer()
        self.generator = FakeGenerator(self.tokenizer)
        self.client = FakeClient()
        self.state = ServerState(
            Config(
                model=LoadConfig(source="tiny", path=MODEL_CONFIG.path, served_name="tiny"),
                cache=CacheConfig(page_size=16),
                server=config or ServerConfig(),
                observe=observe or ObserveConfig(),
            )
        )
        self.service = Service(
            model_config=MODEL_CONFIG,
            ready=READY,
            client=self.client,
            generator=self.generator,
            limits=self.generator.limits,
            tokenizer=self.tokenizer,
            chat=chat_of(self.tokenizer),
        )
        self.state.service = self.service
        self.app: App = create_app(self.state, send_timeout_s)
        self.url = ""
        self.loop = asyncio.new_event_loop()

    @contextlib.contextmanager
    def serving(self) -> Iterator["Site"]:
        listener = bind(replace(self.state.config.server, host="127.0.0.1", port=0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        web = uvicorn.Server(
            uvicorn.Config(
                self.app,
                http=connections(),
                ws="none",
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=1,
            )
        )
        thread = threading.Thread(
            target=lambda: self.loop.run_until_complete(web.serve([listener])), daemon=True
        )
        thread.start()
        try:
            with httpx.Client(base_url=self.url, timeout=60, verify=False) as self.http:
                yield self
        finally:
            self.call(self.app.end_all, "The test is over.")
            web.should_exit = True
            thread.join(60)
            listener.close()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run a function on the server's loop, and wait for it."""

        async def run() -> None:
            found = function(*args)
            if inspect.isawaitable(found):
                await found

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)


PICTURE_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}[" + pictures.PAD + "]"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}<|assistant|>"
)


class Eyes:
    """A site whose model takes pictures."""

    def __init__(self, site: Site, **options: object) -> None:
        tokenizer = pictures.byte_tokenizer(*SPECIAL, pictures.PAD)
        self.pad = tokenizer.token_to_id(pictures.PAD)
        assert self.pad is not None
        media = pictures.media_service(tokenizer, **options)
        limits = replace(
            site.service.limits, vocab_size=256 + len(SPECIAL) + 1, media_ids=(self.pad,)
        )
        site.generator.limits = limits
        site.service = replace(
            site.service,
            tokenizer=tokenizer,
            chat=chat_of(tokenizer, PICTURE_TEMPLATE),
            media=media,
            limits=limits,
        )
        site.state.service = site.service
        self.site, self.media = site, media

    def post(self, path: str, body: object) -> httpx.Response:
        return self.site.http.post(path, json=body)

    def asked(self, path: str, body: object) -> RequestSpec:
        """The request that reaches the engine."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        found = self.site.generator.asked.pop()
        check_spans(found.message.tokens, found.message.spans, found.message.contents)
        return found

    def refusal(self, path: str, body: object) -> str:
        answer = self.post(path, body)
        assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
        assert not self.site.generator.asked
        return answer.text


def refusal(status: int, text: str = "refused by the engine") -> Finish:
    return Finish("abort", None, status, text, "engine_error")
