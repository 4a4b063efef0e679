//! One-sided reads: a rank reads what another has published, without that rank taking part.
//!
//! MPI calls this a window. ZeRO gathers parameters through it, because a gather happens inside a forward or backward pass,
//! where a rank may hold locks that another needs. So a gather must never depend on what another rank's main thread does
//! next (docs/adr/0002-one-sided-gathers.md).
//!
//! A window holds weak references: publishing keeps nothing alive. Objects have the same numbers on every rank, and a rank
//! publishes the versions of an object in ascending order. So reading a version that is absent while a later one exists
//! gives [`CommError::Gone`]; a reader waits for a version not published yet, up to the run's deadline.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

pub use crate::exposure::{Expose, Exposure, Key};

use crate::CommError;
use crate::collective::operation::OperationContext;
use crate::collective::threads::{Run, ThreadComm};
use crate::collective::{Buffer, Collective, DType};

/// Interval at which a reader in this process checks whether the run has failed.
const POLL: Duration = Duration::from_millis(20);

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

/// The shared state that the ranks of one run join to read each other's published values.
#[derive(Debug)]
pub struct WindowHost<T>(Arc<Board<T>>);

impl<T> Default for WindowHost<T> {
    fn default() -> Self {
        Self(Arc::new(Board { published: Mutex::default(), changed: Condvar::new() }))
    }
}

impl<T> WindowHost<T> {
    /// Returns the view of `comm`'s rank. All ranks of a run join the same host.
    pub fn join(&self, comm: &ThreadComm) -> Window<T> {
        Window { rank: comm.rank(), peers: Peers::Threads(comm.run().clone()), board: self.0.clone(), members: None }
    }

    /// Returns the view of a single rank, which never waits.
    pub fn alone(&self) -> Window<T> {
        Window { rank: 0, peers: Peers::None, board: self.0.clone(), members: None }
    }
}

/// The location of the other ranks.
#[derive(Debug, Clone)]
enum Peers {
    None,
    /// In this process; they publish to the same board.
    Threads(Arc<Run>),
    /// In other processes, each with its own board.
    Processes(crate::collective::process::remote::Remote),
}

/// One rank's view of what all ranks have published.
#[derive(Debug)]
pub struct Window<T> {
    /// This rank's number in the run.
    rank: usize,
    peers: Peers,
    board: Arc<Board<T>>,
    /// The ranks of the run that share this view, if not all.
    members: Option<Arc<[usize]>>,
}

impl<T> Clone for Window<T> {
    fn clone(&self) -> Self {
        let Self { rank, peers, board, members } = self;
        Self { rank: *rank, peers: peers.clone(), board: board.clone(), members: members.clone() }
    }
}

/// The result of a read.
#[derive(Debug)]
pub enum ReadValue<T> {
    /// The value itself, from a rank of this process.
    Here(Arc<T>),
    /// The bytes that the owner, another process, exposes.
    Bytes {
        /// Type and shape of the bytes, as the owner describes them.
        tag: String,
        /// The bytes.
        bytes: Vec<u8>,
    },
}

impl<T> ReadValue<T> {
    /// Returns the value itself, if the ranks share memory.
    pub fn here(self) -> Option<Arc<T>> {
        match self {
            ReadValue::Here(value) => Some(value),
            ReadValue::Bytes { .. } => None,
        }
    }
}

/// A read in progress; there may be several at a time.
#[must_use = "the value, or the error, is in `wait`"]
pub struct PendingRead<'a, T>(Box<dyn FnOnce() -> Result<ReadValue<T>, CommError> + 'a>);

impl<T> PendingRead<'_, T> {
    /// Waits for the read, and returns its result.
    ///
    /// # Errors
    ///
    /// Same as [`Window::read`].
    pub fn wait(self) -> Result<ReadValue<T>, CommError> {
        (self.0)()
    }
}

/// The result of looking up a key on the board.
enum Looked<T> {
    Absent,
    /// The last holder is dropping the value.
    Dropping,
    Gone,
    Here(Arc<T>),
}

impl<T> Board<T> {
    fn look(published: &HashMap<(usize, u64), Versions<T>>, peer: usize, key: Key) -> Looked<T> {
        let Some(versions) = published.get(&(peer, key.object)) else { return Looked::Absent };
        match versions.live.get(&key.version) {
            Some(weak) => weak.upgrade().map_or(Looked::Dropping, Looked::Here),
            None if versions.latest >= key.version => Looked::Gone,
            None => Looked::Absent,
        }
    }
}

