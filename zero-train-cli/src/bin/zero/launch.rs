//! `zero launch`: starts ranks as processes, on this machine or on many.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use zero_core::collective::flight::merge;
use zero_core::collective::launcher::{SECRET, Secret, TRUSTED_NETWORK};
use zero_train_cli::launcher::{
    Ended, FIRST_RANKS, Job, LAUNCHED, LauncherError, Limits, Machines, Mpirun, Process, RESTART_RANKS, RESTARTS,
    SIGNALS, StopSignals, parse_hosts, physical_cores, slots, spread, supervise,
};

/// Exit code of a program with invalid input: a restart would not help.
const BAD_INPUT: i32 = 2;

/// Exit code of ranks that received SIGUSR1 from their launcher; see [`Process::is_launcher`].
const HANDED_ON: i32 = 138;

/// Start timeout of this machine's ranks, if one started here in an earlier attempt.
const START: Duration = Duration::from_secs(120);

/// Longest pause before a restart. The first pause is one second.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

// A field for each option.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// Total number of ranks on all machines, each a process [default: num_processes of --config-file]
    #[arg(long, short = 'n', value_parser = super::commands::at_least_one)]
    ranks: Option<usize>,
    /// Start the ranks of this machine without an MPI launcher; they connect over sockets [default: if there is no
    /// mpirun, or `train` was built without MPI]
    #[arg(long, conflicts_with_all = ["hosts", "cores", "mpirun", "options"])]
    sockets: bool,
    /// Read num_processes, num_machines, machine_rank, main_process_ip and main_process_port from this Accelerate YAML
    /// file. `train` reads its other settings from it too, unless you give --ranks or a --config of `train`
    #[arg(long, value_name = "FILE")]
    config_file: Option<PathBuf>,
    #[command(flatten)]
    machines: Machines,
    /// Let ranks connect without a secret at addresses that other machines reach, on a network without other users
    #[arg(long)]
    trusted_network: bool,
    /// Hosts file with one machine per line, `node1 slots=4` or `node1:4`; read again before every restart
    #[arg(long, value_name = "FILE")]
    hosts: Option<PathBuf>,
    /// Cores per machine; each rank is bound to an equal share of them [default: this machine's, without --hosts]
    #[arg(long, value_parser = super::commands::at_least_one)]
    cores: Option<usize>,
    /// The MPI launcher [default: mpirun or mpiexec in the PATH]
    #[arg(long, value_name = "PATH")]
    mpirun: Option<PathBuf>,
    /// Set an environment variable for the ranks; may be given several times
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    variables: Vec<(String, String)>,
    /// Pass an option to the MPI launcher, such as `--mpirun-option=--tag-output`; may be given several times
    #[arg(long = "mpirun-option", value_name = "OPTION", allow_hyphen_values = true)]
    options: Vec<String>,
    /// Restart at most this many times after a rank dies, from the last intact checkpoint in the program's --save
    /// folder
    #[arg(long, value_name = "K", default_value_t = 0)]
    max_restarts: usize,
    /// Number of ranks after a restart; with --hosts, at most the number of slots. The rows per step stay the same
    /// [default: --ranks]
    #[arg(long, value_name = "N", value_parser = super::commands::at_least_one)]
    restart_ranks: Option<usize>,
    /// Seconds that the MPI launcher or the other ranks may still run after a rank fails, before they are terminated
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    grace: u64,
    /// Fail if no rank starts on this machine within this many seconds [default: no limit for the first attempt; with
    /// an MPI launcher, 120 for later attempts if ranks ran here before]
    #[arg(long, value_name = "SECONDS")]
    start_timeout: Option<u64>,
    /// Print the command line without running it
    #[arg(long)]
    dry_run: bool,
    /// The program and its arguments; `train ...` runs this program's `train`
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("expected NAME=VALUE".into()),
    }
}

impl LaunchArgs {
    /// Returns the machines of the command line, with missing values taken from the file.
    fn machines(&self) -> Result<Machines> {
        let given = Machines { ranks: self.ranks, ..self.machines.clone() };
        match &self.config_file {
            None => Ok(given),
            Some(path) => Ok(given.or(Machines::from_accelerate(path)?)),
        }
    }

