"""What all kernels share: launching, tile sizes, spans of visible keys, loads."""
