"""Resolution rules: the size of a picture → how it is resized, cut into tiles and counted.

A rule is a pure function of width, height and the settings of the model's processor. It does not
see pixels, so the number of prompt tokens is known from the header of a file. `pixels.py` follows
the layout. The rules give the pixels and token ids of transformers' processors (Pillow).

Each family names one rule in `MediaConfig.rule`. What a rule reads of `MediaConfig.settings` is
written in its docstring.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from banyan.base.errors import RequestError

Settings = Mapping[str, object]
Size = tuple[int, int]
"""Width and height."""

MAX_ASPECT = 200
"""A picture that is longer than this times its other side is refused."""
MAX_TILES = 256
_LOW_PIXELS = 512 * 512
"""Budget of `detail: low` where a rule counts pixels."""
_LOW_EDGE = 512
_MAX_EDGE = 4096
"""Longest edge in the Idefics 3 rule before tiles are cut."""


@dataclass(frozen=True)
class View:
    """The picture on a canvas, which is cut into equal tiles, row by row.

    Attributes:
        resizes: the picture is resized to each of these in turn.
        size: of the canvas; black where the picture does not cover it.
        at: of the picture's left upper corner on the canvas; negative = cropped.
        tile: size of one tile.
    """

    resizes: tuple[Size, ...]
    size: Size
    tile: Size
    at: Size = (0, 0)


@dataclass(frozen=True)
class Layout:
    """What becomes of one picture.

    Attributes:
        views: in the order of their tiles.
        grid: tiles (or frames), rows of patches, columns of patches.
        rows: feature rows that the tower computes from it.
        stretch: token ids in place of the placeholder: a number is a run of as many places that
            take the next feature rows, a slice is a run that takes these, a text is encoded by
            itself.
        shape: the merged grid for positions with axes; (1, 1, rows) where there are none.
    """

    views: tuple[View, ...]
    grid: tuple[int, int, int]
    rows: int
    stretch: tuple[int | slice | str, ...]
    shape: tuple[int, int, int]

    @property
    def num_places(self) -> int:
        """Places in the prompt that take feature rows."""
        return sum(count for _, count in self.runs)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(first feature row, count) of each run of places."""
        found: list[tuple[int, int]] = []
        end = 0
        for part in self.stretch:
            if isinstance(part, str):
                continue
            first, end = (part.start, part.stop) if isinstance(part, slice) else (end, end + part)
            found.append((first, end - first))
        return found


Rule = Callable[[int, int, Settings], Layout]


def layout_of(rule: str, width: int, height: int, settings: Settings) -> Layout:
    """The layout of a picture of this size.

    Raises:
        RequestError: the picture is too narrow for the rule.
    """
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise RequestError(
            f"a picture of {width} x {height} pixels is more than {MAX_ASPECT} times as long as it "
            "is wide",
            code="invalid_image",
            hint="Crop it, or pad its shorter side",
        )
    return RULES[rule](width, height, settings)


def with_options(rule: str, settings: Settings, options: Settings) -> Settings:
    """The settings of one part: `detail` and the limits that the part brings.

    Options that a rule does not read are in no part: `parts.py` reports them.
    """
    changed = dict(settings)
    if options.get("detail") == "low":
        low = LOW_DETAIL.get(rule)
        changed.update(low(settings) if low else {})
    changed.update({name: options[name] for name in OPTIONS.get(rule, ()) if name in options})
    if rule == "qwen":
        smallest = (_number(changed, "patch") * _number(changed, "merge")) ** 2
        most = max(_number(changed, "max_pixels"), smallest)
        changed["max_pixels"] = min(most, max(_number(settings, "max_pixels"), smallest))
        changed["min_pixels"] = min(_number(changed, "min_pixels"), most)
    return changed


