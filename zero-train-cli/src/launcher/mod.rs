//! Starting ranks as processes, by an MPI launcher or without one, and starting them again.
//!
//! * In: how many ranks, on which hosts, and the program with its arguments ([`Job`]).
//! * Out: what is to be started here, `mpirun` ([`Job::command`]) or this machine's ranks themselves, which meet over sockets
//!   ([`Job::processes`]); and what it ends with ([`supervise`]).
//! * Processes: what is started is a child of this process and ends with it, in whatever way that ends.
//!
//! A rank that begins or fails tells so in a file of the folder that [`STATUS_DIR`] names, if it runs on this machine: so a
//! launcher that cannot reach the other machines, and would wait for them, is ended too.

mod hosts;
mod mpirun;
mod sockets;
mod supervise;
mod topology;

use std::ffi::OsString;
use std::path::PathBuf;

pub use hosts::{Host, parse_hosts, slots, spread};
pub use mpirun::{Flavor, Mpirun};
pub use sockets::{MAIN_PORT, Machines};
pub use supervise::{Attempt, Ended, Limits, Process, Word, supervise};
pub use topology::physical_cores;

pub use zero_train::launched::{Asked, FIRST_RANKS, LAUNCHED, RESTART_RANKS, RESTARTS, STATUS_DIR};

/// Ranks to be started.
#[derive(Debug, Clone)]
pub struct Job {
    /// Number of ranks.
    pub ranks: usize,
    /// Where, and how many of them on each; this machine if none are named.
    pub hosts: Vec<(String, usize)>,
    /// Cores of each machine, if known: ranks are bound to equal shares of them.
    pub cores: Option<usize>,
    /// Variables for the ranks.
    pub variables: Vec<(String, String)>,
    /// Options for the launcher, before the program.
    pub options: Vec<String>,
    /// The program and its arguments.
    pub program: Vec<OsString>,
}

/// Why nothing could be launched.
#[derive(Debug, thiserror::Error)]
pub enum LauncherError {
    /// No MPI launcher.
    #[error(
        "no MPI launcher was found (looked for {looked_for}): install Open MPI (Debian: apt-get install openmpi-bin) or \
         MPICH, or name it with --mpirun PATH; the ranks of this machine need none, with --sockets"
    )]
    NoMpirun {
        /// What was looked for.
        looked_for: String,
    },
    /// It is something else.
    #[error("{path} is no launcher of Open MPI or MPICH that is known: it calls itself '{says}'")]
    Unknown {
        /// The program.
        path: PathBuf,
        /// The first line of its version.
        says: String,
    },
    /// A line of a list of hosts.
    #[error("line {line} of the hosts: expected {expected}, got '{got}'")]
    Hosts {
        /// The line, from 1.
        line: usize,
        /// What was expected.
        expected: String,
        /// What is there.
        got: String,
    },
    /// Ranks that cannot be spread over machines without MPI.
    #[error("{what}: expected {expected}, got {got}")]
    Machines {
        /// Which setting.
        what: &'static str,
        /// What was expected.
        expected: String,
        /// What it is.
        got: String,
    },
    /// Too few slots.
    #[error(
        "{ranks} ranks do not fit: the hosts take {slots}; ask for fewer with --ranks, or raise slots= of the hosts"
    )]
    Slots {
        /// Asked for.
        ranks: usize,
        /// There are.
        slots: usize,
    },
    /// The operating system's.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What failed.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}
