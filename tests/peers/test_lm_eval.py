"""lm-eval loads a saved model by its path, measures the log-likelihoods that the model itself gives, and generates."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from any_model import SIZES, make, text
from small_words import tokenizer
from torch import Tensor

from regard.cli import main
from regard.models import HybridConfig, HybridForCausalLM, language_models

lm_eval = pytest.importorskip("lm_eval", reason="the extra `peers` brings it")
pytestmark = pytest.mark.peers
MIXERS = "biweight"


def words(ids):
    return " ".join(f"w{i}" for i in ids)


def tokens(length, seed):
    """Tokens that the tokenizer has words for."""
    return text(1, length, seed)[0].clamp(min=2)


@pytest.fixture(scope="module", params=language_models.names())
def saved(request, tmp_path_factory):
    """(model, folder) of a saved model with its tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param, MIXERS, torch.float32, num_hidden_layers=2)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model, str(folder)


@torch.no_grad()
def score(model, context, continuation):
    """(log-likelihood, whether greedy) of a continuation, one text alone."""
    predicted = model(torch.cat([context, continuation])[None]).logits[0, len(context) - 1 : -1].log_softmax(-1)
    total = predicted.gather(1, continuation[:, None]).sum().item()
    return total, bool((predicted.argmax(-1) == continuation).all())


def test_log_likelihoods_of_a_padded_batch(saved):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, folder = saved
    judge = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=4)
    pairs = [(tokens(n, n), tokens(m, 50 + n)) for n, m in ((9, 2), (3, 1), (6, 4), (1, 1), (12, 3))]
    texts = [(words(a.tolist()), " " + words(b.tolist())) for a, b in pairs]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(texts)]
    for (found, greedy), (a, b) in zip(judge.loglikelihood(asked, disable_tqdm=True), pairs, strict=True):
        expected, is_greedy = score(model, a, b)
        assert found == pytest.approx(expected, abs=1e-3)
        assert greedy == is_greedy


def test_a_task_from_a_local_file(saved, tmp_path):
    model, folder = saved
    rows, right, file = [], [], tmp_path / "rows.jsonl"
    for i in range(6):
        context, choices = tokens(7, i), [tokens(2, 10 * i + k) for k in range(3)]
        scores = [score(model, context, choice)[0] for choice in choices]
        gold = i % 3
        right.append(scores.index(max(scores)) == gold)
        told = [words(choice.tolist()) for choice in choices]
        rows.append({"question": words(context.tolist()), "choices": told, "gold": gold})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "gold", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    found = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": folder, "dtype": "float32"}, tasks=[task], device="cpu", batch_size=2,
        bootstrap_iters=0, cache_requests=False,
    )  # fmt: skip
    assert found["results"]["local"]["acc,none"] == pytest.approx(sum(right) / len(right))


def test_generation_until_a_word(saved):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, folder = saved
    judge = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=2)
    prompts = [tokens(n, n) for n in (4, 9)]
    how = {"until": ["</s>"], "max_gen_toks": 5}
    asked = [Instance("generate_until", {}, (words(p.tolist()), how), i) for i, p in enumerate(prompts)]
    for found, prompt in zip(judge.generate_until(asked, disable_tqdm=True), prompts, strict=True):
        made = model.generate(prompt[None], max_new_tokens=5, do_sample=False, eos_token_id=1, pad_token_id=0)
        assert found.strip() == tokenizer().decode(made[0, len(prompt) :]).split("</s>")[0].strip()


WIDTH = 32


def table() -> Tensor:
    """Return the probability [V, V] of each token (column) after each (row)."""
    draw = torch.randn(SIZES["vocab_size"], SIZES["vocab_size"], generator=torch.Generator().manual_seed(5))
    return (3 * draw).softmax(-1)


@torch.no_grad()
def bigram_model() -> HybridForCausalLM:
    """Return the language model that predicts each token from the one before it alone, by `table`: its layer adds zero,
    and the norm multiplies a one-hot embedding by sqrt(WIDTH)."""
    config = HybridConfig(
        vocab_size=SIZES["vocab_size"], hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
        feed_forward="none", tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, max_position_embeddings=16,
        rms_norm_eps=1e-12,
    )  # fmt: skip
    model = HybridForCausalLM(config).eval()
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(SIZES["vocab_size"], WIDTH))
    model.lm_head.weight[:, : SIZES["vocab_size"]] = table().log().T / WIDTH**0.5
    return model


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """(folder of the bigram model, folder of tasks, texts): perplexity of texts longer and shorter than the context."""
    folder = tmp_path_factory.mktemp("bigram")
    bigram_model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    texts = [tokens(length, length) for length in (5, 40)]  # the context is 16
    rows, file = [json.dumps({"page": words(each.tolist())}) for each in texts], folder / "rows.jsonl"
    file.write_text("\n".join(rows))
    task = {
        "task": "local_pages", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{page}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    }  # fmt: skip
    (folder / "tasks").mkdir()
    (folder / "tasks" / "local_pages.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder / "model", folder / "tasks", texts


def by_hand(texts):
    """Bits per byte of texts whose first token is predicted from the end token, 1: lm-eval's prefix token."""
    nats = -sum(table()[[1, *each[:-1]], each].log().sum().item() for each in texts)
    return nats / math.log(2) / sum(len(words(each.tolist())) for each in texts)


def test_the_command_of_lm_eval_finds_the_classes(local, tmp_path):
    model, tasks, texts = local
    program = "import sys; sys.argv[0] = 'lm_eval'; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    options = {
        "model": "hf", "model_args": f"pretrained={model},dtype=float32,trust_remote_code=True", "device": "cpu",
        "tasks": "local_pages", "include_path": str(tasks), "output_path": str(tmp_path),
    }  # fmt: skip
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run([sys.executable, "-c", program, *given], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    (file,) = Path(tmp_path).rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["local_pages"]
    assert found["bits_per_byte,none"] == pytest.approx(by_hand(texts), abs=1e-4)


def test_regard_eval_scores_tasks_and_names_the_prefix(local, capsys):
    model, tasks, texts = local
    assert main(["eval", str(model), "--lm-eval", "local_pages", "--tasks", str(tasks), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"local_pages bits_per_byte    {by_hand(texts):.4f}" in shown
    assert "'</s>'" in shown.splitlines()[-1]
    assert main(["eval", str(model), "--lm-eval", "local_pagse", "--tasks", str(tasks), "--device", "cpu"]) == 2
    assert "unknown task 'local_pagse'" in capsys.readouterr().err


def test_lm_eval_has_the_tasks_of_the_documented_suite():
    from lm_eval.tasks import TaskManager

    page = Path(__file__).parents[2] / "docs" / "hub-and-evaluation.md"
    (line,) = (line for line in page.read_text().splitlines() if line.startswith("regard eval runs/iclm --lm-eval"))
    words = line.split()
    asked = words[words.index("--lm-eval") + 1 : words.index("--limit")]
    assert len(asked) == 5
    assert set(asked) <= set(TaskManager().all_tasks)
