"""Pictures over every API reach the engine as spans; what is hostile or not taken is refused."""

import base64
from collections.abc import Iterator

import pytest

from banyan.base.errors import RequestError
from banyan.requests.admission import check_spec
from tests.server.fakes import Eyes, Site
from tests.support.pictures import (
    PAD,
    data_url,
    host,
    hostile_files,
    png,
)

CHAT = "/v1/chat/completions"
PICTURE = png(60, 40)
URL = data_url(PICTURE)
BASE64 = base64.b64encode(PICTURE).decode()


@pytest.fixture(scope="module")
def eyes() -> Iterator[Eyes]:
    site = Site()
    found = Eyes(site, domains=("127.0.0.1",))
    with site.serving():
        yield found
    found.media.close()


def chat(*parts: object, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(parts)}], **more}


TEXT = {"type": "text", "text": "what?"}
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(IMAGE, TEXT)),
        (CHAT, chat({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}, TEXT)),
        (CHAT, chat({"type": "image_url", "image_url": URL}, TEXT)),
        (CHAT, chat({"type": "image", "image": URL}, TEXT)),
        (CHAT, chat({"type": "image_url", "image_url": {"url": BASE64}}, TEXT)),
        (CHAT, chat({"type": "file", "file": {"file_data": URL, "filename": "a.png"}}, TEXT)),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": "go"},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "image_url": URL}],
                    },
                ]
            },
        ),
        (
            "/v1/messages",
            {
                "model": "tiny",
                "max_tokens": 9,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": BASE64,
                                },
                            },
                            TEXT,
                        ],
                    }
                ],
            },
        ),
        (
            "/v1/messages",
            {
                "model": "tiny",
                "max_tokens": 9,
                "messages": [
                    {"role": "user", "content": "go"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c",
                                "is_error": True,
                                "content": [
                                    {"type": "text", "text": "look"},
                                    {"type": "image", "source": {"type": "url", "url": URL}},
                                ],
                            }
                        ],
                    },
                ],
            },
        ),
        (
            "/v1/messages",
            {
                "model": "tiny",
                "max_tokens": 9,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "document",
                                "source": {
                                    "type": "content",
                                    "content": [
                                        {"type": "text", "text": "page 1"},
                                        {"type": "image", "source": {"type": "url", "url": URL}},
                                    ],
                                },
                            }
                        ],
                    }
                ],
            },
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "what?", "images": [BASE64]}]}),
        ("/api/generate", {"prompt": "what?", "images": [BASE64]}),
        ("/generate", {"text": f"a {PAD} b", "image_data": URL}),
        ("/generate", {"text": f"a {PAD} b", "image_data": BASE64}),
        ("/generate", {"text": f"a {PAD} b", "image_data": [{"url": URL}]}),
        ("/generate", {"text": f"a {PAD} b", "image_data": [[{"image": URL}]]}),
        ("/generate", {"text": [f"a {PAD} b"], "image_data": [URL]}),
        ("/generate", {"text": [f"a {PAD} b"], "image_data": [[URL]]}),
        ("/generate", {"input_ids": [5, 261, 6], "image_data": [URL]}),
    ],
)
def test_a_picture_of_any_api_reaches_the_engine(
    eyes: Eyes, path: str, body: dict[str, object]
) -> None:
    found = eyes.asked(path, {"model": "tiny", "stream": False, **body})
    (span,) = found.message.spans
    (content,) = found.message.contents
    assert span.count == content.rows == 6 and content.grid == (1, 4, 6)
    assert found.prompt[span.first : span.end] == [eyes.pad] * 6
    assert len(content.data) == 24 * 3 * 2 * 14 * 14


def test_usage_counts_the_places_of_pictures(eyes: Eyes) -> None:
    def tokens(*parts: object) -> int:
        answer = eyes.post(CHAT, chat(*parts)).json()
        return answer["usage"]["prompt_tokens"]

    without = tokens(TEXT)
    assert tokens(IMAGE, TEXT) == without + len("[]") + 6
    assert tokens(IMAGE, TEXT, IMAGE) == without + 2 * len("[]") + 12
    body = chat(IMAGE, TEXT, model="tiny", max_tokens=1)
    listed = eyes.post(
        "/v1/messages/count_tokens",
        {
            "model": "tiny",
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": URL}}, TEXT],
                }
            ],
        },
    ).json()["input_tokens"]
    assert listed == eyes.post(CHAT, body).json()["usage"]["prompt_tokens"]
    shown = eyes.post("/tokenize", {"messages": chat(IMAGE, TEXT)["messages"]}).json()
    assert shown["count"] == listed and shown["tokens"].count(eyes.pad) == 6
    eyes.site.generator.asked.clear()


def test_several_prompts_have_their_own_pictures(eyes: Eyes) -> None:
    other = data_url(png(60, 40, (1, 2, 3)))
    body = {"text": [f"{PAD}", f"{PAD} {PAD}", "none"], "image_data": [URL, [other, URL], None]}
    assert eyes.post("/generate", body).status_code == 200
    found = [eyes.site.generator.asked.pop(0) for _ in range(3)]
    digests = [[span.digest for span in spec.message.spans] for spec in found]
    assert [len(listed) for listed in digests] == [1, 2, 0]
    assert digests[0][0] == digests[1][1] != digests[1][0]


def test_text_that_looks_like_a_placeholder_stays_text(eyes: Eyes) -> None:
    typed = {"type": "text", "text": f"{PAD} and {PAD}"}
    found = eyes.asked(CHAT, chat(typed, IMAGE))
    (span,) = found.message.spans
    assert found.prompt.count(eyes.pad) == 6 and span.first > len(typed["text"])
    found = eyes.asked(CHAT, chat(typed))
    assert not found.message.spans and eyes.pad not in found.prompt


