//! Exact counts of the bytes that ranks receive from each other and of the bytes of model state that a rank holds.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

macro_rules! wire_kinds {
    ($($field:ident $kind:ident $doc:literal;)*) => {
        /// Bytes that one rank received from the others, by operation.
        ///
        /// Counted as in the ZeRO paper (section 7): gathering or scattering a tensor of `n` bytes over `N` ranks moves
        /// `n (N - 1) / N` bytes per rank; an all-reduce moves twice that.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
        pub struct WireBytes {
            $(#[doc = $doc] pub $field: u64,)*
            /// Bytes among all of the above that came from ranks on other machines.
            #[serde(default)]
            pub from_other_machines: u64,
            /// Bytes that the same operations would have moved without quantization.
            #[serde(default)]
            pub uncompressed: Uncompressed,
        }

        /// Bytes by operation, as they would have been without quantization.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
        pub struct Uncompressed {
            $(#[doc = $doc] pub $field: u64,)*
        }

        impl Uncompressed {
            /// Returns the sum over the operations.
            pub fn total(&self) -> u64 {
                [$(self.$field),*].iter().sum()
            }
        }

        impl WireBytes {
            /// Returns the sum over the operations.
            pub fn total(&self) -> u64 {
                [$(self.$field),*].iter().sum()
            }

            /// Returns every count.
            pub fn counts_mut(&mut self) -> impl Iterator<Item = &mut u64> {
                let uncompressed = &mut self.uncompressed;
                let counts = [$(&mut self.$field,)* &mut self.from_other_machines, $(&mut uncompressed.$field),*];
                counts.into_iter()
            }

            /// Returns the bytes moved since `earlier`.
            pub fn since(&self, earlier: &WireBytes) -> WireBytes {
                let from_other_machines = self.from_other_machines - earlier.from_other_machines;
                let uncompressed = Uncompressed { $($field: self.uncompressed.$field - earlier.uncompressed.$field,)* };
                WireBytes { $($field: self.$field - earlier.$field,)* from_other_machines, uncompressed }
            }
        }

        /// The kinds of traffic that [`WireBytes`] distinguishes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum WireKind {
            $(#[doc = $doc] $kind,)*
        }

        impl WireKind {
            /// Returns the operation's name.
            pub fn name(self) -> &'static str {
                match self {
                    $(WireKind::$kind => stringify!($field),)*
                }
            }
        }

        /// One rank's running count of [`WireBytes`], shared by all groups of the rank.
        #[derive(Debug, Default)]
        pub struct WireCounter {
            by_kind: [AtomicU64; [$(stringify!($kind)),*].len()],
            /// Bytes that quantization has saved, by kind.
            saved: [AtomicU64; [$(stringify!($kind)),*].len()],
            from_other_machines: AtomicU64,
        }

        impl WireCounter {
            /// Adds `bytes` received. The order is relaxed, since nothing depends on a statistic.
            pub fn add(&self, kind: WireKind, bytes: usize) {
                self.by_kind[kind as usize].fetch_add(bytes as u64, Ordering::Relaxed);
            }

            /// Records that `sent` bytes, already added, would have been `uncompressed` bytes without quantization.
            pub fn add_uncompressed(&self, kind: WireKind, uncompressed: usize, sent: usize) {
                // The quantized form of a few numbers can be longer: the sums wrap, and stay correct.
                self.saved[kind as usize].fetch_add((uncompressed as u64).wrapping_sub(sent as u64), Ordering::Relaxed);
            }

            /// Records that `bytes` of the bytes already added came from other machines.
            pub fn add_from_other_machines(&self, bytes: usize) {
                self.from_other_machines.fetch_add(bytes as u64, Ordering::Relaxed);
            }

            /// Returns the count so far.
            pub fn read(&self) -> WireBytes {
                let from_other_machines = self.from_other_machines.load(Ordering::Relaxed);
                let [by_kind, saved] = [&self.by_kind, &self.saved];
                let sent = |kind: WireKind| by_kind[kind as usize].load(Ordering::Relaxed);
                let uncompressed = |kind| sent(kind).wrapping_add(saved[kind as usize].load(Ordering::Relaxed));
                WireBytes {
                    $($field: sent(WireKind::$kind),)*
                    from_other_machines,
                    uncompressed: Uncompressed { $($field: uncompressed(WireKind::$kind),)* },
                }
            }
        }
    };
}

wire_kinds! {
    all_gather AllGather "All-gathers, one-sided gathers of parameters among them.";
    reduce_scatter ReduceScatter "Reduce-scatters.";
    all_reduce AllReduce "All-reduces.";
    broadcast Broadcast "Broadcasts (nothing on the root).";
    gather Gather "Gathers to one rank (on the others, the data that they forward).";
    all_to_all AllToAll "All-to-alls.";
}

/// A gauge of the bytes held now and the most held since the last [`Gauge::reset_peak`].
#[derive(Debug, Default)]
pub struct Gauge {
    live: AtomicI64,
    peak: AtomicI64,
}

impl Gauge {
    /// Adds `bytes`; a negative number frees them.
    pub fn add(&self, bytes: i64) {
        let now = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// Returns the bytes held now.
    pub fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed).max(0) as u64
    }

    /// Returns the most bytes held since the last reset.
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed).max(0) as u64
    }

    /// Starts a new measuring period: the peak is reset to the bytes held now.
    pub fn reset_peak(&self) {
        self.peak.store(self.live.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Bytes of model state by kind, as the ZeRO paper counts them (section 3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StateBytes {
    /// Parameters.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer state.
    pub optimizer: u64,
}

impl StateBytes {
    /// Returns the sum over the kinds.
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gauge_keeps_the_peak_of_a_period() {
        let gauge = Gauge::default();
        gauge.add(10);
        gauge.add(-4);
        assert_eq!((gauge.live(), gauge.peak()), (6, 10));
        gauge.reset_peak();
        gauge.add(1);
        assert_eq!((gauge.live(), gauge.peak()), (7, 7));
    }

    #[test]
    fn counter_tells_kinds_apart() {
        let counter = WireCounter::default();
        counter.add(WireKind::AllGather, 3);
        let before = counter.read();
        counter.add(WireKind::AllGather, 4);
        counter.add(WireKind::ReduceScatter, 5);
        let moved = counter.read().since(&before);
        assert_eq!((moved.all_gather, moved.reduce_scatter, moved.total()), (4, 5, 9));
        counter.add_uncompressed(WireKind::AllGather, 16, 4);
        counter.add_uncompressed(WireKind::ReduceScatter, 4, 5);
        let moved = counter.read().since(&before);
        assert_eq!((moved.all_gather, moved.uncompressed.all_gather), (4, 16));
        assert_eq!((moved.uncompressed.reduce_scatter, moved.uncompressed.total()), (4, 20));
    }
}
