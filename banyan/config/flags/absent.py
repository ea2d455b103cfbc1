"""Features that users know from SGLang's documents and that this build does not have, each with its
flags, why it is absent and what to use. Flags that have an effect here are in the other tables.

What is merely tuned has no object here and is accepted with a line; answers, capacity and security
never depend on such a flag. What is asked for and absent is refused.
"""

from banyan.config.flags.flag import (
    FLOAT,
    INT,
    SWITCH,
    WORDS,
    Absent,
    Feature,
    Replaced,
    floats,
    ints,
    jsons,
    switches,
    texts,
    words,
)

MODEL = (
    Feature(
        "code of a model repository is never run",
        tunes=switches("trust-remote-code"),
    ),
    Feature(
        "tokenizers are read from tokenizer.json or the GGUF file",
        "leave it out, or name another --tokenizer-path",
        asks=(Absent("tokenizer-mode", neutral=("auto",)),),
    ),
    Feature(
        "tokenization already runs beside the engine",
        tunes=(
            *switches("enable-dynamic-batch-tokenizer", "enable-tokenizer-batch-encode"),
            *switches("disable-tokenizer-batch-encode"),
            *ints("dynamic-batch-tokenizer-batch-size"),
            *floats("dynamic-batch-tokenizer-batch-timeout"),
        ),
    ),
    Feature(
        "facts of a checkpoint are read from its own folder",
        "put the decrypted config.json there, or use --json-model-override-args",
        asks=texts("decrypted-config-file", "decrypted-draft-config-file"),
    ),
    Feature(
        "weights are read from safetensors and GGUF files only",
        "name a folder or file of those forms",
        asks=(
            *switches("remote-instance-weight-loader-start-seed-via-transfer-engine"),
            *switches("checkpoint-engine-wait-weights-before-ready"),
            *texts("remote-instance-weight-loader-seed-instance-ip"),
        ),
        tunes=(
            *ints("remote-instance-weight-loader-seed-instance-service-port"),
            *words("remote-instance-weight-loader-send-weights-group-ports"),
            *texts("remote-instance-weight-loader-backend"),
        ),
    ),
    Feature(
        "code that comes with requests or flags is never run in the model",
        asks=(
            *words("forward-hooks"),
            *texts("custom-sigquit-handler"),
        ),
    ),
    Feature(
        "expert choices stay inside the engine",
        asks=switches("enable-return-routed-experts"),
    ),
    Feature(
        "tensors are not dumped",
        "use --kernels to bisect a wrong answer",
        asks=texts("debug-tensor-dump-output-folder"),
        tunes=(
            *words("debug-tensor-dump-layers"),
            *texts("debug-tensor-dump-input-file"),
            Absent("debug-tensor-dump-inject", neutral=("False", "false")),
        ),
    ),
    Feature(
        "weights and cache stay in memory while the server runs",
        asks=switches("enable-memory-saver"),
        tunes=switches("enable-weights-cpu-backup", "enable-draft-weights-cpu-backup"),
    ),
    Feature(
        "LoRA adapters are not served",
        "merge the adapter into the weights",
        asks=(*switches("enable-lora"), *words("lora-paths")),
        tunes=(
            *ints("max-lora-rank", "max-loras-per-batch", "max-loaded-loras"),
            *ints("max-lora-chunk-size"),
            *words("lora-target-modules"),
            *texts("lora-eviction-policy", "lora-backend"),
        ),
    ),
    Feature(
        "no model here takes images, video or sound",
        tunes=(
            *switches("enable-multimodal", "disable-fast-image-processor"),
            *switches("enable-broadcast-mm-inputs-process"),
            *switches("mm-enable-dp-encoder", "enable-prefix-mm-cache"),
            *texts("mm-attention-backend"),
            *ints("mm-max-concurrent-calls"),
            *floats("mm-per-request-timeout"),
            *jsons("mm-process-config", "limit-mm-data-per-request"),
        ),
    ),
    Feature(
        "there are no encoder servers, as no model here takes images",
        asks=(*switches("encoder-only", "language-only"), *words("encoder-urls")),
        tunes=texts("encoder-transfer-backend"),
    ),
)

