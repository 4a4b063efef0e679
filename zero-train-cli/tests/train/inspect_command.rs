//! `zero inspect` from a user's view, on checkpoints like the engine's and on others.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use assert_cmd::Command;
use serde_json::{Value, json};
use zero_core::checkpoint::{CheckpointError, ElementType, Piece, SaveOptions, save};
use zero_core::collective::threads::{ThreadComm, ThreadOptions, run};
use zero_core::{Collective, Partition};
use zero_models::{BertConfig, Gpt2Config, ModelConfig};

/// Returns exit code, standard output and standard error of `zero` with these arguments.
fn zero(args: &[&str]) -> (i32, String, String) {
    let run = Command::new(env!("CARGO_BIN_EXE_zero")).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (run.status.code().unwrap(), text(run.stdout), text(run.stderr))
}

/// Returns standard output of a run that ends with `code` and prints nothing on standard error.
fn prints(code: i32, args: &[&str]) -> String {
    let (got, out, err) = zero(args);
    assert_eq!((got, err.as_str()), (code, ""), "{out}");
    out
}

/// The same as JSON.
fn prints_json(code: i32, args: &[&str]) -> Value {
    serde_json::from_str(&prints(code, &[args, &["--json"]].concat())).unwrap()
}

/// Returns standard error of a run that ends with 2 and prints nothing.
fn refused(args: &[&str]) -> String {
    let (code, out, err) = zero(args);
    assert_eq!((code, out.as_str()), (2, ""), "{err}");
    err
}

type Tensor = (&'static str, ElementType, &'static [usize], Vec<u8>);

fn f32s(numel: usize, first: f32) -> Vec<u8> {
    (0..numel).flat_map(|at| (first + at as f32).to_le_bytes()).collect()
}

/// A model of two parameters trained with AdamW.
fn tensors() -> Vec<Tensor> {
    let f32 = ElementType::F32;
    vec![
        ("model.wte.weight", f32, &[500, 3], f32s(1500, 0.5)),
        ("model.ln.bias", f32, &[3], f32s(3, -1.0)),
        ("optimizer.wte.weight.exp_avg", f32, &[500, 3], f32s(1500, 0.25)),
        ("optimizer.wte.weight.exp_avg_sq", f32, &[500, 3], f32s(1500, 0.125)),
        ("optimizer.ln.bias.exp_avg", f32, &[3], f32s(3, 0.0)),
        ("optimizer.ln.bias.exp_avg_sq", f32, &[3], f32s(3, 1.0)),
    ]
}

/// A GPT-2 that can be exported, and its state.
fn gpt2(ranks: usize) -> (Vec<Tensor>, Value) {
    let tiny = Gpt2Config::preset("tiny").unwrap();
    let config = Gpt2Config { vocab_size: 500, n_positions: 8, n_embd: 4, n_layer: 1, n_head: 1, ..tiny };
    let config = ModelConfig::from(config);
    let tensors = config.parameters().into_iter().flat_map(|param| {
        let numel = param.shape.iter().product();
        let shape: &[usize] = param.shape.leak();
        ["model.PATH", "optimizer.PATH.exp_avg", "optimizer.PATH.exp_avg_sq"].map(|name| {
            let name: &str = name.replace("PATH", &param.path).leak();
            (name, ElementType::F32, shape, f32s(numel, 0.5))
        })
    });
    let mut state = state(ranks);
    state["model"] = serde_json::to_value(&config).unwrap();
    (tensors.collect(), state)
}

fn state(ranks: usize) -> Value {
    json!({
        "engine": {
            "version": 1, "steps": 12, "skipped": 2, "stage": 3, "param_dtype": "BF16",
            "loss_scaler": {"kind": "dynamic", "scale": 1024.0},
            "optimizer": {"name": "adamw", "times": {"wte.weight": 12, "ln.bias": 12}},
            "random": {"seed": 7, "draws": vec![5; ranks]},
        },
        "model": {"family": "gpt2", "config": {"n_layer": 2, "n_head": 1, "n_embd": 3}},
        "trainer": {"epoch": 1},
    })
}

