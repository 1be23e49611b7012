"""The model card: README.md in the folder of a trained model, made from its configuration, its data and its results."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..._version import __version__
from ...models import language_models
from ...models.base.base_config import own_fields
from ..config import DataOptions, OptimiserOptions, TrainConfig
from ..data.text import Source

_ELSEWHERE = ("data", "device", "task", "setting", "task_option")
"""Options that the card leaves out: of this machine, and those without a part in a run on a text."""
_BODY = """
# {name}

{about} Trained with [regard](https://pypi.org/project/regard/) {version}.

{parameters:,} parameters; `{config}`.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer  # pip install "regard[lm]"

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

The code that is trusted is `regard_auto.py`, an import of the installed regard. After `import regard.models`,
`trust_remote_code` is not needed.

## Model

{fields}

## Training

{steps:,} steps on {text}: {held_out}

{options}

## Results

Over all held-out text, in windows of {context} tokens that advance by half of that; every token but the first is
predicted once, from at least half a window before it.

{results}
"""


def write_card(out: Path, config: TrainConfig, model: PreTrainedModel, text: Source, summary: dict[str, Any]) -> None:
    """Write README.md with the metadata of the Hugging Face Hub, without names of folders on this machine."""
    kinds = (entry for _, entry in language_models.items() if isinstance(model.config, entry.config))
    about = next((entry.about for entry in kinds), f"A {type(model).__name__}.")
    name, source = config.out.resolve().name, text.path.name
    measured = {
        "loss in nats per token": summary["loss"],
        "bits per character": summary["bits_per_char"],
        "bits per byte": summary["bits_per_byte"],
    }
    results = [
        EvalResult(
            task_type="text-generation", dataset_type="text", dataset_name=f"{source}, held-out part",
            metric_type=metric.replace(" ", "_"), metric_name=metric, metric_value=round(value, 6),
        )
        for metric, value in measured.items()
    ]  # fmt: skip
    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["regard", model.config.model_type],
        model_name=name, eval_results=results,
    )  # fmt: skip
    names = [field.name for part in (DataOptions, OptimiserOptions) for field in fields(part)]
    options = {name: getattr(config, name) for name in names if name not in _ELSEWHERE}
    size = f"{text.characters:,} characters, SHA-256 `{text.sha256}`"
    held_out = f"{size}. Its last {config.validation:.0%} were held out."
    if text.stream is not None:
        held_out = f"a stream, of which the first documents were held out ({size})."
    body = _BODY.format(
        name=name,
        about=about,
        version=__version__,
        parameters=summary["parameters"],
        config=type(model.config).__name__,
        fields=_table({field: getattr(model.config, field) for field in own_fields(type(model.config))}),
        steps=summary["step"],
        text=source,
        held_out=held_out,
        context=config.context,
        options=_table({name: value for name, value in options.items() if value is not None}),
        results=_table({metric: f"{value:.4f}" for metric, value in measured.items()}),
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{body}").save(out / "README.md")


def _table(rows: dict[str, Any]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
