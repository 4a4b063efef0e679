//! Ranks as processes without MPI: `cargo test -p zero-train-cli --test torchrun`. The processes get the variables that
//! torchrun sets, so only the program is needed.
//!
//! Processes compute the same bits as threads; and a job that cannot run or that dies reports it on every rank.

mod common;
#[path = "../../zero-core/tests/common/port.rs"]
mod port;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{
    Said, assert_same_checkpoint, assert_same_run, ended_after, inputs_and_swap, signal, small, start, texts,
    trajectory, wire, write_inputs,
};
use port::free_port;
use serde_json::Value;

const ZERO: &str = env!("CARGO_BIN_EXE_zero");

/// Time limit that no job here reaches, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(90);

/// One process, started as torchrun does.
fn rank(rank: usize, ranks: usize, port: u16) -> Command {
    let mut command = Command::new(ZERO);
    command.arg("train");
    let numbers = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)];
    command.envs(numbers.map(|(name, number)| (name, number.to_string())));
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command
}

fn begin(command: &mut Command) -> Child {
    start(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()))
}

/// Waits for processes; fails at the time limit.
fn finish(children: Vec<Child>) -> Vec<Output> {
    let pids: Vec<String> = children.iter().map(|child| child.id().to_string()).collect();
    let (done, watch) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if watch.recv_timeout(LIMIT).is_err() {
            Command::new("kill").arg("-KILL").args(&pids).status().unwrap();
            panic!("not done within {LIMIT:?}");
        }
    });
    let outputs = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    done.send(()).unwrap();
    watchdog.join().unwrap();
    outputs
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn good(outputs: &[Output]) {
    for output in outputs {
        assert!(output.status.success(), "{}: {}", output.status, text(output));
    }
}

fn threads(ranks: usize, inputs: &Path, run: &Path, options: &[&str]) {
    let mut command = Command::new(ZERO);
    command.arg("train");
    small(&mut command, inputs, run, &[&["--ranks", &ranks.to_string()], options].concat());
    good(&finish(vec![begin(&mut command)]));
}

fn processes(ranks: usize, inputs: &Path, run: &Path, options: &[&str]) -> Vec<Output> {
    let port = free_port();
    let start = |place: usize| {
        let mut command = rank(place, ranks, port);
        small(&mut command, inputs, run, options);
        begin(&mut command)
    };
    finish((0..ranks).map(start).collect())
}

#[test]
fn processes_compute_what_threads_compute_bit_by_bit() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let stages = ["0", "1", "2", "3"].map(|stage| (2, vec!["--stage", stage]));
    let more = [
        (3, vec!["--stage", "3"]),
        (2, vec!["--stage", "3", "--dtype", "bf16"]),
        (2, vec!["--stage", "1", "--accumulation", "2"]),
        (4, vec!["--stage", "3", "--shard-size", "2"]),
        (4, vec!["--stage", "3", "--secondary-shard-size", "2"]),
        (2, vec!["--stage", "3", "--quantized-weights", "int4", "--dtype", "bf16"]),
        (4, vec!["--stage", "3", "--secondary-shard-size", "2", "--quantized-weights", "int8"]),
        (
            4,
            vec!["--stage", "3", "--secondary-shard-size", "2", "--quantized-gradients", "int4", "--accumulation", "2"],
        ),
        (4, vec!["--stage", "2", "--shard-size", "2", "--quantized-gradients", "int4"]),
        // One process is what it is without a launcher, and has one rank unless it is told otherwise.
        (1, vec!["--stage", "1"]),
    ];
    for (place, (ranks, options)) in stages.into_iter().chain(more).enumerate() {
        let options: Vec<&str> = options.into_iter().chain(["--steps", "4"]).collect();
        let (ours, theirs) = (dir.path().join(format!("threads-{place}")), dir.path().join(format!("process-{place}")));
        threads(ranks, dir.path(), &ours, &options);
        good(&processes(ranks, dir.path(), &theirs, &options));
        assert_same_run(ranks, &options, &ours, &theirs);
        assert_same_checkpoint([&ours, &theirs], "step-00000004");
    }
}

