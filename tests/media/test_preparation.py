"""From parts to contents and ids: limits, time, turns, the cache, callers, worker processes."""

import asyncio
import threading
import time
from collections.abc import Awaitable

import pytest
from PIL import Image

from banyan.base.errors import ConfigError, RequestError
from banyan.config.schema import MediaOptions
from banyan.media.parts import MediaPart
from banyan.media.preparation import (
    MAX_PARTS,
    MediaService,
    PreparedItem,
    check_media,
    expanded,
)
from banyan.media.processes import DecodedPicture, WorkerEnded
from tests.support.pictures import (
    byte_tokenizer,
    encoded,
    host,
    media_service,
    png,
)

LOCAL = ("127.0.0.1",)


def part(source: str | bytes, **options: object) -> MediaPart:
    return MediaPart("image", source, "messages[0].content[0]", options)


def prepared(service: MediaService, *parts: MediaPart, tenant: bytes = b"") -> list[PreparedItem]:
    async def run() -> list[PreparedItem]:
        found = await service.prepare(parts, tenant)
        return [found[p.key] for p in parts]

    try:
        return asyncio.run(run())
    finally:
        service.close()


def refused(service: MediaService, *parts: MediaPart) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepared(service, *parts)
    assert 400 <= caught.value.status < 500
    return caught.value


def test_a_picture_becomes_patches_and_places() -> None:
    service = media_service()
    (item,) = prepared(service, part(png(60, 40)))
    assert item.content.grid == (1, 4, 6) and item.content.rows == 6 and item.shape == (1, 2, 3)
    assert len(item.content.data) == 24 * 3 * 2 * 14 * 14
    whole = expanded([7, 256, 8, 256], [item, item], {256: "pictures"})
    assert whole.ids == [7, *[256] * 6, 8, *[256] * 6]
    assert [(s.first, s.count, s.offset, s.shape) for s in whole.spans] == [
        (1, 6, 0, (1, 2, 3)),
        (8, 6, 0, (1, 2, 3)),
    ]
    assert whole.contents == (item.content,)


def test_a_prompt_has_as_many_places_as_pictures() -> None:
    (item,) = prepared(media_service(), part(png()))
    for ids, items in (([1], [item]), ([256, 256], [item]), ([256], [])):
        with pytest.raises(RequestError, match="places for pictures"):
            expanded(ids, items, {256: "pictures"})


def test_a_request_has_a_number_of_pictures() -> None:
    two = [part(png(40, 40, (i, 0, 0))) for i in range(2)]
    assert (
        "may have 1 pictures, this one has 2"
        in refused(media_service(limits={"image": 1}), *two).text
    )
    assert "may have 0 pictures" in refused(media_service(limits={"image": 0}), two[0]).text
    many = [part(b"x" * 70 + bytes(str(i), "ascii")) for i in range(MAX_PARTS + 1)]
    assert refused(media_service(), *many).code == "too_many_images"


def test_pictures_longer_than_the_context_are_refused_before_they_are_decoded() -> None:
    cut = encoded(Image.effect_noise((400, 400), 90), "JPEG")[:4000]  # fails where it is decoded
    error = refused(media_service(max_tokens=100), part(cut))
    assert error.code == "context_length_exceeded" and "196 tokens" in error.text


def test_a_request_has_a_time_for_its_pictures() -> None:
    with host() as site:
        service = media_service(timeout_s=0.3, domains=LOCAL)
        error = refused(service, part(f"{site.url}/silent"))
    assert error.code == "media_timed_out" and "within 0.3 s" in error.text


