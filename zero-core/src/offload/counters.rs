//! Counters of transferred bytes, and of the time that transfers took.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::offload::direction::Direction;

/// Totals of a file since it was created. A transfer counts when it has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DiskStats {
    /// Bytes read, padding included.
    pub bytes_read: u64,
    /// Bytes written, padding included.
    pub bytes_written: u64,
    /// Time during which a read was in flight, from its submission on.
    pub reading: Duration,
    /// Time during which a write was in flight, from its submission on.
    pub writing: Duration,
    /// Time during which any transfer was in flight: less than the sum of the two if they overlapped.
    pub busy: Duration,
}

/// A clock that runs while any transfer is in flight.
#[derive(Default)]
struct Clock {
    running: usize,
    since: Option<Instant>,
    total: Duration,
}

impl Clock {
    fn start(&mut self, now: Instant) {
        self.running += 1;
        self.since.get_or_insert(now);
    }

    fn stop(&mut self, now: Instant) {
        self.running -= 1;
        if self.running == 0
            && let Some(since) = self.since.take()
        {
            self.total += now - since;
        }
    }

    fn at(&self, now: Instant) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| now - since)
    }
}

#[derive(Default)]
struct State {
    /// Clocks of reads and of writes, by [`Direction`]; `any` is that of both.
    clocks: [Clock; 2],
    any: Clock,
    bytes: [u64; 2],
}

/// The counters of a file.
#[derive(Default)]
pub(crate) struct Counters {
    state: Mutex<State>,
}

impl Counters {
    pub(crate) fn start(&self, direction: Direction) {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.any.start(now);
        state.clocks[direction as usize].start(now);
    }

    /// Records the end of a transfer of `bytes`.
    pub(crate) fn stop(&self, direction: Direction, bytes: u64) {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.any.stop(now);
        state.clocks[direction as usize].stop(now);
        state.bytes[direction as usize] += bytes;
    }

    pub(crate) fn stats(&self) -> DiskStats {
        let state = self.state.lock();
        let now = Instant::now();
        let ([bytes_read, bytes_written], [reading, writing]) = (state.bytes, &state.clocks);
        DiskStats {
            bytes_read,
            bytes_written,
            reading: reading.at(now),
            writing: writing.at(now),
            busy: state.any.at(now),
        }
    }
}
