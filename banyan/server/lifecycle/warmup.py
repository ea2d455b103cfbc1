"""Warm-ups: trial requests before the server reports that it is ready (--warmups).

A warm-up sends the engine a request of a kind that takes longer the first time. Installed packages
add warm-ups as entry points of the group `banyan.warmups`.
"""

from banyan.base.errors import ConfigError
from banyan.base.ids import RequestId, fresh_id
from banyan.base.log import logger
from banyan.config.hooks import read_prompt
from banyan.config.schema import Config
from banyan.messages.requests import REGEX, Constraint
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.generation import collect
from banyan.requests.request_spec import spec_of
from banyan.server.admin.health import generate_one
from banyan.server.lifecycle import WARMUPS, named_warmups
from banyan.server.state import Service

log = logger(__name__)


async def warm_up(service: Service, config: Config) -> None:
    """Run the chosen warm-ups; RequestError if one fails."""
    if config.model.dump_input:
        await _run_dump_input(service, config)
    if not config.server.skip_warmup:
        await generate_one(service)
    for name in named_warmups(config):
        await WARMUPS.load(name)(service, config)
        log.info("warm-up done name=%s", name)


async def _run_dump_input(service: Service, config: Config) -> None:
    """Run the prompt of --debug-tensor-dump-input-file in one step.

    It is the first request, so that no token of it is cached.
    """
    prompt, chunk = read_prompt(config.model.dump_input), config.schedule.chunk_tokens
    if 0 < chunk < len(prompt):
        raise ConfigError(
            f"--debug-tensor-dump-input-file has {len(prompt)} tokens, and a step takes {chunk}",
            hint="raise --chunked-prefill-size",
        )
    await _generate(service, prompt)


async def fill_a_step(service: Service, config: Config) -> None:
    """Send a prompt that fills a step, or the longest one that the model allows."""
    schedule, limits = config.schedule, service.limits
    step = schedule.chunk_tokens if schedule.chunk_tokens > 0 else schedule.prefill_tokens
    longest = min(limits.context_length, limits.max_request_tokens or limits.context_length) - 1
    await _generate(service, [0] * max(1, min(step, longest)))


async def compile_a_constraint(service: Service, config: Config) -> None:
    """Start the process that compiles constraints; it reads the vocabulary."""
    await _generate(service, [0], Constraint(REGEX, "[0-9]").encode())


async def _generate(service: Service, prompt: list[int], grammar: str = "") -> None:
    pool = service.limits.is_embedding
    sampling = SamplingParams(max_new_tokens=0 if pool else 1, temperature=0.0)
    id = RequestId(f"warm-up-{fresh_id()}")
    request = spec_of(id, prompt, sampling, grammar=grammar, pool=pool, route="warm-up")
    await collect(service.generator, [request])
