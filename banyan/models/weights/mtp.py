"""Fills the layer of a checkpoint that drafts for the rest of it."""

from collections.abc import Iterator, Sequence

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.families import FAMILIES
from banyan.layers.build import Build
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import Model
from banyan.models.decoder import DecoderLM
from banyan.models.mtp import MTPModel
from banyan.models.weights.custom import Transform
from banyan.models.weights.loader import Filling, fill_dummy, tensors_of
from banyan.models.weights.quant.base import Stored

_COPIES = ("embed_tokens.", "shared_head.head.", "nextn.embed_tokens.", "nextn.shared_head_head.")
"""Of the model's embedding and head, which some checkpoints hold once more."""


def load_ahead(
    model_config: ModelConfig,
    model: Model,
    build: Build,
    page_size: int,
    load_format: str = "auto",
    served_length: int = 0,
    is_mapped: bool = True,
    transforms: Sequence[Transform] = (),
) -> MTPModel:
    """The first layer of the checkpoint of `model` that is for drafting; arguments as `load_model`.

    Raises:
        ModelError: the checkpoint has no such layer, or lacks some of its weights.
    """
    family = FAMILIES.load(model_config.architecture)
    assert family.ahead is not None and model_config.num_ahead and isinstance(model, DecoderLM)
    beginning, names = family.ahead.names[model_config.format]
    beginning = beginning.format(model_config.num_layers)
    name = beginning.rstrip(".").rpartition(".")[2]
    name = name if name.isdecimal() else "0"  # they lie beside the model's
    ahead = MTPModel(model_config, family, name, build, page_size, served_length)
    if load_format == "dummy":
        fill_dummy(ahead, build, 1)
    else:
        tensors = tensors_of(model_config, is_mapped, transforms, beginning, build.ops)
        try:
            Filling(ahead, names).run(_of_the_layer(tensors, beginning))
        except ModelError as error:
            raise ModelError(
                f"the layer that drafts ({printable(beginning)}*): {error.text}",
                hint="download the whole checkpoint again, or serve it without "
                "--speculative-algorithm",
            ) from None
    ahead.borrow(model)
    return ahead.eval()


def _of_the_layer(
    tensors: Iterator[tuple[str, Stored]], beginning: str
) -> Iterator[tuple[str, Stored]]:
    for name, tensor in tensors:
        if not name.removeprefix(beginning).startswith(_COPIES):
            yield name, tensor
