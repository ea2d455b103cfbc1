"""Sizes, pixels and ids of every resolution rule against transformers' processors (Pillow)."""

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from banyan.base.errors import RequestError
from banyan.media.pixels import patches_of
from banyan.media.rules import LOW_DETAIL, RULES, layout_of, with_options

SIZES = [
    *(
        (1, 1),
        (2, 3),
        (7, 7),
        (13, 28),
        (28, 28),
        (29, 27),
        (56, 56),
        (57, 113),
        (100, 1),
        (1, 100),
    ),
    *((199, 1), (64, 64), (65, 63), (84, 140), (97, 101), (112, 112), (120, 40), (40, 120)),
    *((128, 96), (127, 97), (150, 149), (160, 90), (90, 160), (168, 168), (200, 199), (211, 37)),
    *((224, 224), (223, 225), (240, 100), (256, 64), (250, 333), (300, 20), (20, 300), (320, 240)),
    *((333, 250), (336, 336), (337, 335), (400, 130), (130, 400), (448, 224)),
]
"""Forty odd pictures."""

QWEN = {"patch": 14, "merge": 2, "temporal": 2, "min_pixels": 56 * 56, "max_pixels": 40_000}
CLIP = {"patch": 14, "merge": 1}


def picture(width: int, height: int) -> Any:
    rng = np.random.default_rng(width * 1000 + height)
    noise = rng.integers(0, 256, (height, width, 3))
    ramp = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
    return Image.fromarray(((noise + ramp) // 2).astype(np.uint8))


def processor(family: str, name: str, **settings: object) -> Any:
    module = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    return getattr(module, name)(do_rescale=False, do_normalize=False, **settings)


def ours(rule: str, image: Any, settings: dict[str, object]) -> tuple[Any, Any]:
    layout = layout_of(rule, *image.size, settings)
    rows = patches_of(image, rule, layout, settings)
    tiles, high, wide = layout.grid
    assert rows.shape[0] == tiles * high * wide
    assert layout.num_places == layout.rows or rule == "llava_next"
    return layout, rows


def tiles_of(rows: Any, grid: tuple[int, int, int], patch: int) -> Any:
    """[tiles, 3, height, width] of rows of patches in row-major order."""
    tiles, high, wide = grid
    split = rows.reshape(tiles, high, wide, 3, patch, patch)
    return split.transpose(0, 3, 1, 4, 2, 5).reshape(tiles, 3, high * patch, wide * patch)


@pytest.mark.parametrize("size", SIZES)
def test_qwen_pictures_are_the_patches_of_transformers(size: tuple[int, int]) -> None:
    image = picture(*size)
    theirs = processor(
        "qwen2_vl",
        "Qwen2VLImageProcessorPil",
        size={"shortest_edge": QWEN["min_pixels"], "longest_edge": QWEN["max_pixels"]},
    )(images=[image], return_tensors="np")
    layout, rows = ours("qwen", image, QWEN)
    assert list(layout.grid) == theirs["image_grid_thw"][0].tolist()
    assert np.array_equal(rows, theirs["pixel_values"])
    assert layout.rows == layout.grid[1] * layout.grid[2] // 4


@pytest.mark.parametrize("size", SIZES)
def test_square_pictures_are_the_pixels_of_transformers(size: tuple[int, int]) -> None:
    image = picture(*size)
    settings = {"height": 56, "width": 56, "patch": 14, "merge": 2, "resample": 2}
    theirs = processor("gemma3", "Gemma3ImageProcessorPil", size={"height": 56, "width": 56})
    layout, rows = ours("fixed", image, settings)
    assert layout.rows == 4
    assert np.array_equal(
        tiles_of(rows, layout.grid, 14), theirs(images=[image], return_tensors="np")["pixel_values"]
    )


@pytest.mark.parametrize("size", SIZES)
def test_cropped_pictures_are_the_pixels_of_transformers(size: tuple[int, int]) -> None:
    image = picture(*size)
    settings = {"shortest_edge": 42, "height": 42, "width": 42, **CLIP}
    theirs = processor(
        "llava",
        "LlavaImageProcessorPil",
        size={"shortest_edge": 42},
        crop_size={"height": 42, "width": 42},
    )
    layout, rows = ours("cropped", image, settings)
    assert layout.rows == 9
    assert np.array_equal(
        tiles_of(rows, layout.grid, 14), theirs(images=[image], return_tensors="np")["pixel_values"]
    )


@pytest.mark.parametrize("most", [1, 6, 12])
@pytest.mark.parametrize("size", SIZES)
def test_tiles_are_those_of_transformers(size: tuple[int, int], most: int) -> None:
    image = picture(*size)
    settings = {"tile": 28, "patch": 14, "merge": 2, "min_tiles": 1, "max_tiles": most}
    theirs = processor(
        "got_ocr2",
        "GotOcr2ImageProcessorPil",
        size={"height": 28, "width": 28},
        crop_to_patches=True,
        max_patches=most,
    )(images=[image], return_tensors="np")
    layout, rows = ours("tiles", image, settings)
    assert layout.grid[0] == layout.rows == theirs["num_patches"][0]
    assert np.array_equal(tiles_of(rows, layout.grid, 14), theirs["pixel_values"])


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_idefics3_tiles_and_texts_are_those_of_transformers(
    size: tuple[int, int], splits: bool
) -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    image = picture(*size)
    settings = {
        **{"longest_edge": 96, "tile": 32, "patch": 8, "merge": 4, "resample": 1},
        **{"splits": int(splits), "fake_token": "<f>", "global_token": "<g>"},
        "row_column": "<row_{row}_col_{column}>",
    }
    theirs = processor(
        "smolvlm",
        "SmolVLMImageProcessorPil",
        size={"longest_edge": 96},
        max_image_size={"longest_edge": 32},
        do_image_splitting=splits,
        return_row_col_info=True,
    )(images=[[image]], return_tensors="np")
    layout, rows = ours("idefics3", image, settings)
    assert np.array_equal(tiles_of(rows, layout.grid, 8), theirs["pixel_values"][0])
    text = "".join("<i>" * part if isinstance(part, int) else part for part in layout.stretch)
    given = theirs["rows"][0][0], theirs["cols"][0][0]
    assert text == get_image_prompt_string(*given, 1, "<f>", "<i>", "<g>")


@pytest.mark.parametrize("size", SIZES)
def test_llava_next_tiles_and_counts_are_those_of_transformers(size: tuple[int, int]) -> None:
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    image = picture(*size)
    pinpoints = [[42, 84], [84, 42], [84, 84], [126, 42], [42, 126]]
    settings = {"tile": 42, "pinpoints": pinpoints, **CLIP}
    theirs = processor(
        "llava_next",
        "LlavaNextImageProcessorPil",
        size={"shortest_edge": 42},
        crop_size={"height": 42, "width": 42},
        image_grid_pinpoints=pinpoints,
    )(images=[image], return_tensors="np")
    layout, rows = ours("llava_next", image, settings)
    assert np.array_equal(tiles_of(rows, layout.grid, 14), theirs["pixel_values"][0])
    counter = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=pinpoints),
        patch_size=14,
        num_additional_image_tokens=0,
    )
    counter._get_unpadded_features = lambda *args: LlavaNextProcessor._get_unpadded_features(
        counter,  # type: ignore[arg-type]
        *args,
    )
    count = LlavaNextProcessor._get_number_of_features(
        counter,  # type: ignore[arg-type]
        size[1],
        size[0],
        42,
        42,
    )
    assert layout.num_places == count


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_pixtral_pictures_are_those_of_transformers(size: tuple[int, int], merge: int) -> None:
    image = picture(*size)
    settings = {
        **{"longest_edge": 100, "patch": 8, "merge": merge},
        **{"break_token": "[B]", "end_token": "[E]"},
    }
    side = 8 * merge
    theirs = processor(
        "pixtral",
        "PixtralImageProcessorPil",
        size={"longest_edge": 100},
        patch_size={"height": side, "width": side},
    )
    if min(size) * 100 < max(size):  # a side of no pixels: the library cannot resize to it
        pytest.skip("thinner than one pixel")
    found = theirs(images=[image], return_tensors="np")
    layout, rows = ours("pixtral", image, settings)
    assert np.array_equal(tiles_of(rows, layout.grid, 8), found["pixel_values"])
    high, wide = (edge // side for edge in found["image_sizes"][0])
    expected = ("[I]" * wide + "[B]") * (high - 1) + "[I]" * wide + "[E]"
    text = "".join("[I]" * part if isinstance(part, int) else part for part in layout.stretch)
    assert text == expected and layout.shape == (1, high, wide)


@pytest.mark.parametrize("size", SIZES)
def test_gemma4_pictures_are_those_of_transformers(size: tuple[int, int]) -> None:
    image = picture(*size)
    settings = {"patch": 4, "merge": 3, "max_rows": 70}
    theirs = processor("gemma4", "Gemma4ImageProcessorPil", patch_size=4, max_soft_tokens=70)(
        images=[image], return_tensors="np"
    )
    layout, rows = ours("gemma4", image, settings)
    assert layout.rows == theirs["num_soft_tokens_per_image"][0]
    given = theirs["pixel_values"][0][: len(rows)].reshape(-1, 4, 4, 3)
    assert np.array_equal(rows.reshape(-1, 3, 4, 4), given.transpose(0, 3, 1, 2))
    assert not theirs["pixel_values"][0][len(rows) :].any()


LLAMA4 = {
    **{"tile": 28, "patch": 14, "merge": 2, "max_tiles": 6},
    **{"start_token": "<s>", "column_token": "<x>", "row_token": "<y>"},
    **{"global_token": "<g>", "end_token": "<e>"},
}


@pytest.mark.parametrize(
    ("size", "grid", "text"),
    [
        ((28, 28), (1, 1), "<s><g>P<e>"),
        ((56, 28), (2, 1), "<s>P<x>P<y><g>P<e>"),
        ((28, 56), (1, 2), "<s>P<y>P<y><g>P<e>"),
        ((56, 56), (2, 2), "<s>P<x>P<y>P<x>P<y><g>P<e>"),
        ((10, 10), (1, 1), "<s><g>P<e>"),
    ],
)
def test_llama4_cuts_tiles_and_separates_them(
    size: tuple[int, int], grid: tuple[int, int], text: str
) -> None:
    layout, rows = ours("llama4", picture(*size), LLAMA4)
    num_tiles = grid[0] * grid[1]
    assert layout.grid[0] == num_tiles + (num_tiles > 1)
    found = "".join("P" * part if isinstance(part, int) else part for part in layout.stretch)
    assert found == text
    first = tiles_of(rows, layout.grid, 14)[0]
    if size == (56, 56):
        assert np.array_equal(first, np.asarray(picture(*size)).transpose(2, 0, 1)[:, :28, :28])


def test_a_thin_picture_is_refused_by_every_rule() -> None:
    for rule in RULES:
        with pytest.raises(RequestError, match="201 x 1 pixels"):
            layout_of(rule, 201, 1, {})


def test_low_detail_never_costs_more() -> None:
    settings: dict[str, dict[str, object]] = {
        "qwen": {**QWEN, "max_pixels": 4_000_000},
        "tiles": {"tile": 28, "patch": 14, "merge": 2, "min_tiles": 2, "max_tiles": 12},
        "idefics3": {
            **{"longest_edge": 96, "tile": 32, "patch": 8, "merge": 4, "splits": 1},
            **{"fake_token": "<f>", "global_token": "<g>", "row_column": "{row}{column}"},
        },
        "llava_next": {"tile": 42, "pinpoints": [[42, 84], [84, 84]], **CLIP},
        "pixtral": {
            **{"longest_edge": 1024, "patch": 8, "merge": 1},
            **{"break_token": "[B]", "end_token": "[E]"},
        },
        "gemma4": {"patch": 4, "merge": 3, "max_rows": 280},
        "llama4": {**LLAMA4, "max_tiles": 16},
    }
    assert settings.keys() == LOW_DETAIL.keys()
    for rule, full in settings.items():
        low = with_options(rule, full, {"detail": "low"})
        sizes = [(1200, 900), (600, 1100)]
        counts = [(layout_of(rule, *s, low).rows, layout_of(rule, *s, full).rows) for s in sizes]
        assert all(small < whole for small, whole in counts), (rule, counts)


def test_a_part_may_lower_the_budget_and_not_raise_it() -> None:
    lower = with_options("qwen", QWEN, {"max_pixels": 10_000})
    assert layout_of("qwen", 400, 400, lower).rows < layout_of("qwen", 400, 400, QWEN).rows
    raised = with_options("qwen", QWEN, {"max_pixels": 2**63})
    assert raised["max_pixels"] == QWEN["max_pixels"]
    smallest = with_options("qwen", QWEN, {"max_pixels": 1, "min_pixels": 2**64})
    assert layout_of("qwen", 400, 400, smallest).rows == 1
