//! Environment variables of the launcher that started this process, and a rank's place among the machines.
//!
//! An MPI launcher's variables are read without MPI: a program built without the `mpi` feature must be able to refuse to train
//! N independent copies.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A rank among those that a launcher has started, as read from its environment variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// This process's rank.
    pub rank: usize,
    /// Number of processes; at least 2.
    pub world: usize,
    /// Rank among the processes of the same machine, if the launcher sets it.
    pub local_rank: Option<usize>,
    /// Number of processes of the same machine, if the launcher sets it.
    pub local_world: Option<usize>,
    /// Name of the variable that holds the number of processes.
    pub variable: &'static str,
}

/// A launcher's variables: rank, size, local rank, local size; and one that must be set for them to have this meaning.
type Dialect = (&'static str, &'static str, &'static str, Option<&'static str>, Option<&'static str>);

/// Variables of the known launchers, in order of precedence: `srun mpirun` sets the later ones too.
const DIALECTS: [Dialect; 4] = [
    // Open MPI.
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        None,
    ),
    // MPICH and Intel MPI (Hydra).
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", Some("MPI_LOCALNRANKS"), None),
    // Slurm's own launcher with PMIx (`srun --mpi=pmix`).
    ("PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID", None, Some("PMIX_NAMESPACE")),
    // Slurm's own launcher otherwise. A batch script has SLURM_NTASKS too, but is no step of several tasks.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, None),
];

fn of_process(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Returns `true` if a launcher started this process as the only one: the program then has one rank, not its default number.
pub fn launched_alone() -> bool {
    alone_by(of_process)
}

/// Returns this process's rank if a launcher started it as one of several; `None` otherwise, and also if the environment is
/// invalid ([`Start::from_environment`] reports the error).
pub fn started() -> Option<World> {
    Start::from_environment().ok()?.world()
}

/// The role of this process among those that were started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// The only rank.
    Alone,
    /// A rank started by an MPI launcher.
    Mpi(World),
    /// One of several ranks of a job with torchrun's environment.
    Job(Rendezvous),
}

impl Start {
    /// Reads the environment. torchrun's variables come first if all of them are set: a launcher that starts torchrun on several
    /// machines (srun, mpirun) leaves its own variables to the ranks. An MPI launcher's come next, then an incomplete set of
    /// torchrun's ([`rendezvous`]).
    ///
    /// # Errors
    ///
    /// [`EnvironmentError`], as for [`rendezvous`].
    pub fn from_environment() -> Result<Self, EnvironmentError> {
        Self::by(of_process)
    }

    fn by(variable: impl Fn(&str) -> Option<String>) -> Result<Self, EnvironmentError> {
        let is_complete =
            ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"].iter().all(|name| variable(name).is_some());
        match launched_by(&variable) {
            Some(world) if !is_complete => Ok(Start::Mpi(world)),
            _ => Ok(rendezvous_by(&variable)?.filter(|job| job.world > 1).map_or(Start::Alone, Start::Job)),
        }
    }

    /// Returns this process's rank among the others, if there are any.
    pub fn world(&self) -> Option<World> {
        match self {
            Start::Alone => None,
            Start::Mpi(world) => Some(world.clone()),
            Start::Job(job) => {
                let Rendezvous { rank, world, local_rank, local_world, .. } = *job;
                Some(World { rank, world, local_rank, local_world, variable: "WORLD_SIZE" })
            }
        }
    }
}

fn number(variable: impl Fn(&str) -> Option<String>, name: &str) -> Option<usize> {
    variable(name)?.trim().parse().ok()
}

/// Returns the ranks that the launchers' variables describe, in order of precedence.
fn dialects(variable: impl Fn(&str) -> Option<String>) -> impl Iterator<Item = World> {
    DIALECTS.iter().filter_map(move |&(rank, size, local_rank, local_size, needs)| {
        if needs.is_some_and(|name| variable(name).is_none()) {
            return None;
        }
        Some(World {
            rank: number(&variable, rank)?,
            world: number(&variable, size)?,
            local_rank: number(&variable, local_rank),
            local_world: local_size.and_then(|name| number(&variable, name)),
            variable: size,
        })
    })
}

