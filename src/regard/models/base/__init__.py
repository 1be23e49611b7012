"""Shared parts of the language models: configuration, base classes, packing, caches, loading."""
