"""Opens what moves KV pages out of one replica's device, as the flags ask: to host memory or a
store (hierarchical cache), or to another server (PD disaggregation).

Part of the composition root (engine/core_process.py).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import numpy as np
import torch

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.rules.cache import BY_NAME, COPIED_APART, HOST, can_have_store, store_wishes
from banyan.config.schema import CacheConfig, Config, HandoffConfig
from banyan.disaggregation.page_cutting import PageForm
from banyan.engine.model_loader import OpenModel, groups_of
from banyan.formats.shards import files_of_weights
from banyan.kv_cache.hierarchical_cache import can_be_stored
from banyan.kv_cache.sizing import CacheGroup
from banyan.kv_transfer.page_mover import Mover, PageMover, PairMover
from banyan.kv_transfer.store import (
    STORES,
    HostTier,
    Store,
    StoreOptions,
    digest_of_code,
    digest_of_files,
    identity,
)
from banyan.layers.build import Build
from banyan.layers.cache_spec import PageGroup
from banyan.messages.control_ops import AttachStore, ControlOp, DetachStore
from banyan.model_config.draft_model import draft_of
from banyan.model_config.model_config import STATE, ModelConfig
from banyan.model_config.quantization import read_kv_scales
from banyan.ops.bind import ON_LATENTS, ON_PAGES, PLAIN_PAGES, BoundOps
from banyan.ops.cpu.paged_attention import PAGES as BY_HEAD
from banyan.ops.cpu.paged_attention import parts_of_head
from banyan.parallel.process_group import own_address
from banyan.platform.base import Platform, Traits
from banyan.runner.control_ops import PrepareOp
from banyan.runner.kvstore import DeviceMemory, GroupLayout, KVStore
from banyan.runner.rank_page_access import (
    PageLayout,
    PartsOfHead,
    RankAccess,
    forms_of,
    layout_facts,
    page_layouts_of,
)
from banyan.runner.rank_pages import EarlyMover, RankPages
from banyan.runner.speculative.draft_runner import DraftModel

if TYPE_CHECKING:
    from banyan.disaggregation.transfer_engine import Fabric


import msgspec

from banyan.runner.control_ops import Finish, RankReply

log = logger(__name__)

OpenMover = Callable[[KVStore], PageMover]
_NUMERIC_PACKAGES = ("layers", "models", "ops", "runner")
"""Packages whose code decides the bytes of a page."""
_BY_HEAD: dict[str, PartsOfHead | None] = {PLAIN_PAGES: None, BY_HEAD: parts_of_head}
"""Page layouts that can be cut by tokens."""
_SHOWN = 16
"""Characters of a digest in messages."""
_TP, _DP, _PP = "--tensor-parallel-size", "--data-parallel-size", "--pipeline-parallel-size"


@dataclass(frozen=True)
class ServedReplica:
    """Everything that the bytes of one replica's KV pages depend on.

    Attributes:
        groups: page groups as the model's layers declare them.
        pools: the same groups as the engine counts them.
        draft: the draft model, which has a part of each page; None if there is none.
    """

    config: Config
    model_config: ModelConfig
    platform: Platform
    build: Build
    groups: tuple[PageGroup, ...]
    pools: Sequence[CacheGroup]
    draft: DraftModel | None = None

    @property
    def traits(self) -> Traits:
        return self.platform.traits

    def model_facts(self) -> tuple[object, ...]:
        """Facts about the weights and how they are divided among ranks."""
        ranks = self.build.groups.attention.size
        return (
            *self.weight_facts(),
            self.config.parallel.tp,
            self.config.parallel.pp,
            [read_kv_scales(self.config, self.model_config, rank) for rank in range(ranks)],
        )

    def shared_facts(self) -> tuple[object, ...]:
        """Like `model_facts`, for pages cut for other ranks: equal KV scales count once."""
        scales = [
            read_kv_scales(self.config, self.model_config, rank)
            for rank in range(self.build.groups.attention.size)
        ]
        return (*self.weight_facts(), scales[:1] if all(s == scales[0] for s in scales) else scales)

    def weight_facts(self) -> tuple[object, ...]:
        model = self.config.model
        files = [] if model.load_format == "dummy" else files_of_weights(self.model_config.path)
        return (
            replace(self.model_config, path=""),
            digest_of_files(files),
            model.revision,
            model.load_format,
            model.implementation,
            sorted(model.overrides.items()),
            model.loader_functions,
            model.context_length,
            model.hooks,
            model.dump_input if model.injects else "",
            model.quantization,
            model.torchao,
        )

    def code_facts(self) -> tuple[object, ...]:
        """Facts about code and kernels: others may compute other bytes."""
        device = self.config.device
        choices = cast(BoundOps, self.build.ops).choices
        unused = ON_PAGES if self.model_config.latent is not None else ON_LATENTS
        return (
            digest_of_code(_NUMERIC_PACKAGES),
            torch.__version__,
            sorted(self.traits.features),
            device.isa,
            device.exact_head,
            [(c.label, c.kernel) for c in choices if c.label not in unused],
            self.config.model.cpu_activations,
        )

    def forms(
        self, page_layouts: Sequence[PageLayout], groups: Sequence[GroupLayout]
    ) -> tuple[PageForm, ...]:
        """How the tokens of a page are laid out, by group."""
        builds = [self.build] if self.draft is None else [self.build, self.draft.build]
        choices = [choice for build in builds for choice in cast(BoundOps, build.ops).choices]
        layouts = {choice.pages for choice in choices if choice.label in ON_PAGES}
        if len(layouts) > 1 or not layouts <= _BY_HEAD.keys():
            return tuple(PageForm(0 if g.kind == STATE else g.page_size) for g in groups)
        return forms_of(page_layouts, groups, _BY_HEAD[layouts.pop()])

    def draft_facts(self) -> tuple[object, ...]:
        """Facts about the draft model's part of a page."""
        if self.draft is None:
            return ()
        model_config, model = self.draft.model.model_config, draft_of(self.config)
        files = [] if model.load_format == "dummy" else files_of_weights(model_config.path)
        choices = cast(BoundOps, self.draft.build.ops).choices
        return (
            replace(model_config, path=""),
            digest_of_files(files),
            model.load_format,
            model.quantization,
            [(choice.label, choice.kernel) for choice in choices],
        )

    def page_facts(self) -> dict[str, str]:
        """Number types, by name."""
        return {
            "number type": self.config.model.activation_dtype,
            "number type of the cache": self.config.cache.dtype,
        }


