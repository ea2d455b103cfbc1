"""Only `sglang.srt.disaggregation.launch_lb` is here."""
