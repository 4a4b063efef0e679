//! `cargo test -p zero-train-cli --test train classes`
//!
//! Fine-tuning of a BERT as a classifier, through the command.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::common::texts::{self, json_lines, ok, refused};
use crate::common::{assert_stages_agree, trajectory};

fn inputs(dir: &Path) {
    texts::labelled(dir);
    texts::bert(dir);
}

fn train(dir: &Path, run: &str, options: &[&str]) -> Value {
    let common = ["--task", "text-classification", "--tokenizer", "tok", "--data", "rows.jsonl", "--seq", "16"];
    let unless = |option: &str, or: &'static [&'static str]| if options.contains(&option) { &[][..] } else { or };
    let batch = unless("--batch", &["--batch", "3"]);
    let weights = unless("--weights", &["--weights", "bert-hf"]);
    let label = unless("--label-field", &["--label-field", "class"]);
    texts::train(dir, run, &[&common, &["--eval", "20"], batch, weights, label, options])
}

#[test]
fn stages_and_a_resume_give_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    assert_stages_agree(dir.path(), "", ["5", "8"], |run, options| train(dir.path(), run, options));
}

/// Accuracy and F1 of the last evaluation, and of the predictions, computed here.
fn measured(summary: &Value, predictions: &Path) -> ([f64; 2], [f64; 2]) {
    let told = summary["epochs"].as_array().unwrap().last().unwrap()["eval"].as_array().unwrap().clone();
    let names: Vec<&str> = told.iter().map(|pair| pair[0].as_str().unwrap()).collect();
    assert_eq!(names, ["loss", "accuracy", "f1"]);
    let lines = json_lines(predictions);
    let rows: Vec<u64> = lines.iter().map(|line| line["row"].as_u64().unwrap()).collect();
    assert!(rows.iter().copied().eq(143..163), "every row that is held out, once, in order: {rows:?}");
    let count = |wanted: &dyn Fn(&Value) -> bool| lines.iter().filter(|line| wanted(line)).count() as f64;
    let accuracy = count(&|line| line["label"] == line["prediction"]) / 20.0;
    let classes: BTreeSet<String> = ["cats", "dogs", "none"].map(String::from).into();
    let f1 = classes.iter().map(|class| {
        let hits = count(&|line| line["label"] == **class && line["prediction"] == **class);
        let all = count(&|line| line["label"] == **class) + count(&|line| line["prediction"] == **class);
        if all == 0.0 { 0.0 } else { 2.0 * hits / all }
    });
    let f1 = f1.sum::<f64>() / 3.0;
    (["1", "2"].map(|at| told[at.parse::<usize>().unwrap()][1].as_f64().unwrap()), [accuracy, f1])
}

#[test]
fn it_learns_and_its_figures_count_every_row_once() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let mut all = Vec::new();
    for ranks in ["1", "3"] {
        let options =
            ["--ranks", ranks, "--stage", "3", "--steps", "150", "--lr", "4e-3", "--predictions", "told.jsonl"];
        let batch: &[&str] = if ranks == "1" { &["--batch", "9"] } else { &[] };
        let summary = train(dir.path(), &format!("run-{ranks}"), &[&options[..], batch].concat());
        let (told, counted) = measured(&summary, &dir.path().join("told.jsonl"));
        for (told, counted) in told.into_iter().zip(counted) {
            assert!((told - counted).abs() < 1e-9, "{ranks} ranks: {told}, {counted}");
        }
        assert!(told[0] >= 0.7, "accuracy {}", told[0]);
        all.push(summary["loss_first"].as_f64().unwrap());
    }
    // As transformers have it, and it goes on from there.
    ok(&["export", "run-3/checkpoints", "classes", "--dtype", "fp32"], dir.path());
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("classes/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["BertForSequenceClassification"]));
    assert_eq!(config["id2label"], json!({ "0": "cats", "1": "dogs", "2": "none" }));
    let again = train(dir.path(), "again", &["--weights", "classes", "--steps", "1"]);
    assert!(again["loss_first"].as_f64().unwrap() < 0.7 * all[0], "{again}");
    // An adapter with a fresh head.
    let lora = ["--lora-r", "4", "--steps", "60", "--lr", "1e-2", "--ranks", "2"];
    let summary = train(dir.path(), "lora", &lora);
    let [first, last] = ["loss_first", "loss_last"].map(|key| summary[key].as_f64().unwrap());
    assert!(last < first, "{first} to {last}");
    let told = ok(&["export", "lora/checkpoints", "adapter"], dir.path());
    assert!(told.contains("an adapter with 12 tensors"), "8 of the adapter, 4 of pooler and classifier: {told}");
}

