"""Fills a model that was trained to draft for another one."""

from collections.abc import Iterator

from banyan.base.errors import ModelError
from banyan.config.card import ModelCard
from banyan.families import FAMILIES
from banyan.families.names import HUB_NAMES, NameMap
from banyan.layers.build import Build
from banyan.models.base import Model
from banyan.models.decoder import DecoderLM
from banyan.models.eagle import EagleLM
from banyan.models.weights.loader import Filling, fill_dummy, tensors_of
from banyan.models.weights.quant.base import Stored
from banyan.models.weights.reader import tensor_types

_PREFIX = "model."
_COPIES = ("embed_tokens.", "lm_head.")
"""Of the other model's embedding and head."""
_NAMES = NameMap(
    {name.removeprefix(_PREFIX): place for name, place in HUB_NAMES.items()} | {"fc": "join"}
)


def load_eagle(
    card: ModelCard,
    model: Model,
    build: Build,
    page_size: int,
    load_format: str = "auto",
    served_length: int = 0,
    is_mapped: bool = True,
) -> EagleLM:
    """The draft model at `card.path`, for `model`; arguments as `load_model`.

    Raises:
        ModelError: it lacks weights, or has others.
    """
    assert isinstance(model, DecoderLM)
    family = FAMILIES.load(card.architecture)
    is_dummy = load_format == "dummy"
    has_bias = is_dummy or bool({"fc.bias", "model.fc.bias"} & tensor_types(card).keys())
    eagle = EagleLM(card, family, build, page_size, has_bias, served_length)
    if is_dummy:
        fill_dummy(eagle, build, 1)
    else:
        try:
            Filling(eagle, _NAMES).run(_own(tensors_of(card, is_mapped)))
        except ModelError as error:
            raise ModelError(
                f"the model that drafts is none of EAGLE's: {error.text}",
                hint="name one that was trained with EAGLE for the served model, or use "
                "--speculative-algorithm STANDALONE with a plain model",
            ) from None
    eagle.borrow(model)
    return eagle.eval()


def _own(tensors: Iterator[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    for name, tensor in tensors:
        name = name.removeprefix(_PREFIX)
        if not name.startswith(_COPIES):
            yield name, tensor
