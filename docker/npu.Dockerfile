# Banyan on Ascend NPUs: A2 (8 devices) and A3 (16 devices). Driver and firmware are the host's.
#
#   docker build -f docker/npu.Dockerfile -t banyan-npu .                            # A3
#   docker build -f docker/npu.Dockerfile --build-arg CHIP=910b -t banyan-npu .      # A2
#   banyan recipe /models/NAME --soc A3 --serve ADDRESS                              # how to run it
#
# CANN, torch and torch_npu must be a pair that the vendor supports: banyan doctor --device npu.

ARG BASE=quay.io/ascend/cann
ARG CANN=9.1.0
ARG CHIP=a3
ARG SYSTEM=ubuntu22.04-py3.11
FROM ${BASE}:${CANN}-${CHIP}-${SYSTEM} AS build

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /banyan
COPY pyproject.toml README.md LICENSE ./
COPY banyan banyan
RUN tag=$(python -m banyan.ops.cpu.build banyan/ops/cpu/prebuilt) \
 && pip wheel . --no-deps --wheel-dir /dist --config-settings=--build-option=--plat-name="$tag"

FROM ${BASE}:${CANN}-${CHIP}-${SYSTEM}

LABEL org.opencontainers.image.title="Banyan for Ascend NPUs" \
      org.opencontainers.image.description="An open serving engine for large language models" \
      org.opencontainers.image.licenses="Apache-2.0"

ARG TORCH=2.13.0
ARG TORCH_NPU=2.13.0
ARG MEMFABRIC=1.3.0

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch==${TORCH}" \
 && pip install --no-cache-dir pyyaml setuptools "torch-npu==${TORCH_NPU}" \
 && pip install --no-cache-dir "memfabric-hybrid==${MEMFABRIC}"

# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir "$(echo /dist/*.whl)[xgrammar]"

# The devices belong to root on the host, so the server runs as root: give the container no more
# than the devices, and mount the weights so that they cannot be written.
# Compiled kernels and downloads: `banyan recipe` mounts /var/cache/banyan of the host here.
ENV HOME=/var/lib/banyan
VOLUME ["/var/lib/banyan/.cache"]
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ.get(\"BANYAN_PORT\", 30000)}/readyz', timeout=4)"]
# CANN's own script sets the paths of its libraries; without it nothing can be loaded.
ENTRYPOINT ["/bin/bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec banyan \"$@\"", "banyan"]
CMD ["serve", "--device", "npu", "--host", "0.0.0.0"]
