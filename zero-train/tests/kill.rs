//! A training process is killed with SIGKILL at random moments and started again with `--resume auto`, until it has
//! trained all its steps: every loss is that of the run that nothing broke, bit by bit.
#![cfg(unix)]

mod common;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{trajectory, write_inputs};

const KILLS: usize = 50;
const STEPS: usize = 150;

fn train(inputs: &Path, run: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zero"));
    let at = |name: &str| inputs.join(name).into_os_string();
    let model = if options.contains(&"--offload") { "wide" } else { "model" };
    command.arg("train").arg("--model").arg(at(model)).arg("--data").arg(at("rows.safetensors"));
    command.arg("--swap").arg(at("swap"));
    command.args(["--batch", "2", "--threads", "1", "--json", "--steps"]).arg(STEPS.to_string());
    command.args(["--warmup", "20", "--clip", "1", "--resume", "auto"]);
    command.arg("--out").arg(run.join("out")).arg("--save").arg(run.join("checkpoints")).args(options);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

#[test]
fn fifty_kills_change_no_bit_of_the_losses() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let (mut kills, mut inside, mut before_any, mut runs) = (0, 0, 0, 0);
    std::fs::create_dir(dir.path().join("swap")).unwrap();
    let kinds: [&[&str]; 5] = [
        &["--ranks", "2", "--stage", "3", "--save-every", "2", "--keep-last", "2", "--offload", "all"],
        &["--ranks", "2", "--stage", "3", "--save-every", "2", "--keep-last", "2"],
        &["--ranks", "2", "--stage", "1", "--save-every", "1", "--keep-last", "1", "--save-async"],
        &[
            "--ranks",
            "3",
            "--stage",
            "2",
            "--save-every",
            "3",
            "--keep-last",
            "2",
            "--keep-best",
            "--accumulation",
            "2",
        ],
        &["--ranks", "1", "--stage", "0", "--save-every", "1", "--keep-last", "3"],
    ];
    // Where a disk is so fast that few kills hit a save, more are tried.
    while kills < KILLS || (inside < 5 && kills < 4 * KILLS) {
        let options = kinds[runs % kinds.len()];
        let unbroken = dir.path().join(format!("unbroken-{runs}"));
        let done = train(dir.path(), &unbroken, options).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let broken = dir.path().join(format!("broken-{runs}"));
        loop {
            let mut process = train(dir.path(), &broken, options).spawn().unwrap();
            // The seed of each hasher is random: no other source of chance is needed.
            let chance = RandomState::new().build_hasher().finish();
            std::thread::sleep(Duration::from_micros(50_000 + chance % 450_000));
            if let Some(status) = process.try_wait().unwrap() {
                let done = process.wait_with_output().unwrap();
                assert!(status.success(), "{}", String::from_utf8_lossy(&done.stderr));
                break;
            }
            process.kill().unwrap();
            process.wait().unwrap();
            kills += 1;
            let names = std::fs::read_dir(broken.join("checkpoints")).into_iter().flatten();
            let names: Vec<String> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            inside += usize::from(names.iter().any(|name| name.starts_with('.') && name != ".lock"));
            before_any += usize::from(!names.iter().any(|name| name == "latest"));
        }
        let (expected, got) = (trajectory(&unbroken), trajectory(&broken));
        assert_eq!(expected.len(), STEPS);
        let left = std::fs::read_dir(dir.path().join("swap")).unwrap().count();
        assert_eq!(left, 0, "what killed runs left on the disk is removed by those that follow");
        assert_eq!(got, expected, "run {runs} with {options:?}");
        runs += 1;
    }
    println!(
        "{kills} kills over {runs} runs of {STEPS} steps ({inside} inside a save, {before_any} before the first checkpoint): \
         every loss and gradient norm equals the unbroken run's bit by bit"
    );
    assert!(inside >= 5, "the kills must hit saves: {inside} of {kills}");
}