def served_replica(opened: OpenModel, pools: Sequence[CacheGroup]) -> ServedReplica:
    """Collect what the bytes of this replica's pages depend on."""
    return ServedReplica(
        config=opened.config,
        model_config=opened.model_config,
        platform=opened.platform,
        build=opened.build,
        groups=groups_of(opened),
        pools=pools,
        draft=opened.draft,
    )


def mover_of(
    served: ServedReplica, wake: Callable[[], None], secret: str, rank_access: Sequence[RankAccess]
) -> OpenMover | None:
    """Choose how to open a replica's page mover; None if pages stay on the device.

    Args:
        wake: called when a copy or lookup has ended.
        secret: shared by the servers of a PD pair.
        rank_access: access to the pages of the other ranks.
    """
    config = served.config
    _check_the_device(config, served.traits)
    if config.handoff.role:
        return _pd_mover(served, wake, secret, rank_access)
    if not can_have_store(config, served.model_config):
        return None
    return _store_mover(served, wake, rank_access)


def _check_the_device(config: Config, traits: Traits) -> None:
    """Refuse page movers that this device does not support."""
    is_stored = config.cache.host_tier or bool(config.handoff.role)
    if config.cache.hierarchical and not traits.is_host and not is_stored:
        raise ConfigError(
            f"--enable-hierarchical-cache is not available on {traits.name}: pages are moved from "
            "and to the memory of the host only",
            hint="leave it out",
        )
    if config.handoff.role and not (traits.is_host or traits.moves_pages):
        raise ConfigError(
            f"--disaggregation-mode {config.handoff.mode} is not available on {traits.name}: pages "
            "are not taken from its memory",
            hint="leave it out",
        )


