"""What clients give in place of pictures: feature rows, or the output of transformers' processor.

Both come as objects in `image_data`, with the members that SGLang's clients send.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

from banyan.base.errors import RequestError
from banyan.media.preparation import PreparedItem, owned
from banyan.media.rules import MERGE_ORDER
from banyan.messages.spans import Content, ContentKind
from banyan.model_config.media import MediaConfig, TowerConfig

FORMATS = ("precomputed_embedding", "processor_output")
"""`format` of such an object."""
_MOST_ROUNDING = 0.02
"""Of a pixel, in the arithmetic of a processor."""
_MOST_PATCHES = 1 << 20


def given_item(
    value: Mapping[str, object], param: str, model: MediaConfig, tenant: bytes
) -> PreparedItem:
    """What a client gives in place of a picture: its feature rows, or the output of transformers'
    processor.

    Args:
        value: of "precomputed_embedding" `feature` [rows, width], of "processor_output"
            `pixel_values` [patches, values]; both with `image_grid_thw` in patches, which the
            former needs only where positions have axes.

    Raises:
        RequestError: names what does not fit.
    """
    tower = model.tower
    assert tower is not None, "a model without a tower takes no pictures"
    if value["format"] == FORMATS[0]:
        content, shape = _given_features(value, param, tower, bool(model.axes))
    elif value["format"] == FORMATS[1] and model.rule in MERGE_ORDER:
        content, shape = _given_patches(value, param, tower)
    else:
        raise RequestError(
            f"{param}: format {str(value['format'])[:40]!r} is not taken for this model",
            param="image_data",
            code="not_available",
            hint="Send the picture itself",
        )
    first, rows, placeholder = len(model.begin), content.rows, model.image_token
    assert placeholder is not None, "a model without a tower takes no pictures"
    ids = (*model.begin, *[placeholder] * rows, *model.end)
    item = PreparedItem(content, placeholder, ids, ((first, rows, 0),), shape, model.is_mutual)
    return owned(item, tenant) if tenant else item


def _given_features(
    value: Mapping[str, object], param: str, tower: TowerConfig, has_axes: bool
) -> tuple[Content, tuple[int, int, int]]:
    rows = _numbers(value, "feature", param)
    merge = tower.merge
    widths = sorted({tower.out, tower.feature_width})
    if rows.shape[1] not in widths:
        raise _misfit(f"{param}: feature rows of {rows.shape[1]} numbers, not {widths}")
    shape = (1, 1, len(rows))
    if has_axes:
        grid = _grid(value, param, merge)
        shape = grid[0], grid[1] // merge, grid[2] // merge
        if len(rows) != math.prod(shape):
            raise _misfit(f"{param}: {len(rows)} feature rows are not a grid of {list(grid)}")
    data = rows.tobytes()
    digest = hashlib.sha256(repr((ContentKind.FEATURES, shape)).encode() + data).digest()
    return Content(digest, ContentKind.FEATURES, data, (1, 1, len(rows)), len(rows)), shape


def _given_patches(
    value: Mapping[str, object], param: str, tower: TowerConfig
) -> tuple[Content, tuple[int, int, int]]:
    """The bytes of the pixels that were normalised; the tower normalises them again."""
    merge = tower.merge
    pixels, grid = _numbers(value, "pixel_values", param), _grid(value, param, merge)
    each = tower.temporal_patch * tower.patch**2
    if pixels.shape != (math.prod(grid), tower.channels * each):
        wanted = [math.prod(grid), tower.channels * each]
        raise _misfit(f"{param}: pixel_values of shape {list(pixels.shape)}, not {wanted}")
    mean, std = (np.asarray(n, np.float32).repeat(each) for n in (tower.mean, tower.std))
    exact = (pixels * std + mean) * 255
    whole = exact.round()
    if whole.min() < 0 or whole.max() > 255 or np.abs(exact - whole).max() > _MOST_ROUNDING:
        raise _misfit(f"{param}: pixel_values are not 8-bit pixels as this model normalises them")
    data = whole.astype(np.uint8).tobytes()
    named = repr((ContentKind.PATCHES, grid)).encode()
    rows = math.prod(grid) // merge**2
    content = Content(hashlib.sha256(named + data).digest(), ContentKind.PATCHES, data, grid, rows)
    return content, (grid[0], grid[1] // merge, grid[2] // merge)


def _numbers(value: Mapping[str, object], name: str, param: str) -> np.ndarray:
    """Finite float32 [rows, width]."""
    try:
        found = np.asarray(value.get(name))
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.ndim == 3 and len(found) == 1:
        found = found[0]
    if found.dtype.kind not in "fiu" or found.ndim != 2 or not found.size:
        raise _misfit(f"{param}: {name} must be rows of numbers, each as long as the others")
    with np.errstate(over="ignore"):  # what is too large is refused below
        found = np.ascontiguousarray(found, np.float32)
    if not np.isfinite(found).all():
        raise _misfit(f"{param}: {name} has numbers that are not finite")
    return found


def _grid(value: Mapping[str, object], param: str, merge: int) -> tuple[int, int, int]:
    try:
        found = np.asarray(value.get("image_grid_thw")).reshape(-1)
    except (TypeError, ValueError):
        found = np.zeros(0)
    sides = [int(side) for side in found[:4]] if found.dtype.kind in "iu" else []
    is_right = len(sides) == 3 and all(1 <= side <= _MOST_PATCHES for side in sides)
    if not is_right or sides[1] % merge or sides[2] % merge:
        raise _misfit(f"{param}: image_grid_thw must be [t, h, w], h and w multiples of {merge}")
    return sides[0], sides[1], sides[2]


def _misfit(text: str) -> RequestError:
    return RequestError(text, param="image_data", code="invalid_image")


def folded(ids: list[int], items: Sequence[PreparedItem]) -> list[int]:
    """A prompt in which a processor has written the placeholder for each feature row, with one
    placeholder for each item; any other prompt as it is."""
    sizes = [sum(count for _, count, _ in item.runs) for item in items]
    placeholder = items[0].placeholder
    if any(item.placeholder != placeholder for item in items) or sum(
        id == placeholder for id in ids
    ) != sum(sizes):
        return ids
    found: list[int] = []
    skipped, rest = 0, iter(sizes)
    for id in ids:
        if skipped and id != placeholder:
            return ids
        if not skipped:
            found.append(id)
            skipped = next(rest) if id == placeholder else 0
        skipped = max(0, skipped - 1)
    return found
