"""Explain the course of one request from a recording.

Every plan of the recording is computed again, and the core is examined between plans. The running
engine has no cost.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from banyan.base.errors import ModelError
from banyan.engine.core import EngineCore
from banyan.engine.journal import Began, Full, Launched
from banyan.kv_cache import misses
from banyan.kv_cache.cache import block_keys
from banyan.kv_cache.radix_tree import Node
from banyan.messages.events import DraftReport, Failed, Finished, Tokens
from banyan.messages.plan import StepPlan
from banyan.scheduler.request import RUNNING, Request
from banyan.sim.replay import Played, play

PLACES = "every place was taken (--max-running-requests)"
PAGES = "the cache had too few free pages"
OTHERS = "others were before it in the queue"
STORE = "it looked for its prefix in the store"
COMING = "its prefix was on its way from the store"
BUDGET = "the step took no more prompt tokens (--chunked-prefill-size)"
PAUSED = "the engine was paused"
MEMORY = "memory was released"
_MISSES = {
    misses.OFF: "nothing: prompts are not shared here (--disable-radix-cache, or such a model)",
    misses.ASKED: "log-probabilities or hidden states were asked for, which are computed",
    misses.APART: "layers that keep a window or a state had none to go on with; "
    "--mamba-track-interval and --swa-full-tokens-ratio say how much they keep",
    misses.EVICTED: "tokens whose pages had made room for others{ago}; more memory "
    "(--mem-fraction-static), a pin (/pin_prefix) or a store would have kept them",
    misses.LOADING: "tokens that a store was asked for or was bringing, and it waited no longer; "
    "--hicache-storage-prefetch-policy wait_complete waits, prefetch_timeout_base says how long",
    misses.STORED: "tokens that a store has, and that were computed: reading them was expected to "
    "take longer, or there was no room to read them to",
    misses.UNREADABLE: "tokens that a store had and could not bring; the log says why",
    misses.PAGE: "tokens that share a part of a page, where whole ones alone are shared; a smaller "
    "--page-size shares more",
    misses.UNSEEN: "tokens that no request before it has had there",
}
_SHOWN_S = 0.0005
"""Shorter waits are not shown: they are the time between two iterations of the engine's loop."""
IN_FLIGHT = "a step with its last token was still running"


