"""Threads inside one compiled function that wait for each other there, as in plain torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchTensorRef import TensorRef, tensorsManager

from ..support.injection import injected, kind_of, one_thread

WAIT_S = 20.0


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Return what each gives in a thread of its own; what one raises comes in its place."""
    found: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        torch.set_num_threads(1)
        with injected():
            try:
                found[place] = works[place]()
            except BaseException as error:
                found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_S)
    return found


def test_two_meet_in_the_first_call_and_in_later_ones(manage):
    manage("lru")
    meeting, waits = threading.Barrier(2), [True]

    @torch._dynamo.disable
    def meet() -> None:
        if waits[0]:
            meeting.wait(WAIT_S)

    with injected(), one_thread(), torch.no_grad():
        linear = nn.Linear(8, 8)

        def work(x: torch.Tensor) -> torch.Tensor:
            y = linear(x)
            meet()
            return y + linear.weight.t().sum() + (linear.bias * 2)

        compiled = torch.compile(work, backend="eager")
        x = torch.rand(2, 8)
        waits[0] = False
        wanted = work(x)

        def call() -> torch.Tensor:
            with torch.no_grad():
                return compiled(x)

        waits[0] = True
        found = in_threads(call, call)  # as yet nothing is known of it
        waits[0] = False
        compiled(x)
        native = tensorsManager.residency.books.counts.native_call_count
        found.append(compiled(x))
        assert tensorsManager.residency.books.counts.native_call_count == native + 1
        waits[0] = True
        found += in_threads(call, call)
        for one in found:
            assert torch.equal(one, wanted), one
        assert {kind_of(p) for p in linear.parameters()} == {TensorRef}


def test_what_is_made_of_stand_ins_beside_a_native_run_stays_right(manage):
    """Parts of a parameter, of a closure's tensor and of an argument, after the other has ended."""
    manager = manage("lru")
    inside, may_end, is_over = (threading.Event() for _ in range(3))
    first: list[int | None] = [None]

    @torch._dynamo.disable
    def meet() -> None:
        if threading.get_ident() == first[0]:
            inside.set()
            assert may_end.wait(WAIT_S)

    @torch._dynamo.disable
    def let_it_end() -> None:
        if first[0] is not None and threading.get_ident() != first[0]:
            may_end.set()
            assert is_over.wait(WAIT_S)
            for one in (*linear.parameters(), table):
                one.toCPU()

    with injected(), one_thread():
        linear, table = nn.Linear(32, 32), torch.rand(32, 32)
        given = {"bias": torch.rand(32)}

        def work(x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
            meet()
            turned, part, last = linear.weight.t(), table[:16], more["bias"][::2]
            let_it_end()
            return x @ (turned * 2) + part.sum(), last * 2

        compiled = torch.compile(work, backend="eager")
        x = torch.rand(4, 32)
        with torch.no_grad():
            wanted = work(x, given)
            compiled(x, given)
            compiled(x, given)
        assert manager.residency.books.counts.native_call_count == 1

        def native() -> Any:
            first[0] = threading.get_ident()
            try:
                with torch.no_grad():
                    return compiled(x, given)
            finally:
                is_over.set()

        def beside() -> Any:
            assert inside.wait(WAIT_S)
            out, last = compiled(x, given)
            out.sum().backward()
            return out.detach(), last

        for found in in_threads(native, beside):
            assert not isinstance(found, BaseException), found
            assert torch.equal(found[0], wanted[0])
            assert torch.equal(found[1], wanted[1])
        assert linear.weight.grad is not None
        assert {kind_of(p) for p in linear.parameters()} == {TensorRef}
        assert {kind_of(t) for t in (table, given["bias"])} == {TensorRef}
    manager.check()
