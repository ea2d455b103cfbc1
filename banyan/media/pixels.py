"""Files of pictures → RGB pixels → rows of patches. Only worker processes (worker.py) decode.

A file is a stranger's. Its header is checked before a pixel is decoded, a truncated file is
refused, and of an animation the first frame is taken.
"""

import hashlib
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from banyan.base.errors import RequestError
from banyan.media.parts import MAX_PATH_CHARS
from banyan.media.rules import MERGE_ORDER, Layout, Settings, View

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF")
"""Pillow's names of the formats that are read."""
MAX_SIDE = 65_535
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""
_WIDE_GREY = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_WHITE = (255, 255, 255, 255)
_RESAMPLE = {"idefics3": 1, "llama4": 2}
"""Rule -> Pillow's number of its filter, where a checkpoint has none; others are bicubic."""


class BadPicture(Exception):
    """The file is no picture that can be read; the text says why."""


def open_picture(data: bytes, max_pixels: int) -> Image.Image:
    """The picture of a file, not decoded yet.

    Raises:
        BadPicture: another format, a broken header, or more than `max_pixels`.
    """
    Image.init()  # loads the readers, once
    Image.MAX_IMAGE_PIXELS = None  # checked here, with the server's own bound
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadPicture(
            f"the {len(data):,} bytes are no picture; PNG, JPEG, GIF, WebP, BMP, TIFF and AVIF are "
            "read"
        ) from None
    except Exception as error:  # any error of a parser is the answer
        raise BadPicture(f"its header cannot be read: {_reason(error)}") from None
    width, height = picture.size
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise BadPicture(f"it has {width:,} x {height:,} pixels; a side has 1 to {MAX_SIDE:,}")
    if width * height > max_pixels:
        raise BadPicture(
            f"it has {width:,} x {height:,} pixels, limit {max_pixels / 1e6:g} million"
        )
    return picture


def size_of(picture: Image.Image) -> tuple[int, int]:
    """Width and height as it is shown: after the rotation that its EXIF data asks for.

    Of a PNG file only EXIF data before its pixels counts: reading on would decode them.
    """
    width, height = picture.size
    if picture.format == "PNG" and "exif" not in picture.info:
        return width, height
    return (height, width) if _orientation(picture) in _TURNED else (width, height)


def _orientation(picture: Image.Image) -> int:
    try:
        found = picture.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # broken EXIF data: the picture is shown as it is stored
        return 1
    return found if isinstance(found, int) else 1


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(picture: Image.Image) -> Image.Image:
    """RGB pixels: rotated by EXIF, transparency on white, 16 bits scaled to 8.

    Raises:
        BadPicture: the file is truncated or broken.
    """
    try:
        picture.load()
        turn = _TURNS.get(_orientation(picture))
        found = _rgb(picture)
    except MemoryError:
        raise
    except Exception as error:  # any error of a decoder is the answer
        raise BadPicture(f"it cannot be decoded: {_reason(error)}") from None
    return found if turn is None else found.transpose(turn)


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode in _WIDE_GREY:
        values = np.asarray(picture).astype(np.int64).clip(0, 65535)
        return Image.fromarray((values // 257).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise BadPicture("its pixels are floating-point numbers, which have no range")
    if picture.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        coloured = picture.convert("RGBA")
        white = Image.new("RGBA", coloured.size, _WHITE)
        return Image.alpha_composite(white, coloured).convert("RGB")
    return picture.convert("RGB")


def digest_of(picture: Image.Image, rule: str, settings: Settings) -> bytes:
    """SHA-256 of the pixels, their size, and how they become patches."""
    found = hashlib.sha256()
    words = [rule, *(f"{name}={settings[name]!r}" for name in sorted(settings))]
    found.update("\0".join([*words, "image", *map(str, picture.size), ""]).encode())
    found.update(np.asarray(picture).tobytes())
    return found.digest()


def patches_of(picture: Image.Image, rule: str, layout: Layout, settings: Settings) -> np.ndarray:
    """uint8 [patches, 3 x temporal x patch x patch]: all tiles, patch by patch."""
    patch = settings["patch"]
    resample = settings.get("resample", _RESAMPLE.get(rule, Image.Resampling.BICUBIC.value))
    assert isinstance(patch, int) and isinstance(resample, int)
    merge = settings["merge"] if rule in MERGE_ORDER else 1
    frames = settings.get("temporal", 1)
    assert isinstance(merge, int) and isinstance(frames, int)
    parts = [
        _cut(tile, patch, merge, frames)
        for view in layout.views
        for tile in _tiles(_canvas(picture, view, resample), view)
    ]
    return np.concatenate(parts)


def _canvas(picture: Image.Image, view: View, resample: int) -> np.ndarray:
    """uint8 [height, width, 3]"""
    for size in view.resizes:
        picture = picture.resize(size, Image.Resampling(resample))
    if view.at != (0, 0) or picture.size != view.size:
        canvas = Image.new("RGB", view.size)
        canvas.paste(picture, view.at)
        picture = canvas
    return np.asarray(picture)


def _tiles(canvas: np.ndarray, view: View) -> Sequence[np.ndarray]:
    width, height = view.tile
    return [
        canvas[y : y + height, x : x + width]
        for y in range(0, view.size[1], height)
        for x in range(0, view.size[0], width)
    ]


def _cut(tile: np.ndarray, patch: int, merge: int, frames: int) -> np.ndarray:
    """Rows [channel, frame, y, x] of the patches, merge x merge neighbours together."""
    rows, columns = tile.shape[0] // patch, tile.shape[1] // patch
    tile = tile[: rows * patch, : columns * patch]
    split = tile.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    ordered = split.transpose(0, 3, 1, 4, 6, 2, 5)
    repeated = np.broadcast_to(
        ordered[:, :, :, :, :, None], (*ordered.shape[:5], frames, patch, patch)
    )
    return repeated.reshape(rows * columns, 3 * frames * patch * patch)


def own_picture(value: object) -> object:
    """`image_data` of the program itself, each picture in a form of /generate.

    PIL images and arrays become PNG files, and paths become absolute; URLs and base64 stay.

    Raises:
        RequestError: an array is not uint8 [height, width, 3].
    """
    if isinstance(value, (list, tuple)):
        return [own_picture(one) for one in value]
    if isinstance(value, Mapping):
        return {**value, **{n: own_picture(value[n]) for n in ("url", "image") if n in value}}
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
            raise RequestError(
                f"an array must be uint8 [height, width, 3], got {value.dtype} {value.shape}",
                param="image_data",
            )
        return _png(Image.fromarray(value))
    if isinstance(value, Image.Image):
        return _png(value)
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, str) and len(value) < MAX_PATH_CHARS and os.path.isfile(value):
        return os.path.abspath(value)
    return value


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _reason(error: BaseException) -> str:
    """One line of at most 200 characters."""
    return " ".join((str(error) or type(error).__name__).split())[:200]
