"""Local linear attention: forward, solve, backward."""
