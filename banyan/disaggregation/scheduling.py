"""Prefill/decode disaggregation in the scheduler: PrefillScheduling and DecodeScheduling.

A prefill server computes prompts; a decode server continues them. The decode server receives the
whole blocks of a prompt and the first output token. It computes the few tokens after the last
block, which may be more when the pages of the prefill server are longer. It also computes every
page that does not arrive. If the transfer as a whole fails, only that request fails.

A request that waits for its transfer never holds up another one.

A prefill request ends for its client only when its transfer is closed. Until then the client can
cancel it by disconnecting, so pages that nobody will fetch are freed.

    prefill: submitted → opened → pages as their steps complete → first token → sent → closed
    decode:  searching ──TransferFound──► found ──capacity──► loading ──PrefillResult──► enters
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import msgspec

from banyan.base.errors import RequestError
from banyan.base.ids import NO_STEP, RequestId
from banyan.disaggregation.peer_pages import PeerTier
from banyan.kv_cache.cache import TOKEN_BYTES, KVCache, block_keys
from banyan.kv_cache.radix_tree import Node
from banyan.messages.disaggregation import (
    CloseTransfer,
    FindTransfer,
    KVTransferEvent,
    KVTransferOp,
    OpenTransfer,
    PrefillResult,
    ReceiveTransfer,
    TransferClosed,
    TransferFound,
)
from banyan.messages.events import Event, Finished
from banyan.messages.plan import RowScores
from banyan.messages.requests import Generate
from banyan.scheduler.request import IncomingTransfer, Request

PREFILL, DECODE = "prefill", "decode"
_DIGEST_BYTES = 32


class DisaggregationSide(Protocol):
    """Hooks that the scheduler calls on a prefill or decode server. Requests without a transfer id
    are left alone.
    """

    ops: list[KVTransferOp]
    """Outbox towards the mover."""
    delayed_ends: list[Event]
    """Ends of requests that were held until their transfers closed, for the API process."""

    def __len__(self) -> int:
        """Transfers that hold memory here, or whose result is still missing."""
        ...

    def prepare(self, generate: Generate) -> Generate:
        """Adapt a new request; RequestError when its transfer id is in use."""
        ...

    def on_refused(self, generate: Generate) -> None:
        """The request was refused, before or after `prepare`."""
        ...

    def on_queued(self, request: Request) -> None:
        """The request joined the queue."""
        ...

    def before_step(self, running: list[Request], waiting: list[Request], free_slots: int) -> None:
        """Start the sends or loads that are possible now. Called before each plan."""
        ...

    def is_blocked(self, request: Request) -> bool:
        """Whether a waiting request may not be admitted yet."""
        ...

    def on_copies_ended(self) -> None:
        """Some page copies have ended."""
        ...

    def on_scores(self, request: Request, scores: list[RowScores]) -> None:
        """Scores were reported for a request."""
        ...

    def on_completed(self, request: Request) -> None:
        """A request is about to finish normally and still holds its pages."""
        ...

    def on_ended(self, request: Request) -> None:
        """A request has ended, for any reason."""
        ...

    def delay_end(self, request: Request, events: list[Event]) -> None:
        """Hold back the last event, the end of a completed request, while its transfer is open."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """The client of a request whose end is held back has left."""
        ...

    def on_event(self, event: KVTransferEvent) -> Request | None:
        """Process an event of the mover; returns the request that the scheduler must act on."""
        ...


@dataclass
class _Outgoing:
    """A transfer that is being sent."""

    blocks: int
    pages: int
    is_admitted: bool = False
    """The host memory for its pages is reserved."""
    sent: int = 0
    """Blocks whose copies have been planned, from the first."""
    last: list[Node] = field(default_factory=list[Node])
    """Blocks of an ended request whose state checkpoints are still under way."""
    scores: list[RowScores] = field(default_factory=list[RowScores])
    result: PrefillResult | None = None
    """Set at the end of the request; sent after all pages."""


class PrefillScheduling:
    """Transfers that this server sends.

    Args:
        most_pages: pages in host memory that open transfers may hold; a single transfer may exceed
            it.
    """

    def __init__(self, cache: KVCache, peers: PeerTier, most_pages: int) -> None:
        self.ops: list[KVTransferOp] = []
        self.delayed_ends: list[Event] = []
        self._cache = cache
        self._peers = peers
        self._most_pages = most_pages
        self._outgoing: dict[bytes, _Outgoing] = {}
        """By transfer id, until the PrefillResult is sent."""
        self._open_pages: dict[bytes, int] = {}
        """By transfer id, pages in host memory until the transfer closes."""
        self._ends: dict[bytes, Finished] = {}
        """By transfer id, ends that are held back until the transfer closes."""

    def __len__(self) -> int:
        return len(self._open_pages)

    def prepare(self, generate: Generate) -> Generate:
        if not generate.transfer_id:
            return generate
        if self._is_in_use(generate.transfer_id):
            raise _in_use()
        sampling = generate.sampling
        one = msgspec.structs.replace(sampling, max_new_tokens=min(1, sampling.max_new_tokens))
        return msgspec.structs.replace(generate, sampling=one)

    def on_refused(self, generate: Generate) -> None:
        if generate.transfer_id and not self._is_in_use(generate.transfer_id):
            self.ops.append(CloseTransfer(generate.transfer_id))

    def on_queued(self, request: Request) -> None:
        transfer_id = request.generate.transfer_id
        if not transfer_id:
            return
        blocks = request.prompt_len // self._cache.block_size
        self._outgoing[transfer_id] = _Outgoing(blocks, max(1, self._peers.pages_of(blocks)))
        digest = digest_of(request.generate, self._cache)
        self.ops.append(OpenTransfer(transfer_id, digest, blocks * self._cache.block_size))

    def before_step(self, running: list[Request], waiting: list[Request], free_slots: int) -> None:
        """Reserve host memory in queue order, and send the blocks that are complete.

        The first request without memory blocks those after it, so that a long prompt is not
        overtaken for ever.
        """
        used = sum(self._open_pages.values())
        for request in waiting:
            outgoing = self._outgoing.get(request.generate.transfer_id)
            if outgoing is None or outgoing.is_admitted:
                continue
            if used and used + outgoing.pages > self._most_pages:
                break
            outgoing.is_admitted = True
            self._open_pages[request.generate.transfer_id] = outgoing.pages
            used += outgoing.pages
        for request in running:
            outgoing = self._outgoing.get(request.generate.transfer_id)
            if outgoing is not None and request.lease is not None:
                path = request.lease.path[outgoing.sent : outgoing.blocks]
                self._send_path(request.generate.transfer_id, outgoing, path)

    def is_blocked(self, request: Request) -> bool:
        outgoing = self._outgoing.get(request.generate.transfer_id)
        return outgoing is not None and not outgoing.is_admitted

    def on_copies_ended(self) -> None:
        over = [outgoing for outgoing in self._outgoing.values() if outgoing.result is not None]
        for outgoing in over:
            result = outgoing.result
            assert result is not None
            if outgoing.last and not self._cache.states.is_target(outgoing.last[0]):
                self._send_path(result.transfer_id, outgoing, outgoing.last)
                outgoing.last.clear()
            if not outgoing.last and not self._peers.is_sending(result.transfer_id):
                self.ops.append(result)
                del self._outgoing[result.transfer_id]

    def on_scores(self, request: Request, scores: list[RowScores]) -> None:
        outgoing = self._outgoing.get(request.generate.transfer_id)
        if outgoing is not None:
            outgoing.scores += scores

    def on_completed(self, request: Request) -> None:
        transfer_id = request.generate.transfer_id
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            return
        if request.lease is not None:
            path = request.lease.path[outgoing.sent : outgoing.blocks]
            self._send_path(transfer_id, outgoing, path)
            outgoing.last = [node for node in path[:1] if self._cache.states.is_target(node)]
        output = bytes(request.tokens[request.prompt_len * TOKEN_BYTES :])
        outgoing.result = PrefillResult(
            transfer_id, output, outgoing.scores, request.stats.cached_tokens
        )
        self.on_copies_ended()

    def on_ended(self, request: Request) -> None:
        outgoing = self._outgoing.get(request.generate.transfer_id)
        if outgoing is not None and outgoing.result is None:
            del self._outgoing[request.generate.transfer_id]
            self.ops.append(CloseTransfer(request.generate.transfer_id))

    def delay_end(self, request: Request, events: list[Event]) -> None:
        if request.generate.transfer_id in self._open_pages:
            end = events.pop()
            assert isinstance(end, Finished)
            self._ends[request.generate.transfer_id] = end

    def cancel(self, request_id: RequestId) -> None:
        found = [each for each, end in self._ends.items() if end.request == request_id]
        for transfer_id in found:
            self.delayed_ends.append(self._ends.pop(transfer_id))
            self._outgoing.pop(transfer_id, None)
            self.ops.append(CloseTransfer(transfer_id))

    def on_event(self, event: KVTransferEvent) -> Request | None:
        if isinstance(event, TransferClosed):
            self._open_pages.pop(event.transfer_id, None)
            if event.transfer_id in self._ends:
                self.delayed_ends.append(self._ends.pop(event.transfer_id))
        return None

    def _is_in_use(self, transfer_id: bytes) -> bool:
        return transfer_id in self._outgoing or transfer_id in self._open_pages

    def _send_path(self, transfer_id: bytes, outgoing: _Outgoing, path: list[Node]) -> None:
        """Send the blocks at the start of `path` whose pages are complete, and remove them from
        it.
        """
        while path:
            node = path[0]
            if node.promised != NO_STEP or not node.is_attached:
                return
            is_last = outgoing.sent == outgoing.blocks - 1  # its states are sent as well
            if is_last and self._cache.states.is_target(node):
                return
            self._peers.send(transfer_id, node, outgoing.sent, outgoing.blocks)
            outgoing.sent += 1
            del path[0]


class DecodeScheduling:
    """Transfers that this server receives.

    Args:
        interval: steps after which it looks for prompts that have been found, while others run.
    """

    def __init__(
        self, cache: KVCache, peers: PeerTier, chunk_tokens: int, interval: int = 1
    ) -> None:
        self._interval, self._steps = interval, 0
        self.ops: list[KVTransferOp] = []
        self.delayed_ends: list[Event] = []
        self._cache = cache
        self._peers = peers
        self._chunk_tokens = chunk_tokens
        self._requests: dict[bytes, Request] = {}
        """By transfer id."""

    def __len__(self) -> int:
        incoming = [request.incoming for request in self._requests.values()]
        return sum(each is not None and not each.has_result for each in incoming)

    def prepare(self, generate: Generate) -> Generate:
        if generate.transfer_id in self._requests:
            raise _in_use()
        return generate

    def on_refused(self, generate: Generate) -> None:
        """Nothing to do: the prefill server received the same request."""

    def on_queued(self, request: Request) -> None:
        generate = request.generate
        if not generate.transfer_id:
            return
        request.incoming = IncomingTransfer(request.prompt_len // self._cache.block_size)
        self._requests[generate.transfer_id] = request
        self.ops.append(
            FindTransfer(
                transfer_id=generate.transfer_id,
                prefill_address=generate.prefill_address,
                digest=digest_of(generate, self._cache),
                prompt_len=request.prompt_len,
                prefill_replica=generate.prefill_replica,
            )
        )

    def before_step(self, running: list[Request], waiting: list[Request], free_slots: int) -> None:
        """Start to load pages for the next requests, as many as can be admitted soon."""
        self._steps += 1
        if running and self._steps % self._interval:
            return
        reserved = [0] * len(self._cache.groups)
        left = max(1, free_slots)
        for request in waiting:
            incoming = request.incoming
            if not left:
                return
            if incoming is None or not incoming.is_found:
                continue
            left -= 1
            if not incoming.is_requested and not self._begin_load(request, incoming, reserved):
                return
            for g, group in enumerate(self._cache.groups):
                reserved[g] += group.pages_for(request.known + 1)

    def is_blocked(self, request: Request) -> bool:
        return request.incoming is not None and not request.incoming.is_over

    def on_copies_ended(self) -> None:
        """Nothing to do before the next plan."""

    def on_scores(self, request: Request, scores: list[RowScores]) -> None:
        """Nothing is sent on."""

    def on_completed(self, request: Request) -> None:
        """Nothing is sent on."""

    def on_ended(self, request: Request) -> None:
        incoming = request.incoming
        if incoming is None:
            return
        self._requests.pop(request.generate.transfer_id, None)
        if not incoming.has_result:
            self.ops.append(CloseTransfer(request.generate.transfer_id))

    def delay_end(self, request: Request, events: list[Event]) -> None:
        """Ends are not held back here."""

    def cancel(self, request_id: RequestId) -> None:
        """Ends are not held back here."""

    def on_event(self, event: KVTransferEvent) -> Request | None:
        request = self._requests.get(event.transfer_id)
        if request is None or request.incoming is None or request.incoming.has_result:
            return None
        if isinstance(event, TransferFound):
            incoming = request.incoming
            incoming.blocks = min(incoming.blocks, event.tokens // self._cache.block_size)
            incoming.is_found = True
            return None
        if isinstance(event, PrefillResult):
            request.incoming.has_result = True
        return request

    def _begin_load(
        self, request: Request, incoming: IncomingTransfer, reserved: list[int]
    ) -> bool:
        """Request the blocks that the cache lacks; False (and nothing begun) without capacity."""
        block_size, blocks = self._cache.block_size, incoming.blocks
        tokens = request.tokens
        match = self._cache.probe(request.namespace, tokens, blocks * block_size).whole_blocks
        depth, copies = len(match.path), 0
        if depth < blocks:
            wanted = request.known + 1
            if not self._cache.capacity.admits(match, wanted, self._chunk_tokens, reserved):
                return False
            begun = self._peers.load(
                transfer_id=request.generate.transfer_id,
                namespace=self._cache.weights + request.namespace,
                path=match.path,
                tree_keys=list(block_keys(tokens, block_size, depth, blocks)),
                blocks=blocks,
            )
            if begun is None and not self._cache.epochs.is_clear:
                return False  # pages are on their way back
            if begun is not None:
                incoming.load, copies = begun
        incoming.is_requested = True
        self.ops.append(ReceiveTransfer(request.generate.transfer_id, copies))
        return True


def disaggregation_side(
    role: str, cache: KVCache, chunk_tokens: int, interval: int = 1
) -> DisaggregationSide | None:
    """The hooks of a server's role: PREFILL, DECODE, or "" (None: no disaggregation)."""
    if not role or cache.peers is None:
        return None
    if role == DECODE:
        return DecodeScheduling(cache, cache.peers, chunk_tokens, interval)
    assert role == PREFILL, role
    return PrefillScheduling(cache, cache.peers, sum(pool.total for pool in cache.pools) // 2)


def digest_of(generate: Generate, cache: KVCache) -> bytes:
    """Hash that both servers must agree on before pages are sent: prompt, weights, adapter. Pages
    of another prompt would corrupt this answer and later ones with the same prefix.
    """
    made = blake2b(cache.weights, digest_size=_DIGEST_BYTES, person=b"banyan handoff")
    # The namespace of a request with an adapter holds the adapter's name, its digest and its owner.
    adapter = generate.namespace if generate.adapter else b""
    for part in (generate.tokens, adapter):
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()


def _in_use() -> RequestError:
    return RequestError(
        "bootstrap_room is in use by another request",
        param="bootstrap_room",
        code="room_in_use",
        hint="Give every request a number of its own.",
    )
