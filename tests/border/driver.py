"""Plays a list of actions against one core and one runner, and judges what clients see.

An action is (kind, number); the number alone decides what the kind leaves open, so a list of
actions can be cut down to the smallest that still fails.
"""

import re
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from banyan.engine.control import attach_store, detach_store
from banyan.engine.core import CoreRecorder
from banyan.engine.core_spec import CoreSpec
from banyan.kv_cache.hierarchical_cache import WRITE_BACK, WRITE_SELECTIVE, WRITE_THROUGH
from banyan.messages.control_ops import (
    MEMORY_TAGS,
    AttachStore,
    ControlOp,
    DetachStore,
    ReleaseMemory,
    ResumeMemory,
    StopProfile,
    TakeWeights,
)
from banyan.messages.events import Event, Failed, Finished, Reply, Tokens
from banyan.messages.requests import Abort, Control, Generate, RetractAll, RunControlOps, StopAt
from banyan.messages.sampling_params import SamplingParams
from banyan.scheduler.hicache_fetch import BEST_EFFORT, TIMEOUT, WAIT_COMPLETE
from tests.border.build import Peers, RandomPeers, World, build_core
from tests.border.kit import FAKE, Kit
from tests.border.laws import BorderError, require
from tests.border.oracle import BARRED, STOP_IDS, VOCAB, Answer

Action = tuple[str, int]
WEIGHTS = {
    "launch": 34,
    "complete": 32,
    "submit": 16,
    "copies": 10,
    "abort": 3,
    "stop": 2,
    "flush": 2,
    "retract_all": 1,
    "unknown": 1,
}
MAX_ALIVE = 24
ORDERS = 0.01
"""Share of the actions that orders take the place of."""


def random_actions(random: Random, count: int, orders: float = ORDERS) -> list[Action]:
    kinds = random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    actions = [(kind, random.randrange(1 << 30)) for kind in kinds]
    return [("orders" if random.random() < orders else kind, at) for kind, at in actions]


@dataclass
class Client:
    """What one request was promised, and what it has got."""

    answer: Answer
    got: list[int] = field(default_factory=list)
    vectors: int = 0
    scored: int = 0
    """Positions whose scores came."""
    hidden: int = 0
    """Positions whose hidden states came."""
    end: Finished | Failed | None = None
    kept: int | None = None
    """Output tokens after a StopAt."""
    is_aborted: bool = False


