//! Tokenizers: the model's own, or GPT-2's, whose table is part of the program.

mod chat;
mod files;
mod gpt2;
mod sentence_piece;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde_json::json;
use tokenizers::NormalizerWrapper;
use unicode_segmentation::UnicodeSegmentation;
use zero_core::checkpoint::SideFile;
use zero_models::Seq2SeqSettings;

pub use self::chat::Message;
pub(super) use self::chat::{ChatTemplate, MARK};
use self::files::Read;
use super::wordpiece::{GOES_ON, SPECIAL};
use super::{TokenizeOptions, check_ids};
use crate::caught::caught;
use crate::error::{Result, io, wrong, wrong_data};

/// The largest vocabulary of a GPT-2, padded for speed.
const PADDED: usize = 50432;

/// Tokenizer files of formats that are not supported.
const OTHERS: [&str; 2] = ["tekken.json", "vocab.json"];

/// Tokens that end a document, for tokenizers that do not name theirs.
const ENDS: [&str; 5] = ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]"];

/// Tokens that begin a text, for tokenizers that have one.
const BEGINS: [&str; 2] = ["<s>", "[CLS]"];

/// Texts, at least one of which is a token in most tokenizers.
const LETTERS: [&str; 4] = ["a", "A", "0", "."];

/// The error message for a folder without a chat template.
pub const NO_TEMPLATE: &str = "has no chat template: expected chat_template in tokenizer_config.json, or the file \
                               chat_template.jinja; use a model that was trained to chat";

/// A tokenizer, which converts text to token ids.
pub struct Tokenizer {
    kind: Kind,
    /// Checksum of the tokenizer's files, which identifies the tokenizer.
    pub(super) checksum: u32,
    /// The tokens that it puts before a text.
    begin: Vec<u32>,
    /// The token that begins a text generated from nothing.
    bos: Option<u32>,
    end: Option<u32>,
    /// If set, [`encode`](Self::encode) marks the ends of sentences and documents.
    pub(super) sentences: bool,
    /// The texts of special tokens by name, such as `eos_token`.
    named: BTreeMap<&'static str, String>,
    /// The files that it was read from.
    files: Vec<SideFile>,
    /// The location of these files, for error messages.
    whose: String,
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
    /// Finds the requested tokenizer, or the model's, or GPT-2's. `text` is the data that it is for, for error messages.
    ///
    /// # Errors
    ///
    /// [`DataError`](crate::DataError) if a file cannot be used, or the tokenizer has tokens that the model does not know.
    pub fn find(text: &Path, options: &TokenizeOptions<'_>) -> Result<Self> {
        let (found, whose) = match options.tokenizer {
            Some(given) => match Self::read(given)? {
                Some(found) => (Some(found), given),
                None => {
                    let expected = "expected a tokenizer.json, or a folder with one (or with vocab.json and merges.txt, vocab.txt, or \
                                    tokenizer.model)";
                    return Err(wrong("tokenizer", given.display(), expected));
                }
            },
            None => {
                let read = options.folders.iter().map(|folder| Ok((Self::read(folder)?, *folder)));
                read.collect::<Result<Vec<_>>>()?.into_iter().find(|(found, _)| found.is_some()).unwrap_or((None, text))
            }
        };
        let ids = "or tokenize the text with the model's tokenizer and pass the ids: --data FILE.safetensors with an \
                   integer tensor input_ids [rows, T]";
        let vocab_size = options.vocab_size;
        let Some(found) = found else {
            let other = |folder: &&Path| OTHERS.iter().map(|file| folder.join(file)).find(|path| path.is_file());
            if let Some(other) = options.folders.iter().find_map(other) {
                let problem = format!(
                    "is the model's tokenizer, in a format that is not supported: add its tokenizer.json \
                     (transformers' save_pretrained writes one), pass one with --tokenizer FILE, {ids}"
                );
                return Err(wrong_data(&other, problem));
            }
            if options.sentences {
                let problem = "is text, but there is no tokenizer: create one from it with `zero tokenizer DIR --data \
                               FILE`, and pass it with --tokenizer DIR";
                return Err(wrong_data(text, problem));
            }
            let tokens = gpt2::TOKENS;
            if vocab_size < tokens {
                let problem = format!(
                    "is text, but the model has no tokenizer, and GPT-2's does not fit: it has {tokens} tokens, but \
                     the model has {vocab_size} tokens; pass the model's tokenizer with --tokenizer FILE, {ids}"
                );
                return Err(wrong_data(text, problem));
            }
            // A preset has no tokenizer of its own.
            if let Some(folder) = options.folders.iter().find(|folder| folder.is_dir())
                && !(options.is_gpt2 && vocab_size <= PADDED)
            {
                let problem = format!(
                    "has no tokenizer: add the model's tokenizer.json (transformers' save_pretrained writes one), pass \
                     one with --tokenizer FILE, {ids}"
                );
                return Err(wrong_data(folder, problem));
            }
            let end = Some(tokens as u32 - 1);
            let (kind, begin, files) = (Kind::Gpt2, Vec::new(), Vec::new());
            let named = BTreeMap::new();
            let whose = "the built-in GPT-2 tokenizer".to_string();
            return Ok(Self { kind, checksum: 0, begin, bos: end, end, sentences: false, named, files, whose });
        };
        let tokens = found.tokens();
        // Some models have no row for an added token, such as BART's <mask>: it must not occur.
        if found.tokens_of_model() > vocab_size {
            let problem = format!(
                "has a tokenizer of {tokens} tokens, but the model has {vocab_size}: use the tokenizer that was made \
                 for the model"
            );
            return Err(wrong_data(whose, problem));
        }
        let found = Self { whose: whose.display().to_string(), ..found };
        if options.sentences { found.for_sentences(whose) } else { Ok(found) }
    }

