//! A tokenizer's files, read as transformers reads them.
//!
//! * The tokens: `tokenizer.json`; or `vocab.json` with `merges.txt`, of GPT-2, BART, RoBERTa and Qwen2; or BERT's
//!   `vocab.txt`; or a SentencePiece model.
//! * The names of special tokens, and added tokens: `tokenizer_config.json`, with `special_tokens_map.json` and
//!   `added_tokens.json` if it has no `added_tokens_decoder`. They are added to the tokenizer unless it knows them.
//! * The tokens around a text: the template in `tokenizer.json`; of other files, by the class and by `add_bos_token` and
//!   `add_eos_token`.
//! * The splitting into words: as in `tokenizer.json`, except that some classes of transformers define it themselves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Map, Value};
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::bert::BertProcessing;
use tokenizers::processors::roberta::RobertaProcessing;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, DecoderWrapper, ModelWrapper, SplitDelimiterBehavior, Tokenizer};
use zero_core::checkpoint::SideFile;

use super::super::wordpiece;
use super::sentence_piece;
use crate::caught::caught;
use crate::error::{Result, io, wrong_data};

/// Optional files in addition to those of the tokens.
const BESIDE: [&str; 6] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.txt",
];

/// The names of special tokens.
const NAMES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The pattern that splits Qwen2's texts into words.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A tokenizer with the names of its special tokens.
pub(super) struct Read {
    pub(super) tokenizer: Tokenizer,
    /// The texts of special tokens, by [`NAMES`].
    pub(super) named: BTreeMap<&'static str, String>,
    /// The files that it was read from.
    pub(super) files: Vec<SideFile>,
}

/// Kinds of tokenizers with `vocab.json` and `merges.txt`.
#[derive(Clone, Copy, PartialEq)]
enum ByteLevelKind {
    Gpt2,
    /// Also BART's.
    Roberta,
    Qwen2,
}

impl ByteLevelKind {
    /// Finds the kind by the class in `tokenizer_config.json`, the model type in `config.json`, or the special tokens that exist.
    fn of(settings: &Map<String, Value>, config: &Value, has: impl Fn(&str) -> bool) -> Self {
        // The class decides if it is one of these.
        let known = [class(settings), config["model_type"].as_str().unwrap_or_default().into()];
        let kind = known.iter().find_map(|name| match &**name {
            name if name.starts_with("qwen") => Some(Self::Qwen2),
            name if name.starts_with("gpt2") => Some(Self::Gpt2),
            name if name.starts_with("bart") || name.starts_with("roberta") => Some(Self::Roberta),
            _ => None,
        });
        kind.unwrap_or(if has("<s>") && has("</s>") { Self::Roberta } else { Self::Gpt2 })
    }

    fn named(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Gpt2 => {
                &[("unk_token", "<|endoftext|>"), ("bos_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>")]
            }
            Self::Roberta => sentence_piece::ROBERTA,
            Self::Qwen2 => {
                &[("unk_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")]
            }
        }
    }
}

/// Returns a tokenizer's class in transformers, in lower case.
fn class(settings: &Map<String, Value>) -> String {
    settings.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default().to_lowercase()
}

/// Returns the class with which transformers reads a `tokenizer.json`, in lower case and without `fast`: that in the settings or, if there is
/// none, that of the model. Empty if the file is read unchanged.
fn class_of_json(settings: &Map<String, Value>, config: &Map<String, Value>) -> String {
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let of_family = match family {
        "bert" | "distilbert" => "berttokenizer",
        "gpt2" => "gpt2tokenizer",
        "bart" | "roberta" => "robertatokenizer",
        "qwen2" | "qwen3" => "qwen2tokenizer",
        _ => "",
    };
    // Of these, the class in the settings does not count.
    if ["qwen2", "mistral", "phi3"].contains(&family) {
        return of_family.into();
    }
    let named = [class(settings), class(config)].into_iter().find(|name| !name.is_empty());
    let named = named.unwrap_or_else(|| of_family.into());
    match named.strip_suffix("fast").unwrap_or(&named) {
        "pretrainedtokenizer" | "tokenizersbackend" | "pythonbackend" => String::new(),
        name => name.into(),
    }
}

