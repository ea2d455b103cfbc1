#!/bin/sh
exec python3 -m banyan.launch_lb \
  --prefill http://192.0.2.11:8000 \
  --decode http://192.0.2.21:8001 \
  --host 127.0.0.1 \
  --port 5000
