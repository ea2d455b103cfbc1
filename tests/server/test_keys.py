"""Keys of a file: who they let in, with which share and how many requests, and when it changes."""

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from banyan.base.clock import VirtualClock
from banyan.base.errors import ConfigError
from banyan.server.http import auth
from banyan.server.http.auth import LOOK_S, Guard, Keys, digest
from tests.server.fakes import Site
from tests.support.flags import config_of

TWO = """
keys:
  - {name: research, key: [sk-new, sk-old], weight: 2}
  - {name: shop, key: sk-shop, max-requests: 1}
"""


def written(folder: Path, text: str = TWO) -> str:
    path = folder / "keys.yaml"
    path.write_text(text)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def site(*flags: str) -> contextlib.AbstractContextManager[Site]:
    return Site(config_of(*flags).server).serving()


def test_a_key_of_the_file_lets_its_caller_in(tmp_path: Path) -> None:
    with site("--api-key-file", written(tmp_path), "--api-key", "sk-flag") as open_site:
        for key, status in (("sk-old", 200), ("sk-shop", 200), ("sk-flag", 200), ("sk-no", 401)):
            answer = open_site.http.get("/v1/models", headers=bearer(key))
            assert answer.status_code == status, key


def test_the_keys_of_one_name_share_what_they_make(tmp_path: Path) -> None:
    guard = Guard(Keys("", written(tmp_path)), "", "0.0.0.0")

    def tenant(key: str) -> bytes:
        verdict = guard.judge(auth.KEY, f"Bearer {key}".encode(), "10.0.0.9", "h")
        assert verdict.status == 200
        return verdict.caller.tenant

    assert tenant("sk-new") == tenant("sk-old") != tenant("sk-shop")


def test_a_file_opens_no_admin_route_by_itself(tmp_path: Path) -> None:
    guard = Guard(Keys("sk-flag", written(tmp_path)), "", "127.0.0.1")
    for key in (b"sk-flag", b"sk-shop"):
        verdict = guard.judge(auth.ADMIN, b"Bearer " + key, "127.0.0.1", "localhost")
        assert verdict.status == 403 and "--admin-api-key" in verdict.text
    assert guard.judge(auth.KEY, b"", "127.0.0.1", "localhost").status == 401


def test_a_file_that_lists_nobody_lets_nobody_in(tmp_path: Path) -> None:
    guard = Guard(Keys("", written(tmp_path, "keys: []")), "", "127.0.0.1")
    assert guard.judge(auth.KEY, b"", "127.0.0.1", "localhost").status == 401


def test_a_changed_file_counts_within_a_second_and_a_bad_one_never(tmp_path: Path, caplog) -> None:
    clock = VirtualClock()
    keys = Keys("", written(tmp_path), clock, run=lambda work: work())
    old, new = digest("sk-shop"), digest("sk-fresh")
    assert keys.find(old) and not keys.find(new)
    written(tmp_path, "keys: [{name: shop, key: sk-fresh}]  # another length")
    assert not keys.find(new)
    clock.advance_to(LOOK_S + 0.1)
    assert keys.find(new) and not keys.find(old)
    assert keys.find(new).tenant == digest("name shop")
    written(tmp_path, "keys: [{name: shop}]")
    clock.advance_to(2 * LOOK_S + 0.2)
    assert keys.find(new)
    assert "the API keys stay as they were" in caplog.text and "sk-" not in caplog.text
    (tmp_path / "keys.yaml").unlink()
    clock.advance_to(4 * LOOK_S)
    assert keys.find(new)


def test_a_weight_is_that_of_the_name(tmp_path: Path) -> None:
    keys = Keys("sk-flag", written(tmp_path))
    weights = {
        key: keys.weight_of(keys.find(digest(key)).tenant)
        for key in ("sk-old", "sk-shop", "sk-flag")
    }
    assert weights == {"sk-old": 2.0, "sk-shop": 1.0, "sk-flag": 1.0}


