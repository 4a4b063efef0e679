//! Starts ranks as processes, with or without an MPI launcher, and restarts them.
//!
//! * In: the number of ranks, their hosts, and the program with its arguments ([`Job`]).
//! * Out: the processes to start here, either `mpirun` ([`Job::command`]) or this machine's ranks, which connect over
//!   sockets ([`Job::processes`]); and the outcome ([`supervise`]).
//! * Processes: each started process is a child of this process and ends when it does, for any reason.
//!
//! A rank on this machine reports its start or failure in a file in the [`STATUS_DIR`] folder. So a launcher that waits
//! for unreachable machines can be ended too.

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
pub use supervise::{Attempt, Ended, FailureReport, Limits, Process, supervise};
pub use topology::physical_cores;

pub use zero_train::launched::{FIRST_RANKS, LAUNCHED, RESTART_RANKS, RESTARTS, SIGNALS, STATUS_DIR, StopSignals};

/// A group of ranks to start.
#[derive(Debug, Clone)]
pub struct Job {
    /// Number of ranks.
    pub ranks: usize,
    /// Hosts, with the number of ranks on each; empty for this machine.
    pub hosts: Vec<(String, usize)>,
    /// Cores per machine, if known; ranks are bound to equal shares of them.
    pub cores: Option<usize>,
    /// Environment variables of the ranks.
    pub variables: Vec<(String, String)>,
    /// Options for the launcher, before the program.
    pub options: Vec<String>,
    /// The program and its arguments.
    pub program: Vec<OsString>,
}

/// An error of a launch.
#[derive(Debug, thiserror::Error)]
pub enum LauncherError {
    /// No MPI launcher was found.
    #[error(
        "no MPI launcher was found (looked for {looked_for}): install Open MPI (Debian: apt-get install openmpi-bin) or \
         MPICH, or name it with --mpirun PATH; with --sockets, ranks on this machine need none"
    )]
    NoMpirun {
        /// Names that were searched for.
        looked_for: String,
    },
    /// The program is not a known MPI launcher.
    #[error(
        "{path} is not a known launcher of Open MPI or MPICH: its --version prints '{says}'; name one with --mpirun PATH"
    )]
    Unknown {
        /// The program.
        path: PathBuf,
        /// The first line of its version.
        says: String,
    },
    /// Invalid line in a list of hosts.
    #[error("line {line} of the hosts file: expected {expected}, got '{got}'")]
    Hosts {
        /// The line, from 1.
        line: usize,
        /// Expected form.
        expected: String,
        /// The text found.
        got: String,
    },
    /// Ranks that cannot be distributed over machines without MPI.
    #[error("{what}: expected {expected}, got {got}")]
    Machines {
        /// Name of the setting.
        what: &'static str,
        /// Expected value.
        expected: String,
        /// The value found.
        got: String,
    },
    /// Too few slots.
    #[error("{ranks} ranks do not fit: the hosts have {slots} slots; lower --ranks, or raise slots= of the hosts")]
    Slots {
        /// Ranks requested.
        ranks: usize,
        /// Slots available.
        slots: usize,
    },
    /// An error of the operating system.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The failed action.
        action: &'static str,
        /// The path involved.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}
