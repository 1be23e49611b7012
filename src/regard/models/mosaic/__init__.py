"""Memory Mosaics."""
