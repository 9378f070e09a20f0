"""What the next copy into a room waits for, where the last one was not issued or came again."""

from __future__ import annotations

import torch

from torchTensorRef.devices.accelerator.rooms import Rooms


class Event:
    def query(self):
        return False


def room_of(base, event):
    """Rooms in which a base has been given room that waits for an event."""
    rooms, start = Rooms(Event), base.untyped_storage().data_ptr()
    rooms.freed.free(start, base.nbytes, (event,))
    rooms.take(base, start, base.nbytes)
    return rooms, start


def test_a_room_that_was_not_written_still_waits_for_who_was_there_before():
    """The copy of what it was for failed: nobody has waited, and a copy home may read it yet."""
    base, leaves = torch.empty(512, dtype=torch.uint8), Event()
    rooms, start = room_of(base, leaves)
    assert rooms.leave(base, [])
    assert leaves in rooms.freed.take(start, 512)[0]


def test_a_second_copy_into_a_room_waits_for_those_that_read_the_first():
    base, leaves = torch.empty(512, dtype=torch.uint8), Event()
    rooms, _ = room_of(base, leaves)
    assert rooms.waits_of(base) == [leaves]
    rooms.note_copy(base)
    again = rooms.waits_of(base)
    assert again[0] is leaves
    assert len(again) == 2, "and for all that compute was given so far"
