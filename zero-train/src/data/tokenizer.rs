//! What cuts text into tokens: the model's own tokenizer, or GPT-2's, whose table is part of the program.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokenizers::NormalizerWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use unicode_segmentation::UnicodeSegmentation;

use super::Cutting;
use super::wordpiece::{self, GOES_ON, SPECIAL};
use crate::error::{Result, io, wrong, wrong_data};

/// GPT-2's tokens, the end of a text included.
const GPT2_TOKENS: usize = 50257;

/// Files of tokenizers that are not read.
const OTHERS: [&str; 5] = ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "vocab.json"];

/// Tokens that end a document, in tokenizers that do not say which of theirs does.
const ENDS: [&str; 5] = ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]"];

/// Tokens that begin a text, in tokenizers that have one.
const BEGINS: [&str; 2] = ["<s>", "[CLS]"];

/// Cuts text into ids.
pub struct Tokenizer {
    kind: Kind,
    /// Of its files, to tell it from others.
    pub(super) checksum: u32,
    end: Option<u32>,
    /// Whether [`encode`](Self::encode) tells sentences and documents apart.
    pub(super) sentences: bool,
}

enum Kind {
    Gpt2,
    File(Box<tokenizers::Tokenizer>),
}

impl core::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Tokenizer of {} tokens", self.tokens())
    }
}

impl Tokenizer {
    /// The one that is asked for, or the model's, or GPT-2's; `text` is what it is for, for messages.
    ///
    /// # Errors
    ///
    /// [`TrainError`](crate::TrainError) when a file cannot be used, or the model does not know all its tokens.
    pub fn find(text: &Path, cutting: &Cutting<'_>) -> Result<Self> {
        let (found, whose) = match cutting.tokenizer {
            Some(given) => match Self::read(given)? {
                Some(found) => (Some(found), given),
                None => {
                    let expected = "expected a tokenizer.json, or a folder with one (or with vocab.json and merges.txt, or vocab.txt)";
                    return Err(wrong("tokenizer", given.display(), expected));
                }
            },
            None => {
                let read = cutting.folders.iter().map(|folder| Ok((Self::read(folder)?, *folder)));
                read.collect::<Result<Vec<_>>>()?.into_iter().find(|(found, _)| found.is_some()).unwrap_or((None, text))
            }
        };
        let ids = "or cut the text with the model's own tokenizer and give the ids: --data FILE.safetensors with an int tensor \
                   input_ids [rows, T]";
        let vocab_size = cutting.vocab_size;
        let Some(found) = found else {
            let other = |folder: &&Path| OTHERS.iter().map(|file| folder.join(file)).find(|path| path.is_file());
            if let Some(other) = cutting.folders.iter().find_map(other) {
                let problem = format!(
                    "is the model's tokenizer, and of a kind that is not read: add its tokenizer.json (transformers' \
                     save_pretrained writes one), give one with --tokenizer FILE, {ids}"
                );
                return Err(wrong_data(&other, problem));
            }
            if cutting.sentences {
                let problem = "is text, and no tokenizer is there: make one from it with `zero tokenizer DIR --data FILE`, and give \
                               it with --tokenizer DIR";
                return Err(wrong_data(text, problem));
            }
            if vocab_size < GPT2_TOKENS {
                let problem = format!(
                    "is text, which without a tokenizer of the model's own is cut into GPT-2's tokens, but the model has \
                     {vocab_size} tokens, and GPT-2 {GPT2_TOKENS}: give its tokenizer with --tokenizer FILE, {ids}"
                );
                return Err(wrong_data(text, problem));
            }
            return Ok(Self { kind: Kind::Gpt2, checksum: 0, end: Some(GPT2_TOKENS as u32 - 1), sentences: false });
        };
        let tokens = found.tokens();
        if tokens > vocab_size {
            let problem = format!(
                "has a tokenizer of {tokens} tokens, and the model knows {vocab_size}: use the tokenizer that the model was \
                 made for"
            );
            return Err(wrong_data(whose, problem));
        }
        if cutting.sentences { found.for_sentences(whose) } else { Ok(found) }
    }

    pub(super) fn new(tokenizer: tokenizers::Tokenizer, checksum: u32, end: Option<u32>) -> Self {
        Self { kind: Kind::File(Box::new(tokenizer)), checksum, end, sentences: false }
    }

    /// The same, to tell sentences apart: each is followed by `[SEP]`, and each document by another.
    pub(super) fn for_sentences(mut self, path: &Path) -> Result<Self> {
        for token in SPECIAL {
            if self.id(token).is_none() {
                let problem =
                    format!("has no token {token}: expected a tokenizer as BERT's (`zero tokenizer` makes one)");
                return Err(wrong_data(path, problem));
            }
        }
        (self.end, self.sentences) = (self.id("[SEP]"), true);
        Ok(self)
    }

