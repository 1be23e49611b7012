"""ICLM: next-token prediction by functional gradient descent."""