fn save_as(dir: &Path, step: u64, world: usize, tensors: &[Tensor], state: &Value) -> PathBuf {
    let options = ThreadOptions { deadline: Duration::from_secs(60) };
    let saved = run(world, &options, |comm: Arc<ThreadComm>| {
        let pieces: Vec<Piece<'_>> = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| {
                let range = Partition::new(shape.iter().product(), world).range(comm.rank());
                Piece::new(*name, *dtype, *shape, &bytes[range.start * dtype.size()..range.end * dtype.size()])
            })
            .collect();
        save(&*comm, dir, step, &pieces, state, &SaveOptions::default()).map(|saved| saved.path)
    });
    saved.map_err(|error: zero_core::LaunchError<CheckpointError>| error.to_string()).unwrap().swap_remove(0)
}

fn checkpoint(dir: &Path, step: u64, world: usize) -> PathBuf {
    save_as(dir, step, world, &tensors(), &state(world))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn flip(path: &Path, from_end: usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.len() - from_end;
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

fn assert_contains(text: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(text.contains(part), "no \"{part}\" in:\n{text}"));
}

/// Masks what differs between runs: the folder, the time, and sizes that depend on them.
fn shown(out: &str, dir: &Path) -> String {
    let mut out = out.replace(text(dir), "DIR");
    for moment in out.clone().split_inclusive(" UTC").filter(|part| part.ends_with(" UTC")) {
        out = out.replace(&moment[moment.len() - "2026-01-01 00:00:00 UTC".len()..], "MOMENT");
    }
    out.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

#[test]
fn one_checkpoint_is_told_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let (tensors, state) = gpt2(2);
    let path = save_as(dir.path(), 12, 2, &tensors, &state);
    let out = prints(0, &["inspect", text(&path)]);
    let on_disk: u64 = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    let on_disk = zero_train::memory::format_bytes(on_disk);
    insta::assert_snapshot!(shown(&out, dir.path()).replace(&on_disk, "SIZE"), @r"
    DIR/step-00000012: intact (every checksum was computed)

    step          12, saved MOMENT by version 0.1.0
    run           2 ranks, stage 3, bf16 with fp32 master weights, 12 updates
    model         gpt2, 2,284 parameters in 16 tensors (n_layer 1, n_head 1, n_embd 4)
    optimizer     adamw: exp_avg, exp_avg_sq for every parameter, after 12 updates
    loss scale    1024 (dynamic), 2 updates skipped
    other state   trainer
    size          parameters 8.92 KiB, optimizer state 17.84 KiB; SIZE on disk

    resume        on any number of ranks, at any stage, with any bucket sizes, in fp32 or 16 bit, with adamw
    bit for bit   requires 2 ranks, each with its saved random stream, and bf16 as saved; other numbers of ranks resume from the same parameters and moments, but with different dropout and a different order of summation
    export        `zero export` writes it as a Hugging Face GPT2LMHeadModel
    ");
    let out = prints(0, &["inspect", text(&path), "--tensors"]);
    let line = out.lines().find(|line| line.starts_with("model.wte ")).unwrap();
    assert_eq!(line.split_whitespace().collect::<Vec<_>>().join(" "), "model.wte F32 [500, 4] 7.81 KiB");
    let quick = prints(0, &["inspect", text(&path), "--quick"]);
    assert_contains(&quick, &["intact (only manifest, sizes and headers were checked)"]);
    assert!(!quick.contains("F32 ["));
}

#[test]
fn json_has_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = checkpoint(dir.path(), 12, 2);
    let found = prints_json(0, &["inspect", text(&path), "--tensors"]);
    assert_eq!((&found["format"], &found["kind"], &found["sound"]), (&json!(1), &json!("checkpoint"), &json!(true)));
    assert_eq!((&found["checked"], &found["problems"]), (&json!("contents"), &json!([])));
    let of = &found["checkpoint"];
    assert_eq!((&of["step"], &of["ranks"], &of["crate_version"]), (&json!(12), &json!(2), &json!("0.1.0")));
    assert!(of["saved"].as_str().unwrap().ends_with('Z'));
    assert_eq!(
        of["engine"],
        json!({
            "version": 1, "stage": 3, "param_dtype": "BF16", "steps": 12, "skipped": 2, "loss_scale": 1024.0,
            "loss_scale_dynamic": true, "seed": 7, "random_streams": 2,
        })
    );
    assert_eq!(of["model"]["family"], "gpt2");
    assert_eq!(of["parameters"], json!({"tensors": 2, "elements": 1503, "bytes": 6012, "dtypes": {"F32": 2}}));
    assert_eq!(of["optimizer"]["states"]["exp_avg"]["bytes"], 6012);
    assert_eq!((&of["optimizer"]["without"], &of["optimizer"]["updates"]), (&json!([]), &json!([12, 12])));
    assert_eq!((&of["use"]["can_resume"], &of["use"]["can_export"]), (&json!(true), &json!(false)));
    assert_eq!(of["state_keys"], json!(["engine", "model", "trainer"]));
    assert_eq!(of["tensors"].as_array().unwrap().len(), 6);
    assert_eq!(of["tensors"][0], json!({"name": "model.ln.bias", "dtype": "F32", "shape": [3], "bytes": 12}));
    assert!(prints_json(0, &["inspect", text(&path)])["checkpoint"].get("tensors").is_none());
}

#[test]
fn every_problem_of_a_damaged_one_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = checkpoint(dir.path(), 1, 3);
    let file = |rank: usize| path.join(format!("rank-0000{rank}-of-00003.safetensors"));
    // The last tensor of a file by name, and the first: two tensors of one file.
    flip(&file(0), 1);
    let header = u64::from_le_bytes(fs::read(file(0)).unwrap()[..8].try_into().unwrap()) as usize;
    let length = fs::metadata(file(0)).unwrap().len() as usize;
    flip(&file(0), length - 8 - header);
    fs::remove_file(file(2)).unwrap();
    let out = prints(1, &["inspect", text(&path)]);
    assert_contains(
        &out,
        &["damaged, 3 problems", "tensor 'model.ln.bias' is corrupt", "'optimizer.wte.weight.exp_avg_sq' is corrupt"],
    );
    assert_contains(&out, &["a rank's file is missing", "step          1, ", "not possible while it is damaged"]);
    let found = prints_json(1, &["inspect", text(&path), "--quick"]);
    assert_eq!((found["problems"].as_array().unwrap().len(), &found["checked"]), (1, &json!("sizes")));

    fs::write(path.join("manifest.json"), "{").unwrap();
    let out = prints(1, &["inspect", text(&path)]);
    assert_contains(&out, &["damaged, 1 problem", "manifest", "on disk"]);
    assert_eq!(prints_json(1, &["inspect", text(&path)])["checkpoint"], Value::Null);
    fs::remove_file(path.join("manifest.json")).unwrap();
    assert_contains(
        &prints(1, &["inspect", text(&path)]),
        &["the manifest that marks a checkpoint as complete is missing"],
    );
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("step-00000001");
    assert_contains(&refused(&["inspect", text(&absent)]), &["found nothing; check the path"]);
    assert_contains(&refused(&["inspect", text(dir.path())]), &["expected checkpoints (folders step-...), found none"]);
    fs::create_dir(dir.path().join(".saving-step-00000001-x")).unwrap();
    assert_contains(
        &refused(&["inspect", text(dir.path())]),
        &["only remains of incomplete saves", ".saving-step-00000001-x"],
    );
    let path = checkpoint(dir.path(), 1, 1);
    assert_contains(&refused(&["inspect", text(&path.join("manifest.json"))]), &["got a file; name its folder"]);
    assert_contains(&refused(&["inspect"]), &["<PATH>"]);
    assert_contains(&refused(&["inspect", text(&path), "--slow"]), &["--slow"]);
}

