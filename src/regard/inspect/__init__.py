"""Looking into a model: capture what its attention did, measure, draw, and write a page.

    from regard.inspect import capture

    with capture(model, weights=True) as seen:
        model(input_ids)
    seen.layers[0].support          # [B, H, T]: keys with non-zero weight, for every query

`capture` needs torch only. `measures`, `figures`, `tables` and `report` are modules of their own, since they
import matplotlib, rich and jinja2.
"""

from .capture import Capture, capture

__all__ = ["Capture", "capture"]
