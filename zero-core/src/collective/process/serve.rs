//! The thread that answers other ranks' reads of values that this rank has published (`rank-N-window`).
//!
//! Producing the bytes may take a copy or a read from disk, so the communication thread does not do it: it only forwards
//! requests and answers. A request for a value that is not ready is *parked*: it is retried when something is published,
//! and every few milliseconds, until it can be answered. It does not block other requests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::super::threads::panic_reason;
use super::commands::{Asked, Command, Found, Job, Lookup, Parked};
use super::message::Answer;
use super::shared::Shared;
use crate::exposure::Exposure;

/// Initial and maximum interval at which parked requests are retried.
const RETRY: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(5)];

/// Answers requests until [`Job::Stop`].
pub(super) fn serve(shared: &Shared, jobs: &Receiver<Job>, waiting: &Parked) {
    let mut lookups: Vec<(u32, Lookup)> = Vec::new();
    let mut parked: Vec<Asked> = Vec::new();
    let (mut left, mut retry, mut looked) = (false, RETRY[0], Instant::now());
    loop {
        let job = if parked.is_empty() {
            jobs.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            // Measured from the last retry, not from the last job: jobs may arrive faster.
            jobs.recv_timeout(retry.saturating_sub(looked.elapsed()))
        };
        let mut again = false;
        match job {
            Ok(Job::Join { window, lookup }) => {
                lookups.push((window, lookup));
                again = true;
            }
            Ok(Job::Asked(asked)) => {
                if !answer(shared, &lookups, asked, left) {
                    parked.push(asked);
                    retry = RETRY[0];
                }
            }
            Ok(Job::Changed) => again = true,
            Ok(Job::Dispose(exposed)) => drop(exposed),
            Ok(Job::Left) => (left, again) = (true, true),
            Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                again = true;
                retry = RETRY[1].min(retry * 2);
            }
        }
        if again {
            looked = Instant::now();
            parked.retain(|&asked| !answer(shared, &lookups, asked, left));
        }
        // Relaxed: a hint to publishers; the next retry makes up for a missed hint.
        waiting.store(parked.len(), Ordering::Relaxed);
    }
}

/// Answers a request if that is possible now; returns whether it was.
fn answer(shared: &Shared, lookups: &[(u32, Lookup)], asked: Asked, left: bool) -> bool {
    let Asked { from, id, window, key } = asked;
    let found = match lookups.iter().find(|(of, _)| *of == window) {
        Some((_, lookup)) => catch_unwind(AssertUnwindSafe(|| lookup(key)))
            .unwrap_or_else(|payload| Found::Here(Exposure::Failed(panic_reason(&*payload)))),
        None => Found::Absent,
    };
    let answer = match found {
        Found::Here(Exposure::Pending) => return false,
        Found::Absent if !left => return false,
        Found::Absent => Answer::Left,
        Found::Gone => Answer::Gone,
        Found::Here(Exposure::Failed(reason)) => Answer::Failed(reason),
        Found::Here(Exposure::Ready { tag, bytes }) => Answer::Ready { tag, payload: bytes.into() },
    };
    shared.send(Command::Serve { to: from, id, answer });
    true
}