#[test]
fn two_texts_and_numbers_as_labels() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let pairs = ["--second-field", "other", "--label-field", "n", "--steps", "2", "--predictions", "told.jsonl"];
    let summary = train(dir.path(), "pairs", &pairs);
    assert_eq!(summary["epochs"][0]["eval"].as_array().unwrap().len(), 3);
    let told = std::fs::read_to_string(dir.path().join("told.jsonl")).unwrap();
    assert!(told.starts_with("{\"label\":\"1\",\"prediction\":") || told.contains("\"label\":\"1\""), "{told}");
}

#[test]
fn what_does_not_fit_is_told() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    let told = |options: &[&str]| {
        refused(&[&["train", "--task", "text-classification", "--tokenizer", "tok"], options].concat(), dir.path())
    };
    let rows = ["--data", "rows.jsonl"];
    for (options, expected) in [
        (&["--model", "tiny"][..], "--model tiny: expected a BERT or a BART for --task text-classification"),
        (
            &["--weights", "bert-hf", "--label-field", "class", "--seq", "3"],
            "--seq 3: expected 4 to 24, the positions of the model",
        ),
        (
            &["--weights", "bert-hf", "--label-field", "kind"],
            "its \"kind\" is missing: expected a string, a finite number, or a list of these; choose another key with --label-field",
        ),
        (
            &["--weights", "bert-hf", "--label-field", "class", "--text-field", "n"],
            "its \"n\" is a number: expected a string; choose another key with --text-field",
        ),
        (
            &["--weights", "bert-hf", "--label-field", "class", "--predictions", "p.jsonl"],
            "expected held-out rows: add --eval ROWS",
        ),
        (
            &["--weights", "bert-hf", "--label-field", "class", "--eval", "5", "--predictions", "no/p.jsonl"],
            "expected a file in an existing folder",
        ),
    ] {
        let text = told(&[options, &rows].concat());
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    assert!(told(&["--weights", "bert-hf"]).contains("--data is missing"));
    assert!(
        told(&["--weights", "bert-hf", "--data", "text.txt"])
            .contains("is text: expected .jsonl, .json, .csv or .parquet")
    );
    // Classes of another model.
    train(dir.path(), "run", &["--steps", "1"]);
    ok(&["export", "run/checkpoints", "classes"], dir.path());
    std::fs::write(dir.path().join("other.jsonl"), "{\"text\": \"a cat\", \"label\": \"birds\"}\n").unwrap();
    let text = told(&["--weights", "classes", "--data", "other.jsonl"]);
    assert!(
        text.contains("has the label \"birds\", but the model's classes are [\"cats\", \"dogs\", \"none\"]"),
        "{text}"
    );
}

/// Copies the rows of `rows.jsonl` to `kinds.jsonl` with labels: one number (`score`), two (`scores`), and lists of
/// names (`tags`), of class indices (`ids`) and of flags (`flags`), for the words cat, dog and tree.
fn kinds(dir: &Path) {
    let rows: String = json_lines(&dir.join("rows.jsonl"))
        .into_iter()
        .map(|row| {
            let text = row["text"].as_str().unwrap();
            let is = ["cat", "dog", "tree"].map(|word| text.contains(word));
            let tags: Vec<&str> = ["cat", "dog", "tree"].into_iter().filter(|word| text.contains(word)).collect();
            let ids: Vec<usize> = (0..3).filter(|&class| is[class]).collect();
            let [cat, dog, tree] = is.map(|is| f64::from(u8::from(is)));
            let (score, scores) = (2.0 * cat - dog + 0.5, [2.0 * cat - 1.0, dog - tree]);
            let row = json!({
                "text": text, "other": row["other"], "score": score, "scores": scores, "tags": tags, "ids": ids, "flags": [cat, dog, tree]
            });
            format!("{row}\n")
        })
        .collect();
    std::fs::write(dir.join("kinds.jsonl"), rows).unwrap();
}

