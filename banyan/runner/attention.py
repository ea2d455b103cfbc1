"""The attention backends: paged attention of decoders, whole-prompt attention of encoders."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from banyan.base.table import Table
from banyan.layers.step_inputs import AttentionSpec, IndexerOutput, LatentSpec, StepAttention
from banyan.ops.api import Ops
from banyan.runner.kvstore import KVStore


@dataclass(frozen=True)
class GroupView:
    """One cache group's pages in this step.

    Attributes:
        page_tables: [rows, max_pages] int32.
        locations: [tokens] int64, page · page_size + offset of each token of the step.
    """

    page_tables: Tensor
    locations: Tensor


@dataclass(frozen=True)
class StepGeometry:
    """Rows of a step, on the device; both lengths are on the host if `Traits.lengths_on_host`.

    Attributes:
        row_starts: [rows + 1] int32; row r has tokens row_starts[r] … row_starts[r + 1] − 1.
        context_lengths: [rows] int32, positions before this step's tokens.
        groups: one view per cache group.
        paths: of draft trees, as in `ops.api.Ops.paged_attention`; None = drafts are chains.
        ends: of tokens that see later ones, likewise; None = there are none.
        rollback_checkpoints: of rows with drafts, as `StateRows.rollback_checkpoints`.
    """

    row_starts: Tensor
    context_lengths: Tensor
    groups: tuple[GroupView, ...]
    paths: Tensor | None = None
    ends: Tensor | None = None
    rollback_checkpoints: Tensor | None = None


class AttentionBackend(Protocol):
    """Attention of all layers; created once with (ops, store)."""

    def bind(self, geometry: StepGeometry) -> StepAttention:
        """The attention of one step. Two bound steps may exist at once."""
        ...


class _Paths(TypedDict, total=False):
    paths: Tensor


class _Asked(TypedDict, total=False):
    unit: float
    ends: Tensor


class _More(_Paths, total=False):
    first: int


class PagedAttentionBackend:
    """The default backend: write this step's K and V into the pages, then attend over them.

    Args:
        first: first position that holds anything; no token reads earlier ones.
    """

    def __init__(self, ops: Ops, store: KVStore, first: int = 0) -> None:
        self._ops = ops
        self._store = store
        self._first = first

    def bind(self, geometry: StepGeometry) -> StepAttention:
        return PagedStep(self._ops, self._store, geometry, self._first)


class WriteOnlyBackend:
    """Writes keys and values without attending (DFLASH)."""

    def __init__(self, ops: Ops, store: KVStore) -> None:
        self._ops = ops
        self._store = store

    def bind(self, geometry: StepGeometry) -> StepAttention:
        return _Writing(self._ops, self._store, geometry, 0)


@dataclass(frozen=True)
class PagedStep:
    """Attention over the pages of one step."""

    ops: Ops
    store: KVStore
    step: StepGeometry
    first: int

    def __call__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        # All rows write before any row reads, so rows may read pages written in this step.
        self.write(spec, k, v)
        pages = self.store.tensors(spec.layer)
        k_pages, v_pages = pages["k"], pages["v"]
        view = self.step.groups[self.store.group_of(spec.layer)]
        # Kernels take only what their device can be asked for.
        more: _Asked = {} if spec.unit == 1.0 else {"unit": spec.unit}
        if self.step.ends is not None:
            more["ends"] = self.step.ends
        return self.ops.paged_attention(
            q,
            k_pages,
            v_pages,
            view.page_tables,
            self.step.row_starts,
            self.step.context_lengths,
            spec.scale,
            spec.window or -self.first,
            spec.soft_cap,
            sinks,
            **more,
            **self.branching,
        )

    def write(self, spec: AttentionSpec, k: Tensor, v: Tensor) -> None:
        pages = self.store.tensors(spec.layer)
        view = self.step.groups[self.store.group_of(spec.layer)]
        more = {} if spec.unit == 1.0 else {"unit": spec.unit}
        self.ops.write_kv(k, v, pages["k"], pages["v"], view.locations, **more)

    def latent(
        self,
        spec: LatentSpec,
        q: Tensor,
        q_turned: Tensor,
        kept: tuple[Tensor, Tensor] | None,
        indexed: IndexerOutput | None = None,
    ) -> Tensor:
        pages = self.store.tensors(spec.layer)
        view = self.step.groups[self.store.group_of(spec.layer)]
        if kept is not None:
            self.ops.write_latent(*kept, pages["latent"], pages["key"], view.locations)
        where = (view.page_tables, self.step.row_starts, self.step.context_lengths)
        latents = (q, q_turned, pages["latent"], pages["key"])
        # Kernels of devices without speculative decoding have no `first` parameter.
        more: _More = {**self.branching}
        if self.first:
            more["first"] = self.first
        if indexed is None:
            return self.ops.latent_attention(*latents, *where, spec.scale, **more)
        keys = (pages["index"], pages.get("index_turned", pages["index"]))
        self.ops.write_latent(indexed.key, indexed.key_turned, *keys, view.locations)
        queries = (indexed.q, indexed.q_turned, indexed.weights)
        chosen = self.ops.choose_positions(*queries, *keys, *where, spec.top, **more)
        return self.ops.latent_attention(*latents, *where, spec.scale, chosen, **more)

    def latent_pages(self, layer: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        pages, view = self.store.tensors(layer), self.step.groups[self.store.group_of(layer)]
        return (pages["latent"], pages["key"]), view.locations

    @property
    def branching(self) -> _Paths:
        return {} if self.step.paths is None else {"paths": self.step.paths}


class _Writing(PagedStep):
    def __call__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """returns: q; nothing reads the result."""
        self.write(spec, k, v)
        return q


class EncoderAttention:
    """Each row is a whole prompt whose tokens all attend to each other, in window layers to those
    near by; no pages."""

    def __init__(self, ops: Ops, store: KVStore) -> None:
        """Takes the arguments of every backend; keeps nothing between steps."""

    def bind(self, geometry: StepGeometry) -> StepAttention:
        return _BoundEncoder(
            geometry.row_starts.tolist()
        )  # sync: once per step; encoders run on the host


@dataclass(frozen=True)
class _BoundEncoder:
    row_starts: list[int]

    def __call__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "no encoder has sinks"
        borders = list(zip(self.row_starts, self.row_starts[1:], strict=False))
        longest = max(end - start for start, end in borders)
        near = _near(longest, spec.window, q.device) if 0 < spec.window < longest else None
        rows = [
            scaled_dot_product_attention(
                q[start:end].transpose(0, 1),  # [heads, tokens of the row, head_dim]
                k[start:end].transpose(0, 1),
                v[start:end].transpose(0, 1),
                attn_mask=None if near is None else near[: end - start, : end - start],
                scale=spec.scale,
                enable_gqa=spec.heads != spec.kv_heads,
            ).transpose(0, 1)
            for start, end in borders
        ]
        return torch.cat(rows)  # [tokens, heads, head_dim]

    def latent(
        self,
        spec: LatentSpec,
        q: Tensor,
        q_turned: Tensor,
        kept: tuple[Tensor, Tensor] | None,
        indexed: IndexerOutput | None = None,
    ) -> Tensor:
        raise NotImplementedError("no encoder has latent attention")

    def latent_pages(self, layer: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        raise NotImplementedError("no encoder has latent attention")


def _near(count: int, window: int, device: torch.device) -> Tensor:
    """Which tokens are less than `window` apart: [count, count] bool."""
    places = torch.arange(count, device=device)
    return (places[:, None] - places[None, :]).abs() < window


BACKENDS: Table[Callable[[Ops, KVStore], AttentionBackend]] = Table(
    "attention backend",
    {
        "paged": "banyan.runner.attention:PagedAttentionBackend",
        # An alias: the old name of "paged".
        "reference": "banyan.runner.attention:PagedAttentionBackend",
        "encoder": "banyan.runner.attention:EncoderAttention",
    },
    plugins="banyan.attention",
)