#[test]
fn processes_look_at_checkpoints_together_and_go_on() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let run = dir.path().join("run");
    let save = run.join("checkpoints");
    good(&processes(2, dir.path(), &run, &["--stage", "3", "--steps", "6", "--save-every", "2"]));
    let unbroken = trajectory(&run);
    // What rank 1 looks at.
    let damaged = save.join("step-00000006/rank-00001-of-00002.safetensors");
    let mut bytes = std::fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&damaged, bytes).unwrap();
    let again = processes(2, dir.path(), &run, &["--stage", "3", "--steps", "6", "--resume", "auto"]);
    good(&again);
    let said = text(&again[0]);
    assert!(said.contains("step-00000006 is skipped") && said.contains("is corrupt"), "{said}");
    assert_eq!(trajectory(&run), unbroken, "from step 4 on");
    // As many as are there now, whoever saved it.
    good(&processes(3, dir.path(), &run, &["--stage", "2", "--steps", "7", "--resume", "auto"]));
    std::fs::remove_file(save.join("step-00000002/rank-00001-of-00002.safetensors")).unwrap();
    let named = save.join("step-00000002");
    let options = ["--steps", "8", "--resume", named.to_str().unwrap()];
    let refused = processes(2, dir.path(), &run, &options);
    let said = text(&refused[0]);
    assert!(refused.iter().all(|output| output.status.code() == Some(2)), "{said}");
    assert!(said.contains("rank-00001-of-00002") && said.contains("missing"), "{said}");
}

#[test]
fn gathering_together_changes_no_bit() {
    let (dir, swap) = inputs_and_swap();
    // Nothing persists, and little is gathered ahead: every load is a gather of its own.
    let lean = r#"{
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 9000,
            "reduce_bucket_size": 2000
        }
    }"#;
    let file = |name: &str, more: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, lean.replace("\"stage\": 3", &format!("\"stage\": 3{more}"))).unwrap();
        path.into_os_string().into_string().unwrap()
    };
    let codes = file("codes.json", ", \"zero_quantized_weights\": true");
    let codes_in_groups = file("groups.json", ", \"zero_quantized_weights\": true, \"mics_shard_size\": 2");
    let lean = file("lean.json", "");
    let mut runs: Vec<(usize, Vec<&str>)> = Vec::new();
    for ranks in [2, 3] {
        runs.extend(["0", "1", "2", "3"].map(|stage| (ranks, vec!["--stage", stage, "--eval", "6"])));
        runs.push((ranks, vec!["--config", &lean, "--eval", "6"]));
    }
    runs.push((2, vec!["--stage", "2", "--dtype", "bf16", "--accumulation", "2"]));
    runs.push((2, vec!["--config", &lean, "--accumulation", "2"]));
    runs.push((2, vec!["--stage", "3", "--offload", "all", "--swap", &swap]));
    runs.push((2, vec!["--config", &codes]));
    // Within groups, and across them.
    runs.extend(["1", "3"].map(|stage| (4, vec!["--stage", stage, "--shard-size", "2"])));
    runs.push((4, vec!["--config", &codes_in_groups]));
    for (place, (ranks, options)) in runs.iter().enumerate() {
        let options: Vec<&str> = options.iter().copied().chain(["--steps", "4"]).collect();
        let (ours, theirs) = (dir.path().join(format!("threads-{place}")), dir.path().join(format!("process-{place}")));
        threads(*ranks, dir.path(), &ours, &options);
        good(&processes(*ranks, dir.path(), &theirs, &[&options[..], &["--gathers", "collective"]].concat()));
        assert_eq!(trajectory(&theirs), trajectory(&ours), "{ranks} ranks, {options:?}");
        // Before an update each rank tells the others in 192 bytes what it has called. Pieces are equally long: 3 ranks, which do
        // not divide all parameters, receive filler. What is kept is gathered before the first step, not in it.
        let (told, others) = (192 * (*ranks as u64 - 1), if *ranks == 2 { 0 } else { 120 });
        for (at, (here, there)) in wire(&ours).into_iter().zip(wire(&theirs)).enumerate() {
            let of = |step: &Value, kind: &str| step[kind].as_u64().unwrap();
            for kind in ["reduce_scatter", "all_reduce", "broadcast"] {
                assert_eq!(of(&there, kind), of(&here, kind), "{kind}, {ranks} ranks, {options:?}");
            }
            let (here, there) = (of(&here, "all_gather"), of(&there, "all_gather") - told);
            assert!(
                at < *ranks || (here..=here + others).contains(&there),
                "bytes of gathers, {ranks} ranks, {options:?}: {there}, {here}"
            );
        }
        assert_same_checkpoint([&ours, &theirs], "step-00000004");
    }
    let mut command = Command::new(ZERO);
    command.arg("train");
    small(&mut command, dir.path(), &dir.path().join("run"), &["--ranks", "2", "--gathers", "collective"]);
    let output = finish(vec![begin(&mut command)]).swap_remove(0);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output).contains("--gathers with ranks that are threads: expected ranks that are processes"),
        "{}",
        text(&output)
    );
}

