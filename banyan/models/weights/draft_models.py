"""Loads draft models for a target model: EAGLE, EAGLE-3, DFlash, and a checkpoint's MTP layers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.base.torch_parts import complete_torch
from banyan.families import FAMILIES
from banyan.families.names import HUB_NAMES, NameMap
from banyan.layers.build import Build
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import Model
from banyan.models.decoder import DecoderLM
from banyan.models.dflash import DFlashLM
from banyan.models.eagle import Eagle3LM, EagleLM
from banyan.models.mtp import MTPModel
from banyan.models.weights.loader import Filling, fill_dummy, tensors_of
from banyan.models.weights.quant.base import Stored
from banyan.models.weights.reader import Transform, tensor_types
from banyan.ops.stored import RawTensor, StoredWeight

_EAGLE_PREFIX = "model."
_EMBEDDING, _HEAD = "embed_tokens.", "lm_head."
"""Copies of the target model's weights; EAGLE-3 has its own head."""
_D2T, _T2D = "d2t", "t2d"
"""EAGLE-3: offsets from draft token ids to the target's ids, and a mask of the target's ids that
have one."""
_EAGLE_MODULES = {name.removeprefix(_EAGLE_PREFIX): place for name, place in HUB_NAMES.items()} | {
    "fc": "join"
}
_EAGLE_NAMES = NameMap(_EAGLE_MODULES)
_EAGLE_LAYER, _EAGLE3_LAYER = "layers.{}.", "midlayer."
"""Name of EAGLE-3's block in published checkpoints."""
_EAGLE3_NAMES = NameMap(
    _EAGLE_MODULES
    | {"layers.{}.hidden_norm": "layers.{}.state_norm"}
    | {
        name.replace(_EAGLE_LAYER, _EAGLE3_LAYER): place.format(0)
        for name, place in (
            _EAGLE_MODULES | {"layers.{}.hidden_norm": "layers.{}.state_norm"}
        ).items()
        if name.startswith(_EAGLE_LAYER)
    }
)


def load_eagle(
    model_config: ModelConfig,
    model: Model,
    build: Build,
    page_size: int,
    load_format: str = "auto",
    served_length: int = 0,
    is_mapped: bool = True,
) -> EagleLM | Eagle3LM:
    """The EAGLE or EAGLE-3 model at `model_config.path` for `model`; arguments as `load_model`.

    Raises:
        ModelError: weights are missing or unknown.
    """
    assert isinstance(model, DecoderLM)
    family = FAMILIES.load(model_config.architecture)
    is_dummy = load_format == "dummy"
    types = {} if is_dummy else tensor_types(model_config)
    has_bias = is_dummy or bool({"fc.bias", "model.fc.bias"} & types.keys())
    has_head = is_dummy or bool({"lm_head.weight", "model.lm_head.weight"} & types.keys())
    parts = (model_config, family, build, page_size, has_bias)
    eagle: EagleLM | Eagle3LM
    is_third = model_config.draft_fields is not None and bool(model_config.draft_fields.aux_layers)
    if is_third:
        eagle = Eagle3LM(*parts, has_head, served_length)
    else:
        eagle = EagleLM(*parts, served_length)
    if is_dummy:
        fill_dummy(eagle, build, 1)
    else:
        try:
            tensors = tensors_of(model_config, is_mapped, ops=build.ops)
            _fill_eagle(eagle, tensors, has_head, build.device)
        except ModelError as error:
            name = "EAGLE3" if is_third else "EAGLE"
            raise ModelError(
                f"the model that drafts is none of {name}'s: {error.text}",
                hint=f"name one that was trained with {name} for the served model, or use "
                "--speculative-algorithm STANDALONE with a plain model",
            ) from None
    eagle.share_embeddings(model)
    return eagle.eval()


def _fill_eagle(
    eagle: EagleLM | Eagle3LM,
    tensors: Iterator[tuple[str, Stored]],
    has_head: bool,
    device: torch.device,
) -> None:
    if isinstance(eagle, EagleLM):
        Filling(eagle, _EAGLE_NAMES).run(_own_tensors(tensors, (_EMBEDDING, _HEAD), {}))
        return
    maps: dict[str, Stored] = {}
    Filling(eagle, _EAGLE3_NAMES).run(_own_tensors(tensors, (_EMBEDDING,), maps))
    known, all_tokens = eagle.facts.num_tokens, eagle.model_config.vocab_size
    if _D2T in maps:
        eagle.vocabulary_ids = _token_ids(maps[_D2T], known, all_tokens).to(device)
    if not has_head and (known < all_tokens or _D2T in maps):
        raise ModelError(f"it has no lm_head for its {known:,} of {all_tokens:,} tokens")
    if known < all_tokens and _D2T not in maps:
        raise ModelError(
            f"it knows {known:,} of {all_tokens:,} tokens (draft_vocab_size) and lacks {_D2T}, "
            "which says what they are"
        )


def restrict_head(
    eagle: EagleLM,
    served: ModelConfig,
    tokens: Sequence[int],
    build: Build,
    load_format: str = "auto",
    is_mapped: bool = True,
    transforms: Sequence[Transform] = (),
) -> None:
    """Let an EAGLE model draft only some tokens, with their rows of the target model's head.

    Args:
        served: config of the target model; other arguments as `load_model`, for the target model.

    Raises:
        ModelError: its checkpoint has no head.
    """
    ids = torch.tensor(tokens)
    if load_format == "dummy":
        values = torch.empty(len(ids), served.hidden_size).normal_(0, 0.02, generator=_generator())
        eagle.restrict_vocabulary(ids.to(build.device), StoredWeight.from_tensor(values), build)
        return
    modules = FAMILIES.load(served.architecture).names[served.format].modules
    place = "embedding" if served.tie_embeddings else "head"
    names = [f"{name}.weight" for name, its in modules.items() if its == place]
    for beginning in names:
        for name, tensor in tensors_of(served, is_mapped, transforms, beginning):
            if name == beginning and isinstance(tensor, StoredWeight):
                eagle.restrict_vocabulary(ids.to(build.device), tensor.rows(ids), build)
                return
    raise ModelError(f"the checkpoint of the served model has none of {', '.join(names)}")


