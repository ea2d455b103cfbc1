"""What is fetched, and what is not: addresses, redirects, sizes, times, local files."""

import asyncio
from pathlib import Path

import pytest

from banyan.base.errors import RequestError
from banyan.media.sources import MAX_REDIRECTS, SourceLimits, fetch, is_public
from tests.support.pictures import host, png

LOCAL = ("127.0.0.1",)
SMALL = 1 << 20


def get(url: str, limits: SourceLimits | None = None, addresses: list[str] | None = None) -> bytes:
    """Fetch; names resolve to `addresses`, one after the other, if they are given."""
    rest = list(addresses or [])

    async def resolve(name: str, port: int) -> list[str]:
        return [rest.pop(0)]

    async def run() -> bytes:
        async with asyncio.timeout(20):
            limit = limits or SourceLimits(SMALL)
            return await fetch(url, limit, "image", resolve if addresses else None)

    return asyncio.run(run())


def refusal(url: str, limits: SourceLimits | None = None, **more: object) -> str:
    with pytest.raises(RequestError) as caught:
        get(url, limits, **more)
    assert caught.value.status == 400 and caught.value.hint
    return str(caught.value)


PRIVATE = [
    *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
    *("100.64.0.1", "192.0.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1"),
    *("64:ff9b::a9fe:a9fe", "2001:0:4136:e378:8000:63bf:80ff:fffe", "no address"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public_are_known(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1"])
def test_public_addresses_are_known(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/a", "http://localhost/a", "http://[::1]/a", "http://0.0.0.0/a"),
        *("http://127.1/a", "http://2130706433/a", "http://0x7f.0.0.1/a", "http://017700000001/a"),
        *("http://[::ffff:127.0.0.1]/a", "http://169.254.169.254/latest/meta-data/"),
    ],
)
def test_no_spelling_of_a_private_address_is_dialled(url: str) -> None:
    assert "no public address" in refusal(url) or "is not found" in refusal(url)


def test_a_name_that_turns_private_is_checked_before_it_is_dialled() -> None:
    text = refusal("http://rebinding.example/a", addresses=["10.0.0.1"])
    assert "no public address" in text


def test_a_host_is_resolved_once_for_each_hop() -> None:
    asked: list[str] = []

    async def resolve(name: str, port: int) -> list[str]:
        asked.append(name)
        return ["127.0.0.1"]

    with host(a=png()) as site:
        limits = SourceLimits(SMALL, domains=("named.example",))
        site.redirects["/again"] = "/a"
        url = f"http://named.example:{site.port}/again"
        assert asyncio.run(fetch(url, limits, "image", resolve)) == png()
    assert asked == ["named.example", "named.example"]


def test_only_named_hosts_are_asked_if_any_is_named() -> None:
    with host(a=png()) as site:
        assert get(f"{site.url}/a", SourceLimits(SMALL, domains=LOCAL)) == png()
        text = refusal(f"{site.url}/a", SourceLimits(SMALL, domains=("images.example",)))
        assert "--allowed-media-domains does not name" in text
        site.redirects["/away"] = f"http://localhost:{site.port}/a"
        assert "does not name" in refusal(f"{site.url}/away", SourceLimits(SMALL, domains=LOCAL))
        assert site.asked == ["/a", "/away"]


def test_redirects_end() -> None:
    with host(a=png()) as site:
        limits = SourceLimits(SMALL, domains=LOCAL)
        site.redirects["/loop"] = "/loop"
        assert f"more than {MAX_REDIRECTS} redirects" in refusal(f"{site.url}/loop", limits)
        assert len(site.asked) == MAX_REDIRECTS + 1
        for path, target in (("/file", "file:///etc/passwd"), ("/ftp", "ftp://127.0.0.1/a")):
            site.redirects[path] = target
            assert "only http and https" in refusal(f"{site.url}{path}", limits)
        site.redirects["/nowhere"] = ""
        assert "without a usable location" in refusal(f"{site.url}/nowhere", limits)


def test_a_file_has_a_size() -> None:
    with host(big=b"\0" * (SMALL + 1), fits=b"\0" * SMALL) as site:
        limits = SourceLimits(SMALL, domains=LOCAL)
        assert len(get(f"{site.url}/fits", limits)) == SMALL
        for path in ("big", "endless", "claims"):
            assert "more than 1 MB" in refusal(f"{site.url}/{path}", limits), path


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("missing", "status 404"),
        ("headers", "headers have more than"),
        ("short", "ended early"),
        ("garbage", "not HTTP"),
    ],
)
def test_a_bad_answer_is_refused(path: str, why: str) -> None:
    with host() as site:
        assert why in refusal(f"{site.url}/{path}", SourceLimits(SMALL, domains=LOCAL))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://93.184.216.34/a", "only http and https"),
        ("http:///a", "no host"),
        ("http://user:word@93.184.216.34/a", "user name"),
        ("http://93.184.216.34:99999/a", "malformed"),
        ("http://93.184.216.34/a b\r\nX: y", "must be escaped"),
        ("http://93.184.216.34/\u00fc", "must be escaped"),
        ("http://\u00fc.example/", "malformed"),
        ("http://no-such-host.invalid/a", "not found"),
        ("https://a.example/" + "a" * 9000, "9,018 characters"),
    ],
)
def test_a_url_that_is_malformed_is_refused(url: str, why: str) -> None:
    assert why in refusal(url)


def test_files_are_read_below_the_allowed_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    inside, outside = folder / "a b.png", tmp_path / "secret.png"
    inside.write_bytes(png())
    outside.write_bytes(png())
    (folder / "link.png").symlink_to(outside)
    limits = SourceLimits(SMALL, folder=str(folder))
    assert get(f"file://{folder}/a%20b.png", limits) == png()
    for path in (outside, folder / ".." / "secret.png", folder / "link.png", folder):
        text = refusal(f"file://{path}", limits)
        assert "outside" in text or "regular" in text or "directory" in text, path
    assert "No such file" in refusal(f"file://{folder}/none.png", limits)
    assert "malformed" in refusal(f"file://elsewhere{inside}", limits)
    assert "files of the server are not read" in refusal(f"file://{inside}")
    assert "outside" in refusal("file:///dev/zero", limits)
    assert "regular" in refusal("file:///dev/zero", SourceLimits(SMALL, folder="/"))
