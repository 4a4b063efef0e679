//! `cargo test -p zero-train-cli --test train batch_law`; set `ZERO_SEED=N` for other rows and splits.
//!
//! The same rows give the same loss, norm, weights and held-out figures for any split into micro-batches and ranks: each mean
//! is over items (labels, masked tokens), and all items of an update or of the held-out rows have equal weight.

use std::path::Path;

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Int, Tensor, TensorData};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use zero_core::random::Draws;
use zero_models::loss::{IGNORED_LABEL, cross_entropy_with_ignored};
use zero_train::trainer::{FusedBackend, Hyperparameters, Options, Result, Rows, Task, Trainer};

use crate::common::texts::{self, json_lines, ok};

/// Rows of an update, and held-out rows; no number of ranks divides the latter.
const ROWS: usize = 12;
const HELD_OUT: usize = 13;

/// Rows per micro-batch, micro-batches, ranks, stage.
type Cut = [usize; 4];

const WHOLE: Cut = [ROWS, 1, 1, 0];

/// `ZERO_SEED=N` draws other rows, weights and splits.
fn seed() -> u64 {
    std::env::var("ZERO_SEED").map_or(44, |seed| seed.parse().unwrap())
}

/// Nine of all splits of an update's rows over 1 to 4 ranks at stages 0 to 3, at least one per number of ranks.
fn cuts(draws: &mut Draws) -> Vec<Cut> {
    let mut cuts = Vec::new();
    for ranks in 1..=4 {
        for accumulation in (1..=ROWS / ranks).filter(|parts| (ROWS / ranks).is_multiple_of(*parts)) {
            cuts.extend((0..4).map(|stage| [ROWS / ranks / accumulation, accumulation, ranks, stage]));
        }
    }
    draws.shuffle(&mut cuts);
    let first = (1..=4).map(|ranks| cuts.iter().position(|cut| cut[2] == ranks).unwrap());
    let first: Vec<usize> = first.collect();
    let others = (0..cuts.len()).filter(|at| !first.contains(at)).take(5);
    first.iter().copied().chain(others).map(|at| cuts[at]).collect()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * a.abs().max(1.0)
}

/// Loss and norm of each step, the held-out figures at the end, and all weights.
type Run = (Vec<[f64; 2]>, Vec<f64>, Vec<f32>);

#[track_caller]
fn assert_same(run: &Run, whole: &Run, cut: &str) {
    let (steps, figures, weights) = run;
    assert_eq!((steps.len(), figures.len(), weights.len()), (5, whole.1.len(), whole.2.len()));
    let steps = steps.iter().zip(&whole.0).all(|(a, b)| close(a[0], b[0]) && close(a[1], b[1]));
    let worst = weights.iter().zip(&whole.2).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let figures_agree = figures.iter().zip(&whole.1).all(|(a, b)| close(*a, *b));
    assert!(steps && figures_agree && worst <= 1e-6, "{cut}: weights {worst:e} off\n{run:?}\n{whole:?}");
}

fn numbers(path: &Path) -> Vec<[f64; 2]> {
    json_lines(path).iter().map(|step| ["loss", "grad_norm"].map(|key| step[key].as_f64().unwrap())).collect()
}

/// Runs the command.
fn trained(dir: &Path, task: &[&str], [micro, accumulation, ranks, stage]: Cut) -> Run {
    let (run, file) = (format!("{micro}-{accumulation}-{ranks}-{stage}"), sgd(dir, stage, 0.05));
    let [micro, accumulation, ranks, held_out] = [micro, accumulation, ranks, HELD_OUT].map(|n| n.to_string());
    let cut = ["--batch", &micro, "--accumulation", &accumulation, "--ranks", &ranks];
    let seed = seed().to_string();
    let how = ["--config", &file, "--steps", "5", "--eval", &held_out, "--seed", &seed];
    let summary = texts::train(dir, &run, &[task, &cut, &how]);
    let figures = summary["epochs"].as_array().unwrap().last().unwrap()["eval"].clone();
    let figures = figures.as_array().unwrap().iter().map(|figure| figure[1].as_f64().unwrap()).collect();
    (numbers(&dir.join(&run).join("out/metrics.jsonl")), figures, weights(dir, &run))
}

