//! The flight recorder: a rank's last operations, kept in memory and written to a file after a failure.
//!
//! A [`Recorder`] keeps a rank's last [`KEPT`] operations. If a deadline passes or a rank fails, every rank that can still be
//! reached writes its [`Record`] as JSON. [`merge`] compares the records and reports which ranks are late, and in which operations.

mod merge;

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::progress::joined;
pub use merge::{Completed, Different, Late, Report, Unreadable, Wait, merge};

/// Number of operations that a recorder keeps.
pub const KEPT: usize = 100;

/// Progress of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It is in progress.
    Waiting {
        /// Ranks that have not reached it.
        for_ranks: Vec<usize>,
        /// Ranks that have reached it, and whose bytes are in transit.
        receiving_from: Vec<usize>,
    },
    /// It has succeeded.
    Done,
    /// It has failed.
    Failed {
        /// Its error.
        why: String,
        /// Ranks that had not reached it.
        without: Vec<usize>,
    },
}

impl State {
    /// Returns the ranks that have not arrived or, if all have, those whose bytes are still in transit.
    fn missing(&self) -> &[usize] {
        match self {
            State::Waiting { for_ranks, receiving_from } if for_ranks.is_empty() => receiving_from,
            State::Waiting { for_ranks, .. } => for_ranks,
            State::Failed { without, .. } => without,
            State::Done => &[],
        }
    }
}

/// One operation of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// Label of its group.
    pub group: String,
    /// Identity of the group, the same on all ranks: labels may be used twice.
    pub group_id: u64,
    /// Sequence number in the group; for a one-sided read, the version that is read.
    pub seq: u64,
    /// Description of the call, as in errors; two ranks whose descriptions differ at one sequence number do not match.
    pub op: String,
    /// `true` for a read of data that one rank has published; sequence numbers of different ranks are then unrelated.
    pub one_sided: bool,
    /// Number of bytes that this rank receives.
    pub bytes: u64,
    /// Microseconds from the start of the run.
    pub started_us: u64,
    /// Microseconds since 1970.
    pub started_unix_us: u64,
    /// Microseconds from the start of the run.
    pub ended_us: Option<u64>,
    /// Its progress.
    pub state: State,
}

/// The flight record of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Its process id.
    pub pid: u32,
    /// Reason for writing the record.
    pub reason: String,
    /// Start time of the rank, in microseconds since 1970.
    pub started_unix_us: u64,
    /// Time at which the record was written, in microseconds from the start.
    pub written_us: u64,
    /// The latest operations, oldest first.
    pub operations: Vec<Operation>,
    /// Label, identity and last successful sequence number of each group, even if that is older than `operations`.
    pub completed: Vec<(String, u64, u64)>,
}

fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

/// One rank's recorder of its last operations.
#[derive(Debug)]
pub struct Recorder {
    rank: usize,
    world: usize,
    folder: Option<PathBuf>,
    begin: Instant,
    begin_unix_us: u64,
    ring: Mutex<VecDeque<Arc<Entry>>>,
    completed: Mutex<BTreeMap<(u64, String), u64>>,
    written: AtomicBool,
    /// The thread that writes the record.
    writing: Mutex<Option<JoinHandle<()>>>,
}

/// An operation that is being recorded.
#[derive(Debug)]
pub(crate) struct Entry {
    operation: Mutex<Operation>,
    /// `true` if the operation ends with this entry: an all-reduce is recorded as two.
    last: bool,
}

/// Description of an operation when it begins.
#[derive(Debug)]
pub(crate) struct Opening<'a> {
    pub(crate) group: &'a str,
    pub(crate) group_id: u64,
    pub(crate) seq: u64,
    pub(crate) op: String,
    pub(crate) bytes: usize,
    pub(crate) one_sided: bool,
    pub(crate) waiting_for: Vec<usize>,
    /// `true` if the operation ends with this entry.
    pub(crate) last: bool,
}

impl Recorder {
    /// Creates the recorder of `rank`, which writes its record to `folder`, if there is one.
    pub fn new(rank: usize, world: usize, folder: Option<PathBuf>) -> Self {
        let recorder = Self {
            rank,
            world,
            folder,
            begin: Instant::now(),
            begin_unix_us: unix_us(),
            ring: Mutex::default(),
            completed: Mutex::default(),
            written: AtomicBool::new(false),
            writing: Mutex::default(),
        };
        recorder.clear();
        recorder
    }

    fn now_us(&self) -> u64 {
        self.begin.elapsed().as_micros() as u64
    }

