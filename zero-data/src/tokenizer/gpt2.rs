//! GPT-2's tokenizer, whose table is part of the program.

use std::collections::HashMap;

use serde_json::json;
use tiktoken_rs::CoreBPE;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};
use zero_core::checkpoint::SideFile;

/// Number of GPT-2's tokens, including the end of a text.
pub(super) const TOKENS: usize = 50257;

/// The token that ends a text.
pub(super) const END: &str = "<|endoftext|>";

pub(super) fn table() -> &'static CoreBPE {
    tiktoken_rs::r50k_base_singleton()
}

/// Returns the tokenizer's files, as transformers reads them.
pub(super) fn files() -> Vec<SideFile> {
    let config = json!({ "tokenizer_class": "GPT2Tokenizer", "bos_token": END, "eos_token": END, "unk_token": END, "model_max_length": 1024 });
    let file = |name: &str, text: String| SideFile { name: name.into(), bytes: text.into_bytes().into() };
    vec![file("tokenizer.json", json()), file("tokenizer_config.json", format!("{config:#}\n"))]
}

/// Returns the same as the `tokenizer.json` of <https://huggingface.co/openai-community/gpt2>.
fn json() -> String {
    let tokens: Vec<Vec<u8>> =
        (0..TOKENS as u32 - 1).map(|id| table().decode_bytes(&[id]).expect("every number below is a token")).collect();
    let ranks: HashMap<&[u8], usize> = tokens.iter().enumerate().map(|(rank, token)| (&token[..], rank)).collect();
    let shown = shown_bytes();
    let text = |bytes: &[u8]| -> String { bytes.iter().map(|&byte| shown[byte as usize]).collect() };
    let merges = tokens.iter().enumerate().filter(|(_, token)| token.len() > 1);
    let merges = merges.map(|(rank, token)| {
        let middle = halves(token, rank, &ranks);
        (text(&token[..middle]), text(&token[middle..]))
    });
    let vocabulary = tokens.iter().enumerate().map(|(id, token)| (text(token), id as u32));
    let vocabulary = vocabulary.chain([(END.to_string(), TOKENS as u32 - 1)]).collect::<ahash::AHashMap<_, _>>();
    let bpe = BPE::builder().vocab_and_merges(vocabulary, merges.collect()).build().expect("both halves are tokens");
    let mut tokenizer = Tokenizer::new(bpe);
    let bytes = ByteLevel::new(false, true, true);
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    tokenizer.with_post_processor(Some(ByteLevel::new(true, false, true)));
    tokenizer.add_special_tokens(&[AddedToken::from(END, true)]);
    tokenizer.to_string(false).expect("a tokenizer is numbers and texts")
}

/// Returns the boundary between the two tokens that were merged into the token of this rank: those that earlier merges leave of its bytes.
fn halves(token: &[u8], rank: usize, ranks: &HashMap<&[u8], usize>) -> usize {
    let mut cuts: Vec<usize> = (0..=token.len()).collect();
    while cuts.len() > 3 {
        let earliest = (0..cuts.len() - 2)
            .filter_map(|at| Some((*ranks.get(&token[cuts[at]..cuts[at + 2]])?, at)))
            .filter(|(other, _)| *other < rank)
            .min();
        let (_, at) = earliest.expect("a token is made of earlier ones");
        cuts.remove(at + 1);
    }
    cuts[1]
}

/// Returns the printable characters in which byte-level tokens are written, one for each byte.
fn shown_bytes() -> [char; 256] {
    let is_shown = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 0x100..;
    std::array::from_fn(|byte| match is_shown(byte as u8) {
        true => char::from(byte as u8),
        false => others.next().and_then(char::from_u32).expect("a character"),
    })
}
