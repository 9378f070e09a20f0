"""Random legal programs on a poisoned device, beside a model that is one list per base."""

from __future__ import annotations

import random

import pytest
import torch

from torchTensorRef.devices import DeviceSpec, HostDevice, SimDevice

SIZE = 16


class Program:
    """What a careful manager does: every hazard is ordered by an event, none by luck."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        spec = DeviceSpec("tiny", capacity_nbytes=6 * SIZE, copy_latency_ns=3_000)
        self.sim = SimDevice(spec, poison=True)
        self.host = HostDevice(capacity_nbytes=1)
        self.host.machines.append(self.sim.machine)
        self.homes = [torch.full((SIZE,), n, dtype=torch.uint8) for n in range(10)]
        self.truth = [list(home.tolist()) for home in self.homes]
        self.bases = {}  # by number of the block: what is on the device
        self.emptied = {}
        self.events = {}  # by number: the copy that touched its bytes last

    def fetch(self, number):
        """Bring a block in if it is not there, over the room of another if need be."""
        if number in self.bases:
            return
        while self.sim.free_nbytes() < SIZE:
            self.evict(self.random.choice(list(self.bases)))
        base = self.emptied.pop(number, None)
        if base is None:
            base = self.sim.allocate(SIZE)
        else:
            self.sim.refill(base, SIZE)
        event = self.events.get(number)
        if event is not None:
            event.synchronize()  # its home is written
        after = self.sim.available(base)
        self.events[number] = self.sim.copy_in(self.homes[number], base, after=after)
        self.bases[number] = base

    def evict(self, number):
        base = self.bases.pop(number)
        self.events[number].wait()
        self.events[number] = self.sim.copy_out(base, self.homes[number], after=self.sim.record())
        if self.random.random() < 0.5:
            self.sim.empty(base)
            self.emptied[number] = base

    def operate(self, number):
        self.fetch(number)
        base = self.bases[number]
        self.events[number].wait()
        self.sim.before_operator([base], [base])
        base.add_(1)
        if self.random.random() < 0.5:
            self.sim.charge(10_000, SIZE, "float32")
        else:
            self.sim.after_operator([base], [base], flops=9, nbytes=SIZE, dtype_name="float32")
        self.truth[number] = [(value + 1) % 256 for value in self.truth[number]]

    def run(self, steps):
        for _ in range(steps):
            number = self.random.randrange(len(self.homes))
            action = self.random.random()
            if action < 0.6:
                self.operate(number)
            elif action < 0.8:
                self.fetch(number)
            elif number in self.bases:
                self.evict(number)
            assert self.sim.resident_nbytes == SIZE * len(self.bases) == self.sim.recount_nbytes()
        for number in list(self.bases):
            self.evict(number)
        self.sim.synchronize()


@pytest.mark.parametrize("seed", range(8))
def test_legal_programs_get_the_right_bits(seed):
    program = Program(seed)
    program.run(300)
    program.host.before_operator(program.homes, program.homes)
    assert [home.tolist() for home in program.homes] == program.truth
    assert program.sim.peak_nbytes == program.sim.capacity_nbytes
    assert program.sim.machine.landing == {}


def test_programs_take_the_same_virtual_time_again():
    def clocks():
        program = Program(seed=3)
        program.run(200)
        return program.sim.now_ns(), program.sim.stall_ns, program.sim.copy_count

    assert clocks() == clocks()
