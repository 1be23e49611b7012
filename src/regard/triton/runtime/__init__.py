"""What all kernels share: launching, tile sizes, ranges of visible keys, loads."""