/// Returns the last held-out figures, by name.
fn figures(summary: &Value) -> Vec<(String, f64)> {
    let told = summary["epochs"].as_array().unwrap().last().unwrap()["eval"].as_array().unwrap().clone();
    told.iter().map(|pair| (pair[0].as_str().unwrap().to_string(), pair[1].as_f64().unwrap())).collect()
}

fn figure(summary: &Value, name: &str) -> f64 {
    let figures = figures(summary);
    figures.iter().find(|(known, _)| known == name).unwrap_or_else(|| panic!("{name} in {figures:?}")).1
}

/// Replaces some keys of the folder's configuration.
fn with_keys(dir: &Path, folder: &str, keys: &Value) -> Value {
    let path = dir.join(folder).join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(path, config.to_string()).unwrap();
    config
}

#[test]
fn numbers_are_learned_and_their_figures_count_every_row_once() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    kinds(dir.path());
    let data = ["--data", "kinds.jsonl", "--label-field", "score", "--lr", "4e-3", "--predictions", "told.jsonl"];
    for ranks in ["1", "3"] {
        let batch = if ranks == "1" { "9" } else { "3" };
        let run = [
            "--ranks",
            ranks,
            "--stage",
            "3",
            "--steps",
            "100",
            "--keep-best",
            "--keep-last",
            "1",
            "--eval-every",
            "50",
            "--batch",
            batch,
        ];
        let summary = train_on(dir.path(), &format!("score-{ranks}"), &[&data[..], &run].concat());
        let lines = json_lines(&dir.path().join("told.jsonl"));
        let pairs: Vec<[f64; 2]> =
            lines.iter().map(|line| ["label", "prediction"].map(|key| line[key].as_f64().unwrap())).collect();
        let mse = pairs.iter().map(|[y, x]| (y - x).powi(2)).sum::<f64>() / 20.0;
        let mean = |of: &dyn Fn(&[f64; 2]) -> f64| pairs.iter().map(of).sum::<f64>() / 20.0;
        let (x, y) = (mean(&|pair| pair[1]), mean(&|pair| pair[0]));
        let covariance = mean(&|pair| (pair[1] - x) * (pair[0] - y));
        let spread = |at: usize, of: f64| mean(&|pair| (pair[at] - of).powi(2)).sqrt();
        let pearson = covariance / spread(1, x) / spread(0, y);
        for (name, counted) in [("loss", mse), ("mse", mse), ("pearson", pearson)] {
            let told = figure(&summary, name);
            assert!((told - counted).abs() < 1e-5, "{ranks} ranks: {name} {told}, {counted}");
        }
        assert!(pearson > 0.8 && lines.len() == 20, "{pearson}");
    }
    // It goes on from there, and as an adapter.
    ok(&["export", "score-3/checkpoints", "score", "--dtype", "fp32"], dir.path());
    let config: Value = serde_json::from_slice(&std::fs::read(dir.path().join("score/config.json")).unwrap()).unwrap();
    assert_eq!((&config["problem_type"], &config["id2label"]), (&json!("regression"), &json!({ "0": "LABEL_0" })));
    let again =
        ["--weights", "score", "--data", "kinds.jsonl", "--label-field", "score", "--steps", "1", "--lr", "1e-9"];
    let first = figure(&train_on(dir.path(), "again", &again), "mse");
    let last = json_lines(&dir.path().join("told.jsonl"));
    let told = last.iter().map(|line| (line["label"].as_f64().unwrap() - line["prediction"].as_f64().unwrap()).powi(2));
    assert!((first - told.sum::<f64>() / 20.0).abs() < 1e-5);
}

/// Like [`train`], on other data.
fn train_on(dir: &Path, run: &str, options: &[&str]) -> Value {
    let unless = |option: &str, or: &'static [&'static str]| if options.contains(&option) { &[][..] } else { or };
    let common = ["--task", "text-classification", "--tokenizer", "tok", "--seq", "16", "--eval", "20"];
    texts::train(
        dir,
        run,
        &[&common, unless("--weights", &["--weights", "bert-hf"]), unless("--batch", &["--batch", "3"]), options],
    )
}

