//! `cargo test -p zero-train-cli --test train hostile`
//!
//! Damaged or hostile folders and data files, through the command: it never panics or runs for long, ends with 0, 1 or
//! 2, and names the unusable file in one line. `ZERO_FUZZ_RUNS=100000` is the long form.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use mutate::{Random, mutate, mutate_file};

use crate::mutate;

/// Default number of runs.
const RUNS: usize = 180;

/// Maximum duration of a run. In the short form, other tests run concurrently.
const LONGEST: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(60)];

/// A file to modify, in the folder of a case, and the command that reads it there.
struct Case {
    file: String,
    args: Vec<String>,
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

fn case(file: impl Into<String>, args: &[&str]) -> Case {
    Case { file: file.into(), args: args.iter().map(ToString::to_string).collect() }
}

/// Intact folders and files, and the command for each.
fn inputs(dir: &Path) -> Vec<Case> {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let mut cases = Vec::new();
    for name in ["llama_tiny", "mistral_tiny", "qwen3_tiny", "gpt2_tiny", "bart_tiny", "t5_tiny"] {
        for from in [fixtures.join(name), fixtures.join("texts").join(name)] {
            copy(&from, &dir.join(name));
        }
        let files =
            ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"];
        for file in files {
            cases.push(case(format!("{name}/{file}"), &["generate", name, "--prompt", "a b", "--threads", "1"]));
        }
    }
    copy(&dir.join("llama_tiny"), &dir.join("chat"));
    let template = "{% for message in messages %}{{ '<' + message['role'] ~ '>' }}{% if loop.last and not x %}{{ message.content|trim }}\
                    {% endif %}{% endfor %}{% set ns = namespace(n=2) %}{{ range(3)|join(',') * ns.n }}{{ [1, 'a', {'b': 2}]|tojson }}";
    std::fs::write(dir.join("chat/chat_template.jinja"), template).unwrap();
    let args = ["generate", "chat", "--chat", "--prompt", "a b", "--threads", "1"];
    cases.push(case("chat/chat_template.jinja", &args));
    copy(&fixtures.join("llama_tiny/lora"), &dir.join("adapter"));
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        let args = ["generate", "adapter", "--base", "llama_tiny", "--prompt", "a b", "--threads", "1"];
        cases.push(case(format!("adapter/{file}"), &args));
    }
    for name in ["bert_tiny", "bert_tiny_classes"] {
        copy(&fixtures.join(name), &dir.join(name));
        cases.push(case(format!("{name}/config.json"), &["estimate", "--model", name, "--ranks", "2"]));
    }
    let rows: String =
        (0..20).map(|at| format!("{{\"text\": \"row {at} of \\u00e9\", \"label\": {}}}\n", at % 3)).collect();
    std::fs::write(dir.join("rows.jsonl"), &rows).unwrap();
    std::fs::write(dir.join("rows.json"), format!("[{}]", rows.trim().replace('\n', ","))).unwrap();
    std::fs::write(dir.join("rows.csv"), "text,label\n\"a, b\",1\nc d e f g h i j,2\n".repeat(9)).unwrap();
    std::fs::write(dir.join("book.txt"), "to be, or not to be \u{e9}\n".repeat(9)).unwrap();
    let packed = File::create(dir.join("book.txt.gz")).unwrap();
    let mut packed = flate2::write::GzEncoder::new(packed, flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, "to be, or not to be\n".repeat(9).as_bytes()).unwrap();
    packed.finish().unwrap();
    for file in ["rows.jsonl", "rows.json", "rows.csv", "book.txt", "book.txt.gz"] {
        let args = ["train", "--weights", "gpt2_tiny", "--data", file, "--seq", "8", "--steps", "1", "--threads", "1"];
        cases.push(case(file, &args));
    }
    // Conversations, by a template that tells answers by growing parts and by one that marks them.
    let chats = json!([
        { "messages": [{ "role": "system", "content": "be \u{1f642}" }, { "role": "user", "content": "a b" }, { "role": "assistant", "content": "c" }] },
        { "messages": [{ "role": "user", "content": "" }, { "role": "assistant", "content": "d e" }, { "role": "user", "content": "f" }] },
    ]);
    let lines = |rows: &Value| rows.as_array().unwrap().iter().map(|row| format!("{row}\n")).collect::<String>();
    std::fs::write(dir.join("chats.json"), chats.to_string()).unwrap();
    std::fs::write(dir.join("chats.jsonl"), lines(&chats)).unwrap();
    let pairs = json!([{ "prompt": "a b", "completion": "c" }, { "prompt": "", "completion": "d e f", "n": [1, { "o": null }] }]);
    std::fs::write(dir.join("pairs.jsonl"), lines(&pairs)).unwrap();
    std::fs::write(dir.join("pairs.csv"), "prompt,completion\n\"a, b\",c\nd e,f g h\n").unwrap();
    for (name, mark) in [("growing", ""), ("marked", "{% generation %}")] {
        copy(&dir.join("llama_tiny"), &dir.join(name));
        let template = [
            "{% for m in messages %}{{ m.role[0] }}",
            mark,
            "{{ m.content }}{{ eos_token }}",
            &mark.replace("gen", "endgen"),
            "{% endfor %}{% if add_generation_prompt %}a{% endif %}",
        ]
        .concat();
        std::fs::write(dir.join(name).join("chat_template.jinja"), template).unwrap();
        for file in ["chats.json", "chats.jsonl", "pairs.jsonl", "pairs.csv"] {
            let args = ["train", "--weights", name, "--data", file, "--seq", "16", "--steps", "1", "--threads", "1"];
            cases.push(case(file, &args));
        }
        let args =
            ["train", "--weights", name, "--data", "chats.jsonl", "--seq", "16", "--steps", "1", "--threads", "1"];
        cases.push(case(format!("{name}/chat_template.jinja"), &args));
    }
    cases
}