impl<T: Expose + Send + Sync + 'static> Window<T> {
    /// Returns the view of a process's rank. All ranks of a run join their windows in the same order.
    pub fn join_processes(comm: &crate::collective::process::ProcessComm) -> Self {
        use crate::collective::process::{commands::Found, remote::Remote};
        let (rank, board) = (comm.place().rank, WindowHost::<T>::default().0);
        let shown = board.clone();
        let lookup = move |key: Key| {
            let looked = Board::look(&shown.published.lock(), rank, key);
            match looked {
                // A value that is being dropped will be retracted, or published again.
                Looked::Absent | Looked::Dropping => Found::Absent,
                Looked::Gone => Found::Gone,
                // The board is not locked while bytes are computed.
                Looked::Here(value) => Found::Here(value.expose(key)),
            }
        };
        Self { rank, peers: Peers::Processes(Remote::join(comm, Box::new(lookup))), board, members: None }
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
        self.changed();
    }

    /// Retracts a version like [`Window::retract`], but does not remember that it existed: a later read waits, as for a
    /// version not published yet. For short-lived objects, so that the board does not grow with them.
    pub fn forget(&self, key: Key) {
        let mut published = self.board.published.lock();
        if let Some(versions) = published.get_mut(&(self.rank, key.object)) {
            versions.live.remove(&key.version);
            if versions.live.is_empty() {
                published.remove(&(self.rank, key.object));
            }
        }
    }

    /// Retracts a version whose value is gone; later reads return [`CommError::Gone`].
    pub fn retract(&self, key: Key) {
        if let Some(versions) = self.board.published.lock().get_mut(&(self.rank, key.object)) {
            versions.live.remove(&key.version);
        }
        self.changed();
    }

    /// Notifies readers that an [`Exposure::Pending`] value is ready. They would notice within milliseconds anyway; this
    /// saves them the wait.
    pub fn changed(&self) {
        self.board.changed.notify_all();
        if let Peers::Processes(remote) = &self.peers {
            remote.changed();
        }
    }

    /// Restricts the view to the ranks of `group`, addressed by their numbers there.
    #[must_use]
    pub fn of_group(self, group: &dyn Collective) -> Self {
        Self { members: Some(group.members().into()), ..self }
    }

    /// Returns the number in the run of the rank that has number `peer` in this view.
    pub fn in_run(&self, peer: usize) -> usize {
        self.members.as_ref().map_or(peer, |members| members[peer])
    }

    /// Returns whether the other ranks are processes, whose values are read as bytes.
    pub fn is_remote(&self) -> bool {
        match &self.peers {
            Peers::None | Peers::Threads(_) => false,
            Peers::Processes(_) => true,
        }
    }

    fn at<'a>(&self, seq: u64, op: &'a dyn core::fmt::Display) -> OperationContext<'a> {
        OperationContext { group: "window", seq, rank: self.rank, op }
    }

    /// Checks that no rank has failed, so that waiting for something in this process can still succeed.
    ///
    /// # Errors
    ///
    /// [`CommError::PeerFailed`].
    pub fn check(&self, what: &dyn core::fmt::Display) -> Result<(), CommError> {
        match &self.peers {
            Peers::None => Ok(()),
            Peers::Threads(run) => run.standing.check(self.at(0, what), []),
            Peers::Processes(remote) => remote.check(&what.to_string()),
        }
    }

    /// Reads the value that `peer` has published under `key`, waiting for it if necessary. `what` names it in errors.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the peer drops the version, fails, leaves, or does not publish within the deadline.
    pub fn read(&self, peer: usize, key: Key, what: &dyn core::fmt::Display) -> Result<ReadValue<T>, CommError> {
        self.begin_read(peer, key, what).wait()
    }

    /// Starts a [`Window::read`].
    pub fn begin_read<'a>(&'a self, peer: usize, key: Key, what: &'a dyn core::fmt::Display) -> PendingRead<'a, T> {
        let peer = self.in_run(peer);
        if let Peers::Processes(remote) = &self.peers
            && peer != self.rank
        {
            let asking = remote.begin(peer, key, &what.to_string(), None);
            return PendingRead(Box::new(|| {
                let (tag, bytes) = asking.wait()?;
                Ok(ReadValue::Bytes { tag, bytes: bytes.expect("the read was given no place for its bytes") })
            }));
        }
        // The lookup happens when the read is waited for: an earlier one gains nothing.
        PendingRead(Box::new(move || self.read_here(peer, key, what).map(ReadValue::Here)))
    }

    /// Reads from this process's board.
    fn read_here(&self, peer: usize, key: Key, what: &dyn core::fmt::Display) -> Result<Arc<T>, CommError> {
        let begin = Instant::now();
        let gone = || CommError::Gone { rank: self.rank, what: what.to_string(), peer };
        let mut published = self.board.published.lock();
        loop {
            let dropping = match Board::look(&published, peer, key) {
                Looked::Here(value) => return Ok(value),
                Looked::Gone => return Err(gone()),
                // The value will be retracted, or published again under the same key. A third rank that was reading it may
                // do that, even after its owner has ended.
                Looked::Dropping => true,
                Looked::Absent => false,
            };
            // A process that reads what it has not published itself would wait forever.
            let Peers::Threads(run) = &self.peers else {
                return Err(gone());
            };
            let op = format!("a gather of {what}");
            let at = self.at(key.version, &op);
            run.standing.check(at, (!dropping).then_some(peer))?;
            let waited = begin.elapsed();
            if waited >= run.deadline {
                return Err(at.timeout(waited, vec![peer]));
            }
            self.board.changed.wait_for(&mut published, POLL.min(run.deadline - waited));
        }
    }
}

