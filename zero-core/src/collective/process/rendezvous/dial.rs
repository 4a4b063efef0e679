//! Connections between ranks that are not neighbours, made when they are first needed.
//!
//! A rank that is not a neighbour of all others keeps listening (on its thread `rank-N-door`). To send to a rank without a
//! connection, a rank connects to that listener, on a separate thread (`rank-N-dial`), as the link must not block. If two ranks
//! connect to each other at once, the higher rank's connection is used: the higher rank refuses the lower one's.

use std::collections::BTreeSet;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::door::{Door, Expected, Hall};
use super::hello::{self, JobKey, Turned};

/// Time that an idle listener thread sleeps between checks; the end of a run may wait this long for it.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Time limit for one attempt to reach a rank; after it, this rank checks whether the other has connected by itself.
const ATTEMPT: Duration = Duration::from_millis(500);

/// A rank, and the connection with it or the reason why there is none.
type Fresh = (usize, Result<TcpStream, String>);

#[derive(Default)]
struct Lines {
    /// Ranks that are connected, or that are being admitted.
    connected: BTreeSet<usize>,
    /// Ranks that this one is connecting to.
    dialing: BTreeSet<usize>,
}

/// Addresses of all ranks' listeners.
pub(super) struct Directory {
    pub(super) rank: usize,
    pub(super) key: JobKey,
    /// Host and port of each rank's listener.
    pub(super) doors: Vec<(String, u16)>,
    /// Time limit for reaching a rank.
    pub(super) deadline: Duration,
}

struct Shared {
    directory: Directory,
    lines: Mutex<Lines>,
    fresh: Sender<Fresh>,
    ends: AtomicBool,
}

/// Connects this rank with others during the run.
pub(in super::super) struct Dial {
    shared: Arc<Shared>,
    fresh: Receiver<Fresh>,
    door: Option<JoinHandle<()>>,
}

impl Dial {
    /// Starts the listener thread of a rank that is already connected with some others.
    pub(super) fn open(
        directory: Directory,
        connected: impl Iterator<Item = usize>,
        listener: TcpListener,
    ) -> std::io::Result<Self> {
        let (sender, fresh) = unbounded();
        let lines = Lines { connected: connected.collect(), dialing: BTreeSet::new() };
        let shared = Arc::new(Shared { directory, lines: lines.into(), fresh: sender, ends: AtomicBool::new(false) });
        let at = shared.clone();
        let name = format!("rank-{}-door", shared.directory.rank);
        let door = Some(Builder::new().name(name).spawn(move || at.keep_door(&listener))?);
        Ok(Self { shared, fresh, door })
    }

    /// Starts connecting with a rank; [`Dial::next`] returns the connection.
    pub(in super::super) fn to(&self, peer: usize) {
        let shared = self.shared.clone();
        let name = format!("rank-{}-dial", shared.directory.rank);
        if let Err(error) = Builder::new().name(name).spawn(move || shared.dial(peer)) {
            let _ = self.shared.fresh.send((peer, Err(format!("cannot create a thread to connect to it: {error}"))));
        }
    }

    /// Returns the next rank that this one has been connected with, by either side, or that could not be reached.
    pub(in super::super) fn next(&self) -> Option<Fresh> {
        self.fresh.try_recv().ok()
    }
}

impl Drop for Dial {
    fn drop(&mut self) {
        // Relaxed: it publishes no other data.
        self.shared.ends.store(true, Ordering::Relaxed);
        if let Some(door) = self.door.take() {
            // A panic has already been reported.
            let _ = door.join();
        }
    }
}

impl Shared {
    fn keep_door(&self, listener: &TcpListener) {
        let Directory { rank, key, doors, deadline } = &self.directory;
        let ranks = (0..doors.len()).filter(|other| other != rank).collect();
        let expected = Expected { at: *rank, world: doors.len(), ranks, key };
        let mut door = Door::default();
        while !self.ends.load(Ordering::Relaxed) {
            match door.turn(listener, &expected, Instant::now() + *deadline, &mut &*self) {
                Ok(true) => {}
                Ok(false) if door.has_guests() => std::thread::sleep(Duration::from_millis(1)),
                Ok(false) => {
                    // A signal, or a failure to poll, only costs an extra check.
                    let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&LOOK));
                }
                Err(error) => {
                    tracing::warn!(%error, "rank {rank} has no file descriptors for new connections");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
        door.close(&expected);
    }

    fn dial(&self, peer: usize) {
        let Directory { rank, key, doors, deadline } = &self.directory;
        {
            let mut lines = self.lines.lock();
            if lines.connected.contains(&peer) || !lines.dialing.insert(peer) {
                return;
            }
        }
        let until = Instant::now() + *deadline;
        let outcome = loop {
            let (host, port) = &doors[peer];
            let attempt = until.min(Instant::now() + ATTEMPT);
            let knocked = hello::knock((host.as_str(), *port), peer, (*rank, doors.len()), key, attempt);
            let (Turned::Away(reason) | Turned::Late(reason)) = match knocked {
                Ok((stream, _)) => break Some(Ok(stream)),
                Err(turned) => turned,
            };
            if self.lines.lock().connected.contains(&peer) {
                break None;
            }
            if Instant::now() >= until || self.ends.load(Ordering::Relaxed) {
                break Some(Err(format!("rank {rank} could not reach it at {host}:{port} ({reason})")));
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut lines = self.lines.lock();
        lines.dialing.remove(&peer);
        let Some(outcome) = outcome else { return };
        if outcome.is_ok() {
            lines.connected.insert(peer);
        }
        // A link that has ended needs no connection.
        let _ = self.fresh.send((peer, outcome));
    }
}

impl Hall for &Shared {
    fn admit(&mut self, rank: usize) -> Result<(), String> {
        let mut lines = self.lines.lock();
        if lines.dialing.contains(&rank) && self.directory.rank > rank {
            return Err("both ranks connected at once, and the higher rank's connection is used".into());
        }
        match lines.connected.insert(rank) {
            true => Ok(()),
            false => Err(format!("rank {rank} is already connected")),
        }
    }

    fn arrive(&mut self, rank: usize, stream: TcpStream) {
        let _ = self.fresh.send((rank, Ok(stream)));
    }

    fn leave(&mut self, rank: usize) {
        self.lines.lock().connected.remove(&rank);
    }
}
