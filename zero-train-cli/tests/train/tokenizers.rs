//! `cargo test -p zero-train-cli --test train tokenizers`
//!
//! Texts and tokens equal those of transformers 5.23, for the kinds of tokenizers that models use;
//! `tests/fixtures/make_tokenizers.py` creates the tokenizers and the references.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use zero_train::data::{Message, TokenizeOptions, Tokenizer};

use crate::common::texts::{fixture as folder, ok, refused};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tokenizers")
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as u32).collect()
}

#[test]
fn ids_and_texts_are_those_of_transformers() {
    let made = json_of(&fixtures().join("texts.json"));
    let texts: Vec<&str> = made["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert!(texts.len() >= 200);
    let mut wrong = Vec::new();
    for (kind, expected) in made["kinds"].as_object().unwrap() {
        let dir = fixtures().join(kind);
        let tokenize = TokenizeOptions { vocab_size: 1 << 20, tokenizer: Some(&dir), ..TokenizeOptions::default() };
        let tokenizer = Tokenizer::find(&dir, &tokenize).unwrap();
        // BERT's name none, and have [SEP].
        let end = expected["eos"].as_u64().or(tokenizer.id("[SEP]").map(u64::from));
        assert_eq!(tokenizer.end().map(u64::from), end, "{kind}");
        for (at, text) in texts.iter().enumerate() {
            let ids = numbers(&expected["ids"][at]);
            let behind =
                usize::from(["bart", "bert", "bert_accents", "t5_model", "xlm_roberta_model"].contains(&&**kind));
            let cut = tokenizer.encode(text).unwrap();
            let got = [tokenizer.prefix_ids(), &cut].concat();
            if got != ids[..ids.len() - behind] {
                wrong.push(format!("{kind}: {text:?}: {got:?}, expected {ids:?}"));
            }
            let (got, text) = (tokenizer.decode(&ids), expected["texts"][at].as_str().unwrap());
            if got != text {
                wrong.push(format!("{kind}: {ids:?}: {got:?}, expected {text:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ: {:#?}", wrong.len(), &wrong[..wrong.len().min(12)]);
}

fn generated(dir: &Path, model: &str, prompts: &[&str], options: &[&str]) -> Vec<Value> {
    let prompts = prompts.iter().flat_map(|prompt| ["--prompt", prompt]).collect::<Vec<_>>();
    let args = [&["generate", model, "--json", "--max-new-tokens", "14"][..], &prompts, options].concat();
    ok(&args, dir).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const MODELS: [&str; 9] = [
    "llama_tiny",
    "mistral_tiny",
    "qwen2_tiny",
    "qwen3_tiny",
    "gemma_tiny",
    "gemma2_tiny",
    "gemma3_tiny",
    "phi3_tiny",
    "gpt2_tiny",
];

#[test]
fn generated_texts_are_those_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    for name in MODELS {
        folder(dir.path(), name);
        let made = json_of(&dir.path().join(name).join("made.json"));
        let made = made.as_array().unwrap();
        let ends = json_of(&dir.path().join(name).join("generation_config.json"))["eos_token_id"].clone();
        let ends = if ends.is_array() { numbers(&ends) } else { vec![ends.as_u64().unwrap() as u32] };
        let prompts: Vec<&str> = made.iter().map(|row| row["prompt"].as_str().unwrap()).collect();
        for (got, row) in generated(dir.path(), name, &prompts, &[]).iter().zip(made) {
            let mut expected = numbers(&row["made"]);
            let ended = expected.pop_if(|last| ends.contains(last));
            assert_eq!(numbers(&got["tokens"]), expected, "{name}: {row}");
            let text = format!("{}{}", row["given"].as_str().unwrap(), got["text"].as_str().unwrap());
            // The token that ends a text is not shown.
            let all = row["all"].as_str().unwrap();
            let shown = if ended.is_some_and(|end| end > 2 && end < 60) { &all[..all.len() - 1] } else { all };
            assert_eq!(text, shown, "{name}: {row}");
        }
    }
}

/// Sequence-to-sequence models: the prompts, and the generated texts and tokens.
const SEQ2SEQ: [&str; 3] = ["bart_tiny", "t5_tiny", "flan_t5_tiny"];

#[test]
fn texts_of_texts_are_those_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    for name in SEQ2SEQ {
        folder(dir.path(), name);
        let made = json_of(&dir.path().join(name).join("made.json"));
        let made = made.as_array().unwrap();
        let ends = numbers(&json_of(&dir.path().join(name).join("generation_config.json"))["eos_token_id"]);
        let tokenize =
            TokenizeOptions { vocab_size: 61, tokenizer: Some(&dir.path().join(name)), ..TokenizeOptions::default() };
        let tokenizer = Tokenizer::find(dir.path(), &tokenize).unwrap();
        let prompts: Vec<&str> = made.iter().map(|row| row["prompt"].as_str().unwrap()).collect();
        for (got, row) in generated(dir.path(), name, &prompts, &[]).iter().zip(made) {
            let all = numbers(&row["made"]);
            let without = all.strip_suffix(&[*all.last().unwrap()]).filter(|_| ends.contains(all.last().unwrap()));
            assert_eq!(numbers(&got["tokens"]), without.unwrap_or(&all), "{name}: {row}");
            assert_eq!(got["text"], tokenizer.decode(without.unwrap_or(&all)), "{name}: {row}");
            assert_eq!(tokenizer.decode(&all), row["all"].as_str().unwrap(), "{name}: {row}");
        }
    }
}

#[test]
fn conversations_are_those_of_transformers() {
    let made = json_of(&fixtures().join("../chat.json"));
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::copy(fixtures().join("../texts/llama_tiny/tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    let tokenize = TokenizeOptions { vocab_size: 61, tokenizer: Some(dir), ..TokenizeOptions::default() };
    for (at, row) in made["templates"].as_array().unwrap().iter().enumerate() {
        let mut config = made["special"].clone();
        let (name, template) = (row["name"].as_str().unwrap(), &row["template"]);
        // In any of the places.
        let _ = std::fs::remove_file(dir.join("chat_template.jinja"));
        match at % 3 {
            0 => config["chat_template"] = template.clone(),
            1 => {
                config["chat_template"] =
                    json!([{ "name": "tool_use", "template": "" }, { "name": "default", "template": template }])
            }
            _ => std::fs::write(dir.join("chat_template.jinja"), template.as_str().unwrap()).unwrap(),
        }
        std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
        let tokenizer = Tokenizer::find(dir, &tokenize).unwrap();
        for (messages, made) in made["conversations"].as_array().unwrap().iter().zip(row["made"].as_array().unwrap()) {
            let text = |value: &Value| value.as_str().unwrap().to_string();
            let conversation: Vec<Message> = messages
                .as_array()
                .unwrap()
                .iter()
                .map(|message| Message { role: text(&message[0]), content: text(&message[1]) })
                .collect();
            match (tokenizer.chat(&conversation), made["text"].as_str()) {
                (Ok(got), Some(expected)) => assert_eq!(got, expected, "{name}: {messages}"),
                (Err(told), None) => assert!(told.contains(made["error"].as_str().unwrap()), "{name}: {told}"),
                (got, _) => panic!("{name}, {messages}: {got:?}, expected {made}"),
            }
        }
    }
}

#[test]
fn a_model_chats_by_its_template() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    folder(dir, "llama_tiny");
    let told = refused(&["generate", "llama_tiny", "--chat", "--prompt", "Hi"], dir);
    assert!(told.contains("has no chat template"), "{told}");
    let template = "{{ bos_token }}{% for message in messages %}{{ message.content }}.{% endfor %}";
    let write = |template: &str| std::fs::write(dir.join("llama_tiny/chat_template.jinja"), template).unwrap();
    write(template);
    // The same as the text that the template makes, of which the prompt is no part.
    let plain = generated(dir, "llama_tiny", &["be.Hi."], &[]);
    let answered = generated(dir, "llama_tiny", &["Hi"], &["--chat", "--system", "be"]);
    assert_eq!((&answered[0]["tokens"], &answered[0]["prompt"]), (&plain[0]["tokens"], &json!("Hi")));
    let chat = |options: &[&str], input: &str| {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_zero"))
            .args([&["chat", "llama_tiny", "--max-new-tokens", "4"][..], options].concat())
            .current_dir(dir)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), input.as_bytes()).unwrap();
        let ran = child.wait_with_output().unwrap();
        assert!(ran.status.success());
        String::from_utf8(ran.stdout).unwrap()
    };
    let lines = chat(&["--json"], "Hi\n\nto be\n");
    let turns: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let first = turns[0]["text"].as_str().unwrap();
    // The second answer knows of the first.
    let args = ["generate", "llama_tiny", "--json", "--max-new-tokens", "4", "--prompt"];
    let second = ok(&[&args[..], &[&format!("Hi.{first}.to be.")]].concat(), dir);
    assert_eq!(turns[1]["text"], serde_json::from_str::<Value>(&second).unwrap()["text"]);
    assert_eq!(
        chat(&[], "Hi\nto be\n"),
        turns.iter().map(|turn| format!("{}\n", turn["text"].as_str().unwrap())).collect::<String>()
    );
    std::fs::write(dir.join("empty.txt"), "").unwrap();
    let told = refused(&["generate", "llama_tiny", "--prompts", "empty.txt"], dir);
    assert!(told.contains("empty.txt") && told.contains("expected one prompt per line"), "{told}");
    let told = refused(&["generate", "llama_tiny", "--prompt", "a", "--system", "be"], dir);
    assert!(told.contains("--system be: expected --chat as well"), "{told}");
    assert!(!chat(&["--system", "be"], "Hi\n").is_empty());
    // Programs that do not end, take all memory, or are none.
    for (template, expected) in [
        ("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", "more than 5000000 steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'x' * 9999999999 }}", "cannot be used"),
        ("{% for %}", "syntax error"),
        ("{%}", "syntax error"),
        ("{{ raise_exception('no, thanks') }}", "no, thanks"),
    ] {
        write(template);
        let told = refused(&["generate", "llama_tiny", "--chat", "--prompt", "Hi"], dir);
        assert!(told.contains(expected) && told.contains("the chat template"), "{template}: {told}");
    }
}

#[test]
fn settings_of_a_folder_are_those_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut ended = 0;
    for name in MODELS.into_iter().chain(SEQ2SEQ) {
        folder(dir, name);
        let config = json_of(&dir.join(name).join("config.json"));
        let prompts = json_of(&dir.join(name).join("made.json"));
        let prompts: Vec<&str> =
            prompts.as_array().unwrap().iter().map(|row| row["prompt"].as_str().unwrap()).collect();
        for settings in json_of(&dir.join(name).join("settings.json")).as_array().unwrap() {
            let (file, keys) = (settings["file"].as_str().unwrap(), settings["keys"].as_object().unwrap());
            let mut of_model = config.clone();
            let _ = std::fs::remove_file(dir.join(name).join("generation_config.json"));
            if file == "config.json" {
                of_model.as_object_mut().unwrap().extend(keys.clone());
            } else {
                std::fs::write(dir.join(name).join(file), Value::from(keys.clone()).to_string()).unwrap();
            }
            std::fs::write(dir.join(name).join("config.json"), of_model.to_string()).unwrap();
            let ends = &keys["eos_token_id"];
            let ends = if ends.is_array() { numbers(ends) } else { vec![ends.as_u64().unwrap() as u32] };
            let args = prompts.iter().flat_map(|prompt| ["--prompt", prompt]).collect::<Vec<_>>();
            let got = ok(&[&["generate", name, "--json"][..], &args].concat(), dir);
            if name == "llama_tiny" {
                // Prompts of a rank may be done before those of another.
                let shared = ok(&[&["generate", name, "--json", "--ranks", "2"][..], &args].concat(), dir);
                assert_eq!(shared, got, "{settings}");
            }
            for ((got, made), prompt) in got.lines().zip(settings["made"].as_array().unwrap()).zip(&prompts) {
                let got: Value = serde_json::from_str(got).unwrap();
                let mut expected = numbers(made);
                ended += usize::from(expected.pop_if(|last| ends.contains(last)).is_some());
                assert_eq!(numbers(&got["tokens"]), expected, "{name}, {prompt:?}: {settings}");
            }
        }
    }
    assert!(ended > 20, "{ended} texts ended before they were as long as they may be");
}

#[test]
fn settings_that_cannot_be_used_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    folder(dir, "llama_tiny");
    let file = dir.join("llama_tiny/generation_config.json");
    for (text, expected) in [
        (r#"{"bad_words_ids": [[3]]}"#, "has bad_words_ids = [[3]], which is not implemented"),
        (r#"{"num_beams": -1}"#, "has num_beams = -1, expected a whole number of at least 0"),
        (r#"{"num_beams": 0}"#, "beams = 0; change it to at least 1"),
        (r#"{"early_stopping": "maybe"}"#, "has early_stopping = \"maybe\", expected true, false or \"never\""),
        (r#"{"do_sample": true, "num_beams": 2}"#, "beam search does not sample"),
        (r#"{"do_sample": true, "typical_p": 0.5}"#, "has typical_p = 0.5, which is not implemented"),
        (r#"{"forced_bos_token_id": 61}"#, "forced_first = 61; change it to below 61"),
        (r#"{"eos_token_id": [2, "x"]}"#, "has eos_token_id = [2,\"x\"], expected a token id, or a list of token ids"),
        (r#"{"max_length": 4}"#, "but max_length is 4, for prompt and new tokens together: shorten it"),
        ("[1]", "holds [1]: expected a JSON object"),
        ("{", "is not valid JSON"),
    ] {
        std::fs::write(&file, text).unwrap();
        let told = refused(&["generate", "llama_tiny", "--prompt", "a rose is"], dir);
        assert!(told.contains(expected), "{text}: {told}");
    }
    // What is looked at only where tokens are drawn.
    std::fs::write(&file, r#"{"typical_p": 0.5, "renormalize_logits": false, "max_new_tokens": 3}"#).unwrap();
    generated(dir, "llama_tiny", &["a"], &[]);
    // Options win over the folder.
    std::fs::write(&file, r#"{"do_sample": true, "top_k": 1, "max_length": 4, "eos_token_id": 60}"#).unwrap();
    let drawn = generated(dir, "llama_tiny", &["a rose is"], &[]);
    assert_eq!(drawn, generated(dir, "llama_tiny", &["a rose is"], &["--temperature", "0"]));
    assert_eq!(numbers(&drawn[0]["tokens"]).len(), 14);
    generated(dir, "llama_tiny", &["a rose is"], &["--beams", "2"]);
}

#[test]
fn an_export_has_what_the_folder_had_and_generates_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("book.txt"), "a rose is a rose is a rose, to be or not to be! ".repeat(30)).unwrap();
    for name in MODELS {
        folder(dir, name);
        // A key that this program does not know.
        let mut config = json_of(&dir.join(name).join("config.json"));
        config["of_another_program"] = json!({ "kept": [1, 2] });
        std::fs::write(dir.join(name).join("config.json"), config.to_string()).unwrap();
        let file = json!({
            "train_micro_batch_size_per_gpu": 1, "optimizer": { "type": "AdamW", "params": { "lr": 1e-3 } },
            "zero_optimization": { "stage": 3, "stage3_gather_16bit_weights_on_model_save": true }
        });
        std::fs::write(dir.join("ds.json"), file.to_string()).unwrap();
        let saved = format!("{name}-saves");
        let train = ["train", "--data", "book.txt", "--seq", "16", "--steps", "2", "--ranks", "2", "--weights", name];
        ok(&[&train[..], &["--config", "ds.json", "--save", &saved]].concat(), dir);
        let (out, whole) = (format!("{name}-out"), format!("{saved}/16bit-model-00000002"));
        ok(&["export", &saved, &out, "--dtype", "bf16"], dir);
        for exported in [&out, &whole] {
            for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
                let read = |folder: &str| std::fs::read(dir.join(folder).join(file)).unwrap();
                assert!(read(exported) == read(name), "{exported}/{file}");
            }
            let kept = json_of(&dir.join(exported).join("config.json"));
            for (key, value) in config.as_object().unwrap() {
                if !["dtype", "torch_dtype", "transformers_version"].contains(&&**key) && !value.is_null() {
                    assert_eq!(&kept[key], value, "{exported}: {key}");
                }
            }
            assert_eq!(kept["torch_dtype"], "bfloat16");
        }
        let prompts = ["a rose", "to be"];
        let expected = generated(dir, &saved, &prompts, &["--dtype", "bf16"]);
        for exported in [&out, &whole] {
            assert_eq!(generated(dir, exported, &prompts, &["--dtype", "bf16"]), expected, "{exported}");
        }
        // An adapter has the tokenizer, and what it is merged into has all.
        let adapter = format!("{name}-adapter");
        let lora = ["--lora-r", "2", "--save", &adapter];
        ok(&[&train[..], &lora].concat(), dir);
        let (small, merged) = (format!("{adapter}-out"), format!("{adapter}-merged"));
        ok(&["export", &adapter, &small], dir);
        ok(&["export", &adapter, &merged, "--merge", "--dtype", "fp32"], dir);
        assert!(dir.join(&small).join("tokenizer.json").is_file());
        assert!(!dir.join(&small).join("generation_config.json").exists());
        assert!(dir.join(&merged).join("generation_config.json").is_file());
        assert_eq!(json_of(&dir.join(&merged).join("config.json"))["of_another_program"], config["of_another_program"]);
        assert_eq!(generated(dir, &merged, &prompts, &[]), generated(dir, &small, &prompts, &[]), "{name}");
    }
}

#[test]
fn only_a_gpt2_has_its_tokens_without_files() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("book.txt"), "a rose is a rose ".repeat(40)).unwrap();
    let config = |name: &str, config: Value| {
        std::fs::create_dir(dir.join(name)).unwrap();
        std::fs::write(dir.join(name).join("config.json"), config.to_string()).unwrap();
    };
    config(
        "gpt2",
        json!({ "model_type": "gpt2", "vocab_size": 50304, "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2 }),
    );
    config(
        "qwen2",
        json!({
            "model_type": "qwen2", "vocab_size": 60000, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "tie_word_embeddings": true
        }),
    );
    let train = |model: &str| {
        ["train", "--data", "book.txt", "--seq", "16", "--steps", "1", "--save", "saves", "--model", model]
            .map(String::from)
    };
    let told = refused(&train("qwen2").each_ref().map(String::as_str), dir);
    assert!(told.contains("qwen2") && told.contains("has no tokenizer"), "{told}");
    ok(&train("gpt2").each_ref().map(String::as_str), dir);
    ok(&["export", "saves", "out"], dir);
    // GPT-2's tokens, as files: the special one is one token, as in transformers.
    let tokenize = |dir| TokenizeOptions { vocab_size: 50304, tokenizer: Some(dir), ..TokenizeOptions::default() };
    let out = dir.join("out");
    let written = Tokenizer::find(&out, &tokenize(&*out)).unwrap();
    let own = Tokenizer::find(&out, &TokenizeOptions { tokenizer: None, ..tokenize(&out) }).unwrap();
    for text in ["Hello world", " a rose", "a<|endoftext|>b", "naïve 🙂 \n\n  x", "日本語"] {
        assert_eq!(written.encode(text), own.encode(text), "{text:?}");
        assert_eq!(written.decode(&own.encode(text).unwrap()), own.decode(&own.encode(text).unwrap()));
    }
    assert_eq!(own.encode("a<|endoftext|>b").unwrap(), [64, 50256, 65]);
    assert_eq!((written.tokens(), written.end(), written.prefix_ids()), (50257, Some(50256), &[][..]));
}