    /// Writes `tokenizer.json`, `vocab.txt` and `tokenizer_config.json` into a new folder, as transformers read them.
    ///
    /// # Errors
    ///
    /// [`TrainError`](crate::TrainError) when they cannot be written, or are there.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let Kind::File(tokenizer) = &self.kind else { unreachable!("GPT-2's tokenizer is never made") };
        std::fs::create_dir_all(dir).map_err(io("create", dir))?;
        let mut vocabulary: Vec<(String, u32)> = tokenizer.get_vocab(true).into_iter().collect();
        vocabulary.sort_by_key(|(_, id)| *id);
        let lines: String = vocabulary.iter().map(|(token, _)| format!("{token}\n")).collect();
        let lowercase = matches!(
            tokenizer.get_normalizer(),
            Some(NormalizerWrapper::BertNormalizer(normalizer)) if normalizer.lowercase
        );
        let config = json!({ "tokenizer_class": "BertTokenizer", "do_lower_case": lowercase });
        let files = [
            ("vocab.txt", lines),
            ("tokenizer_config.json", format!("{config:#}\n")),
            ("tokenizer.json", tokenizer.to_string(true).expect("a tokenizer is numbers and texts")),
        ];
        for (name, text) in files {
            let path = dir.join(name);
            let file = std::fs::File::create_new(&path).map_err(io("create", &path))?;
            (&file).write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(io("write", &path))?;
        }
        Ok(())
    }

    /// The number of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        match &self.kind {
            Kind::Gpt2 => self.end.filter(|_| token == ENDS[0]),
            Kind::File(tokenizer) => tokenizer.token_to_id(token),
        }
    }

    /// By their numbers, whether tokens go on with a word.
    pub(super) fn going_on(&self) -> Vec<bool> {
        let mut all = vec![false; self.tokens()];
        if let Kind::File(tokenizer) = &self.kind {
            for (token, id) in tokenizer.get_vocab(true) {
                all[id as usize] = token.starts_with(GOES_ON);
            }
        }
        all
    }

    /// The tokenizer in a file or folder, if there is one.
    fn read(path: &Path) -> Result<Option<Self>> {
        let in_folder = |file: &str| Some(path.join(file)).filter(|path| path.is_file());
        let json = if path.is_file() { Some(path.to_path_buf()) } else { in_folder("tokenizer.json") };
        let vocabulary = in_folder("vocab.txt");
        let bad = |path: &Path| {
            let path = path.to_path_buf();
            move |error: tokenizers::Error| wrong_data(&path, format!("is no tokenizer that can be used ({error})"))
        };
        let (mut tokenizer, files) = match (json, in_folder("vocab.json"), in_folder("merges.txt")) {
            (Some(json), ..) => (tokenizers::Tokenizer::from_file(&json).map_err(bad(&json))?, vec![json]),
            // As GPT-2's, whose kind of tokenizer has these files.
            (None, Some(vocab), Some(merges)) => {
                let files = [&vocab, &merges].map(|path| path.display().to_string());
                let bpe = BPE::from_file(&files[0], &files[1]).build().map_err(bad(&vocab))?;
                let mut tokenizer = tokenizers::Tokenizer::new(bpe);
                tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
                (tokenizer, vec![vocab, merges])
            }
            _ => match vocabulary {
                Some(path) => {
                    let lines = std::fs::read_to_string(&path).map_err(io("read", &path))?;
                    (wordpiece::of_lines(&lines, wordpiece::lowercases(&path)).map_err(bad(&path))?, vec![path])
                }
                None => return Ok(None),
            },
        };
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(bad(path))?;
        let end = end_of_text(&files[0], &tokenizer)?;
        let mut checksum = 0;
        for file in &files {
            checksum = crc32c::crc32c_append(checksum, &std::fs::read(file).map_err(io("read", file))?);
        }
        Ok(Some(Self::new(tokenizer, checksum, end)))
    }

    /// How many tokens there are.
    pub fn tokens(&self) -> usize {
        match &self.kind {
            Kind::Gpt2 => GPT2_TOKENS,
            Kind::File(tokenizer) => {
                tokenizer.get_vocab(true).into_values().max().map_or(0, |largest| largest as usize + 1)
            }
        }
    }

    /// The token that begins a text, if it has one.
    pub fn begin(&self) -> Option<u32> {
        BEGINS.iter().find_map(|token| self.id(token))
    }

    /// The token that ends a document, if it has one.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The tokens of a text, without special ones but those that tell sentences apart. A line ends a sentence, an empty line a
    /// document.
    ///
    /// # Errors
    ///
    /// What the tokenizer says.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        if !self.sentences {
            return self.cut(text);
        }
        let mut all: Vec<u32> = Vec::new();
        let mut ended = true;
        for line in text.lines() {
            if line.trim().is_empty() {
                all.extend(self.end.filter(|_| !ended));
                ended = true;
            }
            for sentence in line.unicode_sentences() {
                let ids = self.cut(sentence)?;
                if !ids.is_empty() {
                    all.extend(ids.into_iter().chain(self.end));
                    ended = false;
                }
            }
        }
        Ok(all)
    }

    /// The text of tokens, without special ones. What is no text is shown as U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.kind {
            Kind::Gpt2 => {
                let known: Vec<u32> = ids.iter().copied().filter(|&id| (id as usize) < GPT2_TOKENS - 1).collect();
                let bytes = tiktoken_rs::r50k_base_singleton().decode_bytes(&known).unwrap_or_default();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::File(tokenizer) => tokenizer.decode(ids, true).unwrap_or_default(),
        }
    }

    fn cut(&self, text: &str) -> Result<Vec<u32>, String> {
        match &self.kind {
            Kind::Gpt2 => Ok(tiktoken_rs::r50k_base_singleton().encode_ordinary(text)),
            Kind::File(tokenizer) => {
                let cut = tokenizer.encode_fast(text, false);
                cut.map(|cut| cut.get_ids().to_vec()).map_err(|error| format!("cannot be cut into tokens: {error}"))
            }
        }
    }
}

