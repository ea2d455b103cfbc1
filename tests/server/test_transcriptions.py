"""/v1/audio: what reaches the engine, the forms of the answer, and what is refused."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from banyan.chat_template.template import load_chat
from banyan.config.schema import MediaOptions
from banyan.media.preparation import MediaService
from banyan.messages.spans import check_spans
from banyan.model_config.media import MediaConfig, SoundConfig, SoundTowerConfig
from banyan.server.openai.audio import SpokenSegment, subtitles
from tests.server.fakes import SPECIAL, Site
from tests.support.pictures import byte_tokenizer
from tests.support.sound import WHISPER_TOKENS, samples, wav

PATH = "/v1/audio/transcriptions"
FILE = wav(samples(1.0))
TOWER = SoundTowerConfig(1, 8, 1, 8, 32, bands=80, window=200, merger="cross", layers=2)


class Ears:
    """A site whose model transcribes."""

    def __init__(self, site: Site) -> None:
        tokenizer = byte_tokenizer(*SPECIAL, *WHISPER_TOKENS)
        self.id = {text: tokenizer.token_to_id(text) for text in WHISPER_TOKENS}
        sound = SoundConfig(
            self.id["<|startoftranscript|>"],
            TOWER,
            max_windows=3,
            is_cross=True,
            is_multilingual=True,
            suppressed_first=(7,),
        )
        self.media = MediaService(
            MediaConfig(sound=sound), MediaOptions(timeout_s=0), tokenizer, 4096
        )
        limits = replace(site.service.limits, vocab_size=256 + len(SPECIAL) + len(WHISPER_TOKENS))
        site.generator.limits = limits
        site.service = replace(
            site.service, tokenizer=tokenizer, media=self.media, limits=limits, chat=None
        )
        site.state.service = site.service
        self.site = site

    def post(self, path: str = PATH, file: bytes = FILE, **fields: object) -> httpx.Response:
        return self.site.http.post(path, files={"file": ("a.wav", file)}, data=fields)


@pytest.fixture(scope="module")
def ears() -> Iterator[Ears]:
    site = Site()
    found = Ears(site)
    with site.serving():
        yield found
    found.media.close()


@pytest.mark.parametrize(
    ("path", "task"), [(PATH, "transcribe"), ("/v1/audio/translations", "translate")]
)
def test_a_file_reaches_the_engine_as_a_content_that_the_first_token_reads(ears, path, task):
    answer = ears.post(path, language="en")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"text": "Hello", "usage": {"type": "duration", "seconds": 1.0}}
    (asked,) = ears.site.generator.asked
    ears.site.generator.asked.clear()
    message = asked.message
    check_spans(message.tokens, message.spans, message.contents)
    names = ("<|startoftranscript|>", "<|en|>", f"<|{task}|>", "<|notimestamps|>")
    assert asked.prompt == [ears.id[name] for name in names]
    assert (message.spans[0].first, message.spans[0].token) == (0, asked.prompt[0])
    assert message.contents[0].grid == (1, 80, 200) and message.contents[0].rows == 100
    rules = json.loads(message.sampling.processor_params)
    assert message.sampling.is_greedy and rules["suppress_first"] == [7]


def test_without_a_language_the_model_chooses_among_those_that_it_has(ears):
    assert ears.post().status_code == 200
    first, second = ears.site.generator.asked
    ears.site.generator.asked.clear()
    only = [ears.id["<|en|>"], ears.id["<|de|>"]]
    assert json.loads(first.message.sampling.processor_params) == {"only": only}
    assert first.sampling.max_new_tokens == 1
    assert first.message.contents[0].digest == second.message.contents[0].digest


def test_a_long_file_is_several_sequences_and_one_text(ears):
    answer = ears.post(file=wav(samples(4.5)), language="de", response_format="text", prompt="Hi")
    assert answer.text == "HelloHelloHello\n"
    asked = ears.site.generator.asked
    assert len({one.message.contents[0].digest for one in asked}) == 3
    assert all(one.prompt[0] == ears.id["<|startofprev|>"] for one in asked)
    assert {len(one.prompt) for one in asked} == {1 + len(" Hi") + 4}
    asked.clear()


def test_a_stream_sends_the_text_as_it_comes(ears):
    lines = ears.post(language="en", stream="true").text.split("\n\n")
    ears.site.generator.asked.clear()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [e.get("delta") for e in events] == ["Hel", "lo", None]
    assert events[-1]["type"] == "transcript.text.done" and events[-1]["text"] == "Hello"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"file": b"no sound"}, "no WAV file"),
        ({"file": wav(samples(7.0))}, "limit 6 s"),
        ({"language": "xx"}, "not one of the model's"),
        ({"language": "x" * 10_000}, "not one of the model's"),
        ({"response_format": "html"}, "response_format must be one of"),
        ({"temperature": "warm"}, "temperature must be a number"),
        ({"temperature": "nan"}, "temperature must be"),
        ({"temperature": str(2**64)}, "temperature must be"),
        ({"stream": "perhaps"}, "stream must be"),
        ({"stream": "true", "response_format": "srt"}, "no response_format srt"),
        ({"timestamp_granularities[]": "word"}, "only segment"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(ears, fields, words):
    answer = ears.post(**fields)
    assert 400 <= answer.status_code < 500 and words in answer.text, answer.text
    assert not ears.site.generator.asked


def test_a_model_without_ears_names_those_that_have_them():
    site = Site()
    with site.serving():
        answer = site.http.post(PATH, files={"file": ("a.wav", FILE)})
        assert answer.status_code == 400 and "does not transcribe" in answer.text


def test_subtitles_have_their_clocks_and_no_arrow_in_the_text():
    found = [SpokenSegment(0.0, 1.5, " One", []), SpokenSegment(3725.25, 3726.0, " a --> b", [])]
    assert subtitles(found, is_vtt=False) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne\n\n2\n01:02:05,250 --> 01:02:06,000\na -> b\n"
    )
    assert subtitles(found, is_vtt=True).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne")


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'audio' %}<|AUDIO|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
BASE64 = base64.b64encode(FILE).decode()
SOUND = {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}


def test_sounds_of_a_chat_and_of_generate_reach_the_engine_as_spans():
    site, tokenizer = Site(), byte_tokenizer(*SPECIAL, "<|AUDIO|>")
    token = tokenizer.token_to_id("<|AUDIO|>")
    tower = SoundTowerConfig(1, 8, 1, 8, 8, window=200, pool=2)
    media = MediaService(
        MediaConfig(sound=SoundConfig(token, tower, is_whole=False)),
        MediaOptions(timeout_s=0, limits={"audio": 2}),
        tokenizer,
        4096,
    )
    limits = replace(site.service.limits, vocab_size=token + 1, media_ids=(token,))
    site.generator.limits = limits
    chat = load_chat(tokenizer, CHAT_TEMPLATE)
    site.state.service = replace(
        site.service, tokenizer=tokenizer, media=media, limits=limits, chat=chat
    )

    def post(*parts: object, path: str = "/v1/chat/completions", **body: object) -> httpx.Response:
        messages = {"messages": [{"role": "user", "content": list(parts)}]} if parts else {}
        return site.http.post(path, json={**messages, **body})

    text = {"type": "text", "text": "<|AUDIO|>?"}
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{BASE64}"}}
    several = [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(FILE + bytes(n)).decode()}}
        for n in (2, 4, 6)
    ]
    picture = {"type": "image_url", "image_url": {"url": "https://a.org/b.png"}}
    with site.serving():
        for answer in (
            post(SOUND, text),
            post(url, text),
            post(path="/generate", text="<|AUDIO|>a", audio_data=BASE64),
        ):
            assert answer.status_code == 200, answer.text
            asked = site.generator.asked.pop()
            check_spans(asked.message.tokens, asked.message.spans, asked.message.contents)
            (span,) = asked.message.spans
            assert (span.first, span.count, span.kind) == (0, 25, "mel")
            assert asked.prompt[:25] == [token] * 25 and token not in asked.prompt[25:]
        for answer, words in (
            (post(picture), "takes no pictures"),
            (post(*several), "may have 2 sounds"),
            (post({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a"}}), "public"),
            (post(path="/generate", text="a", audio_data=BASE64), "0 places for sounds"),
            (post(path="/generate", text="a", image_data=BASE64), "takes no pictures"),
        ):
            assert answer.status_code == 400 and words in answer.text, answer.text
    media.close()