NUMBERS = (
    Feature(
        "weights are computed as they are stored, or as --quantization rounds them",
        "choose one of --quantization, or name a checkpoint that is quantized as you wish",
        asks=(
            *texts("modelopt-quant", "modelopt-checkpoint-restore-path", "rl-quant-profile"),
            *texts("torchao-config"),
            *switches("quantize-and-serve"),
        ),
        tunes=texts("modelopt-checkpoint-save-path", "modelopt-export-path"),
    ),
    Feature(
        "keys and values are kept without scale factors",
        tunes=texts("quantization-param-path"),
    ),
    Feature(
        "numbers are computed in float32",
        asks=(
            Absent(
                "dtype",
                choices=("auto", "half", "float16", "bfloat16", "float32"),
                translate=(("float", "float32"),),
                neutral=("auto", "float32"),
            ),
        ),
        tunes=switches("enable-fp32-lm-head"),
    ),
    Feature(
        "values that are not finite end the request they belong to, and no other",
        tunes=switches("enable-nan-detection"),
        asks=(Absent("crash-on-nan", neutral=("False", "false")),),
    ),
    Feature(
        "a token depends on its own sequence only, whatever runs beside it",
        tunes=switches("enable-deterministic-inference"),
    ),
    Feature(
        "the numerics of a trainer are not copied",
        asks=texts("rl-on-policy-target"),
    ),
    Feature(
        "attention heads are never left out",
        asks=switches("enable-double-sparsity"),
        tunes=(
            *texts("ds-channel-config-path", "ds-heavy-channel-type"),
            *ints("ds-heavy-channel-num", "ds-heavy-token-num", "ds-sparse-decode-threshold"),
        ),
    ),
)

SCHEDULING = (
    Feature(
        "every step mixes prompt chunks and decoding",
        tunes=switches("enable-mixed-chunk"),
    ),
    Feature(
        "planning overlaps with computing instead",
        tunes=ints("num-continuous-decode-steps"),
    ),
    Feature(
        "the loop sleeps until there is work",
        tunes=(*switches("sleep-on-idle"), *ints("scheduler-recv-interval")),
    ),
    Feature(
        "a step that hangs is reported and never ends the server",
        "use --watchdog-timeout",
        asks=(Absent("soft-watchdog-timeout", kind=FLOAT, neutral=(300.0,)),),
    ),
    Feature(
        "one cache holds every kind of layer, and sizes each by what it keeps",
        tunes=(
            *switches("disable-hybrid-swa-memory"),
            *floats("swa-full-tokens-ratio", "hybrid-kvcache-ratio"),
        ),
    ),
    Feature(
        "white space in constrained JSON has no pattern of its own",
        "use --constrained-json-disable-any-whitespace",
        asks=texts("constrained-json-whitespace-pattern"),
    ),
    Feature(
        "compiled grammars are kept in memory only",
        tunes=switches("disable-outlines-disk-cache"),
    ),
    Feature(
        "the items of /v1/score read the query from the cache and nothing of each other, without a "
        "token between them",
        tunes=(Absent("multi-item-scoring-delimiter", kind=INT, low=0),),
    ),
    Feature(
        "tokens are not drafted",
        asks=(
            *texts("speculative-algorithm", "speculative-draft-model-revision"),
            Absent("speculative-draft-model-path", aliases=("speculative-draft-model",)),
            *texts("speculative-token-map"),
        ),
        tunes=(
            *texts("speculative-draft-load-format", "speculative-attention-mode"),
            *texts("speculative-moe-runner-backend", "speculative-moe-a2a-backend"),
            *texts("speculative-draft-attention-backend", "speculative-draft-model-quantization"),
            *texts("speculative-ngram-match-type"),
            *ints("speculative-num-steps", "speculative-eagle-topk"),
            *ints("speculative-num-draft-tokens", "speculative-ngram-capacity"),
            *ints("speculative-ngram-min-match-window-size"),
            *ints("speculative-ngram-max-match-window-size"),
            *ints("speculative-ngram-min-bfs-breadth", "speculative-ngram-max-bfs-breadth"),
            Absent(
                "speculative-ngram-branch-length",
                kind=INT,
                aliases=("speculative-ngram-max-trie-depth",),
            ),
            *floats("speculative-accept-threshold-single", "speculative-accept-threshold-acc"),
        ),
    ),
)