/// What `tokenizer_config.json` beside the tokenizer says, or the first of the usual ones that it has.
fn end_of_text(file: &Path, tokenizer: &tokenizers::Tokenizer) -> Result<Option<u32>> {
    let config: PathBuf = file.with_file_name("tokenizer_config.json");
    if config.is_file() {
        let bytes = std::fs::read(&config).map_err(io("read", &config))?;
        let whole: Value = serde_json::from_slice(&bytes)
            .map_err(|error| wrong_data(&config, format!("is not a whole JSON file ({error}): write it again")))?;
        let token = &whole["eos_token"];
        if let Some(token) = token.as_str().or(token["content"].as_str()) {
            return Ok(tokenizer.token_to_id(token));
        }
    }
    Ok(ENDS.iter().find_map(|token| tokenizer.token_to_id(token)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cutting<'a>(vocab_size: usize, folders: &'a [&'a Path]) -> Cutting<'a> {
        Cutting { vocab_size, n_positions: 8, folders, ..Cutting::default() }
    }

    /// Words of a small vocabulary.
    fn words(dir: &Path, words: &[&str]) {
        let vocab: serde_json::Map<_, _> =
            words.iter().enumerate().map(|(id, word)| (word.to_string(), id.into())).collect();
        let json = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": { "type": "Whitespace" },
            "post_processor": null, "decoder": null,
            "truncation": { "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0 },
            "padding": null,
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": words[0] }
        });
        std::fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
    }

    #[test]
    fn the_models_own_cuts_and_gpt2s_where_it_has_none() {
        let (text, dir) = (Path::new("book.txt"), tempfile::tempdir().unwrap());
        words(dir.path(), &["<unk>", "a", "rose", "is", "</s>"]);
        let own = Tokenizer::find(text, &cutting(5, &[dir.path()])).unwrap();
        assert_eq!((own.tokens(), own.end()), (5, Some(4)));
        assert_eq!(own.encode("a rose is a flower").unwrap(), [1, 2, 3, 1, 0]);
        std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"eos_token": {"content": "is"}}"#).unwrap();
        assert_eq!(Tokenizer::find(text, &cutting(5, &[dir.path()])).unwrap().end(), Some(3));
        // Asked for.
        let given = Cutting { tokenizer: Some(dir.path()), ..cutting(50257, &[]) };
        assert_eq!(Tokenizer::find(text, &given).unwrap().tokens(), 5);
        let gpt2 = Tokenizer::find(text, &cutting(50257, &[])).unwrap();
        assert_eq!(gpt2.encode("Hello world").unwrap(), [15496, 995]);
    }

    #[test]
    fn what_is_not_the_models_is_refused() {
        let (text, dir) = (Path::new("book.txt"), tempfile::tempdir().unwrap());
        let told = |cutting: &Cutting<'_>| Tokenizer::find(text, cutting).err().unwrap().to_string();
        let error = told(&cutting(32000, &[]));
        assert!(error.starts_with("book.txt: is text") && error.contains("the model has 32000 tokens"), "{error}");
        words(dir.path(), &["<unk>", "a", "rose"]);
        let error = told(&cutting(2, &[dir.path()]));
        assert!(error.contains("a tokenizer of 3 tokens, and the model knows 2"), "{error}");
        for (file, content) in [("tokenizer.json", "{"), ("tokenizer.model", ""), ("vocab.json", "{}")] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(file), content).unwrap();
            let error = told(&cutting(50257, &[dir.path()]));
            assert!(error.contains(file) && error.contains("tokenizer"), "{error}");
        }
        let missing = Cutting { tokenizer: Some(Path::new("/nowhere")), ..cutting(50257, &[]) };
        assert!(told(&missing).contains("--tokenizer /nowhere: expected a tokenizer.json"));
    }
}
