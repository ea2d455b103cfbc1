"""Flags of others that are accepted without an effect, because what they ask for is so already or
has no object here. Name -> why. Answers, capacity and security never depend on one of these.
"""

_NO_GRAPHS = "there are no device graphs to shape"
_NO_DEVICE_LINKS = "it tunes links between accelerators, and there are none"
_COMPUTED_SO = "that is how it is done here"
_SPEED_HINT = "a speed hint for kernels that this build does not use"
_SMALL_WAITS = "the loop sleeps until there is work"

HARMLESS = {
    "cuda-graph-bs": _NO_GRAPHS,
    "cuda-graph-max-bs": _NO_GRAPHS,
    "cuda-graph-bs-decode": _NO_GRAPHS,
    "cuda-graph-bs-prefill": _NO_GRAPHS,
    "cuda-graph-max-bs-decode": _NO_GRAPHS,
    "cuda-graph-max-bs-prefill": _NO_GRAPHS,
    "disable-cuda-graph": _NO_GRAPHS,
    "disable-cuda-graph-padding": _NO_GRAPHS,
    "disable-decode-cuda-graph": _NO_GRAPHS,
    "disable-prefill-cuda-graph": _NO_GRAPHS,
    "enable-cudagraph-gc": _NO_GRAPHS,
    "disable-custom-all-reduce": _NO_DEVICE_LINKS,
    "enable-mscclpp": _NO_DEVICE_LINKS,
    "enable-nccl-nvls": _NO_DEVICE_LINKS,
    "enable-p2p-check": _NO_DEVICE_LINKS,
    "enable-symm-mem": _NO_DEVICE_LINKS,
    "enable-torch-symm-mem": _NO_DEVICE_LINKS,
    "nccl-port": _NO_DEVICE_LINKS,
    "pre-warm-nccl": _NO_DEVICE_LINKS,
    "disable-fast-image-processor": "there are no images to process",
    "disable-flashinfer-autotune": _SPEED_HINT,
    "disable-shared-experts-fusion": _SPEED_HINT,
    "enable-fused-qk-norm-rope": _SPEED_HINT,
    "enable-torch-compile": _SPEED_HINT,
    "torch-compile-max-bs": _SPEED_HINT,
    "triton-attention-num-kv-splits": _SPEED_HINT,
    "triton-attention-reduce-in-fp32": _SPEED_HINT,
    "triton-attention-split-tile-size": _SPEED_HINT,
    "disable-chunked-prefix-cache": _COMPUTED_SO,
    "disable-outlines-disk-cache": "no grammar is ever cached on disk",
    "disable-tokenizer-batch-encode": _COMPUTED_SO,
    "disable-tokenizer-batch-decode": _COMPUTED_SO,
    "enable-mixed-chunk": "every step mixes prompt chunks and decoding",
    "enable-nan-detection": "values that are not finite always end the request they belong to",
    "num-continuous-decode-steps": "planning overlaps with computing instead",
    "scheduler-recv-interval": _SMALL_WAITS,
    "sleep-on-idle": _SMALL_WAITS,
    "trust-remote-code": "code of a model repository is never run",
    "weight-loader-prefetch-checkpoints": _SPEED_HINT,
    "weight-loader-prefetch-num-threads": _SPEED_HINT,
}

LISTS = ("cuda-graph-bs", "cuda-graph-bs-decode", "cuda-graph-bs-prefill")
"""Those of them that take several words."""

SUCCESSORS = {
    "enable-deepep-moe": "moe-a2a-backend deepep",
    "enable-ep-moe": "ep-size",
    "enable-flashinfer-cutedsl-moe": "moe-runner-backend flashinfer_cutedsl",
    "enable-flashinfer-cutlass-moe": "moe-runner-backend flashinfer_cutlass",
    "enable-flashinfer-mxfp4-moe": "moe-runner-backend flashinfer_mxfp4",
    "enable-flashinfer-trtllm-moe": "moe-runner-backend flashinfer_trtllm",
    "enable-triton-kernel-moe": "moe-runner-backend triton_kernel",
    "oltp-traces-endpoint": "otlp-traces-endpoint",
    "nsa-prefill-backend": "dsa-prefill-backend",
    "nsa-decode-backend": "dsa-decode-backend",
    "nsa-prefill-cp-mode": "cp-strategy",
    "enable-nsa-prefill-context-parallel": "enable-prefill-cp",
    "speculative-ngram-branch-length": "speculative-ngram-max-trie-depth",
    "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
    "keep-mm-feature-on-device": "mm-feature-transport",
}
"""Old names of absent flags -> the name they go by now, for the refusal."""