def test_requests_carry_their_caller_to_where_steps_are_shared(tmp_path: Path) -> None:
    with site("--api-key-file", written(tmp_path)) as open_site:
        for path, body in (
            ("/generate", {"text": "a"}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/score", {"query": "q", "items": ["a"], "label_token_ids": [5]}),
            ("/api/generate", {"model": "x", "prompt": "a", "stream": False}),
        ):
            open_site.http.post(path, json=body, headers=bearer("sk-new"))
            asked = open_site.generator.asked.pop()
            assert open_site.state.keys.weight_of(asked.message.caller) == 2.0, path


def test_no_more_requests_of_a_key_are_open_than_it_may_have(tmp_path: Path) -> None:
    with site("--api-key-file", written(tmp_path)) as open_site:
        open_site.generator.hold_after = 0
        body = {"text": "a"}
        url = f"{open_site.url}/generate"

        def first() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(url, json=body, headers=bearer("sk-shop"))

        threading.Thread(target=first, daemon=True).start()
        assert open_site.generator.started.acquire(timeout=60)
        refused = open_site.http.get("/v1/models", headers=bearer("sk-shop"))
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "1 requests of this key are open; it may have 1 at once" in refused.text
        assert open_site.http.get("/v1/models", headers=bearer("sk-old")).status_code == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must be a mapping"),
        ("other: 1", "must have one entry, keys"),
        ("keys: {a: b}", "must have one entry, keys"),
        ("keys: [a]", "caller 1 must be a mapping"),
        ("keys: [{name: a}]", "caller 1 needs a key"),
        ("keys: [{name: a, key: ''}]", "caller 1 needs a key"),
        ("keys: [{name: a, key: 'b c'}]", "caller 1 needs a key"),
        ("keys: [{name: a, key: []}]", "caller 1 needs a key"),
        ("keys: [{key: k}]", "caller 1 needs a name"),
        ("keys: [{name: a, key: k, wait: 1}]", "caller 1 has no 'wait'. Fields are"),
        ("keys: [{name: a, key: k, weight: 0}]", "weight must be in"),
        ("keys: [{name: a, key: k, weight: .nan}]", "weight must be in"),
        ("keys: [{name: a, key: k, weight: true}]", "weight must be in"),
        ("keys: [{name: a, key: k, max-requests: -1}]", "max-requests must be 0 or more"),
        ("keys: [{name: a, key: k}, {name: a, key: l}]", "has the name 'a' twice"),
        ("keys: [{name: a, key: k}, {name: b, key: k}]", "caller 2 has a key of another one"),
        ("keys: [", "is not YAML"),
        ("keys: [{name: a, key: k, key: l}]", "key is given twice"),
        ("keys: [{name: &n a, key: k}]", "anchors, tags and deep nesting"),
        ("keys: [{name: !!str a, key: k}]", "anchors, tags and deep nesting"),
        ("keys: " + 20 * "[" + 20 * "]", "anchors, tags and deep nesting"),
        ("keys: []\n---\nkeys: []", "more than one document"),
        ("- keys", "must be a mapping"),
    ],
)
def test_what_is_wrong_with_a_file_is_reported_without_its_keys(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", "\\(")):
        Keys("", written(tmp_path, text))


def test_a_file_that_is_missing_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read --api-key-file"):
        Keys("", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("given", ["key-0", "key-x", "", "x" * 10_000])
def test_the_work_for_a_key_does_not_depend_on_the_keys_that_there_are(given: str) -> None:
    def calls_of(keys: Keys) -> int:
        seen: list[str] = []
        sys.setprofile(lambda frame, event, what: seen.append(event))
        try:
            found = keys.find(digest(given))
        finally:
            sys.setprofile(None)
        assert (found is not None) == (given == "key-0")
        return len(seen)

    few, many = (Keys(" ".join(f"key-{n}" for n in range(count))) for count in (2, 10_000))
    assert calls_of(few) == calls_of(many)


def test_a_changed_file_is_read_next_to_the_event_loop(tmp_path: Path) -> None:
    clock, begun = VirtualClock(), list[Callable[[], None]]()
    path = written(tmp_path, "keys: [{name: a, key: old}]")
    keys = Keys("", path, clock, run=begun.append)
    Path(path).write_text("keys: [{name: a, key: new-key}]")
    clock.advance_to(LOOK_S + 0.1)
    assert keys.find(digest("old")) and not keys.find(digest("new-key"))
    (read,) = begun
    read()
    assert keys.find(digest("new-key")) and not keys.find(digest("old"))