/// Returns the default special tokens of a class, for a `tokenizer_config.json` that names none.
fn named_by_class(class: &str) -> &'static [(&'static str, &'static str)] {
    match class {
        name if name.starts_with("gpt2") => ByteLevelKind::Gpt2.named(),
        name if name.starts_with("bart") || name.starts_with("roberta") => ByteLevelKind::Roberta.named(),
        name if name.starts_with("qwen2") => ByteLevelKind::Qwen2.named(),
        name if name.starts_with("llama") => &[("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>")],
        _ => &[],
    }
}

/// Reads the tokenizer in a file or folder, if there is one.
pub(super) fn read(path: &Path) -> Result<Option<Read>> {
    let in_folder = |file: &str| Some(path.join(file)).filter(|path| path.is_file());
    let json = if path.is_file() { Some(path.to_path_buf()) } else { in_folder("tokenizer.json") };
    let [vocab, merges, vocab_txt] = ["vocab.json", "merges.txt", "vocab.txt"].map(in_folder);
    let pieces = sentence_piece::FILES.iter().find_map(|file| in_folder(file));
    let main = match (json, vocab, merges, vocab_txt.or(pieces)) {
        (Some(json), ..) => vec![json],
        (None, Some(vocab), Some(merges), _) => vec![vocab, merges],
        (None, .., Some(one)) => vec![one],
        _ => return Ok(None),
    };
    let folder = main[0].parent().unwrap_or(Path::new("")).to_path_buf();
    let mut settings = object(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let added = added_tokens(&folder, &mut settings)?;
    // The library panics at some damaged files, such as a model that is no JSON.
    for path in main.iter().filter(|path| path.extension().is_some_and(|ending| ending == "json")) {
        parsed::<IgnoredAny>(path)?;
    }
    let read = caught(|| tokenizer(&main, &settings, added));
    let problem = |told: String| wrong_data(&main[0], format!("cannot be used as a tokenizer ({told})"));
    let (tokenizer, named) = match read {
        Ok(read) => read.map_err(|error| problem(error.to_string()))?,
        Err(panic) => return Err(problem(format!("the tokenizers library panicked: {panic}"))),
    };
    let beside = BESIDE.iter().map(|file| folder.join(file)).filter(|path| path.is_file() && !main.contains(path));
    let mut files = Vec::new();
    for path in main.iter().cloned().chain(beside) {
        let bytes: Arc<[u8]> = std::fs::read(&path).map_err(io("read", &path))?.into();
        // A file may be given by another name.
        let name = if path == main[0] && main.len() == 1 && path.extension().is_some_and(|ending| ending == "json") {
            "tokenizer.json".into()
        } else {
            path.file_name().unwrap_or_default().to_string_lossy().into_owned()
        };
        files.push(SideFile { name, bytes });
    }
    Ok(Some(Read { tokenizer, named, files }))
}

/// Reads the JSON object in a file, if there is one.
fn object(path: &Path) -> Result<Option<Map<String, Value>>> {
    if path.is_file() { parsed(path).map(Some) } else { Ok(None) }
}

/// Returns the `config.json` beside a tokenizer's file. Beside an adapter, it is that of the base model, if its folder exists.
fn model_config(path: &Path) -> Map<String, Value> {
    let read = |path: PathBuf| object(&path).ok().flatten();
    let of_base = || {
        let adapter = read(path.with_file_name("adapter_config.json"))?;
        read(Path::new(adapter.get("base_model_name_or_path")?.as_str()?).join("config.json"))
    };
    read(path.with_file_name("config.json")).or_else(of_base).unwrap_or_default()
}

/// Parses a JSON file.
fn parsed<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = std::fs::read(path).map_err(io("read", path))?;
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    serde_json::from_slice(bytes)
        .map_err(|error| wrong_data(path, format!("is not a valid JSON object ({error}): download or save it again")))
}

