"""Reads what examples/write_events.rs wrote with the tensorboard package: read_tensorboard.py DIR"""

import math
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def f32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def main():
    events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
    events.Reload()
    tags = sorted(events.Tags()["scalars"])
    assert tags == ["größe", "train/loss", "train/lr"], tags
    assert events.file_version == 2.0, events.file_version
    loss = events.Scalars("train/loss")
    assert [event.step for event in loss] == [*range(1, 301), 1_000_000]
    assert all(event.value == f32(4 / event.step + 0.5) for event in loss[:300])
    assert loss[300].value == math.inf
    assert all(event.value == f32(event.step * 1e-6) for event in events.Scalars("train/lr"))
    assert {event.value for event in events.Scalars("größe")} == {-1.5}
    times = [event.wall_time for event in loss]
    assert times == sorted(times) and times[0] > 1.6e9, times[:3]
    print(f"tensorboard read {sum(len(events.Scalars(tag)) for tag in tags)} scalars of {len(tags)} tags: all equal")


if __name__ == "__main__":
    main()