#[test]
fn a_killed_rank_ends_the_other_which_names_it() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let run = dir.path().join("run");
    let port = free_port();
    let mut children: Vec<Child> = (0..2)
        .map(|place| {
            let mut command = rank(place, 2, port);
            let endless = ["--stage", "3", "--steps", "100000", "--save-every", "5", "--deadline", "60"];
            small(&mut command, dir.path(), &run, &endless);
            begin(&mut command)
        })
        .collect();
    let started = Instant::now();
    while !run.join("checkpoints/latest").exists() {
        let ended = children.iter_mut().any(|child| child.try_wait().unwrap().is_some());
        if ended || started.elapsed() > LIMIT {
            children.iter_mut().for_each(|child| drop(child.kill()));
            let told: Vec<_> = finish(children).iter().map(text).collect();
            panic!("no checkpoint after {:?}: {told:?}", started.elapsed());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    children[1].kill().unwrap();
    let killed = Instant::now();
    let outputs = finish(children);
    let told = text(&outputs[0]);
    assert_eq!(outputs[0].status.code(), Some(1), "{told}");
    assert!(
        told.contains("rank 1 of 2: its connection ended; check whether its process and its machine still run"),
        "{told}"
    );
    assert!(killed.elapsed() < Duration::from_secs(15), "far from the deadline: {:?}", killed.elapsed());
}

#[test]
fn a_signal_to_one_rank_ends_all_after_the_same_step() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let (run, whole) = (dir.path().join("run"), dir.path().join("whole"));
    for (place, options) in [&["--stage", "3"][..], &["--stage", "1", "--gathers", "collective"]].iter().enumerate() {
        let (run, whole) = (run.join(place.to_string()), whole.join(place.to_string()));
        let port = free_port();
        let mut children: Vec<Child> = (0..2)
            .map(|place| {
                let mut command = rank(place, 2, port);
                let endless = ["--steps", "100000", "--deadline", "60"];
                small(&mut command, dir.path(), &run, &[options, &endless[..]].concat());
                begin(&mut command)
            })
            .collect();
        let mut said = Said::of(&mut children[0]);
        said.until("step 10/");
        // The one that prints nothing.
        signal(&children[1], "TERM");
        let told = said.rest().to_string();
        for output in finish(children) {
            assert_eq!(output.status.code(), Some(143), "{told}: {}", text(&output));
        }
        let step = ended_after("SIGTERM", &told);
        assert!(run.join(format!("checkpoints/step-{step:08}/manifest.json")).exists(), "{told}");
        let (steps, mut rest) = ((step + 6).to_string(), options.to_vec());
        rest.extend(["--steps", &steps]);
        good(&processes(2, dir.path(), &run, &[&rest[..], &["--resume", "auto"]].concat()));
        good(&processes(2, dir.path(), &whole, &rest));
        assert_eq!(trajectory(&run), trajectory(&whole), "after step {step}");
    }
}