    pub(crate) fn open(&self, opening: Opening<'_>) -> Arc<Entry> {
        let started_us = self.now_us();
        let entry = Arc::new(Entry {
            last: opening.last,
            operation: Mutex::new(Operation {
                group: opening.group.to_string(),
                group_id: opening.group_id,
                seq: opening.seq,
                op: opening.op,
                one_sided: opening.one_sided,
                bytes: opening.bytes as u64,
                started_us,
                started_unix_us: self.begin_unix_us + started_us,
                ended_us: None,
                state: State::Waiting { for_ranks: opening.waiting_for, receiving_from: Vec::new() },
            }),
        });
        let mut ring = self.ring.lock();
        if ring.len() == KEPT {
            // An operation in progress is what a record is for: an operation that has ended is removed first.
            let ended = ring.iter().position(|entry| entry.operation.lock().ended_us.is_some()).unwrap_or(0);
            ring.remove(ended);
        }
        ring.push_back(entry.clone());
        entry
    }

    /// Ends `entry` with success or the text of an error.
    pub(crate) fn close(&self, entry: &Entry, outcome: Result<(), String>) {
        let mut operation = entry.operation.lock();
        if operation.ended_us.is_some() {
            return;
        }
        operation.ended_us = Some(self.now_us());
        operation.state = match outcome {
            Ok(()) => State::Done,
            Err(why) => {
                let without = match &operation.state {
                    State::Waiting { for_ranks, .. } => for_ranks.clone(),
                    _ => Vec::new(),
                };
                State::Failed { why, without }
            }
        };
        if operation.state == State::Done && !operation.one_sided && entry.last {
            let key = (operation.group_id, operation.group.clone());
            let seq = operation.seq;
            drop(operation);
            let mut completed = self.completed.lock();
            let last = completed.entry(key).or_insert(seq);
            *last = seq.max(*last);
        }
    }

    /// Returns the current record.
    pub fn record(&self, reason: &str) -> Record {
        let operations = self.ring.lock().iter().map(|entry| entry.operation.lock().clone()).collect();
        let completed = self.completed.lock();
        Record {
            rank: self.rank,
            world: self.world,
            pid: std::process::id(),
            reason: reason.to_string(),
            started_unix_us: self.begin_unix_us,
            written_us: self.now_us(),
            operations,
            completed: completed.iter().map(|((id, label), seq)| (label.clone(), *id, *seq)).collect(),
        }
    }

    /// Writes the record to `flight-rank-<r>.json` in the folder, once: the first reason is the relevant one. Does nothing if
    /// there is no folder or the record has been written.
    ///
    /// A separate thread does the writing: a disk that no longer responds, which may be why a rank is late, must not delay the
    /// notification of the other ranks. [`Recorder::finish`] waits for that thread.
    pub fn write(&self, reason: &str) {
        // AcqRel: the second caller does nothing.
        let Some(folder) = self.folder.clone().filter(|_| !self.written.swap(true, Ordering::AcqRel)) else { return };
        let record = self.record(reason);
        let write = move || {
            let written = std::fs::create_dir_all(&folder).and_then(|()| write_record(&folder, &record));
            if let Err(error) = written {
                tracing::warn!(rank = record.rank, %error, "the flight record could not be written");
            }
        };
        // Without a thread there is no record; notifying the other ranks matters more.
        *self.writing.lock() = std::thread::Builder::new().name(format!("rank-{}-flight", self.rank)).spawn(write).ok();
    }

    /// Waits at most `within` for a record that is being written.
    pub fn finish(&self, within: Duration) {
        // Whether it has ended or is late, there is nothing more to wait for.
        let _ = self.writing.lock().take().map(|thread| joined(thread, within));
    }

