"""Global linear models by name: what is read, what is refused, and the specs written when they were part of a spec."""

import json

import pytest
from mistakes import error_of, refuses

import regard
from regard import Spec, registries
from regard.recurrent.trends import Delta, GatedDelta, LinearAttention, Mesa, as_trend, trends


@pytest.mark.parametrize(
    ("text", "trend"),
    [
        ("mesa", Mesa(1.0, 0.0)),
        (" mesa(ridge=0.5, log_decay=-1) ", Mesa(0.5, -1.0)),
        ("delta", Delta(1.0)),
        ("linear-attention", LinearAttention()),
        ("gated-delta(beta=0.5)", GatedDelta(0.5)),
    ],
)
def test_text(text: str, trend: object) -> None:
    assert as_trend(text) == as_trend(trend) == trend


def test_every_name_makes_a_trend() -> None:
    assert registries()["trend"] is trends
    for name, make in trends.items():
        assert as_trend(name) == make()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("messa", "unknown trend 'messa'. Did you mean 'mesa'?"),
        ("mesa*delta", "a trend is one term, such as mesa(ridge=0.5), not 'mesa*delta'"),
        ("mesa(ridge=-1)", "mesa: ridge is -1, expected ridge > 0"),
        ("mesa(beta=1)", "mesa: unknown argument 'beta'; mesa takes ridge, log_decay."),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    assert message in error_of(as_trend, text)


def test_an_object_must_be_a_trend() -> None:
    refuses("is not a trend; give a name or an instance of: ", as_trend, 3.0)
    refuses("beta is 0, expected beta > 0", Delta, 0.0)


@pytest.mark.parametrize("text", ["interpolated[mesa]", "biweight*residual(trend=delta)", "gaussian*fixed*residual"])
def test_a_spec_with_a_trend_says_what_to_use(text: str) -> None:
    refuses(r"interpolated_attention.*token mixer 'interpolated'", Spec.parse, text)
    refuses("token mixer 'interpolated'", regard.nn.Attention, 8, 2, spec=text)


def test_json_of_the_time_when_a_spec_had_a_trend() -> None:
    older = {**json.loads(Spec.parse("softmax").to_json()), "trend": None}
    assert Spec.from_json(json.dumps(older)) == Spec.parse("softmax")
    refuses("token mixer 'interpolated'", Spec.from_json, json.dumps({**older, "trend": {"name": "mesa"}}))