#[test]
fn ranks_that_do_not_find_each_other_say_why() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let run = dir.path().join("run");
    let job = |places: &[(usize, usize, &str)]| -> Vec<(Option<i32>, String)> {
        let port = free_port();
        let start = |&(place, ranks, local): &(usize, usize, &str)| {
            let mut command = rank(place, ranks, port);
            small(command.env("LOCAL_RANK", local), dir.path(), &run, &["--steps", "3", "--deadline", "3"]);
            begin(&mut command)
        };
        let outputs = finish(places.iter().map(start).collect());
        outputs.iter().map(|output| (output.status.code(), text(output))).collect()
    };
    // A rank that was not started. Trying again may help.
    let told = job(&[(0, 3, "0"), (1, 3, "1")]);
    assert_eq!(told[0].0, Some(75), "{told:?}");
    assert!(told[0].1.contains("for rank(s) [2], which did not connect"), "{told:?}");
    assert!(told[1].1.contains("rank 0 ended or timed out before all ranks had connected"), "{told:?}");
    // Settings that differ.
    let told = job(&[(0, 2, "0"), (1, 3, "1")]);
    assert_eq!(told[1].0, Some(2), "{told:?}");
    assert!(told[1].1.contains("its WORLD_SIZE is 3, rank 0's is 2; give all ranks the same"), "{told:?}");
    assert!(told[0].1.contains("its WORLD_SIZE is 3, rank 0's is 2"), "{told:?}");
    // One local rank for two.
    for (code, told) in job(&[(0, 2, "0"), (1, 2, "0")]) {
        assert_eq!(code, Some(2), "{told}");
        assert!(told.contains("ranks 0 and 1 are both on") && told.contains("LOCAL_RANK 0"), "{told}");
    }
    assert!(!run.join("out/metrics.jsonl").exists());
}

#[test]
fn a_bad_environment_is_one_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let run = dir.path().join("run");
    let told = |variable: &str, value: Option<&str>| {
        let mut command = rank(0, 2, free_port());
        match value {
            Some(value) => command.env(variable, value),
            None => command.env_remove(variable),
        };
        small(&mut command, dir.path(), &run, &["--steps", "3"]);
        let output = finish(vec![begin(&mut command)]).remove(0);
        assert_eq!(output.status.code(), Some(2), "{}", text(&output));
        text(&output)
    };
    let error = told("MASTER_ADDR", None);
    assert_eq!(error.trim().lines().count(), 1, "{error}");
    assert!(error.contains("MASTER_ADDR: expected the name or address of rank 0's machine, got nothing"), "{error}");
    let error = told("RANK", Some("2"));
    assert!(error.contains("RANK: expected a number below WORLD_SIZE (2), got '2'"), "{error}");
    assert!(!run.join("out").exists());
}

#[test]
fn bad_input_and_settings_that_differ_end_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let run = dir.path().join("run");
    for options in [&["--ranks", "3"][..], &["--stage", "7"], &["--data", "/nowhere"]] {
        for output in processes(2, dir.path(), &run, &[options, &["--steps", "3"]].concat()) {
            assert_eq!(output.status.code(), Some(2), "{options:?}: {}", text(&output));
        }
    }
    let port = free_port();
    let children = ["1", "2"].iter().enumerate().map(|(place, seed)| {
        let mut command = rank(place, 2, port);
        small(&mut command, dir.path(), &run, &["--steps", "3", "--seed", seed]);
        begin(&mut command)
    });
    let outputs = finish(children.collect());
    assert!(outputs.iter().all(|output| output.status.code() == Some(2)), "{outputs:?}");
    // Others than rank 0 write to a file of their own by then.
    let log = std::fs::read_to_string(run.join("out/logs/rank-00001.log")).unwrap();
    for told in [text(&outputs[0]), log] {
        assert!(told.contains("ranks were started with different settings") && told.contains("seed"), "{told}");
    }
    assert!(!run.join("out/metrics.jsonl").exists());
}

/// `zero launch` without an MPI launcher.
fn launch(options: &[&str]) -> Command {
    let mut command = Command::new(ZERO);
    command.args(["launch", "--sockets"]).args(options);
    command
}

