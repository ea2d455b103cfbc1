"""Loads one rank's weights at the start, and updates, releases and resumes them at runtime.

LoadedWeights serves the control ops for weights and memory; the engine decides when they run.
WeightsBackup keeps the weights of a device in host memory while their memory is released
(--enable-weights-cpu-backup).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import FunctionType, ModuleType

import msgspec
import torch
from torch import Tensor

from banyan.base.errors import ConfigError, RequestError
from banyan.base.log import logger, printable
from banyan.base.memory import give_back, runs_the_process
from banyan.config.schema import LoadConfig
from banyan.layers.build import Build
from banyan.lora.load import enable_lora
from banyan.messages.control_ops import (
    GRAPHS,
    KV_CACHE,
    MEMORY_TAGS,
    WEIGHTS,
    ControlOp,
    ReadWeight,
    ReleaseMemory,
    ResumeMemory,
    TakeWeights,
)
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import Model
from banyan.models.decoder import DecoderLM
from banyan.models.dflash import DFlashLM
from banyan.models.eagle import Eagle3LM, EagleLM
from banyan.models.mtp import MTPModel
from banyan.models.transformers_model import load_transformers_model
from banyan.models.weights.draft_models import (
    load_dflash,
    load_eagle,
    load_mtp_layer,
    restrict_head,
)
from banyan.models.weights.loader import (
    load_model,
    load_tower,
    rows_of,
    tensors_of,
)
from banyan.models.weights.reader import Transform, files_state_of, load_transforms
from banyan.models.weights.torchao import torchao_transform
from banyan.models.whisper import WhisperLM
from banyan.ops.api import Ops
from banyan.runner.control_ops import Finish, RankReply
from banyan.runner.offload import Offload, OffloadedBlocks, not_streamed
from banyan.runner.runner import ModelRunner

log = logger(__name__)

_NOT_STORED = "Their pages are not stored, as the store is of the weights of the start."
_MOST_NUMBERS = 1 << 21
"""Most numbers of one tensor in a reply."""


def transforms_of(config: LoadConfig, model_config: ModelConfig) -> list[Transform]:
    """Transforms of the checkpoint's tensors before the model takes them, in op."""
    own = load_transforms(config.loader_functions, model_config.path)
    return [*own, torchao_transform(config.torchao, model_config)] if config.torchao else own


def load_weights(
    config: LoadConfig, model_config: ModelConfig, build: Build, offload: Offload | None = None
) -> Model:
    """This rank's share of the model at `model_config.path`.

    Args:
        offload: which weights stay in host memory; None = none.

    Raises:
        ConfigError, ModelError: it cannot be read with these settings.
    """
    blocks = None if offload is None else OffloadedBlocks(offload, build)
    with _one_torch_thread(build.ops):
        if config.implementation == "transformers":
            if offload is not None:
                raise not_streamed(model_config)
            return load_transformers_model(model_config, build, config.load_format)
        model = load_model(
            model_config,
            build,
            config.load_format,
            served_length=config.context_length,
            is_mapped=not config.disable_mmap,
            transforms=transforms_of(config, model_config),
            watch=blocks,
        )
    if blocks is not None:
        blocks.settle(model)
    if build.adapters is not None:
        enable_lora(model, build.adapters, build.ops)
    if model_config.media is not None and build.groups.stages.rank == 0:
        assert isinstance(model, DecoderLM | WhisperLM), "only decoders take features"
        for kind in model_config.media.towers:
            model.tower_modules[kind] = load_tower(
                model_config,
                build,
                config.load_format,
                is_mapped=not config.disable_mmap,
                transforms=transforms_of(config, model_config),
                kind=kind,
            )
    if config.is_watched:
        from banyan.runner.hooks import watch_layers

        watch_layers(model, config, build.groups.everyone.rank, build.ranges)
    return model


def load_mtp(
    config: LoadConfig, model_config: ModelConfig, model: Model, build: Build, page_size: int
) -> MTPModel:
    """This rank's part of the MTP layer in the checkpoint of `model`."""
    with _one_torch_thread(build.ops):
        return load_mtp_layer(
            model_config,
            model,
            build,
            page_size,
            config.load_format,
            served_length=config.context_length,
            is_mapped=not config.disable_mmap,
            transforms=transforms_of(config, model_config),
        )


