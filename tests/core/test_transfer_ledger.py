"""Every block of a transfer arrives, from whichever source can give it, and is asked for again only if it was lost."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from support.thoroughness import by_default

from torchft_ckpt.core.transfer.scheduler import Batches, TransferLedger, blocks_of, mask_of, mask_of_each


def blocks(num_blocks: int, seed: int = 1) -> TransferLedger:
    """A ledger of blocks of one byte."""
    batches = Batches(first_bytes=2, are_runs=True)
    return TransferLedger([1] * num_blocks, batches=batches, pick=random.Random(seed).randrange)


def ledger_of(num_blocks: int, *names: str) -> TransferLedger:
    ledger = blocks(num_blocks)
    for name in names:
        ledger.add_source(name)
    return ledger


def arrive(ledger: TransferLedger, stream: int, block: int, now: float) -> bool:
    ledger.came(stream, block, now)
    return ledger.arrived(stream, block)


def bring(ledger: TransferLedger, stream: int, run: list[int], now: float = 1.0) -> None:
    for block in run:
        arrive(ledger, stream, block, now)


def test_one_stream_of_one_source_brings_every_block_once():
    ledger = ledger_of(100, "a")
    stream, order, now = ledger.open_stream("a", 0.0), [], 0.0
    while run := ledger.next_batch(stream, now):
        for block in run:
            now += 0.01
            order.append(block)
            arrive(ledger, stream, block, now)
        ledger.validate()
    assert (order, ledger.is_done) == (list(range(100)), True)


def test_the_first_run_is_short_because_no_rate_is_known():
    ledger = ledger_of(1000, "a")
    assert ledger.next_batch(ledger.open_stream("a", 0.0), 0.0) == [0, 1]


def test_a_run_takes_about_a_second_at_the_rate_seen():
    ledger = ledger_of(1000, "a")
    stream = ledger.open_stream("a", 0.0)
    ledger.next_batch(stream, 0.0)
    arrive(ledger, stream, 0, 0.1)
    arrive(ledger, stream, 1, 0.2)
    assert ledger.next_batch(stream, 0.2) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_near_the_end_runs_are_shared_between_the_streams():
    ledger = ledger_of(16, "a", "b")
    streams = [ledger.open_stream(name, 0.0) for name in ("a", "b")]
    for stream in streams:
        run = ledger.next_batch(stream, 0.0)
        bring(ledger, stream, run, 0.001)
    assert [len(ledger.next_batch(stream, 0.001)) for stream in streams] == [3, 2]


def test_what_a_lost_stream_had_in_flight_is_given_to_another():
    ledger = ledger_of(10, "a", "b")
    lost, other = ledger.open_stream("a", 0.0), ledger.open_stream("b", 0.0)
    assert ledger.next_batch(lost, 0.0) == [0, 1]
    arrive(ledger, lost, 0, 0.1)
    ledger.close_stream(lost)
    ledger.drop_source("a")
    seen = []
    while run := ledger.next_batch(other, 1.0):
        seen += run
        bring(ledger, other, run)
    assert (seen, ledger.is_done) == (list(range(1, 10)), True)


def test_blocks_on_which_two_sources_disagree_come_from_the_primary_alone():
    ledger = blocks(6)
    ledger.add_source("a")
    ledger.add_source("b", eligible=0b010101)
    first, second = ledger.open_stream("a", 0.0), ledger.open_stream("b", 0.0)
    taken: dict[str, list[int]] = {"a": [], "b": []}
    for name, stream in (("b", second), ("a", first)):
        while run := ledger.next_batch(stream, 0.0):
            taken[name] += run
            bring(ledger, stream, run)
    assert taken == {"b": [0, 2, 4], "a": [1, 3, 5]}


def test_without_a_source_for_a_block_there_is_no_hope_but_in_flight_there_is():
    ledger = ledger_of(3, "a")
    stream = ledger.open_stream("a", 0.0)
    ledger.next_batch(stream, 0.0)
    ledger.hold(0b110)
    ledger.drop_source("a")
    assert not ledger.is_hopeless()
    ledger.close_stream(stream)
    assert ledger.is_hopeless()


def test_blocks_that_are_held_already_are_not_asked_for():
    ledger = ledger_of(4, "a")
    ledger.hold(0b0110)
    stream, seen = ledger.open_stream("a", 0.0), []
    while run := ledger.next_batch(stream, 0.0):
        seen += run
        bring(ledger, stream, run)
    assert (seen, ledger.is_done) == ([0, 3], True)


def test_blocks_that_turn_out_to_be_others_than_wanted_are_asked_for_again():
    ledger = ledger_of(4, "a")
    ledger.hold(0b1111)
    ledger.invalidate(0b0100)
    assert ledger.next_batch(ledger.open_stream("a", 0.0), 0.0) == [2]


def test_a_slow_stream_at_the_end_is_cut_when_an_idle_one_would_be_done_much_sooner():
    ledger = ledger_of(4, "fast", "slow")
    fast, slow = ledger.open_stream("fast", 0.0), ledger.open_stream("slow", 0.0)
    assert ledger.next_batch(slow, 0.0) == [0]
    bring(ledger, fast, ledger.next_batch(fast, 0.0), 0.01)
    bring(ledger, fast, ledger.next_batch(fast, 0.01), 0.02)
    bring(ledger, fast, ledger.next_batch(fast, 0.02), 0.03)
    assert ledger.next_batch(fast, 0.03) == []
    assert (ledger.overdue(0.5), ledger.overdue(1.5)) == ([], [slow])


def test_a_slow_stream_is_not_cut_where_nobody_else_has_its_block():
    ledger = blocks(2)
    ledger.add_source("fast", eligible=0b01)
    ledger.add_source("slow", eligible=0b10)
    fast, slow = ledger.open_stream("fast", 0.0), ledger.open_stream("slow", 0.0)
    ledger.next_batch(slow, 0.0)
    bring(ledger, fast, ledger.next_batch(fast, 0.0), 0.01)
    ledger.next_batch(fast, 0.01)
    assert ledger.overdue(1000.0) == []


def test_a_path_that_was_cut_is_asked_last_and_another_path_to_the_same_source_is_not():
    ledger = ledger_of(4, "a")
    slow, fast = ledger.open_stream("a", 0.0, "by ethernet"), ledger.open_stream("a", 0.0, "by ib0")
    assert ledger.streams_over("by ethernet") == [slow]
    run = ledger.next_batch(slow, 0.0)
    assert run and ledger.idle_sources() == {"a"}
    bring(ledger, fast, ledger.next_batch(fast, 0.0))
    while found := ledger.next_batch(fast, 1.0):
        bring(ledger, fast, found)
    assert ledger.overdue(100.0) == [slow]
    ledger.demote(slow)
    ledger.close_stream(slow)
    again = ledger.open_stream("a", 100.0, "by ethernet")
    assert ledger.next_batch(again, 100.0) == []
    bring(ledger, fast, ledger.next_batch(fast, 100.0), 100.0)
    assert ledger.is_done


def test_from_the_source_a_receiver_among_others_takes_first_what_nobody_was_sent():
    ledger = blocks(8, 3)
    ledger.add_source("source")
    ledger.add_source("peer", eligible=0b1, is_peer=True)
    ledger.note_sent("source", 0b01111111, 0.0)
    assert ledger.next_batch(ledger.open_stream("source", 0.0), 0.0) == [7]


def test_receivers_that_start_together_ask_the_source_for_different_blocks():
    firsts = []
    for index in range(4):
        ledger = ledger_of(16, "source")
        ledger.take_share(index, 4)
        firsts.append(ledger.next_batch(ledger.open_stream("source", 0.0), 0.0))
    assert [run[0] // 4 for run in firsts] == [0, 1, 2, 3]


def test_what_is_on_its_way_to_another_receiver_is_waited_for_but_not_for_ever():
    ledger = blocks(4)
    ledger.add_source("source")
    ledger.add_source("peer", eligible=0b0111, is_peer=True)
    ledger.note_sent("source", 0b1111, 10.0)
    stream = ledger.open_stream("source", 10.0)
    assert (ledger.next_batch(stream, 10.5), ledger.next_batch(stream, 11.5)) == ([], [3])


@pytest.mark.parametrize("mask", [0, 1, 0b1011, 0b11110000, (1 << 70) | 3])
def test_a_bit_set_is_the_sum_of_its_runs(mask):
    assert sum(mask_of(run) for run in blocks_of(mask)) == mask
    assert [blocks_of(mask, most) for most in range(3)] == [blocks_of(mask)[:most] for most in range(3)]


@dataclass(order=True)
class Happening:
    at: float
    order: int
    what: str = field(compare=False)
    stream: int = field(compare=False, default=0)
    block: int = field(compare=False, default=0)


@pytest.mark.parametrize("first", range(0, by_default(100, thorough=300), 10))
def test_whatever_fails_every_block_arrives_while_one_whole_source_lives(first):
    for seed in range(first, first + 10):
        check_that_every_block_arrives(seed)


def check_that_every_block_arrives(seed):
    """Random sources with random rates, of which all but one fail at random times; a dumb simulation of their streams."""
    rng = random.Random(seed)
    print("seed", seed)
    num_blocks = rng.randint(1, 200)
    ledger = blocks(num_blocks, seed)
    rates, streams, events, counter = {}, {}, [], 0
    for index in range(rng.randint(1, 5)):
        name = f"s{index}"
        eligible = (1 << num_blocks) - 1 if index == 0 else rng.getrandbits(num_blocks)
        ledger.add_source(name, eligible, is_peer=index > 0 and rng.choice([False, True]))
        rates[name] = rng.uniform(0.001, 0.2)
        for _ in range(rng.randint(1, 3)):
            streams[ledger.open_stream(name, 0.0)] = name
        if index:
            counter += 1
            heapq.heappush(events, Happening(rng.uniform(0.0, 3.0), counter, f"fail {name}"))
    runs: dict[int, list[int]] = {}
    arrivals = [0] * num_blocks

    def start(stream: int, now: float) -> None:
        nonlocal counter
        if not runs.get(stream):
            runs[stream] = ledger.next_batch(stream, now)
        if runs[stream]:
            counter += 1
            took = rates[streams[stream]] * rng.uniform(0.5, 2.0)
            heapq.heappush(events, Happening(now + took, counter, "block", stream, runs[stream].pop(0)))

    for stream in list(streams):
        start(stream, 0.0)
    busy = {event.stream for event in events}
    while events and not ledger.is_done:
        event = heapq.heappop(events)
        if event.what.startswith("fail"):
            name = event.what.split()[1]
            ledger.drop_source(name)
            for stream in [s for s, source in streams.items() if source == name]:
                ledger.close_stream(stream)
                del streams[stream]
                busy.discard(stream)
        elif event.stream in streams:
            arrivals[event.block] += 1
            if not arrive(ledger, event.stream, event.block, event.at):
                runs[event.stream] = []
            busy.discard(event.stream)
        for stream in list(streams):
            if stream not in busy:
                start(stream, event.at)
                if any(e.stream == stream for e in events):
                    busy.add(stream)
        ledger.validate()
    assert (ledger.is_done, arrivals) == (True, [1] * num_blocks)


@pytest.mark.parametrize("seed", range(by_default(2, thorough=5)))
def test_eight_receivers_of_one_source_are_done_in_little_more_than_the_time_of_one(seed):
    """Links of 25 MB/s, blocks of 4 MiB, a state of 256 MiB; what receivers know of each other is 0.15 s old at most."""
    print("seed", seed)
    num_blocks, num_receivers, block_s, dt_s = 64, 8, 4 * 1.048576 / 25, 0.01
    ledgers = [blocks(num_blocks, seed * 100 + r) for r in range(num_receivers)]
    streams: list[dict[str, int]] = []
    for receiver, ledger in enumerate(ledgers):
        ledger.add_source("source")
        for other in range(num_receivers):
            if other != receiver:
                ledger.add_source(f"r{other}", 0, is_peer=True)
        ledger.take_share(receiver, num_receivers)
        names = ["source", *(f"r{other}" for other in range(num_receivers) if other != receiver)]
        streams.append({name: ledger.open_stream(name, 0.0) for name in names})
    left: dict[tuple[int, str], tuple[int, float]] = {}
    sent, now, ticks = 0, 0.0, 0
    while not all(ledger.is_done for ledger in ledgers):
        assert now < 10 * num_blocks * block_s
        for receiver, ledger in enumerate(ledgers):
            if ticks % 15 == receiver:
                ledger.note_sent("source", sent, now)
                for other in range(num_receivers):
                    if other != receiver:
                        ledger.allow(f"r{other}", ledgers[other].held)
            for name, stream in streams[receiver].items():
                if (receiver, name) not in left and (run := ledger.next_batch(stream, now)):
                    left[receiver, name] = (run[0], 1.0)
                    sent |= mask_of_each(run) if name == "source" else 0
        load: dict[str, int] = {}
        for _, name in left:
            load[name] = load.get(name, 0) + 1
        now, ticks = now + dt_s, ticks + 1
        for (receiver, name), (block, share) in list(left.items()):
            share -= dt_s / block_s / load[name]
            if share > 0:
                left[receiver, name] = (block, share)
            else:
                del left[receiver, name]
                arrive(ledgers[receiver], streams[receiver][name], block, now)
    assert now < 1.25 * num_blocks * block_s


def test_a_stream_is_not_cut_for_another_of_its_path_that_has_brought_nothing():
    """One source that is slow to answer: each cut would begin the block anew."""
    ledger = ledger_of(1, "a")
    slow, idle = ledger.open_stream("a", 0.0), ledger.open_stream("a", 0.0)
    assert ledger.next_batch(slow, 0.0) == [0]
    assert ledger.next_batch(idle, 0.0) == []
    assert ledger.overdue(1000.0) == []


def test_a_path_is_cut_once_for_another_of_which_nobody_knows_how_fast_it_is():
    ledger = ledger_of(1, "a", "b")
    slow, other = ledger.open_stream("a", 0.0), ledger.open_stream("b", 0.0)
    assert ledger.next_batch(slow, 0.0) == [0]
    assert ledger.next_batch(other, 0.0) == []
    assert ledger.overdue(1000.0) == [slow]
    ledger.demote(slow)
    ledger.close_stream(slow)
    assert ledger.next_batch(other, 1000.0) == [0]
    again = ledger.open_stream("a", 1000.0)
    assert ledger.next_batch(again, 1000.0) == []
    assert ledger.overdue(2000.0) == [other]
    ledger.demote(other)
    ledger.close_stream(other)
    assert ledger.next_batch(again, 2000.0) == [0]
    ledger.next_batch(ledger.open_stream("b", 2000.0), 2000.0)
    assert ledger.overdue(3000.0) == []