    pub(super) fn new(tokenizer: tokenizers::Tokenizer, checksum: u32, end: Option<u32>) -> Self {
        let begin = prefix_ids(&tokenizer);
        let kind = Kind::File(Box::new(tokenizer));
        let (named, files) = (BTreeMap::new(), Vec::new());
        Self { kind, checksum, begin, bos: None, end, sentences: false, named, files, whose: String::new() }
    }

    /// Returns the same tokenizer, set to mark sentences: each is followed by `[SEP]`, and each document by another one.
    pub(super) fn for_sentences(mut self, path: &Path) -> Result<Self> {
        for token in SPECIAL {
            if self.id(token).is_none() {
                let problem =
                    format!("has no token {token}: expected a tokenizer like BERT's (`zero tokenizer` creates one)");
                return Err(wrong_data(path, problem));
            }
        }
        (self.end, self.sentences) = (self.id("[SEP]"), true);
        Ok(self)
    }

    /// Writes its [`files`](Self::files) to a folder.
    ///
    /// # Errors
    ///
    /// [`DataError`](crate::DataError) if they exist, or cannot be written.
    pub fn save(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(io("create", dir))?;
        for SideFile { name, bytes } in self.files() {
            let path = dir.join(name);
            let file = std::fs::File::create_new(&path).map_err(io("create", &path))?;
            (&file).write_all(&bytes).and_then(|()| file.sync_all()).map_err(io("write", &path))?;
        }
        Ok(())
    }