CACHE = (
    Feature(
        "the cache has one tier, in memory",
        "raise --max-total-tokens",
        asks=(
            Absent("enable-hierarchical-cache", kind=SWITCH, aliases=("enable-hicache",)),
            *switches("enable-lmcache"),
            *texts("hicache-storage-backend"),
        ),
        tunes=(
            *floats("hicache-ratio"),
            *ints("hicache-size"),
            *texts("hicache-write-policy", "hicache-io-backend", "hicache-mem-layout"),
            *texts("hicache-storage-prefetch-policy", "hicache-storage-backend-extra-config"),
        ),
    ),
    Feature(
        "weights already lie in the memory of the host",
        tunes=(
            *floats("cpu-offload-gb"),
            *ints("offload-group-size", "offload-num-in-group", "offload-prefetch-step"),
            *texts("offload-mode"),
        ),
    ),
    Feature(
        "prefixes of every length are computed and shared so",
        tunes=switches("disable-chunked-prefix-cache"),
    ),
    Feature(
        "no model here keeps a recurrent state",
        tunes=(
            *ints("max-mamba-cache-size", "mamba-track-interval"),
            *texts("mamba-ssm-dtype"),
            Absent("mamba-scheduler-strategy", aliases=("mamba-radix-cache-strategy",)),
            *floats("mamba-full-memory-ratio"),
        ),
    ),
)

SERVER = (
    Feature("the server speaks HTTP only", asks=switches("grpc-mode")),
    Feature(
        "no line is logged per HTTP request, and --log-level holds for all others",
        tunes=texts("log-level-http"),
    ),
    Feature(
        "--log-requests shows lengths, reasons and seconds, never texts",
        "use --log-requests",
        asks=(
            Absent("log-requests-level", kind=INT, low=0, high=3, neutral=(0, 1)),
            *switches("enable-request-time-stats-logging"),
            Absent("show-time-cost", neutral=("False", "false")),
        ),
    ),
    Feature(
        "no line is logged per step",
        tunes=ints("decode-log-interval"),
    ),
    Feature(
        "a crash leaves the journal, and nothing else",
        "use --journal FILE",
        asks=texts("crash-dump-folder"),
    ),
    Feature(
        "there are no Prometheus metrics",
        "read the counters at /server_info",
        asks=(
            *switches("enable-metrics", "enable-metrics-for-all-schedulers"),
            *switches("export-metrics-to-file"),
        ),
        tunes=(
            *switches("collect-tokens-histogram"),
            *texts("tokenizer-metrics-custom-labels-header", "export-metrics-to-file-dir"),
            *words("tokenizer-metrics-allowed-custom-labels", "bucket-time-to-first-token"),
            *words("bucket-inter-token-latency", "bucket-e2e-request-latency"),
            *words("prompt-tokens-buckets", "generation-tokens-buckets"),
        ),
    ),
    Feature(
        "no events are published and no traces are sent",
        "use --log-requests or --journal FILE",
        asks=(
            *switches("enable-trace"),
            *jsons("kv-events-config"),
            Absent("gc-warning-threshold-secs", kind=FLOAT, neutral=(0.0,)),
        ),
        tunes=(Absent("oltp-traces-endpoint", aliases=("otlp-traces-endpoint",)),),
    ),
)

