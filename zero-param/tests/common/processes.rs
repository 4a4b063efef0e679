//! Ranks that are processes: a test binary starts itself once per rank.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use zero_core::Stage;
use zero_core::collective::launch::LaunchOptions;
use zero_core::collective::launcher::Start;
use zero_core::collective::process::{ProcessOptions, run};
use zero_param::{Error, Ranks, run_process};

use super::Told;

const FOLDER: &str = "ZERO_PARAM_TEST_FOLDER";
const STAGE: &str = "ZERO_PARAM_TEST_STAGE";

pub fn bits(told: &[Told]) -> String {
    let hex = |told: &Told| {
        let weights = told.weights.values().flatten().copied();
        let floats: Vec<String> =
            told.losses.iter().copied().chain(weights).map(|x| format!("{:08x}", x.to_bits())).collect();
        let norms: Vec<String> = told.norms.iter().map(|x| format!("{:016x}", x.to_bits())).collect();
        format!("{} {}\n", floats.join(" "), norms.join(" "))
    };
    told.iter().map(hex).collect()
}

/// Runs `body` if this process was started as a rank. Called by the binary's test `rank`.
pub fn be_a_rank(body: impl FnOnce(&Ranks, Stage) -> Result<Told, Error> + Send) {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let stage = Stage::try_from(std::env::var(STAGE).unwrap().parse::<u8>().unwrap()).unwrap();
    let start = Start::from_environment().unwrap();
    let options = ProcessOptions { deadline: Duration::from_secs(60), ..ProcessOptions::default() };
    let result = run(&options, &start, |run| -> Result<(), Error> {
        run_process(run, LaunchOptions::default(), |ranks| {
            let told = body(ranks, stage)?;
            let file = Path::new(&folder).join(format!("rank-{}", ranks.comm().rank()));
            std::fs::write(file, bits(&[told])).unwrap();
            Ok(())
        })
    });
    if let Err(failed) = result {
        eprintln!("{failed}");
        failed.end_process();
    }
}

/// Returns the [`bits`] of the results of ranks that connect over sockets.
pub fn train_processes(world: usize, stage: Stage) -> String {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rank = |rank: usize| {
        let numbers = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)];
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.envs(numbers.map(|(name, number)| (name, number.to_string())));
        command.envs([("MASTER_ADDR", "localhost"), ("MASTER_PORT", &port.to_string())]);
        command
    };
    told((0..world).map(rank).collect(), world, stage)
}

/// Trains like [`train_processes`], with ranks started by mpirun.
pub fn train_under_mpirun(world: usize, stage: Stage) -> String {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &world.to_string()]);
    command.arg(std::env::current_exe().unwrap());
    told(vec![command], world, stage)
}

fn told(commands: Vec<Command>, world: usize, stage: Stage) -> String {
    let folder = tempfile::tempdir().unwrap();
    let start = |mut command: Command| {
        command.args(["--exact", "rank", "--nocapture", "--test-threads", "1"]);
        command.env(FOLDER, folder.path()).env(STAGE, stage.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
    };
    let mut children: Vec<_> = commands.into_iter().map(start).collect();
    let end = Instant::now() + Duration::from_secs(120);
    let mut ended = 0;
    while ended < children.len() && Instant::now() < end {
        ended = children.iter_mut().filter_map(|child| child.try_wait().unwrap()).count();
        std::thread::sleep(Duration::from_millis(10));
    }
    for child in &mut children {
        // A process that is overdue.
        let _ = child.kill();
        assert!(child.wait().unwrap().success());
    }
    (0..world).map(|rank| std::fs::read_to_string(folder.path().join(format!("rank-{rank}"))).unwrap()).collect()
}
