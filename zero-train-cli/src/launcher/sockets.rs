//! Starts this machine's ranks as processes with torchrun's variables; they connect over sockets.

use std::net::TcpListener;
use std::path::Path;

use zero_core::collective::launcher::{SECRET, Secret};

use super::{Job, LauncherError, Process};
use zero_train::config::{Config, ConfigError, Format, Node};

/// Default port of rank 0 with several machines: Accelerate's.
pub const MAIN_PORT: u16 = 29500;

/// The machines of a job, each of which starts its own ranks, and which of them this is. What is not said is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct Machines {
    /// Ranks on all machines.
    #[arg(skip)]
    pub ranks: Option<usize>,
    /// Number of machines; run `zero launch` with the same ZERO_SECRET on each, to start its share of the ranks
    #[arg(long = "num-machines", value_name = "N", conflicts_with_all = ["hosts", "cores", "mpirun", "options"])]
    pub count: Option<usize>,
    /// Index of this machine, from 0
    #[arg(long = "machine-rank", value_name = "N")]
    pub this: Option<usize>,
    /// Address of machine 0, which runs rank 0
    #[arg(long = "main-process-ip", value_name = "HOST")]
    pub host: Option<String>,
    // With one machine, 0 also means any free port.
    /// Port that rank 0 listens on [default: a free port, or 29500 for several machines]
    #[arg(long = "main-process-port", value_name = "PORT")]
    pub port: Option<usize>,
}

impl Machines {
    /// Reads `num_processes`, `num_machines`, `machine_rank`, `main_process_ip` and `main_process_port` from an
    /// Accelerate file.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every problem of the file.
    pub fn from_accelerate(path: &Path) -> Result<Self, ConfigError> {
        let ranks = Config::from_file(path)?.processes();
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Io { path: path.into(), source })?;
        // It has just been parsed as one; JSON is valid YAML.
        let node = Node::parse(Format::Yaml, &text).unwrap_or(Node::Null);
        let number = |key: &str| node.get(key).and_then(Node::as_usize);
        Ok(Self {
            ranks,
            count: number("num_machines"),
            this: number("machine_rank"),
            host: node.get("main_process_ip").and_then(Node::as_text).filter(|host| !host.is_empty()).map(String::from),
            port: number("main_process_port"),
        })
    }

    /// Fills missing values of `self` from `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            ranks: self.ranks.or(other.ranks),
            count: self.count.or(other.count),
            this: self.this.or(other.this),
            host: self.host.or(other.host),
            port: self.port.or(other.port),
        }
    }

    /// Returns `true` if there is more than one machine.
    pub fn is_multi_node(&self) -> bool {
        self.count.is_some_and(|count| count > 1)
    }
}

