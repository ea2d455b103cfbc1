#!/bin/sh
# On 192.0.2.12, next to prefill-0-1.env.
set -a
. "$(dirname "$0")/prefill-0-1.env"
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
  --speculative-num-steps 1 \
  --speculative-num-draft-tokens 2 \
  --deepep-mode normal \
  --enable-nsa-prefill-context-parallel \
  --nsa-prefill-cp-mode in-seq-split \
  --attn-cp-size 32 \
  --chunked-prefill-size -1 \
  --max-prefill-tokens 68000 \
  --max-running-requests 1 \
  --disable-radix-cache \
  --disable-cuda-graph \
  --mem-fraction-static 0.73 \
  --nnodes 2 \
  --node-rank 1 \
  --disaggregation-mode prefill \
  --disaggregation-transfer-backend ascend \
  --disaggregation-bootstrap-port 8998 \
  --dist-init-addr 192.0.2.11:6688 \
  --host 192.0.2.12 \
  --port 8000