def load_eagle_drafter(
    config: LoadConfig,
    model_config: ModelConfig,
    model: Model,
    build: Build,
    page_size: int,
    served: LoadConfig,
) -> EagleLM | Eagle3LM:
    """This rank's part of an EAGLE model that was trained for `model`.

    Args:
        served: how `model` was loaded.
    """
    with _one_torch_thread(build.ops):
        eagle = load_eagle(
            model_config,
            model,
            build,
            page_size,
            config.load_format,
            served_length=config.context_length,
            is_mapped=not config.disable_mmap,
        )
        if (
            model_config.draft_fields is not None
            and model_config.draft_fields.tokens
            and isinstance(eagle, EagleLM)
        ):
            restrict_head(
                eagle,
                model.model_config,
                model_config.draft_fields.tokens,
                build,
                served.load_format,
                is_mapped=not served.disable_mmap,
                transforms=transforms_of(served, model.model_config),
            )
        return eagle


def load_dflash_drafter(
    config: LoadConfig, model_config: ModelConfig, model: Model, build: Build
) -> DFlashLM:
    """This rank's part of a DFLASH model that was trained for `model`."""
    with _one_torch_thread(build.ops):
        return load_dflash(
            model_config,
            model,
            build,
            config.load_format,
            served_length=config.context_length,
            is_mapped=not config.disable_mmap,
        )


