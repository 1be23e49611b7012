"""The memory units of Memory Mosaics."""
