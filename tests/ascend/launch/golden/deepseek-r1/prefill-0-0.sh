#!/bin/sh
# On 192.0.2.11, next to prefill-0-0.env.
set -a
. "$(dirname "$0")/prefill-0-0.env"
set +a
exec python3 -m banyan.launch_server \
  --model-path /models/DeepSeek-R1-W8A8 \
  --trust-remote-code \
  --device npu \
  --attention-backend ascend \
  --mem-fraction-static 0.8 \
  --quantization modelslim \
  --tp-size 16 \
  --dp-size 1 \
  --nnodes 1 \
  --node-rank 0 \
  --disaggregation-mode prefill \
  --disaggregation-transfer-backend ascend \
  --disaggregation-bootstrap-port 6657 \
  --dist-init-addr 192.0.2.11:6688 \
  --host 192.0.2.11 \
  --port 8000