def _store_mover(
    served: ServedReplica, wake: Callable[[], None], rank_access: Sequence[RankAccess]
) -> OpenMover:
    cache, world = served.config.cache, served.config.parallel.world

    def open_mover(pages: KVStore) -> PageMover:
        mover = Mover(_pages_of_all(served, pages, rank_access), None, wake)
        store = _open_first_store(served, mover)
        if cache.host_tier:
            _check_the_pages(served, "--enable-hierarchical-cache")
            arrange(served.config, pages)
            store = _host_tier(cache, pages, mover.page_bytes(), store)
        if store is not None:
            mover.attach(store)
        return mover if world == 1 else EarlyMover(mover)

    return open_mover


def _open_first_store(served: ServedReplica, mover: Mover) -> Store | None:
    """The store that the flags name; None = there is none yet."""
    cache = served.config.cache
    if cache.store in ("", HOST):
        return None
    store = open_store(served, mover, cache.store, store_wishes(cache).rest)
    log.info(
        "store=%s capacity_gb=%.1f: pages of the cache outlive this process",
        cache.store,
        store.capacity_bytes / 1e9,
    )
    return store


def open_store(served: ServedReplica, mover: Mover, name: str, rest: dict[str, object]) -> Store:
    """Open the store `name` for a replica's pages.

    Args:
        rest: options of the store itself.

    Raises:
        ConfigError: the store cannot be used.
        ModelError: weights cannot be read for their digest.
    """
    _check_the_pages(served, f"--hicache-storage-backend {name}")
    open_ = STORES.load(name)
    if name == "mooncake" and (devices := served.config.handoff.mooncake_devices):
        rest = {"protocol": "rdma", "device_name": devices, **rest}
    facts = (
        served.model_facts(),
        served.code_facts(),
        served.page_facts(),
        served.groups,
        served.draft_facts(),
        served.config.cache.page_size,
        served.config.cache.host_layout,
    )
    return open_(StoreOptions(identity(facts), mover.page_bytes(), rest))


def _check_the_pages(served: ServedReplica, flag: str) -> None:
    if not can_be_stored(served.pools):
        raise ConfigError(
            f"{flag}: some layers of this model do not keep every position, or keep them in pages "
            "of another size",
            hint="leave it out",
        )


def store_preparers(
    served: ServedReplica, mover: PageMover | None
) -> dict[type[ControlOp], PrepareOp]:
    """Control ops that attach and detach a store on one rank; {} if no store is possible.

    Args:
        mover: rank 0's; None on other ranks.
    """
    config, rank = served.config, served.build.groups.world.rank
    if not can_have_store(config, served.model_config):
        return {}
    if rank:
        return {AttachStore: prepare_nothing_to_attach, DetachStore: prepare_nothing_to_attach}
    inner = mover.inner if isinstance(mover, EarlyMover) else mover
    inner = inner.store if isinstance(inner, PairMover) else inner
    assert isinstance(inner, Mover)
    switch = StoreSwitch(inner, lambda name, rest: open_store(served, inner, name, rest))
    return {AttachStore: switch.prepare_attach, DetachStore: switch.prepare_detach}


def _pages_of_all(
    served: ServedReplica, store: KVStore, rank_access: Sequence[RankAccess]
) -> KVStore | RankPages:
    """Access to the pages of all ranks of a replica."""
    parallel = served.config.parallel
    if parallel.world == 1:
        return store
    layouts = {choice.pages for choice in cast(BoundOps, served.build.ops).choices} - {PLAIN_PAGES}
    cache = served.config.cache
    is_by_name = cache.host_tier and cache.host_layout in BY_NAME
    return RankPages(
        store,
        rank_access,
        is_by_head=layouts == {BY_HEAD},
        timeout_s=parallel.meet_timeout_s,
        is_by_name=is_by_name,
    )