fn alone_by(variable: impl Fn(&str) -> Option<String>) -> bool {
    match dialects(&variable).next() {
        Some(found) => found.world == 1,
        None => number(&variable, "RANK") == Some(0) && number(&variable, "WORLD_SIZE") == Some(1),
    }
}

/// Returns this process's rank if an MPI launcher (mpirun, mpiexec, srun) started it as one of several.
fn launched_by(variable: impl Fn(&str) -> Option<String>) -> Option<World> {
    dialects(variable).find(|found| found.world > 1 && found.rank < found.world)
}

/// Environment variable with the job's shared [`Secret`].
pub const SECRET: &str = "ZERO_SECRET";

/// Environment variable that declares the ranks' network free of other users.
pub const TRUSTED_NETWORK: &str = "ZERO_TRUSTED_NETWORK";

/// The secret that the ranks of a job share. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl core::fmt::Debug for Secret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// Minimum length in characters: an eavesdropper on connecting ranks can try guesses.
    pub const SHORTEST: usize = 16;

    /// Creates a secret from `text`; `None` if it is too short.
    pub fn new(text: &str) -> Option<Self> {
        (text.trim().chars().count() >= Self::SHORTEST).then(|| Self(text.trim().into()))
    }

    /// Creates a random secret that nobody can guess.
    ///
    /// # Errors
    ///
    /// The system's error if it has no random numbers.
    pub fn random() -> std::io::Result<Self> {
        Ok(Self(random()?.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()))
    }

    /// Returns its characters; use them only to set the environment of ranks.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// Returns cryptographically secure random bytes.
pub(crate) fn random() -> std::io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    // SAFETY: writes `bytes.len()` bytes to a local; up to 256 are allowed.
    match unsafe { libc::getentropy(bytes.as_mut_ptr().cast(), bytes.len()) } {
        0 => Ok(bytes),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// A rank of a job whose environment torchrun or a Kubernetes training operator has set, and the address of rank 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rendezvous {
    /// This process's rank (`RANK`).
    pub rank: usize,
    /// Number of processes (`WORLD_SIZE`).
    pub world: usize,
    /// Rank among the processes of the same machine (`LOCAL_RANK`), if set.
    pub local_rank: Option<usize>,
    /// Number of processes of the same machine (`LOCAL_WORLD_SIZE`), if set.
    pub local_world: Option<usize>,
    /// Name or address of rank 0's machine (`MASTER_ADDR`); empty for a job of one process that has none.
    pub host: String,
    /// The port that rank 0 listens on: `MASTER_PORT`, or the next one if torchrun's agent listens on that itself
    /// (`TORCHELASTIC_USE_AGENT_STORE`).
    pub port: u16,
    /// Identifier of the job: the ids given by torchrun (`TORCHELASTIC_RUN_ID`) and Slurm (`SLURM_JOB_ID`, and `SLURM_STEP_ID` if
    /// one step has all the ranks), or else its port.
    pub id: String,
    /// The secret that only its ranks know (`ZERO_SECRET`).
    pub secret: Option<Secret>,
    /// `true` if the user declares that nobody else is on the network (`ZERO_TRUSTED_NETWORK=1`).
    pub trusted_network: bool,
}

