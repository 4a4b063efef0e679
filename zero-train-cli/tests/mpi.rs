//! Ranks as processes: `cargo test -p zero-train-cli --features mpi --test mpi`, with Open MPI's mpirun.
//!
//! Processes compute the same bits as threads; each resumes from the other's checkpoints; and a job that cannot run or
//! that dies reports it.

mod common;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{
    Said, assert_same_checkpoint, assert_same_run, ended_after, inputs_and_swap, signal, small, start, trajectory,
    write_inputs,
};
use serde_json::Value;

const ZERO: &str = env!("CARGO_BIN_EXE_zero");

/// Time limit that no job here reaches, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// mpirun with `ranks` ranks.
fn mpirun(ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]).arg(ranks.to_string());
    command
}

fn threads(ranks: usize, inputs: &Path, run: &Path, options: &[&str]) {
    let mut command = Command::new(ZERO);
    command.arg("train").args(["--ranks", &ranks.to_string()]);
    small(&mut command, inputs, run, options);
    good(&finish(&mut command));
}

fn processes(ranks: usize, inputs: &Path, run: &Path, options: &[&str]) {
    let mut command = mpirun(ranks);
    command.args([ZERO, "train"]);
    small(&mut command, inputs, run, options);
    good(&finish(&mut command));
}

/// Runs to the end; fails at the time limit.
fn finish(command: &mut Command) -> Output {
    let child = start(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let pid = child.id().to_string();
    let (done, watch) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if watch.recv_timeout(LIMIT).is_err() {
            // mpirun ends its ranks.
            Command::new("kill").args(["-TERM", &pid]).status().unwrap();
            panic!("not done within {LIMIT:?}");
        }
    });
    let output = child.wait_with_output().unwrap();
    done.send(()).unwrap();
    watchdog.join().unwrap();
    output
}

fn good(output: &Output) {
    assert!(output.status.success(), "{}: {}", output.status, text(output));
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn processes_compute_what_threads_compute_bit_by_bit() {
    let (dir, swap) = inputs_and_swap();
    let mut runs: Vec<(usize, Vec<&str>)> = Vec::new();
    for ranks in 1..=4 {
        for stage in ["0", "1", "2", "3"] {
            runs.push((ranks, vec!["--stage", stage]));
        }
    }
    runs.push((2, vec!["--stage", "3", "--dtype", "bf16"]));
    runs.push((2, vec!["--stage", "2", "--dtype", "fp16", "--accumulation", "2"]));
    runs.push((3, vec!["--stage", "1", "--accumulation", "2"]));
    runs.extend(["0", "1", "2", "3"].map(|stage| (4, vec!["--stage", stage, "--shard-size", "2"])));
    runs.push((4, vec!["--stage", "3", "--secondary-shard-size", "2"]));
    runs.push((2, vec!["--stage", "3", "--quantized-weights", "int4", "--dtype", "bf16"]));
    runs.push((4, vec!["--stage", "3", "--secondary-shard-size", "2", "--quantized-weights", "int8"]));
    runs.push((
        4,
        vec!["--stage", "3", "--secondary-shard-size", "2", "--quantized-gradients", "int4", "--accumulation", "2"],
    ));
    runs.push((4, vec!["--stage", "2", "--shard-size", "2", "--quantized-gradients", "int4"]));
    runs.push((2, vec!["--stage", "3", "--offload", "all", "--swap", &swap]));
    for (place, (ranks, options)) in runs.iter().enumerate() {
        let options: Vec<&str> = options.iter().copied().chain(["--steps", "4"]).collect();
        let (ours, theirs) = (dir.path().join(format!("threads-{place}")), dir.path().join(format!("mpi-{place}")));
        threads(*ranks, dir.path(), &ours, &options);
        if *ranks == 1 {
            // One process under mpirun is what it is without, and has one rank unless it is told otherwise.
            assert_eq!(options.len(), 4);
        }
        processes(*ranks, dir.path(), &theirs, &options);
        assert_same_run(*ranks, &options, &ours, &theirs);
        assert_same_checkpoint([&ours, &theirs], "step-00000004");
    }
}

#[test]
fn what_one_engine_saves_the_other_goes_on_from() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    for stage in ["0", "3"] {
        let unbroken = dir.path().join(format!("unbroken-{stage}"));
        let options = ["--stage", stage, "--save-every", "2"];
        threads(2, dir.path(), &unbroken, &[&options[..], &["--steps", "6"]].concat());
        for first_are_threads in [true, false] {
            let run = dir.path().join(format!("both-{stage}-{first_are_threads}"));
            let half = [&options[..], &["--steps", "4"]].concat();
            let rest = [&options[..], &["--steps", "6", "--resume", "auto"]].concat();
            // A schedule counts on all steps, so the first part is cut short by its last checkpoint's step.
            let (first, second) = match first_are_threads {
                true => (threads as fn(usize, &Path, &Path, &[&str]), processes as fn(usize, &Path, &Path, &[&str])),
                false => (processes as fn(usize, &Path, &Path, &[&str]), threads as fn(usize, &Path, &Path, &[&str])),
            };
            first(2, dir.path(), &run, &half);
            second(2, dir.path(), &run, &rest);
            assert_eq!(trajectory(&run), trajectory(&unbroken), "stage {stage}, threads first: {first_are_threads}");
        }
    }
    // At another number of processes: the state is equal, and training goes on.
    let run = dir.path().join("both-0-true");
    processes(3, dir.path(), &run, &["--stage", "2", "--steps", "8", "--resume", "auto"]);
    assert_eq!(trajectory(&run).len(), 8);
}