    /// Returns the MPI launcher, or `None` if the ranks run without one.
    fn mpirun(&self, machines: &Machines) -> Result<Option<Mpirun>> {
        let needs_mpi =
            self.hosts.is_some() || self.mpirun.is_some() || self.cores.is_some() || !self.options.is_empty();
        if self.sockets || machines.is_multi_node() {
            if needs_mpi {
                bail!(
                    "the machines of --config-file start their ranks without an MPI launcher: omit --hosts, --mpirun, \
                     --cores and --mpirun-option"
                );
            }
            return Ok(None);
        }
        let is_without_mpi = self.program[0] == OsStr::new("train") && !cfg!(feature = "mpi");
        if is_without_mpi && !needs_mpi {
            return Ok(None);
        }
        match Mpirun::find(self.mpirun.as_deref()) {
            Err(LauncherError::NoMpirun { .. }) if !needs_mpi => Ok(None),
            found => Ok(Some(found?)),
        }
    }

    /// Returns the job of one attempt; attempts count from 0.
    fn job(&self, machines: &Machines, attempt: usize, launched_unix_ms: u128) -> Result<Job> {
        let Some(asked) = machines.ranks else {
            bail!("the number of ranks is missing: give --ranks N, or num_processes in --config-file");
        };
        let mut ranks = if attempt == 0 { asked } else { self.restart_ranks.unwrap_or(asked) };
        let hosts = match &self.hosts {
            None => Vec::new(),
            Some(path) => {
                let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
                let hosts = parse_hosts(&text).with_context(|| path.display().to_string())?;
                if attempt > 0 {
                    ranks = ranks.min(slots(&hosts).unwrap_or(ranks));
                }
                spread(&hosts, ranks).with_context(|| path.display().to_string())?
            }
        };
        let mut program = self.program.clone();
        if program[0] == OsStr::new("train") {
            let is_config = |word: &OsString| {
                let name = word.as_encoded_bytes().split(|byte| *byte == b'=').next();
                [&b"--config"[..], b"--config-file"].map(Some).contains(&name)
            };
            if let Some(file) =
                self.config_file.as_ref().filter(|_| self.ranks.is_none() && !program.iter().any(is_config))
            {
                program.splice(1..1, ["--config".into(), file.into()]);
            }
            program.insert(0, std::env::current_exe().context("cannot determine the path of this program")?.into());
        }
        let mut variables = self.variables.clone();
        variables.push((RESTARTS.into(), attempt.to_string()));
        variables.push((FIRST_RANKS.into(), asked.to_string()));
        variables.extend(self.restart_ranks.map(|ranks| (RESTART_RANKS.into(), ranks.to_string())));
        variables.push((LAUNCHED.into(), launched_unix_ms.to_string()));
        if self.trusted_network {
            variables.push((TRUSTED_NETWORK.into(), "1".into()));
        }
        // An MPI launcher passes these only to the ranks of this machine.
        for name in ["ZERO_DEADLINE", "ZERO_FLIGHT_DIR"] {
            if let Ok(value) = std::env::var(name) {
                variables.push((name.into(), value));
            }
        }
        let cores = self.cores.or_else(|| if hosts.is_empty() { physical_cores() } else { None });
        Ok(Job { ranks, hosts, cores, variables, options: self.options.clone(), program })
    }
}

/// Returns the processes to start here, the MPI launcher or this machine's ranks, and their command lines.
fn processes(job: &Job, mpirun: Option<&Mpirun>, machines: &Machines) -> Result<(Vec<Process>, String)> {
    if let Some(mpirun) = mpirun {
        let command = job.command(mpirun, rustix::process::geteuid().is_root());
        let line = shell(&command);
        return Ok((vec![Process { command, variables: Vec::new(), is_launcher: true }], line));
    }
    // Ranks of several machines share only a secret that the user gave them.
    let secret = match machines.is_multi_node() || std::env::var_os(SECRET).is_some() {
        true => None,
        false => Some(Secret::random().context("cannot get random numbers for a secret from the system")?),
    };
    let processes = job.processes(machines, secret.as_ref())?;
    let lines = processes.iter().map(|process| {
        let shown = process.variables.iter().filter(|(name, _)| name != SECRET);
        let words = shown.map(|(name, value)| format!("{name}={value}").into()).chain(process.command.iter().cloned());
        shell(&words.collect::<Vec<OsString>>())
    });
    let lines = lines.collect::<Vec<_>>().join("\n");
    Ok((processes, lines))
}