/// Runs a case with these bytes in its file; the error describes the failure.
fn run(dir: &Path, case: &Case, bytes: &[u8], longest: Duration) -> Result<(), String> {
    std::fs::write(dir.join(&case.file), bytes).unwrap();
    let told = dir.join("told");
    let mut child = Command::new(env!("CARGO_BIN_EXE_zero"))
        .args(&case.args)
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&told).unwrap())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if begin.elapsed() > longest => {
                child.kill().unwrap();
                child.wait().unwrap();
                return Err(format!("ran for more than {longest:?}"));
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let told = String::from_utf8_lossy(&std::fs::read(&told).unwrap()).into_owned();
    if told.contains("panicked") || !matches!(status.code(), Some(0..=2)) {
        return Err(format!("{status}: {told}"));
    }
    let errors: Vec<&str> = told.lines().filter(|line| line.contains("error")).collect();
    let folder = case.file.split('/').next().unwrap_or_default();
    let names = |line: &&&str| line.contains(folder) || line.contains(case.file.rsplit('/').next().unwrap_or_default());
    if status.code() != Some(0) && errors.iter().find(names).is_none() {
        return Err(format!("{status}, and no line names {}: {told}", case.file));
    }
    Ok(())
}

#[test]
fn damaged_folders_and_files_end_with_one_message() {
    let asked = std::env::var("ZERO_FUZZ_RUNS").ok().map(|runs| runs.parse::<usize>().unwrap());
    let (runs, longest) = (asked.unwrap_or(RUNS), LONGEST[usize::from(asked.is_none())]);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let wrong = &wrong;
            scope.spawn(move || {
                let dir = tempfile::tempdir().unwrap();
                let dir = dir.path();
                let cases = inputs(dir);
                for number in (worker..runs).step_by(2) {
                    let mut random = Random(number as u64);
                    let case = &cases[number % cases.len()];
                    let sound = std::fs::read(dir.join(&case.file)).unwrap();
                    let mut bytes = sound.clone();
                    match case.file.ends_with(".safetensors") {
                        true => mutate_file(&mut random, &mut bytes),
                        false => mutate(&mut random, &mut bytes),
                    }
                    if let Err(problem) = run(dir, case, &bytes, longest) {
                        let shown = bytes[..bytes.len().min(1500)].escape_ascii();
                        wrong.lock().unwrap().push(format!("run {number}, {}: {problem}\n{shown}", case.file));
                    }
                    std::fs::write(dir.join(&case.file), sound).unwrap();
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {runs}:\n{}", wrong.len(), wrong[..wrong.len().min(12)].join("\n\n"));
}
