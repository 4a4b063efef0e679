//! What the environment says of the launcher that started this process, and a rank's place among the machines.
//!
//! An MPI launcher's variables are read without MPI: a program that was built without the `mpi` feature must be able to refuse
//! to train N copies.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A rank among the ranks that a launcher has started, as its environment variables say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// This process's rank.
    pub rank: usize,
    /// Number of processes; at least 2.
    pub world: usize,
    /// Rank among the processes of the same machine, where the launcher says so.
    pub local_rank: Option<usize>,
    /// Number of processes of the same machine, where the launcher says so.
    pub local_world: Option<usize>,
    /// The variable that told the number of processes.
    pub variable: &'static str,
}

/// A launcher's variables: rank, size, local rank, local size; and one without which they mean something else.
type Dialect = (&'static str, &'static str, &'static str, Option<&'static str>, Option<&'static str>);

/// In the order in which they are believed: `srun mpirun` sets the later ones too.
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

/// Whether a launcher has started this process as the only one: a program then has one rank, not its default number.
pub fn launched_alone() -> bool {
    alone_by(of_process)
}

/// This process's place among those that a launcher has started, if it is one of several; none too where the environment is
/// wrong, which [`Start::from_environment`] tells.
pub fn started() -> Option<World> {
    Start::from_environment().ok()?.world()
}

/// What this process is among others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// It stands alone.
    Alone,
    /// A rank that an MPI launcher has started.
    Mpi(World),
    /// A rank of a job of several whose environment is torchrun's.
    Job(Rendezvous),
}

impl Start {
    /// What the environment says. torchrun's variables, where all of them are there, are believed first: what starts torchrun on
    /// several machines (srun, mpirun) leaves its own to the ranks. An MPI launcher's are next, then what there is of torchrun's
    /// ([`rendezvous`]).
    ///
    /// # Errors
    ///
    /// [`EnvironmentError`], as [`rendezvous`]'s.
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

    /// Its place among the others, if there are any.
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

/// What the launchers that are there say, as they are believed.
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

/// This process as one of several that an MPI launcher (mpirun, mpiexec, srun) has started.
fn launched_by(variable: impl Fn(&str) -> Option<String>) -> Option<World> {
    dialects(variable).find(|found| found.world > 1 && found.rank < found.world)
}

/// The variable with what the ranks of a job know and nobody else ([`Secret`]).
pub const SECRET: &str = "ZERO_SECRET";

/// The variable that says that nobody else is on the ranks' network.
pub const TRUSTED_NETWORK: &str = "ZERO_TRUSTED_NETWORK";

/// What the ranks of a job know and nobody else. It is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl core::fmt::Debug for Secret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// Fewest characters of a secret: who listens in on ranks that connect can try guesses.
    pub const SHORTEST: usize = 16;

    /// A secret of these characters, if they are enough.
    pub fn new(text: &str) -> Option<Self> {
        (text.trim().chars().count() >= Self::SHORTEST).then(|| Self(text.trim().into()))
    }

    /// A new one, that nobody can guess.
    ///
    /// # Errors
    ///
    /// The system's, when it has no random numbers.
    pub fn random() -> std::io::Result<Self> {
        Ok(Self(random()?.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()))
    }

