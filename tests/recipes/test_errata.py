"""Each erratum shows an error: what is printed is off, what is called correct is not."""

import pytest

from regard_recipes.errata import _fast_weights, _iclm_and_kernels, _local_linear, _sparse_attention
from regard_recipes.errata._listing import Erratum
from regard_recipes.errata.errata import ERRATA

PAIRS = [
    "ridge-factor", "homogeneity", "signs-of-the-backward-pass", "product-in-conjugate-gradients",
    "limit-of-the-bandwidth", "two-bandwidths", "caption", "one-step-rewriting",
]  # fmt: skip
"""Errata with an error as printed first, and the error of the correction second."""


def test_every_erratum_has_a_name_and_texts_of_its_own() -> None:
    modules = (_fast_weights, _iclm_and_kernels, _local_linear, _sparse_attention)
    assert sum(isinstance(x, Erratum) for module in modules for x in vars(module).values()) == len(ERRATA)
    assert all(len(each.texts()) == 2 for each in ERRATA.values())


@pytest.mark.parametrize("name", PAIRS)
def test_the_correction_is_exact_and_the_print_is_not(name: str) -> None:
    printed, corrected = ERRATA[name].numbers().values()
    assert printed > 0.01
    assert corrected < 1e-12


def test_the_gradient_of_the_published_program() -> None:
    dq, dk, ours = ERRATA["gradient-of-the-ridge"].numbers().values()
    assert 0.03 < dq < 0.1
    assert 0.03 < dk < 0.1
    assert ours < 1e-12


def test_the_other_numbers() -> None:
    value = {name: list(ERRATA[name].numbers().values()) for name in ERRATA if name not in PAIRS}
    assert value["block-diagonal"][0] > 0.5
    assert value["block-diagonal"][1] == 0
    assert value["reads-before-the-answer"][0] == 0 < value["reads-before-the-answer"][1]
    assert value["sign-of-the-entropy"][0] < 0 < value["sign-of-the-entropy"][1]
    assert value["powers-below-one"][0] < 1e-12
    assert value["distance-from-softmax"][1] > 3
    assert value["parameters-of-whole-embeddings"][1] > 1.1 * value["parameters-of-whole-embeddings"][0]
    assert value["normalised-relu-without-bandwidth"][0] < 1e-15
    assert value["uniform-nearest-keys"] == [0]
    assert 1 <= value["relumax-with-temperature-twice"][0] < value["relumax-with-temperature-twice"][1] < 64
    assert value["exact-match-of-letters"] == [1, 0]
    assert 0.4 < value["sums-of-signed-kernels"][0] < 0.6
