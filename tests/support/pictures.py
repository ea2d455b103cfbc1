"""Pictures, hostile files, hosts that serve them, and a MediaService for a small model."""

import base64
import contextlib
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tokenizers
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers

from banyan.config.schema import MediaOptions
from banyan.media.preparation import MediaService
from banyan.model_config.media import MediaConfig, TowerConfig
from banyan.tokenizer.tokenizer import Tokenizer, TokenizerFacts

PAD = "<|image_pad|>"
TOWER = TowerConfig(blocks=1, width=8, heads=1, inner=8, out=8, patch=14, temporal_patch=2, merge=2)
SETTINGS = {"patch": 14, "merge": 2, "temporal": 2, "min_pixels": 56 * 56, "max_pixels": 200_704}


def png(
    width: int = 60, height: int = 40, colour: object = (200, 30, 60), mode: str = "RGB"
) -> bytes:
    return encoded(Image.new(mode, (width, height), colour), "PNG")


def encoded(picture: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_of_size(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A PNG file whose header says this size, with these compressed pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def hostile_files() -> dict[str, bytes]:
    """Files that must each be refused by a clear error."""
    good, photo = png(300, 200), encoded(Image.effect_noise((300, 200), 90), "JPEG")
    flat = zlib.compress(b"\0" * (20000 * (3 * 20000 + 1) // 64), 9)
    gif, webp = (encoded(Image.effect_noise((64, 64), 90), form) for form in ("GIF", "WEBP"))
    tiff, bmp = (encoded(Image.effect_noise((64, 64), 90), form) for form in ("TIFF", "BMP"))
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    return {
        "a bomb of 400 million pixels": png_of_size(20000, 20000, flat),
        "a header of 2^31 pixels a side": png_of_size(2**31 - 1, 2**31 - 1),
        "a side of 0": png_of_size(0, 10),
        "one pixel wide": png_of_size(1, 65500, zlib.compress(b"\0" * 4 * 65500)),
        "one pixel high": png_of_size(65500, 1, zlib.compress(b"\0" * (3 * 65500 + 1))),
        "201 to 1": png(201, 1),
        "a side of 70,000": png_of_size(70000, 2, zlib.compress(b"\0" * 2 * 210001)),
        "PNG without pixels": png_of_size(64, 64),
        "PNG with pixels that are no deflate stream": png_of_size(64, 64, b"\xff" * 100),
        "PNG cut in its header": good[:20],
        "PNG cut in its pixels": good[: len(good) // 2],
        "PNG with a wrong checksum": good[:30] + b"\0\0" + good[32:],
        "JPEG cut in the middle": photo[: len(photo) // 2],
        "JPEG of two bytes": photo[:2],
        "JPEG without its tables": photo[:20] + photo[-200:],
        "GIF cut in the middle": gif[: len(gif) // 2],
        "GIF of its name": b"GIF89a",
        "WebP cut in the middle": webp[: len(webp) // 2],
        "WebP of its name": b"RIFF\x10\0\0\0WEBPVP8 ",
        "TIFF cut in the middle": tiff[: len(tiff) // 2],
        "TIFF that points to itself": b"II*\0\x08\0\0\0\x01\0\x00\x01\x03\0"
        + struct.pack("<III", 1, 1, 8),
        "BMP cut in the middle": bmp[: len(bmp) // 2],
        "floating-point pixels": encoded(Image.new("F", (8, 8)), "TIFF"),
        "SVG": svg,
        "HTML": b"<!doctype html><img src=http://127.0.0.1/>",
        "PDF": b"%PDF-1.7\n1 0 obj\n<</Type/Catalog>>",
        "EPS, which runs a program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "ZIP": b"PK\x03\x04" + b"\0" * 100,
        "text": b"this is a picture, believe me",
        "zeros": b"\0" * 4096,
        "one byte": b"\x89",
    }


def byte_tokenizer(*special: str) -> Tokenizer:
    """One token per byte, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, TokenizerFacts(source="tiny"))


def media_service(
    tokenizer: Tokenizer | None = None, max_tokens: int = 4096, **options: object
) -> MediaService:
    """For a model of the Qwen rule whose placeholder is PAD."""
    tokenizer = tokenizer or byte_tokenizer(PAD)
    token = tokenizer.token_to_id(PAD)
    assert token is not None
    media = MediaConfig("qwen", TOWER, token, settings=SETTINGS)
    given = MediaOptions(**{"timeout_s": 0, **options})  # a busy machine is no fault
    return MediaService(media, given, tokenizer, max_tokens)


class Host:
    """An HTTP server on 127.0.0.1 whose paths are good and bad answers."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[str] = []
        self.redirects: dict[str, str] = {}
        self.is_over = threading.Event()
        self.url = ""
        self.port = 0

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        self.asked.append(path)
        if path in self.redirects:
            handler.send_response(302)
            handler.send_header("Location", self.redirects[path])
            handler.end_headers()
        elif path == "/endless":
            handler.send_response(200)
            handler.end_headers()
            while not self.is_over.is_set():
                handler.wfile.write(b"\0" * 65536)
        elif path == "/silent":
            self.is_over.wait(60)
        elif path == "/headers":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not self.is_over.is_set():
                handler.wfile.write(b"X-Long: " + b"a" * 4096 + b"\r\n")
        elif path == "/claims":
            handler.send_response(200)
            handler.send_header("Content-Length", str(1 << 62))
            handler.end_headers()
        elif path == "/short":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b"abc")
        elif path == "/garbage":
            handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n\r\n")
        elif path in self.files:
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(self.files[path])
        else:
            handler.send_error(404)


@contextlib.contextmanager
def host(**files: bytes) -> Iterator[Host]:
    found = Host({f"/{name}": data for name, data in files.items()})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                found.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.port = server.server_port
    found.url = f"http://127.0.0.1:{found.port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.is_over.set()
        server.shutdown()
        server.server_close()