    /// Returns the id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        match &self.kind {
            Kind::Gpt2 => self.end.filter(|_| token == ENDS[0]),
            Kind::File(tokenizer) => tokenizer.token_to_id(token),
        }
    }

    /// Returns, for each token id, whether the token continues a word.
    pub(super) fn going_on(&self) -> Vec<bool> {
        let mut all = vec![false; self.tokens()];
        if let Kind::File(tokenizer) = &self.kind {
            for (token, id) in tokenizer.get_vocab(true) {
                all[id as usize] = token.starts_with(GOES_ON);
            }
        }
        all
    }

    /// Reads the tokenizer in a file or folder, if there is one.
    fn read(path: &Path) -> Result<Option<Self>> {
        let Some(Read { tokenizer, named, files }) = files::read(path)? else { return Ok(None) };
        let end = match named.get("eos_token") {
            Some(token) => tokenizer.token_to_id(token),
            None => ENDS.iter().find_map(|token| tokenizer.token_to_id(token)),
        };
        let bos = named.get("bos_token").and_then(|token| tokenizer.token_to_id(token));
        let checksum = files.iter().fold(0, |sum, file| crc32c::crc32c_append(sum, &file.bytes));
        Ok(Some(Self { files, bos, named, ..Self::new(tokenizer, checksum, end) }))
    }

    /// Returns the files from which transformers and this program read it: those it was read from; GPT-2's; or, for a
    /// learned one, `tokenizer.json`, `vocab.txt` and `tokenizer_config.json`.
    pub fn files(&self) -> Vec<SideFile> {
        match &self.kind {
            Kind::Gpt2 => gpt2::files(),
            Kind::File(tokenizer) if self.files.is_empty() => learned_files(tokenizer),
            Kind::File(_) => self.files.clone(),
        }
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        match &self.kind {
            Kind::Gpt2 => gpt2::TOKENS,
            Kind::File(tokenizer) => largest(tokenizer.get_vocab(true)),
        }
    }

    /// Returns the number of tokens without added ones.
    fn tokens_of_model(&self) -> usize {
        match &self.kind {
            Kind::Gpt2 => gpt2::TOKENS,
            Kind::File(tokenizer) => {
                let added: Vec<u32> = tokenizer.get_added_tokens_decoder().into_keys().collect();
                let own = tokenizer.get_vocab(false).into_iter().filter(|(_, id)| !added.contains(id));
                largest(own.collect())
            }
        }
    }

    /// Returns the token that begins a text, if there is one.
    pub fn begin(&self) -> Option<u32> {
        self.begin.first().copied().or_else(|| BEGINS.iter().find_map(|token| self.id(token)))
    }

    /// Returns the tokens that begin a text for a model with an encoder.
    pub fn encoder_prefix(&self, settings: &Seq2SeqSettings) -> Vec<u32> {
        match settings.has_begin {
            true => self.begin().into_iter().collect(),
            false => self.prefix_ids().to_vec(),
        }
    }

    /// Returns the token that begins a text generated from nothing (`bos_token`), if there is one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Returns the tokens before a text that a model continues, such as Llama's beginning of text; none for GPT-2.
    pub fn prefix_ids(&self) -> &[u32] {
        if self.sentences { &[] } else { &self.begin }
    }

    /// Returns the token that pads rows. No token attends to it, so any will do if none is named.
    pub fn pad(&self) -> u32 {
        let named = self.named.get("pad_token").map(String::as_str).into_iter().chain([SPECIAL[0], "<pad>"]);
        named.filter_map(|token| self.id(token)).next().unwrap_or(0)
    }

    /// Returns the tokens before a text or a pair of texts, between the two, and after them: those of its template, or BERT's.
    pub(super) fn around(&self, pair: bool) -> Option<[Vec<u32>; 3]> {
        let by_template = |text: &&str| {
            let Kind::File(tokenizer) = &self.kind else { return None };
            let put = || if pair { tokenizer.encode((*text, *text), true) } else { tokenizer.encode(*text, true) };
            let put = caught(put).ok()?.ok()?;
            let (mut found, mut texts, mut in_text) = ([Vec::new(), Vec::new(), Vec::new()], 0, false);
            for (&id, &special) in put.get_ids().iter().zip(put.get_special_tokens_mask()) {
                match special {
                    1 => found[texts].push(id),
                    _ if !in_text => texts += 1,
                    _ => {}
                }
                in_text = special == 0;
                if texts > 2 {
                    return None;
                }
            }
            if !pair {
                found.swap(1, 2);
            }
            Some(found).filter(|found| texts == 1 + usize::from(pair) && !found.concat().is_empty())
        };
        let as_bert = || {
            let id = |name: &str, default: &str| self.id(self.named.get(name).map_or(default, String::as_str));
            let (cls, sep) = (id("cls_token", "[CLS]")?, id("sep_token", "[SEP]")?);
            Some([vec![cls], if pair { vec![sep] } else { Vec::new() }, vec![sep]])
        };
        LETTERS.iter().find_map(by_template).or_else(as_bert)
    }

    /// Returns the token that ends a document, if there is one.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// Encodes like [`encode`](Self::encode), and checks that all ids are below `vocab_size`.
    pub fn encode_within(&self, text: &str, vocab_size: usize) -> Result<Vec<u32>, String> {
        let ids = self.encode(text)?;
        check_ids(&ids, vocab_size)?;
        Ok(ids)
    }

    /// Returns the tokens of a text, without special ones except for those that mark sentences. A line ends a sentence, an
    /// empty line a document.
    ///
    /// # Errors
    ///
    /// The tokenizer's error.
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

    /// Returns the tokens of a conversation in the folder's chat template, ready for the model's answer.
    ///
    /// # Errors
    ///
    /// If there is no template, or it cannot be rendered, or it refuses the conversation.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, String> {
        self.encode(&self.chat(messages)?)
    }

    /// Returns the text of a conversation in the folder's chat template, like transformers' `apply_chat_template` with
    /// `add_generation_prompt`.
    ///
    /// # Errors
    ///
    /// Same as [`encode_chat`](Self::encode_chat).
    pub fn chat(&self, messages: &[Message]) -> Result<String, String> {
        let Some(template) = chat::template(&self.files) else {
            return Err(format!("the tokenizer's folder {NO_TEMPLATE}"));
        };
        self.chat_template(&template)?.render(messages, true)
    }

    /// Returns the text of the folder's chat template, for [`chat_template`](Self::chat_template).
    pub(super) fn chat_template_text(&self) -> Option<String> {
        chat::template(&self.files)
    }

    /// Parses the text of a chat template.
    pub(super) fn chat_template<'t>(&'t self, text: &'t str) -> Result<ChatTemplate<'t>, String> {
        ChatTemplate::new(text, &self.named, &self.whose)
    }

    /// Returns the folder or file that it was read from, for error messages.
    pub(super) fn whose(&self) -> &str {
        &self.whose
    }

    /// Returns whether there is a chat template.
    pub fn has_chat_template(&self) -> bool {
        chat::template(&self.files).is_some()
    }

    /// Returns the text of tokens, without special ones. Invalid bytes become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_some(ids, false)
    }

    /// Returns the text of tokens, with special ones.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        self.decode_some(ids, true)
    }

    fn decode_some(&self, ids: &[u32], with_special: bool) -> String {
        match &self.kind {
            Kind::Gpt2 => {
                // The last one is special.
                let tokens = gpt2::TOKENS - usize::from(!with_special);
                let known: Vec<u32> = ids.iter().copied().filter(|&id| (id as usize) < tokens).collect();
                let bytes = gpt2::table().decode_bytes(&known).unwrap_or_default();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::File(tokenizer) => {
                caught(|| tokenizer.decode(ids, !with_special).unwrap_or_default()).unwrap_or_default()
            }
        }
    }

    fn cut(&self, text: &str) -> Result<Vec<u32>, String> {
        match &self.kind {
            // "<|endoftext|>" is one token, as in transformers.
            Kind::Gpt2 => Ok(gpt2::table().encode_with_special_tokens(text)),
            Kind::File(tokenizer) => {
                Ok(encoding(|| tokenizer.encode_fast(text, false).map_err(|error| error.to_string()))?
                    .get_ids()
                    .to_vec())
            }
        }
    }

    /// Returns the tokens of a conversation's text, each with its byte range in the text (`get_offsets`).
    ///
    /// # Errors
    ///
    /// Same as [`encode`](Self::encode).
    pub(super) fn encode_with_offsets(&self, text: &str) -> Result<tokenizers::Encoding, String> {
        match &self.kind {
            Kind::Gpt2 => Err(format!("{} {NO_TEMPLATE}", self.whose)),
            Kind::File(tokenizer) => encoding(|| tokenizer.encode(text, false).map_err(|error| error.to_string())),
        }
    }
}

