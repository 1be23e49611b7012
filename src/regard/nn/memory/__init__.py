"""Memory layers: product-key tables, fast weights, large-chunk test-time training."""
