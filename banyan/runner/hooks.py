"""Debugging of a model's layers: custom forward hooks, tensor dumps, and injected inputs.

These serve --forward-hooks, --debug-tensor-dump-output-folder, --debug-tensor-dump-inject and
--enable-layerwise-nvtx-marker.
"""

import os
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.base.table import load_named
from banyan.config.hooks import TOKENS, HookSpec, hook_specs
from banyan.config.schema import LoadConfig
from banyan.formats.arrays import read_arrays, write_arrays
from banyan.layers.step_inputs import StepInputs
from banyan.models.base import Model
from banyan.models.decoder import DecoderLM
from banyan.platform.base import Ranges

log = logger(__name__)

_CALLED = re.compile(r"embedding|head|layers\.\d+(\.(?!\w*norm$)\w+)?")
"""Modules whose hooks run. Norms are called by another method than forward, so theirs would not."""

Hook = Callable[[nn.Module, tuple[object, ...], object], object]


def watch_layers(model: Model, config: LoadConfig, rank: int, ranges: Ranges | None = None) -> None:
    """Install what the flags ask for.

    Args:
        ranges: marks the layers for profilers; None = they are not marked.

    Raises:
        ConfigError: the model has no such layers, or a hook is not callable.
    """
    if not config.is_watched:
        return
    if not isinstance(model, DecoderLM):
        raise ConfigError(
            f"--forward-hooks and --debug-tensor-dump-*: {model.model_config.architecture} has no "
            "layers that can be watched",
            hint="decoders have",
        )
    if config.injects:
        Injection(model, config.dump_input).install()
    if ranges is not None:
        _mark_layers(model, ranges)
    for spec in hook_specs(config.hooks):
        _install_hook(model, spec, config.path)
    if config.dump_folder:
        layers = config.dump_layers or range(model.model_config.num_layers)
        folder = Path(config.dump_folder) / f"rank{rank}-pid{os.getpid()}"
        Dump(model, folder, frozenset(layers)).install()


def _mark_layers(model: nn.Module, ranges: Ranges) -> None:
    """A range around the forward pass of each module."""

    def begin(name: str, *_: object) -> None:
        ranges.begin(name)

    def end(*_: object) -> None:
        ranges.end()

    for name, part in model.named_modules():
        if _CALLED.fullmatch(name):
            part.register_forward_pre_hook(partial(begin, name))
            part.register_forward_hook(end, always_call=True)


def _install_hook(model: nn.Module, spec: HookSpec, checkpoint: str) -> None:
    flag = "--forward-hooks"
    factory = load_named(flag, spec.factory, checkpoint)
    try:
        made = factory(dict(spec.options))
    except Exception as error:  # user code may raise anything
        raise ConfigError(
            f"{flag}: {printable(spec.factory)} fails with {type(error).__name__}: "
            f"{printable(str(error))}"
        ) from error
    if not callable(made):
        raise ConfigError(f"{flag}: {printable(spec.factory)} has made no function")
    called = {name: part for name, part in model.named_modules() if _CALLED.fullmatch(name)}
    for pattern in spec.modules:
        meant = [part for name, part in called.items() if fnmatchcase(name, pattern)]
        if not meant:
            raise ConfigError(
                f"{flag}: no module is called {printable(pattern, 80)!r}",
                hint=f"there are {', '.join(list(called)[:8])} …",
            )
        for part in meant:
            part.register_forward_hook(cast(Hook, made))


