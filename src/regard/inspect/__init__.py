"""Inspection of models: capturing diagnostics and activations, measures, figures and HTML pages.

    from regard.inspect import capture

    with capture(model, weights=True) as seen:
        model(input_ids)
    seen.layers[0].support          # [B, H, T]: keys with nonzero weight for every query

    output, cache = run_with_cache(model, input_ids, "f.0.attn.hook_pattern")
    named_hook_points(model)        # every activation that can be read or replaced

`capture`, the hooks and `mechanisms` (sinks, induction, copying) only need torch. `figures`, `tables` and `report`
import matplotlib, rich and jinja2.
"""

from .capture import Capture, capture
from .hooks import hooked, named_hook_points, run_with_cache, run_with_hooks

__all__ = ["Capture", "capture", "hooked", "named_hook_points", "run_with_cache", "run_with_hooks"]
