"""Multi-head attention layers and their parts: rotary positions, norms, temperatures, ridges."""