def arrange(config: Config, pages: KVStore) -> None:
    """Choose how a rank's pages are copied to host memory and back.

    Rank 0 assembles the pages of all ranks (`runner/rank_pages.py`).
    """
    cache = config.cache
    if cache.host_tier:
        is_by_name = cache.host_layout in BY_NAME and config.parallel.world == 1
        pages.arrange(is_by_name, cache.host_copies == COPIED_APART)


def _host_tier(
    cache: CacheConfig, pages: KVStore, page_bytes: Sequence[int], store: Store | None
) -> HostTier:
    """Open the host tier of the hierarchical cache.

    Args:
        page_bytes: size of a page of each group, over all ranks.

    Raises:
        ConfigError: the host has too little free memory.
    """
    groups = zip(page_bytes, pages.groups, strict=True)
    there = sum(size * group.num_pages for size, group in groups)
    wanted = cache.host_gb * 10**9 or int(cache.host_ratio * there)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > free:
        raise ConfigError(
            f"pages in memory of the host would take {wanted / 1e9:,.1f} GB, and {free / 1e9:,.1f} "
            "GB are free",
            hint="lower --hicache-size or --hicache-ratio",
        )
    log.info(
        "host_tier_gb=%.3f copies=%s layout=%s: pages of the device are kept in host memory too",
        wanted / 1e9,
        cache.host_copies,
        cache.host_layout,
    )
    return HostTier(wanted, _pinned, store)


