#!/bin/sh
# The line for each node, to be run there next to its .env file.

# 192.0.2.11
docker run --rm --name prefill-0-0 --privileged --network host --ipc host \
  --shm-size 16g --ulimit memlock=-1 --env-file prefill-0-0.env \
  --device /dev/davinci0 \
  --device /dev/davinci1 \
  --device /dev/davinci2 \
  --device /dev/davinci3 \
  --device /dev/davinci4 \
  --device /dev/davinci5 \
  --device /dev/davinci6 \
  --device /dev/davinci7 \
  --device /dev/davinci8 \
  --device /dev/davinci9 \
  --device /dev/davinci10 \
  --device /dev/davinci11 \
  --device /dev/davinci12 \
  --device /dev/davinci13 \
  --device /dev/davinci14 \
  --device /dev/davinci15 \
  --device /dev/davinci_manager \
  --device /dev/devmm_svm \
  --device /dev/hisi_hdc \
  --volume /usr/local/sbin:/usr/local/sbin:ro \
  --volume /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro \
  --volume /usr/local/Ascend/firmware:/usr/local/Ascend/firmware:ro \
  --volume /etc/ascend_install.info:/etc/ascend_install.info:ro \
  --volume /var/queue_schedule:/var/queue_schedule:ro \
  --volume /models/DeepSeek-R1-W8A8:/models/DeepSeek-R1-W8A8:ro \
  --volume /var/cache/banyan:/var/lib/banyan/.cache \
  banyan-npu \
  serve \
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

# 192.0.2.21
docker run --rm --name decode-0-0 --privileged --network host --ipc host \
  --shm-size 16g --ulimit memlock=-1 --env-file decode-0-0.env \
  --device /dev/davinci0 \
  --device /dev/davinci1 \
  --device /dev/davinci2 \
  --device /dev/davinci3 \
  --device /dev/davinci4 \
  --device /dev/davinci5 \
  --device /dev/davinci6 \
  --device /dev/davinci7 \
  --device /dev/davinci8 \
  --device /dev/davinci9 \
  --device /dev/davinci10 \
  --device /dev/davinci11 \
  --device /dev/davinci12 \
  --device /dev/davinci13 \
  --device /dev/davinci14 \
  --device /dev/davinci15 \
  --device /dev/davinci_manager \
  --device /dev/devmm_svm \
  --device /dev/hisi_hdc \
  --volume /usr/local/sbin:/usr/local/sbin:ro \
  --volume /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro \
  --volume /usr/local/Ascend/firmware:/usr/local/Ascend/firmware:ro \
  --volume /etc/ascend_install.info:/etc/ascend_install.info:ro \
  --volume /var/queue_schedule:/var/queue_schedule:ro \
  --volume /models/DeepSeek-R1-W8A8:/models/DeepSeek-R1-W8A8:ro \
  --volume /var/cache/banyan:/var/lib/banyan/.cache \
  banyan-npu \
  serve \
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
