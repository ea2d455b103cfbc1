"""Which tensors of a checkpoint are matrices of projections: what is rounded, on the disk or while
it is loaded. All else stays as it is: embeddings, heads, norms, routers, convolutions, gates of one
number, and the indexer of sparse attention."""

import re

from banyan.families.names import NameMap
from banyan.models.weights.names import place_of

_ROUNDED = re.compile(
    r"layers\.(\d+)\.(attention\.(qkv|query|out|squeeze|latent|expansion|mix)"
    r"|mlp\.(experts\.|shared\.)?(gate_up|up|down))"
)


def is_projection(name: str, shape: tuple[int, ...], names: NameMap, num_layers: int) -> bool:
    """
    Args:
        num_layers: of the model that answers; layers behind them are for drafts, and stay too.
    """
    if not name.endswith(".weight") or len(shape) < 2:
        return False
    place = place_of(name, names) or place_of(f"model.{name}", names)
    if place is None or place.slot != "weight":
        return False
    found = _ROUNDED.fullmatch(place.module)
    return found is not None and int(found[1]) < num_layers