    /// Removes an earlier run's record of this rank from the folder and, on rank 0, the records of ranks that this run does not
    /// have.
    fn clear(&self) {
        let Some(folder) = &self.folder else { return };
        // A file that cannot be removed is replaced when a record is written.
        let _ = std::fs::remove_file(folder.join(format!("flight-rank-{}.json", self.rank)));
        let entries = if self.rank == 0 { std::fs::read_dir(folder).ok() } else { None };
        for path in entries.into_iter().flatten().flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
            let rank =
                name.strip_prefix("flight-rank-").and_then(|rest| rest.strip_suffix(".json")?.parse::<usize>().ok());
            if rank.is_some_and(|rank| rank >= self.world) {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

fn write_record(folder: &Path, record: &Record) -> std::io::Result<PathBuf> {
    let path = folder.join(format!("flight-rank-{}.json", record.rank));
    let beside = folder.join(format!(".flight-rank-{}.json.{}", record.rank, record.pid));
    // Created anew, so that it is not a link placed by somebody else; an existing file is from an earlier process with this id.
    let _ = std::fs::remove_file(&beside);
    let mut file = std::fs::File::create_new(&beside)?;
    serde_json::to_writer_pretty(&mut file, record)?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    std::fs::rename(&beside, &path)?;
    Ok(path)
}

impl Entry {
    /// Records that `peer` has reached the operation; its bytes have arrived or are `underway`.
    pub(crate) fn arrived(&self, peer: usize, underway: bool) {
        if let State::Waiting { for_ranks, receiving_from } = &mut self.operation.lock().state {
            for_ranks.retain(|&rank| rank != peer);
            if underway {
                receiving_from.push(peer);
            }
        }
    }

    /// Sets the ranks that have not reached the operation to `missing`.
    pub(crate) fn only_waits_for(&self, missing: &[usize]) {
        if let State::Waiting { for_ranks, .. } = &mut self.operation.lock().state {
            for_ranks.clear();
            for_ranks.extend_from_slice(missing);
        }
    }

    /// Records that all bytes of `peer` have arrived.
    pub(crate) fn received(&self, peer: usize) {
        if let State::Waiting { receiving_from, .. } = &mut self.operation.lock().state {
            receiving_from.retain(|&rank| rank != peer);
        }
    }

    /// Returns the ranks that have not arrived or, if all have, those whose bytes are still in transit.
    pub(crate) fn missing(&self) -> Vec<usize> {
        self.operation.lock().state.missing().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(recorder: &Recorder, seq: u64) -> Arc<Entry> {
        recorder.open(Opening {
            group: "world",
            group_id: 0,
            seq,
            op: "barrier".into(),
            bytes: 0,
            one_sided: false,
            waiting_for: vec![1, 2],
            last: true,
        })
    }

    #[test]
    fn a_record_is_not_written_through_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let theirs = folder.path().join("theirs");
        std::fs::write(&theirs, "kept").unwrap();
        let record = Recorder::new(0, 1, None).record("test");
        let beside = folder.path().join(format!(".flight-rank-0.json.{}", record.pid));
        std::os::unix::fs::symlink(&theirs, &beside).unwrap();
        let path = write_record(folder.path(), &record).unwrap();
        assert_eq!(std::fs::read_to_string(&theirs).unwrap(), "kept");
        assert!(std::fs::symlink_metadata(path).unwrap().is_file());
    }

    #[test]
    fn the_ring_keeps_the_latest_and_what_is_under_way() {
        let recorder = Recorder::new(0, 3, None);
        let stuck = open(&recorder, 0);
        for seq in 1..300 {
            let entry = open(&recorder, seq);
            recorder.close(&entry, Ok(()));
        }
        stuck.arrived(1, true);
        let record = recorder.record("test");
        assert_eq!(record.operations.len(), KEPT);
        assert_eq!(record.operations[0].seq, 0);
        assert_eq!(record.operations[0].state, State::Waiting { for_ranks: vec![2], receiving_from: vec![1] });
        assert_eq!(record.operations[1].seq, 201);
        assert_eq!(record.completed, [("world".to_string(), 0, 299)]);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
    }

    #[test]
    fn a_record_is_written_once() {
        let folder = tempfile::tempdir().unwrap();
        let recorder = Recorder::new(4, 5, Some(folder.path().join("flight")));
        recorder.write("first");
        recorder.write("second");
        recorder.finish(Duration::from_secs(20));
        let path = folder.path().join("flight/flight-rank-4.json");
        let record: Record = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!((record.rank, record.reason.as_str()), (4, "first"));
    }

    #[test]
    fn what_an_earlier_run_has_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |rank: usize| folder.path().join(format!("flight-rank-{rank}.json"));
        for rank in 0..4 {
            std::fs::write(path(rank), "old").unwrap();
        }
        Recorder::new(1, 3, Some(folder.path().into()));
        assert_eq!([0, 1, 2, 3].map(|rank| path(rank).exists()), [true, false, true, true]);
        Recorder::new(0, 3, Some(folder.path().into()));
        assert_eq!([0, 2, 3].map(|rank| path(rank).exists()), [false, true, false]);
    }

    #[test]
    fn a_record_goes_through_no_link() {
        let folder = tempfile::tempdir().unwrap();
        let mine = folder.path().join("mine");
        std::fs::write(&mine, "thesis").unwrap();
        for name in ["flight-rank-0.json".to_string(), format!(".flight-rank-0.json.{}", std::process::id())] {
            std::os::unix::fs::symlink(&mine, folder.path().join(name)).unwrap();
        }
        let record = Recorder::new(0, 1, None).record("a test");
        let path = write_record(folder.path(), &record).unwrap();
        assert_eq!(std::fs::read_to_string(&mine).unwrap(), "thesis");
        assert!(!std::fs::symlink_metadata(&path).unwrap().is_symlink() && merge(&[path]).is_ok());
    }
}
