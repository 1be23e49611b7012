"""Recipes: each module trains, measures, and writes a table, figures and JSON."""

from . import kernel_zoo as kernel_zoo  # recipes register themselves
from . import recall_capacity as recall_capacity
from . import shared_query_key as shared_query_key
