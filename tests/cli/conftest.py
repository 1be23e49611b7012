"""Command lines, run in this process."""

from commands import regard, text_file, trained

__all__ = ["regard", "text_file", "trained"]
