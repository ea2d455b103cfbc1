"""A scripted engine on the far end of a local link: says known tokens in pieces of random size.

It keeps the engine's promises (one end per request, stop ids, length, abort, StopAt) and nothing
else, so that the front can be tested without a scheduler or a model.
"""

import asyncio
import random
from array import array
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import tokenizers
from tokenizers import AddedToken, decoders, models

from banyan.engine_client.client import ClientLimits, EngineClient
from banyan.messages.events import Event, Failed, Finished, Ready, Reply, Stats, Tokens
from banyan.messages.plan import RowScores
from banyan.messages.requests import Abort, Control, Generate, StopAt
from banyan.messages.transport import LocalEngineLink, local_pair
from banyan.tokenizer.tokenizer import Tokenizer, TokenizerFacts

EOS = 0
VOCAB = 260


def letters() -> Tokenizer:
    """Id 0 = "<eos>" (special), 1 = "é"'s first byte …: each byte b of UTF-8 is id b + 1."""
    marks = {}
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = 0
    for byte in range(256):
        if byte in shown:
            marks[byte] = chr(byte)
        else:
            marks[byte] = chr(256 + hidden)
            hidden += 1
    vocab = {"<eos>": EOS, **{marks[b]: b + 1 for b in range(256)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", normalized=False)])
    facts = TokenizerFacts("test", {"eos_token": "<eos>"}, eos_ids=(EOS,))
    return Tokenizer(backend, facts)


def ids_of(text: str) -> list[int]:
    return [b + 1 for b in text.encode()]


def logprob_of(position: int) -> float:
    """The log-probability that the fake engine reports at a position; exact in float32."""
    return -position / 8 - 0.125


@dataclass
class FakeEngine:
    """Answers everything that comes over `link`.

    Attributes:
        answer: the tokens that a request would produce if nothing stopped it.
        rng: decides how tokens are split into events and turns.
        hold: requests stay open without a token while this is set.
        failure: answer requests with this instead.
    """

    link: LocalEngineLink
    answer: Callable[[Generate], list[int]]
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    hold: bool = False
    failure: tuple[int, str] | None = None
    replies: bool = True
    received: list = field(default_factory=list)
    live: dict = field(default_factory=dict)

    async def run(self) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.link.poll_fd(), woken.set)
        try:
            while True:
                for message in self.link.receive():
                    self.receive(message)
                self.step()
                if self.live and not self.hold:
                    await asyncio.sleep(0)
                else:
                    woken.clear()
                    if not (waiting := self.link.receive()):
                        await woken.wait()
                    for message in waiting:
                        self.receive(message)
        finally:
            loop.remove_reader(self.link.poll_fd())

    def say(self, *events: Event) -> None:
        self.link.send(list(events))

    def receive(self, message) -> None:
        self.received.append(message)
        match message:
            case Generate():
                if self.failure:
                    self.say(Failed(message.request, *self.failure))
                    return
                self.live[message.request] = Running(message, self.answer(message))
            case Abort():
                if run := self.live.pop(message.request, None):
                    self.say(run.finished("abort"))
            case StopAt():
                if run := self.live.pop(message.request, None):
                    run.said = min(run.said, message.length)
                    self.say(run.finished("stop"))
            case Control():
                if self.replies:
                    self.say(Reply(message.call, True, message.verb))

    def step(self) -> None:
        if self.hold:
            return
        for id, run in list(self.live.items()):
            events = run.advance(self.rng)
            if isinstance(events[-1], Finished):
                del self.live[id]
            if self.rng.random() < 0.5:
                for event in events:
                    self.say(event)
            else:
                self.say(*events)


class Running:
    """One request of the fake engine."""

    def __init__(self, generate: Generate, output: list[int]) -> None:
        self.generate = generate
        self.prompt = list(array("i", generate.tokens))
        self.output, self.end, self.matched = self._cut(output)
        self.said = 0
        self.scored = max(generate.score_from, 1)

    def advance(self, rng: random.Random) -> list[Event]:
        step = min(rng.randint(0, 3), len(self.output) - self.said)
        new = self.output[self.said : self.said + step]
        first, self.said = self.said, self.said + step
        events: list[Event] = []
        if new or self.generate.score_from >= 0:
            tokens = array("i", new).tobytes()
            events.append(Tokens(self.generate.request, first, tokens, self.scores(rng), 2))
        if self.said == len(self.output):
            events.append(self.finished(self.end, self.matched))
        return events or [Stats()]

    def scores(self, rng: random.Random) -> list[RowScores]:
        """What became known, sometimes with positions that were reported before."""
        if self.generate.score_from < 0:
            return []
        end = len(self.prompt) + self.said
        again = max(self.generate.score_from, 1, self.scored - rng.randint(0, 2))
        self.scored = end
        positions = range(again, end)
        top, ids = self.generate.score_top, self.generate.score_ids
        return [
            RowScores(
                -1,
                again,
                array("f", [logprob_of(p) for p in positions]).tobytes(),
                array("i", [i for p in positions for i in range(top)]).tobytes(),
                array("f", [-float(i) for p in positions for i in range(top)]).tobytes(),
                array("f", [-float(i) for p in positions for i in ids]).tobytes(),
            )
        ]

    def finished(self, reason: str, matched: int = -1) -> Finished:
        return Finished(
            self.generate.request, reason, len(self.prompt), self.said, 2, matched=matched
        )

    def _cut(self, output: list[int]) -> tuple[list[int], str, int]:
        sampling = self.generate.sampling
        for i, token in enumerate(output[: sampling.max_new_tokens]):
            if token in sampling.stop_ids and i + 1 > sampling.min_new_tokens:
                return output[: i + 1], "stop", token
        return output[: sampling.max_new_tokens], "length", -1


@asynccontextmanager
async def serving(answer, *, seed=0, ready=True, clock=None, origin="", kept=False, **limits):
    """A started EngineClient and the fake engine behind it."""
    front, link = local_pair()
    engine = FakeEngine(link, answer, random.Random(seed))
    client = EngineClient(
        front, ClientLimits(**limits), clock=clock, origin=origin, is_kept_up=kept
    )
    task = asyncio.create_task(engine.run())
    await client.start()
    if ready:
        engine.say(Ready(max_total_tokens=4096, max_request_tokens=1024, max_running=8))
        await client.ready()
    try:
        yield client, engine
    finally:
        await client.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until `condition` holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came true")
