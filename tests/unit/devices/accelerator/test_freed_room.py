"""Which events a copy has to wait for before it writes room that others have used."""

from __future__ import annotations

import random

from torchTensorRef.devices.accelerator.freed_room import FreedRoom, UseMarks

from ....support.interrupting import interrupt, lines_of, no_memory


class Fired:
    def __init__(self, name, fired=False):
        self.name = name
        self.fired = fired

    def query(self):
        return self.fired

    def __repr__(self):
        return self.name


A, B = Fired("a"), Fired("b")


def test_room_comes_with_the_events_it_was_freed_with():
    room = FreedRoom()
    room.free(0, 1024, (A,))
    assert room.take(0, 1024) == ([A], True)
    assert room.take(0, 1024) == ([], False), "taken once"


def test_a_part_leaves_the_rest():
    room = FreedRoom()
    room.free(0, 4096, (A,))
    assert room.take(1024, 512) == ([A], True)
    assert room.take(0, 1024) == ([A], True)
    assert room.take(1536, 2560) == ([A], True)
    assert len(room) == 0


def test_room_over_several_freed_ranges_waits_for_all():
    room = FreedRoom()
    room.free(0, 1000, (A,))  # the allocator gives 1,024
    room.free(1024, 512, (B,))
    assert room.take(0, 1536) == ([A, B], True)


def test_a_gap_was_used_by_nobody_knows_whom():
    room = FreedRoom()
    room.free(0, 512, (A,))
    room.free(1024, 512, (B,))
    assert room.take(0, 1536) == ([A, B], False)


def test_beyond_what_was_freed():
    room = FreedRoom()
    room.free(512, 512, (A,))
    assert room.take(512, 513) == ([A], False)
    room.free(512, 512, (A,))
    assert room.take(0, 1024) == ([A], False)


def test_fired_events_are_forgotten_and_ranges_joined():
    room = FreedRoom()
    done = Fired("done", fired=True)
    for number in range(8):
        room.free(number * 512, 512, (done, Fired(str(number), fired=True)))
    assert len(room) == 8
    room.settle()
    assert len(room) == 1
    assert room.take(512, 3072) == ([], True)
    assert len(room) == 2


def test_random_ranges_against_a_map_of_grains():
    chance = random.Random(3)
    room, grains = FreedRoom(), {}
    for step in range(4000):
        start, count = chance.randrange(40), chance.randrange(1, 9)
        span = range(start, start + count)
        if chance.random() < 0.5:
            event = Fired(str(step), fired=chance.random() < 0.5)
            room.free(start * 512, count * 512 - chance.randrange(512), (event,))
            grains.update(dict.fromkeys(span, event))
        else:
            events, is_known = room.take(start * 512, count * 512)
            expected = {grains.get(n) for n in span}
            assert is_known == (None not in expected)
            settled = {event for event in expected if event is not None and not event.fired}
            assert settled <= set(events) <= expected
            for n in span:
                grains.pop(n, None)
        if chance.random() < 0.05:
            room.settle()


def test_marks_name_the_first_event_after_them():
    made = []

    def record():
        made.append(Fired(str(len(made))))
        return made[-1]

    marks = UseMarks(record)
    used = marks.mark
    first = marks.now()
    later_used = marks.mark
    second = marks.now()
    assert marks.after(used) is first
    assert marks.after(later_used) is second
    assert marks.after(marks.mark) is made[2], "recorded only because somebody has to wait"
    assert len(made) == 3
    first.fired = second.fired = True
    marks.now()
    assert marks.after(used) is None, "long over"
    assert len(marks) == 2


def test_a_mark_read_while_an_event_is_recorded_means_a_later_one():
    marks = UseMarks(lambda: Fired("x"))

    def record():
        seen.append(marks.mark)
        return Fired("y")

    seen = []
    marks._record = record
    event = marks.now()
    assert marks.after(seen[0]) is not event


def test_an_error_at_any_line_leaves_what_can_be_asked():
    """It was in two lists, and an interrupt in between made every eviction fail from then on."""

    def program():
        nonlocal first, room
        first, room = Fired("first"), FreedRoom()
        room.free(0, 1024, (first,))
        room.free(512, 512, (B,))
        room.take(256, 512)
        first.fired = True
        room.settle()

    first, room = A, FreedRoom()
    for place in lines_of(program):
        assert interrupt(program, no_memory, place)
        room.settle()
        found, is_known = room.take(512, 512)
        assert not is_known or found, "it waits for one of them, or for all that was before"


def test_marks_after_an_error_at_any_line_name_no_earlier_event():
    def program():
        nonlocal marks, before, used
        marks = UseMarks(lambda: Fired("x"))
        before = [marks.now(), marks.now()]
        used = marks.mark
        marks.now()

    marks, before, used = UseMarks(lambda: Fired("x")), [], 0
    for place in lines_of(program):
        assert interrupt(program, no_memory, place)
        assert marks.after(used) not in before
        assert marks.after(marks.mark) not in before
