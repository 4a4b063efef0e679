//! The reader's side of the window between processes.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_channel::{Receiver, bounded};

use super::super::flight::{Entry, Opening};
use super::super::landing::Landing;
use super::super::operation::OperationContext;
use super::super::{Buffer, DType};
use super::commands::{Command, Got, Job, Lookup, Read};
use super::rank::ProcessComm;
use super::shared::Shared;
use crate::CommError;
use crate::exposure::Key;

/// One window of a run. Each rank numbers windows in the order in which it joins them.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    shared: Arc<Shared>,
    window: u32,
}

impl Remote {
    /// Joins the next window of `comm`'s run; other ranks can read the values that `lookup` finds.
    pub(crate) fn join(comm: &ProcessComm, lookup: Lookup) -> Self {
        let shared = comm.engine().shared.clone();
        // Relaxed: only the number matters, and the program determines the order in which windows are joined.
        let window = shared.next_window.fetch_add(1, Ordering::Relaxed);
        // After the end of the run nobody reads.
        let _ = shared.jobs.send(Job::Join { window, lookup });
        Self { shared, window }
    }

    /// Notifies the serving thread that a value was published, or that a pending one is ready.
    pub(crate) fn changed(&self) {
        // Relaxed: a hint, see `serve`.
        if self.shared.parked.load(Ordering::Relaxed) > 0 {
            let _ = self.shared.jobs.send(Job::Changed);
        }
    }

    pub(crate) fn check(&self, what: &str) -> Result<(), CommError> {
        let at = OperationContext { group: "window", seq: 0, rank: self.shared.rank(), op: &what };
        self.shared.state.standing.check(at, [])
    }

    /// Starts a read of `key` from `peer`. The bytes go to `into`, or else to newly allocated memory.
    pub(crate) fn begin(
        &self,
        peer: usize,
        key: Key,
        what: &str,
        into: Option<(Arc<Landing>, Range<usize>)>,
    ) -> Asking {
        let op = format!("a gather of {what}");
        let shared = self.shared.clone();
        let entry = shared.state.recorder.open(Opening {
            group: "window",
            group_id: u64::from(self.window),
            seq: key.version,
            op: op.clone(),
            bytes: into.as_ref().map_or(0, |(_, range)| range.len()),
            one_sided: true,
            waiting_for: vec![peer],
            last: true,
        });
        let (reply, result) = bounded(1);
        shared.send(Command::Read(Read {
            // Relaxed: only the number matters.
            id: shared.next_read.fetch_add(1, Ordering::Relaxed),
            peer,
            window: self.window,
            key,
            what: what.to_string(),
            op: op.clone(),
            into,
            reply,
            entry: entry.clone(),
        }));
        Asking { shared, entry, result, begin: Instant::now(), peer, version: key.version, op }
    }

    /// Gathers a buffer from parts that together cover it: `own`, and those of other ranks, which are received in place.
    pub(crate) fn gather(
        &self,
        (dtype, elements): (DType, usize),
        tag: &str,
        own: Option<(usize, &[u8])>,
        pieces: &[(usize, Range<usize>)],
        key: Key,
        what: &str,
    ) -> Result<Buffer, CommError> {
        let landing = Arc::new(Landing::new(dtype, elements));
        let askings: Vec<(Asking, usize)> = pieces
            .iter()
            .filter(|(_, range)| !range.is_empty())
            .map(|(peer, range)| (self.begin(*peer, key, what, Some((landing.clone(), range.clone()))), range.len()))
            .collect();
        if let Some((begin, part)) = own {
            // SAFETY: the parts cover the buffer exactly once (the caller has checked it), so this range is this rank's alone.
            unsafe { landing.fill(begin, part) }
        }
        for (asking, length) in askings {
            let peer = asking.peer;
            let (theirs, _) = asking.wait()?;
            if theirs != tag {
                let op = format!("a gather of {what} as {tag} ({length} bytes)");
                let at = OperationContext { group: "window", seq: key.version, rank: self.shared.rank(), op: &op };
                return Err(at.mismatch(peer, format!("a publication of {theirs}")));
            }
        }
        let landing = Arc::into_inner(landing).expect("the communication thread lets go before it replies");
        // SAFETY: every part has arrived, and together they cover the buffer.
        Ok(unsafe { landing.into_buffer() })
    }
}

/// A read that has been requested.
#[derive(Debug)]
pub(crate) struct Asking {
    shared: Arc<Shared>,
    entry: Arc<Entry>,
    result: Receiver<Result<Got, CommError>>,
    begin: Instant,
    peer: usize,
    version: u64,
    op: String,
}

impl Asking {
    /// Waits for the read; returns the owner's tag, and the bytes unless they went to `into`.
    pub(crate) fn wait(self) -> Result<(String, Option<Vec<u8>>), CommError> {
        let at = OperationContext { group: "window", seq: self.version, rank: self.shared.rank(), op: &self.op };
        let Got { tag, bytes } = self.shared.await_reply(at, &self.result, self.begin, (&self.entry, 0))?;
        let bytes = bytes.map(|landing| {
            let landing = Arc::into_inner(landing).expect("the communication thread lets go before it replies");
            // SAFETY: the read has succeeded, so all bytes have arrived.
            unsafe { landing.into_buffer() }.into_u8()
        });
        Ok((tag, bytes))
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        // Has no effect if the read was waited for.
        self.shared.state.recorder.close(&self.entry, Err("its caller no longer waits for it".to_string()));
    }
}
