"""Fills a model that was trained to draft for another one."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.families import FAMILIES
from banyan.families.names import HUB_NAMES, NameMap
from banyan.layers.build import Build
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import Model
from banyan.models.decoder import DecoderLM
from banyan.models.eagle import Eagle3LM, EagleLM
from banyan.models.weights.custom import Transform
from banyan.models.weights.loader import Filling, fill_dummy, tensors_of
from banyan.models.weights.quant.base import Stored
from banyan.models.weights.reader import tensor_types
from banyan.ops.stored import RawTensor, StoredWeight

_PREFIX = "model."
_EMBEDDING, _HEAD = "embed_tokens.", "lm_head."
"""Of the other model; EAGLE-3 has a head of its own."""
_OFFSETS, _MASK = "d2t", "t2d"
"""EAGLE-3: what is added to each id of its own to have the other model's, and which ids of that
these are."""
_WHOLE = {name.removeprefix(_PREFIX): place for name, place in HUB_NAMES.items()} | {"fc": "join"}
_NAMES = NameMap(_WHOLE)
_FIRST, _ONLY = "layers.{}.", "midlayer."
"""How EAGLE-3's authors call its block."""
_NAMES_OF_3 = NameMap(
    _WHOLE
    | {"layers.{}.hidden_norm": "layers.{}.state_norm"}
    | {
        name.replace(_FIRST, _ONLY): place.format(0)
        for name, place in (_WHOLE | {"layers.{}.hidden_norm": "layers.{}.state_norm"}).items()
        if name.startswith(_FIRST)
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
    """The draft model at `model_config.path`, for `model`; arguments as `load_model`.

    Raises:
        ModelError: it lacks weights, or has others.
    """
    assert isinstance(model, DecoderLM)
    family = FAMILIES.load(model_config.architecture)
    is_dummy = load_format == "dummy"
    types = {} if is_dummy else tensor_types(model_config)
    has_bias = is_dummy or bool({"fc.bias", "model.fc.bias"} & types.keys())
    has_head = is_dummy or bool({"lm_head.weight", "model.lm_head.weight"} & types.keys())
    parts = (model_config, family, build, page_size, has_bias)
    eagle: EagleLM | Eagle3LM
    is_third = model_config.eagle is not None and bool(model_config.eagle.taps)
    if is_third:
        eagle = Eagle3LM(*parts, has_head, served_length)
    else:
        eagle = EagleLM(*parts, served_length)
    if is_dummy:
        fill_dummy(eagle, build, 1)
    else:
        try:
            tensors = tensors_of(model_config, is_mapped, ops=build.ops)
            _fill(eagle, tensors, has_head, build.device)
        except ModelError as error:
            name = "EAGLE3" if is_third else "EAGLE"
            raise ModelError(
                f"the model that drafts is none of {name}'s: {error.text}",
                hint=f"name one that was trained with {name} for the served model, or use "
                "--speculative-algorithm STANDALONE with a plain model",
            ) from None
    eagle.borrow(model)
    return eagle.eval()


def _fill(
    eagle: EagleLM | Eagle3LM,
    tensors: Iterator[tuple[str, Stored]],
    has_head: bool,
    device: torch.device,
) -> None:
    if isinstance(eagle, EagleLM):
        Filling(eagle, _NAMES).run(_own(tensors, (_EMBEDDING, _HEAD), {}))
        return
    maps: dict[str, Stored] = {}
    Filling(eagle, _NAMES_OF_3).run(_own(tensors, (_EMBEDDING,), maps))
    known, all_tokens = eagle.facts.num_tokens, eagle.model_config.vocab_size
    if _OFFSETS in maps:
        eagle.known = _ids(maps[_OFFSETS], known, all_tokens).to(device)
    if not has_head and (known < all_tokens or _OFFSETS in maps):
        raise ModelError(f"it has no lm_head for its {known:,} of {all_tokens:,} tokens")
    if known < all_tokens and _OFFSETS not in maps:
        raise ModelError(
            f"it knows {known:,} of {all_tokens:,} tokens (draft_vocab_size) and lacks {_OFFSETS}, "
            "which says what they are"
        )


def narrow_the_head(
    eagle: EagleLM,
    served: ModelConfig,
    tokens: Sequence[int],
    build: Build,
    load_format: str = "auto",
    is_mapped: bool = True,
    transforms: Sequence[Transform] = (),
) -> None:
    """Let it draft some tokens only, by their rows of the head of the model that it drafts for.

    Args:
        served: card of that model; the rest as `load_model`, of that model.

    Raises:
        ModelError: its checkpoint lacks them.
    """
    ids = torch.tensor(tokens)
    if load_format == "dummy":
        values = torch.empty(len(ids), served.hidden_size).normal_(0, 0.02, generator=_dice())
        eagle.know(ids.to(build.device), StoredWeight.from_tensor(values), build)
        return
    modules = FAMILIES.load(served.architecture).names[served.format].modules
    place = "embedding" if served.tie_embeddings else "head"
    names = [f"{name}.weight" for name, its in modules.items() if its == place]
    for beginning in names:
        for name, tensor in tensors_of(served, is_mapped, transforms, beginning):
            if name == beginning and isinstance(tensor, StoredWeight):
                eagle.know(ids.to(build.device), tensor.rows(ids), build)
                return
    raise ModelError(f"the checkpoint of the served model has none of {', '.join(names)}")


def _dice() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _own(
    tensors: Iterator[tuple[str, Stored]], copies: tuple[str, ...], maps: dict[str, Stored]
) -> Iterator[tuple[str, Stored]]:
    """Without copies of the other model's; maps between the vocabularies go to `maps`."""
    for name, tensor in tensors:
        name = name.removeprefix(_PREFIX)
        if name in (_OFFSETS, _MASK):
            maps[name] = tensor
        elif not name.startswith(copies):
            yield name, tensor


def _ids(offsets: Stored, known: int, all_tokens: int) -> Tensor:
    """[known] int64, ids in the other model's vocabulary, each once."""
    if not isinstance(offsets, RawTensor) or offsets.shape != (known,):
        raise ModelError(
            f"{_OFFSETS} must hold {known:,} whole numbers (draft_vocab_size), it has shape "
            f"{list(offsets.shape)}"
        )
    ids = offsets.values.to(torch.int64) + torch.arange(known)
    wrong = ids[(ids < 0) | (ids >= all_tokens)]
    if len(wrong) or len(ids.unique()) < known:
        why = f"names token {int(wrong[0]):,} of" if len(wrong) else "names a token twice, of"
        raise ModelError(f"{_OFFSETS} {why} {all_tokens:,} tokens")
    return ids
