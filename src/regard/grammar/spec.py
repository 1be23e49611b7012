"""`Spec`: kernel, thresholding rule, similarity and local model as one immutable object with a text form.

    biweight                                    a kernel under its default rule (here: adaptive, 1.5-entmax)
    triweight*anchored(margin=0.5)              kernel * thresholding rule
    gaussian*fixed*euclidean                    ... * similarity
    biweight*adaptive*linear(ridge=0.1)         ... * local linear model
    linear*fixed*cosine*normalised              ... * normalised | unnormalised, where it is not the default

The first part is always the kernel; the others may come in any order. The name of a preset stands for its spec, and
`local-linear[NAME]` for the local linear model with the weights of NAME.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from ..checks import ArgumentError, in_range, number, one_of, refuse, require, shown, suggestion, within
from ..registry import Registry
from .bandwidths import bandwidths
from .kernels import NAMED_POWERS, Number, ParamInfo, Params, Polynomial, kernels
from .reader import Reader, kept
from .similarities import similarities
from .solvers import solvers
from .weighting import Weighting

DEGREES = (0, 1)
RIDGE_MODES = ("relative", "absolute")
LINEAR_ONLY = "belongs to the local linear model; give degree=1 or leave it out."
LOCAL_LINEAR = ("ridge", "probe")
"""Parameters of the local linear model. They may have one value per coordinate: [B, H, Tq, D]."""


@dataclass(frozen=True)
class Spec:
    """Attention spec: how scores become weights, and which local model the weights fit.

    Args:
        kernel: a kernel or its name (`regard.grammar.kernels`).
        bandwidth: a thresholding rule or its name. Default: the kernel's own (adaptive for polynomials, nearest for
            uniform, fixed for the others).
        degree: 0 for the local constant model (attention), 1 for the local linear model.
        ridge: ridge of the local linear model. Default 0.1.
        solver: solver of the local linear model or its name. Default `Auto`.
        similarity: a similarity or its name.
        normalise: whether weights are divided by their sum. Default: yes, unless weights can be negative.
        ridge_mode: "relative" (to the total kernel weight) or "absolute" (Local Linear Attention, equation 7).
            "absolute" needs a Gaussian kernel, or the rule fixed or anchored.

    Raises:
        ArgumentError: an unknown name (with a suggestion), a number out of range, or a combination that has no
            meaning (with the reason).
    """

    kernel: Any
    bandwidth: Any = None
    degree: int = 0
    ridge: float | None = None
    solver: Any = None
    similarity: Any = "dot"
    normalise: bool | None = None
    ridge_mode: str = "relative"

    def __post_init__(self) -> None:
        if isinstance(self.kernel, str) and self.kernel not in kernels and self.kernel in presets_registry:
            raise ArgumentError(f"Spec: {self.kernel!r} is a preset, not a kernel; use Spec.parse({self.kernel!r}).")
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        axis = lambda name, value: put(name, within("Spec", name, instance_of, AXES[name], value))  # noqa: E731
        axis("kernel", self.kernel)
        axis("bandwidth", self.kernel.bandwidth if self.bandwidth is None else self.bandwidth)
        axis("similarity", self.similarity)
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree not in DEGREES:
            raise refuse("Spec", "degree", self.degree, "0 (constant) or 1 (linear)")
        if self.degree == 0:
            for name, value in (("ridge", self.ridge), ("solver", self.solver)):
                require(value is None, "Spec", f"{name} {LINEAR_ONLY}")
        else:
            put("ridge", number("Spec", "ridge", 0.1 if self.ridge is None else self.ridge, low=0.0))
            axis("solver", "auto" if self.solver is None else self.solver)
            if self.ridge == 0 and self.solver.needs_ridge:
                raise ArgumentError(f"Spec: the solver {self.solver.name} needs ridge > 0; use cholesky for ridge 0.")
        self._check_ridge_mode()
        below = getattr(self.kernel, "below", None)
        if below is not None and self.similarity.upper > below:
            raise ArgumentError(
                f"Spec: the {self.kernel.name} kernel needs scores below {below:g}; use similarity='cosine', whose "
                f"values stay inside (-1, 1), not {self.similarity.name!r}."
            )
        if not isinstance(self.normalise, (bool, type(None))):
            raise refuse("Spec", "normalise", self.normalise, "True, False or None")
        if self.normalise is None:
            put("normalise", self._normalised_by_default())
        parts = (self.kernel, self.normalise, self.similarity)
        weighting = within("Spec", "bandwidth", self.bandwidth.weighting, *parts)
        put("_weighting", weighting)  # built once; raises for combinations without a meaning
        axes = {f.name: getattr(self, f.name) for f in fields(self)}
        put("_json", json.dumps({k: _to_dict(v) if k in AXES and v is not None else v for k, v in axes.items()}))
        if self.degree == 1 and not (weighting.nonnegative and weighting.normalised):
            able = ", ".join(n for n, s in presets_registry.items() if s.degree == 0 and s.convex)
            raise ArgumentError(
                f"Spec: the local linear model needs non-negative weights that sum to one; {self.kernel.name} with "
                f"these choices (normalise={self.normalise}) has none. Presets that do: {able}."
            )

    def _check_ridge_mode(self) -> None:
        if one_of("Spec", "ridge_mode", self.ridge_mode, RIDGE_MODES) == "relative":
            return
        require(self.degree == 1, "Spec", f"ridge_mode {LINEAR_ONLY}")
        has_mass = self.kernel.name == "gaussian" or self.bandwidth.name in ("fixed", "anchored")
        smooth = getattr(self.bandwidth, "gradient", "hard") != "hard"  # these weights are not kernel values
        if smooth or not (self.kernel.ranked and has_mass):
            raise ArgumentError(
                f"Spec: an absolute ridge needs the total kernel weight, which {self.kernel.name} under "
                f"{self.bandwidth.name} does not have; use ridge_mode='relative', the gaussian kernel, or the rule "
                f"fixed or anchored."
            )

    def _normalised_by_default(self) -> bool:
        """Return True unless weights can be negative."""
        bias = getattr(self.bandwidth, "bias", None) or 0.0
        return bool(self.kernel.nonnegative or self.similarity.lower + bias >= 0)

    @property
    def weighting(self) -> Weighting:
        """The kernel and the rule as one object."""
        return self._weighting  # type: ignore[attr-defined]

    @property
    def convex(self) -> bool:
        """Whether weights are non-negative and sum to one."""
        return self.weighting.nonnegative and self.weighting.normalised

    @property
    def takes_scale(self) -> bool:
        """Whether `scale=` is accepted: not by feature maps, nor by kernels that fix their own scale."""
        if getattr(self.bandwidth, "h", None) is not None or not self.similarity.scaled:
            return False
        # Kernels of the score itself on a bounded similarity (1 + cosine, 1/(1 - cosine)) fix their own scale.
        return self.kernel.scaled and (self.kernel.ranked or self.similarity.lower == -float("inf"))

    @property
    def params(self) -> Mapping[str, ParamInfo]:
        """The parameters that `params=` may give, per head or per row."""
        params = dict(self.weighting.params)
        if self.degree == 1:
            params["ridge"] = ParamInfo(self.ridge or 0.0, low=0.0, strict=self.solver.needs_ridge)
            if self.solver.name == "learned":
                params["probe"] = ParamInfo(0.0)
            if "bias" in params and not self.kernel.nonnegative:  # a smaller one makes weights negative
                params["bias"] = ParamInfo(params["bias"].default, low=0.0 - self.similarity.lower)
        return params

    def resolve(self, dim: int, scale: Number | None, params: Params) -> tuple[Number, dict[str, Number]]:
        """Return the scale of the scores and the parameters of the weighting, for head dimension `dim`; raise
        ArgumentError for a scale that the spec does not accept, or an unknown name in `params`."""
        for name, value in params.items():
            if name not in self.params:
                text = f"unknown parameter {shown(name)} for {self}; it takes: {', '.join(self.params) or 'none'}."
                raise ArgumentError(f"attention: params: {text}")
            info = self.params[name]
            in_range("attention", f"params[{name!r}]", value, low=info.low, strict=info.strict)
        if scale is not None and not self.takes_scale:
            raise ArgumentError(f"attention: {self} takes no scale; leave scale out.")
        if scale is None and not self.kernel.scaled:
            scale = 1.0
        weights = {k: v for k, v in params.items() if k not in LOCAL_LINEAR}
        return self.bandwidth.resolve(self.kernel, self.similarity, scale, weights, dim)

    # Text and JSON ------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Return the Spec that `text` describes: a preset, or parts joined by `*` (see the module docstring).

        Raises:
            ArgumentError: text that cannot be read; the message names the closest known names.
        """
        return _read("Spec.parse: text", _parsed, text)

    def __str__(self) -> str:
        for name, preset in presets_registry.items():
            if preset == self:
                return name
        if self.degree == 1:
            for name, preset in presets_registry.items():
                if preset.degree == 0 and preset.convex and local_linear(preset) == self:
                    return f"local-linear[{name}]"
        return "*".join(self.parts())

    def parts(self) -> list[str]:
        """Return the parts that `*` joins in the text form."""
        parts = [_term(self.kernel), _term(self.bandwidth)]
        if self.similarity != similarities.get("dot")():
            parts.append(_term(self.similarity))
        if self.degree == 1:
            solver = "" if self.solver.name == "auto" else f",solver={_term(self.solver)}"
            mode = "" if self.ridge_mode == "relative" else f",ridge_mode={self.ridge_mode}"
            parts.append(f"linear(ridge={self.ridge!r}{solver}{mode})")
        if self.normalise != self._normalised_by_default():
            parts.append("normalised" if self.normalise else "unnormalised")
        return parts

    def to_json(self) -> str:
        """Return a JSON object, which `from_json` reads."""
        return self._json  # type: ignore[attr-defined]

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        """Return the Spec of a JSON object as `to_json` writes it; `kernel` alone is enough.

        Raises:
            ArgumentError: not JSON, unknown fields or names.
        """
        return _read("Spec.from_json: text", cls._read_json, text)

    @classmethod
    def _read_json(cls, text: str) -> "Spec":
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ArgumentError(f"not JSON ({error}).") from None
        if not isinstance(data, dict) or data.get("kernel") is None:
            raise ArgumentError("expected an object with at least 'kernel'.")
        if data.pop("trend", None) is not None:
            raise ArgumentError(NO_TREND)
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:  # a suggestion takes longer than the rest
                raise ArgumentError(f"unknown field {key!r}.{suggestion(key, known)}")
        return cls(**{k: _from_dict(AXES[k], v) if k in AXES else v for k, v in data.items() if v is not None})