    /// Its characters, for the environment of ranks and nothing else.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// Bytes that nobody can guess.
pub(crate) fn random() -> std::io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    // SAFETY: writes so many bytes to a local; 256 are allowed.
    match unsafe { libc::getentropy(bytes.as_mut_ptr().cast(), bytes.len()) } {
        0 => Ok(bytes),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// A rank of a job whose environment was set by torchrun or by a training operator of Kubernetes, and where rank 0 is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rendezvous {
    /// This process's rank (`RANK`).
    pub rank: usize,
    /// Number of processes (`WORLD_SIZE`).
    pub world: usize,
    /// Rank among the processes of the same machine (`LOCAL_RANK`), where the environment says so.
    pub local_rank: Option<usize>,
    /// Number of processes of the same machine (`LOCAL_WORLD_SIZE`), where the environment says so.
    pub local_world: Option<usize>,
    /// Name or address of rank 0's machine (`MASTER_ADDR`); empty for a job of one process that has none.
    pub host: String,
    /// The port that rank 0 listens on: `MASTER_PORT`, or the next one where torchrun's agent says that it listens on that
    /// itself (`TORCHELASTIC_USE_AGENT_STORE`).
    pub port: u16,
    /// What tells this job from others: the ids that torchrun (`TORCHELASTIC_RUN_ID`) and Slurm (`SLURM_JOB_ID`, and
    /// `SLURM_STEP_ID` where all ranks are of one step) have given it; its port otherwise.
    pub id: String,
    /// What only its ranks know (`ZERO_SECRET`).
    pub secret: Option<Secret>,
    /// Whether the network is said to have nobody else on it (`ZERO_TRUSTED_NETWORK=1`).
    pub trusted_network: bool,
}

impl Rendezvous {
    /// Whether all ranks are on one machine, and meet where no other reaches them.
    pub fn is_local(&self) -> bool {
        self.host == "localhost" || self.host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

/// A variable of the environment that does not say what it should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: expected {expected}, got {got}; {advice}")]
pub struct EnvironmentError {
    /// The variable.
    pub variable: &'static str,
    /// What it should be.
    pub expected: String,
    /// What it is.
    pub got: String,
    /// What to change.
    pub advice: &'static str,
}

const START: &str = "start the ranks with torchrun, or set it as torchrun does";

/// The job that `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` tell of; none when
/// neither of the first two is set.
///
/// # Errors
///
/// [`EnvironmentError`] when they are incomplete, no numbers, or contradict each other.
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
        Err(wrong(name, &expected, "ranks count from 0; give each process its own"))
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
            advice: "make one with `openssl rand -hex 32`, the same for all ranks, or leave it out",
        })?),
    };
    let trusted_network = match variable(TRUSTED_NETWORK).as_deref().map(str::trim) {
        None | Some("" | "0") => false,
        Some("1") => true,
        Some(_) => return Err(wrong(TRUSTED_NETWORK, "1 or 0", "set it only where nobody else reaches the ranks")),
    };
    let (host, id) = (host.trim().to_string(), id_by(&variable, world, port));
    Ok(Some(Rendezvous { rank, world, local_rank, local_world, host, port, id, secret, trusted_network }))
}

/// The job's id, alike for all its ranks.
fn id_by(variable: impl Fn(&str) -> Option<String>, world: usize, port: u16) -> String {
    let mut parts = Vec::new();
    // "none" is torchrun's default.
    parts.extend(variable("TORCHELASTIC_RUN_ID").filter(|id| id != "none").map(|id| format!("torchrun {id}")));
    if let Some(job) = variable("SLURM_JOB_ID") {
        // Ranks that were started by a step for each machine are of one job all the same.
        let is_step = variable("SLURM_STEP_NUM_TASKS").is_some_and(|tasks| tasks.trim() == world.to_string());
        let step = variable("SLURM_STEP_ID").filter(|_| is_step).map_or(String::new(), |step| format!(".{step}"));
        parts.push(format!("Slurm {job}{step}"));
    }
    if parts.is_empty() {
        parts.push(format!("port {port}"));
    }
    parts.join(", ")
}

/// Where a rank is: which machine, and which of its ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// This rank among those of its machine, as its launcher counts them, or else in the order of ranks.
    pub local_rank: usize,
    /// Ranks of its machine.
    pub local_world: usize,
    /// Its machine, from 0, in the order of their lowest ranks.
    pub node: usize,
    /// Number of machines.
    pub nodes: usize,
    /// Every rank's machine.
    pub node_of: Vec<usize>,
}

impl Place {
    /// What of `bytes`, of which as many came from each of `ranks` but this one, came from other machines.
    pub fn from_other_machines(&self, bytes: usize, ranks: &[usize]) -> usize {
        let (mut others, mut elsewhere) = (0u128, 0u128);
        for &rank in ranks.iter().filter(|&&rank| rank != self.rank) {
            others += 1;
            elsewhere += u128::from(self.node_of[rank] != self.node);
        }
        (bytes as u128 * elsewhere).checked_div(others).unwrap_or(0) as usize
    }

    /// From each rank's *leader*, the lowest rank of its machine.
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

    /// The ranks of this rank's machine.
    pub fn of_node(&self) -> Vec<usize> {
        (0..self.world).filter(|&rank| self.node_of[rank] == self.node).collect()
    }

    /// The ranks, one of each machine that has so many, that are as many-eth on their machine as this one.
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
            "RANK: expected a number below WORLD_SIZE (2), got '2'; ranks count from 0",
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
        let place = Place::from_leaders(3, &[0, 1, 0, 1, 4]);
        assert_eq!((place.node, place.nodes, place.local_rank, place.local_world), (1, 3, 1, 2));
        assert_eq!(place.node_of, [0, 1, 0, 1, 2]);
        assert_eq!((place.of_node(), place.across_nodes()), (vec![1, 3], vec![2, 3]));
        assert_eq!(Place::from_leaders(0, &[0, 1, 0, 1, 4]).across_nodes(), [0, 1, 4]);
        // Of four others three are elsewhere; of one root all or nothing, and of none nothing.
        assert_eq!(place.from_other_machines(400, &[0, 1, 2, 3, 4]), 300);
        assert_eq!([&[0][..], &[1], &[3], &[]].map(|from| place.from_other_machines(7, from)), [7, 0, 0, 0]);
    }
}
