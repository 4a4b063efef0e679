//! Deadlines for a rank's waits for its own threads.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use zero_core::{CommError, OperationCall};

use super::rank::Rank;
use crate::abort::stop;
use crate::backend::Backend;

/// Deadline of a rank's wait for its own threads, which wait for the other ranks. The wait ends when nothing pending has made progress for
/// twice as long as one collective or transfer may take: an operation that hangs reports its own error before that.
pub struct Deadline {
    limit: Duration,
    settles: u64,
    begin: Instant,
    since: Instant,
}

impl Deadline {
    /// Interval between two checks for progress.
    pub const POLL: Duration = Duration::from_millis(20);

    /// Starts a wait of a thread of `rank`.
    pub fn new<B: Backend>(rank: &Rank<B>) -> Self {
        let transfer = rank.disk.as_ref().map_or(Duration::ZERO, |_| rank.config.offload.disk.limit);
        let (limit, now) = (2 * rank.deadline.max(transfer), Instant::now());
        Self { limit, settles: rank.settles.load(Ordering::Relaxed), begin: now, since: now }
    }

    /// Checks that waiting for `what` may continue.
    ///
    /// # Errors
    ///
    /// If another rank has failed, or if the deadline has passed.
    pub fn check<B: Backend>(&mut self, rank: &Rank<B>, what: &dyn core::fmt::Display) -> Result<(), CommError> {
        let settles = rank.settles.load(Ordering::Relaxed);
        if self.settles != settles {
            (self.settles, self.since) = (settles, Instant::now());
        }
        if self.since.elapsed() < self.limit {
            return rank.window.check(what);
        }
        Err(CommError::Timeout {
            at: OperationCall::new("the rank's own threads", settles, rank.place.rank, what),
            waited_ms: self.begin.elapsed().as_millis() as u64,
            missing: (0..rank.world)
                .filter(|&other| other != rank.index || rank.world == 1)
                .map(|other| rank.window.in_run(other))
                .collect(),
        })
    }

    /// Receives a result from another thread of the rank. Ends the rank if that thread has ended without one.
    pub fn receive<B: Backend, T>(
        rank: &Rank<B>,
        result: &crossbeam_channel::Receiver<Result<T, CommError>>,
        what: &'static str,
    ) -> Result<T, CommError> {
        let mut deadline = Self::new(rank);
        loop {
            match result.recv_timeout(Self::POLL) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => deadline.check(rank, &what)?,
                Err(RecvTimeoutError::Disconnected) => {
                    // Its own reason, if it has given one.
                    rank.window.check(&what)?;
                    stop(format!("a thread of rank {} ended without a result during {what}", rank.place.rank))
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use zero_core::config::ZeroConfig;

    use super::*;
    use crate::backend::DType;
    use crate::cell::Cell;
    use crate::testing::with_ranks;

    #[test]
    fn what_never_comes_is_not_waited_for_for_ever() {
        let begin = Instant::now();
        let waited = with_ranks(2, &ZeroConfig::default(), Duration::from_millis(100), |rank| {
            let slot = rank.new_slot([3].into(), DType::F32);
            Cell::gradient(rank, &slot).local();
            Ok(())
        });
        let error = waited.unwrap_err();
        assert!(error.contains("a wait for a Gradient shard of parameter 0 [3] on rank"), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(10), "{error}");
    }

    #[test]
    fn results_that_come_late_are_waited_for_while_others_come() {
        let got = with_ranks(2, &ZeroConfig::default(), Duration::from_millis(200), |rank| {
            let (sender, receiver) = crossbeam_channel::bounded(1);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for _ in 0..10 {
                        std::thread::sleep(Duration::from_millis(100));
                        rank.settles.fetch_add(1, Ordering::Relaxed);
                    }
                    sender.send(Ok(7)).unwrap();
                });
                Deadline::receive(rank, &receiver, "a test")
            })
        });
        assert_eq!(got.unwrap(), [7, 7]);
    }
}
