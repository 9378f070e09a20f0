"""Scopes end wherever they are ended, and in whatever order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torchTensorRef.base.scopes import Scopes


def elsewhere(call: Any, *args: Any) -> None:
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


def test_the_innermost_holds_here_and_nowhere_else():
    scopes, seen = Scopes("test", 0), []
    with scopes.entered(1), scopes.entered(2):
        elsewhere(lambda: seen.append((scopes.get(), scopes.all())))
        seen.append((scopes.get(), scopes.all()))
    assert seen == [(0, ()), (2, (1, 2))]
    assert scopes.get() == 0


def test_one_that_another_thread_ends_is_over():
    scopes = Scopes("test", 0)
    scope: AbstractContextManager[None] = scopes.entered(1)
    scope.__enter__()
    elsewhere(scope.__exit__, None, None, None)
    assert (scopes.get(), scopes.all()) == (0, ())


def test_one_that_ends_before_one_inside_it_leaves_that():
    scopes = Scopes("test", 0)
    outer = ExitStack()
    outer.enter_context(scopes.entered(1))
    with scopes.entered(2):
        outer.close()
        assert (scopes.get(), scopes.all()) == (2, (2,))
    assert scopes.get() == 0


def test_one_of_a_generator_ends_with_it():
    scopes = Scopes("test", 0)

    def numbers() -> Iterator[int]:
        with scopes.entered(1):
            yield 1

    generator = numbers()
    next(generator)
    elsewhere(generator.close)
    assert scopes.get() == 0


def test_a_task_that_was_begun_inside_is_in_it_until_it_ends():
    scopes, seen = Scopes("test", 0), []

    async def task(begun: asyncio.Event, over: asyncio.Event) -> None:
        seen.append(scopes.get())
        begun.set()
        await over.wait()
        seen.append(scopes.get())

    async def main() -> None:
        begun, over = asyncio.Event(), asyncio.Event()
        with scopes.entered(1):
            running = asyncio.create_task(task(begun, over))
            await begun.wait()
        over.set()
        await running

    asyncio.run(main())
    assert seen == [1, 0]


def test_one_object_can_be_entered_again_inside_itself_and_in_several_threads():
    scopes = Scopes("test", 0)
    scope, wrong = scopes.entered(1), []

    def use(count: int = 30) -> None:
        for _ in range(count):
            with scope:
                with scope, ExitStack() as stack:
                    stack.enter_context(scope)
                    wrong.extend([scopes.get()] if scopes.get() != 1 else [])
                wrong.extend([scopes.get()] if scopes.get() != 1 else [])
            wrong.extend([scopes.get()] if scopes.get() != 0 else [])

    threads = [threading.Thread(target=use, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    use()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
    assert len(scopes._of_all) <= 3  # what is over is forgotten
    assert scopes.everywhere() == []


def test_one_that_is_entered_and_ended_by_hand_can_be_entered_again():
    scopes = Scopes("test", 0)
    scope: Any = scopes.entered(1)
    for _ in range(3):
        scope.__enter__()
        scope.__enter__()
        scope.__exit__(None, None, None)
        assert scopes.get() == 1
        scope.__exit__(None, None, None)
        assert scopes.get() == 0
