//! Errors of the rendezvous.

use super::super::super::launcher::EnvironmentError;

/// Connections that were refused for one reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedConnections {
    /// Address of the first of them.
    pub from: String,
    /// The reason.
    pub reason: String,
    /// Number of connections.
    pub count: usize,
}

impl core::fmt::Display for RefusedConnections {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let more = if self.count > 1 { format!(" and {} more", self.count - 1) } else { String::new() };
        write!(f, "{}{more} ({})", self.from, self.reason)
    }
}

/// Error of ranks that did not find each other.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// The environment does not give the address.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// Anyone who can reach rank 0 could join the job.
    #[error(
        "rank {rank} has no ZERO_SECRET, and rank 0's address, {host}, can be reached from other machines: anyone who \
         reaches it while the ranks connect could join the job, and read and change its parameters. Set ZERO_SECRET \
         to the same secret of at least 16 characters for all ranks (`zero launch` does this itself), or, on a \
         network without other users, use --trusted-network or ZERO_TRUSTED_NETWORK=1"
    )]
    Untrusted {
        /// This rank.
        rank: usize,
        /// Rank 0's address.
        host: String,
    },
    /// Rank 0 cannot listen.
    #[error(
        "rank 0 cannot listen at {host}:{port}: {source}; set MASTER_ADDR to rank 0's machine and MASTER_PORT to a port \
         that nothing else uses there"
    )]
    Listen {
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// The system's error.
        source: std::io::Error,
    },
    /// Ranks did not connect within the deadline.
    #[error(
        "rank 0 waited {waited_ms} ms at {host}:{port} for rank(s) {missing:?}, which did not connect{}: check that \
         these ranks were started with this MASTER_ADDR and MASTER_PORT", refused_list(.refused)
    )]
    Missing {
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// Milliseconds waited.
        waited_ms: u64,
        /// The ranks.
        missing: Vec<usize>,
        /// Connections that were refused meanwhile.
        refused: Vec<RefusedConnections>,
    },
    /// Rank 0 could not be reached within the deadline.
    #[error(
        "rank {rank} could not reach rank 0 at {host}:{port} within {waited_ms} ms ({last}): check that rank 0 was \
         started, that MASTER_ADDR is its machine, and that no firewall blocks MASTER_PORT"
    )]
    Unreachable {
        /// This rank.
        rank: usize,
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// Milliseconds waited.
        waited_ms: u64,
        /// Error of the last attempt.
        last: String,
    },
    /// Rank 0, or another program at its address, refused this process.
    #[error("rank {rank} was refused at {host}:{port}: {reason}")]
    RefusedConnections {
        /// This rank.
        rank: usize,
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// The reason that it gave.
        reason: String,
    },
    /// Rank 0 ended, or gave up, after it had admitted this rank.
    #[error("rank {rank} lost contact with rank 0 at {host}:{port} during startup ({reason}): {what}")]
    Lost {
        /// This rank.
        rank: usize,
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// Error of the connection.
        reason: String,
        /// Probable cause.
        what: &'static str,
    },
    /// Two ranks of a machine have the same local rank.
    #[error(
        "ranks {first} and {second} are both on {host} and both have LOCAL_RANK {local_rank}: number the processes of \
         each machine from 0, as torchrun does, or unset it"
    )]
    LocalRank {
        /// The lower of the two ranks.
        first: usize,
        /// The other.
        second: usize,
        /// Their machine.
        host: String,
        /// The local rank of both.
        local_rank: usize,
    },
    /// All ranks had found rank 0, but not all could connect with one another.
    #[error(
        "rank {rank}: not all ranks could connect to each other: {reason}; every rank must be able to reach every \
         other rank on any port"
    )]
    Mesh {
        /// This rank.
        rank: usize,
        /// The ranks that could not, and the reasons.
        reason: String,
    },
    /// The operating system could not create a thread or socket.
    #[error("rank {rank} could not create a thread or socket for its connections: {source}")]
    System {
        /// This rank.
        rank: usize,
        /// The system's error.
        source: std::io::Error,
    },
}

impl RendezvousError {
    /// Returns `true` if another try may help: ranks were late or lost, and no settings have to be changed.
    pub fn is_transient(&self) -> bool {
        use RendezvousError::{Lost, Mesh, Missing, System, Unreachable};
        matches!(self, Missing { .. } | Unreachable { .. } | Lost { .. } | Mesh { .. } | System { .. })
    }
}

fn refused_list(refused: &[RefusedConnections]) -> String {
    if refused.is_empty() {
        return String::new();
    }
    let list: Vec<String> = refused.iter().map(ToString::to_string).collect();
    format!("; refused connections: {}", list.join(", "))
}