AXES: dict[str, Registry[Any]] = {
    "kernel": kernels,
    "bandwidth": bandwidths,
    "similarity": similarities,
    "solver": solvers,
}
NO_TREND = (
    "a spec no longer has a trend. Call regard.interpolated_attention(query, key, value, trend='mesa', "
    "spec='softmax'), or let HybridConfig use the token mixer 'interpolated', whose mixer_options are "
    "{'interpolated': {'trend': 'mesa', 'spec': 'softmax'}}."
)
"""Error for texts and files of the time when `interpolated[mesa]` was a spec."""


def instance_of(registry: Registry[Any], value: Any, **arguments: Any) -> Any:
    """Return an object of a registry: as given, or made from its registered name."""
    if not isinstance(value, str):
        if isinstance(value, type) or getattr(value, "name", None) not in registry:
            raise ArgumentError(
                f"Spec: {shown(value)} is not a {registry.kind}; give a name or an instance of: "
                f"{', '.join(registry.names())}."
            )
        same = _from_dict(registry, _to_dict(value)) if is_dataclass(value) else None
        if type(same) is not type(value) or same != value:  # saved models and kernels use name and arguments alone
            raise ArgumentError(
                f"Spec: {value!r} differs from the {registry.kind} that is registered as {value.name!r}; "
                f"register its class under another name."
            )
        return value
    make = registry.get(value)
    known = [f.name for f in fields(make)] if isinstance(make, type) else []
    for key in arguments:
        if key not in known:
            what = f"takes {', '.join(known)}" if known else "takes no arguments"
            raise ArgumentError(f"{value}: unknown argument {key!r}; {value} {what}.")
    return make(**arguments)


