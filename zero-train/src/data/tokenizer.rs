//! Whether a model's tokenizer is GPT-2's, which cuts text.

use std::path::Path;

use serde_json::Value;

use super::{read, wrong_data};
use crate::TrainError;

/// GPT-2's tokens, the end of a text included.
const GPT2_TOKENS: usize = 50257;

/// Files of tokenizers of other kinds.
const OTHERS: [&str; 5] = ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "tekken.json"];

/// Refuses to cut `text` for a model that has fewer tokens than GPT-2, or whose folders have another tokenizer.
pub(super) fn check(text: &Path, vocab_size: usize, folders: &[&Path]) -> Result<(), TrainError> {
    let problem = |why: String| {
        let problem = format!(
            "is text, which is cut into GPT-2's tokens, but {why}: cut it with the model's own tokenizer, and give the ids \
             as --data FILE.safetensors with an int tensor input_ids [rows, T]"
        );
        wrong_data(text, problem)
    };
    if vocab_size < GPT2_TOKENS {
        return Err(problem(format!("the model has {vocab_size} tokens, and GPT-2 {GPT2_TOKENS}")));
    }
    for folder in folders {
        if let Some(file) = foreign(folder)? {
            return Err(problem(format!(
                "{} is the model's tokenizer, and is not GPT-2's",
                folder.join(file).display()
            )));
        }
    }
    Ok(())
}

/// The file of the folder's tokenizer, if that is not GPT-2's. A folder without a tokenizer has no other.
fn foreign(folder: &Path) -> Result<Option<&'static str>, TrainError> {
    for (file, vocabulary) in [("tokenizer.json", "/model/vocab"), ("vocab.json", "")] {
        let path = folder.join(file);
        if !path.is_file() {
            continue;
        }
        let whole: Value = serde_json::from_slice(&read(&path)?)
            .map_err(|error| wrong_data(&path, format!("is not a whole JSON file ({error}): write it again")))?;
        return Ok(Some(file).filter(|_| !whole.pointer(vocabulary).is_some_and(is_gpt2s)));
    }
    Ok(OTHERS.into_iter().find(|file| folder.join(file).is_file()))
}

/// Whether every token that text can be cut into has GPT-2's number. Tokens beside them do no harm.
fn is_gpt2s(vocabulary: &Value) -> bool {
    let gpt2 = tiktoken_rs::r50k_base_singleton();
    // The last one ends a text, and is not cut from one.
    (0..GPT2_TOKENS as u32 - 1).all(|id| {
        let token: Option<String> =
            gpt2.decode_bytes(&[id]).ok().map(|bytes| bytes.into_iter().map(character).collect());
        token.is_some_and(|token| vocabulary.get(token.as_str()).and_then(Value::as_u64) == Some(id.into()))
    })
}

/// What stands for a byte in the files of GPT-2's tokenizer: itself where it can be printed, others from U+0100 on.
fn character(byte: u8) -> char {
    let printed = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..);
    match printed(byte) {
        true => byte.into(),
        false => {
            let before = (0..byte).filter(|&byte| !printed(byte)).count() as u32;
            char::from_u32(0x100 + before).expect("256 code points from U+0100 on are characters")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GPT-2's vocabulary as its `vocab.json` has it, with the number of one token changed if it is asked for.
    fn vocabulary(changed: Option<u32>) -> Value {
        let gpt2 = tiktoken_rs::r50k_base_singleton();
        let entry = |id: u32| {
            let token: String = gpt2.decode_bytes(&[id]).unwrap().into_iter().map(character).collect();
            (token, Value::from(if Some(id) == changed { id + 60_000 } else { id }))
        };
        Value::Object((0..GPT2_TOKENS as u32 - 1).map(entry).collect())
    }

    fn folder(file: &str, content: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(file), content).unwrap();
        dir
    }

    #[test]
    fn the_bytes_of_gpt2s_files() {
        // "Ġ" is the blank before a word, "Ċ" the end of a line, "Ń" the last of those that are not printed.
        assert_eq!([b' ', b'\n', b'A', 0xad, 0xff].map(character), ['Ġ', 'Ċ', 'A', 'Ń', 'ÿ']);
        assert_eq!(vocabulary(None)["Hello"], 15496);
        assert_eq!(vocabulary(None)["Ġworld"], 995);
    }

    #[test]
    fn text_is_cut_for_gpt2s_tokenizer_alone() {
        let text = Path::new("book.txt");
        let told = |vocab_size, folder: &Path| check(text, vocab_size, &[folder]).map_err(|error| error.to_string());
        let bpe = |vocab: Value| serde_json::json!({ "model": { "type": "BPE", "vocab": vocab } }).to_string();
        let good = folder("vocab.json", &vocabulary(None).to_string());
        assert_eq!(told(50257, good.path()), Ok(()));
        let good = folder("tokenizer.json", &bpe(vocabulary(None)));
        assert_eq!(told(50304, good.path()), Ok(()));
        let none = tempfile::tempdir().unwrap();
        assert_eq!(told(50257, none.path()), Ok(()));
        let error = told(32000, none.path()).unwrap_err();
        assert!(error.starts_with("book.txt: is text") && error.contains("the model has 32000 tokens"), "{error}");

        for (file, content) in [
            ("vocab.json", vocabulary(Some(1234)).to_string()),
            ("tokenizer.json", bpe(vocabulary(Some(0)))),
            ("tokenizer.json", serde_json::json!({ "model": { "vocab": [["<unk>", 0.0]] } }).to_string()),
            ("tokenizer.model", String::new()),
        ] {
            let other = folder(file, &content);
            let error = told(50257, other.path()).unwrap_err();
            assert!(error.contains(&format!("{file} is the model's tokenizer")), "{error}");
            assert!(error.contains("--data FILE.safetensors with an int tensor input_ids"), "{error}");
        }
        let broken = folder("tokenizer.json", "{");
        assert!(told(50257, broken.path()).unwrap_err().contains("is not a whole JSON file"));
    }
}
