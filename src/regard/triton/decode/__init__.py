"""Decoding with split keys."""