def _to_dict(value: Any) -> dict[str, Any]:
    """Return the `name` of an axis object, and its fields that differ from their defaults."""
    if isinstance(value, Polynomial):
        named = [name for name, r in NAMED_POWERS.items() if r == value.r]
        return {"name": named[0]} if named else {"name": value.name, "r": value.r}
    given = {f: getattr(value, f.name) for f in fields(value) if f.init}
    return {"name": value.name, **{f.name: x for f, x in given.items() if f.default is MISSING or x != f.default}}


def _term(value: Any) -> str:
    arguments = _to_dict(value)
    name = arguments.pop("name")
    text = ",".join(f"{k}={v!r}" if not isinstance(v, str) else f"{k}={v}" for k, v in arguments.items())
    return f"{name}({text})" if text else name


def _from_dict(registry: Registry[Any], value: Any) -> Any:
    if isinstance(value, str):
        return instance_of(registry, value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ArgumentError(f"a {registry.kind} is a name or an object with 'name', got {value!r}.")
    return instance_of(registry, value["name"], **{k: v for k, v in value.items() if k != "name"})


# Parsing ----------------------------------------------------------------------------------------------------

_CONSTRUCTOR = re.compile(r"^Spec: (?:(?:kernel|bandwidth|similarity|solver): )?")


def _read(where: str, read: Callable[[str], Spec], text: str) -> Spec:
    """Return read(text). Errors begin with `where`, the call and its argument, not with the constructor's name."""
    try:
        return read(text)
    except ArgumentError as error:
        words = _CONSTRUCTOR.sub("", str(error))
    except RecursionError:
        words = f"{shown(text)} has too many brackets within brackets."
    raise ArgumentError(f"{where}: {words}")


def _parse(text: str) -> Spec:
    if not isinstance(text, str) or not text.strip():
        raise ArgumentError(f"expected the text of a spec, such as 'softmax', got {shown(text)}.")
    if text.strip() in presets_registry:
        return presets_registry.get(text.strip())
    match = re.fullmatch(r"\s*local-linear\[(.+)\]\s*", text)
    if match:
        return local_linear(_parse(match.group(1)))
    if re.fullmatch(r"\s*interpolated\[.+\]\s*", text):
        raise ArgumentError(NO_TREND)
    return _compose(Reader(text).terms(), text)


_parsed = kept(_parse)


def _compose(terms: list[tuple[str, dict[str, Any]]], text: str) -> Spec:
    name, arguments = terms[0]
    if name not in kernels:
        known = kernels.names(aliases=True) + (presets_registry.names() if len(terms) == 1 else [])
        if name in presets_registry:
            whole = "*".join(presets_registry.get(name).parts())
            raise ArgumentError(f"{name!r} is a preset, which stands alone; write its parts: {whole}.")
        if name in bandwidths or name in similarities:
            raise ArgumentError(f"{text!r} begins with {name!r}; a spec begins with its kernel: gaussian*{text}.")
        what = "spec" if len(terms) == 1 else "kernel"
        raise ArgumentError(f"unknown {what} {name!r}.{suggestion(name, known)}")
    made: dict[str, Any] = {"kernel": instance_of(kernels, name, **arguments)}
    for name, arguments in terms[1:]:
        part = _part(name, arguments)
        twice = set(part) & set(made)
        if twice:
            raise ArgumentError(f"{text!r} names its {twice.pop()} twice.")
        made.update(part)
    return Spec(**made)


def _part(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name in ("linear", "constant"):
        known = ("ridge", "solver", "ridge_mode") if name == "linear" else ()
        for key in arguments:
            if key not in known:
                raise ArgumentError(f"{name}: unknown argument {key!r}; it takes: {', '.join(known) or 'none'}.")
        solver = arguments.get("solver")
        if isinstance(solver, tuple):
            arguments = {**arguments, "solver": instance_of(solvers, solver[0], **solver[1])}
        return {"degree": int(name == "linear"), **arguments}
    if name == "residual":
        raise ArgumentError(NO_TREND)
    if name in ("normalised", "unnormalised"):
        return {"normalise": name == "normalised"}
    if name in bandwidths:
        return {"bandwidth": instance_of(bandwidths, name, **arguments)}
    if name in similarities:
        return {"similarity": instance_of(similarities, name, **arguments)}
    parts = [*bandwidths.names(), *similarities.names(), "linear", "normalised", "unnormalised"]
    raise ArgumentError(f"unknown part {name!r}.{suggestion(name, parts)}")


# Presets ----------------------------------------------------------------------------------------------------

presets_registry: Registry[Spec] = Registry("preset", "regard.presets")


def local_linear(spec: Spec, ridge: float = 0.1) -> Spec:
    """Return the local linear model with the weights of `spec`."""
    return Spec(spec.kernel, spec.bandwidth, 1, ridge, None, spec.similarity, spec.normalise)


def presets() -> dict[str, Spec]:
    """Return every preset by name. Each can replace softmax in a layer."""
    return dict(presets_registry.items())


def as_spec(spec: Spec | str, call: str = "Spec", argument: str = "spec") -> Spec:
    """Return a Spec as it is, or parsed from its text; errors name `argument` of `call`."""
    if isinstance(spec, Spec):
        return spec
    if isinstance(spec, str):
        return _read(f"{call}: {argument}", _parsed, spec)
    raise ArgumentError(f"{call}: {argument}: expected a Spec or its text, got {shown(spec)} ({type(spec).__name__}).")


_TEXTS = {
    "softmax": "gaussian*fixed",
    "sparsemax": "epanechnikov*adaptive",
    "biweight": "biweight*adaptive",
    "triweight": "triweight*adaptive",
    "relumax": "epanechnikov*anchored(margin=1)",
    "normrelu": "epanechnikov*fixed",
    "topk-softmax": "gaussian*nearest(k=32)",
    "topk-uniform": "uniform*nearest(k=32)",
    "exponential": "gaussian*fixed",
    "linear": "linear*fixed",
    "cosine": "linear*fixed*cosine",
    "shift-cosine": "linear*fixed(bias=1)*cosine",
    "geometric": "geometric*fixed*cosine",
    "clipped-geometric": "clipped-geometric*fixed",
    "rbf": "gaussian*fixed*euclidean",
    "relu": "linear*fixed(bias=1e-4)*relu",
    "relu2": "linear*fixed(bias=1e-4)*relu2",
    "elu": "linear*fixed*elu",
    "local-linear": "gaussian*fixed*linear(ridge=0.1)",
}
for _name_of, _text in _TEXTS.items():
    presets_registry.register(_name_of)(_compose(Reader(_text).terms(), _text))