/// Returns added tokens by id; the entries of `special_tokens_map.json` are added to the settings.
fn added_tokens(folder: &Path, settings: &mut Map<String, Value>) -> Result<BTreeMap<u32, AddedToken>> {
    let mut added = BTreeMap::new();
    if let Some(Value::Object(decoder)) = settings.get("added_tokens_decoder") {
        for (id, token) in decoder {
            if let (Ok(id), Some(token)) = (id.parse(), token_of(token, false)) {
                added.insert(id, token);
            }
        }
        return Ok(added);
    }
    if let Some(map) = object(&folder.join("special_tokens_map.json"))? {
        settings.extend(map);
    }
    if let Some(more) = object(&folder.join("added_tokens.json"))? {
        let special: Vec<String> = NAMES
            .iter()
            .filter_map(|name| Some(token_of(settings.get(*name)?, true)?.content))
            .chain(extra(settings))
            .collect();
        for (content, id) in more {
            let special = special.contains(&content);
            if let Some(id) = id.as_u64() {
                added.insert(
                    id as u32,
                    AddedToken { normalized: !special, special, ..AddedToken::from(content, special) },
                );
            }
        }
    }
    Ok(added)
}

/// Returns the special tokens without a name.
fn extra(settings: &Map<String, Value>) -> Vec<String> {
    let lists = ["additional_special_tokens", "extra_special_tokens"].map(|key| settings.get(key));
    let tokens = lists.into_iter().flatten().flat_map(|list| match list {
        Value::Array(tokens) => tokens.iter().collect(),
        Value::Object(tokens) => tokens.values().collect(),
        _ => Vec::new(),
    });
    tokens.filter_map(|token| Some(token_of(token, true)?.content)).collect()
}

/// Parses a token written as a text or as an object.
fn token_of(token: &Value, special: bool) -> Option<AddedToken> {
    let content = token.as_str().or(token["content"].as_str())?.to_string();
    let flag = |key: &str, default: bool| token[key].as_bool().unwrap_or(default);
    let special = special || flag("special", false);
    Some(AddedToken {
        single_word: flag("single_word", false),
        lstrip: flag("lstrip", false),
        rstrip: flag("rstrip", false),
        normalized: flag("normalized", !special),
        special,
        content,
    })
}

type Named = BTreeMap<&'static str, String>;

