"""RegBench: strings of a probabilistic automaton that is another one in every example.

"In-context language learning" (Akyürek et al., 2024), which the sparse regression paper repeats (its Table 1). An
example draws an automaton: states, an alphabet, for every state one to three edges with distinct symbols to distinct
other states. The automaton is minimised and trimmed; all states accept, and the edges of a state are equally likely.
Then come strings that start in the first state, with a delimiter between them. The model is asked for every symbol,
but not for delimiters. A symbol is valid where the automaton has an edge for it.

The hash of an automaton's canonical form says which split it belongs to, so that no automaton is in two splits.
"""

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import require
from .base import Settings, check_sizes, check_span, tasks
from .tokens import TokenExample, TokenTask, drawn, example_of, split_of

Edges = tuple[dict[int, int], ...]
"""For every state: symbol to next state. The first state is the start."""


def minimised(edges: Edges) -> Edges:
    """Return the smallest automaton with the same strings, its states in the order in which a breadth-first search by
    symbols meets them from the first: automata with the same strings give the same result.

    All states accept; a missing edge rejects. Cost: O(n^2 m) for n states and m symbols.
    """
    classes = [0] * len(edges)
    while True:  # states stay together while their edges have the same symbols and lead to the same classes
        signs = [(classes[i], tuple(sorted((s, classes[j]) for s, j in edges[i].items()))) for i in range(len(edges))]
        names = {sign: n for n, sign in enumerate(dict.fromkeys(signs))}
        new = [names[sign] for sign in signs]
        if len(names) == len(set(classes)):
            break
        classes = new
    first = {c: i for i, c in reversed(list(enumerate(classes)))}  # a state of each class
    order, queue = {classes[0]: 0}, [classes[0]]
    for c in queue:
        for symbol in sorted(edges[first[c]]):
            after = classes[edges[first[c]][symbol]]
            if after not in order:
                order[after] = len(order)
                queue.append(after)
    return tuple({s: order[classes[j]] for s, j in sorted(edges[first[c]].items())} for c in queue)


def canonical(edges: Edges) -> str:
    """Return the text whose hash says which split a minimised automaton belongs to (`split_of`)."""
    return repr([sorted(state.items()) for state in edges])


@dataclass(frozen=True)
class AutomatonExample(TokenExample):
    """Strings of an automaton with the edges `automaton`."""

    automaton: Edges = ()


