#!/bin/sh
# On 192.0.2.21, next to decode-0-0.env.
set -a
. "$(dirname "$0")/decode-0-0.env"
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
  --moe-a2a-backend deepep \
  --deepep-mode low_latency \
  --ep-size 16 \
  --nnodes 1 \
  --node-rank 0 \
  --disaggregation-mode decode \
  --disaggregation-transfer-backend ascend \
  --dist-init-addr 192.0.2.21:6688 \
  --host 192.0.2.21 \
  --port 8001
