//! BERT's tokenizer, WordPiece, with a given vocabulary.

use std::collections::HashMap;

use ahash::AHashMap;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::processors::bert::BertProcessing;
use tokenizers::{AddedToken, decoders};

/// BERT's special tokens, in the order of the first lines of its vocabularies (except for unused ones).
pub(super) const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// Prefix of tokens that continue a word.
pub(super) const GOES_ON: &str = "##";

/// Creates a tokenizer like BERT's with this vocabulary. `lowercase` also removes accents.
pub(super) fn of_vocabulary(
    vocabulary: HashMap<String, u32>,
    lowercase: bool,
) -> tokenizers::Result<tokenizers::Tokenizer> {
    let id = |token: &str| vocabulary.get(token).copied().ok_or_else(|| format!("has no token {token}"));
    let [sep, cls] = ["[SEP]", "[CLS]"].map(|token| id(token).map(|id| (token.to_string(), id)));
    let (sep, cls) = (sep?, cls?);
    // A token that is missing would be assigned a number.
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

/// Creates a tokenizer that lowercases from a `vocab.txt`, which has a token on each line.
pub(super) fn of_lines(lines: &str) -> tokenizers::Result<tokenizers::Tokenizer> {
    of_vocabulary(lines.lines().enumerate().map(|(id, token)| (token.to_string(), id as u32)).collect(), true)
}
