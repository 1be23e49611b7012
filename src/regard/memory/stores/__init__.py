"""Stores of slot values, and sums over their rows."""
