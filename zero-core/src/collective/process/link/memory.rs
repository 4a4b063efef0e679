//! A link within one process, for tests with more ranks than a machine has room for: ranks are threads, and count their messages.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use parking_lot::Mutex;

use super::{Channel, Heard, Link};
use crate::collective::error::LinkError;

/// Counts of the messages that a rank has sent.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Said {
    pub(in super::super) messages: usize,
    pub(in super::super) bytes: usize,
    pub(in super::super) peers: BTreeSet<usize>,
}

#[derive(Default)]
struct Mailbox {
    control: VecDeque<(usize, Vec<u8>)>,
    data: HashMap<(usize, i32), VecDeque<Vec<u8>>>,
}

#[derive(Default)]
struct Desk {
    mailbox: Mutex<Mailbox>,
    said: Mutex<Said>,
    thread: OnceLock<Thread>,
}

/// The connection between all ranks.
pub(in super::super) struct Hub(Vec<Desk>);

impl Hub {
    pub(in super::super) fn new(world: usize) -> Arc<Self> {
        Arc::new(Self((0..world).map(|_| Desk::default()).collect()))
    }

    /// Returns and resets the counts of the messages that each rank has sent.
    pub(in super::super) fn take_said(&self) -> Vec<Said> {
        self.0.iter().map(|desk| std::mem::take(&mut *desk.said.lock())).collect()
    }
}

pub(in super::super) struct MemoryLink {
    rank: usize,
    hub: Arc<Hub>,
}

impl MemoryLink {
    /// Opens the link of `rank`; must be called on the thread that will use it.
    pub(in super::super) fn open(hub: Arc<Hub>, rank: usize) -> Self {
        hub.0[rank].thread.set(std::thread::current()).expect("a rank is there once");
        Self { rank, hub }
    }
}

pub(in super::super) enum Ongoing {
    Sent(usize),
    Posted { from: usize, tag: i32, to: *mut u8, length: usize },
}

impl Link for MemoryLink {
    type Ongoing = Ongoing;

    const WAKES: bool = true;

    unsafe fn send(&mut self, channel: Channel, to: usize, tag: i32, bytes: &[u8]) -> Result<Ongoing, LinkError> {
        {
            let mut said = self.hub.0[self.rank].said.lock();
            said.messages += 1;
            said.bytes += bytes.len();
            said.peers.insert(to);
        }
        let desk = &self.hub.0[to];
        {
            let mut mailbox = desk.mailbox.lock();
            match channel {
                Channel::Control => mailbox.control.push_back((self.rank, bytes.to_vec())),
                Channel::Data => mailbox.data.entry((self.rank, tag)).or_default().push_back(bytes.to_vec()),
            }
        }
        if let Some(thread) = desk.thread.get() {
            thread.unpark();
        }
        Ok(Ongoing::Sent(bytes.len()))
    }

    unsafe fn receive(&mut self, from: usize, tag: i32, to: *mut u8, length: usize) -> Result<Ongoing, LinkError> {
        Ok(Ongoing::Posted { from, tag, to, length })
    }

    fn test(&mut self, ongoing: &mut Ongoing) -> Result<Option<usize>, LinkError> {
        let (from, tag, to, length) = match *ongoing {
            Ongoing::Sent(bytes) => return Ok(Some(bytes)),
            Ongoing::Posted { from, tag, to, length } => (from, tag, to, length),
        };
        let mut mailbox = self.hub.0[self.rank].mailbox.lock();
        let Some(bytes) = mailbox.data.get_mut(&(from, tag)).and_then(VecDeque::pop_front) else { return Ok(None) };
        assert!(bytes.len() <= length, "received {} bytes, expected {length}", bytes.len());
        // SAFETY: the memory belongs to this receive alone until it has ended (`Link::receive`), and is long enough.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(Some(bytes.len()))
    }

    fn next_message(&mut self) -> Result<Option<Heard>, LinkError> {
        let next = self.hub.0[self.rank].mailbox.lock().control.pop_front();
        Ok(next.map(|(from, bytes)| Heard::Message { from, bytes }))
    }

    fn close(self) -> Result<(), LinkError> {
        Ok(())
    }
}