MACHINE = (
    Feature(
        "there are no device graphs to shape",
        tunes=(
            *switches("disable-cuda-graph", "disable-cuda-graph-padding"),
            *switches("enable-profile-cuda-graph", "enable-cudagraph-gc"),
            *switches("enable-piecewise-cuda-graph"),
            Absent("cuda-graph-max-bs", kind=INT, aliases=("cuda-graph-max-bs-decode",)),
            Absent("cuda-graph-bs", kind=WORDS, aliases=("cuda-graph-bs-decode",)),
            Absent(
                "piecewise-cuda-graph-max-tokens",
                kind=INT,
                aliases=("cuda-graph-max-bs-prefill",),
            ),
            Absent("piecewise-cuda-graph-tokens", kind=WORDS, aliases=("cuda-graph-bs-prefill",)),
            *texts("piecewise-cuda-graph-compiler"),
        ),
    ),
    Feature(
        "it tunes links between accelerators, and there are none",
        tunes=(
            *switches("disable-custom-all-reduce", "enable-mscclpp", "enable-nccl-nvls"),
            *switches("enable-p2p-check", "enable-symm-mem", "enable-torch-symm-mem"),
            *switches("enable-flashinfer-allreduce-fusion", "enable-attn-tp-input-scattered"),
            *ints("nccl-port", "gpu-id-step", "base-gpu-id"),
        ),
    ),
    Feature(
        "it is a speed hint for kernels that this build does not use",
        tunes=(
            *switches("disable-flashinfer-autotune", "disable-shared-experts-fusion"),
            *switches("enable-fused-qk-norm-rope", "enable-torch-compile"),
            *switches("enable-torch-compile-debug-mode", "flashinfer-mla-disable-ragged"),
            *switches("triton-attention-reduce-in-fp32", "enable-layerwise-nvtx-marker"),
            *switches("enable-two-batch-overlap", "enable-single-batch-overlap"),
            *ints("torch-compile-max-bs", "triton-attention-num-kv-splits"),
            *ints("triton-attention-split-tile-size"),
            *floats("tbo-token-distribution-threshold"),
        ),
    ),
    Feature(
        "the CPU's attention kernels are the only ones",
        "leave it out; --kernels forces the implementation of an op",
        asks=tuple(
            Absent(name, neutral=("auto", "torch_native"))
            for name in (
                "attention-backend",
                "prefill-attention-backend",
                "decode-attention-backend",
            )
        ),
    ),
    Feature(
        "the sampler is PyTorch's own",
        asks=(Absent("sampling-backend", neutral=("pytorch",)),),
    ),
    Feature(
        "no model here has sparse attention or fp8 weights",
        tunes=(
            Absent("nsa-prefill-backend", aliases=("dsa-prefill-backend",)),
            Absent("nsa-decode-backend", aliases=("dsa-decode-backend",)),
            *texts("fp8-gemm-backend"),
        ),
    ),
    Feature(
        "a replica spans one machine",
        "use --tensor-parallel-size on one machine",
        asks=(
            Absent("nnodes", kind=INT, low=1, neutral=(1,)),
            Absent("node-rank", kind=INT, low=0, neutral=(0,)),
        ),
        tunes=(Absent("dist-init-addr", aliases=("nccl-init-addr",)), *ints("dist-timeout")),
    ),
    Feature(
        "there are no pipeline stages",
        "use --tensor-parallel-size",
        asks=(
            Absent(
                "pipeline-parallel-size",
                kind=INT,
                low=1,
                aliases=("pp-size", "pp"),
                neutral=(1,),
            ),
        ),
        tunes=(
            *ints("pp-max-micro-batch-size", "pp-async-batch-depth"),
            *switches("enable-dynamic-chunking"),
        ),
    ),
    Feature(
        "replicas share nothing but the server",
        "leave it out; --dp-size starts independent replicas",
        asks=switches("enable-dp-attention"),
        tunes=(
            *floats("load-watch-interval"),
            *switches("prefill-round-robin-balance", "enable-dp-lm-head"),
        ),
    ),
    Feature(
        "a long prompt is computed by all ranks together, in chunks",
        "use --tensor-parallel-size",
        asks=(
            Absent(
                "enable-nsa-prefill-context-parallel",
                kind=SWITCH,
                aliases=("enable-prefill-cp",),
            ),
            Absent(
                "attn-cp-size",
                kind=INT,
                low=1,
                aliases=("attention-context-parallel-size",),
                neutral=(1,),
            ),
        ),
        tunes=(
            Absent(
                "nsa-prefill-cp-mode",
                aliases=("cp-strategy",),
                translate=(("in-seq-split", "zigzag"), ("round-robin-split", "interleave")),
            ),
        ),
    ),
    Feature(
        "no model here is a mixture of experts",
        asks=(
            Absent(
                "expert-parallel-size", kind=INT, low=1, aliases=("ep-size", "ep"), neutral=(1,)
            ),
            Absent("moe-a2a-backend", neutral=("none",)),
            *switches("enable-ep-moe", "enable-eplb"),
        ),
        tunes=(
            *switches("disable-flashinfer-cutlass-moe-fp4-allgather"),
            *switches("enable-expert-distribution-metrics"),
            *texts("moe-runner-backend", "flashinfer-mxfp4-moe-precision", "deepep-mode"),
            *texts("deepep-config", "ep-dispatch-algorithm", "init-expert-location"),
            *texts("eplb-algorithm", "expert-distribution-recorder-mode", "elastic-ep-backend"),
            *texts("mooncake-ib-device"),
            *ints("ep-num-redundant-experts", "eplb-rebalance-layers-per-chunk"),
            *ints("eplb-rebalance-num-iterations", "expert-distribution-recorder-buffer-size"),
            *ints("moe-dense-tp-size"),
            *floats("eplb-min-rebalancing-utilization-threshold"),
        ),
    ),
    Feature(
        "experts are not split between processors",
        asks=texts("kt-weight-path"),
        tunes=(
            *texts("kt-method"),
            *ints("kt-cpuinfer", "kt-threadpool-count", "kt-num-gpu-experts"),
            *ints("kt-max-deferred-experts-per-token"),
        ),
    ),
    Feature(
        "one server both reads prompts and writes answers",
        "leave it out; prompts are cut into chunks so that they do not hold up answers",
        asks=(
            Absent("disaggregation-mode", choices=("null", "prefill", "decode"), neutral=("null",)),
            *switches("enable-pdmux"),
        ),
        tunes=(
            *switches("disaggregation-decode-enable-offload-kvcache"),
            *switches("disaggregation-decode-enable-fake-auto"),
            *texts("disaggregation-transfer-backend", "disaggregation-ib-device"),
            *texts("pdmux-config-path"),
            *ints("disaggregation-bootstrap-port", "disaggregation-decode-tp"),
            *ints("disaggregation-decode-dp", "disaggregation-prefill-pp"),
            *ints("num-reserved-decode-tokens", "disaggregation-decode-polling-interval"),
            *ints("sm-group-num"),
        ),
    ),
    Feature(
        "processes are not bound to memory nodes",
        "start the server under numactl",
        asks=words("numa-node"),
    ),
)

FEATURES = (*MODEL, *NUMBERS, *SCHEDULING, *CACHE, *SERVER, *MACHINE)

REPLACED = (
    *(
        Replaced(f"enable-{name}-moe", kind=SWITCH, successor="moe-runner-backend", value=value)
        for name, value in (
            ("flashinfer-cutedsl", "flashinfer_cutedsl"),
            ("flashinfer-cutlass", "flashinfer_cutlass"),
            ("flashinfer-mxfp4", "flashinfer_mxfp4"),
            ("flashinfer-trtllm", "flashinfer_trtllm"),
            ("triton-kernel", "triton_kernel"),
        )
    ),
    Replaced("enable-deepep-moe", kind=SWITCH, successor="moe-a2a-backend", value="deepep"),
    Replaced(
        "keep-mm-feature-on-device",
        kind=SWITCH,
        successor="mm-feature-transport",
        value="cuda_ipc",
    ),
)
"""Former switches, and the flag and value that say the same."""
