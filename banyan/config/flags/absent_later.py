"""As `absent.py`, for flags that only later SGLang releases have; these are never abbreviated."""

from banyan.config.flags.flag import (
    INT,
    Absent,
    Feature,
    floats,
    ints,
    jsons,
    switches,
    texts,
    words,
)

LATER_FEATURES = (
    Feature(
        "processes start and collect garbage as Python does",
        asks=(
            *switches("use-ray"),
            *words("gc-threshold"),
            *ints("gated-launch-port"),
        ),
    ),
    Feature(
        "tokens are not drafted",
        asks=(
            *texts("uno-lora-path", "spec-trace-dir", "decoupled-spec-bind-endpoint"),
            *switches(
                "speculative-use-rejection-sampling",
                "speculative-use-block-verification",
                "enable-multi-layer-eagle",
                "speculative-adaptive",
            ),
            *words("decoupled-spec-connect-endpoints"),
        ),
        tunes=(
            *ints(
                "decoupled-spec-rank",
                "speculative-dflash-block-size",
                "speculative-domino-candidate-pool-size",
                "speculative-dspark-block-size",
                "speculative-draft-window-size",
                "speculative-draft-sink-size",
                "speculative-ngram-external-sam-budget",
                "speculative-ngram-external-corpus-max-tokens",
            ),
            *texts(
                "decoupled-spec-role",
                "speculative-dspark-sps-table-path",
                "speculative-dspark-confidence-sts-path",
                "speculative-dsa-topk-backend",
                "speculative-draft-kv-cache-dtype",
                "speculative-adaptive-config",
                "speculative-ngram-external-corpus-path",
            ),
            *switches(
                "speculative-dspark-align-verify-tokens-to-graph-tier",
                "speculative-enable-w4a4-mxfp4-megamoe",
            ),
        ),
    ),
    Feature(
        "one server both reads prompts and writes answers",
        asks=(*switches("enable-pd-role-switch", "disaggregation-decode-enable-radix-cache"),),
        tunes=(
            *texts(
                "disaggregation-decode-allocation-policy", "disaggregation-decode-retraction-backup"
            ),
            *switches("disaggregation-enable-kv-checksum"),
            *ints("disaggregation-decode-extra-slots", "optimistic-prefill-attempts"),
            *floats("disaggregation-decode-host-receive-threshold"),
        ),
    ),
    Feature(
        "there are no encoder servers, as no model here takes images",
        asks=(
            *words("encoder-register-urls"),
            *switches("enable-adaptive-dispatch-to-encoder", "language-model-only"),
        ),
        tunes=(*ints("encoder-bootstrap-port"),),
    ),
    Feature(
        "answers carry no watermark",
        asks=(*switches("enable-watermark"),),
        tunes=(*texts("watermark-config"),),
    ),
    Feature(
        "requests say which hidden states they want, of the last layer",
        "use --enable-return-hidden-states",
        asks=(
            *texts("return-hidden-states-mode"),
            *switches("enable-return-aux-hidden-states", "enable-return-indexer-topk"),
            *words("return-aux-hidden-state-layer-ids"),
        ),
    ),
    Feature(
        "the items of /v1/score read the query from the cache and nothing of each other",
        tunes=(*switches("enable-mis"),),
    ),
    Feature(
        "it is a speed hint for kernels that this build does not use",
        tunes=(
            *switches(
                "mlx-enable-sampling",
                "enable-tf32-matmul",
                "enable-encoder-swa-bounded-replay",
                "enable-decoder-swa-bounded-replay",
                "enable-lean-attention",
                "enable-nvidia-megakernel",
                "enable-amd-monokernel",
                "enable-precise-embedding-interpolation",
                "enable-deepseek-v4-fp4-indexer",
                "enable-dsa-fused-indexer",
                "enable-scattered-sconv",
                "weight-loader-prefetch-checkpoints",
                "weight-loader-drop-cache-after-load",
            ),
            *ints(
                "sampling-mask-max-tokens",
                "dsa-triton-union",
                "c128-page-size",
                "weight-loader-prefetch-num-threads",
            ),
            *texts(
                "prefill-kv-cache-dequant-dtype",
                "fp4-gemm-backend",
                "bf16-gemm-backend",
                "dsv4-prefill-backend",
                "dsv4-attn-backend",
                "dsa-paged-mqa-logits-backend",
                "dsa-topk-backend",
                "qsa-indexer-dtype",
                "startup-weight-load-mode",
            ),
            *words("flashinfer-autotune-skip-ops"),
        ),
    ),
    Feature(
        "no model here keeps a recurrent state",
        tunes=(
            *texts(
                "mamba-backend",
                "linear-attn-backend",
                "linear-attn-decode-backend",
                "linear-attn-prefill-backend",
                "linear-attn-verify-backend",
            ),
            *ints(
                "mamba-max-states-per-path",
                "mamba-cache-philox-rounds",
                "int8-mamba-ckpt-size",
                "linear-replayssm-cache-len",
            ),
            *switches(
                "enable-mamba-cache-stochastic-rounding",
                "enable-int8-mamba-checkpoint",
                "enable-linear-replayssm",
                "enable-linear-replayssm-spec",
            ),
        ),
    ),
    Feature(
        "there are no device graphs to shape",
        tunes=(
            Absent("cuda-graph-prefill-max-context", kind=INT, aliases=("context-bucket",)),
            *texts("cuda-graph-config", "cuda-graph-backend-decode", "cuda-graph-backend-prefill"),
            *ints("cuda-graph-max-seq-len-prefill"),
            *switches(
                "disable-prefill-cuda-graph", "disable-decode-cuda-graph", "debug-cuda-graph"
            ),
        ),
    ),
    Feature(
        "it tunes links between accelerators, and there are none",
        asks=(*switches("enable-quant-communications"),),
        tunes=(
            *switches(
                "pre-warm-nccl",
                "enforce-disable-flashinfer-allreduce-fusion",
                "enable-aiter-allreduce-fusion",
                "disable-aiter-allreduce-fusion-in-prefill",
                "disable-aiter-allreduce-fusion-in-decode",
                "enable-fused-moe-sum-all-reduce",
            ),
            *texts("boundary-reduction", "flashinfer-allreduce-fusion-backend"),
        ),
    ),
    Feature(
        "no model here is a mixture of experts",
        asks=(
            *texts("elastic-ep-join-mode"),
            *switches("enable-paged-experts", "enable-elastic-expert-backup"),
        ),
        tunes=(
            *switches(
                "enable-w4a4-mxfp4-megamoe",
                "enable-waterfill",
                "enforce-shared-experts-fusion",
                "enable-shared-experts-attn-tp",
                "enable-megamoe-for-layernorm-sp",
            ),
            *texts(
                "deepep-v2-mode",
                "deepep-dispatcher-output-dtype",
                "flashinfer-a2a-dispatch-type",
                "expert-balancedness-report-mode",
            ),
            *ints(
                "fuseep-mode",
                "elastic-ep-join-rank-offset",
                "elastic-ep-initial-size",
                "paged-experts-num-resident",
                "max-ep-size",
                "shared-experts-tp-size",
            ),
            *floats("elastic-ep-scale-timeout"),
        ),
    ),
    Feature(
        "weights already lie in the memory of the host",
        tunes=(
            *switches("ple-offload-embedding"),
            *texts("ple-offload-backend", "ple-offload-dir"),
        ),
    ),
    Feature(
        "text is not generated by diffusion",
        asks=(*texts("dllm-algorithm"),),
        tunes=(
            *texts("dllm-algorithm-config"),
            *switches("dllm-fdfo"),
        ),
    ),
    Feature(
        "LoRA adapters are not served",
        "merge the adapter into the weights",
        tunes=(
            *switches(
                "enable-lora-overlap-loading",
                "experts-shared-outer-loras",
                "lora-use-virtual-experts",
                "lora-strict-loading",
            ),
            *floats("lora-drain-wait-threshold"),
        ),
    ),
    Feature(
        "the cache has one tier, in memory, and one form",
        "raise --max-total-tokens",
        asks=(
            *texts("radix-cache-backend"),
            *switches(
                "enable-unified-cache-external-linker",
                "enable-hisparse",
                "enable-flexkv",
                "enable-session-radix-cache",
            ),
        ),
        tunes=(
            Absent("hisparse-config", aliases=("hierarchical-sparse-attention-extra-config",)),
            *jsons("radix-eviction-policy-config", "unified-cache-external-linker-config"),
            *switches(
                "enable-page-major-kv-layout", "enable-unified-memory", "enable-linker-mla-dedup"
            ),
            *texts(
                "hicache-host-memory-mode",
                "unified-cache-external-linker-backend",
                "lmcache-config-file",
                "flexkv-config-file",
            ),
            *floats("hicache-host-memory-fraction"),
            *ints(
                "hicache-storage-prefetch-retry-poll-interval",
                "hicache-storage-prefetch-retry-max-attempts",
                "swa-prefix-tails",
            ),
        ),
    ),
    Feature(
        "no model here takes images, video or sound",
        tunes=(
            *ints(
                "mm-processor-worker-num",
                "mm-io-worker-num",
                "mm-preprocess-cache-size-mb",
                "media-url-max-file-size-mb",
                "asr-max-buffer-seconds",
                "asr-max-concurrent-sessions",
            ),
            *texts("mm-global-cache-backend", "mm-feature-transport", "image-processor-backend"),
            *words("allowed-media-domains"),
            *switches("trust-mm-content-hashes", "enable-mm-global-cache"),
        ),
    ),
    Feature(
        "weights are read from safetensors and GGUF files only",
        "name a folder or file of those forms",
        asks=(
            Absent("model-config-parser", neutral=("auto",)),
            Absent("weight-cache-mode", neutral=("off",)),
            *texts("modelexpress-config", "model-checksum"),
        ),
        tunes=(
            *ints("engine-info-bootstrap-port", "weight-cache-timeout"),
            *texts("weight-cache-socket"),
        ),
    ),
    Feature(
        "there is one log, without texts and without access lines",
        "use --log-requests",
        asks=(*words("log-requests-target"),),
        tunes=(*words("uvicorn-access-log-exclude-prefixes"),),
    ),
    Feature(
        "there are no Prometheus metrics",
        "read the counters at /server_info",
        asks=(
            *switches("enable-mfu-metrics", "enable-forward-pass-metrics"),
            *jsons("extra-metric-labels", "stat-loggers"),
            *texts("load-publish-endpoint"),
        ),
        tunes=(
            *ints("load-snapshot-publish-interval"),
            *texts("forward-pass-metrics-worker-id", "forward-pass-metrics-ipc-name"),
        ),
    ),
    Feature(
        "no traces are sent and nothing is dumped",
        "use --log-requests or --journal FILE",
        asks=(
            Absent("kv-canary", neutral=("none",)),
            *texts("msprobe-dump-config"),
        ),
        tunes=(
            *texts("trace-modules", "otlp-service-name", "kv-canary-real-data"),
            *ints("kv-canary-sweep-interval"),
        ),
    ),
    Feature(
        "a layer is split between ranks in one way only",
        "use --tensor-parallel-size",
        asks=(
            Absent("dcp-size", kind=INT, aliases=("decode-context-parallel-size",), neutral=(1,)),
            Absent(
                "attn-dp-size", kind=INT, aliases=("attention-data-parallel-size",), neutral=(1,)
            ),
            Absent("moe-dp-size", kind=INT, aliases=("moe-data-parallel-size",), neutral=(1,)),
            Absent("dwdp-size", kind=INT, neutral=(1,)),
            *switches("enable-kv-cache-sharding"),
        ),
        tunes=(
            *texts("dcp-comm-backend"),
            *switches(
                "dcp-replicate-q-proj",
                "enable-dsa-cache-layer-split",
                "enable-cp-decode-attn-tp",
                "enable-dp-attention-local-control-broadcast",
                "enable-tp-lm-head-all-to-all",
                "enable-dense-mlp-attn-tp",
                "enable-layernorm-sp",
                "disable-attn-tp-gather",
            ),
        ),
    ),
    Feature(
        "the youngest request of the lowest priority is retracted first; priority 0 is the default",
        "leave it out; requests bring their own priority",
        asks=(
            Absent("retraction-policy", neutral=("length",)),
            *ints("default-priority-value"),
        ),
    ),
    Feature(
        "every step mixes prompt chunks and decoding",
        "use --chunked-prefill-size and --max-running-requests",
        asks=(
            *ints("prefill-decode-interval", "min-free-slots-delay"),
            *switches("enable-prefill-delayer", "prefill-only-disable-kv-cache"),
        ),
        tunes=(
            *ints("prefill-decode-interval-min-bs", "prefill-delayer-max-delay-passes"),
            *floats(
                "prefill-delayer-token-usage-low-watermark",
                "prefill-delayer-queue-min-ratio",
                "prefill-delayer-max-delay-ms",
            ),
            *words(
                "prefill-delayer-forward-passes-buckets", "prefill-delayer-wait-seconds-buckets"
            ),
        ),
    ),
    Feature(
        "answers are not stored between requests",
        "send the whole conversation",
        asks=switches("enable-streaming-session"),
        tunes=(*switches("strip-thinking-cache"),),
    ),
    Feature(
        "the latest responses are kept in memory, all but those with store: false",
        tunes=switches("enable-response-store"),
    ),
    Feature(
        "one process serves HTTP and tokenizes, beside the engine",
        asks=(
            Absent("tokenizer-backend", neutral=("huggingface",)),
            Absent("detokenizer-worker-num", kind=INT, neutral=(1,)),
        ),
        tunes=(
            *switches("enable-http-worker-reuseport", "disable-tokenizer-batch-decode"),
            *ints("batch-notify-size"),
        ),
    ),
    Feature(
        "the server speaks HTTP/1.1 only, and leaves encryption to a proxy",
        "put a proxy in front",
        asks=(
            Absent("smg-http-sidecar-port", kind=INT, aliases=("grpc-http-sidecar-port",)),
            *switches("smg-grpc-mode", "enable-http2"),
            *ints("grpc-port"),
            *texts("sidecar", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"),
        ),
        tunes=(
            *ints(
                "grpc-response-timeout-secs",
                "http2-max-concurrent-streams",
                "http2-initial-connection-window-size",
            ),
            *words("sidecar-args"),
            *texts("ssl-keyfile-password"),
            *switches("enable-ssl-refresh"),
        ),
    ),
    Feature(
        "chat templates come from the model or from --chat-template",
        "use --chat-template",
        asks=(
            *switches("trust-request-chat-template", "enable-strict-thinking"),
            *texts("hf-chat-template-name"),
            *jsons("default-chat-template-kwargs"),
        ),
    ),
    Feature(
        "each request asks for what its answer shows",
        "set the fields in the requests",
        asks=(
            *switches(
                "return-input-ids", "return-output-ids", "stream-response-default-include-usage"
            ),
        ),
    ),
    Feature(
        "runs of white space in constrained JSON have a bound of their own",
        "use --constrained-json-disable-any-whitespace",
        asks=(*ints("constrained-json-max-whitespace-cnt"),),
    ),
)