/// Lists of names, of numbers and of flags give the same training.
#[test]
fn several_labels_of_a_row_are_learned() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    kinds(dir.path());
    let mut runs = Vec::new();
    for label in ["tags", "ids", "flags"] {
        let data = ["--data", "kinds.jsonl", "--label-field", label, "--steps", "60", "--lr", "4e-3", "--ranks", "2"];
        let summary = train_on(dir.path(), label, &[&data[..], &["--predictions", "told.jsonl"]].concat());
        runs.push((trajectory(&dir.path().join(label)), figures(&summary)));
    }
    assert!(runs.iter().all(|run| *run == runs[0]), "{runs:?}");
    let names: Vec<&str> = runs[0].1.iter().map(|(name, _)| &**name).collect();
    assert_eq!(names, ["loss", "accuracy", "f1"]);
    // Counted here, of the names that the last run gave to flags.
    let lines = json_lines(&dir.path().join("told.jsonl"));
    let list = |line: &Value, key: &str| line[key].as_array().unwrap().clone();
    let count = |key: &str| lines.iter().map(|line| list(line, key).len()).sum::<usize>() as f64;
    let hits = lines
        .iter()
        .map(|line| list(line, "label").iter().filter(|name| list(line, "prediction").contains(name)).count());
    let f1 = 2.0 * hits.sum::<usize>() as f64 / (count("label") + count("prediction"));
    let exact = lines.iter().filter(|line| line["label"] == line["prediction"]).count() as f64 / 20.0;
    let told = [runs[0].1[1].1, runs[0].1[2].1];
    assert!((told[0] - exact).abs() < 1e-9 && (told[1] - f1).abs() < 1e-9 && f1 > 0.7, "{told:?}, {exact}, {f1}");
    let above = |line: &Value| {
        let probabilities = list(line, "probabilities");
        probabilities.len() == list(line, "prediction").len() && probabilities.iter().all(|p| p.as_f64().unwrap() > 0.5)
    };
    assert!(lines.iter().all(above), "{lines:?}");
    ok(&["export", "tags/checkpoints", "tags-hf", "--dtype", "fp32"], dir.path());
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("tags-hf/config.json")).unwrap()).unwrap();
    assert_eq!(config["problem_type"], "multi_label_classification");
    assert_eq!(config["id2label"], json!({ "0": "cat", "1": "dog", "2": "tree" }));
}

/// A folder that states its problem type is read, trained and written; the written one states it too, and its head gives the same outputs.
#[test]
fn a_folders_problem_type_and_labels_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    texts::bart(dir.path());
    kinds(dir.path());
    for (folder, label, keys) in [
        ("bert", "scores", json!({ "problem_type": "regression" })),
        ("bart", "tags", json!({ "problem_type": "multi_label_classification" })),
        ("bart-scores", "scores", json!({ "problem_type": "regression" })),
    ] {
        let family = folder.split('-').next().unwrap();
        if folder != family {
            std::fs::create_dir(dir.path().join(folder)).unwrap();
            std::fs::copy(dir.path().join(family).join("config.json"), dir.path().join(folder).join("config.json"))
                .unwrap();
        }
        let config = with_keys(dir.path(), folder, &keys);
        let data = ["--data", "kinds.jsonl", "--label-field", label, "--predictions", "told.jsonl"];
        let common =
            ["--task", "text-classification", "--tokenizer", "tok", "--seq", "16", "--eval", "20", "--batch", "3"];
        let train = |run: &str, more: &[&str]| texts::train(dir.path(), run, &[&common, &data, more]);
        let first =
            train(&format!("{folder}-run"), &["--model", folder, "--steps", "3", "--ranks", "2", "--stage", "3"]);
        let (checkpoints, out) = (format!("{folder}-run/checkpoints"), format!("{folder}-out"));
        let told = std::fs::read_to_string(dir.path().join("told.jsonl")).unwrap();
        ok(&["export", &checkpoints, &out, "--dtype", "fp32"], dir.path());
        let written: Value =
            serde_json::from_slice(&std::fs::read(dir.path().join(&out).join("config.json")).unwrap()).unwrap();
        assert_eq!(written["problem_type"], config["problem_type"]);
        let class = if family == "bert" { "BertForSequenceClassification" } else { "BartForSequenceClassification" };
        assert_eq!(written["architectures"], json!([class]));
        assert_eq!(written["label2id"].as_object().unwrap().len(), if label == "tags" { 3 } else { 2 });
        // Without a step worth the name it gives the same.
        let again = train(&format!("{folder}-again"), &["--weights", &out, "--steps", "1", "--lr", "1e-12"]);
        assert!((figure(&first, "loss") - figure(&again, "loss")).abs() < 1e-6, "{first}\n{again}");
        let numbers = |text: &str| -> Vec<f64> {
            text.split(|c: char| !(c.is_ascii_digit() || ".-e".contains(c))).filter_map(|x| x.parse().ok()).collect()
        };
        let now = numbers(&std::fs::read_to_string(dir.path().join("told.jsonl")).unwrap());
        let before = numbers(&told);
        assert!(before.len() == now.len() && before.iter().zip(&now).all(|(a, b)| (a - b).abs() < 1e-5), "{folder}");
        // And the text that a classifier would make is none.
        if family == "bart" {
            let told = refused(&["generate", &out, "--prompt", "cat"], dir.path());
            assert!(told.contains("a BART or a T5 without a classification head"), "{told}");
        }
    }
}