class LoadedWeights:
    """Control ops for weights and memory, each in two phases (runner/control_ops.py).

    Args:
        config: how weights are read.
        may_release: --enable-memory-saver was set.
        keeps_backup: released weights of a device stay in host memory.
        offload: which weights stay in host memory.
        draft: the draft model whose weights are released too, and stay in host memory; None = they
            stay on the device.
    """

    def __init__(
        self,
        config: LoadConfig,
        model_config: ModelConfig,
        build: Build,
        runner: ModelRunner,
        may_release: bool = False,
        offload: Offload | None = None,
        keeps_backup: bool = False,
        draft: Model | None = None,
    ) -> None:
        self._draft = draft
        self._draft_backup: WeightsBackup | None = None
        self._offload = offload
        self._keeps_backup = keeps_backup
        self._backup: WeightsBackup | None = None
        self._config = config
        self._model_config = model_config
        self._build = build
        self._runner = runner
        self._loaded_files = self._file_states(config, model_config)
        self._may_release = may_release
        self._may_freeze = runs_the_process()
        self._released: list[str] = []

    def prepare_take(self, op: ControlOp) -> Finish:
        """Load the weights of another folder or file. Old and new weights are in memory together
        for a moment, so a checkpoint that cannot be read changes nothing.

        Raises:
            ModelError, ConfigError: no such checkpoint, or one of another architecture or size.
        """
        assert isinstance(op, TakeWeights)
        model_config = self._model_config_at(op.path)
        config = replace(self._config, load_format="auto", path=model_config.path)
        files = self._file_states(config, model_config)
        loaded = [load_weights(config, model_config, self._build, self._offload)]

        def take() -> RankReply:
            if op.is_trial:
                loaded.clear()
                self._settle_memory()
                return RankReply("The weights can be taken.")
            self._released = [tag for tag in self._released if tag != WEIGHTS]
            self._backup = None
            self._restore_draft()
            self._runner.take_model(loaded.pop(), self._can_run)
            self._config, self._model_config = config, model_config
            self._loaded_files = files
            self._settle_memory()
            mover = self._runner.mover
            if mover is None or not mover.is_attached:
                return RankReply("The weights have been taken.")
            return RankReply(f"The weights have been taken. {_NOT_STORED}")

        return take

    def prepare_release(self, op: ControlOp) -> Finish:
        """
        Raises:
            RequestError: an unknown tag, or memory that is released already or cannot be resumed.
        """
        assert isinstance(op, ReleaseMemory)
        if not self._may_release:
            raise RequestError(
                "Memory is kept while the server runs.", hint="Start it with --enable-memory-saver."
            )
        tags = self._checked(op.tags)
        if gone := [tag for tag in tags if tag in self._released]:
            raise RequestError(f"{', '.join(gone)}: released already.")
        if WEIGHTS in tags and not self._keeps_backup:
            self._require_same_files()  # resuming reads them again from there

        def release() -> RankReply:
            if op.is_trial:
                return RankReply("It can be released.")
            # On a device, graphs have the addresses of weights and pages: they end with both.
            if WEIGHTS in tags or not self._is_host:
                keeps_weights = WEIGHTS not in (*tags, *self._released)
                drops_draft = WEIGHTS in tags and self._draft is not None
                self._runner.drop_model(keeps_weights or self._keeps_backup, drops_draft)
            if WEIGHTS in tags and self._keeps_backup and self._runner.model is not None:
                self._backup = WeightsBackup(self._runner.model)
                log.info("weights_backup_bytes=%d are in host memory", self._backup.size_bytes)
            if WEIGHTS in tags and self._draft is not None and not self._is_host:
                self._draft_backup = WeightsBackup(self._draft)
                size_bytes = self._draft_backup.size_bytes
                log.info("draft_weights_backup_bytes=%d are in host memory", size_bytes)
            if KV_CACHE in tags:
                self._runner.store.release()
            self._released += tags
            self._settle_memory()
            return RankReply(f"Released: {', '.join(tags)}.")

        return release

    def prepare_resume(self, op: ControlOp) -> Finish:
        """
        Raises:
            RequestError: an unknown tag.
            ModelError, ConfigError: the files have changed or are gone.
        """
        assert isinstance(op, ResumeMemory)
        tags = [tag for tag in self._checked(op.tags) if tag in self._released]
        loaded: list[Model] = []
        if WEIGHTS in tags and self._backup is None:
            self._require_same_files()
            loaded.append(
                load_weights(self._config, self._model_config, self._build, self._offload)
            )

        def resume() -> RankReply:
            self._released = [tag for tag in self._released if tag not in tags]
            if KV_CACHE in tags:
                self._runner.store.resume()
            if WEIGHTS in tags and self._backup is not None:
                self._backup.restore()
                self._backup = None
            if WEIGHTS in tags:
                self._restore_draft()
            model = loaded.pop() if loaded else self._runner.model
            if model is not None and (WEIGHTS in tags or tags and not self._is_host):
                self._runner.take_model(model, self._can_run)
                self._settle_memory()
            return RankReply(f"Resumed: {', '.join(tags)}." if tags else "Nothing was released.")

        return resume

    def prepare_read(self, op: ControlOp) -> Finish:
        """Read a tensor from the checkpoint. Only rank 0 reads; the others would get the same.

        Raises:
            ModelError, ConfigError: there is no such tensor, or the files have changed.
        """
        assert isinstance(op, ReadWeight)
        if self._build.groups.world.rank:
            return lambda: RankReply("")
        if self._config.load_format == "dummy":
            raise ConfigError("random weights have no names", hint="serve a checkpoint")
        self._require_same_files()
        config = self._config
        transforms = transforms_of(config, self._model_config)
        tensors = tensors_of(self._model_config, not config.disable_mmap, transforms)
        body = msgspec.json.encode(rows_of(tensors, op.name, op.rows, _MOST_NUMBERS))
        return lambda: RankReply("", body)

    def _restore_draft(self) -> None:
        if self._draft_backup is not None:
            self._draft_backup.restore()
            self._draft_backup = None

    @property
    def _is_host(self) -> bool:
        return self._runner.platform.traits.is_host

    @property
    def _can_run(self) -> bool:
        """Whether graphs may be captured once the weights are there."""
        return self._is_host or not {KV_CACHE, GRAPHS} & set(self._released)

    def _settle_memory(self) -> None:
        """Return the memory of a dropped model or of pages to the system, and exclude the new
        model's objects from garbage collection."""
        if self._may_freeze:
            gc.unfreeze()
        gc.collect()
        if self._may_freeze:
            gc.freeze()
        give_back()
        if not self._is_host:
            self._runner.platform.memory()  # returns unused memory to the device

    def _require_same_files(self) -> None:
        """
        Raises:
            ModelError, ConfigError: the files have changed since the weights were read.
        """
        if self._file_states(self._config, self._model_config) != self._loaded_files:
            raise ConfigError(
                f"the files at {printable(self._model_config.path)!r} are not those that the "
                "weights were read from",
                hint="POST /update_weights_from_disk takes what is there",
            )

    @staticmethod
    def _file_states(config: LoadConfig, model_config: ModelConfig) -> list[tuple[str, int, int]]:
        return [] if config.load_format == "dummy" else files_state_of(model_config)

    def _model_config_at(self, path: str) -> ModelConfig:
        """The model config of the checkpoint at `path`; ConfigError if it is another model."""
        config, mine = self._config, self._model_config
        found = read_model_config(
            path,
            overrides=config.overrides,
            is_foreign=config.implementation == "transformers",
            config_file=config.config_file,
            with_media=mine.media is not None,
        )
        same = replace(
            found, path=mine.path, format=mine.format, dtype=mine.dtype, pooling=mine.pooling
        )
        if same != mine:
            names = [f.name for f in fields(mine) if getattr(same, f.name) != getattr(mine, f.name)]
            raise ConfigError(
                f"{printable(path)!r} is another model than the one that is served: "
                f"{', '.join(names)} differ",
                hint="only weights of the same architecture and sizes can be taken",
            )
        return replace(found, pooling=mine.pooling)

    def _checked(self, tags: list[str]) -> list[str]:
        if unknown := [tag for tag in tags if tag not in MEMORY_TAGS]:
            raise RequestError(
                f"{printable(', '.join(unknown), 80)}: only {', '.join(MEMORY_TAGS)} can be "
                "released and resumed.",
                param="tags",
            )
        return list(dict.fromkeys(tags))