impl Job {
    /// Returns this machine's processes. Those of a single-machine job get `secret`.
    ///
    /// # Errors
    ///
    /// [`LauncherError::Machines`] if the ranks cannot be distributed this way, [`LauncherError::Io`] if there is no free port.
    pub fn processes(&self, machines: &Machines, secret: Option<&Secret>) -> Result<Vec<Process>, LauncherError> {
        let wrong = |what, expected: String, got: String| LauncherError::Machines { what, expected, got };
        let (count, this) = (machines.count.unwrap_or(1), machines.this.unwrap_or(0));
        if count == 0 || !self.ranks.is_multiple_of(count) {
            let expected =
                format!("a number that divides the {} ranks, so that all machines run equally many", self.ranks);
            return Err(wrong("the number of machines", expected, count.to_string()));
        }
        if this >= count {
            return Err(wrong("the rank of this machine", format!("one from 0 to {}", count - 1), this.to_string()));
        }
        // Port 0, a free one, is for one machine: several must agree on a port.
        let allowed = usize::from(count > 1)..=u16::MAX.into();
        if let Some(port) = machines.port.filter(|port| !allowed.contains(port)) {
            let expected = format!("{} to {}", allowed.start(), allowed.end());
            return Err(wrong("the main process's port", expected, port.to_string()));
        }
        let (host, port) = match (&machines.host, machines.port.filter(|&port| port > 0)) {
            (None, _) if count > 1 => {
                let expected = "the address of machine 0 (main_process_ip)".to_string();
                return Err(wrong("the main process's address", expected, "nothing".into()));
            }
            (Some(host), port) if count > 1 => (host.as_str(), port.unwrap_or(MAIN_PORT.into())),
            (_, Some(port)) => ("127.0.0.1", port),
            (_, None) => {
                let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
                let io = |source| LauncherError::Io { action: "find a free port on", path: "127.0.0.1".into(), source };
                ("127.0.0.1", free.map_err(io)?.port().into())
            }
        };
        let here = self.ranks / count;
        let process = |local: usize| {
            let numbers = [
                ("RANK", this * here + local),
                ("LOCAL_RANK", local),
                ("WORLD_SIZE", self.ranks),
                ("LOCAL_WORLD_SIZE", here),
                ("MASTER_PORT", port),
            ];
            let mut variables: Vec<(String, String)> =
                numbers.map(|(name, number)| (name.to_string(), number.to_string())).to_vec();
            variables.push(("MASTER_ADDR".into(), host.into()));
            variables.extend(secret.map(|secret| (SECRET.into(), secret.reveal().into())));
            variables.extend(self.variables.iter().cloned());
            Process { command: self.program.clone(), variables, is_launcher: false }
        };
        Ok((0..here).map(process).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processes(ranks: usize, machines: &Machines) -> Result<Vec<Process>, String> {
        let (hosts, options, program) = (Vec::new(), Vec::new(), vec!["zero".into(), "train".into()]);
        let job = Job { ranks, hosts, cores: None, variables: vec![("A".into(), "b".into())], options, program };
        job.processes(machines, Secret::new("0123456789abcdef").as_ref()).map_err(|error| error.to_string())
    }

    #[test]
    fn each_machine_starts_its_own_ranks() {
        let value = |process: &Process, name: &str| {
            process.variables.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone()).unwrap_or_default()
        };
        let here = processes(2, &Machines::default()).unwrap();
        let ranks: Vec<String> = here.iter().map(|process| value(process, "RANK")).collect();
        assert_eq!((ranks, value(&here[1], "MASTER_ADDR")), (vec!["0".into(), "1".into()], "127.0.0.1".to_string()));
        assert_eq!((value(&here[0], "A"), value(&here[0], "ZERO_SECRET")), ("b".into(), "0123456789abcdef".into()));
        let any_port = processes(1, &Machines { port: Some(0), ..Machines::default() }).unwrap();
        assert_ne!(value(&any_port[0], "MASTER_PORT"), "0");
        let (count, this, host) = (Some(2), Some(1), Some("node-0".to_string()));
        let machines = Machines { count, this, host, ..Machines::default() };
        let here = processes(4, &machines).unwrap();
        let of = |name: &str| here.iter().map(|process| value(process, name)).collect::<Vec<_>>().join(" ");
        assert_eq!((of("RANK"), of("LOCAL_RANK"), of("LOCAL_WORLD_SIZE")), ("2 3".into(), "0 1".into(), "2 2".into()));
        assert_eq!((of("WORLD_SIZE"), of("MASTER_ADDR")), ("4 4".into(), "node-0 node-0".into()));
        assert_eq!(of("MASTER_PORT"), "29500 29500");
        for (wrong, says) in [
            (processes(3, &machines), "the number of machines: expected a number that divides the 3 ranks"),
            (
                processes(4, &Machines { this: Some(2), ..machines.clone() }),
                "the rank of this machine: expected one from",
            ),
            (processes(4, &Machines { host: None, ..machines.clone() }), "the main process's address: expected"),
            (
                processes(4, &Machines { port: Some(0), ..machines }),
                "the main process's port: expected 1 to 65535, got 0",
            ),
            (
                processes(2, &Machines { port: Some(70_000), ..Machines::default() }),
                "the main process's port: expected 0 to 65535, got 70000",
            ),
        ] {
            let error = wrong.unwrap_err();
            assert!(error.starts_with(says), "{error}");
        }
    }

    #[test]
    fn a_file_of_accelerates_says_where_ranks_are() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("accelerate.yaml");
        let text = "distributed_type: MULTI_CPU\nnum_processes: 8\nnum_machines: 2\nmachine_rank: 1\n\
                    main_process_ip: 10.0.0.1\nmain_process_port: 29400\n";
        std::fs::write(&path, text).unwrap();
        let machines = Machines::from_accelerate(&path).unwrap();
        let host = Some("10.0.0.1".to_string());
        assert_eq!(machines, Machines { ranks: Some(8), count: Some(2), this: Some(1), host, port: Some(29400) });
        let given = Machines { this: Some(0), ..Machines::default() }.or(machines);
        assert_eq!((given.this, given.count), (Some(0), Some(2)));
        std::fs::write(&path, "distributed_type: MULTI_CPU\nnum_processes: many\n").unwrap();
        assert!(Machines::from_accelerate(&path).unwrap_err().to_string().contains("num_processes"));
    }
}
