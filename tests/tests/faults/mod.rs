//! Failures of ranks that run as processes: every rank detects every kind in time, and nothing hangs.
//!
//! `cargo test -p zero-tests --test socket_faults -- --nocapture`, or `--features mpi --test mpi_faults`, prints the
//! fault and the victim of each run; `ZERO_FAULT_RUNS` sets the number of runs per kind.
//!
//! A run trains a small GPT-2 with the engine on 2 to 4 ranks. One of them, the *victim*, kills itself, stops, or
//! deviates from the others, at a random moment of each run.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::process_common::{Launched, launch, note, note_pid, rank_of};
use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use zero_burn::config::ZeroConfig;
use zero_burn::launch::{LaunchError, LaunchOptions, launch as launch_ranks};
use zero_burn::optim::{Fused, Rule};
use zero_burn::{Zero, ZeroDevice, ranks};
use zero_core::checkpoint::{Check, SaveOptions, find_latest};
use zero_core::collective::exit::{code, code_of, end_process};
use zero_core::collective::flight;
use zero_core::collective::launcher::Start;
use zero_core::{CommError, OperationCall, RankFailure, Stage};
use zero_models::{Gpt2, Gpt2Config};
use zero_train::engine::{EngineConfig, ZeroEngine};

type B = Autodiff<Zero<Flex>>;
type Device = ZeroDevice<burn_flex::FlexDevice>;

/// Maximum time a rank waits for another.
const DEADLINE: Duration = Duration::from_secs(2);
/// Maximum time from the fault to the end of the last process: the deadline, plus the allowance for a rank that dies.
const FOUND_WITHIN: Duration = Duration::from_secs(2 + 10);
/// Time limit of a full run.
const LIMIT: Duration = Duration::from_secs(60);
/// Differences of the victim from the other ranks: a wider or a deeper model, other settings of the decorator or of the engine.
const ODD: [&str; 5] = ["model", "depth", "bucket", "mesh", "clipping"];
/// Number of steps; the fault occurs long before the last one.
const STEPS: usize = 40;

fn runs() -> usize {
    std::env::var("ZERO_FAULT_RUNS").map_or(2, |runs| runs.parse().expect("ZERO_FAULT_RUNS is a number"))
}

/// Returns a random number below `end`: every hasher has a random seed.
fn chance(end: u64) -> u64 {
    RandomState::new().build_hasher().finish() % end
}

fn micros() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros()
}

// ---- the rank ----

/// The fault of the victim, and its time.
struct Fault {
    kind: String,
    victim: usize,
    step: usize,
    /// Time from the start of the phase.
    delay: Duration,
    stage: Stage,
}

impl Fault {
    fn parse(case: &str) -> Self {
        let words: Vec<&str> = case.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        Self {
            kind: words[0].to_string(),
            victim: number(1),
            step: number(2),
            delay: Duration::from_micros(number(3) as u64),
            stage: Stage::ALL[number(4)],
        }
    }

    /// Triggers the fault in this phase, after the delay, while the rank continues.
    fn strike(&self, phase: &str, step: usize, rank: usize, folder: &Path) {
        let Some((signal, of)) = self.kind.split_once('-') else { return };
        if (of, step, rank) != (phase, self.step, self.victim) {
            return;
        }
        let signal = if signal == "stop" { libc::SIGSTOP } else { libc::SIGKILL };
        let (delay, when) = (self.delay, folder.join("when"));
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            std::fs::write(when, micros().to_string()).unwrap();
            // SAFETY: sends this process a signal.
            unsafe { libc::kill(libc::getpid(), signal) };
        });
    }
}