impl Rendezvous {
    /// Returns `true` if all ranks connect over the loopback interface of one machine, which no other machine can reach.
    pub fn is_local(&self) -> bool {
        self.host == "localhost" || self.host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

/// An invalid environment variable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: expected {expected}, got {got}; {advice}")]
pub struct EnvironmentError {
    /// The variable.
    pub variable: &'static str,
    /// The expected value.
    pub expected: String,
    /// The actual value.
    pub got: String,
    /// Advice on how to correct it.
    pub advice: &'static str,
}

const START: &str = "start the ranks with torchrun, or set it as torchrun does";

/// Reads the job from `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`; `None` if
/// neither of the first two is set.
///
/// # Errors
///
/// [`EnvironmentError`] if they are incomplete, not numbers, or contradictory.
pub fn rendezvous() -> Result<Option<Rendezvous>, EnvironmentError> {
    rendezvous_by(of_process)
}

fn rendezvous_by(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Rendezvous>, EnvironmentError> {
    if variable("RANK").is_none() && variable("WORLD_SIZE").is_none() {
        return Ok(None);
    }
    let wrong = |name: &'static str, expected: &str, advice: &'static str| EnvironmentError {
        variable: name,
        expected: expected.to_string(),
        got: variable(name).map_or("nothing".to_string(), |value| format!("'{value}'")),
        advice,
    };
    let needed = |name: &'static str| number(&variable, name).ok_or_else(|| wrong(name, "a number", START));
    let optional = |name: &'static str| variable(name).map(|_| needed(name)).transpose();
    let (rank, world) = (needed("RANK")?, needed("WORLD_SIZE")?);
    if world == 0 {
        return Err(wrong("WORLD_SIZE", "at least 1", START));
    }
    let below = |name: &'static str, number: usize, limit: usize, of: &str| {
        if number < limit {
            return Ok(());
        }
        let expected = format!("a number below {of} ({limit})");
        Err(wrong(name, &expected, "ranks are numbered from 0; give each process a different number"))
    };
    below("RANK", rank, world, "WORLD_SIZE")?;
    let (local_rank, local_world) = (optional("LOCAL_RANK")?, optional("LOCAL_WORLD_SIZE")?);
    if let (Some(local), Some(of)) = (local_rank, local_world) {
        below("LOCAL_RANK", local, of, "LOCAL_WORLD_SIZE")?;
    }
    if world == 1 && variable("MASTER_ADDR").is_none() {
        return Ok(Some(Rendezvous { rank, world, local_rank, local_world, ..Rendezvous::default() }));
    }
    let host = variable("MASTER_ADDR").filter(|host| !host.trim().is_empty());
    let host = host.ok_or_else(|| wrong("MASTER_ADDR", "the name or address of rank 0's machine", START))?;
    let port = variable("MASTER_PORT").and_then(|port| port.trim().parse::<u16>().ok()).filter(|&port| port > 0);
    let expected = "a port from 1 to 65535 that is free on rank 0's machine";
    let port = port.ok_or_else(|| wrong("MASTER_PORT", expected, START))?;
    let agent = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let port = if agent { port.checked_add(1).unwrap_or(port - 1) } else { port };
    let secret = match variable(SECRET) {
        None => None,
        Some(text) => Some(Secret::new(&text).ok_or_else(|| EnvironmentError {
            variable: SECRET,
            expected: format!("at least {} characters", Secret::SHORTEST),
            // It is not shown.
            got: format!("{}", text.trim().chars().count()),
            advice: "generate one with `openssl rand -hex 32` and set it for all ranks, or unset the variable",
        })?),
    };
    let trusted_network = match variable(TRUSTED_NETWORK).as_deref().map(str::trim) {
        None | Some("" | "0") => false,
        Some("1") => true,
        Some(_) => return Err(wrong(TRUSTED_NETWORK, "1 or 0", "set it only on a network without other users")),
    };
    let (host, id) = (host.trim().to_string(), id_by(&variable, world, port));
    Ok(Some(Rendezvous { rank, world, local_rank, local_world, host, port, id, secret, trusted_network }))
}

/// Returns the job's id, the same for all its ranks.
fn id_by(variable: impl Fn(&str) -> Option<String>, world: usize, port: u16) -> String {
    let mut parts = Vec::new();
    // "none" is torchrun's default.
    parts.extend(variable("TORCHELASTIC_RUN_ID").filter(|id| id != "none").map(|id| format!("torchrun {id}")));
    if let Some(job) = variable("SLURM_JOB_ID") {
        // Ranks that were started by one step per machine still belong to one job.
        let is_step = variable("SLURM_STEP_NUM_TASKS").is_some_and(|tasks| tasks.trim() == world.to_string());
        let step = variable("SLURM_STEP_ID").filter(|_| is_step).map_or(String::new(), |step| format!(".{step}"));
        parts.push(format!("Slurm {job}{step}"));
    }
    if parts.is_empty() {
        parts.push(format!("port {port}"));
    }
    parts.join(", ")
}

/// A rank's place: its machine, and its index among the ranks of that machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Index among the ranks of its machine: the launcher's, or else in the order of ranks.
    pub local_rank: usize,
    /// Number of ranks on its machine.
    pub local_world: usize,
    /// Index of its machine, from 0; machines are ordered by their lowest ranks.
    pub node: usize,
    /// Number of machines.
    pub nodes: usize,
    /// Index of every rank's machine.
    pub node_of: Vec<usize>,
}

impl Topology {
    /// Returns how many of `bytes` came from other machines, if all `ranks` except this one sent equally many.
    pub fn from_other_machines(&self, bytes: usize, ranks: &[usize]) -> usize {
        let (mut others, mut elsewhere) = (0u128, 0u128);
        for &rank in ranks.iter().filter(|&&rank| rank != self.rank) {
            others += 1;
            elsewhere += u128::from(self.node_of[rank] != self.node);
        }
        (bytes as u128 * elsewhere).checked_div(others).unwrap_or(0) as usize
    }