fn tokenizer(
    files: &[PathBuf],
    settings: &Map<String, Value>,
    added: BTreeMap<u32, AddedToken>,
) -> tokenizers::Result<(Tokenizer, Named)> {
    let path = &files[0];
    let mut named: BTreeMap<&str, AddedToken> = BTreeMap::new();
    let mut read = match files {
        [vocab, merges] => {
            let [vocab, merges] = [vocab, merges].map(|path| path.display().to_string());
            let bpe = BPE::from_file(&vocab, &merges).build()?;
            let config = Value::Object(model_config(path));
            let known = bpe.get_vocab();
            let kind = ByteLevelKind::of(settings, &config, |token| known.contains_key(token));
            // A token that is missing would be assigned a number.
            let defaults = kind.named().iter().filter(|(_, token)| known.contains_key(*token));
            named.extend(defaults.map(|&(name, token)| (name, AddedToken::from(token, true))));
            byte_level(bpe, kind, settings)
        }
        _ if path.extension().is_some_and(|ending| ending == "txt") => {
            let lines = std::fs::read_to_string(path)?;
            let mut tokenizer = wordpiece::of_lines(&lines)?;
            tokenizer.with_normalizer(Some(bert_normalizer(settings)));
            tokenizer
        }
        _ if path.extension().is_some_and(|ending| ending == "model") => {
            let kind = match class(settings) {
                // The class of any tokenizer.
                name if name.is_empty() || name.starts_with("pretrained") => {
                    let config = model_config(path);
                    config.get("model_type").and_then(Value::as_str).unwrap_or_default().to_lowercase()
                }
                name => name,
            };
            let (tokenizer, defaults) = sentence_piece::read(path, &kind, settings)?;
            named.extend(defaults.iter().map(|&(name, token)| (name, AddedToken::from(token, true))));
            tokenizer
        }
        _ => {
            let mut tokenizer = Tokenizer::from_file(path)?;
            let config = model_config(path);
            // transformers makes a LlamaTokenizer only of these, and reads others unchanged.
            let of_llama = config.get("model_type").and_then(Value::as_str).is_none_or(|name| name == "llama");
            let is_bytes = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
            let is_bpe = matches!(tokenizer.get_model(), ModelWrapper::BPE(_));
            let class = class_of_json(settings, &config);
            match &*class {
                name if name.starts_with("llama") && of_llama && is_bpe && !is_bytes => {
                    sentence_piece::with_blanks(&mut tokenizer, settings)?;
                }
                "berttokenizer" | "distilberttokenizer" => as_bert(&mut tokenizer, settings)?,
                name => tokenizer = as_byte_level(tokenizer, name, settings),
            }
            let defaults = named_by_class(&class).iter().filter(|(_, token)| tokenizer.token_to_id(token).is_some());
            named.extend(defaults.map(|&(name, token)| (name, AddedToken::from(token, true))));
            tokenizer
        }
    };
    for name in NAMES {
        if let Some(token) = settings.get(name) {
            match token_of(token, true) {
                Some(token) => drop(named.insert(name, token)),
                // null
                None => drop(named.remove(name)),
            }
        }
    }
    read.with_padding(None);
    read.with_truncation(None)?;
    // Includes tokens that exist with other flags.
    let known: Vec<AddedToken> = read.get_added_tokens_decoder().into_values().collect();
    let more: Vec<AddedToken> = added.into_values().filter(|token| !is_same(&known, token)).collect();
    let known: Vec<String> = known.into_iter().chain(more.clone()).map(|token| token.content).collect();
    let unknown = |token: &AddedToken| !known.contains(&token.content);
    add(&mut read, more);
    let extra = extra(settings).into_iter().map(|token| AddedToken::from(token, true));
    let special: Vec<AddedToken> = named.values().cloned().chain(extra).filter(unknown).collect();
    read.add_special_tokens(&special);
    let named: Named = NAMES.iter().filter_map(|name| Some((*name, named.get(name)?.content.clone()))).collect();
    // transformers ignores these settings if there is a tokenizer.json.
    if path.extension().is_none_or(|ending| ending != "json") || files.len() > 1 {
        put_around(&mut read, settings, &named)?;
    }
    Ok((read, named))
}

/// Returns whether the token exists with the same flags.
fn is_same(known: &[AddedToken], token: &AddedToken) -> bool {
    let flags = |token: &AddedToken| [token.single_word, token.lstrip, token.rstrip, token.normalized, token.special];
    known.iter().any(|other| other.content == token.content && flags(other) == flags(token))
}

/// Adds tokens in their order, so that each gets its id.
fn add(tokenizer: &mut Tokenizer, tokens: Vec<AddedToken>) {
    for token in tokens {
        match token.special {
            true => tokenizer.add_special_tokens(&[token]),
            false => tokenizer.add_tokens(&[token]),
        };
    }
}

/// Returns the normalizer of transformers' `BertTokenizer`.
fn bert_normalizer(settings: &Map<String, Value>) -> BertNormalizer {
    let flag = |key: &str| settings.get(key).and_then(Value::as_bool);
    let [chinese, lowercase] = ["tokenize_chinese_chars", "do_lower_case"].map(|key| flag(key).unwrap_or(true));
    BertNormalizer::new(true, chinese, flag("strip_accents"), lowercase)
}

/// Makes a WordPiece tokenizer that of transformers' `BertTokenizer` with its tokens.
fn as_bert(tokenizer: &mut Tokenizer, settings: &Map<String, Value>) -> tokenizers::Result<()> {
    if !matches!(tokenizer.get_model(), ModelWrapper::WordPiece(_)) {
        return Ok(());
    }
    let token = |name: &str, default: &str| {
        let text =
            settings.get(name).and_then(|token| token_of(token, true)).map_or(default.into(), |token| token.content);
        Some((text.clone(), tokenizer.token_to_id(&text)?))
    };
    let around = token("cls_token", "[CLS]").zip(token("sep_token", "[SEP]"));
    tokenizer.with_normalizer(Some(bert_normalizer(settings))).with_pre_tokenizer(Some(BertPreTokenizer));
    if let Some((cls, sep)) = around {
        tokenizer.with_post_processor(Some(BertProcessing::new(sep, cls)));
    }
    Ok(())
}