/// Returns the library's encoding, or its error or panic as text.
fn encoding(cut: impl FnOnce() -> Result<tokenizers::Encoding, String>) -> Result<tokenizers::Encoding, String> {
    caught(cut).and_then(|cut| cut).map_err(|error| format!("cannot be tokenized: {error}"))
}

fn largest(vocabulary: std::collections::HashMap<String, u32>) -> usize {
    vocabulary.into_values().max().map_or(0, |largest| largest as usize + 1)
}

fn learned_files(tokenizer: &tokenizers::Tokenizer) -> Vec<SideFile> {
    let mut vocabulary: Vec<(String, u32)> = tokenizer.get_vocab(true).into_iter().collect();
    vocabulary.sort_by_key(|(_, id)| *id);
    let lines: String = vocabulary.iter().map(|(token, _)| format!("{token}\n")).collect();
    let lowercase = matches!(
        tokenizer.get_normalizer(),
        Some(NormalizerWrapper::BertNormalizer(normalizer)) if normalizer.lowercase
    );
    let config = json!({ "tokenizer_class": "BertTokenizer", "do_lower_case": lowercase });
    let json = tokenizer.to_string(true).expect("a tokenizer is numbers and texts");
    let file = |name: &str, text: String| SideFile { name: name.into(), bytes: text.into_bytes().into() };
    vec![file("vocab.txt", lines), file("tokenizer_config.json", format!("{config:#}\n")), file("tokenizer.json", json)]
}

