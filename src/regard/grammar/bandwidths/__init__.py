"""Bandwidth rules: how far a row looks. One file a rule; all files of this folder are imported."""

from ...registry import import_all
from .base import Bandwidth, bandwidths

__all__ = ["Bandwidth", "bandwidths"]

import_all(__name__)
