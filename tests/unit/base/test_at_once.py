"""Dictionaries that others change meanwhile."""

import gc

from torchTensorRef.base.at_once import items_at_once


def test_items_are_those_of_one_moment():
    """Whatever runs in the garbage collector, which any new object can start."""
    shared = {number: [number] for number in range(2000)}
    wanted = [(number, [number]) for number in range(2000)]
    new = iter(range(2000, 1_000_000))

    def change(*_: object) -> None:
        shared[next(new)] = []

    before = gc.get_threshold()
    gc.callbacks.append(change)
    gc.set_threshold(1)
    try:
        found = items_at_once(shared)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(change)
    assert found[:2000] == wanted


def test_what_is_no_dictionary_is_asked_as_it_is():
    class Wrapped:
        def items(self) -> list[tuple[str, int]]:
            return [("a", 1)]

    assert items_at_once(Wrapped()) == [("a", 1)]  # type: ignore[arg-type]