#[test]
fn rank() {
    let Some((case, folder)) = rank_of() else { return };
    let fault = Fault::parse(&case);
    let place = Start::from_environment().unwrap().world().expect("the launcher has started several ranks");
    let (rank, world) = (place.rank, place.world);
    let odd = rank == fault.victim;
    let mut config = ZeroConfig::new(fault.stage);
    // Four ranks are two groups that shard.
    config.shard_size = (world == 4).then_some(2);
    if odd && fault.kind == "mesh" {
        config.shard_size = Some(1);
    }
    if odd && fault.kind == "bucket" {
        config.reduce_bucket_size /= 2;
    }
    if odd && ODD.contains(&fault.kind.as_str()) {
        std::fs::write(folder.join("when"), micros().to_string()).unwrap();
    }
    let flight_dir = Some(folder.clone());
    let options = LaunchOptions { deadline: DEADLINE, flight_dir, threads_per_rank: 1, ..LaunchOptions::default() };
    let result = launch_ranks::<Flex, _, String>(world, &config, &options, |device| train(&fault, &device, &folder));
    match result {
        Ok(_) => note(&folder, rank, "ok"),
        Err(error) => {
            note(&folder, rank, &error.to_string());
            match error {
                LaunchError::Process(failed) => failed.end_process(),
                _ => end_process(code::FAILURE),
            }
        }
    }
}

fn train(fault: &Fault, device: &Device, folder: &Path) -> Result<(), String> {
    let rank = device.rank();
    note_pid(folder, rank);
    let odd = rank == fault.victim;
    let width = if fault.kind == "model" && odd { 48 } else { 32 };
    let layers = if fault.kind == "depth" && odd { 3 } else { 2 };
    let model =
        Gpt2Config { n_embd: width, n_layer: layers, ..Gpt2Config::preset("tiny").map_err(|error| error.to_string())? };
    let clipping = if fault.kind == "clipping" && odd { Some(1.0) } else { None };
    let config = EngineConfig { accumulation: 2, clipping, ..EngineConfig::default() };
    let mut engine = ZeroEngine::initialize(model.init::<B>(device), Fused::new(Rule::adamw()), config, device)
        .map_err(|error| error.to_string())?;
    for step in 0..STEPS {
        std::fs::write(folder.join("trained"), "").unwrap();
        for micro in 0..2 {
            fault.strike("forward", step, rank, folder);
            let loss = engine.forward(|model: &Gpt2<B>| {
                let ids: Vec<i32> = (0..64).map(|i| ((i * (step + micro + 1) + rank) % 97) as i32).collect();
                model.loss(Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [2, 32]), device))
            });
            fault.strike("backward", step, rank, folder);
            engine.backward(loss);
            if micro == 1 {
                fault.strike("reduce", step, rank, folder);
                if fault.kind == "skip" && odd && step == fault.step {
                    std::fs::write(folder.join("when"), micros().to_string()).unwrap();
                } else if fault.kind == "skip" {
                    ranks::wait_for_everyone::<Flex>();
                }
            }
            fault.strike("step", step, rank, folder);
            engine.step().map_err(|error| error.to_string())?;
        }
        fault.strike("save", step, rank, folder);
        let options = SaveOptions { keep_last: std::num::NonZeroUsize::new(2), ..SaveOptions::default() };
        let saved = engine.save(&folder.join("checkpoints"), step as u64 + 1, Default::default(), &options);
        saved.map_err(|error| error.to_string())?;
    }
    Ok(())
}

// ---- the tests ----