    /// Computes the place of `rank` from each rank's *leader*, the lowest rank of its machine.
    pub(crate) fn from_leaders(rank: usize, leaders: &[usize]) -> Self {
        let nodes: BTreeSet<usize> = leaders.iter().copied().collect();
        let node_of: Vec<usize> = leaders.iter().map(|&leader| nodes.range(..leader).count()).collect();
        let node = node_of[rank];
        let on_node = |ranks: &[usize]| ranks.iter().filter(|&&of| of == node).count();
        Self {
            rank,
            world: leaders.len(),
            local_rank: on_node(&node_of[..rank]),
            local_world: on_node(&node_of),
            node,
            nodes: nodes.len(),
            node_of,
        }
    }

    /// Returns the ranks of this rank's machine.
    pub fn of_node(&self) -> Vec<usize> {
        (0..self.world).filter(|&rank| self.node_of[rank] == self.node).collect()
    }

    /// Returns the ranks with the same index on their machine as this one: one per machine that has enough ranks.
    pub fn across_nodes(&self) -> Vec<usize> {
        let index = |rank: usize| self.node_of[..rank].iter().filter(|&&of| of == self.node_of[rank]).count();
        (0..self.world).filter(|&rank| index(rank) == index(self.rank)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> Option<World> {
        launched_by(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn launchers_are_known_by_their_variables() {
        assert_eq!(with(&[]), None);
        let open = with(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ])
        .unwrap();
        assert_eq!((open.rank, open.world, open.local_rank, open.local_world), (1, 4, Some(1), Some(2)));
        let hydra = with(&[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "0")]).unwrap();
        assert_eq!((hydra.rank, hydra.world, hydra.local_rank), (0, 2, Some(0)));
        let slurm = with(&[("SLURM_PROCID", "2"), ("SLURM_STEP_NUM_TASKS", "3"), ("SLURM_LOCALID", "0")]).unwrap();
        assert_eq!((slurm.rank, slurm.world, slurm.variable), (2, 3, "SLURM_STEP_NUM_TASKS"));
        let pmix = with(&[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "x"), ("SLURM_NTASKS", "2")]).unwrap();
        assert_eq!((pmix.rank, pmix.world), (1, 2));
    }

    #[test]
    fn torchrun_under_another_launcher_is_torchrun() {
        let start = |variables: &[(&str, &str)]| {
            let value = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
            Start::by(value).unwrap()
        };
        let slurm = [("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_LOCALID", "0")];
        let torch = [("RANK", "9"), ("WORLD_SIZE", "16"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "29500")];
        assert!(matches!(start(&slurm), Start::Mpi(World { rank: 1, world: 2, .. })));
        let both = start(&[&slurm[..], &torch[..]].concat());
        assert!(matches!(both, Start::Job(Rendezvous { rank: 9, world: 16, .. })));
        // What a batch script exports for all ranks is not a rank.
        assert!(matches!(start(&[&slurm[..], &torch[1..]].concat()), Start::Mpi(_)));
        assert_eq!(start(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Start::Alone);
    }

    #[test]
    fn a_lone_process_of_a_launcher_is_told_from_one_without() {
        let with = |variables: &[(&str, &str)]| {
            alone_by(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
        };
        assert!(with(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")]));
        assert!(with(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]));
        assert!(with(&[("RANK", "0"), ("WORLD_SIZE", "1")]) && !with(&[("RANK", "0"), ("WORLD_SIZE", "2")]));
        assert!(!with(&[]) && !with(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")]));
        assert!(!with(&[("SLURM_NTASKS", "1"), ("SLURM_PROCID", "0")]), "a batch script");
    }

    #[test]
    fn one_process_or_nonsense_is_no_launch() {
        assert_eq!(with(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")]), None);
        assert_eq!(with(&[("PMI_RANK", "x"), ("PMI_SIZE", "2")]), None);
        assert_eq!(with(&[("PMI_RANK", "2"), ("PMI_SIZE", "2")]), None);
        assert_eq!(with(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")]), None, "a batch script");
    }

    fn torch(variables: &[(&str, &str)]) -> Result<Option<Rendezvous>, String> {
        let value = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
        rendezvous_by(value).map_err(|error| error.to_string())
    }

    #[test]
    fn the_environment_of_torchrun_is_understood() {
        assert_eq!(torch(&[("MASTER_ADDR", "a")]), Ok(None));
        let (rank, world, host, port) =
            (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "node-0"), ("MASTER_PORT", "29500"));
        let local = [("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];
        let job = torch(&[rank, world, host, port, local[0], local[1]]).unwrap().unwrap();
        assert_eq!((job.rank, job.world, job.local_rank, job.local_world), (1, 2, Some(1), Some(2)));
        assert_eq!((job.host.as_str(), job.port), ("node-0", 29500));
        let agent = torch(&[rank, world, host, port, ("TORCHELASTIC_USE_AGENT_STORE", "True")]).unwrap().unwrap();
        assert_eq!((agent.port, agent.local_rank), (29501, None), "the agent listens on the first");
        let alone = torch(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap().unwrap();
        assert_eq!((alone.rank, alone.world), (0, 1));
    }

    #[test]
    fn jobs_have_ids_and_secrets() {
        let job = |more: &[(&str, &str)]| {
            let all = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
            torch(&[&all[..], more].concat()).map(Option::unwrap)
        };
        let plain = job(&[]).unwrap();
        assert_eq!((plain.id.as_str(), plain.secret, plain.trusted_network), ("port 29500", None, false));
        assert_eq!(job(&[("TORCHELASTIC_RUN_ID", "none")]).unwrap().id, "port 29500");
        assert_eq!(job(&[("TORCHELASTIC_RUN_ID", "a"), ("SLURM_JOB_ID", "7")]).unwrap().id, "torchrun a, Slurm 7");
        let step = [("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "3"), ("SLURM_STEP_NUM_TASKS", "2")];
        assert_eq!(job(&step).unwrap().id, "Slurm 7.3");
        assert_eq!(job(&[step[0], step[1], ("SLURM_STEP_NUM_TASKS", "1")]).unwrap().id, "Slurm 7");
        let secret = job(&[("ZERO_SECRET", " 0123456789abcdef\n"), ("ZERO_TRUSTED_NETWORK", "1")]).unwrap();
        assert_eq!((secret.secret.clone(), secret.trusted_network), (Secret::new("0123456789abcdef"), true));
        assert!(!format!("{secret:?}").contains("0123"), "{secret:?}");
        let error = job(&[("ZERO_SECRET", "hunter2")]).unwrap_err();
        assert!(error.starts_with("ZERO_SECRET: expected at least 16 characters, got 7") && !error.contains("hunter"));
        let error = job(&[("ZERO_TRUSTED_NETWORK", "yes")]).unwrap_err();
        assert!(error.starts_with("ZERO_TRUSTED_NETWORK: expected 1 or 0, got 'yes'"), "{error}");
        assert!(plain_host("localhost") && plain_host("127.0.1.1") && plain_host("::1"));
        assert!(!plain_host("node-0") && !plain_host("10.0.0.1"));
    }

    fn plain_host(host: &str) -> bool {
        Rendezvous { host: host.into(), ..Rendezvous::default() }.is_local()
    }

    #[test]
    fn a_bad_environment_is_told_with_what_to_change() {
        let (host, port) = (("MASTER_ADDR", "a"), ("MASTER_PORT", "1"));
        let says = |variables: &[(&str, &str)], words: &str| {
            let error = torch(variables).unwrap_err();
            assert!(error.starts_with(words), "{error}");
        };
        says(&[("RANK", "0")], "WORLD_SIZE: expected a number, got nothing; start the ranks with torchrun");
        says(&[("WORLD_SIZE", "2")], "RANK: expected a number, got nothing");
        says(&[("RANK", "one"), ("WORLD_SIZE", "2")], "RANK: expected a number, got 'one'");
        says(&[("RANK", "-1"), ("WORLD_SIZE", "2")], "RANK: expected a number, got '-1'");
        says(&[("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE: expected at least 1, got '0'");
        says(
            &[("RANK", "2"), ("WORLD_SIZE", "2"), host, port],
            "RANK: expected a number below WORLD_SIZE (2), got '2'; ranks are numbered from 0",
        );
        says(
            &[("RANK", "1"), ("WORLD_SIZE", "2"), port],
            "MASTER_ADDR: expected the name or address of rank 0's machine",
        );
        says(&[("RANK", "1"), ("WORLD_SIZE", "2"), host], "MASTER_PORT: expected a port from 1 to 65535");
        let far = ("MASTER_PORT", "70000");
        says(&[("RANK", "1"), ("WORLD_SIZE", "2"), host, far], "MASTER_PORT: expected a port from 1 to 65535");
        let local = [("LOCAL_RANK", "4"), ("LOCAL_WORLD_SIZE", "4")];
        says(
            &[("RANK", "1"), ("WORLD_SIZE", "8"), host, port, local[0], local[1]],
            "LOCAL_RANK: expected a number below LOCAL_WORLD_SIZE (4)",
        );
    }

    #[test]
    fn places_follow_from_leaders() {
        // Machines of 2, 1 and 2 ranks, the first and last of them interleaved.
        let place = Topology::from_leaders(3, &[0, 1, 0, 1, 4]);
        assert_eq!((place.node, place.nodes, place.local_rank, place.local_world), (1, 3, 1, 2));
        assert_eq!(place.node_of, [0, 1, 0, 1, 2]);
        assert_eq!((place.of_node(), place.across_nodes()), (vec![1, 3], vec![2, 3]));
        assert_eq!(Topology::from_leaders(0, &[0, 1, 0, 1, 4]).across_nodes(), [0, 1, 4]);
        // Of four others three are elsewhere; of one root all or nothing, and of none nothing.
        assert_eq!(place.from_other_machines(400, &[0, 1, 2, 3, 4]), 300);
        assert_eq!([&[0][..], &[1], &[3], &[]].map(|from| place.from_other_machines(7, from)), [7, 0, 0, 0]);
    }
}