/// Returns all weights of a run's last checkpoint, ordered by name.
fn weights(dir: &Path, run: &str) -> Vec<f32> {
    ok(&["export", &format!("{run}/checkpoints"), &format!("{run}/hf"), "--dtype", "fp32"], dir);
    let bytes = std::fs::read(dir.join(run).join("hf/model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names();
    names.sort_unstable();
    let values = |name: &str| -> Vec<f32> { bytemuck::pod_collect_to_vec(tensors.tensor(name).unwrap().data()) };
    names.into_iter().flat_map(values).collect()
}

/// Writes a configuration with plain gradient descent: Adam would turn rounding errors of zero gradients into full steps.
fn sgd(dir: &Path, stage: usize, lr: f64) -> String {
    let name = format!("sgd-{stage}.json");
    let file = json!({
        "optimizer": { "type": "SGD", "params": { "lr": lr, "momentum": 0.9 } }, "zero_optimization": { "stage": stage },
    });
    std::fs::write(dir.join(&name), file.to_string()).unwrap();
    name
}

/// Checks all splits and returns the run with all rows in one micro-batch.
fn assert_law(draws: &mut Draws, run: impl Fn(Cut) -> Run) -> Run {
    let whole = run(WHOLE);
    for cut in cuts(draws) {
        assert_same(&run(cut), &whole, &format!("seed {}, {cut:?}", seed()));
    }
    whole
}

/// Disables dropout in `name/config.json`, because its draws depend on a rank's rows, and sets the number of positions.
fn without_dropout(dir: &Path, name: &str, positions: usize) {
    let path = dir.join(name).join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for key in ["dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"] {
        config[key] = json!(0.0);
    }
    config["max_position_embeddings"] = json!(positions);
    std::fs::write(path, config.to_string()).unwrap();
}

#[test]
fn texts_to_be_made_of_1_to_60_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    texts::labelled(dir);
    texts::bart(dir);
    without_dropout(dir, "bart", 80);
    let mut draws = Draws::new(seed());
    let words = ["cat", "dog", "sat", "ran", "on", "under", "mat", "tree"];
    let text = |draws: &mut Draws, longest: usize| {
        let words: Vec<&str> = (0..1 + draws.below(longest)).map(|_| words[draws.below(8)]).collect();
        words.join(" ")
    };
    let rows: String = (0..5 * ROWS + HELD_OUT)
        .map(|_| format!("{}\n", json!({ "text": text(&mut draws, 12), "label": text(&mut draws, 58) })))
        .collect();
    std::fs::write(dir.join("pairs.jsonl"), rows).unwrap();
    let task = ["--model", "bart", "--tokenizer", "tok", "--data", "pairs.jsonl", "--seq", "16"];
    assert_law(&mut draws, |cut| trained(dir, &task, cut));
}

/// Two numbers per text, and several classes per text.
#[test]
fn texts_with_numbers_and_several_labels() {
    let mut draws = Draws::new(seed() + 4);
    let words = ["cat", "dog", "sat", "ran", "on", "under", "mat", "tree"];
    for (model, label, problem) in [("bert", "scores", "regression"), ("bart", "tags", "multi_label_classification")] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        texts::labelled(dir);
        if model == "bert" {
            texts::bert(dir)
        } else {
            texts::bart(dir)
        }
        without_dropout(dir, model, 64);
        let path = dir.join(model).join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["problem_type"] = json!(problem);
        std::fs::write(path, config.to_string()).unwrap();
        let row = |draws: &mut Draws| {
            let text: Vec<&str> = (0..1 + draws.below(12)).map(|_| words[draws.below(8)]).collect();
            let tags: Vec<&str> = words[..3].iter().filter(|_| draws.below(2) == 0).copied().collect();
            format!(
                "{}\n",
                json!({ "text": text.join(" "), "scores": [draws.below(1000) as f64 / 250.0, draws.below(9)], "tags": tags })
            )
        };
        let rows: String = (0..5 * ROWS + HELD_OUT).map(|_| row(&mut draws)).collect();
        std::fs::write(dir.join("kinds.jsonl"), rows).unwrap();
        let data = ["--tokenizer", "tok", "--data", "kinds.jsonl", "--label-field", label, "--seq", "16"];
        let task = [&["--task", "text-classification", "--model", model][..], &data].concat();
        assert_law(&mut draws, |cut| trained(dir, &task, cut));
    }
}

#[test]
fn masked_tokens_and_pairs_of_sentences() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    texts::labelled(dir);
    texts::bert(dir);
    without_dropout(dir, "bert", 64);
    // Rows of some hundred tokens each would have as many masked: these differ by a factor of ten.
    let text = std::fs::read_to_string(dir.join("text.txt")).unwrap().repeat(3);
    std::fs::write(dir.join("long.txt"), text).unwrap();
    let task = ["--model", "bert", "--tokenizer", "tok", "--data", "long.txt", "--seq", "32"];
    assert_law(&mut Draws::new(seed() + 1), |cut| trained(dir, &task, cut));
}