class Dump:
    """Writes the tensors of each forward pass to a file: token ids, positions, and for each chosen
    layer its inputs, the outputs of its parts, and its outputs. Logits go to separate files. All
    are float32 except ids and positions.

    Args:
        folder: for `pass-000000.safetensors` and so on.
    """

    def __init__(self, model: DecoderLM, folder: Path, layers: frozenset[int]) -> None:
        self._model = model
        self._folder = folder
        self._layers = layers
        self._found: dict[str, np.ndarray] = {}
        self._pass = len(list(folder.glob("pass-??????.safetensors")))
        """Number of the next file; an earlier model (before a weight update) may have written
        some."""
        self._logits = 0

    def install(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--debug-tensor-dump-output-folder: {printable(str(self._folder))}: "
                f"{error.strerror}"
            ) from None
        for number in self._model.stage:
            layer = self._model.layers[number]
            layer.register_forward_pre_hook(partial(self._enter, number))
            if number in self._layers:
                for name, part in layer.named_children():
                    if _CALLED.fullmatch(where := f"layers.{number}.{name}"):
                        part.register_forward_hook(partial(self._part, where))
            layer.register_forward_hook(partial(self._leave, number))
        if self._model.head is not None:
            self._model.head.register_forward_hook(self._head)

    def _enter(self, layer: int, _: nn.Module, given: tuple[object, ...]) -> None:
        if layer == self._model.stage[0]:
            step = cast(StepInputs, given[3])
            self._found = {TOKENS: _plain(step.tokens), "positions": _plain(step.positions)}
        if layer in self._layers:
            self._keep(f"layers.{layer}.input", given[0])
            self._keep(f"layers.{layer}.residual", given[1])

    def _part(self, name: str, _: nn.Module, given: object, made: object) -> None:
        self._keep(name, made)

    def _leave(self, layer: int, _: nn.Module, given: object, made: object) -> None:
        if layer in self._layers:
            output, residual = cast(tuple[Tensor, Tensor], made)
            self._keep(f"layers.{layer}.output", output)
            self._keep(f"layers.{layer}.output_residual", residual)
        if layer == self._model.stage[-1]:
            self._write(f"pass-{self._pass:06}", self._found)
            self._found, self._logits = {}, 0
            self._pass += 1

    def _head(self, _: nn.Module, given: tuple[object, ...], made: object) -> None:
        tensors = {"hidden": given[0], "logits": made}
        found = {name: _plain(cast(Tensor, tensor)) for name, tensor in tensors.items()}
        self._write(f"pass-{self._pass - 1:06}-logits-{self._logits}", found)
        self._logits += 1

    def _keep(self, name: str, tensor: object) -> None:
        if isinstance(tensor, Tensor):
            self._found[name] = _plain(tensor)

    def _write(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        path = self._folder / f"{name}.safetensors"
        try:
            write_arrays(str(path), arrays, {})
        except OSError as error:
            log.error("no dump of tensors: %s: %s", path, error.strerror)


class Injection:
    """Replaces inputs of layers in passes whose tokens equal the tokens in the file. The file uses
    the names of dumps; `input` without `residual` is the whole residual stream."""

    def __init__(self, model: DecoderLM, path: str) -> None:
        self._model = model
        arrays = read_arrays(path)
        self._tokens = arrays[TOKENS].tolist()
        self._inputs: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._is_meant = False
        for layer in model.stage:
            given = [arrays.get(f"layers.{layer}.{name}") for name in ("input", "residual")]
            for array in given:
                if array is not None and array.shape != (
                    len(self._tokens),
                    model.model_config.hidden_size,
                ):
                    raise ConfigError(
                        f"--debug-tensor-dump-input-file: inputs of layer {layer} have the shape "
                        f"{array.shape}, not {(len(self._tokens), model.model_config.hidden_size)}"
                    )
            if given[0] is not None:
                rest = None if given[1] is None else torch.from_numpy(given[1])
                self._inputs[layer] = (torch.from_numpy(given[0]), rest)
        if not self._inputs and model.stages.size == 1:
            raise ConfigError(
                "--debug-tensor-dump-inject: the input file has no inputs of layers",
                hint="they are called layers.N.input, and are float32",
            )

    def install(self) -> None:
        for number in self._model.stage:
            self._model.layers[number].register_forward_pre_hook(partial(self._enter, number))

    def _enter(
        self, layer: int, _: nn.Module, given: tuple[object, ...]
    ) -> tuple[object, ...] | None:
        if layer == self._model.stage[0]:
            self._is_meant = (
                cast(StepInputs, given[3]).tokens.tolist() == self._tokens
            )  # sync: debug
        if not self._is_meant or layer not in self._inputs:
            return None
        own = cast(Tensor, given[0])
        x, residual = self._inputs[layer]
        return (x.to(own), None if residual is None else residual.to(own), *given[2:])


def _plain(tensor: Tensor) -> np.ndarray:
    """A copy on the host: ids as int32 or int64, everything else as float32."""
    found = tensor.detach().cpu()  # sync: debug
    if found.dtype not in (torch.int32, torch.int64):
        found = found.float()
    return found.numpy().copy()
