//! A WordPiece vocabulary, learned from texts.

use std::sync::mpsc::sync_channel;

use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::tokenizer::{Normalizer, PreTokenizedString, PreTokenizer, Trainer};
use tokenizers::{AddedToken, NormalizedString, OffsetReferential, OffsetType};

use super::tokenizer::Tokenizer;
use super::wordpiece::{self, SPECIAL};
use super::{Source, documents};
use crate::error::{Result, wrong_data};

/// The least number of times that two parts must occur together to be merged.
const OFTEN: u64 = 2;

impl Tokenizer {
    /// Learns a WordPiece vocabulary of `size` tokens from texts (<https://arxiv.org/abs/1810.04805>), or a smaller one if
    /// they do not have that many. `lowercase` also removes accents. The same texts give the same tokenizer.
    ///
    /// # Errors
    ///
    /// [`DataError`](crate::DataError) if the texts cannot be read, or have more letters than `size` allows.
    pub fn learn(source: &Source<'_>, field: Option<&str>, size: usize, lowercase: bool) -> Result<Self> {
        let tokenizer = learn(source, field, size, lowercase)?;
        let text = tokenizer.to_string(false).expect("a tokenizer is numbers and texts");
        Self::new(tokenizer, crc32c::crc32c(text.as_bytes()), None).for_sentences(source.path())
    }
}

fn learn(source: &Source<'_>, field: Option<&str>, size: usize, lowercase: bool) -> Result<tokenizers::Tokenizer> {
    let bad = |error: tokenizers::Error| wrong_data(source.path(), format!("gives no vocabulary: {error}"));
    let mut trainer = WordPieceTrainer::builder().min_frequency(OFTEN).vocab_size(0).show_progress(false).build();
    let normalizer = BertNormalizer::new(true, true, None, lowercase);
    let words = |text: &str| {
        let mut text = NormalizedString::from(text);
        normalizer.normalize(&mut text)?;
        let mut parts = PreTokenizedString::from(text);
        BertPreTokenizer.pre_tokenize(&mut parts)?;
        let parts = parts.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
        Ok(parts.into_iter().map(|(word, ..)| word.to_string()).collect())
    };
    let read = match *source {
        Source::Text(text, _) => trainer.feed(std::iter::once(text), words).map_err(bad),
        Source::File(path) => {
            let files = documents::files(path)?;
            let (send, texts) = sync_channel(16);
            std::thread::scope(|scope| {
                // Ends when the receiver is dropped.
                let reading = scope.spawn(move || {
                    files.iter().try_for_each(|file| {
                        documents::texts(file, field, &mut |text| {
                            let gone = |_| wrong_data(path, "was not read to its end");
                            send.send(text).map_err(gone)
                        })
                    })
                });
                let fed = trainer.feed(texts.into_iter(), words).map_err(bad);
                reading.join().expect("reading does not panic").and(fed)
            })
        }
    };
    read?;
    // First learns the alphabet, and sorts it. The trainer numbers letters inside of words in the order of a hash map, and
    // of two equally frequent merges it takes the one with the lower numbers.
    let mut model = WordPiece::default();
    trainer.train(&mut model).map_err(bad)?;
    let mut letters: Vec<String> = tokenizers::Model::get_vocab(&model).into_keys().collect();
    letters.sort();
    let first = SPECIAL.iter().map(|token| token.to_string()).chain(letters);
    let first: Vec<AddedToken> = first.map(|token| AddedToken::from(token, true)).collect();
    if first.len() > size {
        let (tokens, problem) = (first.len(), "has more distinct characters than the vocabulary may have tokens");
        return Err(wrong_data(
            source.path(),
            format!("{problem}: expected --vocab-size {tokens} or more, got {size}"),
        ));
    }
    trainer.set_special_tokens(first);
    trainer.set_vocab_size(size);
    trainer.train(&mut model).map_err(bad)?;
    wordpiece::of_vocabulary(tokenizers::Model::get_vocab(&model), lowercase).map_err(bad)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::DataError;
    use crate::TokenizeOptions;

    const TEXT: &str = "Who would be so mocked with glory?\nMock me not, mocking mockers!\n\nSo be it.\n";

    fn learn(size: usize) -> Result<Tokenizer, DataError> {
        Tokenizer::learn(&Source::Text(TEXT, "text"), None, size, true)
    }

    #[test]
    fn a_vocabulary_that_was_learned_is_read_from_either_file() {
        let dir = tempfile::tempdir().unwrap();
        let learned = learn(80).unwrap();
        learned.save(&dir.path().join("a")).unwrap();
        let again = learn(80).unwrap();
        assert_eq!(again.checksum, learned.checksum, "the same text gives the same vocabulary");
        let vocabulary = std::fs::read_to_string(dir.path().join("a/vocab.txt")).unwrap();
        assert!(vocabulary.starts_with("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n") && vocabulary.contains("\nmock\n"));
        let ids = learned.encode(TEXT).unwrap();
        for file in ["tokenizer.json", "vocab.txt"] {
            let only = dir.path().join(format!("only-{file}"));
            std::fs::create_dir(&only).unwrap();
            std::fs::copy(dir.path().join("a").join(file), only.join(file)).unwrap();
            let options = TokenizeOptions {
                vocab_size: 80,
                tokenizer: Some(&only),
                sentences: true,
                ..TokenizeOptions::default()
            };
            let read = Tokenizer::find(Path::new("text"), &options).unwrap();
            assert_eq!(read.encode(TEXT).unwrap(), ids, "{file}");
        }
        let told = learned.save(&dir.path().join("a")).unwrap_err().to_string();
        assert!(told.contains("vocab.txt"), "what is there is not overwritten: {told}");
        let told = learn(9).err().unwrap().to_string();
        assert!(told.contains("expected --vocab-size"), "{told}");
    }

    #[test]
    fn sentences_and_documents_end() {
        let tokenizer = learn(80).unwrap();
        let sep = tokenizer.id("[SEP]").unwrap();
        let shape = |text: &str| -> Vec<bool> {
            let mut shape: Vec<bool> = tokenizer.encode(text).unwrap().iter().map(|&id| id == sep).collect();
            shape.dedup_by(|a, b| !*a && !*b);
            shape
        };
        let sentence = [false, true];
        assert_eq!(shape(TEXT), [&sentence[..], &sentence, &[true], &sentence].concat());
        // Two on a line; blanks before, between and after.
        assert_eq!(
            shape("\n \nSo be it. Be so!\n\n\n\nwho\n\n"),
            [&sentence[..], &sentence, &[true], &sentence, &[true]].concat()
        );
        assert_eq!(shape("\n\n"), [false; 0]);
    }

    #[test]
    fn other_tokenizers_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("vocab.txt"), "[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n").unwrap();
        let options = TokenizeOptions {
            vocab_size: 80,
            tokenizer: Some(dir.path()),
            sentences: true,
            ..TokenizeOptions::default()
        };
        let told =
            |options: &TokenizeOptions<'_>| Tokenizer::find(Path::new("text"), options).err().unwrap().to_string();
        assert!(told(&options).contains("has no token [MASK]"), "{}", told(&options));
        let none = TokenizeOptions { tokenizer: None, ..options };
        assert!(told(&none).contains("zero tokenizer"), "{}", told(&none));
    }
}
