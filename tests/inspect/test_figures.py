"""Figures: that they are drawn, and that what must be told apart can be."""

import numpy as np
import pytest
import torch
from seen import count, pixels

from regard.inspect.figures import Curve, attention_map, line_style, loss_curves, visible
from regard.inspect.measures import AttentionMaps

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def inner(png: bytes) -> np.ndarray:
    """The cells of the map itself: a part of the picture inside its lower left triangle."""
    image = pixels(png)
    height, width = image.shape[:2]
    return image[int(0.7 * height) : int(0.85 * height), int(0.15 * width) : int(0.3 * width)].reshape(-1, 3)


def maps(weights: torch.Tensor) -> AttentionMaps:
    n = weights.shape[-1]
    return AttentionMaps(tuple("x" * n), weights[None, None], (weights != 0).sum(-1).float()[None, None])


def curve(name: str, last: float) -> Curve:
    return Curve(name=name, steps=(1, 2, 3), bits=(6.0, 5.0, last), held_out_steps=(3,), held_out_bits=(last,))


def test_loss_curves_shows_every_curve_and_is_the_same_again() -> None:
    curves = [curve(f"m{i}", 2.0 + 0.2 * i) for i in range(4)]
    png = loss_curves(curves, baseline=2.1, baseline_name="5-gram")
    assert png == loss_curves(curves, baseline=2.1, baseline_name="5-gram")
    assert all(count(pixels(png), line_style(i)[0]) for i in range(4))


def test_a_curve_far_above_the_baseline_is_not_cut_off() -> None:
    colour = np.array([0x00, 0x72, 0xB2])
    for last in (1.9, 9.0):
        image = pixels(loss_curves([curve("m", last)], baseline=2.0, baseline_name="b"))
        _, columns = np.nonzero((image == colour).all(-1))
        # the dot of the last step, right of the legend
        assert (columns > 0.9 * image.shape[1]).sum() > 10, last


def test_a_curve_that_begins_above_the_axes_is_cut_there() -> None:
    """Nothing is drawn beside the legend, which stands above the axes."""
    colour = np.array([0x00, 0x72, 0xB2])
    begun = Curve(name="m", steps=(1, 3), bits=(50.0, 4.0), held_out_steps=(1, 3), held_out_bits=(50.0, 4.0))
    image = pixels(loss_curves([begun], baseline=2.0, baseline_name="b"))
    rows, columns = np.nonzero((image == colour).all(-1))
    assert rows[columns > 0.75 * image.shape[1]].min() > 0.12 * image.shape[0]
    left = rows[columns < 0.35 * image.shape[1]]
    assert not len(left) or left.min() > 0.12 * image.shape[0]


def test_styles_differ() -> None:
    assert len({line_style(i) for i in range(24)}) == 24


def test_zero_is_white_and_small_is_not() -> None:
    n = 12
    zero = torch.eye(n)
    small = torch.where(torch.ones(n, n).tril() > 0, 1e-30, 0.0) + torch.eye(n)
    assert (inner(attention_map(maps(zero), 0, 0, title="zero")) == 255).mean() > 0.95
    assert (inner(attention_map(maps(small), 0, 0, title="small")) == 255).mean() < 0.05


def test_negative_weights_have_another_colour() -> None:
    ones = torch.ones(12, 12).tril() / 4
    blue = inner(attention_map(maps(ones), 0, 0, title="plus")).mean(0)
    orange = inner(attention_map(maps(-ones), 0, 0, title="minus")).mean(0)
    assert blue[2] > blue[0] + 30
    assert orange[0] > orange[2] + 30


@pytest.mark.parametrize("n", [1, 2, 200])
def test_sizes_and_rows_without_weight(n: int) -> None:
    assert attention_map(maps(torch.zeros(n, n)), 0, 0, title="none").startswith(SIGNATURE)


def test_labels_that_a_font_cannot_show() -> None:
    assert visible(" ") == "␣"
    assert visible("\n") == "↵"
    assert visible("\x07") == "·"
    assert visible("ab") == "ab"
    names = AttentionMaps(("$", "\n", "\\", "^"), torch.eye(4)[None, None], torch.ones(1, 1, 4))
    assert attention_map(names, 0, 0, title="$x$ and _ and %").startswith(SIGNATURE)


def test_dollars_are_no_formulas() -> None:
    """As one, this raises an error."""
    names = AttentionMaps((r"$\frac$",), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1))
    assert attention_map(names, 0, 0, title=r"$\frac$").startswith(SIGNATURE)
