"""Fast-weight product-key memories: search, read, write."""