/// Starting from a sequence-to-sequence BART, the head is initialized, which is reported; stages and a resume agree.
#[test]
fn a_bart_tells_classes() {
    let dir = tempfile::tempdir().unwrap();
    texts::labelled(dir.path());
    texts::bart(dir.path());
    let seq2seq = [
        "train",
        "--model",
        "bart",
        "--tokenizer",
        "tok",
        "--data",
        "rows.jsonl",
        "--label-field",
        "answer",
        "--seq",
        "16",
    ];
    ok(&[&seq2seq[..], &["--threads", "1", "--steps", "3", "--save", "bart-base"]].concat(), dir.path());
    ok(&["export", "bart-base", "bart-hf", "--dtype", "fp32"], dir.path());
    let pairs = ["--weights", "bart-hf", "--second-field", "other", "--data", "rows.jsonl", "--label-field", "class"];
    for (what, more) in [("whole-", &[][..]), ("adapter-", &["--lora-r", "4", "--lora-dropout", "0.1"])] {
        let train = |run: &str, options: &[&str]| train_on(dir.path(), run, &[&pairs, more, options].concat());
        assert_stages_agree(dir.path(), what, ["3", "5"], train);
    }
    let shown = ok(
        &[&["train", "--dry-run", "--task", "text-classification", "--tokenizer", "tok"], &pairs[..]].concat(),
        dir.path(),
    );
    assert!(
        shown.contains("The weights of bart-hf have no classifier: training a fresh one with 3 classes."),
        "{shown}"
    );
    let texts = ["--weights", "bart-hf", "--data", "rows.jsonl", "--label-field", "class"];
    let learned = ["--steps", "150", "--lr", "4e-3", "--ranks", "2", "--batch", "4"];
    let summary = train_on(dir.path(), "learned", &[&texts[..], &learned].concat());
    assert!(figure(&summary, "accuracy") >= 0.7, "{summary}");
    ok(&["export", "learned/checkpoints", "classes", "--dtype", "fp32"], dir.path());
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("classes/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["BartForSequenceClassification"]));
    // Its task is known by the folder, and an adapter on it does not train the head.
    let again =
        ["--tokenizer", "tok", "--weights", "classes", "--data", "rows.jsonl", "--label-field", "class", "--seq", "16"];
    let lora = ["--lora-r", "4", "--steps", "1", "--eval", "20"];
    let again = texts::train(dir.path(), "lora", &[&again, &lora]);
    assert!(figure(&again, "accuracy") >= 0.7, "{again}");
    let told = ok(&["export", "adapter-1-0/checkpoints", "adapter"], dir.path());
    assert!(told.contains("an adapter with 28 tensors"), "24 of 12 layers, 4 of the head: {told}");
    let keys: Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("adapter/adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&keys["task_type"], &keys["modules_to_save"]), (&json!("SEQ_CLS"), &json!(["classification_head"])));
}

#[test]
fn labels_that_are_none_are_told_with_their_row() {
    let dir = tempfile::tempdir().unwrap();
    inputs(dir.path());
    texts::bart(dir.path());
    let told = |model: &[&str], name: &str, rows: &str| {
        std::fs::write(dir.path().join(name), rows).unwrap();
        let common = ["train", "--task", "text-classification", "--tokenizer", "tok", "--data", name];
        refused(&[&common[..], model].concat(), dir.path())
    };
    let bert = ["--weights", "bert-hf"];
    let rows = |labels: [&str; 2]| labels.map(|label| format!("{{\"text\": \"cat\", \"label\": {label}}}\n")).concat();
    for (labels, expected) in [
        (
            ["0.5", "NaN"],
            "rows.json: line 2: its \"label\" is null or NaN: expected a string, a finite number, or a list of these",
        ),
        (["0.5", "1e39"], "rows.json: line 2: has the label 1e39: expected a finite number"),
        (["0.5", "[0.5]"], "line 2: has the label [0.5], which is a list, but an earlier label is a number"),
        (
            ["[\"a\"]", "[\"b\", 1]"],
            "line 2: has the label 1, which is a whole number, but an earlier label is a string",
        ),
        (["[\"a\"]", "[null]"], "line 2: its \"label\" is a list with null or NaN"),
        (["[[1]]", "[[2]]"], "line 1: its \"label\" is a list: expected a string, a finite number, or a list of these"),
        (["[0.5]", "[1.0]"], "line 1: has the label [0.5]: expected 0.0 or 1.0 for each of the 1 classes"),
    ] {
        let text = told(&bert, "rows.json", &rows(labels));
        assert!(text.contains(expected), "{labels:?}: {text}");
    }
    let text = told(&bert, "rows.csv", "text,label\ncat,0.5\ndog,inf\n");
    assert!(text.contains("rows.csv: row 1: has the label \"inf\": expected a finite number"), "{text}");
    // The head's own.
    let keys = json!({ "architectures": ["BertForSequenceClassification"], "id2label": { "0": "a", "1": "b" } });
    let config = with_keys(dir.path(), "bert", &keys);
    let problem = |problem: &str| {
        let mut config = config.clone();
        config["problem_type"] = json!(problem);
        std::fs::write(dir.path().join("bert/config.json"), config.to_string()).unwrap();
    };
    let bert = ["--model", "bert"];
    problem("regression");
    let text = told(&bert, "rows.jsonl", &rows(["\"a\"", "\"b\""]));
    assert!(
        text.contains("line 1: has the label \"a\": expected a finite number, because the task is a regression"),
        "{text}"
    );
    problem("multi_label_classification");
    let text = told(&bert, "rows.jsonl", &rows(["\"a\"", "\"b\""]));
    assert!(text.contains("line 1: has the label \"a\": expected a list of classes"), "{text}");
    problem("single_label_classification");
    let text = told(&bert, "rows.jsonl", &rows(["[\"a\"]", "[\"b\"]"]));
    assert!(
        text.contains("line 1: has the label [\"a\"], but the head predicts one of the classes [\"a\", \"b\"]"),
        "{text}"
    );
    problem("ranking");
    let text = told(&bert, "rows.jsonl", &rows(["\"a\"", "\"b\""]));
    assert!(text.contains("unknown variant `ranking`, expected one of `regression`"), "{text}");
    // A text that ends where it does not.
    let text = told(&["--model", "bart"], "rows.jsonl", &rows(["0", "1"]).replacen("cat", "cat [SEP]", 1));
    let expected = "line 2: the model's eos_token_id 3 occurs 1 time(s) in its tokens, and 2 time(s) in the first row";
    assert!(text.contains(expected), "{text}");
    // Of several files, the file and its own row.
    std::fs::create_dir_all(dir.path().join("split")).unwrap();
    std::fs::write(dir.path().join("split/train.jsonl"), rows(["0.5", "1.5"])).unwrap();
    std::fs::write(dir.path().join("split/validation.jsonl"), rows(["0.5", "1e39"])).unwrap();
    let common = ["train", "--task", "text-classification", "--tokenizer", "tok", "--weights", "bert-hf"];
    let text = refused(&[&common[..], &["--data", "split"]].concat(), dir.path());
    assert!(text.contains("validation.jsonl: line 2: has the label 1e39: expected a finite number"), "{text}");
}