#[test]
fn ranks_with_different_settings_are_told_apart_before_they_train() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let script = format!(
        "MODEL={0}/model
         if [ $OMPI_COMM_WORLD_RANK = 1 ]; then set -- $ODD; [ $1 = --model ] && MODEL=$2 && set --; fi
         exec {ZERO} train --model $MODEL --data {0}/rows.safetensors --steps 3 \"$@\"",
        dir.path().display()
    );
    for (odd, words) in [
        ("--stage 2", "rank 0 has 2 ranks at stage 3"),
        ("--lr 0.5", "the optimizer"),
        ("--seed 7", "seed"),
        ("--batch 3", "the batch"),
        ("--model tiny", "the model"),
    ] {
        let output = finish(mpirun(2).args(["-x", &format!("ODD={odd}"), "sh", "-c", &script]));
        let told = text(&output);
        assert_eq!(output.status.code(), Some(2), "{odd}: {told}");
        assert!(told.contains("ranks were started with different settings") && told.contains(words), "{odd}: {told}");
    }
}

#[test]
fn bad_input_ends_every_rank_with_its_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    for options in [&["--ranks", "3"][..], &["--stage", "7"], &["--data", "/nowhere"], &["--deadline", "0"]] {
        let mut command = mpirun(2);
        command.args([ZERO, "train"]);
        small(&mut command, dir.path(), &dir.path().join("run"), &["--steps", "3"]);
        let output = finish(command.args(options));
        assert_eq!(output.status.code(), Some(2), "{options:?}: {}", text(&output));
        assert!(!dir.path().join("run/out/metrics.jsonl").exists());
    }
}

#[test]
fn a_rank_keeps_to_the_file_that_its_launcher_gives_it() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let script = format!(
        "[ $OMPI_COMM_WORLD_RANK = 1 ] && set -- --seed 7
         exec {ZERO} train --model {0}/model --data {0}/rows.safetensors --steps 3 --out {0}/out \"$@\" \
             >{0}/rank-$OMPI_COMM_WORLD_RANK.log 2>&1",
        dir.path().display()
    );
    let output = finish(mpirun(2).args(["sh", "-c", &script]));
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    let said = std::fs::read_to_string(dir.path().join("rank-1.log")).unwrap();
    assert!(said.contains("ranks were started with different settings"), "{said}");
    assert!(!dir.path().join("out/logs").exists());
}

#[test]
fn a_launcher_that_the_library_does_not_know_is_no_reason_to_train_alone() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let mut command = Command::new(ZERO);
    command.arg("train").env("PMI_RANK", "0").env("PMI_SIZE", "2").env("OMPI_ALLOW_RUN_AS_ROOT", "1");
    small(command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"), dir.path(), &dir.path().join("run"), &["--steps", "3"]);
    let output = finish(&mut command);
    let told = text(&output);
    assert!(!output.status.success() && told.contains("started 2 ranks (by PMI_SIZE), but MPI sees 1"), "{told}");
    assert!(!dir.path().join("run/out/metrics.jsonl").exists());
}