@contextmanager
def _one_torch_thread(ops: Ops) -> Iterator[None]:
    """Limit torch to one thread while compiled kernels pack weights. The pieces are small, and on a
    busy machine several threads would wait for each other at each piece."""
    threads = torch.get_num_threads()
    if ops.recorder is not None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_OWNERS = ("banyan.layers", "banyan.models", "banyan.moe.layer", "banyan.ops", "banyan.ascend.ops")
"""Modules of classes whose objects hold weights."""
_CONTAINERS = (dict, list, tuple, set)


class WeightsBackup:
    """Copies the weights to the host and frees their memory on the device; tensors stay as they
    are, without content, until `restore`."""

    def __init__(self, model: Model) -> None:
        tensors = (t for t in _device_tensors(model) if t.untyped_storage().nbytes())
        by_address = {t.untyped_storage().data_ptr(): t for t in tensors}
        self._kept = [(tensor, _bytes_of(tensor).cpu()) for tensor in by_address.values()]
        for tensor, _ in self._kept:
            tensor.untyped_storage().resize_(0)

    @property
    def size_bytes(self) -> int:
        return sum(content.nbytes for _, content in self._kept)

    def restore(self) -> None:
        """Allocate the memory again, at other addresses, and copy the weights back."""
        for tensor, content in self._kept:
            tensor.untyped_storage().resize_(content.nbytes)
            _bytes_of(tensor).copy_(content)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the tensor's storage."""
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))


def _device_tensors(model: Model) -> Iterator[Tensor]:
    """The tensors on a device that a model's layers hold, also in packed products and closures."""
    stack: list[object] = [model]
    seen: dict[int, object] = {}
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            if not each.is_cpu:
                yield each
        elif isinstance(each, FunctionType):
            stack += [cell.cell_contents for cell in each.__closure__ or ()]
        elif isinstance(each, _CONTAINERS) or _is_owner(each):
            stack += gc.get_referents(each)


def _is_owner(each: object) -> bool:
    if isinstance(each, (type, ModuleType)):
        return False
    module = type(each).__module__
    return module.startswith(_OWNERS) or module in ("functools", "builtins") and callable(each)