/// Returns a BPE tokenizer as the class of transformers makes it from these tokens; another tokenizer unchanged.
fn as_byte_level(tokenizer: Tokenizer, class: &str, settings: &Map<String, Value>) -> Tokenizer {
    let kind = match class {
        "gpt2tokenizer" => ByteLevelKind::Gpt2,
        "robertatokenizer" | "barttokenizer" => ByteLevelKind::Roberta,
        "qwen2tokenizer" => ByteLevelKind::Qwen2,
        _ => return tokenizer,
    };
    let ModelWrapper::BPE(bpe) = tokenizer.get_model() else { return tokenizer };
    let mut bpe = bpe.clone();
    (bpe.unk_token, bpe.dropout, bpe.fuse_unk, bpe.byte_fallback, bpe.ignore_merges) =
        (None, None, false, false, false);
    let mut made = byte_level(bpe, kind, settings);
    let added: BTreeMap<u32, AddedToken> = tokenizer.get_added_tokens_decoder().into_iter().collect();
    add(&mut made, added.into_values().collect());
    if made.get_post_processor().is_none() {
        made.with_post_processor(tokenizer.get_post_processor().cloned());
    }
    made
}

fn byte_level(bpe: BPE, kind: ByteLevelKind, settings: &Map<String, Value>) -> Tokenizer {
    let prefix_space = settings.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(false);
    let id = |token: &str| bpe.get_vocab().get(token).copied();
    let around = match (kind, id("<s>"), id("</s>")) {
        (ByteLevelKind::Roberta, Some(begin), Some(end)) => {
            let processing = RobertaProcessing::new(("</s>".into(), end), ("<s>".into(), begin));
            Some(processing.trim_offsets(true).add_prefix_space(prefix_space))
        }
        _ => None,
    };
    let mut tokenizer = Tokenizer::new(bpe);
    match kind {
        ByteLevelKind::Qwen2 => {
            let pattern = SplitPattern::Regex(QWEN2.into());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .expect("the pattern is a regular expression");
            let bytes = ByteLevel::new(prefix_space, true, false);
            tokenizer
                .with_normalizer(Some(NFC))
                .with_pre_tokenizer(Some(Sequence::new(vec![split.into(), bytes.into()])));
        }
        _ => drop(tokenizer.with_pre_tokenizer(Some(ByteLevel::new(prefix_space, true, true)))),
    }
    tokenizer.with_decoder(Some(ByteLevel::default()));
    if let Some(around) = around {
        tokenizer.with_post_processor(Some(around));
    }
    tokenizer
}

/// Sets the template that `add_bos_token` and `add_eos_token` ask for, if the settings have one of them.
fn put_around(tokenizer: &mut Tokenizer, settings: &Map<String, Value>, named: &Named) -> tokenizers::Result<()> {
    let asked = ["add_bos_token", "add_eos_token"].map(|key| settings.get(key).and_then(Value::as_bool));
    if asked == [None, None] {
        return Ok(());
    }
    let token = |asked: Option<bool>, name: &str| {
        let token = named.get(name).filter(|_| asked == Some(true))?;
        Some((token.clone(), tokenizer.token_to_id(token)?))
    };
    let [begin, end] = [token(asked[0], "bos_token"), token(asked[1], "eos_token")];
    let piece = |token: &Option<(String, u32)>| token.as_ref().map(|(text, _)| format!("{text}:0"));
    let single: Vec<String> = [piece(&begin), Some("$A:0".into()), piece(&end)].into_iter().flatten().collect();
    let template = TemplateProcessing::builder()
        .try_single(single)?
        .special_tokens(begin.into_iter().chain(end).collect::<Vec<_>>())
        .build()
        .map_err(|error| error.to_string())?;
    tokenizer.with_post_processor(Some(template));
    Ok(())
}