#[test]
fn launch_starts_a_job_again_that_has_lost_a_rank() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let options = ["--stage", "3", "--steps", "60", "--save-every", "2", "--keep-last", "2"];
    let unbroken = dir.path().join("unbroken");
    threads(2, dir.path(), &unbroken, &options);
    let run = dir.path().join("broken");
    let told = lose_a_rank(dir.path(), &run, &["--ranks", "2", "--max-restarts", "2"], &options);
    assert!(told.contains("restart 1 of 2, from the last intact checkpoint"), "{told}");
    assert_eq!(trajectory(&run), trajectory(&unbroken));
    // At a smaller number, down to one.
    for (ranks, fewer) in [("3", "2"), ("2", "1")] {
        let run = dir.path().join(format!("from-{ranks}"));
        let launch = ["--ranks", ranks, "--max-restarts", "1", "--restart-ranks", fewer];
        let told = lose_a_rank(dir.path(), &run, &launch, &options);
        assert!(told.contains(&format!("mpirun -n {fewer} ")), "{told}");
        assert_eq!(trajectory(&run).len(), 60);
        let last = std::fs::read_to_string(run.join("out/metrics.jsonl")).unwrap();
        let last: Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
        assert_eq!(last["ranks"].as_array().unwrap().len().to_string(), fewer);
    }
}

/// Launches a training, kills its last rank once there is a checkpoint, and returns the launcher's output after its successful end.
fn lose_a_rank(inputs: &Path, run: &Path, launch: &[&str], options: &[&str]) -> String {
    let mut command = Command::new(ZERO);
    command.arg("launch").args(launch).args(["--", "train"]);
    small(&mut command, inputs, run, options);
    let job = start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()));
    // A rank of the first attempt, once there is something to go on from.
    let begin = Instant::now();
    while !run.join("checkpoints/latest").exists() {
        assert!(begin.elapsed() < LIMIT, "no checkpoint");
        std::thread::sleep(Duration::from_millis(5));
    }
    let out = run.join("out");
    let ranks = Command::new("pgrep").arg("-f").arg(format!("^{ZERO} train .*{}", out.display())).output().unwrap();
    let ranks = String::from_utf8(ranks.stdout).unwrap();
    let ranks: Vec<&str> = ranks.lines().collect();
    assert!(ranks.len() >= 2, "{ranks:?}");
    assert!(Command::new("kill").args(["-KILL", ranks[ranks.len() - 1]]).status().unwrap().success());
    let output = job.wait_with_output().unwrap();
    let told = text(&output);
    assert!(output.status.success(), "{told}");
    told
}

#[test]
fn a_launcher_that_is_asked_to_end_lets_its_ranks_save() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    for (name, code) in [("TERM", 143), ("INT", 130)] {
        let run = dir.path().join(name);
        let mut command = Command::new(ZERO);
        command.args(["launch", "--ranks", "2", "--max-restarts", "1", "--", "train"]);
        small(&mut command, dir.path(), &run, &["--steps", "100000"]);
        let mut child = start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()));
        let mut said = Said::of(&mut child);
        said.until("step 10/");
        signal(&child, name);
        let told = said.rest().to_string();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{told}");
        // An MPI launcher hands on SIGUSR1 only.
        let step = ended_after("SIGUSR1", &told);
        let manifest = run.join(format!("checkpoints/step-{step:08}/manifest.json"));
        assert!(manifest.exists() && !told.contains("restart"), "{told}");
    }
}

#[test]
fn launch_says_what_it_would_run_and_what_it_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let hosts = dir.path().join("hosts");
    std::fs::write(&hosts, "node1 slots=2\nnode2 slots=2\n").unwrap();
    let dry = |options: &[&str]| {
        finish(Command::new(ZERO).args(["launch", "--dry-run", "--hosts"]).arg(&hosts).args(options))
    };
    let mut command = Command::new(ZERO);
    command.args(["launch", "--dry-run", "--ranks", "4", "--cores", "8", "--hosts"]).arg(&hosts);
    let output = command.args(["--", "my program", "--flag"]).output().unwrap();
    let line = String::from_utf8(output.stdout).unwrap();
    assert!(line.contains("--host node1:2,node2:2") && line.contains("slot:PE=4"), "{line}");
    assert!(line.trim_end().ends_with("'my program' --flag"), "{line}");
    let output = dry(&["--ranks", "5", "--", "x"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("5 ranks do not fit: the hosts have 4 slots"), "{}", text(&output));
    let output = dry(&["--ranks", "2", "--mpirun", "/nowhere/mpirun", "--", "x"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("no MPI launcher was found"), "{}", text(&output));
}
