//! Ranks that are processes, over sockets: `cargo test --test processes`. The binary starts itself once a rank.

mod common;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use burn_optim::SgdConfig;
use common::{Gpt, STEPS, Told, config, train, train_threads};
use zero_core::Stage;
use zero_core::collective::launcher::Start;
use zero_core::collective::process::{ProcessOptions, run};
use zero_param::{Error, Uses, Zero, run_process};

const FOLDER: &str = "ZERO_PARAM_TEST_FOLDER";
const STAGE: &str = "ZERO_PARAM_TEST_STAGE";

fn bits(told: &[Told]) -> String {
    let hex = |told: &Told| {
        let weights = told.weights.values().flatten().copied();
        let floats: Vec<String> =
            told.losses.iter().copied().chain(weights).map(|x| format!("{:08x}", x.to_bits())).collect();
        let norms: Vec<String> = told.norms.iter().map(|x| format!("{:016x}", x.to_bits())).collect();
        format!("{} {}\n", floats.join(" "), norms.join(" "))
    };
    told.iter().map(hex).collect()
}

/// Not a test by itself: what a rank does.
#[test]
fn rank() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let stage = Stage::try_from(std::env::var(STAGE).unwrap().parse::<u8>().unwrap()).unwrap();
    let start = Start::from_environment().unwrap();
    let options = ProcessOptions { deadline: Duration::from_secs(60), ..ProcessOptions::default() };
    let result = run(&options, &start, |run| -> Result<(), Error> {
        run_process(run, |ranks| {
            let (told, zero) = train::<Gpt<2>>(ranks, &config(stage), &SgdConfig::new())?;
            if stage == Stage::Parameters {
                assert_all_are_gathered_ahead(&zero);
            }
            let file = std::path::Path::new(&folder).join(format!("rank-{}", ranks.comm().rank()));
            std::fs::write(file, bits(&[told])).unwrap();
            Ok(())
        })
    });
    if let Err(failed) = result {
        eprintln!("{failed}");
        failed.end_process();
    }
}

/// From the second pass on, all gathers but a pass's first.
fn assert_all_are_gathered_ahead(zero: &Zero) {
    let uses: Vec<Uses> = zero.paths().map(|path| zero.uses(path).unwrap()).collect();
    let sum = |count: fn(&Uses) -> usize| uses.iter().map(count).sum::<usize>();
    // In the end weights are read out.
    let read_out = sum(|uses| uses.gathered_forward.min(1));
    let in_a_pass = (sum(|uses| uses.gathered_forward + uses.gathered_backward) - read_out) / STEPS;
    assert!(in_a_pass > 10, "{uses:?}");
    assert_eq!(sum(|uses| uses.gathered_ahead), (STEPS - 1) * (in_a_pass - 1), "{uses:?}");
}

fn train_processes(world: usize, stage: Stage) -> String {
    let folder = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank", "--nocapture", "--test-threads", "1"])
            .env(FOLDER, folder.path())
            .env(STAGE, stage.to_string())
            .envs(
                [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)]
                    .map(|(name, number)| (name, number.to_string())),
            )
            .envs([("MASTER_ADDR", "localhost"), ("MASTER_PORT", &port.to_string())])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<_> = (0..world).map(start).collect();
    let end = Instant::now() + Duration::from_secs(120);
    let mut ended = 0;
    while ended < children.len() && Instant::now() < end {
        ended = children.iter_mut().filter_map(|child| child.try_wait().unwrap()).count();
        std::thread::sleep(Duration::from_millis(10));
    }
    for child in &mut children {
        // One that is overdue.
        let _ = child.kill();
        assert!(child.wait().unwrap().success());
    }
    (0..world).map(|rank| std::fs::read_to_string(folder.path().join(format!("rank-{rank}"))).unwrap()).collect()
}

#[test]
fn processes_train_as_threads_do() {
    for world in 2..=4 {
        let threads = bits(&train_threads::<Gpt<2>>(world, &config(Stage::DataParallel), &SgdConfig::new()));
        for stage in Stage::ALL {
            assert!(train_processes(world, stage) == threads, "{world} processes at stage {stage}");
        }
    }
}
