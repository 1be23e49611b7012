"""Makes `oracles` importable from every folder of tests."""
