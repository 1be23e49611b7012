"""Registries: names, aliases, duplicates, what third parties may and may not do."""

import sys
import types
from importlib.metadata import EntryPoint

import pytest
from mistakes import error_of, refuses

import regard
from regard import registry as module
from regard.registry import Registry


def filled() -> Registry[int]:
    found: Registry[int] = Registry("number")
    found.register("one", "uno", "eins")(1)
    found.register("two")(2)
    return found


def test_names_and_aliases() -> None:
    numbers = filled()
    assert numbers.names() == ["one", "two"]
    assert numbers.names(aliases=True) == ["one", "two", "uno", "eins"]
    assert numbers.get("one") == numbers.get("uno") == numbers.get("eins") == 1
    assert list(numbers.items()) == [("one", 1), ("two", 2)]
    assert "one" in numbers
    assert "uno" in numbers
    assert "three" not in numbers
    assert 3 not in numbers


def test_register_returns_the_object() -> None:
    numbers = filled()

    @numbers.register("three")
    def three() -> int:
        return 3

    assert three() == 3
    assert numbers.get("three") is three


@pytest.mark.parametrize("names", [("one",), ("uno",), ("three", "one"), ("three", "eins"), ("three", "three")])
def test_a_name_is_given_once(names: tuple[str, ...]) -> None:
    numbers = filled()
    refuses(f"number '{names[-1]}' is registered already; choose another name", numbers.register(*names), 4)
    # A refused registration leaves nothing behind.
    assert numbers.names(aliases=True) == filled().names(aliases=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("twoo", "unknown number 'twoo'. Did you mean 'two'?"),
        ("unos", "unknown number 'unos'. Did you mean 'uno'?"),
        ("zebra", "unknown number 'zebra'. Choose from: eins, one, two, uno."),
        (3, "a number is chosen by name, got 3 (int)."),
        (None, "a number is chosen by name, got None (NoneType)."),
    ],
)
def test_unknown_names(name: object, words: str) -> None:
    assert error_of(filled().get, name) == words


def test_listing_is_a_copy() -> None:
    numbers = filled()
    for name, _ in numbers.items():  # registering while iterating is safe
        numbers.register(name + "!")(0)
    assert numbers.names() == ["one", "two", "one!", "two!"]
    numbers.names().clear()
    assert len(numbers.names()) == 4


def extension(monkeypatch: pytest.MonkeyPatch, source: str) -> Registry[int]:
    """A registry whose entry-point group names one module with that source."""
    numbers: Registry[int] = Registry("number", "test.numbers")
    numbers.register("one")(1)
    plugin = types.ModuleType("plugin_of_a_third_party")
    plugin.numbers = numbers

    def points(*, group: str) -> list[EntryPoint]:
        assert group == "test.numbers"
        point = EntryPoint("anything", "plugin_of_a_third_party", group)
        monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
        plugin.__dict__.setdefault("loads", 0)
        if plugin.loads == 0:
            exec(source, plugin.__dict__)
        plugin.loads += 1
        return [point]

    monkeypatch.setattr(module, "entry_points", points)
    return numbers


def test_third_parties_add_names(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = extension(monkeypatch, "numbers.register('three')(3)")
    assert numbers.get("three") == 3
    assert numbers.names() == ["one", "three"]
    assert sys.modules["plugin_of_a_third_party"].loads == 1  # loaded once


def test_third_parties_may_ask_while_they_load(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = extension(monkeypatch, "numbers.register('two')(numbers.get('one') + 1)")
    assert "two" in numbers
    assert numbers.get("two") == 2


def test_third_parties_do_not_replace_what_is_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = extension(monkeypatch, "numbers.register('one')(100)")
    refuses("number 'one' is registered already", numbers.get, "one")
    assert numbers.get("one") == 1


def test_every_axis_is_listed() -> None:
    found = regard.registries()
    assert list(found) == [
        *("preset", "kernel", "bandwidth", "similarity", "solver", "trend", "temperature", "ridge", "feed-forward"),
        *("memory", "slot-score", "step-rule", "slot-values", "impl", "energy", "recipe", "task"),
    ]
    for axis, held in found.items():
        assert len(held.names()) > 0, axis
        assert held.group is not None  # others can add to it
        assert len(set(held.names(aliases=True))) == len(held.names(aliases=True))
    assert len({held.group for held in found.values()}) == len(found)


def test_registered_objects_say_their_registered_name() -> None:
    """What is printed by `str(spec)` and JSON has to be found again by that name."""
    for axis in ("bandwidth", "similarity", "solver", "trend", "temperature", "ridge"):
        for name, make in regard.registries()[axis].items():
            assert make().name == name
    for name, make in regard.registries()["kernel"].items():
        assert make().name in (name, "polynomial")


def test_a_class_gets_the_name_of_its_registration() -> None:
    kinds: Registry[type] = Registry("kind")

    @kinds.register("plain", "other")
    class Plain: ...

    @kinds.register("derived")
    class Derived(Plain): ...

    @kinds.register("own")
    class Own:
        name = "its own"

    assert [kind.name for _, kind in kinds.items()] == ["plain", "derived", "its own"]  # type: ignore[attr-defined]