def _generator() -> torch.Generator:
    complete_torch()  # which random generators need
    return torch.Generator().manual_seed(1)


def _own_tensors(
    tensors: Iterator[tuple[str, Stored]], copies: tuple[str, ...], maps: dict[str, Stored]
) -> Iterator[tuple[str, Stored]]:
    """Tensors without copies of the target model's; vocabulary maps go to `maps`."""
    for name, tensor in tensors:
        name = name.removeprefix(_EAGLE_PREFIX)
        if name in (_D2T, _T2D):
            maps[name] = tensor
        elif not name.startswith(copies):
            yield name, tensor


def _token_ids(offsets: Stored, known: int, all_tokens: int) -> Tensor:
    """[known] int64, unique ids in the target model's vocabulary."""
    if not isinstance(offsets, RawTensor) or offsets.shape != (known,):
        raise ModelError(
            f"{_D2T} must hold {known:,} whole numbers (draft_vocab_size), it has shape "
            f"{list(offsets.shape)}"
        )
    ids = offsets.values.to(torch.int64) + torch.arange(known)
    wrong = ids[(ids < 0) | (ids >= all_tokens)]
    if len(wrong) or len(ids.unique()) < known:
        why = f"names token {int(wrong[0]):,} of" if len(wrong) else "names a token twice, of"
        raise ModelError(f"{_D2T} {why} {all_tokens:,} tokens")
    return ids


_MTP_COPIES = (
    "embed_tokens.",
    "shared_head.head.",
    "nextn.embed_tokens.",
    "nextn.shared_head_head.",
)
"""Copies of the model's embedding and head in some checkpoints."""


def load_mtp_layer(
    model_config: ModelConfig,
    model: Model,
    build: Build,
    page_size: int,
    load_format: str = "auto",
    served_length: int = 0,
    is_mapped: bool = True,
    transforms: Sequence[Transform] = (),
) -> MTPModel:
    """The first MTP layer of the checkpoint of `model`; arguments as `load_model`.

    Raises:
        ModelError: the checkpoint has no such layer, or lacks some of its weights.
    """
    family = FAMILIES.load(model_config.architecture)
    assert family.mtp is not None and model_config.num_mtp_layers and isinstance(model, DecoderLM)
    beginning, names = family.mtp.names[model_config.format]
    beginning = beginning.format(model_config.num_layers)
    name = beginning.rstrip(".").rpartition(".")[2]
    name = name if name.isdecimal() else "0"  # stored outside the model's layers
    mtp = MTPModel(model_config, family, name, build, page_size, served_length)
    if load_format == "dummy":
        fill_dummy(mtp, build, 1)
    else:
        tensors = tensors_of(model_config, is_mapped, transforms, beginning, build.ops)
        try:
            Filling(mtp, names).run(_without_copies(tensors, beginning))
        except ModelError as error:
            raise ModelError(
                f"the layer that drafts ({printable(beginning)}*): {error.text}",
                hint="download the whole checkpoint again, or serve it without "
                "--speculative-algorithm",
            ) from None
    mtp.share_embeddings(model)
    return mtp.eval()


def _without_copies(
    tensors: Iterator[tuple[str, Stored]], beginning: str
) -> Iterator[tuple[str, Stored]]:
    for name, tensor in tensors:
        if not name.removeprefix(beginning).startswith(_MTP_COPIES):
            yield name, tensor


_DFLASH_PREFIX = "model."
_DFLASH_BORROWED = ("embed_tokens.", "lm_head.")
"""Copies of the target model's weights in some checkpoints."""


def load_dflash(
    model_config: ModelConfig,
    model: Model,
    build: Build,
    load_format: str = "auto",
    served_length: int = 0,
    is_mapped: bool = True,
) -> DFlashLM:
    """The DFlash model at `model_config.path` for `model`; arguments as `load_model`.

    Raises:
        ModelError: weights are missing or unknown.
    """
    assert isinstance(model, DecoderLM)
    family = FAMILIES.load(model_config.architecture)
    blocks = DFlashLM(model_config, family, build, served_length)
    if load_format == "dummy":
        fill_dummy(blocks, build, 1)
    else:
        own = {
            name.removeprefix(_DFLASH_PREFIX): place
            for name, place in family.names[model_config.format].modules.items()
        }
        names = NameMap(own | {"fc": "join", "hidden_norm": "state_norm"})
        tensors = (
            (name.removeprefix(_DFLASH_PREFIX), tensor)
            for name, tensor in tensors_of(model_config, is_mapped, ops=build.ops)
            if not name.removeprefix(_DFLASH_PREFIX).startswith(_DFLASH_BORROWED)
        )
        try:
            Filling(blocks, names).run(tensors)
        except ModelError as error:
            raise ModelError(
                f"the model that drafts is none of DFlash's: {error.text}",
                hint="name one that was trained with DFlash for the served model, or use "
                "--speculative-algorithm NGRAM",
            ) from None
    blocks.share_embeddings(model)
    return blocks.eval()
