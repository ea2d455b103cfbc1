"""What the NPU's operators of sparse latent attention compute, and what they refuse."""

from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

from banyan.ascend.ops import latent_contracts
from banyan.ascend.ops.contracts import require

_INDEXER, _SPARSE = "npu_lightning_indexer", "npu_sparse_flash_attention"
_ENDLESS = "9223372036854775807"
SCHEMAS = {
    _INDEXER: "(Tensor query, Tensor key, Tensor weights, *, "
    "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
    "Tensor? block_table=None, str layout_query='BSND', str layout_key='BSND', "
    "int sparse_count=2048, int sparse_mode=3, "
    f"int pre_tokens={_ENDLESS}, int next_tokens={_ENDLESS}, bool return_value=False) "
    "-> (Tensor, Tensor)",
    _SPARSE: "(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, float scale_value, "
    "*, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', int sparse_mode=3, "
    f"int pre_tokens={_ENDLESS}, int next_tokens={_ENDLESS}, int attention_mode=0, "
    "bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
}


class Sparse:
    """The operators by their names."""

    def __init__(self, core: ModuleType) -> None:
        self._host: Callable[[Tensor], Tensor] = core.host_alias
        self._device: Callable[[Tensor, int], Tensor] = core.device_alias

    def npu_lightning_indexer(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        *,
        actual_seq_lengths_query: Tensor,
        actual_seq_lengths_key: Tensor,
        block_table: Tensor,
        sparse_count: int = 2048,
        **given: object,
    ) -> tuple[Tensor, Tensor]:
        rows = (actual_seq_lengths_query, actual_seq_lengths_key, block_table)
        latent_contracts.lightning_indexer(query, key, weights, *rows, sparse_count)
        _only(_INDEXER, given, {"layout_query": "TND", "layout_key": "PA_BSND"})
        q, shares = self._host(query).float(), self._host(weights).float()
        chosen = torch.full((len(q), 1, sparse_count), -1, dtype=torch.int32)
        for tokens, places in self._rows(_INDEXER, len(q), len(key), key.shape[1], *rows):
            keys = self._host(key).flatten(0, 2)[places].float()
            scores = torch.einsum("thd,ld->thl", q[tokens], keys).relu()
            scores = torch.einsum("thl,th->tl", scores, shares[tokens])
            count, length = scores.shape
            for at in range(count):
                seen = length - count + at + 1
                best = scores[at, :seen].sort(descending=True, stable=True).indices[:sparse_count]
                chosen[tokens.start + at, 0, : len(best)] = best.int()
        return self._given(query, chosen), self._given(query, torch.zeros(0, dtype=query.dtype))

    def npu_sparse_flash_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        sparse_indices: Tensor,
        scale_value: float,
        *,
        block_table: Tensor,
        actual_seq_lengths_query: Tensor,
        actual_seq_lengths_kv: Tensor,
        query_rope: Tensor,
        key_rope: Tensor,
        **given: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = (actual_seq_lengths_query, actual_seq_lengths_kv, block_table)
        latent_contracts.sparse_flash_attention(
            query, query_rope, key, key_rope, sparse_indices, *rows
        )
        wanted = {"layout_query": "TND", "layout_kv": "PA_BSND"}
        _only(_SPARSE, given, wanted | {"attention_mode": 2})
        q = torch.cat([self._host(query), self._host(query_rope)], -1).float()
        chosen, out = self._host(sparse_indices), torch.empty_like(self._host(query))
        for tokens, places in self._rows(_SPARSE, len(q), len(key), key.shape[1], *rows):
            v = self._host(key).flatten(0, 2)[places].float()
            k = torch.cat([v, self._host(key_rope).flatten(0, 2)[places].float()], -1)
            count, length = tokens.stop - tokens.start, len(k)
            for at in range(count):
                mine = chosen[tokens.start + at, 0]
                valid = mine[mine >= 0].long()
                is_first = bool((mine[: len(valid)] >= 0).all())
                require(is_first, _SPARSE, "valid sparse_indices come first, and -1 behind them")
                seen = length - count + at + 1
                require(
                    len(valid) > 0 and int(valid.max()) < seen,
                    _SPARSE,
                    f"sparse_indices of a token must be 0 to {seen - 1}, they are up to "
                    f"{int(valid.max()) if len(valid) else -1}",
                )
                weights = (q[tokens.start + at] @ k[valid].t() * scale_value).softmax(-1)
                out[tokens.start + at] = (weights @ v[valid]).to(out.dtype)
        nothing = torch.zeros(0)
        found = (out, nothing, nothing.clone())
        return tuple(self._given(query, part) for part in found)  # type: ignore[return-value]

    def _rows(
        self,
        name: str,
        tokens: int,
        pages: int,
        size: int,
        ends: Tensor,
        lengths: Tensor,
        table: Tensor,
    ) -> Iterator[tuple[slice, Tensor]]:
        """The tokens of each row, and where its keys lie in all pages."""
        reported, start = self._host(ends).tolist(), 0
        require(
            sorted(reported) == reported and reported[-1] == tokens,
            name,
            f"actual_seq_lengths_query are sums, rising to {tokens}; they are {reported}",
        )
        for row, (end, length) in enumerate(
            zip(reported, self._host(lengths).tolist(), strict=True)
        ):
            used = self._host(table)[row, : -(-length // size)].long()
            is_inside = int(used.min()) >= 0 and int(used.max()) < pages
            require(is_inside, name, f"the pages of row {row} must be 0 to {pages - 1}")
            places = (used[:, None] * size + torch.arange(size)).flatten()[:length]
            yield slice(start, end), places
            start = end

    def _given(self, like: Tensor, found: Tensor) -> Tensor:
        return self._device(found, like.device.index)


def _only(name: str, given: dict[str, object], wanted: dict[str, object]) -> None:
    """What else was given is what is served here, and all of that was given."""
    usual = dict.fromkeys(("pre_tokens", "next_tokens"), int(_ENDLESS))
    usual |= {"sparse_mode": 3, "sparse_block_size": 1}
    found = {key: value for key, value in given.items() if value != usual.get(key)}
    rest = {key: value for key, value in found.items() if value not in (None, False)}
    require(rest == wanted, name, f"{wanted} are served here, it was given {rest}")
