"""What all language models share: configuration, base classes, packing, caches, loading."""