#[test]
fn launched_ranks_meet_over_sockets_and_end_as_one() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let (ours, theirs) = (dir.path().join("threads"), dir.path().join("launched"));
    let options = ["--stage", "3", "--steps", "4"];
    threads(2, dir.path(), &ours, &options);
    let mut command = launch(&["--ranks", "2", "--", "train"]);
    small(&mut command, dir.path(), &theirs, &options);
    let output = finish(vec![begin(&mut command)]).swap_remove(0);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!((trajectory(&theirs).len(), trajectory(&theirs)), (4, trajectory(&ours)));
    // They have a secret, of which nothing is said.
    let told = text(&output);
    assert!(told.contains("RANK=1") && !told.contains("ZERO_SECRET"), "{told}");
    // What is wrong on every rank is not tried again, and has its own exit code.
    let mut command = launch(&["--ranks", "2", "--max-restarts", "3", "--", "train"]);
    small(&mut command, dir.path(), &theirs, &["--stage", "7"]);
    let output = finish(vec![begin(&mut command)]).swap_remove(0);
    assert!(output.status.code() == Some(2) && !text(&output).contains("restart 1"), "{}", text(&output));
    // Settings for an MPI launcher are not dropped.
    let output = finish(vec![begin(&mut launch(&["--ranks", "2", "--cores", "2", "--", "train"]))]).swap_remove(0);
    assert!(output.status.code() == Some(2) && text(&output).contains("cannot be used with"), "{}", text(&output));
    let output = finish(vec![begin(&mut launch(&["--", "train"]))]).swap_remove(0);
    assert!(output.status.code() == Some(2) && text(&output).contains("give --ranks N"), "{}", text(&output));
}

#[test]
fn a_launched_job_that_loses_a_rank_goes_on_from_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let (unbroken, run) = (dir.path().join("unbroken"), dir.path().join("run"));
    let options = ["--stage", "3", "--steps", "60", "--save-every", "5"];
    threads(2, dir.path(), &unbroken, &options);
    let told = lose_a_rank(dir.path(), &run, &["--ranks", "2"], &options);
    assert!(told.contains("restart 1 of 1, from the last intact checkpoint"), "{told}");
    assert_eq!(trajectory(&run), trajectory(&unbroken));
    // On fewer ranks, and at another mesh, with as many rows in a step.
    let options = ["--stage", "3", "--steps", "30", "--save-every", "5", "--accumulation", "3"];
    without_dropout(dir.path());
    let unbroken = dir.path().join("unbroken-4");
    threads(4, dir.path(), &unbroken, &options);
    for (fewer, mesh, taken) in [
        ("3", "--shard-size", "all of them"),
        ("3", "--secondary-shard-size", "all of them"),
        ("2", "--shard-size", ""),
    ] {
        let run = dir.path().join(format!("{fewer}{mesh}"));
        let options = [&options[..], &[mesh, "2"]].concat();
        let told = lose_a_rank(dir.path(), &run, &["--ranks", "4", "--restart-ranks", fewer], &options);
        let notice = format!("{mesh} 2 does not divide the {fewer} ranks of this restart: using {taken}");
        assert_eq!(told.matches(&notice).count(), usize::from(!taken.is_empty()), "{told}");
        assert!(!told.contains("rows per step"), "{told}");
        if mesh == "--secondary-shard-size" {
            // Of a model of its own.
            assert_eq!(trajectory(&run).len(), 30);
        } else {
            assert_same_losses(&run, &unbroken);
        }
    }
}

/// Disables dropout: masks depend on the ranks.
fn without_dropout(inputs: &Path) {
    for model in ["model", "wide"] {
        let path = inputs.join(model).join("config.json");
        let config = std::fs::read_to_string(&path).unwrap().replace("0.1", "0.0");
        std::fs::write(path, config).unwrap();
    }
}

/// Checks that two runs have the same losses, except for the order in which ranks are summed.
fn assert_same_losses(run: &Path, unbroken: &Path) {
    let losses = |run: &Path| -> Vec<f64> { trajectory(run).iter().map(|step| step[1].parse().unwrap()).collect() };
    let (ours, theirs) = (losses(run), losses(unbroken));
    assert!(ours.len() == theirs.len() && theirs.len() >= 30);
    for (step, (ours, theirs)) in ours.into_iter().zip(theirs).enumerate() {
        assert!((ours - theirs).abs() <= 1e-5 * theirs, "step {}: {ours} and {theirs}", step + 1);
    }
}

