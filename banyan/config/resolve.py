"""From the flags to a Config that can be served: fetch the model, then apply rules in order.

Each rule checks the Config, or fills in values that the flags left open and logs the reason. The
result does not change any more, except for the device's defaults (`config/defaults.py`).
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.util import find_spec

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.delete_checkpoint import Moment, check_deletion
from banyan.config.env import Environment
from banyan.config.hooks import check_forward_hooks
from banyan.config.observability import check_histogram_buckets
from banyan.config.rules import cache, execution, model, parallel
from banyan.config.rules.conflicts import refuse_conflicts
from banyan.config.rules.parallel import check_context_parallel
from banyan.config.schema import Config
from banyan.config.speculation import plan_drafts
from banyan.disaggregation.rules import check_disaggregation
from banyan.dp_attention.rules import check_dense_tp, check_dp_attention
from banyan.formats.shards import check_weight_files
from banyan.hub.catalogue import recognise
from banyan.hub.sources import fetch
from banyan.lora.rules import plan_lora
from banyan.model_config.checkpoint import WITHOUT_FILES, read_model_config
from banyan.model_config.draft_model import find_draft_model
from banyan.model_config.from_hf import read_pooling
from banyan.model_config.heavy_channels import check_sparsity
from banyan.model_config.model_config import ModelConfig
from banyan.model_config.quantization import check_kv_scales
from banyan.moe.rules import check_experts, choose_expert_parallel

log = logger(__name__)


def prepare(config: Config, environment: Environment) -> tuple[Config, ModelConfig, dict[str, str]]:
    """Fetch the model, read its configuration and resolve the flags. Loads no weights.

    Returns:
        the resolved Config, the ModelConfig, and for each schema field that a rule has set the name
        of the rule.

    Raises:
        ConfigError, ModelError: names the flag, or the key of the checkpoint.
    """
    began = Moment.now()
    refuse_conflicts(config, None, environment)  # before a model is fetched
    if config.model.implementation == "transformers":
        _check_transformers(config)
    config, model_config = find_model(config, environment)
    check_deletion(config, model_config, began)
    has_files = config.model.load_format not in WITHOUT_FILES
    reads_mapped = has_files and not config.model.disable_mmap
    if model_config.format == "safetensors" and reads_mapped:
        check_weight_files(model_config.path)
    located = replace(config, model=replace(config.model, path=model_config.path))
    located = find_draft_model(located, model_config, environment, model.check_quantization)
    resolved, rules = resolve_with_origins(located, model_config, environment)
    return resolved, model_config, rules


def find_model(config: Config, environment: Environment) -> tuple[Config, ModelConfig]:
    """Fetch the model that the flags name, if necessary, and read its configuration."""
    path = fetch(config.model, environment)
    config = set_embedding(config, path)
    is_foreign = config.model.implementation == "transformers"
    model_config = read_model_config(
        path,
        config.model.load_format,
        config.model.overrides,
        is_foreign=is_foreign,
        with_media=not config.media.text_only,
        config_file=config.model.config_file,
    )
    if config.media.is_enabled and (model_config.media is None or config.media.text_only):
        raise ConfigError(
            f"--enable-multimodal: {printable(config.model.source)} has no tower for pictures that "
            "runs here",
            hint="leave it out, or choose a model of docs/multimodal.md",
        )
    if config.model.is_embedding and model_config.pooling is None:
        model_config = replace(
            model_config, pooling=read_pooling(model_config), tie_embeddings=False
        )
    return config, model_config


def set_embedding(config: Config, path: str) -> Config:
    """Set --is-embedding for embedding models of the catalogue; their files may not say so."""
    entry = recognise(config.model.source, path)
    if entry is None or entry.kind != "embedding" or config.model.is_embedding:
        return config
    log.debug("set is-embedding=True because %s is an embedding model", entry.name)
    return replace(config, model=replace(config.model, is_embedding=True))


def _check_transformers(config: Config) -> None:
    flag = "--model-impl transformers"
    if config.model.load_format not in ("auto", "safetensors"):
        raise ConfigError(
            f"{flag} cannot load the format {config.model.load_format}",
            hint="leave --load-format at auto",
        )
    if config.parallel.tp * config.parallel.pp > 1:
        raise ConfigError(
            f"{flag} cannot share a model between ranks", hint="use --tp 1 and --pp 1"
        )
    if find_spec("transformers") is None:
        raise ConfigError(
            f"{flag} needs the package transformers", hint="run: pip install transformers"
        )


RULES = (
    model.choose_served_name,
    model.find_tokenizer,
    model.check_journal,
    model.limit_context,
    model.choose_load_format,
    model.choose_loader_threads,
    model.check_quantization,
    model.check_torchao,
    execution.choose_chunk,
    execution.limit_prefill,
    parallel.let_ray_start_nodes,
    check_dp_attention,
    check_context_parallel,
    check_dense_tp,
    choose_expert_parallel,
    refuse_conflicts,
    parallel.check_ranks,
    parallel.set_pipeline_depth,
    parallel.check_nodes,
    model.use_demo_sampling,
    model.use_plain_demo_template,
    model.use_recommended_sampling,
    model.choose_grammar_backend,
    cache.check_states,
    cache.check_eviction,
    cache.check_hicache,
    check_disaggregation,
    check_histogram_buckets,
    execution.check_offload,
    cache.check_windows,
    check_kv_scales,
    check_sparsity,
    model.check_score_delimiter,
    model.check_json_white_space,
    execution.choose_attention,
    execution.choose_lora_kernels,
    execution.choose_sampling,
    check_forward_hooks,
    plan_drafts,
    execution.choose_multi_step,
    plan_lora,
    check_experts,
)
"""Applied from top to bottom. A rule that needs the result of another comes after it."""


def resolve(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """Apply every rule to `config`."""
    return resolve_with_origins(config, model_config, environment)[0]


def resolve_with_origins(
    config: Config, model_config: ModelConfig, environment: Environment
) -> tuple[Config, dict[str, str]]:
    """Apply every rule; also return the rule's name for each schema field that a rule has set."""
    origins: dict[str, str] = {}
    for rule in RULES:
        before, config = config, rule(config, model_config, environment)
        origins |= dict.fromkeys(_changed_fields(before, config), rule.__name__)
    by_rule = {name: f"rule {rule}" for name, rule in origins.items()}
    all_origins = {**config.observe.origins, **by_rule}
    return replace(config, observe=replace(config.observe, origins=all_origins)), origins


def _changed_fields(before: Config, after: Config) -> Iterator[str]:
    for part in fields(Config):
        old, new = getattr(before, part.name), getattr(after, part.name)
        for each in fields(old) if old is not new else ():
            if getattr(old, each.name) != getattr(new, each.name):
                yield f"{part.name}.{each.name}"
