"""Compiled routing and experts: fp32 in and out, weights in the checkpoint's types.

A step's (token, expert) pairs are sorted by expert. The experts' weights are then multiplied like
projections (`linear.py`), some columns of all experts at a time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library
from banyan.ops.cpu.lora import make_adapt as make_adapt
from banyan.ops.cpu.weights import Arena, PackedWeight, pack, rounding_of
from banyan.ops.experts_api import ExpertPlaces, Routing, StoredExperts
from banyan.ops.lora import AdapterTable, AdapterTokens, ExpertSides, ExpertTable
from banyan.ops.stored import StoredWeight

_CURVES = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}  # of bn_experts_in
_CLAMPED, _PLAIN = 3, 4
_SCORINGS = ("softmax", "sigmoid", "sparsemixer")  # Scoring of csrc/experts.h
_GROUP = 16  # outputs of a tile
_WEIGHT = np.dtype(
    [("tiles", np.uint64), ("factors", np.uint64), ("format", np.int64), ("bias", np.uint64)]
)
"""ExpertWeight of csrc/experts.h."""


def make_route(library: Library) -> Callable[..., tuple[Tensor, Tensor]]:
    adapt = make_adapt(library)

    def route(
        x: Tensor,
        weight: Tensor,
        correction: Tensor | None,
        rule: Routing,
        bias: Tensor | None = None,
        adapters: tuple[AdapterTable, AdapterTokens] | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens, (count, dim) = x.shape[0], weight.shape
        assert x.dtype == weight.dtype == torch.float32 and weight.is_contiguous()
        assert x.shape[1] == dim and x.stride(1) == 1, f"{list(x.shape)} {x.stride()}"
        logits = library.empty((tokens, count))
        library.call(
            "bn_router_logits",
            tokens,
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            logits.data_ptr(),
            dim,
            count,
        )
        if adapters is not None:
            adapt(logits, x, *adapters)
        ids = library.empty((tokens, rule.per_token), torch.int64)
        weights = library.empty((tokens, rule.per_token))
        library.call(
            "bn_route",
            tokens,
            logits.data_ptr(),
            0 if correction is None else correction.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            count,
            rule.per_token,
            _SCORINGS.index(rule.scoring),
            int(rule.is_normalised),
            rule.groups,
            rule.top_groups,
            rule.group_best,
            rule.scale,
            rule.jitter,
        )
        return ids, weights

    return route


_DISPATCHES = ("static", "dynamic", "even")  # Dispatch of csrc/experts.h


def make_place(library: Library) -> Callable[..., Tensor]:
    def place_experts(ids: Tensor, places: ExpertPlaces, dispatch: str) -> Tensor:
        (tokens, per_token), (count, room) = ids.shape, places.slots.shape
        assert ids.is_contiguous() and places.slots.is_contiguous()
        out = library.empty(ids.shape, torch.int64)
        library.call(
            "bn_place_experts",
            tokens,
            ids.data_ptr(),
            places.slots.data_ptr(),
            places.copies.data_ptr(),
            out.data_ptr(),
            count,
            room,
            per_token,
            _DISPATCHES.index(dispatch),
        )
        return out

    return place_experts


def make_combine(library: Library) -> Callable[..., Tensor]:
    def combine_experts(x: Tensor, ids: Tensor, weights: Tensor, home: int) -> Tensor:
        tokens, per_token = ids.shape
        dim = x.shape[1] // per_token
        assert x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous()
        out = library.empty((tokens, dim))
        library.call(
            "bn_combine_experts",
            tokens,
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            dim,
            home,
            per_token,
        )
        return out

    return combine_experts


@dataclass(frozen=True)
class Projection:
    """One projection of all experts of this rank.

    Attributes:
        packed: one weight per expert, all of one shape.
        table: addresses of the weights, for the kernel.
        is_exact: multiplies fp32 activations without rounding them.
        biases: [experts, outputs up to a multiple of 16] fp32.
    """

    packed: tuple[PackedWeight, ...]
    table: np.ndarray
    is_exact: bool
    biases: Tensor | None

    @property
    def address(self) -> int:
        return self.table.ctypes.data

    @property
    def format(self) -> int:
        """Packed format; all experts have the same."""
        return self.packed[0].format


@dataclass(frozen=True)
class Pairs:
    """A step's (token, expert) pairs of this rank, sorted by expert (SortArgs of csrc/experts.h).

    Attributes:
        load: address of two numbers: experts with pairs, and pairs.
    """

    load: int
    experts: Tensor
    starts: Tensor
    places: Tensor
    owners: Tensor
    shares: Tensor

    @property
    def lists(self) -> tuple[int, int, int]:
        return self.load, self.experts.data_ptr(), self.starts.data_ptr()


@dataclass(frozen=True)
class ExpertAdapters:
    """The LoRA adapters of one projection, and memory for the results of their A matrices
    (ExpertAdapters of csrc/experts.h)."""

    table: ExpertTable
    tokens: AdapterTokens
    inner: Tensor

    @property
    def lists(self) -> tuple[int, int, int]:
        tokens = self.tokens
        return (
            self.table.entries.data_ptr(),
            tokens.pieces.data_ptr(),
            tokens.numbers.data_ptr(),
        )

    @property
    def memory(self) -> tuple[int, int]:
        return self.inner.data_ptr(), self.table.width


class Experts:
    """The feed-forward blocks of a layer's experts; weights in tiles."""

    def __init__(
        self, library: Library, arena: Arena, stored: StoredExperts, is_exact: bool
    ) -> None:
        self._library = library
        self._first, self._count = stored.first, len(stored.down)
        clamp = stored.clamp
        is_bent = clamp is not None and clamp.alpha > 0
        self._curve = _CLAMPED if is_bent else _CURVES.get(stored.activation, _PLAIN)
        assert (self._curve == _PLAIN) == (not stored.gate), f"gates of {stored.activation}"
        self._clamp = (math.inf, 0.0) if clamp is None else (clamp.limit, clamp.alpha)
        of_gate, of_up, of_down = stored.biases or (None, None, None)

        def projection(
            weights: Sequence[StoredWeight], bias: Tensor | None, is_exact: bool
        ) -> Projection:
            packed = tuple(
                pack(library, arena, w, library.quantization, rounds=not is_exact) for w in weights
            )
            places = [0] * len(packed)
            if bias is not None:
                bias = pad(bias.float(), (0, -bias.shape[1] % _GROUP)).contiguous()
                places = [row.data_ptr() for row in bias]
            rows = zip(packed, places, strict=True)
            table = np.array(
                [(p.tiles.data_ptr(), p.factors.data_ptr(), p.format, at) for p, at in rows],
                _WEIGHT,
            )
            return Projection(packed, table, is_exact, bias)

        def keeps(*weights: StoredWeight) -> bool:
            kinds = {rounding_of(library, w.type, library.quantization) for w in weights}
            return is_exact or len(kinds) > 1 or "" in kinds

        exact_in = keeps(*stored.gate, *stored.up)
        self.up = projection(stored.up, of_up, exact_in)
        self.gate = projection(stored.gate, of_gate, exact_in) if stored.gate else self.up
        self.down = projection(stored.down, of_down, keeps(*stored.down))
        self.dim, self.inner = stored.down[0].shape
        self._load = np.zeros(2, np.int64)
        """Experts with tokens, and pairs, of the last run; reports compute bytes from them."""

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, sides: ExpertSides | None = None
    ) -> Tensor:
        library, (tokens, per_token) = self._library, ids.shape
        pairs = self._sorted(ids, weights)
        adapters = None if sides is None else self._adapters_of(sides.gate_up, sides, pairs, x)
        inner = self._gated(x, pairs, adapters)
        if sides is not None:
            adapters = self._adapters_of(sides.down, sides, pairs, inner)
        rows = self._rounded(inner, per_token)
        out = library.empty((tokens, self.dim))
        library.call(
            "bn_experts_out" if adapters is None else "bn_experts_out_adapted",
            tokens,
            self.down.address,
            *pairs.lists,
            pairs.owners.data_ptr(),
            pairs.shares.data_ptr(),
            rows.data_ptr(),
            rows.shape[2] * rows.itemsize,
            out.data_ptr(),
            self.inner,
            self.dim,
            self._count,
            per_token,
            int(self.down.is_exact),
            *(() if adapters is None else (*adapters.lists, *adapters.memory)),
        )
        return out

    def apart(self, x: Tensor, ids: Tensor) -> Tensor:
        library, (tokens, per_token) = self._library, ids.shape
        pairs = self._sorted(ids, library.empty(ids.shape))
        rows = self._rounded(self._gated(x, pairs, None), per_token)
        placed = library.empty((tokens, per_token * self.dim))
        library.call(
            "bn_experts_apart",
            tokens,
            self.down.address,
            *pairs.lists,
            rows.data_ptr(),
            rows.shape[2] * rows.itemsize,
            placed.data_ptr(),
            self.inner,
            self.dim,
            self._count,
            per_token,
            int(self.down.is_exact),
        )
        out = library.empty((tokens, per_token * self.dim))
        library.call(
            "bn_spread_experts",
            tokens,
            placed.data_ptr(),
            pairs.places.data_ptr(),
            out.data_ptr(),
            self.dim,
            per_token,
        )
        return out

    def parts(self, at: int) -> list[Tensor]:
        projections = (self.gate, self.up, self.down)
        packed = [part for p in projections for part in (p.packed[at].tiles, p.packed[at].factors)]
        biases = (p.biases[at] for p in projections if p.biases is not None)
        return [*packed, *biases, torch.tensor([p.packed[at].format for p in projections])]

    def put(self, at: int, parts: list[Tensor]) -> None:
        mine = self.parts(at)
        assert torch.equal(mine[-1], parts[-1]), f"formats {mine[-1]}, now {parts[-1]}"
        for part, other in zip(mine[:-1], parts[:-1], strict=True):
            part.copy_(other)

    def _sorted(self, ids: Tensor, weights: Tensor) -> Pairs:
        library, (tokens, per_token) = self._library, ids.shape
        pairs = Pairs(
            load=self._load.ctypes.data,
            experts=library.empty((self._count,), torch.int32),
            starts=library.empty((self._count + 1,), torch.int32),
            places=library.empty((tokens, per_token), torch.int32),
            owners=library.empty((tokens, per_token), torch.int32),
            shares=library.empty((tokens, per_token)),
        )
        library.call(
            "bn_sort_experts",
            tokens,
            ids.data_ptr(),
            weights.data_ptr(),
            *pairs.lists,
            pairs.places.data_ptr(),
            pairs.owners.data_ptr(),
            pairs.shares.data_ptr(),
            self._first,
            self._count,
            per_token,
        )
        return pairs

    def _adapters_of(
        self, table: ExpertTable, sides: ExpertSides, pairs: Pairs, x: Tensor
    ) -> ExpertAdapters:
        """x: [tokens, inputs], or [pairs, inputs] in sorted order."""
        library, (tokens, per_token) = self._library, pairs.places.shape
        inner = library.empty((tokens, per_token * table.width))
        adapters = ExpertAdapters(table, sides.tokens, inner)
        is_by_token = table is sides.gate_up
        library.call(
            "bn_experts_shrink",
            tokens,
            *adapters.lists,
            pairs.owners.data_ptr(),
            *adapters.memory,
            *pairs.lists,
            x.data_ptr(),
            x.stride(0) if is_by_token else table.inputs,
            table.inputs,
            per_token,
            int(is_by_token),
        )
        return adapters

    def _gated(self, x: Tensor, pairs: Pairs, adapters: ExpertAdapters | None) -> Tensor:
        """Input of `down` for every pair: [tokens, per_token · inner]."""
        library, (tokens, per_token) = self._library, pairs.places.shape
        assert x.dtype == torch.float32 and x.shape[1] == self.dim and x.stride(1) == 1, (
            f"expected rows of {self.dim} fp32, got {list(x.shape)} {x.dtype} {x.stride()}"
        )
        rows = self._gathered(x, pairs.places)
        inner = library.empty((tokens, per_token * self.inner))
        library.call(
            "bn_experts_in" if adapters is None else "bn_experts_in_adapted",
            tokens,
            self.gate.address,
            self.up.address,
            *pairs.lists,
            rows.data_ptr(),
            rows.shape[2] * rows.itemsize,
            inner.data_ptr(),
            self.dim,
            self.inner,
            self._count,
            per_token,
            int(self.gate.is_exact),
            self._curve,
            *self._clamp,
            *(
                ()
                if adapters is None
                else (*adapters.lists, pairs.owners.data_ptr(), *adapters.memory)
            ),
        )
        return inner

    def _gathered(self, x: Tensor, places: Tensor) -> Tensor:
        """Rows of x in the order of the sorted pairs, rounded if the format allows it.

        returns: [tokens, per_token, width]; the pairs fill the first rows.
        """
        library, (tokens, per_token) = self._library, places.shape
        if not self.gate.is_exact:
            width = library.function("bn_quantize_bytes")(self.gate.format, self.dim)
            rounded = library.empty((tokens, width), torch.uint8)
            library.call(
                "bn_quantize",
                tokens,
                self.gate.format,
                x.data_ptr(),
                x.stride(0),
                self.dim,
                rounded.data_ptr(),
            )
            x = rounded
        rows = library.empty((tokens, per_token, x.shape[1]), x.dtype)
        library.call(
            "bn_gather_experts",
            tokens,
            x.data_ptr(),
            x.stride(0) * x.itemsize,
            places.data_ptr(),
            rows.data_ptr(),
            x.shape[1] * x.itemsize,
            per_token,
        )
        return rows

    def _rounded(self, inner: Tensor, per_token: int) -> Tensor:
        """The same rows, rounded if the format allows it: [tokens, per_token, width]."""
        library, tokens = self._library, inner.shape[0]
        if self.down.is_exact:
            return inner.view(tokens, per_token, self.inner)
        width = library.function("bn_quantize_bytes")(self.down.format, self.inner)
        rows = library.empty((tokens, per_token, width), torch.uint8)
        library.call(
            "bn_round_experts",
            tokens,
            self.down.format,
            inner.data_ptr(),
            rows.data_ptr(),
            self._load.ctypes.data,
            self.inner,
            per_token,
        )
        return rows


def supports(spec: OpSpec) -> str | None:
    """Why the compiled kernels cannot be used; None = they can."""
    if spec.toolkit.absence:
        return spec.toolkit.absence
    return (
        None if spec.dtype == torch.float32 else f"computes in fp32, activations are {spec.dtype}"
    )


def _packer(is_exact: bool) -> Callable[[Library], Callable[..., object]]:
    def make(library: Library) -> Callable[..., object]:
        arena = Arena()

        def packer(stored: StoredExperts, dtype: torch.dtype, device: torch.device) -> object:
            return Experts(library, arena, stored, is_exact)

        return packer

    return make


route = Kernel(supports=supports, make=make_route)
place = Kernel(supports=supports, make=make_place)
combine = Kernel(supports=supports, make=make_combine)
rounded = Kernel(supports=supports, make=_packer(False), rounds_activations=True)
plain = Kernel(supports=supports, make=_packer(True))