#[test]
fn answers_of_0_to_40_words() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    texts::labelled(dir);
    texts::model(
        dir,
        "llama",
        &json!({
            "model_type": "llama", "vocab_size": 61, "max_position_embeddings": 64, "hidden_size": 32, "intermediate_size": 40,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2
        }),
    );
    let mut draws = Draws::new(seed() + 4);
    let text = |draws: &mut Draws, most: usize| vec!["cat ran"; draws.below(most)].join(" ");
    let rows: String = (0..5 * ROWS + HELD_OUT)
        .map(|_| format!("{}\n", json!({ "prompt": text(&mut draws, 12), "completion": text(&mut draws, 21) })))
        .collect();
    std::fs::write(dir.join("answers.jsonl"), rows).unwrap();
    let task = ["--model", "llama", "--tokenizer", "tok", "--data", "answers.jsonl", "--seq", "48"];
    assert_law(&mut draws, |cut| trained(dir, &task, cut));
}

/// A custom next-token model on padded rows.
struct Padded {
    ids: Vec<i32>,
    labels: Vec<i32>,
    with_weights: bool,
}

const WIDTH: usize = 60;

#[derive(Module, Debug)]
struct Next<B: burn::tensor::backend::Backend> {
    table: Embedding<B>,
    head: Linear<B>,
}

impl Padded {
    fn new(with_weights: bool) -> Self {
        let (mut draws, rows) = (Draws::new(seed() + 2), 5 * ROWS + HELD_OUT);
        let mut padded = Self { ids: Vec::new(), labels: Vec::new(), with_weights };
        for _ in 0..rows {
            let (filled, first) = (1 + draws.below(WIDTH), padded.ids.len());
            padded.ids.extend((0..WIDTH).map(|at| if at < filled { draws.below(19) as i32 } else { 0 }));
            let next = |at: usize| (padded.ids[first + at] * 7 + 3) % 19;
            padded.labels.extend((0..WIDTH).map(|at| if at < filled { next(at) } else { IGNORED_LABEL }));
        }
        padded
    }

    fn of<'a>(&self, all: &'a [i32], rows: &'a Rows) -> impl Iterator<Item = i32> + 'a {
        rows.iter().flat_map(|row| all[row * WIDTH..(row + 1) * WIDTH].iter().copied())
    }
}

impl Task for Padded {
    type Model<B: FusedBackend> = Next<B>;

    fn rows(&self) -> usize {
        5 * ROWS + HELD_OUT
    }

    fn held_out(&self) -> usize {
        HELD_OUT
    }

    fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Next<B>> {
        Ok(Next { table: EmbeddingConfig::new(19, 24).init(device), head: LinearConfig::new(24, 19).init(device) })
    }

    fn loss<B: FusedBackend>(&self, model: &Next<B>, rows: &Rows, device: &B::Device) -> Result<Tensor<B, 1>> {
        let ids = TensorData::new(self.of(&self.ids, rows).collect(), [rows.len(), WIDTH]);
        let labels = TensorData::new(self.of(&self.labels, rows).collect(), [rows.len() * WIDTH]);
        let hidden = model.table.forward(Tensor::<B, 2, Int>::from_data(ids, device)).tanh();
        let logits = model.head.forward(hidden).reshape([rows.len() * WIDTH, 19]);
        Ok(cross_entropy_with_ignored(logits, Tensor::from_data(labels, device)))
    }

    fn weights(&self, rows: &Rows) -> Result<Vec<f64>> {
        let labels = self.of(&self.labels, rows).filter(|label| *label != IGNORED_LABEL).count();
        Ok(if self.with_weights { vec![labels as f64] } else { Vec::new() })
    }
}

fn own(dir: &Path, task: &Padded, [micro, accumulation, ranks, stage]: Cut) -> Run {
    let name = format!("{micro}-{accumulation}-{ranks}-{stage}-{}", task.with_weights);
    let run = dir.join(&name);
    let options = Options {
        ranks: Some(ranks),
        steps: 5,
        threads: Some(1),
        json: true,
        save: Some(run.join("checkpoints")),
        out: Some(run.join("out")),
        config: Some(dir.join(sgd(dir, stage, 0.5))),
        hyper: Hyperparameters { batch: Some(micro), accumulation: Some(accumulation), ..Hyperparameters::default() },
        ..Options::default()
    };
    let summary = Trainer::new(&options).run(task).unwrap().unwrap();
    let figures = summary.epochs.last().unwrap().eval.as_ref().unwrap().iter().map(|figure| figure.1).collect();
    (numbers(&run.join("out/metrics.jsonl")), figures, weights(dir, &name))
}

#[test]
fn next_tokens_of_rows_that_are_filled_up() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (task, plain) = (Padded::new(true), Padded::new(false));
    let whole = assert_law(&mut Draws::new(seed() + 3), |cut| own(dir, &task, cut));
    assert_eq!(own(dir, &plain, WHOLE).0, whole.0, "one micro-batch on one rank has no other mean");
    // The rows differ so much that a mean of means is another loss.
    let means = own(dir, &plain, [1, 6, 2, 1]).0;
    assert!((means[0][0] - whole.0[0][0]).abs() > 1e-4 * whole.0[0][0], "{means:?} {whole:?}");
}