def _qwen(width: int, height: int, settings: Settings) -> Layout:
    """Qwen-VL: sides are multiples of patch x merge, the area is between two bounds.

    Reads patch, merge, temporal, min_pixels, max_pixels.
    """
    patch, merge = _number(settings, "patch"), _number(settings, "merge")
    factor = patch * merge
    smallest, largest = _number(settings, "min_pixels"), _number(settings, "max_pixels")
    to_height, to_width = (round(side / factor) * factor for side in (height, width))
    if to_height * to_width > largest:
        beta = math.sqrt(height * width / largest)
        to_height = max(factor, math.floor(height / beta / factor) * factor)
        to_width = max(factor, math.floor(width / beta / factor) * factor)
    elif to_height * to_width < smallest:
        beta = math.sqrt(smallest / (height * width))
        to_height = math.ceil(height * beta / factor) * factor
        to_width = math.ceil(width * beta / factor) * factor
    to_height, to_width = max(to_height, factor), max(to_width, factor)
    rows, columns = to_height // patch, to_width // patch
    shape = (1, rows // merge, columns // merge)
    count = shape[1] * shape[2]
    return Layout((_whole(to_width, to_height),), (1, rows, columns), count, (count,), shape)


def _fixed(width: int, height: int, settings: Settings) -> Layout:
    """Gemma 3: every picture becomes one square.

    Reads height, width, patch, merge (patches per side of a feature row).
    """
    to_width, to_height = _number(settings, "width"), _number(settings, "height")
    return _one_square(_whole(to_width, to_height), settings)


def _cropped(width: int, height: int, settings: Settings) -> Layout:
    """LLaVA 1.5: the shorter side is resized, the middle is cut out.

    Reads shortest_edge, height and width (of the crop), patch, merge.
    """
    short = _number(settings, "shortest_edge")
    long = int(short * max(width, height) / min(width, height))
    to_width, to_height = (short, long) if width <= height else (long, short)
    size = _number(settings, "width"), _number(settings, "height")
    at = -((to_width - size[0]) // 2), -((to_height - size[1]) // 2)
    return _one_square(View(((to_width, to_height),), size, size, at), settings)


def _tiles(width: int, height: int, settings: Settings) -> Layout:
    """InternVL: tiles in the arrangement of the nearest aspect ratio, and the whole as a last tile.

    Reads tile, patch, merge, min_tiles, max_tiles.
    """
    tile = _number(settings, "tile")
    most = min(_number(settings, "max_tiles"), MAX_TILES)
    columns, rows = _arrangement(width, height, tile, _number(settings, "min_tiles"), most)
    square = (tile, tile)
    canvas = (columns * tile, rows * tile)
    views = [View((canvas,), canvas, square)]
    if columns * rows > 1:
        views.append(_whole(tile, tile))
    per_tile, side = _of_tile(settings, tile)
    num_tiles = columns * rows + (columns * rows > 1)
    count = num_tiles * per_tile
    return Layout(tuple(views), (num_tiles, side, side), count, (count,), (1, 1, count))


def _arrangement(width: int, height: int, tile: int, fewest: int, most: int) -> tuple[int, int]:
    """Columns and rows whose ratio is nearest to the picture's; of equals, more tiles as long as
    the picture covers half of them."""
    pairs = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= fewest
    ]
    best, least = (1, 1), math.inf
    for columns, rows in sorted(pairs, key=lambda pair: pair[0] * pair[1]):
        difference = abs(width / height - columns / rows)
        covers = width * height > 0.5 * tile * tile * columns * rows
        if difference < least or (difference == least and covers):
            best, least = (columns, rows), difference
    return best


def _idefics3(width: int, height: int, settings: Settings) -> Layout:
    """Idefics 3 and SmolVLM: resized to a longest edge, cut into tiles, and the whole at the end.

    Reads longest_edge, tile, patch, merge, splits (0 = no tiles), and the texts of its tokens:
    fake_token, global_token, row_column ("<row_{row}_col_{column}>").
    """
    tile = _number(settings, "tile")
    first = _below(_to_edge(width, height, _number(settings, "longest_edge")), _MAX_EDGE)
    per_tile, side = _of_tile(settings, tile)
    fake, whole = str(settings["fake_token"]), str(settings["global_token"])
    if not settings.get("splits", 1):
        view = View((first, (tile, tile)), (tile, tile), (tile, tile))
        stretch = (fake + whole, per_tile, fake)
        return Layout((view,), (1, side, side), per_tile, stretch, (1, 1, per_tile))
    canvas = _to_multiples(first[0], first[1], tile)
    columns, rows = canvas[0] // tile, canvas[1] // tile
    if columns == rows == 1:
        view = View((first, canvas), canvas, (tile, tile))
        stretch = (fake + whole, per_tile, fake)
        return Layout((view,), (1, side, side), per_tile, stretch, (1, 1, per_tile))
    parts: list[int | str] = []
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            name = str(settings["row_column"]).format(row=row, column=column)
            gap = "\n" if column == 1 and row > 1 else ""
            parts += [gap + fake + name, per_tile]
    parts += ["\n\n" + fake + whole, per_tile, fake]
    views = (
        View((first, canvas), canvas, (tile, tile)),
        View((first, canvas, (tile, tile)), (tile, tile), (tile, tile)),
    )
    num_tiles = rows * columns + 1
    count = num_tiles * per_tile
    return Layout(views, (num_tiles, side, side), count, tuple(parts), (1, 1, count))


def _to_edge(width: int, height: int, edge: int) -> Size:
    """The size with `edge` as the longer side; the other side is even."""
    ratio = width / height
    if width >= height:
        other = int(edge / ratio)
        return edge, max(other + other % 2, 1)
    other = int(edge * ratio)
    return max(other + other % 2, 1), edge


def _below(size: Size, most: int) -> Size:
    width, height = size
    ratio = width / height
    if width >= height and width > most:
        return most, max(int(most / ratio), 1)
    if height > width and height > most:
        return max(int(most * ratio), 1), most
    return size


def _to_multiples(width: int, height: int, tile: int) -> Size:
    """Both sides as multiples of `tile`: first the longer one, then the other by the ratio."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return width, math.ceil(int(width / ratio) / tile) * tile
    height = math.ceil(height / tile) * tile
    return math.ceil(int(height * ratio) / tile) * tile, height


def _llava_next(width: int, height: int, settings: Settings) -> Layout:
    """LLaVA 1.6: the whole as one tile, then tiles of the canvas that loses least of the picture.

    The features of padding are left out, and each row of features ends with a learned one, which
    is the last that the tower makes.
    Reads tile, patch, merge, pinpoints ([height, width] of each canvas).
    """
    tile = _number(settings, "tile")
    canvas_height, canvas_width = _best_canvas(width, height, settings["pinpoints"])
    scale_w, scale_h = canvas_width / width, canvas_height / height
    if scale_w < scale_h:
        size = canvas_width, min(math.ceil(height * scale_w), canvas_height)
    else:
        size = min(math.ceil(width * scale_h), canvas_width), canvas_height
    at = (canvas_width - size[0]) // 2, (canvas_height - size[1]) // 2
    per_tile, side = _of_tile(settings, tile)
    columns, rows = canvas_width // tile, canvas_height // tile
    views = (
        _whole(tile, tile),
        View((size,), (canvas_width, canvas_height), (tile, tile), at),
    )
    high, wide = _without_padding(width, height, side * columns, side * rows)
    newline = (columns * rows + 1) * per_tile
    parts: list[int | slice | str] = [per_tile]
    top, left = (side * rows - high) // 2, (side * columns - wide) // 2
    for y in range(top, top + high):
        for column in range(columns):
            x, end = max(left, column * side), min(left + wide, (column + 1) * side)
            if x < end:
                tile_row = (y // side * columns + column + 1) * per_tile + y % side * side
                parts.append(slice(tile_row + x % side, tile_row + x % side + end - x))
        parts.append(slice(newline, newline + 1))
    grid = (columns * rows + 1, side, side)
    return Layout(views, grid, newline + 1, tuple(parts), (1, 1, per_tile))


def _best_canvas(width: int, height: int, pinpoints: object) -> Size:
    """(height, width) of the canvas that keeps most pixels, and of these wastes least."""
    assert isinstance(pinpoints, (list, tuple)) and pinpoints
    best, kept, wasted = (0, 0), -1, math.inf
    for canvas_height, canvas_width in pinpoints:
        scale = min(canvas_width / width, canvas_height / height)
        area = min(int(width * scale) * int(height * scale), width * height)
        waste = canvas_width * canvas_height - area
        if area > kept or (area == kept and waste < wasted):
            best, kept, wasted = (canvas_height, canvas_width), area, waste
    return best


def _without_padding(width: int, height: int, columns: int, rows: int) -> Size:
    """Rows and columns of features that the picture covers."""
    if width / height > columns / rows:
        covered = int(round(height * (columns / width), 7))
        return rows - (rows - covered) // 2 * 2, columns
    covered = int(round(width * (rows / height), 7))
    return rows, columns - (columns - covered) // 2 * 2


def _pixtral(width: int, height: int, settings: Settings) -> Layout:
    """Pixtral: any aspect below a longest edge; each row of features ends with a token.

    Reads longest_edge, patch, merge, break_token, end_token (texts).
    """
    edge = _number(settings, "longest_edge")
    factor = _number(settings, "patch") * _number(settings, "merge")
    ratio = max(height / edge, width / edge)
    if ratio > 1:
        height, width = int(math.floor(height / ratio)), int(math.floor(width / ratio))
    rows, columns = (height - 1) // factor + 1, (width - 1) // factor + 1
    rows, columns = max(rows, 1), max(columns, 1)
    parts: list[int | str] = [columns, str(settings["break_token"])] * rows
    parts[-1] = str(settings["end_token"])
    merge = _number(settings, "merge")
    grid = (1, rows * merge, columns * merge)
    view = _whole(columns * factor, rows * factor)
    return Layout((view,), grid, rows * columns, tuple(parts), (1, rows, columns))


def _gemma4(width: int, height: int, settings: Settings) -> Layout:
    """Gemma 4: the largest size of this aspect within a budget of feature rows.

    Reads patch, merge, max_rows.
    """
    patch, merge = _number(settings, "patch"), _number(settings, "merge")
    most, step = _number(settings, "max_rows"), patch * merge
    factor = math.sqrt(most * step * step / (height * width))
    rows = math.floor(factor * height / step)
    columns = math.floor(factor * width / step)
    if rows == 0:
        rows, columns = 1, min(width // height, most)
    elif columns == 0:
        rows, columns = min(height // width, most), 1
    view = _whole(columns * step, rows * step)
    count, grid = rows * columns, (1, rows * merge, columns * merge)
    return Layout((view,), grid, count, (count,), (1, rows, columns))


def _llama4(width: int, height: int, settings: Settings) -> Layout:
    """Llama 4: tiles of the canvas that needs least scaling, and the whole as a last tile.

    Reads tile, patch, merge, max_tiles, and the texts of its tokens: start_token, column_token,
    row_token, global_token, end_token.
    """
    tile = _number(settings, "tile")
    columns, rows = _llama4_canvas(width, height, tile, _number(settings, "max_tiles"))
    canvas = columns * tile, rows * tile
    bound = min(max(width, tile), canvas[0]), min(max(height, tile), canvas[1])
    scale_w, scale_h = bound[0] / width, bound[1] / height
    if scale_w < scale_h:
        size = bound[0], max(min(math.floor(height * scale_w), bound[1]), 1)
    else:
        size = max(min(math.floor(width * scale_h), bound[0]), 1), bound[1]
    views = [View((size,), canvas, (tile, tile))]
    per_tile, side = _of_tile(settings, tile)
    parts: list[int | str] = []
    text = str(settings["start_token"])
    if columns * rows > 1:
        views.append(_whole(tile, tile))
        for _ in range(rows):
            for column in range(columns):
                parts += [text, per_tile]
                text = str(settings["column_token"]) if column < columns - 1 else ""
            text = str(settings["row_token"])
    parts += [text + str(settings["global_token"]), per_tile, str(settings["end_token"])]
    num_tiles = columns * rows + (columns * rows > 1)
    count = num_tiles * per_tile
    grid = (num_tiles, side, side)
    return Layout(tuple(views), grid, count, tuple(parts), (1, 1, count))


def _llama4_canvas(width: int, height: int, tile: int, most: int) -> tuple[int, int]:
    """Columns and rows: the least enlargement, else the least reduction; of equals the smallest."""
    ratios: dict[float, list[tuple[int, int]]] = {}
    for count in range(min(most, MAX_TILES), 0, -1):
        for rows in (n for n in range(1, count + 1) if count % n == 0):
            ratios.setdefault(rows / (count // rows), []).append((count // rows, rows))
    pairs = [pair for group in ratios.values() for pair in group]
    scales = [min(c * tile / width, r * tile / height) for c, r in pairs]
    larger = [scale for scale in scales if scale >= 1]
    chosen = min(larger) if larger else max(scales)
    fitting = [pair for pair, scale in zip(pairs, scales, strict=True) if scale == chosen]
    return min(fitting, key=lambda pair: pair[0] * pair[1])


def _one_square(view: View, settings: Settings) -> Layout:
    patch, merge = _number(settings, "patch"), _number(settings, "merge")
    rows, columns = view.size[1] // patch, view.size[0] // patch
    count = (rows // merge) * (columns // merge)
    return Layout((view,), (1, rows, columns), count, (count,), (1, 1, count))


def _whole(width: int, height: int) -> View:
    """The whole picture in this size as one tile."""
    return View(((width, height),), (width, height), (width, height))


def _of_tile(settings: Settings, tile: int) -> tuple[int, int]:
    """Feature rows of a square tile, and patches along its side."""
    side = tile // _number(settings, "patch")
    return (side // _number(settings, "merge")) ** 2, side


def _number(settings: Settings, name: str) -> int:
    value = settings[name]
    assert isinstance(value, int), f"{name} is {value!r}"
    return value


def _smallest_canvas(settings: Settings) -> Settings:
    pinpoints = settings["pinpoints"]
    assert isinstance(pinpoints, (list, tuple))
    return {"pinpoints": [min(pinpoints, key=lambda size: size[0] * size[1])]}


RULES: Mapping[str, Rule] = {
    "qwen": _qwen,
    "fixed": _fixed,
    "cropped": _cropped,
    "tiles": _tiles,
    "idefics3": _idefics3,
    "llava_next": _llava_next,
    "pixtral": _pixtral,
    "gemma4": _gemma4,
    "llama4": _llama4,
}
"""Name in `MediaConfig.rule` -> rule."""

MERGE_ORDER = frozenset({"qwen"})
"""Rules whose patches come block by block: the merge x merge neighbours of a feature row."""

LOW_DETAIL: Mapping[str, Callable[[Settings], Settings]] = {
    "qwen": lambda settings: {"max_pixels": min(_number(settings, "max_pixels"), _LOW_PIXELS)},
    "tiles": lambda settings: {"min_tiles": 1, "max_tiles": 1},
    "idefics3": lambda settings: {"splits": 0},
    "llava_next": _smallest_canvas,
    "pixtral": lambda s: {"longest_edge": min(_number(s, "longest_edge"), _LOW_EDGE)},
    "gemma4": lambda settings: {"max_rows": min(_number(settings, "max_rows"), 70)},
    "llama4": lambda settings: {"max_tiles": 1},
}
"""Rule -> settings of `detail: low`. A rule that is not here has one size."""

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "qwen": ("min_pixels", "max_pixels"),
    "tiles": ("min_tiles", "max_tiles"),
    "llama4": ("max_tiles",),
    "pixtral": ("longest_edge",),
    "idefics3": ("longest_edge",),
    "gemma4": ("max_rows",),
}
"""Rule -> settings that a part may lower."""
