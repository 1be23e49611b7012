"""Trends as words of the grammar: text, JSON, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regard import Spec, registries
from regard.checks import ArgumentError
from regard.grammar.trends import Delta, GatedDelta, LinearAttention, Mesa, trends


@pytest.mark.parametrize(
    ("text", "trend", "said"),
    [
        ("interpolated[mesa]", Mesa(1.0, 0.0), "interpolated[mesa]"),
        ("gaussian*fixed*residual(trend=mesa(ridge=1.0))", Mesa(), "interpolated[mesa]"),
        ("gaussian*fixed*residual", Mesa(), "interpolated[mesa]"),
        (
            " interpolated[mesa(ridge=0.5, log_decay=-1)] ",
            Mesa(0.5, -1.0),
            "interpolated[mesa(ridge=0.5,log_decay=-1.0)]",
        ),
        ("interpolated[delta]", Delta(1.0), "interpolated[delta]"),
        ("interpolated[linear-attention]", LinearAttention(), "interpolated[linear-attention]"),
        (
            "biweight*residual(trend=gated-delta(beta=0.5))",
            GatedDelta(0.5),
            "biweight*adaptive*residual(trend=gated-delta(beta=0.5))",
        ),
        (
            "linear*residual(trend=delta)*normalised*cosine",
            Delta(),
            "linear*fixed*cosine*residual(trend=delta)*normalised",
        ),
    ],
)
def test_text_and_json(text: str, trend: object, said: str) -> None:
    spec = Spec.parse(text)
    assert spec.trend == trend
    assert str(spec) == said
    assert Spec.parse(said) == Spec.from_json(spec.to_json()) == Spec.parse("*".join(spec.parts())) == spec
    assert hash(Spec.parse(said)) == hash(spec)
    assert spec.local.trend is None
    assert replace(spec.local, trend=trend) == spec


def test_every_trend_has_a_sentence() -> None:
    assert registries()["trend"] is trends
    for name, make in trends.items():
        spec = Spec("gaussian", "fixed", trend=name)
        assert spec.trend == make()
        assert str(spec) == f"interpolated[{name}]"


def test_a_sentence_without_a_trend_is_what_it_was() -> None:
    spec = Spec.parse("softmax")
    assert spec.trend is None
    assert spec.local is spec
    older = '{"kernel": {"name": "gaussian"}, "bandwidth": {"name": "fixed"}, "similarity": {"name": "dot"}}'
    assert Spec.from_json(older) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interpolated[messa]", "unknown trend 'messa'. Did you mean 'mesa'?"),
        ("interpolated[mesa*delta]", "a trend is one term, such as mesa(ridge=0.5), not 'mesa*delta'"),
        ("gaussian*fixed*residual(trned=mesa)", "residual: unknown argument 'trned'; it takes: trend."),
        ("gaussian*fixed*residual(trend=mesa(ridge=-1))", "mesa: ridge is -1, expected ridge > 0"),
        ("gaussian*fixed*residual(trend=mesa(beta=1))", "mesa: unknown argument 'beta'; mesa takes ridge, log_decay."),
        ("gaussian*fixed*residual*residual", "names its trend twice"),
        ("gaussian*fixed*linear*residual", "the local linear model is one itself; use degree=0"),
        ("linear*fixed*residual", "these weights do not sum to one"),
        ("biweight*fixed*residual*unnormalised", "these weights do not sum to one"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Spec.parse(text)
    assert message in str(caught.value)


def test_an_object_must_be_a_trend() -> None:
    with pytest.raises(ArgumentError, match="is no trend; give a name or an instance of: "):
        Spec("gaussian", trend=3.0)
    with pytest.raises(ArgumentError, match="beta is 0, expected beta > 0"):
        Delta(0.0)