#[test]
fn a_checkpoint_is_known_under_another_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = checkpoint(dir.path(), 3, 1);
    let renamed = dir.path().join("best");
    fs::rename(path, &renamed).unwrap();
    assert_contains(&prints(0, &["inspect", text(&renamed)]), &["best: intact", "step          3, "]);
}

#[test]
fn a_folder_is_a_table() {
    let dir = tempfile::tempdir().unwrap();
    for (step, world) in [(10, 2), (20, 2), (30, 4)] {
        checkpoint(dir.path(), step, world);
    }
    let out = prints(0, &["inspect", text(dir.path())]);
    assert_contains(
        &out,
        &["3 checkpoints (every checksum was computed)", "; named by `latest`; used by `--resume auto`"],
    );
    flip(&dir.path().join("step-00000030/rank-00003-of-00004.safetensors"), 1);
    fs::create_dir(dir.path().join(".saving-step-00000040-dead")).unwrap();
    fs::write(dir.path().join(".saving-step-00000040-dead/rank"), [0; 2048]).unwrap();
    let out = prints(1, &["inspect", text(dir.path())]);
    let line = |name: &str| out.lines().find(|line| line.starts_with(name)).unwrap().to_string();
    assert!(line("step-00000010").ends_with("  intact"), "{out}");
    assert!(line("step-00000020").ends_with("  intact; used by `--resume auto`"), "{out}");
    assert!(line("step-00000030").ends_with("  damaged, 1 problem; named by `latest`"), "{out}");
    assert_contains(&out, &["is corrupt in", ".saving-step-00000040-dead  2.00 KiB"]);

    let found = prints_json(1, &["inspect", text(dir.path())]);
    assert_eq!(
        (&found["kind"], &found["latest"], &found["resume"]),
        (&json!("folder"), &json!("step-00000030"), &json!("step-00000020"))
    );
    assert_eq!(found["remains"], json!([{"name": ".saving-step-00000040-dead", "disk_bytes": 2048}]));
    let entry = &found["checkpoints"][2];
    assert_eq!((&entry["step"], &entry["ranks"], &entry["sound"]), (&json!(30), &json!(4), &json!(false)));
    // Sizes do not show it.
    assert_eq!(prints_json(0, &["inspect", text(dir.path()), "--quick"])["resume"], "step-00000030");

    fs::write(dir.path().join("latest"), "step-00000099").unwrap();
    assert_contains(
        &prints(1, &["inspect", text(dir.path()), "--quick"]),
        &["names step-00000099, which does not exist"],
    );
}

