"""Thresholding rules: where the weights of a row end. One file per rule; every file of this folder is imported."""

from ...registry import import_all
from .base import RuleBase, bandwidths

__all__ = ["RuleBase", "bandwidths"]

import_all(__name__)
