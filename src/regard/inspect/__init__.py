"""Looking into a model: capture what its attention did, measure, draw, and write a page.

    from regard.inspect import capture

    with capture(model, weights=True) as seen:
        model(input_ids)
    seen.layers[0].support          # [B, H, T]: keys with non-zero weight, for every query

    output, cache = run_with_cache(model, input_ids, "f.0.attn.hook_pattern")
    named_hook_points(model)        # every place at which one can listen, or put something else

`capture`, the hooks and `mechanisms` (sinks, induction, copying) need torch only. `measures`, `figures`, `tables` and
`report` are modules of their own, since they import matplotlib, rich and jinja2.
"""

from .capture import Capture, capture
from .hooks import hooked, named_hook_points, run_with_cache, run_with_hooks

__all__ = ["Capture", "capture", "hooked", "named_hook_points", "run_with_cache", "run_with_hooks"]
