"""NGRAM: prompt lookup. Drafts are the tokens that followed earlier occurrences of the last tokens.

The sequences of all slots are indexed, and stay after their request until the capacity is used up.
The index maps the last few tokens of a sequence to the places after their occurrences, newest
first. Drafts continue the places that agree over the longest suffix, as a chain or a tree. Requests
find sequences of their own cache namespace only.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count as count_up

from banyan.config.schema import SpeculativeConfig
from banyan.messages.plan import Row
from banyan.runner.speculative import Guess, Tree, common_beginning

_LESS_FOR_OLDER = 0.5
"""Weight of a place relative to the next newer one, if newer places are preferred."""


@dataclass(frozen=True)
class Breadth:
    """Most children of a tree node: `most` after the shortest suffix, `least` after the longest,
    and fewer with each level.

    Attributes:
        shortest, longest: lengths of suffixes that are searched, in tokens.
    """

    least: int
    most: int
    shortest: int
    longest: int

    def of(self, matched: int, depth: int) -> int:
        step = (self.most - self.least) / (self.longest - self.shortest + 1)
        return max(self.least, int(self.least + (self.longest - matched - depth) * step))


@dataclass
class _Node:
    """
    Attributes:
        weight: sum of the weights of the places that lead here.
        matched: longest suffix that one of these places shares with the request.
        ways: children by token, in the order in which they were found.
    """

    weight: float = 0.0
    matched: int = 0
    ways: dict[int, "_Node"] = field(default_factory=dict[int, "_Node"])


def grow(
    places: Sequence[tuple[int, "array[int]"]], count: int, breadth: Breadth, is_frequent: bool
) -> Tree:
    """The `count` likeliest drafts.

    places: (length of the suffix shared with the request, tokens that follow), the best first;
    is_frequent: all places count equally; else newer ones count more.
    """
    root = _Node()
    for order, (matched, tokens) in enumerate(places):
        weight = 1.0 if is_frequent else _LESS_FOR_OLDER**order
        node = root
        for token in tokens:
            _pass(node, weight, matched)
            node = node.ways.setdefault(token, _Node())
        _pass(node, weight, matched)
    return _best(root, count, breadth)


def _pass(node: _Node, weight: float, matched: int) -> None:
    node.weight += weight
    node.matched = max(node.matched, matched)


def _best(root: _Node, count: int, breadth: Breadth) -> Tree:
    """Nodes by their share of the weights; among equals the one closer to the root first."""
    tokens: list[int] = []
    parents: list[int] = []
    ahead: list[tuple[float, int, int, int, int, _Node]] = []
    order = count_up()

    def look(node: _Node, share: float, depth: int, at: int) -> None:
        ways = sorted(node.ways.items(), key=lambda way: -way[1].weight)
        for token, way in ways[: breadth.of(node.matched, depth)]:
            part = share * way.weight / node.weight
            heappush(ahead, (-part, depth, next(order), token, at, way))

    look(root, 1.0, 0, -1)
    while ahead and len(tokens) < count:
        share, depth, _, token, at, node = heappop(ahead)
        tokens.append(token)
        parents.append(at)
        look(node, -share, depth + 1, len(tokens) - 1)
    return Tree(tokens, parents)


_SURE = 3
"""Tokens of the longer kind of key. Few places share it, so all of them can be compared."""
_TRUST = 2
"""Drafts per token of the matched suffix: a short match predicts little."""
_HOPS = 3
"""Places visited for each one that is compared: nothing has followed some of them yet."""
_POSITION_BITS = 32
_TOKEN_BITS = 24
_NOWHERE = -1


class _Sequence:
    """Tokens of one slot; they only grow, except by `_cut`.

    Attributes:
        number: of the sequence; the upper bits of the addresses of its places.
        indexed: number of places, from the first, that are in the index.
        before: by kind of key and place, address of the previous place with the same key.
    """

    def __init__(self, number: int, namespace: bytes, kinds: int) -> None:
        self.number = number
        self.namespace = namespace
        self.tokens = array("i")
        self.indexed = 0
        self.before = [array("q", [_NOWHERE]) for _ in range(kinds)]


class Ngram:
    """Satisfies `Drafter`.

    Args:
        shortest, longest: lengths of suffixes that are searched, in tokens.
        places: most places that are compared.
        branch: tokens of the shortest suffix and its continuation together.
        capacity: tokens that are kept; running sequences are never dropped.
        is_frequent: continue with the most frequent token of all places, not with the newest place.
        least_breadth: fewest children of a tree node, if so many are found; 1 = chains.
    """

    def __init__(
        self,
        shortest: int = 1,
        longest: int = 12,
        places: int = 10,
        branch: int = 18,
        capacity: int = 1 << 19,
        is_frequent: bool = False,
        least_breadth: int = 1,
    ) -> None:
        self._longest = longest
        self._places = places
        self._most = branch - shortest
        self._capacity = capacity
        self._is_frequent = is_frequent
        self._breadth = None
        if least_breadth > 1:
            self._breadth = Breadth(least_breadth, max(places, least_breadth), shortest, longest)
            self._places = max(places, least_breadth)
        sure = min(max(shortest, _SURE), longest)
        self._lengths = sorted({shortest, sure}, reverse=True)
        """Lengths of the kinds of keys, the longer first."""
        self._heads: dict[bytes, list[dict[int, int]]] = {}
        """By namespace and kind: key -> address of the newest place after it."""
        self._sequences: dict[int, _Sequence] = {}
        self._running: dict[int, _Sequence] = {}
        """By slot."""
        self._left: deque[_Sequence] = deque()
        self._unindexed: dict[int, _Sequence] = {}
        """By number, sequences with places that are not in the index yet. Indexing waits until
        drafts are wanted, so steps without drafts only append tokens."""
        self._next = 0
        self.num_tokens = 0
        """Tokens that are kept now."""

    def join(self, slot: int, tokens: list[int], namespace: bytes) -> None:
        self._append(self._begin(slot, namespace), tokens)
        self._forget()

    def _begin(self, slot: int, namespace: bytes) -> _Sequence:
        sequence = _Sequence(self._next, namespace, len(self._lengths))
        self._next += 1
        self._sequences[sequence.number] = self._running[slot] = sequence
        return sequence

    def leave(self, slot: int) -> None:
        self._left.append(self._running.pop(slot))
        self._forget()

    def extend(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        sequence = self._running[slot]
        if first < len(sequence.tokens):
            same = common_beginning(sequence.tokens[first : first + len(tokens)], tokens)
            self._cut(sequence, first + same)
            tokens = tokens[same:]
        self._append(sequence, tokens)
        self._forget()

    def flush(self) -> None:
        for held in (self._heads, self._sequences, self._left, self._unindexed):
            held.clear()
        self.num_tokens = 0
        for slot in self._running:  # nothing runs, but some slots were not left
            self._begin(slot, b"")

    def propose(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Guess]:
        return [
            self.guess(row.slot, count) if count else []
            for row, count in zip(rows, counts, strict=True)
        ]

    def guess(self, slot: int, count: int) -> Guess:
        """At most `count` tokens that may come next in a slot."""
        self._catch_up()
        sequence = self._running[slot]
        if self._breadth is not None:
            return self._branches(sequence, count, self._breadth)
        matched, found = self._find(sequence)
        count = min(count, self._most, _TRUST * matched)
        if not found or count < 1:
            return []
        if self._is_frequent:
            return _most_frequent(found, count)
        newest, place = found[0]
        return newest.tokens[place : place + count].tolist()

    def _branches(self, mine: _Sequence, count: int, breadth: Breadth) -> Guess:
        """A tree of the continuations of all matching places. The shorter key is used only if the
        longer one gives too few different tokens."""
        found: dict[tuple[int, int], tuple[int, array[int]]] = {}
        for kind in range(len(self._lengths)):
            for common, sequence, place in self._places_of(mine, kind):
                length = min(count, self._most, _TRUST * common)
                following = sequence.tokens[place : place + length]
                found[sequence.number, place] = common, following
            if len({following[0] for _, following in found.values()}) >= breadth.least:
                break
        best = sorted(found.values(), key=lambda place: -place[0])  # stable sort
        return grow(best, count, breadth, self._is_frequent)

    def _places_of(self, mine: _Sequence, kind: int) -> Iterator[tuple[int, _Sequence, int]]:
        """Earlier occurrences of the last tokens under this kind of key, newest first: (length
        of the common suffix, sequence, place after it)."""
        end, tokens, length = len(mine.tokens), mine.tokens, self._lengths[kind]
        heads = self._heads.get(mine.namespace)
        if end < length or heads is None:
            return
        address = heads[kind].get(_key(tokens, end, length), _NOWHERE)
        looked = 0
        # Bounded: after `_cut`, a place may have been reused, and the chain may not end.
        for _ in range(_HOPS * self._places):
            sequence = self._sequences.get(address >> _POSITION_BITS)
            place = address & (1 << _POSITION_BITS) - 1
            if sequence is None or place > len(sequence.tokens) or looked == self._places:
                return
            address = sequence.before[kind][place]
            if place == len(sequence.tokens):
                continue  # nothing has followed there yet
            looked += 1
            yield _common(sequence.tokens, place, tokens, end, self._longest), sequence, place

    def _find(self, mine: _Sequence) -> tuple[int, list[tuple[_Sequence, int]]]:
        """Length of the longest matching suffix, and the places after it."""
        matched, found = 0, list[tuple[_Sequence, int]]()
        for kind in range(len(self._lengths)):
            for common, sequence, place in self._places_of(mine, kind):
                if common > matched:
                    matched, found = common, []
                if common == matched:
                    found.append((sequence, place))
                if common == self._longest and not self._is_frequent:
                    break
            if found:
                break
        return matched, found

    def _heads_of(self, namespace: bytes) -> list[dict[int, int]]:
        if namespace not in self._heads:
            self._heads[namespace] = [{} for _ in self._lengths]
        return self._heads[namespace]

    def _append(self, sequence: _Sequence, tokens: Sequence[int]) -> None:
        sequence.tokens.extend(tokens)
        self.num_tokens += len(tokens)
        self._unindexed[sequence.number] = sequence

    def _catch_up(self) -> None:
        """Index all sequences completely."""
        for sequence in self._unindexed.values():
            self._index(sequence)
        self._unindexed.clear()

    def _index(self, sequence: _Sequence) -> None:
        heads = self._heads_of(sequence.namespace)
        known, base, begin = sequence.tokens, sequence.number << _POSITION_BITS, sequence.indexed
        sequence.indexed = len(known)
        for kind, length in enumerate(self._lengths):
            newest, before = heads[kind], sequence.before[kind]
            for end in range(begin + 1, len(known) + 1):
                if end < length:
                    before.append(_NOWHERE)
                    continue
                key = _key(known, end, length)
                before.append(newest.get(key, _NOWHERE))
                newest[key] = base | end

    def _cut(self, sequence: _Sequence, length: int) -> None:
        """Drop the tokens from `length` on."""
        heads = self._heads_of(sequence.namespace)
        base = sequence.number << _POSITION_BITS
        for end in range(sequence.indexed, length, -1):
            for kind, size in enumerate(self._lengths):
                before = sequence.before[kind].pop()
                key = _key(sequence.tokens, end, size) if end >= size else 0
                if end >= size and heads[kind].get(key) == base | end:
                    if before == _NOWHERE:
                        del heads[kind][key]
                    else:
                        heads[kind][key] = before
        sequence.indexed = min(sequence.indexed, length)
        self.num_tokens -= len(sequence.tokens) - length
        del sequence.tokens[length:]

    def _forget(self) -> None:
        """Drop the sequences that left first until the capacity suffices."""
        while self.num_tokens > self._capacity and self._left:
            sequence = self._left.popleft()
            del self._sequences[sequence.number]
            self._unindexed.pop(sequence.number, None)
            self.num_tokens -= len(sequence.tokens)
            heads = self._heads_of(sequence.namespace)
            base = sequence.number << _POSITION_BITS
            for kind, length in enumerate(self._lengths):
                for end in range(length, sequence.indexed + 1):
                    key = _key(sequence.tokens, end, length)
                    if heads[kind].get(key) == base | end:
                        del heads[kind][key]
            if not any(heads):
                del self._heads[sequence.namespace]


def open_ngram(speculative: SpeculativeConfig, open_draft_runner: Callable[[], object]) -> Ngram:
    return Ngram(
        shortest=speculative.min_match,
        longest=speculative.max_match,
        places=speculative.max_breadth,
        branch=speculative.branch,
        capacity=speculative.capacity // speculative.branch,
        is_frequent=speculative.match_type == "PROB",
        least_breadth=speculative.min_breadth,
    )


def _key(tokens: "array[int]", end: int, length: int) -> int:
    """A number that identifies the `length` tokens before `end`."""
    key = 0
    for token in tokens[end - length : end]:
        key = key << _TOKEN_BITS | token
    return key


def _common(a: "array[int]", a_end: int, b: "array[int]", b_end: int, most: int) -> int:
    """Length of the common suffix before two ends."""
    most = min(most, a_end, b_end)
    for count in range(most):
        if a[a_end - 1 - count] != b[b_end - 1 - count]:
            return count
    return most


def _most_frequent(places: list[tuple[_Sequence, int]], count: int) -> list[int]:
    """A chain of the most frequent next token at each position; the newest place breaks ties."""
    chain = list[int]()
    while places and len(chain) < count:
        following = [sequence.tokens[place] for sequence, place in places]
        chain.append(Counter(following).most_common(1)[0][0])
        places = [
            (sequence, place + 1)
            for (sequence, place), token in zip(places, following, strict=True)
            if token == chain[-1] and place + 1 < len(sequence.tokens)
        ]
    return chain
