//! Converts SentencePiece models (`tokenizer.model`, `spiece.model`, `sentencepiece.bpe.model`) to tokenizers of the
//! library, composed as in transformers: Llama's, T5's and XLM-RoBERTa's.

use std::collections::HashMap;
use std::path::Path;

use prost::Message;
use serde_json::{Map, Value};
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::BPE;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::Precompiled;
use tokenizers::normalizers::replace::Replace;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

/// The names of SentencePiece files.
pub(super) const FILES: [&str; 3] = ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model"];

/// The character that represents a blank.
const BLANK: char = '▁';

/// Default of `extra_ids`: the number of T5's sentinel tokens, which represent text cut out and follow the file's tokens.
const SENTINELS: u64 = 100;

/// Limit of `extra_ids`.
const MOST_SENTINELS: u64 = 1 << 16;

/// A model, with the field numbers of <https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto>.
#[derive(Message)]
struct Model {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, required, tag = "2")]
    trainer: Trainer,
    #[prost(message, required, tag = "3")]
    normalizer: Normalizer,
}

#[derive(Message)]
struct Piece {
    #[prost(string, required, tag = "1")]
    text: String,
    #[prost(float, required, tag = "2")]
    score: f32,
    #[prost(int32, required, tag = "3")]
    kind: i32,
}

#[derive(Message)]
struct Trainer {
    #[prost(int32, optional, tag = "3")]
    model: Option<i32>,
    #[prost(int32, optional, tag = "40")]
    unk: Option<i32>,
    #[prost(string, optional, tag = "45")]
    unk_piece: Option<String>,
}

#[derive(Message)]
struct Normalizer {
    #[prost(bytes = "vec", required, tag = "2")]
    charsmap: Vec<u8>,
}

/// Kinds of pieces: `CONTROL` (special tokens) and `USER_DEFINED`.
const CONTROL: i32 = 3;
const OF_USER: i32 = 4;

/// Kinds of models: unigram, which finds the most likely pieces, and BPE, which merges pairs.
const UNIGRAM: i32 = 1;
const MERGES: i32 = 2;

/// Special tokens by name.
type Named = [(&'static str, &'static str)];

const LLAMA: &Named = &[("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>")];
/// The special tokens of RoBERTa, and of XLM-RoBERTa.
pub(super) const ROBERTA: &Named = &[
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
    ("sep_token", "</s>"),
    ("cls_token", "<s>"),
    ("unk_token", "<unk>"),
    ("pad_token", "<pad>"),
    ("mask_token", "<mask>"),
];

const T5: &Named = &[("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>")];

/// Reads the tokenizer in a file, and its special tokens. `class` is its class in transformers, or the type of the model.
pub(super) fn read(
    path: &Path,
    class: &str,
    settings: &Map<String, Value>,
) -> tokenizers::Result<(Tokenizer, &'static Named)> {
    let model = Model::decode(&*std::fs::read(path)?)?;
    let is_unigram = match model.trainer.model.unwrap_or(UNIGRAM) {
        UNIGRAM => true,
        MERGES => false,
        _ => return Err("is a SentencePiece model of type word or char: expected unigram or bpe".into()),
    };
    let control = model.pieces.iter().filter(|piece| [CONTROL, OF_USER].contains(&piece.kind));
    let added: Vec<AddedToken> =
        control.map(|piece| AddedToken::from(piece.text.clone(), piece.kind == CONTROL).normalized(false)).collect();
    let (mut tokenizer, named) = match (is_unigram, class) {
        (true, class) if class.starts_with("t5") || class.starts_with("mt5") => (t5(&model, settings)?, T5),
        (true, class) if class.starts_with("xlm-roberta") || class.starts_with("xlmroberta") => {
            (xlm_roberta(&model)?, ROBERTA)
        }
        (false, class) if !class.starts_with("gemma") => (llama(&model, settings)?, LLAMA),
        _ => {
            let expected =
                "expected Llama's, T5's or XLM-RoBERTa's; save a tokenizer.json with transformers' save_pretrained";
            return Err(format!("is a SentencePiece model of an unsupported class ({class:?}): {expected}").into());
        }
    };
    for token in added {
        match token.special {
            true => tokenizer.add_special_tokens(&[token]),
            false => tokenizer.add_tokens(&[token]),
        };
    }
    Ok((tokenizer, named))
}

