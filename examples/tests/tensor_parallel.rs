//! Tensor parallelism within ZeRO: a model split over an axis has the losses of the full one, on threads and processes.

#[path = "../../zero-core/tests/common/port.rs"]
mod port;

use std::path::Path;
use std::process::{Command, Stdio};

/// The example that `cargo test` builds together with this test.
fn tensor_parallel(options: &[&str]) -> Command {
    let deps = std::env::current_exe().expect("a test has a path");
    let target = deps.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    let mut command = Command::new(target.join("examples").join("tensor_parallel"));
    command.args(["--steps", "4"]).args(options).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn told(command: &mut Command) -> String {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Losses and gradient norms.
fn numbers(text: &str) -> Vec<f64> {
    let words = text.split([' ', ',', '\n']).filter_map(|word| word.parse().ok());
    let numbers: Vec<f64> = words.collect();
    assert_eq!(numbers.len(), 4 * 2, "{text}");
    numbers
}

#[test]
fn losses_are_those_of_the_data_axis_alone_at_all_stages() {
    let whole = numbers(&told(&mut tensor_parallel(&["--tensor", "1", "--stage", "0"])));
    assert!(whole[6] < whole[0], "the loss does not fall: {whole:?}");
    for stage in ["0", "1", "2", "3"] {
        let cut = numbers(&told(&mut tensor_parallel(&["--tensor", "2", "--stage", stage])));
        for (whole, cut) in whole.iter().zip(&cut) {
            assert!((whole - cut).abs() <= 1e-5 * whole, "stage {stage}: {cut} for {whole}");
        }
    }
}

#[test]
fn ranks_that_are_processes_give_the_same_bits() {
    let options = ["--width", "96", "--stage", "3"];
    let threads = told(&mut tensor_parallel(&options));
    let port = port::free_port().to_string();
    let begin = |rank: usize| {
        let rank = rank.to_string();
        let mut command = tensor_parallel(&options);
        command.envs([("RANK", &*rank), ("LOCAL_RANK", &rank), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]).spawn().unwrap()
    };
    let children: Vec<_> = (0..4).map(begin).collect();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    for (rank, done) in outputs.iter().enumerate() {
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert_eq!(String::from_utf8_lossy(&done.stdout), if rank == 0 { &*threads } else { "" });
    }
}

#[test]
fn parts_that_do_not_come_out_even_are_refused() {
    let done = tensor_parallel(&["--tensor", "5"]).output().unwrap();
    assert_eq!(done.status.code(), Some(2));
    let told = String::from_utf8_lossy(&done.stderr);
    assert_eq!(told, "error: --tensor 5: expected a number that divides the 3072 columns of a block\n");
}
