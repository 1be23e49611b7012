"""The counting baseline, against numbers worked out by hand and against laws."""

import math
import random
from collections import Counter

import pytest
from mistakes import refuses

from regard_recipes.demo.ngram import NGram, discounts

# a b a b a c over {a, b, c, d}
TINY = (0, 1, 0, 1, 0, 2)

SONG = (
    "the wheels on the bus go round and round, round and round, round and round; the wipers on the bus go swish "
    "swish swish, all through the town; the people on the bus go up and down, up and down, all day long. "
)


def text_tokens(text: str) -> list[int]:
    letters = sorted(set(SONG))
    return [letters.index(letter) for letter in text]


def test_bigrams_by_hand() -> None:
    """Bigrams ab ab ba ba ac: counts 2, 2, 1, none of 3, so every discount is 1/2. Continuation counts, over
    the kinds ab, ba, ac: a 1, b 1, c 1, again with discounts of 1/2.

    p_0(a) = p_0(b) = p_0(c) = (1 - 1/2 + 3/2 * 1/4) / 3 = 7/24,  p_0(d) = (3/2 * 1/4) / 3 = 1/8
    p_1(x | a) = (c(a x) - D + (1/2 + 1/2) p_0(x)) / 3 with c(ab) = 2, c(ac) = 1
    p_1(x | b) = (c(b x) - D + 1/2 p_0(x)) / 2 with c(ba) = 2
    """
    model = NGram(TINY, vocabulary=4, order=2)
    alone = [7 / 24, 7 / 24, 7 / 24, 1 / 8]
    after_a = [7 / 72, (3 / 2 + 7 / 24) / 3, (1 / 2 + 7 / 24) / 3, 1 / 24]
    after_b = [(3 / 2 + 7 / 48) / 2, 7 / 96, 7 / 96, 1 / 32]
    for context, expected in (((), alone), ((0,), after_a), ((1,), after_b), ((2,), alone), ((3,), alone)):
        assert [model.probability(x, context) for x in range(4)] == pytest.approx(expected, abs=1e-15)
    assert model.probability(1, (3, 3, 0)) == model.probability(1, (0,))


def test_loss_by_hand() -> None:
    """Of "a b d": b after a, then d after b; the first token is not predicted."""
    expected = -(math.log((3 / 2 + 7 / 24) / 3) + math.log(1 / 32)) / 2
    assert NGram(TINY, vocabulary=4, order=2).loss([0, 1, 3]) == pytest.approx(expected, abs=1e-15)


def test_discounts_by_hand() -> None:
    """n_1 .. n_4 = 10, 5, 4, 2: Y = 10/20; D_1 = 1 - 2 Y 5/10, D_2 = 2 - 3 Y 4/5, D_3 = 3 - 4 Y 2/4."""
    assert discounts(Counter({1: 10, 2: 5, 3: 4, 4: 2, 9: 7})) == pytest.approx((0, 0.5, 0.8, 2.0))


def test_discounts_stay_between_a_little_and_the_count() -> None:
    # Y = 1/101, so the formula gives D_1 = 1/101, which is held at 1/20
    assert discounts(Counter({1: 1, 2: 50, 3: 50, 4: 50}))[1] == 0.05
    for n in ({1: 1, 2: 900, 3: 1, 4: 9000}, {1: 9000, 2: 1, 3: 1, 4: 1}, {1: 5}, {}):
        found = discounts(Counter(n))
        assert found[0] == 0
        assert all(0.05 <= found[i] <= i for i in (1, 2, 3))


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_sum_to_one(order: int) -> None:
    tokens = text_tokens(SONG)
    size = len(set(SONG)) + 3  # three that never occur
    model = NGram(tokens, size, order)
    draw = random.Random(0)
    contexts = [tuple(draw.randrange(size) for _ in range(draw.randrange(7))) for _ in range(40)]
    contexts += [tuple(tokens[i : i + 6]) for i in range(0, 60, 7)]
    contexts += [(), (size - 1,) * 4, tuple(tokens[-4:])]
    for context in contexts:
        row = [model.probability(x, context) for x in range(size)]
        assert min(row) > 0
        assert math.fsum(row) == pytest.approx(1, abs=1e-12)


def test_longer_contexts_predict_better() -> None:
    """On text of the same kind: predictions of "round and round" need more than the letter before."""
    learn, held_out = text_tokens(SONG * 2 + SONG[40:]), text_tokens(SONG[:150])
    losses = [NGram(learn, len(set(SONG)), order).loss(held_out) for order in (1, 2, 3, 5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1] + 1


def test_no_better_than_chance_on_chance() -> None:
    draw = random.Random(1)
    tokens = [draw.randrange(8) for _ in range(4000)]
    assert NGram(tokens[:3000], 8, 3).loss(tokens[3000:]) == pytest.approx(math.log(8), abs=0.06)


def test_a_context_counts_no_more_than_the_order_allows() -> None:
    model = NGram(text_tokens(SONG), 40, 3)
    long = text_tokens("down, all ")
    assert model.probability(5, long) == model.probability(5, long[-2:])


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "order"), [((0, 1), 2, 3), ((0, 1), 2, 0), ((), 2, 1), ((0, 5), 5, 1), ((-1, 0), 5, 1)]
)
def test_what_cannot_be_counted(tokens: tuple[int, ...], vocabulary: int, order: int) -> None:
    refuses("NGram", NGram, tokens, vocabulary, order)
    refuses("at least 2", NGram(TINY, 4, 2).loss, [0])
