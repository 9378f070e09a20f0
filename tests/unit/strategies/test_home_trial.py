"""Whether the host's computing pays: periods with it and without, in numbers alone."""

from __future__ import annotations

from torchTensorRef.strategies.flow.home_trial import COMPARED, HOLDS_FOR, SETTLED_AFTER, HomeTrial

#: Periods that a trial needs after each switch, besides those that it compares.
UNCOUNTED = 2


def periods(with_ns, without_ns, least_ns, count, *, is_used=True):
    """Return in which periods the host may compute, of so many that take so long."""
    trial, now_ns, allowed = HomeTrial(), 0, []
    for _ in range(count):
        allowed.append(trial.period(now_ns, least_ns, is_used=is_used))
        now_ns += with_ns if allowed[-1] else without_ns
    return allowed


def test_the_better_stays():
    tried = SETTLED_AFTER + UNCOUNTED + COMPARED
    slower = periods(110, 100, 90, tried + HOLDS_FOR)
    assert all(slower[:SETTLED_AFTER])
    assert not any(slower[tried:])
    faster = periods(95, 100, 90, tried + HOLDS_FOR)
    assert faster.count(False) == UNCOUNTED + COMPARED
    assert all(faster[tried:])


def test_nothing_is_tried_where_the_links_could_not_do_without():
    assert all(periods(60, 100, 90, 10 * HOLDS_FOR))


def test_nothing_is_tried_where_the_host_computes_nothing():
    assert all(periods(110, 100, 90, 10 * HOLDS_FOR, is_used=False))


def test_what_was_found_is_tried_again_seldom():
    allowed = periods(110, 100, 90, 10 * HOLDS_FOR)
    after = allowed[SETTLED_AFTER + UNCOUNTED + COMPARED :]
    assert 0 < after.count(True) < len(after) // 20