/// Runs one kind of fault `runs()` times; `check` gets the outcome of each run.
fn repeat(kind: &str, most_delay_us: u64, mut check: impl FnMut(&Launched, usize)) {
    let (mut slowest, begin, runs) = (Duration::ZERO, Instant::now(), runs());
    for run in 0..runs {
        let ranks = [2, 4, 3][run % 3];
        let (victim, step) = (chance(ranks as u64) as usize, 1 + chance(4) as usize);
        // "reduce" is a phase of its own where gradients are held back.
        let stage = if kind.ends_with("reduce") { run % 2 } else { run % 4 };
        let case = format!("{kind} {victim} {step} {} {stage}", chance(most_delay_us.max(1)));
        let got = launch((super::LINK, "faults::rank"), &case, ranks, LIMIT, |_| {});
        let when = std::fs::read_to_string(got.folder.path().join("when"));
        let when: u128 = when.unwrap_or_else(|_| panic!("{case}: nothing happened\n{got:?}")).parse().unwrap();
        let took = Duration::from_micros((micros() - when) as u64);
        assert!(took < FOUND_WITHIN, "{case}: took {took:?}\n{got:?}");
        assert!(!matches!(got.code, Some(0)), "{case}: it went on\n{got:?}");
        slowest = slowest.max(took);
        check(&got, victim);
    }
    eprintln!(
        "{kind}: {runs} runs, all found; from the trouble to the end of all processes at most {:.1} s ({:.0} s in all)",
        slowest.as_secs_f64(),
        begin.elapsed().as_secs_f64()
    );
}

/// Checks that a checkpoint saved before the fault is intact.
fn last_save_is_sound(got: &Launched) {
    let dir = got.folder.path().join("checkpoints");
    if dir.exists() {
        let found = find_latest(&dir, Check::Contents).unwrap();
        assert!(found.skipped.is_empty(), "{:?}", found.skipped);
        assert!(found.checkpoint.is_some() || !dir.join("latest").exists());
    }
}

#[test]
fn a_killed_rank_ends_the_others() {
    for (phase, delay) in [("forward", 2_000), ("backward", 4_000), ("reduce", 2_000), ("step", 2_000), ("save", 4_000)]
    {
        repeat(&format!("kill-{phase}"), delay, |got, _| last_save_is_sound(got));
    }
}

#[test]
fn a_stopped_rank_is_found_by_the_deadline_and_named() {
    repeat("stop-backward", 4_000, |got, victim| {
        last_save_is_sound(got);
        assert_eq!(got.code, Some(code::WATCHDOG), "{got:?}");
        let others = (0..got.notes.len()).filter(|&rank| rank != victim);
        for rank in others {
            assert!(got.note(rank).contains("waited"), "{got:?}");
        }
        // mpirun wakes the victim before it ends it, so that it may still write a record of its own, in which it waits too.
        let survivors: Vec<_> =
            got.flights().into_iter().filter(|path| !path.ends_with(format!("flight-rank-{victim}.json"))).collect();
        let report = flight::merge(&survivors).unwrap();
        assert!(report.late.iter().any(|late| late.rank == victim), "{report}");
    });
}

#[test]
fn a_rank_that_skips_a_collective_is_found() {
    repeat("skip", 1, |got, victim| {
        last_save_is_sound(got);
        for rank in 0..got.notes.len() {
            let told = got.note(rank);
            // Where the others call a barrier, the victim calls what comes next; both are told, on every rank.
            let told_both = told.contains("barrier (wait_for_everyone)") && told.matches("called").count() >= 2;
            assert!(told_both, "rank {rank} of victim {victim}: {got:?}");
        }
    });
}

#[test]
fn ranks_with_different_models_or_settings_are_told_before_they_train() {
    for kind in ODD {
        repeat(kind, 1, |got, _| {
            assert!(!got.folder.path().join("trained").exists(), "{got:?}");
            for rank in 0..got.notes.len() {
                assert!(!got.note(rank).contains("waited"), "{got:?}");
            }
        });
    }
}

/// The errors that these tests expect also exist as values.
#[test]
fn a_deadline_has_an_exit_code_of_its_own() {
    let late = CommError::Timeout { at: OperationCall::new("world", 0, 0, "barrier"), waited_ms: 1, missing: vec![1] };
    let failure = Box::new(RankFailure::<String>::Comm(Box::new(late)));
    assert_eq!(code_of(&zero_core::LaunchError::Rank { rank: 0, world: 2, failure }), code::WATCHDOG);
    let failure = Box::new(RankFailure::Failed("else".to_string()));
    assert_eq!(code_of(&zero_core::LaunchError::Rank { rank: 0, world: 2, failure }), code::FAILURE);
}