def test_a_placeholder_without_a_picture_is_refused(eyes: Eyes) -> None:
    limits = eyes.site.service.limits
    for body in ({"text": f"a {PAD}"}, {"input_ids": [1, eyes.pad]}):
        spec = eyes.asked("/generate", body)
        with pytest.raises(RequestError, match="no picture came with it"):
            check_spec(spec, limits, True)
    check_spec(eyes.asked("/generate", {"text": PAD, "image_data": URL}), limits, True)


def test_low_detail_has_fewer_places(eyes: Eyes) -> None:
    large = data_url(png(700, 600))
    part = {"type": "image_url", "image_url": {"url": large}}
    small = {"type": "image_url", "image_url": {"url": large, "max_pixels": 50_000}}
    counts = [eyes.asked(CHAT, chat(p, TEXT)).message.spans[0].count for p in (part, small)]
    assert counts[1] < counts[0]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}, "no sound"),
        ({"type": "audio_url", "audio_url": {"url": "https://a.org/b.mp3"}}, "no sound"),
        ({"type": "video_url", "video_url": {"url": "https://a.org/b.mp4"}}, "no video"),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERg=="}}, "pictu"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "file_id"),
        ({"type": "image_url", "image_url": {"url": ""}}, "needs"),
        ({"type": "image_url"}, "needs image_url"),
        ({"type": "image_url", "image_url": 3}, "needs image_url"),
        ({"type": "image_url", "image_url": {"url": "not a url"}}, "neither a URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, "no ','"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "empty"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "broken"),
        (
            {"type": "image_url", "image_url": {"url": data_url(URL.encode(), "text/plain")}},
            "no picture",
        ),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "most"}}, "detail must be"),
        ({"type": "image_url", "image_url": {"url": URL, "max_pixels": 0}}, "max_pixels must be"),
        ({"type": "image_url", "image_url": {"url": URL, "max_pixels": 2**64}}, "max_pixels must"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "not read"),
        ({"type": "image_url", "image_url": {"url": "http://10.0.0.1/a"}}, "does not name"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    eyes: Eyes, part: dict[str, object], why: str
) -> None:
    assert why in eyes.refusal(CHAT, chat(part, TEXT))


PIXEL = {"format": "processor_output", "pixel_values": [[0.5]]}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"format": "lossless"}, "'lossless' is not taken"),
        ({"format": "precomputed_embedding", "feature": "abc"}, "rows of numbers"),
        ({"format": "precomputed_embedding", "feature": [[1.0], [1.0, 2.0]]}, "rows of numbers"),
        ({"format": "precomputed_embedding", "feature": [[1.0] * 7]}, "rows of 7 numbers"),
        ({"format": "precomputed_embedding", "feature": [[2.0**63 * 2.0**70] * 7]}, "not finite"),
        ({"format": "processor_output", "pixel_values": [[0.5] * 7]}, "image_grid_thw must be"),
        (
            {
                "format": "processor_output",
                "pixel_values": [[0.5]],
                "image_grid_thw": [1, 2**31, 2],
            },
            "image_grid_thw must be",
        ),
        (
            {"format": "processor_output", "pixel_values": [[0.5]], "image_grid_thw": [1, 2, 2]},
            "pixel_values of shape [1, 1]",
        ),
    ],
)
def test_features_that_do_not_fit_are_refused_by_name(
    eyes: Eyes, given: dict[str, object], why: str
) -> None:
    body = {"text": "<|image_pad|>", "image_data": given}
    assert why in eyes.refusal("/generate", body)


@pytest.mark.parametrize("name", hostile_files())
def test_a_hostile_file_is_one_clear_refusal(eyes: Eyes, name: str) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(hostile_files()[name])}}
    text = eyes.refusal(CHAT, chat(IMAGE, part, TEXT))
    assert "picture" in text and len(text) < 700


def test_ten_thousand_parts_are_refused_unread(eyes: Eyes) -> None:
    small = {"type": "image_url", "image_url": {"url": data_url(b"x")}}
    assert "no picture" in eyes.refusal(CHAT, chat(*[small] * 10_000))  # one, 10,000 times
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(b"%d" % i)}} for i in range(10_000)
    ]
    assert "10,000" in eyes.refusal(CHAT, chat(*parts))


def test_hostile_hosts_are_refused_while_others_are_served(eyes: Eyes) -> None:
    with host(good=PICTURE) as site:
        site.redirects["/inside"] = "http://169.254.169.254/latest/meta-data/"
        for path in ("inside", "garbage", "short", "missing"):
            url = f"{site.url}/{path}"
            text = eyes.refusal(CHAT, chat({"type": "image_url", "image_url": {"url": url}}))
            assert "cannot be fetched" in text
        good = {"type": "image_url", "image_url": {"url": f"{site.url}/good"}}
        assert eyes.asked(CHAT, chat(good)).message.contents[0].rows == 6
    assert eyes.site.http.get("/livez").status_code == 200


def test_a_model_without_eyes_refuses_pictures_by_name() -> None:
    site = Site()
    with site.serving():
        answer = site.http.post(CHAT, json=chat(IMAGE, TEXT))
        assert answer.status_code == 400 and "image_url" in answer.text
        answer = site.http.post("/generate", json={"text": "a", "image_data": URL})
        assert answer.status_code == 400 and "takes no pictures" in answer.text
        assert not site.generator.asked
