"""Fills a model that drafts a block at once for another one."""

from banyan.base.errors import ModelError
from banyan.families import FAMILIES
from banyan.families.names import NameMap
from banyan.layers.build import Build
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import Model
from banyan.models.decoder import DecoderLM
from banyan.models.dflash import BlockLM
from banyan.models.weights.loader import Filling, fill_dummy, tensors_of

_PREFIX = "model."
_BORROWED = ("embed_tokens.", "lm_head.")
"""Of the other model, which some checkpoints hold once more."""


def load_dflash(
    model_config: ModelConfig,
    model: Model,
    build: Build,
    load_format: str = "auto",
    served_length: int = 0,
    is_mapped: bool = True,
) -> BlockLM:
    """The draft model at `model_config.path`, for `model`; arguments as `load_model`.

    Raises:
        ModelError: it lacks weights, or has others.
    """
    assert isinstance(model, DecoderLM)
    family = FAMILIES.load(model_config.architecture)
    blocks = BlockLM(model_config, family, build, served_length)
    if load_format == "dummy":
        fill_dummy(blocks, build, 1)
    else:
        own = {
            name.removeprefix(_PREFIX): place
            for name, place in family.names[model_config.format].modules.items()
        }
        names = NameMap(own | {"fc": "join", "hidden_norm": "state_norm"})
        tensors = (
            (name.removeprefix(_PREFIX), tensor)
            for name, tensor in tensors_of(model_config, is_mapped, ops=build.ops)
            if not name.removeprefix(_PREFIX).startswith(_BORROWED)
        )
        try:
            Filling(blocks, names).run(tensors)
        except ModelError as error:
            raise ModelError(
                f"the model that drafts is none of DFlash's: {error.text}",
                hint="name one that was trained with DFlash for the served model, or use "
                "--speculative-algorithm NGRAM",
            ) from None
    blocks.borrow(model)
    return blocks.eval()