class Play:
    """One world being played."""

    def __init__(
        self,
        seed: int,
        record: Callable[[CoreSpec], CoreRecorder] | None = None,
        kit: Kit = FAKE,
        peers: Peers | None = None,
    ) -> None:
        random = Random(seed)
        self.kit = kit
        self.world: World = kit.world(random)
        self.now = 0.0
        self.clients: dict[str, Client] = {}
        self.namespaces: dict[int, bytes] = {}
        self.given: list[ControlOp] = []
        self.replies: list[bool] = []
        self.seen: Counter[str] = Counter()
        self.peers = peers
        if self.world.has_peers and peers is None:
            is_quick = bool(self.world.core.limits.drafts)
            self.peers = RandomPeers(Random(seed + 1), is_quick)
        recorder = record(self.world.core) if record else None
        self.core = build_core(self.world, self.peers, recorder)
        self.runner = kit.runner(
            *(self.world, Random(seed + 2), self.namespaces, self._interrupt, self._open_answers)
        )
        self._steps: deque[int] = deque()

    def act(self, action: Action) -> None:
        """Play one action, then look whether every invariant holds."""
        kind, number = action
        self.now += 0.01
        getattr(self, f"_{kind}")(Random(number))
        self._hear(self.core.take_events())
        self.runner.look(self.core.scheduler.store_fetcher.take_lookups())
        if self.world.core.role:
            self.runner.peer.execute(self.core.scheduler.take_transfer_ops())
        self.core.check()
        self._progress()

    def finish(self) -> None:
        """Let everything run to its end; nothing may be left over."""
        for round_ in range(6_000):  # most worlds need fewer than 1,000
            if self.core.released and len(self.replies) == len(self.given):
                self._give(ResumeMemory(list(self.core.released)))
            if self.core.is_idle and self.runner.is_quiet and not self.core.released:
                break
            self.act((("launch", "complete", "copies")[round_ % 3], round_))
        else:
            raise BorderError(f"still busy: {self.core.stats(self.now)}")
        open_ = [name for name, client in self.clients.items() if client.end is None]
        require(not open_, f"no end for {open_}")
        obeyed = [order for order, ok in zip(self.given, self.replies, strict=True) if ok]
        carried_out = self.runner.carried_out
        require(obeyed == carried_out, f"{carried_out} were carried out, the replies say {obeyed}")
        cache = self.core.scheduler.cache
        self.seen["evicted pages"] += cache.cached.evicted
        require(self.core.flush(self.now), "an idle engine does not flush")
        for group, pool in enumerate(cache.pools):
            require(pool.free == pool.total, f"group {group} leaks: {cache.ledgers[group]}")
        self.seen["retractions"] += self.core.scheduler.counters.retractions

    # -- actions ------------------------------------------------------------------------------

    def _submit(self, random: Random) -> None:
        if sum(client.end is None for client in self.clients.values()) >= MAX_ALIVE:
            return
        generate = self._random_request(random)
        self.namespaces[generate.sampling.seed] = generate.namespace
        story = self.kit.story(generate, self.world)
        self.clients[generate.request] = Client(Answer(generate, story))
        self.core.receive(generate, self.now)

    def _random_request(self, random: Random) -> Generate:
        abilities, scale = self.world.abilities, self.world.scale
        seed = len(self.clients) + 1
        stem = Random(random.randrange(3))
        length = random.choice((0, 4, 8, 11, 16, 21)) * scale
        prompt = [stem.randrange(VOCAB) for _ in range(length)]
        prompt += [random.randrange(VOCAB) for _ in range(random.choice((0, 0, 1, 3, 6)))]
        prompt = self._next_turn(Random(seed)) or prompt or [random.randrange(VOCAB)]
        new = random.choice((0, 1, 2, 5, 12, 20, 24)) if abilities.text else 0
        least = random.choice((0, min(3, new)))
        stop_ids = random.choice(((), STOP_IDS))
        ignore_eos = random.random() < 0.2
        score_from = random.choice((-1, -1, -1, -1, 0, len(prompt) // 2, len(prompt)))
        namespace = random.choice((b"", b"", b"", b"tenant"))
        priority = random.choice((0, 0, 0, 1, 5))
        grammar = "hash:" if random.random() < 0.25 else ""
        hidden_from = -1
        if self.world.has_hidden:
            hidden_from = random.choice((-1, -1, 0, len(prompt) // 2, len(prompt)))
        sampling = SamplingParams(
            max_new_tokens=new,
            min_new_tokens=least,
            seed=seed,
            stop_ids=stop_ids,
            ignore_eos=ignore_eos,
        )
        return self.kit.adapt(
            random,
            self.world,
            Generate(
                request=f"r{seed}",
                tokens=array("i", prompt).tobytes(),
                sampling=sampling,
                namespace=namespace,
                priority=priority,
                score_from=score_from if abilities.text else -1,
                grammar=grammar,
                pool=new == 0 and abilities.vectors,
                hidden_from=hidden_from,
            ),
        )

    def _next_turn(self, random: Random) -> list[int]:
        """Now and then, what somebody has asked and got, and a little more."""
        clients = self.clients.values()
        ended = [c for c in clients if c.end is not None and not c.answer.generate.spans]
        if not ended or random.random() < 0.8:
            return []
        client = random.choice(ended)
        said = list(array("i", client.answer.generate.tokens)) + client.got[: client.kept]
        new = [random.randrange(VOCAB) for _ in range(random.randrange(1, 4))]
        return said + new if len(said) < 30 * self.world.scale else []

    def _launch(self, random: Random) -> None:
        plan = self.core.launch(self.now)
        self.seen["held for peers"] += self.peers is not None and self.peers.is_pending
        if plan is not None:
            self._steps.append(plan.step)
            self.runner.launch(plan)
        self.runner.give_masks(self.core.take_masks())

    def _complete(self, random: Random) -> None:
        if not self._steps:
            return
        step = self._steps.popleft()
        result = self.runner.execute()
        require(result.step == step, f"step {result.step} ended before step {step}")
        events, masks = self.core.complete(result, self.now)
        self.seen["masks after launch"] += sum(bool(mask.bits) for mask in masks)
        self.runner.give_masks(masks)
        self._hear(events)

    def _open_answers(self) -> list[Answer]:
        return [client.answer for client in self.clients.values() if client.end is None]

    def _interrupt(self, is_behind: bool) -> bool:
        """The runner waits for a mask; `is_behind`: for one of a step after the oldest.

        returns: whether anything has happened that may have brought it.
        """
        masks = self.core.take_masks()
        self.runner.give_masks(masks)
        if masks or not is_behind:
            return bool(masks)
        self._complete(Random(0))
        return True

    def _copies(self, random: Random) -> None:
        held = self.runner.report_held() if random.random() < 0.7 else None
        if held is not None:
            self.core.receive(held, self.now)
        news = self.runner.peer.report() if self.world.core.role else None
        if news is not None:
            self.core.receive(news, self.now)
        if self.runner.copies_to_report:
            result = self.runner.report_copies(1 + random.randrange(3))
            self.core.receive(result, self.now)

    def _abort(self, random: Random) -> None:
        name = self._pick(random)
        if name:
            self.clients[name].is_aborted = True
            self.seen["aborts"] += 1
            self.core.receive(Abort(name), self.now)

    def _stop(self, random: Random) -> None:
        name = self._pick(random)
        if name and self.clients[name].got:
            client = self.clients[name]
            client.kept = 1 + random.randrange(len(client.got))
            self.seen["stops by the front"] += 1
            self.core.receive(StopAt(name, client.kept), self.now)

    def _flush(self, random: Random) -> None:
        request_table = self.core.scheduler.request_table
        is_held = bool(request_table.running) or any(r.flights for r in request_table.waiting)
        done = self.core.flush(self.now)
        require(done != is_held, "flush while requests hold pages")
        self.seen["flushes"] += done

    def _retract_all(self, random: Random) -> None:
        self.core.receive(RetractAll(), self.now)
        require(not self.core.scheduler.request_table.running, "a request runs on")

    def _orders(self, random: Random) -> None:
        tags = random.choice(([MEMORY_TAGS[0]], [MEMORY_TAGS[1]], list(MEMORY_TAGS)))
        kinds = (StopProfile(), ReleaseMemory(tags), ResumeMemory(tags), None, None)
        order = random.choice(kinds)
        if order is None:  # what runs would go on with pages of both weights
            self.core.receive(RetractAll(), self.now)
            order = TakeWeights("path", str(len(self.given)), random.random() < 0.5)
        self._give(order)

    def _switch(self, random: Random) -> None:
        """Attach a store or detach the one that there is, as an administrator would: what stands
        in the way is refused."""
        tier, stats = self.core.scheduler.cache.tier, self.core.stats(self.now)
        if tier is None or len(self.replies) < len(self.given):
            return
        if (stats.running or stats.waiting) and random.random() < 0.6:
            for name, client in self.clients.items():
                if client.end is None:
                    client.is_aborted = True
                    self.core.receive(Abort(name), self.now)
            return
        is_trial, force = random.random() < 0.2, random.random() < 0.5
        if tier.is_attached:
            order, does = DetachStore(is_trial), detach_store
            args: dict[str, str | int | float | bool] = {"force": force}
        else:
            order = AttachStore(
                *("file", random.choice((b"{}", b"{}", b'{"path": "other"}'))),
                *(random.choice((WRITE_THROUGH, WRITE_SELECTIVE, WRITE_BACK)),),
                *(random.choice((BEST_EFFORT, WAIT_COMPLETE, TIMEOUT)), 0, 0.3, 0.0, is_trial),
            )
            args = {"store": order.store, "options": order.options.decode(), "write": order.write}
            args |= {"prefetch": order.prefetch, "threshold": 0, "patience_s": order.timeout_s}
            does = attach_store
        self.given.append(order)
        control = Control(len(self.given), does.__name__, args=args)
        refused = does(self.core, control, self.now, is_trial)
        if refused is not None:
            self.given.pop()
            self.seen["refused switches of the store"] += 1

    def _give(self, order: ControlOp) -> None:
        self.given.append(order)
        self.core.receive(RunControlOps(len(self.given), [order]), self.now)

    def _unknown(self, random: Random) -> None:
        self.core.receive(Abort("nobody"), self.now)
        self.core.receive(StopAt("nobody", 3), self.now)

    def _pick(self, random: Random) -> str:
        alive = [name for name, client in self.clients.items() if client.end is None]
        return random.choice(alive) if alive else ""

    # -- judging ------------------------------------------------------------------------------

    def _progress(self) -> None:
        """Law 4: requests alive and nothing in flight means that a launch does something."""
        is_answered = len(self.replies) == len(self.given)
        if is_answered and (self.core.scheduler.is_idle or self.core.released):
            return
        if not self.runner.is_quiet:
            return
        plan = self.core.launch(self.now)
        while plan is None and self.peers is not None and self.peers.is_pending:
            self.peers.wait()
            if not self.runner.is_quiet:
                return
            plan = self.core.launch(self.now)
        events = self.core.take_events()
        rooms = self.core.scheduler.take_transfer_ops()
        if rooms:
            self.runner.peer.execute(rooms)
        stuck = plan is None and not events and not rooms
        require(not stuck, f"no progress: {self.core.stats(self.now)}")
        self._hear(events)
        if plan is not None:
            self._steps.append(plan.step)
            self.runner.launch(plan)
        self.runner.give_masks(self.core.take_masks())

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Reply):
                self.replies.append(event.ok)
                require(event.call == len(self.replies), f"{event} comes out of line")
                continue
            assert isinstance(event, (Tokens, Finished, Failed))
            client = self.clients[event.request]
            require(client.end is None, f"{event} after the end {client.end}")
            if isinstance(event, Tokens):
                self._tokens(client, event)
                continue
            client.end = event
            if isinstance(event, Finished):
                self._finished(client, event)
            else:
                self._failed(client, event)

    def _tokens(self, client: Client, event: Tokens) -> None:
        name, got = event.request, list(array("i", event.tokens))
        require(event.first == len(client.got), f"{name}: tokens at {event.first} come out of line")
        for token in got:
            right = client.answer.output(len(client.got))
            where = f"{name} output {len(client.got)}"
            require(token == right, f"{where}: token {token}, {right} is right")
            client.got.append(token)
        generate = client.answer.generate
        if event.vector:
            require(generate.pool, f"{name}: a vector nobody asked for")
            require(
                event.vector == client.answer.story.vector(),
                f"{name}: the vector of another sequence",
            )
            client.vectors += 1
        if event.hidden:
            self._hidden_states(client, event)
        for score in event.scores:
            require(generate.score_from >= 0, f"{name}: scores nobody asked for")
            first = max(1, generate.score_from) + client.scored
            require(score.first == first, f"{name}: scores of {score.first}, {first} is next")
            for value in array("f", score.logprobs):
                position = max(1, generate.score_from) + client.scored
                right = client.answer.score(position)
                is_right = abs(value - right) <= 1e-5
                require(is_right, f"{name}: score {value} of {position}, {right} is right")
                client.scored += 1

    def _hidden_states(self, client: Client, event: Tokens) -> None:
        name, start = event.request, client.answer.generate.hidden_from
        require(start >= 0, f"{name}: hidden states nobody asked for")
        size = len(client.answer.hidden(0))
        for at in range(0, len(event.hidden), size):
            position = start + client.hidden
            reported = event.hidden_first + at // size
            require(reported == position, f"{name}: hidden state of {reported}, {position} is next")
            right = client.answer.hidden(position)
            is_right = event.hidden[at : at + size] == right
            require(is_right, f"{name}: the hidden state of {position} is another's")
            client.hidden += 1

    def _finished(self, client: Client, event: Finished) -> None:
        name, answer = event.request, client.answer
        reason, length, matched = answer.end()
        require(event.prompt_tokens == answer.prompt_len, f"{name}: prompt of {event}")
        if event.reason == "abort":
            require(client.is_aborted, f"{name}: aborted by nobody")
            return
        if client.kept is not None:
            require((event.reason, event.output_tokens) == ("stop", client.kept), f"{event}")
            return
        reported = (event.reason, event.output_tokens, event.matched)
        require(
            reported == (reason, length, matched),
            f"{name}: {reported}, not {reason, length, matched}",
        )
        require(len(client.got) == length, f"{name}: {len(client.got)} tokens came of {length}")
        self.seen[f"finished by {reason}"] += 1
        if answer.generate.pool:
            require(client.vectors == 1, f"{name}: {client.vectors} vectors came")
            self.seen["pooled requests"] += 1
        if answer.generate.score_from >= 0:
            want = answer.prompt_len + length - max(1, answer.generate.score_from)
            require(client.scored == max(0, want), f"{name}: {client.scored} scores of {want}")
            self.seen["scored requests"] += 1
        if answer.generate.hidden_from >= 0:
            want = answer.prompt_len + max(0, length - 1) - answer.generate.hidden_from
            require(client.hidden == max(0, want), f"{name}: {client.hidden} states of {want}")
            self.seen["requests for hidden states"] += 1

    def _failed(self, client: Client, event: Failed) -> None:
        generate = client.answer.generate
        seed = generate.sampling.seed
        if event.text == "injected" and seed in self.runner.failed_seeds:
            self.seen["failed by a fault"] += 1
        elif event.status == 503:
            is_full = (
                len(self.core.scheduler.request_table.waiting) >= self.world.core.limits.max_queued
            )
            require(is_full and not client.got, f"{event}: the queue is not full")
            self.seen["refused: queue full"] += 1
        elif event.status == 400 and "banned" in event.text:
            barred = ("barred", len(client.got), BARRED)
            require(client.answer.end() == barred, f"{event}, but there is a choice")
            self.seen["failed without a choice"] += 1
        elif event.status == 400:
            total = client.answer.prompt_len + generate.sampling.max_new_tokens
            core = self.world.core
            fits = total <= core.limits.max_request_tokens and all(
                group.peak_pages(total, core.limits.chunk_tokens) < group.num_pages
                for group in core.groups
            )
            require(not fits and not client.got, f"{event}, but it fits")
            self.seen["refused: too long"] += 1
        else:
            require(seed in self.runner.failed_seeds, f"{event} without a fault")
            self.seen["failed by a fault"] += 1


def play(
    seed: int,
    actions: list[Action],
    record: Callable[[CoreSpec], CoreRecorder] | None = None,
    kit: Kit = FAKE,
) -> Play:
    """Play to the end; BorderError or AssertionError when something is wrong."""
    game = Play(seed, record, kit)
    for action in actions:
        game.act(action)
    game.finish()
    return game


def smallest(seed: int, actions: list[Action], kit: Kit = FAKE) -> list[Action]:
    """The actions cut down as far as the same seed still fails in the same way."""
    wanted = _failure(seed, actions, kit)
    size = len(actions) // 2
    while size:
        start = 0
        while start < len(actions):
            fewer = actions[:start] + actions[start + size :]
            if _failure(seed, fewer, kit) == wanted:
                actions = fewer
            else:
                start += size
        size //= 2
    return actions


def _failure(seed: int, actions: list[Action], kit: Kit) -> str:
    try:
        play(seed, actions, kit=kit)
    except Exception as error:
        return type(error).__name__ + re.sub(r"\d+", "#", str(error))
    return ""
