"""A tokenizer for the vocabulary of the small models (`any_model.SIZES`): a word a token, `w2 w3 ...`."""

from any_model import SIZES
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast


def tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer; 0 is padding and 1 ends a text."""
    known = {"<pad>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, SIZES["vocab_size"])}}
    plain = Tokenizer(WordLevel(known, unk_token="</s>"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="</s>")
