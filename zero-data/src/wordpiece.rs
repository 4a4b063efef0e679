//! BERT's tokenizer, WordPiece, of a given vocabulary.

use std::collections::HashMap;
use std::path::Path;

use ahash::AHashMap;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::processors::bert::BertProcessing;
use tokenizers::{AddedToken, decoders};

/// BERT's special tokens, in the order of its vocabularies' first lines (but for their unused ones).
pub(super) const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// What a token begins with that goes on with a word.
pub(super) const GOES_ON: &str = "##";

/// As BERT's, of this vocabulary. `lowercase` also takes accents away.
pub(super) fn of_vocabulary(
    vocabulary: HashMap<String, u32>,
    lowercase: bool,
) -> tokenizers::Result<tokenizers::Tokenizer> {
    let id = |token: &str| vocabulary.get(token).copied().ok_or_else(|| format!("has no token {token}"));
    let [sep, cls] = ["[SEP]", "[CLS]"].map(|token| id(token).map(|id| (token.to_string(), id)));
    let (sep, cls) = (sep?, cls?);
    // One that is not there would be given a number.
    let known = SPECIAL.iter().filter(|&&token| vocabulary.contains_key(token));
    let special: Vec<AddedToken> = known.map(|&token| AddedToken::from(token, true)).collect();
    let model = WordPiece::builder()
        .vocab(vocabulary.into_iter().collect::<AHashMap<_, _>>())
        .unk_token("[UNK]".into())
        .build()?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer
        .with_normalizer(Some(BertNormalizer::new(true, true, None, lowercase)))
        .with_pre_tokenizer(Some(BertPreTokenizer))
        .with_post_processor(Some(BertProcessing::new(sep, cls)))
        .with_decoder(Some(decoders::wordpiece::WordPiece::new(GOES_ON.into(), true)));
    tokenizer.add_special_tokens(&special);
    Ok(tokenizer)
}

/// Of a `vocab.txt`, which has a token in each line.
pub(super) fn of_lines(lines: &str, lowercase: bool) -> tokenizers::Result<tokenizers::Tokenizer> {
    of_vocabulary(lines.lines().enumerate().map(|(id, token)| (token.to_string(), id as u32)).collect(), lowercase)
}

/// The words of `path`'s folder's `tokenizer_config.json` on case; as BERT's uncased models without.
pub(super) fn lowercases(path: &Path) -> bool {
    let config = std::fs::read(path.with_file_name("tokenizer_config.json")).ok();
    let config: Option<serde_json::Value> = config.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    config.and_then(|config| config["do_lower_case"].as_bool()).unwrap_or(true)
}
