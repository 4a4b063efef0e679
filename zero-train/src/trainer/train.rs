//! The training loop of each rank.

use std::sync::Mutex;

use serde_json::Map;
use zero_core::alloc::PageKeeper;

use super::Task;
use super::checkpoints::{DataPosition, EpochState, TrainerState, other_batch};
use super::integration::{Integration, RankEngine};
use super::observer::Observer;
use super::plan::Plan;
use super::ranks::Ranks;
use super::training::{Measured, Training, reference_of};
use crate::error::{Result, TrainError, wrong_data};
use crate::monitor::Phase;
use crate::signals::Watch;
use crate::step::EngineError;

/// Trains by the plan, and returns the measurements.
///
/// `allocator` is the process's allocator.
pub(super) fn train<T: Task, F: Integration<T>>(
    integration: &F,
    task: &T,
    plan: &Plan,
    ranks: &Ranks<'_>,
    allocator: Option<&PageKeeper>,
) -> Result<Measured> {
    plan.checkpoints.prepare()?;
    if let Some(out) = plan.save_16bit.as_ref().filter(|out| out.exists()) {
        let problem =
            "already exists, and this run would save its 16-bit model there: move it away, or use another --out";
        return Err(wrong_data(out, problem));
    }
    let observer = ranks.is_main().then(|| Observer::new(plan).map(Mutex::new)).transpose()?;
    let watch = Watch::begin(ranks.is_main());
    let _watch = watch.map_err(|error| TrainError::Run(format!("cannot install signal handlers: {error}")))?;
    let run = plan.run(ranks)?;
    integration.launch(task, &run, |engine| run_rank(task, engine, plan, observer.as_ref(), allocator))
}

fn run_rank(
    task: &impl Task,
    engine: &mut dyn RankEngine,
    plan: &Plan,
    observer: Option<&Mutex<Observer<'_>>>,
    allocator: Option<&PageKeeper>,
) -> Result<Measured> {
    // Rank 0 alone prints and writes.
    let observer = observer.filter(|_| engine.rank() == 0);
    let say =
        |line: &str| observer.into_iter().for_each(|observer| observer.lock().expect("of rank 0 alone").say(line));
    let (state, warnings) = begin(plan)?;
    let done = state.step;
    // The initial model measures rows before the model of the checkpoint replaces it.
    let reference = reference_of(plan, &state, engine, say)?;
    if let Some(checkpoint) = &plan.checkpoints.resume {
        engine.load(checkpoint)?;
    }
    let mut training = Training::new(task, engine, plan, observer, allocator, state, reference);
    for warning in warnings {
        training.observe(|observer| observer.warn(done, &warning));
    }
    training.phase(Phase::Train);
    training.try_evaluation()?;
    while training.step()? {}
    training.finish()
}

/// Returns the initial state, fresh or that of the checkpoint, and the warnings to report.
fn begin(plan: &Plan) -> Result<(TrainerState, Vec<String>)> {
    let batch = plan.plan.batch.global;
    let data = DataPosition::first(&plan.data, batch);
    let Some(checkpoint) = &plan.checkpoints.resume else {
        return Ok((TrainerState { step: 0, data, epoch: EpochState::first(), best: None }, Vec::new()));
    };
    let loaded = checkpoint.state().map_err(EngineError::Checkpoint)?;
    let mut state = TrainerState::loaded(loaded.as_object().unwrap_or(&Map::new()), checkpoint)?;
    let warning = state.data.differs_from(&data);
    if warning.is_some() {
        state.data.used = 0;
        state.epoch = EpochState { number: state.epoch.number, ..EpochState::first() };
    }
    let other = other_batch(state.data.batch, batch);
    state.data = DataPosition { used: state.data.used, ..data };
    Ok((state, warning.into_iter().chain(other).collect()))
}
