//! cargo test -p zero-train-cli --test train trainer
//!
//! Guarantees for a custom task.

use std::path::Path;
use std::sync::Mutex;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use zero_train::TrainError;
use zero_train::trainer::{FusedBackend, Hyperparameters, Measured, Options, Result, Rows, Summary, Task, Trainer};

const ROWS: usize = 37;

/// Records the rows that it gets.
#[derive(Default)]
struct Recorder {
    trained: Mutex<Vec<usize>>,
    evaluated: Mutex<Vec<usize>>,
    held_out: usize,
    /// A row that cannot be read.
    unreadable: Option<usize>,
    measures_nothing: bool,
}

impl Task for Recorder {
    type Model<B: FusedBackend> = Linear<B>;

    fn rows(&self) -> usize {
        ROWS
    }

    fn held_out(&self) -> usize {
        self.held_out
    }

    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Linear<B>> {
        Ok(LinearConfig::new(2, 2).init(device))
    }

    fn loss<B: FusedBackend>(&self, model: &Linear<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        if let Some(&row) = rows.iter().find(|&&row| Some(row) == self.unreadable) {
            return Err(TrainError::Data { path: "rows".into(), problem: format!("row {row} cannot be read") });
        }
        // What a model takes is counted on another backend, before.
        if B::name(device).contains("zero") {
            self.trained.lock().unwrap().extend(rows);
        }
        Ok(model.forward(Tensor::<B, 2>::ones([rows.len(), 2], device)).powi_scalar(2).mean())
    }

    fn evaluate<B: FusedBackend>(&self, _: &Linear<B>, rows: &Rows, _: &B::Device) -> Result<Measured> {
        self.evaluated.lock().unwrap().extend(rows);
        let mean = rows.iter().sum::<usize>() as f64 / rows.len() as f64;
        Ok(if self.measures_nothing { Vec::new() } else { vec![("loss", mean), ("half", mean / 2.0)] })
    }
}

fn options(dir: &Path, ranks: usize, batch: usize, steps: usize) -> Options {
    Options {
        ranks: Some(ranks),
        steps,
        threads: Some(1),
        json: true,
        save: Some(dir.join("checkpoints")),
        resume: Some("auto".into()),
        out: Some(dir.join("out")),
        hyper: Hyperparameters { batch: Some(batch), ..Hyperparameters::default() },
        ..Options::default()
    }
}

fn run(task: &Recorder, options: &Options) -> std::result::Result<Summary, String> {
    let summary = Trainer::new(options).run(task).map_err(|error| error.to_string())?;
    Ok(summary.expect("there were steps to train"))
}

#[test]
fn every_row_is_trained_on_once_an_epoch_over_a_resume_at_other_ranks() {
    for shuffle in [true, false] {
        let (dir, task) = (tempfile::tempdir().unwrap(), Recorder::default());
        let part = |ranks, batch, steps| {
            let options = Options { shuffle: Some(shuffle), ..options(dir.path(), ranks, batch, steps) };
            run(&task, &options).unwrap();
            task.trained.lock().unwrap().clone()
        };
        // 5 steps of 2 x 2 rows, 10 of 3 x 1, 4 of 1 x 6: 74 rows, twice the data.
        let first = part(2, 2, 5);
        assert_eq!(first.len(), 20);
        let first_epoch = {
            let mut rows = part(3, 1, 5 + 10);
            assert_eq!(rows.len(), 50);
            // Whole steps: threads write theirs down in any order.
            rows.truncate(35);
            rows
        };
        let mut distinct = first_epoch.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), 35, "no row twice in an epoch");
        assert_eq!(distinct == (0..35).collect::<Vec<_>>(), !shuffle);
        let mut all = part(1, 6, 5 + 10 + 4);
        all.sort_unstable();
        assert!(all.iter().copied().eq((0..ROWS).flat_map(|row| [row, row])), "each row once in each epoch");
    }
}

#[test]
fn every_row_that_is_held_out_counts_once() {
    for (ranks, batch) in [(1, 5), (2, 3), (3, 4), (4, 1)] {
        let task = Recorder { held_out: 7, ..Recorder::default() };
        let dir = tempfile::tempdir().unwrap();
        let summary = run(&task, &options(dir.path(), ranks, batch, 1)).unwrap();
        let eval = summary.epochs[0].eval.clone().unwrap();
        // The mean of 30 to 36.
        assert_eq!(eval, [("loss".to_string(), 33.0), ("half".to_string(), 16.5)], "{ranks} ranks of {batch}");
        assert!(task.trained.lock().unwrap().iter().all(|&row| row < 30));
    }
}

#[test]
fn trouble_of_a_task_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let task = Recorder { unreadable: Some(9), ..Recorder::default() };
    let told = run(&task, &options(dir.path(), 2, 1, 30)).unwrap_err();
    assert!(told.contains("row 9 cannot be read"), "{told}");
    let task = Recorder { held_out: 2, measures_nothing: true, ..Recorder::default() };
    let told = run(&task, &options(&dir.path().join("other"), 2, 1, 1)).unwrap_err();
    assert!(told.contains("`evaluate` returned no values"), "{told}");
    assert!(task.trained.lock().unwrap().is_empty(), "it is found before the first step");
}
