"""Request limits and default sampling parameters, from the Config and the loaded model."""

import random
from functools import partial

from banyan.base.errors import ConfigError, RequestError
from banyan.config.schema import Config, ServerConfig
from banyan.media.preparation import MediaService
from banyan.messages.events import Ready
from banyan.messages.sampling_params import LOGIT_PROCESSORS
from banyan.model_config.media import is_cross
from banyan.model_config.model_config import ModelConfig
from banyan.requests.sampling_params import (
    NATIVE_DEFAULTS,
    SEED_BITS,
    DrawSeed,
    Limits,
    fresh_seed,
    parse_sampling,
)
from banyan.tokenizer.tokenizer import Tokenizer


def seed_source(server: ServerConfig) -> DrawSeed:
    """Source of seeds for requests without one; reproducible under --random-seed."""
    if server.random_seed < 0:
        return fresh_seed
    source = random.Random(server.random_seed)
    return lambda: source.getrandbits(SEED_BITS)


def limits_of(
    config: Config, model_config: ModelConfig, ready: Ready, tokenizer: Tokenizer | None
) -> Limits:
    """Limits of a request for this model on an engine that has reported `ready`."""
    return Limits(
        context_length=config.model.context_length or model_config.context_length,
        vocab_size=model_config.vocab_size,
        eos_ids=tuple(
            dict.fromkeys([*model_config.eos_ids, *(tokenizer.eos_ids if tokenizer else ())])
        ),
        max_request_tokens=ready.max_request_tokens,
        auto_truncate=config.server.allow_auto_truncate,
        has_tokenizer=tokenizer is not None,
        is_embedding=model_config.pooling is not None,
        hidden_size=model_config.hidden_size,
        hidden_states=config.server.hidden_states,
        expert_choices=_expert_choices(config, model_config),
        processors=tuple(LOGIT_PROCESSORS.names()) if config.server.logit_processors else None,
        max_new_tokens=config.server.max_new_tokens,
        batch_encode=config.server.batch_encode,
        takes_embeds=config.model.implementation != "transformers",
        embedding_scale=model_config.embedding_scale,
        role=config.handoff.role,
        has_rooms=config.handoff.transfer != "fake",
        media_ids=() if model_config.media is None else model_config.media.placeholders,
        is_transcriber=is_cross(model_config.media),
        fakes_prompts=config.handoff.fakes_prompts and config.handoff.mode == "decode",
        last_token=None if tokenizer is None else partial(_last_token, tokenizer),
    )


def open_media(
    config: Config, model_config: ModelConfig, tokenizer: Tokenizer | None, limits: Limits
) -> MediaService | None:
    """What prepares the pictures of requests; None if the model takes none.

    Raises:
        ConfigError: --mm-process-config does not fit the model.
    """
    if model_config.media is None or tokenizer is None or limits.is_embedding:
        return None
    longest = min(limits.context_length, limits.total)
    return MediaService(model_config.media, config.media, tokenizer, longest)


def _last_token(tokenizer: Tokenizer, text: str) -> int:
    return tokenizer.encode(f"a{text}", add_special_tokens=False, parse_special=False)[-1]


def _expert_choices(config: Config, model_config: ModelConfig) -> int:
    if model_config.experts is None or not config.experts.are_returned:
        return 0
    return model_config.num_layers * model_config.experts.per_token


def check_preferred(server: ServerConfig) -> None:
    """Refuse --preferred-sampling-params that would be invalid in a request.

    Raises:
        ConfigError: names the parameter and what is wrong with it.
    """
    processors = tuple(LOGIT_PROCESSORS.names()) if server.logit_processors else None
    limits = Limits(context_length=1 << 40, vocab_size=1 << 31, processors=processors)
    try:
        parse_sampling(server.preferred_sampling, prompt_len=1, limits=limits)
    except RequestError as error:
        raise ConfigError(f"--preferred-sampling-params: {error.text}", hint=error.hint) from None


def sampling_defaults(server: ServerConfig) -> dict[str, object]:
    """Sampling parameters of requests that leave them out, on /generate and offline."""
    given = server.preferred_sampling
    return {**NATIVE_DEFAULTS, "stream_interval": server.stream_interval, **given}