@tasks.register("regbench")
@dataclass(frozen=True)
class RegBench(TokenTask):
    """The next symbol of strings whose automaton has to be inferred from them.

    Args:
        symbols: letters in all; the delimiter is the token after them.
        states, alphabet: (least, most) of an automaton.
        edges: the most edges of a state, at most as many as the automaton has symbols and other states.
        strings, string: (least, most) strings of an example, and symbols of a string.
        automata: how many different automata the training split uses; 0 for a new one in every example.
    """

    errors: ClassVar[tuple[str, ...]] = ("L1", "total variation")
    settings: ClassVar[Settings] = {
        "quick": {
            "symbols": 8, "states": (3, 6), "alphabet": (4, 8), "strings": (6, 10), "string": (2, 11)
        },
        "paper-1k": {"automata": 1000},
        "paper-2500": {"automata": 2500},
        "paper-40k": {"automata": 40000},
    }  # fmt: skip

    symbols: int = 18
    states: tuple[int, int] = (4, 12)
    alphabet: tuple[int, int] = (4, 18)
    edges: int = 3
    strings: tuple[int, int] = (10, 19)
    string: tuple[int, int] = (1, 49)
    automata: int = 0

    def __post_init__(self) -> None:
        check_sizes(self, symbols=2, edges=1, automata=0)
        call = type(self).__name__
        for name, low in (("states", 2), ("alphabet", 1), ("strings", 1), ("string", 1)):
            check_span(self, name, low)
        alphabet = f"alphabet is {self.alphabet}, but there are {self.symbols} symbols."
        require(self.alphabet[1] <= self.symbols, call, alphabet)
        most = min(self.alphabet[1], self.states[1] - 1)
        size = f"the largest automaton, of {self.states[1]} states and {self.alphabet[1]} symbols, has at most {most}"
        why = "since symbols and targets of its edges differ and no edge leads back to its state"
        require(self.edges <= most, call, f"edges is {self.edges}, but {size} at a state, {why}.")

    @property
    def vocabulary(self) -> int:
        return self.symbols + 1

    def automaton(self, random: Random) -> Edges:
        """Return an automaton, minimised and trimmed."""
        count = random.randint(*self.states)
        letters = random.sample(range(self.symbols), random.randint(*self.alphabet))
        states: list[dict[int, int]] = []
        for state in range(count):
            out = random.randint(1, min(self.edges, count - 1, len(letters)))
            targets = random.sample([other for other in range(count) if other != state], out)
            states.append(dict(zip(random.sample(letters, out), targets, strict=True)))
        return minimised(tuple(states))

    def draw(self, random: Random, split: str) -> TokenExample:
        source = random
        if self.automata and split == "train":  # one of a few automata, each from a separate stream
            source = Random(f"regbench {random.randrange(self.automata)}")
        edges = drawn(lambda: self.automaton(source), lambda edges: split_of(canonical(edges)) == split, self, split)
        pairs: list[tuple[int, int]] = []  # of a token and the state before it
        for _ in range(random.randint(*self.strings)):
            state = 0
            for _ in range(random.randint(*self.string)):
                symbol = random.choice(list(edges[state]))
                pairs.append((symbol, state))
                state = edges[state][symbol]
            pairs.append((self.symbols, -1))
        tokens, states = map(list, zip(*pairs[:-1], strict=True))
        labels = {at: x for at, x in enumerate(tokens) if x != self.symbols and at}
        table = torch.zeros(len(edges) + 1, self.vocabulary, dtype=torch.float32)
        for state, out in enumerate(edges):
            table[state, list(out)] = 1 / len(out)
        example = example_of(tokens, labels)
        return AutomatonExample(example.tokens, example.labels, probabilities=table[states], automaton=edges)

    def scores(self, predicted: Tensor, example: TokenExample) -> dict[str, float]:
        """Return the metrics of one example, from arguments as in `TokenTask.scores`.

        "valid" is the share of labels where the most likely token is valid. For logits, "L1" is the mean sum of the
        absolute differences of the predicted and the true distribution, and "total variation" half of it.
        """
        assert example.probabilities is not None
        asked, truth = example.asked, example.probabilities
        if not asked.any():
            return {}
        likely = predicted.argmax(-1) if predicted.is_floating_point() else predicted
        valid = truth.gather(-1, likely[:, None])[:, 0] > 0
        metrics = {"valid": float(valid[asked].float().mean())}
        if predicted.is_floating_point():
            apart = (predicted.softmax(-1) - truth).abs().sum(-1)[asked].mean()
            metrics |= {"L1": float(apart), "total variation": float(apart) / 2}
        return metrics

    def oracle(self, example: TokenExample) -> Tensor:
        """Return the logarithm of the true probabilities, [T, vocabulary], from the automaton and the tokens before."""
        assert isinstance(example, AutomatonExample)
        rows, state = torch.full((len(example.tokens), self.vocabulary), -torch.inf), 0
        for row, token in zip(rows, example.tokens.tolist(), strict=True):
            out = {self.symbols: 0} if token == self.symbols else example.automaton[state]
            row[list(out)] = 0.0
            state = out[token]
        return rows

    def trivial(self, example: TokenExample) -> Tensor:
        """Return equal logits for all symbols, [T, vocabulary]."""
        row = torch.zeros(self.vocabulary)
        row[self.symbols] = -torch.inf
        return row.expand(len(example.tokens), -1)

    def back_off(self, example: TokenExample, order: int = 3) -> Tensor:
        """Return the logarithm of the probabilities of an n-gram model of the example itself, [T, vocabulary].

        Row t counts what followed the last n - 1 tokens of its string in the tokens before t, for the largest n up to
        `order` that has been seen; where nothing was seen all symbols are equally likely.
        """
        tokens = example.tokens.tolist()
        seen: dict[tuple[int, ...], dict[int, int]] = {}
        rows = torch.zeros(len(tokens), self.vocabulary)
        for at, token in enumerate(tokens):
            start = next((i + 1 for i in range(at - 1, -1, -1) if tokens[i] == self.symbols), 0)
            contexts = [tuple(tokens[at - n : at]) for n in range(min(order - 1, at - start), -1, -1)]
            counts = next((seen[c] for c in contexts if c in seen), dict.fromkeys(range(self.symbols), 1))
            rows[at, list(counts)] = torch.tensor([float(n) for n in counts.values()])
            if token != self.symbols:
                for c in contexts:
                    seen.setdefault(c, {}).setdefault(token, 0)
                    seen[c][token] += 1
        return (rows / rows.sum(-1, keepdim=True)).log()
