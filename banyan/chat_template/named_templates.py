"""Templates that users name instead of the model's own: chat templates and fill-in-the-middle
forms.

A chat template is a name below, a Jinja file, a JSON file with "chat_template" or with the prefixes
of a ChatML-like conversation, or Jinja text.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable

log = logger(__name__)

MAX_FILE_BYTES = 1 << 20

_PROMPT = "{% if add_generation_prompt %}"

CHAT_TEMPLATES: Mapping[str, str] = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}" + _PROMPT + "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama-2": (
        "{% if messages[0].role == 'system' %}"
        "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama-3": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim"
        " + '<|eot_id|>' }}{% endfor %}"
        + _PROMPT
        + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n'"
        " + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        + _PROMPT
        + "{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}"
        "{% elif m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
        + _PROMPT
        + "{{ 'ASSISTANT:' }}{% endif %}"
    ),
}

_CHATML_LIKE = (
    "{% set prefixes = __PREFIXES__ %}{% for m in messages %}"
    "{{ prefixes[m.role] + '\n' + m.content + __SEP__ + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ prefixes['assistant'] + '\n' }}{% endif %}"
)


@dataclass(frozen=True)
class FillIn:
    """How a fill-in-the-middle model expects the text before and after the gap."""

    before: str
    between: str
    after: str

    def prompt(self, prefix: str, suffix: str) -> str:
        return self.before + prefix + self.between + suffix + self.after


FILL_IN_FORMS: Mapping[str, FillIn] = {
    "deepseek_coder": FillIn("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "star_coder": FillIn("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "qwen_coder": FillIn("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
}


def template_source(given: str) -> str | None:
    """The Jinja text of --chat-template; None when it is "".

    Raises:
        ConfigError: it is neither a name, nor a file that can be read, nor Jinja text.
    """
    if not given:
        return None
    if given in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[given]
    if given.endswith(".json"):
        return _from_json("--chat-template", given)
    if os.path.exists(given):
        return _text_of("--chat-template", given)
    if "{" in given:
        return given
    raise ConfigError(
        f"--chat-template {printable(given, 80)!r} is neither a file nor a template",
        hint=f"Name a Jinja file or one of: {', '.join(CHAT_TEMPLATES)}",
    )


def fill_in_form(given: str) -> FillIn | None:
    """The form that --completion-template names; None when it is "". Raises ConfigError as
    above."""
    if not given:
        return None
    if given in FILL_IN_FORMS:
        return FILL_IN_FORMS[given]
    flag = "--completion-template"
    if not os.path.isfile(given):
        raise ConfigError(
            f"{flag} {printable(given, 80)!r} is neither a file nor a known name",
            hint=f"Name a JSON file or one of: {', '.join(FILL_IN_FORMS)}",
        )
    fields = _json_of(flag, given)
    begin, middle, end = (
        _text_field(flag, fields, f"fim_{part}_token") for part in ("begin", "middle", "end")
    )
    match fields.get("fim_position"):
        case "MIDDLE":
            return FillIn(begin, middle, end)
        case "END":
            return FillIn(begin, end, middle)
    raise ConfigError(f"{flag}: fim_position must be MIDDLE or END")


def _from_json(flag: str, path: str) -> str:
    fields = _json_of(flag, path)
    if isinstance(fields.get("chat_template"), str):
        return str(fields["chat_template"])
    if fields.get("sep_style", "CHATML") != "CHATML":
        raise ConfigError(
            f"{flag}: sep_style {printable(str(fields['sep_style']), 40)!r} is not available",
            hint="Write the template in Jinja",
        )
    roles = ("system", "user", "assistant")
    prefixes = {role: _text_field(flag, fields, role) for role in roles}
    if fields.get("stop_str"):
        log.warning("%s: stop_str is not used; the model's own end tokens end its answers", flag)
    return _CHATML_LIKE.replace("__PREFIXES__", json.dumps(prefixes)).replace(
        "__SEP__", json.dumps(_text_field(flag, fields, "sep"))
    )


def _json_of(flag: str, path: str) -> Mapping[str, object]:
    try:
        fields = json.loads(_text_of(flag, path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: {printable(path, 80)} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{flag}: {printable(path, 80)} must hold a JSON object")
    return fields


def _text_field(flag: str, fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{flag}: {name} must be a text")
    return value


def _text_of(flag: str, path: str) -> str:
    try:
        if os.path.getsize(path) > MAX_FILE_BYTES:
            raise ConfigError(f"{flag}: {path} is larger than {MAX_FILE_BYTES} bytes")
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {printable(path, 80)} cannot be read: {error}") from None
