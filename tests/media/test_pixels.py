"""Files of pictures become RGB pixels: rotation, transparency, depth, animation, refusals."""

import numpy as np
import pytest
from PIL import Image, ImageOps

from banyan.media.pixels import (
    BadPicture,
    decode,
    digest_of,
    open_picture,
    own_picture,
    size_of,
)
from banyan.media.processes import PictureTask
from banyan.media.worker import answer_of
from tests.support.pictures import SETTINGS, encoded, hostile_files, png

MANY = 40_000_000


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(width * 100 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(decode(open_picture(data, MANY)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_data_says(orientation: int) -> None:
    picture = noise(21, 13)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture, "PNG", exif=exif)
    stored = Image.open(__import__("io").BytesIO(data))
    expected = ImageOps.exif_transpose(stored)
    assert np.array_equal(decoded(data), np.asarray(expected))
    assert size_of(open_picture(data, MANY)) == expected.size


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_turns_nothing(value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    assert np.array_equal(decoded(encoded(noise(5, 9), "PNG", exif=exif)), np.asarray(noise(5, 9)))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_becomes_white(mode: str) -> None:
    picture = noise(8, 8).convert(mode)
    picture.putalpha(0)
    assert (decoded(encoded(picture, "PNG")) == 255).all()
    picture.putalpha(255)
    assert np.array_equal(
        decoded(encoded(picture, "PNG")), np.asarray(noise(8, 8).convert(mode).convert("RGB"))
    )


def test_half_transparent_black_is_grey() -> None:
    found = decoded(encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 128)), "PNG"))
    assert (found == 127).all()


def test_a_palette_keeps_its_colours_and_its_transparent_one_is_white() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 200, 100, 50])
    picture.putdata([0, 1])
    assert decoded(encoded(picture, "PNG")).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    found = decoded(encoded(picture, "PNG", transparency=0))
    assert found.tolist() == [[[255, 255, 255], [200, 100, 50]]]


def test_sixteen_bits_are_scaled_to_eight() -> None:
    values = np.array([[0, 257, 32896, 65535]], np.uint16)
    found = decoded(encoded(Image.fromarray(values), "PNG"))
    assert found[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr"])
def test_other_colours_are_converted(mode: str) -> None:
    picture = noise(16, 8, mode)
    form = "PNG" if mode in ("1", "L") else "TIFF" if mode == "CMYK" else "JPEG"
    options = {"quality": 100, "subsampling": 0} if form == "JPEG" else {}
    found = decoded(encoded(picture, form, **options)).astype(int)
    assert np.abs(found - np.asarray(picture.convert("RGB")).astype(int)).max() <= 8


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (6, 4), colour) for colour in ("red", "blue", "green")]
    for form in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if form == "WEBP" else {}
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
        assert (decoded(data) == [255, 0, 0]).all(), form


@pytest.mark.parametrize("name", hostile_files())
def test_a_hostile_file_is_refused_with_a_reason(name: str) -> None:
    data = hostile_files()[name]
    try:
        answer = answer_of(PictureTask(data, MANY, "qwen", SETTINGS))
    except Exception as error:
        assert "200 times" in str(error), name
        return
    assert answer.error and not answer.patches and len(answer.error) < 300


def test_a_bomb_is_refused_by_its_header() -> None:
    with pytest.raises(BadPicture, match="20,000 x 20,000 pixels, limit 40 million"):
        open_picture(hostile_files()["a bomb of 400 million pixels"], MANY)


def test_pictures_with_other_pixels_sizes_or_rules_have_other_digests() -> None:
    pictures = [noise(8, 8), noise(8, 9), noise(9, 8), noise(8, 8).rotate(90)]
    pictures += [Image.new("RGB", size) for size in ((4, 6), (6, 4), (3, 8), (8, 3))]
    digests = {digest_of(picture, "qwen", SETTINGS) for picture in pictures}
    digests |= {digest_of(noise(8, 8), rule, SETTINGS) for rule in ("fixed", "tiles")}
    digests.add(digest_of(noise(8, 8), "qwen", {**SETTINGS, "max_pixels": 1}))
    assert len(digests) == len(pictures) + 3
    assert all(len(digest) == 32 for digest in digests)


def test_the_same_pixels_in_another_format_have_the_same_digest() -> None:
    as_png, as_bmp = (encoded(noise(9, 7), form) for form in ("PNG", "BMP"))
    found = [digest_of(decode(open_picture(d, MANY)), "qwen", SETTINGS) for d in (as_png, as_bmp)]
    assert found[0] == found[1]


def test_own_pictures_take_a_form_of_the_native_api(tmp_path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(4, 4))
    array = np.asarray(noise(5, 6))
    listed = own_picture([noise(5, 6), array, path, str(path), "https://a.org/b", {"url": path}])
    assert listed[0] == listed[1] and np.array_equal(decoded(listed[0]), array)
    assert listed[2:] == [str(path), str(path), "https://a.org/b", {"url": str(path)}]
    with pytest.raises(Exception, match="uint8"):
        own_picture(array.astype(np.float32))