pub fn launch(args: &LaunchArgs) -> Result<ExitCode> {
    let machines = args.machines()?;
    let mpirun = args.mpirun(&machines)?;
    if machines.is_multi_node() && args.restart_ranks.is_some() {
        bail!(
            "--restart-ranks works on one machine only: each of several machines restarts its own share of the ranks; \
             omit --restart-ranks"
        );
    }
    let saves = args.program.iter().any(|word| word == "--save" || word.as_encoded_bytes().starts_with(b"--save="));
    if args.max_restarts > 0 && !saves {
        eprintln!("warning: the program saves no checkpoints (--save DIR): a restart starts from the beginning");
    }
    let launched = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
    let started = mpirun.as_ref().map_or("the job".to_string(), |mpirun| mpirun.path.display().to_string());
    let asked = StopSignals::watch().context("cannot install signal handlers")?;
    let (mut attempt, given, mut began_on) = (0, args.start_timeout.map(Duration::from_secs), None);
    loop {
        let job = args.job(&machines, attempt, launched)?;
        // Ranks that started here in an earlier attempt are expected to start again if the hosts are the same.
        let begin = match &began_on {
            // Ranks that connect over sockets wait for each other until their own deadline.
            Some(hosts) if *hosts == job.hosts && mpirun.is_some() => given.or(Some(START)),
            _ => given,
        };
        let (processes, lines) = processes(&job, mpirun.as_ref(), &machines)?;
        if args.dry_run {
            println!("{lines}");
            return Ok(ExitCode::SUCCESS);
        }
        eprintln!("{lines}");
        let mut ended = supervise(&processes, Limits { grace: Duration::from_secs(args.grace), begin }, &asked)?;
        if let Some(signal) = asked.first().filter(|_| ended.code == HANDED_ON) {
            ended.code = 128 + signal;
        }
        if ended.ended.is_some() && mpirun.is_some() {
            // Otherwise the ranks' own messages are already visible.
            ended.failures.iter().for_each(|failure| eprintln!("{}", failure.reason));
        }
        match (ended.ended, begin) {
            (Some(Ended::AfterFailure), _) => {
                eprintln!("{started} was still running {} s after a rank failed, and was terminated", args.grace);
            }
            (Some(Ended::NotBegun), Some(limit)) => eprintln!(
                "{started} started no rank on this machine within {} s (--start-timeout), and was terminated; check \
                 whether a host of the job is down",
                limit.as_secs()
            ),
            _ => {}
        }
        if ended.began {
            began_on = Some(job.hosts);
        }
        // The launcher reports the rank that ended first, which may only have been notified of the failure.
        let bad_input = ended.code == BAD_INPUT || ended.failures.iter().any(|failure| failure.code == BAD_INPUT);
        let ended_with = if bad_input && ended.code != 0 { BAD_INPUT } else { ended.code };
        if ended.code == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        // Ranks that the launcher itself ended were not asked to end by anyone else.
        let is_asked =
            asked.first().is_some() || ended.ended != Some(Ended::NotBegun) && SIGNALS.contains(&(ended_with - 128));
        if bad_input || is_asked || attempt == args.max_restarts {
            if attempt > 0 && !is_asked {
                eprintln!(
                    "error: gave up after {attempt} restart(s); the last attempt ended with exit code {}",
                    ended.code
                );
            }
            return Ok(ExitCode::from(u8::try_from(ended_with).unwrap_or(1)));
        }
        attempt += 1;
        // A lost machine may come back: later attempts wait longer.
        let pause = LONGEST_PAUSE.min(Duration::from_secs(1 << (attempt - 1).min(10)));
        eprintln!(
            "the ranks ended with exit code {}: restart {attempt} of {}{}, in {} s",
            ended.code,
            args.max_restarts,
            if saves { ", from the last intact checkpoint" } else { "" },
            pause.as_secs()
        );
        asked.sleep(pause);
        if let Some(signal) = asked.first() {
            return Ok(ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)));
        }
    }
}

/// Quotes a command line for a shell.
fn shell(command: &[OsString]) -> String {
    let plain =
        |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_=./:,@%+".contains(c));
    let words = command.iter().map(|word| {
        let text = word.to_string_lossy();
        if plain(&text) { text.into_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
    });
    words.collect::<Vec<_>>().join(" ")
}

#[derive(Debug, Args)]
pub struct FlightArgs {
    /// Flight records (flight-rank-N.json), or folders with them
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

/// Returns the records in `files` and folders.
fn records(files: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut records = Vec::new();
    for path in files {
        if !path.is_dir() {
            records.push(path.clone());
            continue;
        }
        let entries = std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
        let is_record = |path: &Path| {
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            name.starts_with("flight-rank-") && name.ends_with(".json")
        };
        let mut found: Vec<PathBuf> =
            entries.flatten().map(|entry| entry.path()).filter(|path| is_record(path)).collect();
        if found.is_empty() {
            bail!("{} has no records: expected files named flight-rank-N.json", path.display());
        }
        found.sort();
        records.append(&mut found);
    }
    Ok(records)
}

pub fn flight(args: &FlightArgs) -> Result<()> {
    let files = records(&args.files)?;
    println!("{}", merge(&files)?);
    Ok(())
}
