//! One-sided reads: a rank looks at what another has published, without that rank taking part.
//!
//! This is what MPI calls a window. ZeRO gathers parameters through it, because a gather happens inside a forward or
//! backward pass, where a rank may hold locks that another needs: there a rank must never depend on what another
//! rank's main thread does next (docs/adr/0002-one-sided-gathers.md).
//!
//! A window holds weak references: publishing keeps nothing alive. Objects are numbered alike on every rank, and a
//! rank publishes the versions of an object in ascending order. So a version that is absent although a later one is
//! there reads as [`CommError::Gone`]; one not published yet is waited for, up to the run's deadline.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::CommError;
use crate::collective::Collective;
use crate::collective::threads::{Run, ThreadComm};

/// How long a reader sleeps before it looks whether the run has failed.
const POLL: Duration = Duration::from_millis(20);

/// Names one version of one object, alike on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The object (a parameter's number).
    pub object: u64,
    /// Its version, from 0, ascending.
    pub version: u64,
}

#[derive(Debug)]
struct Versions<T> {
    live: BTreeMap<u64, Weak<T>>,
    /// The latest version ever published.
    latest: u64,
}

#[derive(Debug)]
struct Board<T> {
    published: Mutex<HashMap<(usize, u64), Versions<T>>>,
    changed: Condvar,
}

/// What one run's ranks join to see each other's published values.
#[derive(Debug)]
pub struct WindowHost<T>(Arc<Board<T>>);

impl<T> Default for WindowHost<T> {
    fn default() -> Self {
        Self(Arc::new(Board { published: Mutex::default(), changed: Condvar::new() }))
    }
}

impl<T> WindowHost<T> {
    /// The view of `comm`'s rank. Every rank of one run joins the same host.
    pub fn join(&self, comm: &ThreadComm) -> Window<T> {
        Window { rank: comm.rank(), run: Some(comm.run().clone()), board: self.0.clone() }
    }

    /// The view of a lone rank, which never waits.
    pub fn alone(&self) -> Window<T> {
        Window { rank: 0, run: None, board: self.0.clone() }
    }
}

/// One rank's view of what all ranks have published.
#[derive(Debug)]
pub struct Window<T> {
    rank: usize,
    run: Option<Arc<Run>>,
    board: Arc<Board<T>>,
}

impl<T> Clone for Window<T> {
    fn clone(&self) -> Self {
        Self { rank: self.rank, run: self.run.clone(), board: self.board.clone() }
    }
}

impl<T> Window<T> {
    /// Lets the other ranks read `value` under `key` for as long as this rank keeps it alive.
    pub fn publish(&self, key: Key, value: &Arc<T>) {
        let mut published = self.board.published.lock();
        let versions = published
            .entry((self.rank, key.object))
            .or_insert_with(|| Versions { live: BTreeMap::new(), latest: key.version });
        versions.live.insert(key.version, Arc::downgrade(value));
        versions.latest = versions.latest.max(key.version);
        drop(published);
        self.board.changed.notify_all();
    }

    /// As [`Window::retract`], but without remembering that the version was there: a later read of it waits, as for one
    /// not published yet. For objects that come and go, so that the board does not grow with them.
    pub fn forget(&self, key: Key) {
        let mut published = self.board.published.lock();
        if let Some(versions) = published.get_mut(&(self.rank, key.object)) {
            versions.live.remove(&key.version);
            if versions.live.is_empty() {
                published.remove(&(self.rank, key.object));
            }
        }
    }

    /// Takes back a version whose value is gone; later reads of it say so.
    pub fn retract(&self, key: Key) {
        if let Some(versions) = self.board.published.lock().get_mut(&(self.rank, key.object)) {
            versions.live.remove(&key.version);
        }
        self.board.changed.notify_all();
    }

    /// Whether waiting for something in this process still makes sense: an error when a rank has failed.
    ///
    /// # Errors
    ///
    /// [`CommError::PeerFailed`].
    pub fn check(&self, what: &dyn core::fmt::Display) -> Result<(), CommError> {
        self.run.as_ref().map_or(Ok(()), |run| run.check("window", 0, self.rank, what, &[]))
    }