/// Returns the special tokens that a tokenizer's template puts before the text.
fn prefix_ids(tokenizer: &tokenizers::Tokenizer) -> Vec<u32> {
    for text in LETTERS {
        let Ok(Ok(around)) = caught(|| tokenizer.encode(text, true)) else { continue };
        let special = around.get_special_tokens_mask().iter().take_while(|&&special| special == 1).count();
        if special < around.len() {
            return around.get_ids()[..special].to_vec();
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn options<'a>(vocab_size: usize, folders: &'a [&'a Path]) -> TokenizeOptions<'a> {
        TokenizeOptions { vocab_size, n_positions: 8, folders, ..TokenizeOptions::default() }
    }

    /// Writes a tokenizer whose vocabulary is a few words.
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
        let own = Tokenizer::find(text, &options(5, &[dir.path()])).unwrap();
        assert_eq!((own.tokens(), own.end()), (5, Some(4)));
        assert_eq!(own.encode("a rose is a flower").unwrap(), [1, 2, 3, 1, 0]);
        std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"eos_token": {"content": "is"}}"#).unwrap();
        assert_eq!(Tokenizer::find(text, &options(5, &[dir.path()])).unwrap().end(), Some(3));
        // An explicitly given one.
        let given = TokenizeOptions { tokenizer: Some(dir.path()), ..options(50257, &[]) };
        assert_eq!(Tokenizer::find(text, &given).unwrap().tokens(), 5);
        let gpt2 = Tokenizer::find(text, &options(50257, &[])).unwrap();
        assert_eq!(gpt2.encode("Hello world").unwrap(), [15496, 995]);
    }

    /// The ids are those of transformers 5.24.
    #[test]
    fn classes_of_transformers_define_how_a_tokenizer_json_splits_text() {
        let bert = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "pre_tokenizer": { "type": "BertPreTokenizer" },
            "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true },
            "post_processor": null, "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
            "model": {
                "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                "vocab": { "[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "hello": 4, "Hello": 5 }
            }
        });
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        let gpt2 = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": bytes,
            "post_processor": null, "decoder": bytes,
            "model": { "type": "BPE", "vocab": { "Ġ": 0, "a": 1, "Ġa": 2, "<s>": 3 }, "merges": ["Ġ a"] }
        });
        let [cased, spaced] = [json!({ "do_lower_case": false }), json!({ "add_prefix_space": true })];
        let cases = [
            (&bert, "BertTokenizerFast", "", cased.clone(), "Hello", vec![5]),
            (&bert, "DistilBertTokenizer", "", cased.clone(), "Hello", vec![5]),
            (&bert, "", "bert", cased.clone(), "Hello", vec![5]),
            (&bert, "", "distilbert", json!({}), "Hello", vec![4]),
            (&bert, "PreTrainedTokenizerFast", "bert", cased.clone(), "Hello", vec![4]),
            (&bert, "", "", cased, "Hello", vec![4]),
            (&gpt2, "GPT2TokenizerFast", "", spaced.clone(), "a", vec![2]),
            (&gpt2, "", "gpt2", spaced.clone(), "a", vec![2]),
            (&gpt2, "RobertaTokenizer", "", spaced.clone(), "a", vec![2]),
            (&gpt2, "GPT2Tokenizer", "mistral", spaced.clone(), "a", vec![1]),
            (&gpt2, "PreTrainedTokenizerFast", "gpt2", spaced, "a", vec![1]),
            // These have no effect next to a tokenizer.json.
            (&gpt2, "PreTrainedTokenizerFast", "", json!({ "add_bos_token": true, "bos_token": "<s>" }), "a", vec![1]),
        ];
        for (tokenizer, class, family, mut settings, text, expected) in cases {
            let dir = tempfile::tempdir().unwrap();
            if !class.is_empty() {
                settings["tokenizer_class"] = class.into();
            }
            let write = |name: &str, value: String| std::fs::write(dir.path().join(name), value).unwrap();
            write("tokenizer.json", tokenizer.to_string());
            write("tokenizer_config.json", settings.to_string());
            if !family.is_empty() {
                write("config.json", json!({ "model_type": family }).to_string());
            }
            let read = Tokenizer::find(Path::new("t"), &options(6, &[dir.path()])).unwrap();
            let told = format!("{class} {family} {settings}");
            assert_eq!(read.encode(text).unwrap(), expected, "{told}");
            if std::ptr::eq(tokenizer, &gpt2) && class != "RobertaTokenizer" {
                assert!(read.prefix_ids().is_empty(), "{told}");
            }
        }
    }

    #[test]
    fn what_is_not_the_models_is_refused() {
        let (text, dir) = (Path::new("book.txt"), tempfile::tempdir().unwrap());
        let told = |options: &TokenizeOptions<'_>| Tokenizer::find(text, options).err().unwrap().to_string();
        let error = told(&options(32000, &[]));
        assert!(error.starts_with("book.txt: is text") && error.contains("the model has 32000 tokens"), "{error}");
        words(dir.path(), &["<unk>", "a", "rose"]);
        let error = told(&options(2, &[dir.path()]));
        assert!(error.contains("a tokenizer of 3 tokens, but the model has 2"), "{error}");
        for (file, content) in [("tokenizer.json", "{"), ("tokenizer.model", ""), ("vocab.json", "{}")] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(file), content).unwrap();
            let error = told(&options(50257, &[dir.path()]));
            assert!(error.contains(file) && error.contains("tokenizer"), "{error}");
        }
        let missing = TokenizeOptions { tokenizer: Some(Path::new("/nowhere")), ..options(50257, &[]) };
        assert!(told(&missing).contains("--tokenizer /nowhere: expected a tokenizer.json"));
    }
}
