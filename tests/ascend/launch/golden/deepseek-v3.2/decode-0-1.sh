#!/bin/sh
# On 192.0.2.22, next to decode-0-1.env.
set -a
. "$(dirname "$0")/decode-0-1.env"
set +a
exec python3 -m banyan.launch_server \
  --model-path /models/DeepSeek-V3.2-W8A8 \
  --trust-remote-code \
  --device npu \
  --attention-backend ascend \
  --page-size 128 \
  --quantization modelslim \
  --tp-size 32 \
  --moe-a2a-backend deepep \
  --moe-dense-tp-size 1 \
  --tokenizer-worker-num 4 \
  --load-balance-method round_robin \
  --speculative-algorithm NEXTN \
  --speculative-eagle-topk 1 \
  --speculative-num-steps 3 \
  --speculative-num-draft-tokens 4 \
  --deepep-mode low_latency \
  --dp-size 8 \
  --ep-size 32 \
  --enable-dp-attention \
  --enable-dp-lm-head \
  --cuda-graph-max-bs 4 \
  --mem-fraction-static 0.79 \
  --nnodes 2 \
  --node-rank 1 \
  --disaggregation-mode decode \
  --disaggregation-transfer-backend ascend \
  --dist-init-addr 192.0.2.21:6688 \
  --host 192.0.2.22 \
  --port 8001
