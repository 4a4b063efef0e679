//! The `tcp` engine: a control group of processes over TCP, for small messages between their hosts.
//!
//! Rank 0 is the *hub*: it listens where the environment says ([`super::launcher::Rendezvous`]), the others connect to it and
//! stay connected. A collective is a message to the hub, which answers when all have come: it compares what they called,
//! adds in rank order (so the bits are those of the `threads` engine), and sends each rank its result.
//!
//! It is what an engine of collectives on devices stands on (`nccl`, a feature): identities are exchanged over it, settings
//! compared ([`super::agree`]), scalars reduced, trouble told. A buffer of more than [`MAX_BYTES`] is refused: bulk goes
//! through the hub's one network card, `N` times.
//!
//! * In: buffers by value, as for every engine. Out: buffers by value.
//! * Trouble: a rank that dies closes its connection, which the hub sees at once and tells everybody; a machine that is
//!   cut off is noticed by TCP's own keep-alive within half a minute; a rank that does not come is found by the hub at the
//!   deadline. All others' present and future operations then fail, each naming that rank.
//! * Threads: `rank-0-tcp-from-N` reads from rank N, `rank-N-tcp` from the hub, `rank-0-tcp-watch` looks at deadlines.
//!   They are joined when the last communicator of the run is dropped.
//!
//! What is not meant: encryption and authentication. Like the stores of other frameworks, it belongs on the network of
//! a cluster. Connections that do not begin with the right words are turned away and do not disturb the job.

mod comm;
mod hub;
mod join;
mod shared;
mod wire;

use std::path::PathBuf;
use std::time::Duration;

pub use comm::{TcpComm, connect};
pub use join::{Refused, RendezvousError};

use super::threads::ThreadOptions;

/// The largest buffer that a rank may bring to a collective.
pub const MAX_BYTES: usize = 16 << 20;

/// How a control group is run.
#[derive(Debug, Clone)]
pub struct TcpOptions {
    /// The longest that any wait for another rank may take, that for all to connect included.
    pub deadline: Duration,
    /// Where every rank writes its flight record (`flight-rank-<r>.json`) when a deadline passes or a rank fails.
    pub flight_dir: Option<PathBuf>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self { deadline: ThreadOptions::default().deadline, flight_dir: None }
    }
}
