//! The thread that answers other ranks' reads of what this rank has published (`rank-N-window`).
//!
//! Making bytes may cost a copy or a read of a disk, so it does not happen on the communication thread, which only passes
//! requests in and answers out. A request for what is not there yet is *parked*: tried again when something is published,
//! and every few milliseconds, until it can be answered; the others do not wait behind it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::super::threads::panic_reason;
use super::commands::{Asked, Command, Found, Job, Lookup, Parked};
use super::message::Answer;
use super::shared::Shared;
use crate::exposure::Exposure;

/// How soon parked requests are tried again: the first time, and at most.
const RETRY: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(5)];

/// Answers until it is told to stop.
pub(super) fn serve(shared: &Shared, jobs: &Receiver<Job>, waiting: &Parked) {
    let mut lookups: Vec<(u32, Lookup)> = Vec::new();
    let mut parked: Vec<Asked> = Vec::new();
    let (mut left, mut retry, mut looked) = (false, RETRY[0], Instant::now());
    loop {
        let job = if parked.is_empty() {
            jobs.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            // From the last look, not from the last job: those may come faster.
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
        // Relaxed: a hint to those who publish; a hint missed is made up for by the next try.
        waiting.store(parked.len(), Ordering::Relaxed);
    }
}

/// Answers a request, if it can be answered now.
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