@dataclass
class Explanation:
    """The course of one request. Times are seconds of the engine's clock."""

    request: str
    came_s: float = -1.0
    """-1 = before the recording begins."""
    entered_s: float = -1.0
    first_s: float = -1.0
    ended_s: float = -1.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stored_tokens: int = 0
    miss: str = ""
    """Reason why no more tokens were cached (kv_cache/misses.py)."""
    evicted_s: float = -1.0
    """When the first missing token was evicted; -1 = before the recording began, or never."""
    elsewhere_tokens: int = 0
    """Prompt tokens that the cache had in a namespace that is not shared with this request."""
    is_late: bool = False
    """Pages were evicted before the recording began."""
    output_tokens: int = 0
    end: str = ""
    """Why it ended; "" = it had not."""
    waits: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds in the queue, by reason."""
    retracted_s: list[float] = field(default_factory=list[float])
    prompt_steps: int = 0
    decode_steps: int = 0
    rows: int = 0
    """Rows of all requests in its steps."""
    steps_with_prompts: int = 0
    """Decode steps that also processed prompts of other requests."""
    drafts: DraftReport | None = None

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    @property
    def of_the_cache(self) -> str:
        """The part about the cache: tokens found, why no more, and what would help."""
        return "\n".join([f"request {self.request}", *_cache_lines(self)])


def explain(path: str, request: str) -> Explanation:
    """Explain a request of the recording at `path`.

    Args:
        request: id of the request, or its beginning (at least 8 characters).

    Raises:
        ModelError: the recording cannot be read or replayed, or has no such request.
    """
    found: Explanation | None = None
    watcher: _Watcher | None = None
    difference, names = "", dict[str, None]()
    is_late: bool | None = None
    evictions = Evictions()
    for played in play(path):
        difference = played.difference
        if difference:
            break
        if is_late is None:
            is_late = played.core.scheduler.cache.cached.evicted > 0
        evictions.see(played)
        if watcher is None:
            for one in played.core.scheduler.request_table.alive:
                names[one.id] = None
                if _is_meant(one.id, request):
                    found = Explanation(one.id, prompt_tokens=one.prompt_len, is_late=is_late)
                    was_there = isinstance(played.record, Began)
                    watcher = _Watcher(found, one, was_there, evictions)
        if watcher is not None and watcher.see(played):
            break
    if found is None:
        known = ", ".join(list(names)[-5:]) or "none"
        why = f" ({difference})" if difference else ""
        raise ModelError(
            f"no request {request!r} in {len(names)} of the recording{why}; the latest: {known}"
        )
    if difference:
        found.end = found.end or f"not known: {difference}"
    return found


def _is_meant(name: str, given: str) -> bool:
    return name == given or (len(given) >= 8 and (name.startswith(given) or given.endswith(name)))


class Evictions:
    """Times of evictions from the prefix cache."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        """Total evictions at each of `_moments`."""
        self._moments: list[float] = []

    def see(self, played: Played) -> None:
        """Examine the core after a record."""
        count = played.core.scheduler.cache.misses.evictions
        if not self._counts or count > self._counts[-1]:
            self._counts.append(count)
            self._moments.append(_moment(played))

    def moment(self, eviction: int) -> float:
        """Time of the n-th eviction (from 1); -1 if it was before the recording began."""
        at = bisect_left(self._counts, eviction)
        return self._moments[at] if 0 < at < len(self._moments) else -1.0


class _Watcher:
    """Examines one request after each record."""

    def __init__(
        self, found: Explanation, request: Request, was_there: bool, evictions: Evictions
    ) -> None:
        self._evictions = evictions
        self._had_entered = was_there and request.stats.admitted_s is not None
        """It was admitted before the recording began, so its eviction number has no time here."""
        self._found = found
        self._request = request
        self._why = ""
        self._since_s = 0.0
        self._retractions = request.stats.retractions
        if not was_there:
            found.came_s = request.stats.submitted_s

    def see(self, played: Played) -> bool:
        """Whether the request has ended."""
        found, request, now = self._found, self._request, _moment(played)
        if self._why and now > self._since_s:
            found.waits[self._why] = found.waits.get(self._why, 0.0) + now - self._since_s
        self._since_s = now
        if request.stats.retractions > self._retractions:
            self._retractions = request.stats.retractions
            found.retracted_s.append(now)
        if request.stats.admitted_s is not None and found.entered_s < 0:
            found.entered_s = request.stats.admitted_s
            found.miss = request.stats.cache_miss
            if request.stats.missed_eviction and not self._had_entered:
                found.evicted_s = self._evictions.moment(request.stats.missed_eviction)
            found.elsewhere_tokens = _elsewhere(played.core, request)
        found.cached_tokens, found.stored_tokens = (
            request.stats.cached_tokens,
            request.stats.stored_tokens,
        )
        found.output_tokens = request.output_len
        if played.plan is not None:
            self._count(played.plan)
        for event in played.events:
            if isinstance(event, Tokens | Finished | Failed) and event.request == request.id:
                self._note(event, now)
        is_waiting = not found.end and request.state != RUNNING
        if not is_waiting:
            self._why = ""
        elif isinstance(played.record, Launched) or not self._why:
            self._why = why_waiting(played.core, request, played.plan)
        return bool(found.end)

    def _count(self, plan: StepPlan) -> None:
        flight = next((f for f in self._request.flights if f.step == plan.step), None)
        if flight is None:
            return
        self._found.rows += len(plan.rows)
        if not flight.is_decode:
            self._found.prompt_steps += 1
            return
        self._found.decode_steps += 1
        self._found.steps_with_prompts += any(row.count > row.drafts + 1 for row in plan.rows)

    def _note(self, event: Tokens | Finished | Failed, now: float) -> None:
        found = self._found
        if isinstance(event, Tokens):
            if found.first_s < 0 and event.tokens and not event.first:
                found.first_s = now
            return
        found.ended_s = now
        if isinstance(event, Failed):
            found.end = f"{event.status} {event.code}: {event.text}"
            return
        found.end, found.drafts = event.reason, event.drafts


def why_waiting(core: EngineCore, request: Request, plan: StepPlan | None) -> str:
    """Reason why a waiting request was not part of the step just planned."""
    request_table = core.scheduler.request_table
    if core.is_paused or core.released:
        return PAUSED if core.is_paused else MEMORY
    if request.flights:
        return IN_FLIGHT
    if not request_table.slots.free:
        return PLACES
    if request.fetch is not None and not request.fetch.is_over:
        return COMING if request.fetch.is_loading else STORE
    limit = core.scheduler.limits.chunk_tokens
    taken = sum(row.count for row in plan.rows if row.count > row.drafts + 1) if plan else 0
    if taken >= limit:
        return BUDGET
    return PAGES if request_table.waiting and request_table.waiting[0] is request else OTHERS


def _elsewhere(core: EngineCore, request: Request) -> int:
    """Tokens of its prompt in the cache under other namespaces.

    A namespace is for a tenant, an adapter, weights or a salt.
    """
    cache = core.scheduler.cache
    own = cache.weights + request.generate.namespace
    tops = {top.key for node in cache.tree.nodes() if (top := _top_of(node)) is not None}
    blocks, found = request.prompt_len // cache.block_size, 0
    for namespace in tops - {own}:
        keys = block_keys(request.tokens, cache.block_size, 0, blocks)
        found = max(found, sum(1 for _ in cache.tree.walk(namespace, keys)))
    return found * cache.block_size


def _top_of(node: Node) -> Node | None:
    """The namespace node above, if this node is the first block below it."""
    top = node.parent
    return top if top is not None and top.parent is not None and top.parent.parent is None else None


def _moment(played: Played) -> float:
    return 0.0 if isinstance(played.record, Full) else played.record.now


def _cache_lines(x: Explanation) -> list[str]:
    store = f" ({x.stored_tokens} came from the store)" if x.stored_tokens else ""
    lines = [
        f"  prompt   {x.prompt_tokens} tokens, {x.cached_tokens} of them from the cache{store}"
    ]
    if x.miss:
        ago = f" {x.entered_s - x.evicted_s:.1f} s before" if x.evicted_s >= 0 else ""
        lines.append(f"           then {_MISSES[x.miss].format(ago=ago)}")
    if x.miss == misses.UNSEEN and x.is_late:
        lines.append("           (or they were evicted before the recording begins)")
    if x.elsewhere_tokens > x.cached_tokens:
        lines.append(
            f"           another tenant, adapter, salt or version of the weights has "
            f"{x.elsewhere_tokens} of them, which are not shared"
        )
    return lines


def _steps(number: int) -> str:
    return f"{number} step" + "s" * (number != 1)


def _lines(x: Explanation) -> list[str]:
    lines = [f"request {x.request}"]
    since = x.came_s
    if since < 0:
        lines.append("  came before the recording begins: times before that are not known")
    lines += _cache_lines(x)
    if x.entered_s >= 0 and since >= 0:
        lines.append(f"  queue    {x.entered_s - since:.3f} s until it first ran")
    for why, seconds in sorted(x.waits.items(), key=lambda item: -item[1]):
        if seconds >= _SHOWN_S:
            lines.append(f"           {seconds:.3f} s: {why}")
    if x.first_s >= 0 and x.entered_s >= 0:
        lines.append(
            f"  prefill  {x.first_s - x.entered_s:.3f} s in {_steps(x.prompt_steps)} with its "
            "prompt"
        )
    if x.decode_steps and x.ended_s >= 0 and x.first_s >= 0:
        lines.append(
            f"  decode   {x.ended_s - x.first_s:.3f} s in {_steps(x.decode_steps)} for "
            f"{x.output_tokens} tokens; {_steps(x.steps_with_prompts)} took prompts of others too"
        )
    if steps := x.prompt_steps + x.decode_steps:
        lines.append(f"  shared   {x.rows / steps - 1:.1f} rows of others in a step, on average")
    if x.retracted_s:
        at = ", ".join(f"{when - max(since, 0.0):.3f}" for when in x.retracted_s[:8])
        lines.append(f"  retracted {len(x.retracted_s)} times for want of pages, after {at} s")
    if x.drafts is not None and x.drafts.steps:
        mean = (x.drafts.steps + x.drafts.correct) / x.drafts.steps
        lines.append(
            f"  drafts   {x.drafts.correct} of {x.drafts.proposed} were right, {mean:.2f} tokens a "
            f"row; rows with 0, 1, 2 … right ones: {x.drafts.histogram}"
        )
    lines.append(f"  end      {x.end or 'it had not ended when this was recorded'}")
    return lines