impl<T: Expose> Window<T> {
    /// Gathers an array from shards of several processes: copies `own`, and reads `pieces` concurrently from the ranks named
    /// there, directly into place. Together they cover the array; each rank exposes its shard as `tag`.
    ///
    /// # Errors
    ///
    /// Same as [`Window::read`]. Also [`CommError::Mismatch`] if a rank exposes another tag or length, and
    /// [`CommError::Shape`] if the shards do not cover the array.
    ///
    /// # Panics
    ///
    /// If the ranks share memory (see [`Window::is_remote`]).
    pub fn gather(
        &self,
        whole: GatherRequest<'_>,
        key: Key,
        what: &dyn core::fmt::Display,
    ) -> Result<Buffer, CommError> {
        let GatherRequest { dtype, elements, tag, own, pieces } = whole;
        let bytes = elements * dtype.size();
        let mut ranges: Vec<Range<usize>> = pieces.iter().map(|(_, range)| range.clone()).collect();
        ranges.extend(own.map(|(begin, part)| begin..begin + part.len()));
        ranges.retain(|range| !range.is_empty());
        ranges.sort_unstable_by_key(|range| range.start);
        let mut covered = 0;
        let follows = |range: &Range<usize>| std::mem::replace(&mut covered, range.end) == range.start;
        if !ranges.iter().all(follows) || covered != bytes {
            let (op, expected) =
                (format!("a gather of {what}"), format!("shards that cover {bytes} bytes exactly once"));
            return Err(self.at(key.version, &op).shape((expected, format!("{ranges:?}"))));
        }
        let Peers::Processes(remote) = &self.peers else {
            panic!("ranks that share memory read each other's shards in place");
        };
        let pieces: Vec<_> = pieces.iter().map(|(peer, range)| (self.in_run(*peer), range.clone())).collect();
        remote.gather((dtype, elements), tag, own, &pieces, key, &what.to_string())
    }
}

/// The array that [`Window::gather`] assembles.
#[derive(Debug, Clone, Copy)]
pub struct GatherRequest<'a> {
    /// Type of the array.
    pub dtype: DType,
    /// Number of its elements.
    pub elements: usize,
    /// Tag under which every rank exposes its shard.
    pub tag: &'a str,
    /// This rank's own shard, and its byte offset.
    pub own: Option<(usize, &'a [u8])>,
    /// The other ranks, each with the byte range of its shard. Empty ranges are not requested.
    pub pieces: &'a [(usize, Range<usize>)],
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
                let value = *window.read(0, key(1), &"a number")?.here().expect("the ranks share memory");
                comm.barrier()?;
                assert!(matches!(window.read(0, key(0), &"a number"), Err(CommError::Gone { peer: 0, .. })));
                comm.barrier()?;
                Ok(value)
            }
        });
        assert_eq!(seen.unwrap(), [0, 2]);
    }

    /// A value that publishes itself again when it is dropped, like a shard of a dropped module.
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
