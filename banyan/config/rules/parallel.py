"""Rules about ranks, context parallelism, pipeline stages, nodes and Ray."""

from dataclasses import replace
from importlib.util import find_spec

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.draft_model import fits
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)


def let_ray_start_nodes(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Without --nnodes every rank except the first is a node, on any machine of the Ray cluster."""
    parallel = config.parallel
    if not parallel.by_ray:
        return config
    if find_spec("ray") is None:
        raise ConfigError("--use-ray needs the package ray", hint=f"run: {install_command('ray')}")
    if parallel.world == 1 and parallel.dp == 1:
        raise ConfigError(
            "--use-ray: there is one rank, and nothing for Ray to start",
            hint="raise --tp, --pp or --attn-cp-size, or leave it out",
        )
    if parallel.nodes > 1:
        return config
    return replace(config, parallel=replace(parallel, nodes=parallel.world, are_by_rank=True))


def check_ranks(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    tp, pp, ep = config.parallel.tp, config.parallel.pp, config.parallel.ep
    if pp > 1:
        _check_stages(config, model_config)
    if ep > 1:
        _check_experts(model_config, tp, ep)
    replicas = tp // config.parallel.attention_ranks
    is_cut = not config.parallel.dense_tp

    def serves(ranks: int) -> bool:
        return fits(model_config, ranks, ranks if ep > 1 else 1, replicas, is_cut)

    if serves(tp):
        return config
    counts = [
        n for n in range(replicas, replicas * model_config.num_heads + 1, replicas) if serves(n)
    ]
    parts = "context-parallel shards" if config.parallel.cp > 1 else "replicas"
    shares = f" (heads are divided within each of {replicas} {parts})" if replicas > 1 else ""
    raise ConfigError(
        f"--tensor-parallel-size {tp}{shares} does not divide the model's "
        f"{model_config.num_heads:,} "
        f"attention heads, {model_config.num_kv_heads:,} KV heads and "
        f"{model_config.intermediate_size:,} MLP "
        "columns"
        + (f" ({model_config.experts.inner:,} of an expert)" if model_config.experts else "")
        + (
            f", or {model_config.state.units(model_config.hidden_size):,} parts of a state"
            if model_config.state
            else ""
        ),
        hint=f"choose one of: {', '.join(map(str, counts))}",
    )


def _check_stages(config: Config, model_config: ModelConfig) -> None:
    pp = config.parallel.pp
    if pp > model_config.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {pp}: the model has {model_config.num_layers} layers",
            hint=f"choose at most {model_config.num_layers}",
        )


def _check_experts(model_config: ModelConfig, tp: int, ep: int) -> None:
    if model_config.experts is None:
        raise ConfigError(
            f"--expert-parallel-size {ep}: this model has no experts",
            hint="use --tensor-parallel-size alone",
        )
    if ep != tp:
        raise ConfigError(
            f"--expert-parallel-size {ep} with --tensor-parallel-size {tp}: experts are divided "
            "among all ranks or not at all",
            hint=f"choose 1 or {tp}",
        )
    if model_config.experts.count % ep:
        raise ConfigError(
            f"--expert-parallel-size {ep} does not divide the model's "
            f"{model_config.experts.count} experts",
            hint="leave it at 1, or choose a divisor for both",
        )


def set_pipeline_depth(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Keep one step in flight per stage, and some more waiting for the first stage."""
    pp, schedule = config.parallel.pp, config.schedule
    if pp == 1 or schedule.depth == 1:
        return config
    depth = pp + schedule.async_depth
    why = f"there are {pp} stages, and {schedule.async_depth} steps wait"
    log.debug("set %s=%s because %s", "steps in flight", depth, why)
    return replace(config, schedule=replace(schedule, depth=depth, token_gap=pp - 1))


def check_nodes(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    parallel = config.parallel
    if parallel.nodes == 1:
        if parallel.node:
            raise ConfigError(
                f"--node-rank {parallel.node}, but there is one node", hint="set --nnodes"
            )
        return config
    if parallel.node >= parallel.nodes:
        raise ConfigError(
            f"--node-rank {parallel.node} of {parallel.nodes} nodes",
            hint=f"number them 0 … {parallel.nodes - 1}",
        )
    if parallel.world % parallel.rank_nodes:
        raise ConfigError(
            f"{parallel.world} ranks cannot be spread evenly over {parallel.nodes} nodes",
            hint="choose a number of ranks that is a multiple of --nnodes",
        )
    if parallel.by_ray and not parallel.meeting:
        return config  # Ray finds an address
    host, _, port = parallel.meeting.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65534:
        raise ConfigError(
            f"--nnodes {parallel.nodes} needs --dist-init-addr host:port, "
            f"got {printable(repr(parallel.meeting), 80)}",
            hint="use an address of node 0 that the other nodes can reach, and a free port",
        )
    return config


def check_context_parallel(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """The rule of --attn-cp-size: set the number of shards. Runs before the rules that count ranks
    per head."""
    parallel = config.parallel
    if parallel.divides_prompts and parallel.cp == 1 and parallel.tp > 1:
        log.info("set attn-cp-size=%d because of %s", parallel.tp, "--enable-prefill-cp")
        parallel = replace(parallel, cp=parallel.tp)
        config = replace(config, parallel=parallel)
    if parallel.cp == 1:
        return config
    if parallel.tp % parallel.cp:
        raise ConfigError(
            f"--attn-cp-size {parallel.cp}: --tensor-parallel-size {parallel.tp} ranks cannot be "
            f"divided into {parallel.cp} equal shards",
            hint=f"choose --tensor-parallel-size as a multiple of {parallel.cp}",
        )
    if model_config.media is not None and model_config.media.is_mutual:
        raise ConfigError(
            f"--attn-cp-size {parallel.cp}: tokens of one picture see each other, and prompts are "
            "divided between ranks",
            hint="leave it at 1, or add --language-model-only",
        )
    return config