#[test]
fn restarts_on_fewer_ranks_keep_the_rows_of_a_step() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    without_dropout(dir.path());
    let file = dir.path().join("fixed.json");
    let sizes = r#""train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2"#;
    std::fs::write(&file, format!(r#"{{{sizes}, "gradient_clipping": 1.0, "zero_optimization": {{"stage": 2}}}}"#))
        .unwrap();
    let options = ["--config", file.to_str().unwrap(), "--steps", "60", "--save-every", "5", "--accumulation", "2"];
    let (unbroken, run) = (dir.path().join("unbroken"), dir.path().join("run"));
    threads(2, dir.path(), &unbroken, &options);
    lose_a_rank(dir.path(), &run, &["--ranks", "2", "--restart-ranks", "1"], &options);
    assert_same_losses(&run, &unbroken);
    // What cannot keep them is refused before anything is trained.
    let run = dir.path().join("refused");
    let mut command = launch(&["--ranks", "2", "--max-restarts", "1", "--restart-ranks", "3", "--", "train"]);
    small(&mut command, dir.path(), &run, &options);
    let output = finish(vec![begin(&mut command)]).swap_remove(0);
    let told = text(&output);
    assert!(output.status.code() == Some(2) && told.contains("divides the 8 rows of a step"), "{told}");
    assert!(!run.join("out/metrics.jsonl").exists());
    // By hand nothing is changed in silence.
    let mut command = Command::new(ZERO);
    command.args(["train", "--ranks", "1", "--resume", "auto"]);
    small(&mut command, dir.path(), &dir.path().join("run"), &["--steps", "61"]);
    let output = finish(vec![begin(&mut command)]).swap_remove(0);
    let told = text(&output);
    assert!(output.status.success() && told.contains("with 8 rows per step, but this run has 2"), "{told}");
}

/// Launches a training, kills its last rank once there is a checkpoint, and returns the output after its successful end.
fn lose_a_rank(inputs: &Path, run: &Path, ranks: &[&str], options: &[&str]) -> String {
    let mut command = launch(&[ranks, &["--max-restarts", "1", "--", "train"]].concat());
    small(&mut command, inputs, run, options);
    let job = begin(&mut command);
    let started = Instant::now();
    while !run.join("checkpoints/latest").exists() {
        assert!(started.elapsed() < LIMIT, "no checkpoint");
        std::thread::sleep(Duration::from_millis(5));
    }
    let ranks = Command::new("pgrep").args(["-P", &job.id().to_string()]).output().unwrap();
    let ranks = String::from_utf8(ranks.stdout).unwrap();
    assert!(ranks.lines().count() >= 2, "{ranks}");
    assert!(Command::new("kill").args(["-KILL", ranks.lines().last().unwrap()]).status().unwrap().success());
    let output = finish(vec![job]).swap_remove(0);
    assert!(output.status.success(), "{}", text(&output));
    text(&output)
}

#[test]
fn a_launcher_that_is_asked_to_end_lets_its_ranks_save() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let (run, temporary) = (dir.path().join("run"), dir.path().join("tmp"));
    std::fs::create_dir(&temporary).unwrap();
    let mut command = launch(&["--ranks", "2", "--max-restarts", "3", "--", "train"]);
    small(&mut command, dir.path(), &run, &["--steps", "100000"]);
    let mut child = begin(command.env("TMPDIR", &temporary));
    let mut said = Said::of(&mut child);
    said.until("step 10/");
    signal(&child, "TERM");
    let told = said.rest().to_string();
    assert_eq!(child.wait().unwrap().code(), Some(143), "{told}");
    let step = ended_after("SIGTERM", &told);
    assert!(
        run.join(format!("checkpoints/step-{step:08}/manifest.json")).exists() && !told.contains("restart"),
        "{told}"
    );
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0, "nothing is left behind");
}

/// Each launcher of a multi-machine job counts its own restarts.
#[test]
fn ranks_of_different_attempts_go_on_together() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let (run, unbroken) = (dir.path().join("run"), dir.path().join("unbroken"));
    good(&processes(2, dir.path(), &run, &["--steps", "4"]));
    let port = free_port();
    let children = (0..2).map(|place| {
        let mut command = rank(place, 2, port);
        small(&mut command, dir.path(), &run, &["--steps", "8"]);
        begin(command.env("ZERO_RESTARTS", if place == 0 { "1" } else { "0" }).env("ZERO_LAUNCHED_UNIX_MS", "1"))
    });
    for output in finish(children.collect()) {
        assert!(output.status.success(), "{}", text(&output));
    }
    threads(2, dir.path(), &unbroken, &["--steps", "8"]);
    assert_eq!(trajectory(&run), trajectory(&unbroken));
}