def _pinned(size_bytes: int) -> np.ndarray:
    """Allocate host memory that a device can read and write directly."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()


def _fabric_of(served: ServedReplica) -> "Fabric | None":
    """Options for transfer engines between devices; None if there is no interconnect."""
    from banyan.disaggregation.transfer_engine import Fabric

    found, device = served.platform.interconnect(), served.build.device
    if found is None:
        return None
    return Fabric(
        library=found.library,
        device=device.index or 0,
        protocol=found.protocol,
        store=found.store,
        allocate=lambda size_bytes: DeviceMemory(size_bytes, device),
    )


def _pd_mover(
    served: ServedReplica, wake: Callable[[], None], secret: str, rank_access: Sequence[RankAccess]
) -> OpenMover:
    from banyan.disaggregation.backends import FakeWithoutHost
    from banyan.disaggregation.transfer import (  # imports sockets, which only PD needs
        TRANSFERS,
        TransferOptions,
    )

    handoff, host = served.config.handoff, served.config.server.host
    parallel, is_prefill = served.config.parallel, handoff.mode == "prefill"
    if parallel.node_of(parallel.replica):
        host = own_address(urlsplit(parallel.ranks_meet).hostname, parallel.interface)
    options = TransferOptions(
        is_prefill=is_prefill,
        host=host,
        port=handoff.port + (parallel.replica if is_prefill else 0),
        replica=parallel.replica,
        replicas=parallel.dp,
        secret=secret,
        facts={
            "model": identity(served.shared_facts()).hex()[:_SHOWN],
            "release or its kernels": identity(served.code_facts()).hex()[:_SHOWN],
            "draft model": identity(served.draft_facts()).hex()[:_SHOWN],
            **served.page_facts(),
            "transfer backend": handoff.transfer,
        },
        vocab_size=served.model_config.vocab_size,
        lease_s=handoff.lease_s,
        patience_s=handoff.patience_s,
        fabric=lambda: _fabric_of(served),
        rdma_devices=handoff.rdma_devices,
        layout={_TP: parallel.tp, _DP: parallel.dp, _PP: parallel.pp},
        peer_layout=peer_layout_of(handoff),
    )
    open_transfer = TRANSFERS.load(handoff.transfer)

    def open_mover(store: KVStore) -> PageMover:
        pages = _pages_of_all(served, store, rank_access)
        page_layouts = (
            pages.page_layouts if isinstance(pages, RankPages) else page_layouts_of(store)
        )
        forms = served.forms(page_layouts, store.groups)
        layout = identity(layout_facts(page_layouts, store.groups)).hex()[:_SHOWN]
        facts = {
            **options.facts,
            "layout of the cache": layout,
            **_facts_of_sizes(store.groups, forms),
        }
        mover = open_transfer(pages, replace(options, facts=facts, forms=forms), wake)
        if handoff.fakes_prompts and not is_prefill:
            log.warning("requests that name no prefill server get invented prompts")
            mover = FakeWithoutHost(mover, wake)
        if can_have_store(served.config, served.model_config):
            stored = Mover(pages, None, wake)
            if (first := _open_first_store(served, stored)) is not None:
                stored.attach(first)
            mover = PairMover(mover, stored)
        return mover if parallel.world == 1 else EarlyMover(mover)

    return open_mover


def peer_layout_of(handoff: HandoffConfig) -> dict[str, int]:
    """The ranks and replicas that the other server must have."""
    if handoff.mode == "prefill":
        wanted = {_TP: handoff.decode_tp, _DP: handoff.decode_dp}
    else:
        wanted = {_PP: handoff.prefill_pp}
    return {flag: count for flag, count in wanted.items() if count}


def _facts_of_sizes(groups: Sequence[GroupLayout], forms: Sequence[PageForm]) -> dict[str, str]:
    """Page sizes that cannot be cut and must therefore be equal on both servers."""
    facts: dict[str, str] = {}
    for group, form in zip(groups, forms, strict=True):
        if group.kind == STATE:
            facts["number of tokens between states"] = str(group.page_size)
        elif form.blocks is None:
            facts["page size, which cannot be cut here,"] = str(group.page_size)
    return facts


OpenStore = Callable[[str, dict[str, object]], Store]
"""Opens a store by its name and its own options; ConfigError if it cannot."""


class StoreSwitch:
    """Control ops that attach and detach the cache store while the server runs.

    Rank 0 copies the pages of all ranks, so it alone opens the store.

    Args:
        mover: of rank 0.
        open_store: opens the store of this replica's pages.
    """

    def __init__(self, mover: Mover, open_store: OpenStore) -> None:
        self._mover = mover
        self._open_store = open_store
        self._unused: Store | None = None
        """Opened for a control op that another rank could not prepare."""

    def prepare_attach(self, order: ControlOp) -> Finish:
        """Open the store, which changes nothing yet.

        Raises:
            ConfigError: it cannot be opened, or there is one.
        """
        assert isinstance(order, AttachStore)
        self._close_unused()
        if self._mover.is_attached:
            raise ConfigError("a store is attached already", hint="detach it first")
        options = msgspec.json.decode(order.options, type=dict[str, object])
        store = self._unused = self._open_store(order.store, options)

        def attach() -> RankReply:
            if order.is_trial:
                self._close_unused()
                return RankReply("The store can be attached.")
            self._unused = None
            self._mover.attach(store)
            return RankReply(f"store={order.store} capacity_gb={store.capacity_bytes / 1e9:.1f}")

        return attach

    def prepare_detach(self, order: ControlOp) -> Finish:
        assert isinstance(order, DetachStore)
        self._close_unused()

        def detach() -> RankReply:
            if order.is_trial:
                return RankReply("The store can be detached.")
            self._mover.detach()
            return RankReply("The cache is kept in memory alone.")

        return detach

    def _close_unused(self) -> None:
        store, self._unused = self._unused, None
        if store is not None:
            store.close()


def prepare_nothing_to_attach(order: ControlOp) -> Finish:
    """On a rank other than 0, whose pages rank 0 maps since the start."""
    return lambda: RankReply("")