#[test]
fn states_of_other_programs_are_no_trouble() {
    let scraps = [json!(null), json!(1), json!("x"), json!([]), json!({}), json!({"a": 1}), json!([1, {"version": 1}])];
    let mut states: Vec<Value> = scraps.to_vec();
    // Each part of the engine's state as something else.
    let places =
        ["/engine", "/model", "/trainer", "/model/family", "/model/config", "/engine/random", "/engine/optimizer"];
    let more =
        ["version", "steps", "skipped", "stage", "param_dtype", "loss_scaler", "random/draws", "optimizer/times"];
    for place in places.iter().map(ToString::to_string).chain(more.iter().map(|key| format!("/engine/{key}"))) {
        for scrap in &scraps {
            let mut changed = state(1);
            *changed.pointer_mut(&place).unwrap() = scrap.clone();
            states.push(changed);
        }
    }
    // Models of any size, for which nothing may be allocated.
    for (family, keys) in [
        ("gpt2", ["vocab_size", "n_positions", "n_embd", "n_layer", "n_inner"]),
        ("bert", ["vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "intermediate_size"]),
    ] {
        let sound = match family {
            "gpt2" => ModelConfig::from(Gpt2Config::preset("tiny").unwrap()),
            _ => ModelConfig::from(BertConfig::preset("bert-tiny").unwrap()),
        };
        for key in keys {
            for huge in [1 << 40, 1 << 62, u64::MAX] {
                let mut changed = state(1);
                changed["model"] = serde_json::to_value(&sound).unwrap();
                changed["model"]["config"][key] = json!(huge);
                states.push(changed);
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let odd: Vec<Tensor> = ["optimizer.", "optimizer.x", "optimizer..", "model.", "other", "."]
        .map(|name| (name, ElementType::U8, &[2][..], vec![1, 2]))
        .into();
    for (at, state) in states.iter().enumerate() {
        let path = save_as(dir.path(), at as u64, 1, if at % 2 == 0 { &odd } else { &[] }, state);
        // The library's text and JSON; the command prints them.
        let found = zero_train_cli::inspect::inspect(&path, zero_core::checkpoint::Check::Contents, true).unwrap();
        assert!(found.sound && !found.to_string().is_empty() && serde_json::to_string(&found).is_ok());
    }
    let path = dir.path().join("step-00000000");
    assert_contains(
        &prints(0, &["inspect", text(&path)]),
        &["not with the engine, which did not save it: its state has no \"engine\"", "`zero export` refuses it"],
    );
}

#[test]
fn who_can_use_it_follows_the_state() {
    let dir = tempfile::tempdir().unwrap();
    let told = |change: &dyn Fn(&mut Value), tensors: &[Tensor]| {
        let mut state = state(2);
        change(&mut state);
        let path = save_as(dir.path(), 1, 2, tensors, &state);
        prints(0, &["inspect", text(&path)])
    };
    let all = tensors();
    let out = told(&|state| state["engine"]["version"] = json!(2), &all);
    assert_contains(&out, &["reads engine state version 1: it has version 2"]);
    let out = told(&|state| state["engine"]["random"]["draws"] = json!([1]), &all);
    assert_contains(&out, &["expected the random streams of 2 ranks, it has 1"]);
    let out = told(&|state| state["model"]["family"] = json!("rwkv"), &all);
    assert_contains(&out, &["`zero export` refuses it", "is not a configuration of a known model"]);
    let out = told(&|state| drop(state.as_object_mut().unwrap().remove("trainer")), &all);
    assert_contains(&out, &["only with ZeroEngine::load in your program", "which `zero train --resume` needs"]);
    let out = told(&|state| drop(state.as_object_mut().unwrap().remove("model")), &all);
    assert_contains(&out, &["by their paths in the module", "unnamed, 1,503 parameters"]);
    let out = told(&|state| state["engine"]["param_dtype"] = json!("F32"), &all[..2]);
    assert_contains(
        &out,
        &["there is no optimizer state, so the optimizer starts from zero", "fp32 as saved", "adamw, without state"],
    );
    let out = told(&|_| {}, &all[..5]);
    assert_contains(&out, &["not all of them for 1 parameter: ln.bias"]);
    let mut half = all.clone();
    half[1] = ("model.ln.bias", ElementType::Bf16, &[3], vec![0; 6]);
    assert_contains(&told(&|_| {}, &half), &["bf16, 1 parameter without fp32 master weights"]);
}

#[test]
fn a_reader_that_stops_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let many: Vec<String> = (0..4000).map(|at| format!("model.layer.{at}.weight")).collect();
    let many: Vec<Tensor> = many.into_iter().map(|name| (&*name.leak(), ElementType::U8, &[1][..], vec![1])).collect();
    let path = save_as(dir.path(), 1, 1, &many, &json!({}));
    let script = format!(
        "'{}' inspect '{}' --tensors | head -n 1; exit ${{PIPESTATUS[0]}}",
        env!("CARGO_BIN_EXE_zero"),
        text(&path)
    );
    let run = std::process::Command::new("bash").args(["-c", &script]).output();
    // Where there is no bash, there is no pipe to close.
    if let Ok(run) = run {
        assert_eq!(String::from_utf8(run.stderr).unwrap(), "");
        assert_eq!(run.status.code(), Some(0));
    }
}