/// Builds Llama's tokenizer. Pairs of pieces are merged in the order of the pieces that they form.
fn llama(model: &Model, settings: &Map<String, Value>) -> tokenizers::Result<Tokenizer> {
    let numbers: HashMap<&str, u32> = model.pieces.iter().map(|piece| piece.text.as_str()).zip(0..).collect();
    let mut merges = Vec::new();
    for (piece, &whole) in &numbers {
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            if let (Some(&a), Some(&b)) = (numbers.get(left), numbers.get(right)) {
                let lengths = [left, right].map(|part| part.chars().count());
                merges.push(((whole, lengths, a, b), (left.to_string(), right.to_string())));
            }
        }
    }
    merges.sort();
    let vocabulary = model.pieces.iter().map(|piece| piece.text.clone()).zip(0..).collect::<ahash::AHashMap<_, _>>();
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary, merges.into_iter().map(|(_, merge)| merge).collect())
        .unk_token(model.trainer.unk_piece.clone().unwrap_or("<unk>".into()))
        .fuse_unk(true)
        .byte_fallback(true)
        .build()?;
    let mut tokenizer = Tokenizer::new(bpe);
    with_blanks(&mut tokenizer, settings)?;
    Ok(tokenizer)
}

/// Treats blanks like transformers' LlamaTokenizer, whatever a `tokenizer.json` says.
pub(super) fn with_blanks(tokenizer: &mut Tokenizer, settings: &Map<String, Value>) -> tokenizers::Result<()> {
    let flag = |key: &str| settings.get(key).and_then(Value::as_bool);
    let prefix = flag("add_prefix_space").unwrap_or(true);
    let scheme = match (prefix, flag("legacy").unwrap_or(false)) {
        (false, _) => PrependScheme::Never,
        (true, true) => PrependScheme::Always,
        (true, false) => PrependScheme::First,
    };
    tokenizer.with_normalizer(None::<Replace>);
    tokenizer.with_pre_tokenizer(Some(Metaspace::new(BLANK, scheme, false)));
    let mut decoders =
        vec![Replace::new(BLANK.to_string(), " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
    if prefix {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_decoder(Some(Decoders::new(decoders)));
    Ok(())
}

fn t5(model: &Model, settings: &Map<String, Value>) -> tokenizers::Result<Tokenizer> {
    let count = match settings.get("extra_ids") {
        None | Some(Value::Null) => SENTINELS,
        Some(given) => given.as_u64().filter(|&count| count <= MOST_SENTINELS).ok_or_else(|| {
            format!("extra_ids of its tokenizer_config.json is {given}: expected a whole number up to {MOST_SENTINELS}")
        })?,
    };
    let own = model.pieces.iter().map(|piece| (piece.text.clone(), f64::from(piece.score)));
    let sentinels = (0..count).rev().map(|number| format!("<extra_id_{number}>"));
    let pieces = own.chain(sentinels.clone().map(|token| (token, 0.0))).collect();
    let mut tokenizer = unigram(pieces, model.trainer.unk.unwrap_or(0) as usize, model)?;
    tokenizer.add_special_tokens(&sentinels.map(|token| AddedToken::from(token, true)).collect::<Vec<_>>());
    around(&mut tokenizer, "$A </s>", "$A </s> $B </s>")?;
    Ok(tokenizer)
}

/// Builds XLM-RoBERTa's tokenizer. The first pieces of the file differ from the first tokens of the model.
fn xlm_roberta(model: &Model) -> tokenizers::Result<Tokenizer> {
    let first = ["<s>", "<pad>", "</s>", "<unk>"].map(|token| (token.to_string(), 0.0));
    let own = model.pieces.iter().skip(3).map(|piece| (piece.text.clone(), f64::from(piece.score)));
    let pieces = first.into_iter().chain(own).chain([("<mask>".to_string(), 0.0)]).collect();
    let mut tokenizer = unigram(pieces, 3, model)?;
    around(&mut tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>")?;
    Ok(tokenizer)
}

fn unigram(pieces: Vec<(String, f64)>, unk: usize, model: &Model) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(Unigram::from(pieces, Some(unk), false)?);
    if !model.normalizer.charsmap.is_empty() {
        tokenizer.with_normalizer(Some(Precompiled::from(&model.normalizer.charsmap)?));
    }
    let blanks = Metaspace::new(BLANK, PrependScheme::Always, true);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![WhitespaceSplit.into(), blanks.clone().into()])));
    tokenizer.with_decoder(Some(blanks));
    Ok(tokenizer)
}

fn around(tokenizer: &mut Tokenizer, single: &str, pair: &str) -> tokenizers::Result<()> {
    let known = ["<s>", "</s>"].into_iter().filter(|token| single.contains(token));
    let known = known.map(|token| tokenizer.token_to_id(token).map(|id| (token.to_string(), id)));
    let known = known.collect::<Option<Vec<_>>>().ok_or("has no </s>, or no <s>")?;
    let template = TemplateProcessing::builder()
        .try_single(single)?
        .try_pair(pair)?
        .special_tokens(known)
        .build()
        .map_err(|error| error.to_string())?;
    tokenizer.with_post_processor(Some(template));
    Ok(())
}
