"""Attention with a state of fixed size: linear attention, decay, the delta rule, Mesa attention, leaky averages."""