def test_requests_wait_for_their_turn() -> None:
    service, order = media_service(max_concurrent=1), []
    gate = threading.Event()

    async def slow(*given: object) -> dict[bytes, PreparedItem]:
        order.append("begins")
        await asyncio.to_thread(gate.wait, 30)
        order.append("ends")
        return {}

    async def run() -> None:
        service._prepare = slow  # type: ignore[method-assign]
        calls: list[Awaitable[object]] = [service.prepare([]) for _ in range(3)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        while not order:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert order == ["begins"]
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    service.close()
    assert order == ["begins", "ends"] * 3


def test_a_picture_that_comes_again_is_not_decoded() -> None:
    async def run(service: MediaService, tenants: list[bytes]) -> int:
        for tenant in tenants:
            await service.prepare([part(png())], tenant)
        await service.prepare([part(png(), max_pixels=5000)], tenants[0])
        return service._cache.hits

    def hits(service: MediaService, *tenants: bytes) -> int:
        try:
            return asyncio.run(run(service, list(tenants)))
        finally:
            service.close()

    assert hits(media_service(), b"", b"", b"") == 2
    assert hits(media_service(), b"a", b"b", b"a") == 1
    assert hits(media_service(cache_mb=0), b"", b"") == 0


def test_callers_with_keys_do_not_share_digests() -> None:
    digests = {
        prepared(media_service(), part(png()), tenant=tenant)[0].content.digest
        for tenant in (b"", b"a", b"b")
    }
    assert len(digests) == 3


def test_as_many_processes_decode_as_are_asked_for() -> None:
    service = media_service(workers=3)
    started = threading.Barrier(3, timeout=60)
    run_one = service._workers._run

    def together(*given: object) -> object:
        started.wait()  # passes only if three threads are in it
        return run_one(*given)  # type: ignore[arg-type]

    service._workers._run = together  # type: ignore[method-assign, assignment]

    async def run() -> None:
        await asyncio.gather(
            *(service._measure(part(png()), png(), time.monotonic() + 60) for _ in range(3))
        )

    asyncio.run(run())
    assert 1 <= len(service._workers._children) <= 3
    service.close()


def test_settings_of_the_operator_override_the_models() -> None:
    few = media_service(process={"image": {"max_pixels": 4 * 28 * 28}})
    assert prepared(few, part(png(600, 600)))[0].content.rows <= 4
    small = media_service(process={"image": {"max_image_pixels": 100}})
    assert "limit 0.0001 million" in refused(small, part(png(60, 40))).text
    for name, value in (("no_such", 1), ("max_pixels", "many"), ("max_pixels", 2**31)):
        with pytest.raises(ConfigError, match=name):
            media_service(process={"image": {name: value}})


@pytest.mark.parametrize(
    "options",
    [
        {"process": {"video": {}}},
        {"process": {"image": 3}},
        {"process": {"image": {"max_image_pixels": 2**31}}},
        {"limits": {"image": -1}},
        {"limits": {"image": "many"}},
        {"limits": {"pictures": 1}},
        {"folder": "/no/such/folder"},
    ],
)
def test_options_that_cannot_be_meant_end_the_start(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        check_media(MediaOptions(**options))  # type: ignore[arg-type]


def test_a_worker_that_dies_fails_one_picture_and_is_replaced() -> None:
    service = media_service(workers=1)

    async def run() -> int:
        await service.prepare([part(png())])
        service._workers._children[0]._process.kill()
        with pytest.raises(RequestError, match="breaks its decoder"):
            await service.prepare([part(png(50, 50))])
        found = await service.prepare([part(png(50, 50))])
        return len(found)

    assert asyncio.run(run()) == 1
    service.close()


def test_a_task_over_its_time_ends_its_process() -> None:
    service = media_service(workers=1)

    async def run() -> None:
        with pytest.raises(WorkerEnded):
            await service._workers.run(None, DecodedPicture, 0.0)  # type: ignore[arg-type]
        assert await service.prepare([part(png())])

    asyncio.run(run())
    service.close()


def test_a_text_between_runs_is_encoded_by_itself() -> None:
    service = media_service(byte_tokenizer("<|image_pad|>", "<x>"))

    async def run() -> tuple[int, ...]:
        return await service._ids("\n<x>a")

    ids = asyncio.run(run())
    service.close()
    assert len(ids) == 3 and ids[1] == 257