    /// What `peer` has published under `key`, waiting for it if need be. `what` names it in errors.
    ///
    /// # Errors
    ///
    /// [`CommError`] when the peer has dropped the version, fails, leaves, or does not publish within the deadline.
    pub fn read(&self, peer: usize, key: Key, what: &dyn core::fmt::Display) -> Result<Arc<T>, CommError> {
        let begin = Instant::now();
        let gone = || CommError::Gone { rank: self.rank, what: what.to_string(), peer };
        let mut published = self.board.published.lock();
        loop {
            let mut dropping = false;
            if let Some(versions) = published.get(&(peer, key.object)) {
                match versions.live.get(&key.version) {
                    Some(weak) => {
                        if let Some(value) = weak.upgrade() {
                            return Ok(value);
                        }
                        // Its last holder is dropping it: it will be retracted, or published again under the same key.
                        // That may be a third rank that was reading it, even after its owner has ended.
                        dropping = true;
                    }
                    None if versions.latest >= key.version => return Err(gone()),
                    None => {}
                }
            }
            let Some(run) = &self.run else {
                return Err(gone());
            };
            let op = format!("a gather of {what}");
            let missing: &[usize] = if dropping { &[] } else { &[peer] };
            run.check("window", key.version, self.rank, &op, missing)?;
            let waited = begin.elapsed();
            if waited >= run.deadline {
                return Err(CommError::Timeout {
                    group: "window".to_string(),
                    seq: key.version,
                    rank: self.rank,
                    op,
                    waited_ms: waited.as_millis() as u64,
                    missing: vec![peer],
                });
            }
            self.board.changed.wait_for(&mut published, POLL.min(run.deadline - waited));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;
    use crate::collective::threads::{ThreadOptions, run};

    #[test]
    fn a_reader_waits_for_a_version_and_sees_that_one_is_gone() {
        let host = WindowHost::<u32>::default();
        let options = ThreadOptions { deadline: Duration::from_secs(20) };
        let seen = run(2, &options, |comm| -> Result<u32, CommError> {
            let window = host.join(&comm);
            let key = |version| Key { object: 7, version };
            if comm.rank() == 0 {
                let first = Arc::new(1u32);
                window.publish(key(0), &first);
                comm.barrier()?;
                std::thread::sleep(Duration::from_millis(50));
                let second = Arc::new(2u32);
                window.publish(key(1), &second);
                drop(first);
                window.retract(key(0));
                comm.barrier()?;
                comm.barrier()?;
                Ok(0)
            } else {
                comm.barrier()?;
                let value = *window.read(0, key(1), &"a number")?;
                comm.barrier()?;
                assert!(matches!(window.read(0, key(0), &"a number"), Err(CommError::Gone { peer: 0, .. })));
                comm.barrier()?;
                Ok(value)
            }
        });
        assert_eq!(seen.unwrap(), [0, 2]);
    }

    /// A value that publishes itself again when it is dropped, as a shard of a dropped module does.
    struct Phoenix(Window<Phoenix>, std::sync::Arc<Mutex<Vec<Arc<Phoenix>>>>, bool);

    impl Drop for Phoenix {
        fn drop(&mut self) {
            if self.2 {
                std::thread::sleep(Duration::from_millis(100));
                let next = Arc::new(Phoenix(self.0.clone(), self.1.clone(), false));
                self.0.publish(Key { object: 1, version: 0 }, &next);
                self.1.lock().push(next);
            }
        }
    }

    #[test]
    fn a_value_that_a_third_rank_drops_after_its_owner_has_ended_is_waited_for() {
        let host = WindowHost::<Phoenix>::default();
        let kept = Arc::new(Mutex::new(Vec::new()));
        let held: Mutex<Option<Arc<Phoenix>>> = Mutex::new(None);
        let options = ThreadOptions { deadline: Duration::from_secs(20) };
        let key = Key { object: 1, version: 0 };
        run(3, &options, |comm| -> Result<(), CommError> {
            let window = host.join(&comm);
            if comm.rank() == 0 {
                let value = Arc::new(Phoenix(window.clone(), kept.clone(), true));
                window.publish(key, &value);
                *held.lock() = Some(value);
                comm.barrier()?;
                return Ok(());
            }
            comm.barrier()?;
            // Rank 0 is ending; rank 1 holds the last reference and drops it while rank 2 reads.
            std::thread::sleep(Duration::from_millis(100));
            if comm.rank() == 1 {
                let value = held.lock().take();
                drop(value);
            } else {
                std::thread::sleep(Duration::from_millis(30));
                window.read(0, key, &"a value")?;
            }
            Ok(())
        })
        .unwrap();
        // The cycle of windows and values ends here.
        let last: Vec<Weak<Phoenix>> = kept.lock().drain(..).map(|value| Arc::downgrade(&value)).collect();
        assert!(last.iter().all(|value| value.upgrade().is_none()));
    }

    #[test]
    fn a_reader_gives_up_at_the_deadline() {
        let host = WindowHost::<u32>::default();
        let options = ThreadOptions { deadline: Duration::from_millis(80) };
        let error = run(2, &options, |comm| -> Result<(), CommError> {
            if comm.rank() == 0 {
                let _ = host.join(&comm).read(1, Key { object: 0, version: 0 }, &"parameter 0")?;
            } else {
                std::thread::sleep(Duration::from_millis(300));
            }
            Ok(())
        })
        .unwrap_err();
        assert!(error.to_string().contains("a gather of parameter 0"), "{error}");
    }
}
