"""`launch_lb` is the router for prefill and decode servers."""