#[test]
fn a_large_text_is_cut_once_for_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    texts::labelled(dir.path());
    let text = std::fs::read_to_string(dir.path().join("text.txt")).unwrap();
    std::fs::write(dir.path().join("large.txt"), text.repeat((17 << 20) / text.len())).unwrap();
    let (port, ranks) = (free_port(), 3);
    let start = |place: usize| {
        let mut command = rank(place, ranks, port);
        command.current_dir(dir.path()).args(["--model", "model", "--tokenizer", "tok", "--data", "large.txt"]);
        begin(command.args(["--token-cache", "cache", "--seq", "8", "--steps", "2", "--threads", "1", "--json"]))
    };
    let outputs = finish((0..ranks).map(start).collect());
    good(&outputs);
    let cuts = outputs.iter().filter(|output| self::text(output).contains("(once; later runs read this file)")).count();
    let kept = std::fs::read_dir(dir.path().join("cache")).unwrap().count();
    assert_eq!((cuts, kept), (1, 1), "one makes the tokens, the others find them");
}

/// Two "machines", each of which starts its half of the ranks that an Accelerate file asks for.
#[test]
fn machines_of_an_accelerate_file_start_their_shares() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let (ours, theirs) = (dir.path().join("threads"), dir.path().join("launched"));
    let file = dir.path().join("accelerate.yaml");
    let yaml = format!(
        "distributed_type: MULTI_CPU\nmixed_precision: bf16\nnum_processes: 2\nnum_machines: 2\nmachine_rank: 0\n\
         main_process_ip: 127.0.0.1\nmain_process_port: {}\n",
        free_port()
    );
    std::fs::write(&file, yaml).unwrap();
    let options = ["--stage", "2", "--steps", "4"];
    threads(2, dir.path(), &ours, &[&options[..], &["--dtype", "bf16"]].concat());
    let machine = |more: &[&str]| {
        let mut command = Command::new(ZERO);
        command.arg("launch").arg("--config-file").arg(&file).args(more).args(["--", "train"]);
        small(&mut command, dir.path(), &theirs, &options);
        begin(&mut command)
    };
    // Here both are on one, where two ranks that are both its first are a mistake.
    let second = ["--machine-rank", "1", "--env", "LOCAL_RANK=1", "--env", "LOCAL_WORLD_SIZE=2"];
    good(&finish(vec![machine(&[]), machine(&second)]));
    assert_eq!((trajectory(&theirs).len(), trajectory(&theirs)), (4, trajectory(&ours)));
    let output = finish(vec![machine(&["--machine-rank", "2"])]).swap_remove(0);
    assert!(output.status.code() == Some(2) && text(&output).contains("expected one from 0 to 1, got 2"));
}

#[test]
fn ranks_that_other_machines_reach_need_a_secret() {
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path());
    let run = dir.path().join("run");
    // An address for documentation: nothing is there.
    let far = |more: &[&str], secret: &str| {
        let mut command = rank(1, 2, free_port());
        command.env("MASTER_ADDR", "192.0.2.1").env("ZERO_SECRET", secret);
        if secret.is_empty() {
            command.env_remove("ZERO_SECRET");
        }
        small(&mut command, dir.path(), &run, &[&["--steps", "3", "--deadline", "0.2"], more].concat());
        let output = finish(vec![begin(&mut command)]).swap_remove(0);
        (output.status.code(), text(&output))
    };
    let (code, told) = far(&[], "");
    assert!(code == Some(2) && told.contains("has no ZERO_SECRET") && told.contains("--trusted-network"), "{told}");
    assert_eq!(told.trim().lines().count(), 1, "{told}");
    let (code, told) = far(&[], "hunter2");
    assert!(code == Some(2) && told.contains("ZERO_SECRET: expected at least 16 characters, got 7"), "{told}");
    for (more, secret) in [(&["--trusted-network"][..], ""), (&[], "0123456789abcdef")] {
        let (code, told) = far(more, secret);
        assert!(code == Some(75) && told.contains("could not reach rank 0"), "{told}");
    }
}
