//! Pairs of text segments with masked tokens for BERT's pre-training, made on the fly: *BERT*, Devlin et al. 2018, section
//! 3.1 and appendix A.1 and A.2, <https://arxiv.org/abs/1810.04805>.
//!
//! * In: a stream of tokens in which `[SEP]` ends a sentence and a second `[SEP]` a document.
//! * Out: batches `[rows, seq]` of `[CLS] A [SEP] B [SEP]`. Half of the time B follows A in the text, else it is from
//!   another place. The row's seed decides which sentences are used and which tokens are masked.
//! * Memory: only the sentences in use, if the text is large.

use std::ops::Range;
use std::path::Path;

use zero_core::random::Draws;

use super::tokenizer::Tokenizer;
use super::tokens::Tokens;
use super::wordpiece::SPECIAL;
use super::{Source, TokenizeOptions, is_tokens};
use crate::error::{Result, wrong_data};

/// `[CLS]` and two `[SEP]`.
const MARKS: usize = 3;

/// Probability that a pair is shorter than a row, so that the model also sees short ones.
const SHORT: f64 = 0.1;

/// The label of a token that is not predicted.
const IGNORED: i32 = zero_models::loss::IGNORED_LABEL;

/// Choice of the tokens that are predicted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Masking {
    /// The share of a pair's tokens: 0.15 in the paper.
    pub probability: f64,
    /// If set, all tokens of a word are chosen together.
    pub whole_words: bool,
}

/// Pairs of text segments.
#[derive(Debug)]
pub struct SentencePairs {
    tokens: Tokens,
    seq: usize,
    rows: usize,
    held_out: usize,
    special: Special,
    /// For each token id, whether the token continues a word.
    going_on: Vec<bool>,
}

#[derive(Debug, Clone, Copy)]
struct Special {
    pad: i32,
    cls: i32,
    sep: i32,
    mask: i32,
}

/// A flat batch of pairs: `[rows, seq]` unless noted otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PairBatch {
    /// Token ids, some of them masked.
    pub input_ids: Vec<i32>,
    /// 0 in the first segment, 1 in the second.
    pub token_type_ids: Vec<i32>,
    /// 1 at tokens, 0 at padding.
    pub attention_mask: Vec<i32>,
    /// The ids to predict; -100 elsewhere.
    pub labels: Vec<i32>,
    /// 1 if the second segment does not follow the first in the text, otherwise 0, `[rows]`.
    pub next_sentence_labels: Vec<i32>,
    /// Positions of the labels, as indices into the batch's tokens.
    pub predicted_positions: Vec<i32>,
}

impl SentencePairs {
    /// Tokenizes and checks a text. Each row has the length that `options` sets, or 128 tokens.
    ///
    /// # Errors
    ///
    /// [`DataError`](crate::DataError) if a file cannot be read or is too short, or the tokenizer is not the model's or not like BERT's.
    pub fn load(source: &Source<'_>, options: &TokenizeOptions<'_>, tokenizer: &Tokenizer) -> Result<Self> {
        let problem = |problem: String| Err(wrong_data(source.path(), problem));
        if matches!(source, Source::File(path) if is_tokens(path)) {
            return problem(
                "is a file of token ids: expected text, so that sentences and documents can be separated".into(),
            );
        }
        let seq = options.row_length(MARKS + 2)?;
        let (tokens, held_out) = Tokens::cut(source, options, tokenizer, seq - MARKS)?;
        let [pad, _, cls, sep, mask] = SPECIAL.map(|token| tokenizer.id(token).map_or(-1, |id| id as i32));
        let special = Special { pad, cls, sep, mask };
        let going_on = tokenizer.going_on();
        let pairs = Self { rows: tokens.len() / (seq - MARKS), tokens, held_out, seq, special, going_on };
        if pairs.rows == 0 {
            let (found, needed) = (pairs.tokens.len(), seq - MARKS);
            return problem(format!(
                "has {found} tokens, but one row needs {needed}: use a longer text or a smaller --seq"
            ));
        }
        Ok(pairs)
    }

    /// Returns the number of rows: the number of pairs that fill the text once.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of last rows that belong to a validation split.
    pub fn held_out(&self) -> usize {
        self.held_out
    }

    /// Returns the tokens per row, including padding.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// Returns the size of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.going_on.len()
    }

    /// Returns a checksum of the tokens of some rows and of the rows' length, which identifies the data.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn checksum(&self, rows: Range<usize>) -> Result<u32> {
        let width = self.seq - MARKS;
        self.tokens.checksum((rows.start * width, rows.end * width), self.seq)
    }

    /// Returns a batch of rows, each drawn from its seed. A second segment from elsewhere comes from the rows that `others`
    /// returns for a row, so that held-out text stays held out.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or has no sentences.
    pub fn batch(
        &self,
        rows: &[usize],
        seeds: &[u64],
        others: impl Fn(usize) -> Range<usize>,
        masking: Masking,
    ) -> Result<PairBatch> {
        let mut batch = PairBatch::default();
        for (&row, &seed) in rows.iter().zip(seeds) {
            self.add(&mut batch, row, others(row), masking, &mut Draws::new(seed))?;
        }
        Ok(batch)
    }

    fn add(
        &self,
        batch: &mut PairBatch,
        row: usize,
        others: Range<usize>,
        masking: Masking,
        draws: &mut Draws,
    ) -> Result<()> {
        let room = self.seq - MARKS;
        let room = if draws.unit() < SHORT { 2 + draws.below(room - 1) } else { room };
        let sentences = self.sentences(row, &others, room, draws)?;
        let cut = if sentences.len() > 1 { 1 + draws.below(sentences.len() - 1) } else { 1 };
        let (first, second) = sentences.split_at(cut);
        let (first, mut second) = (first.concat(), second.concat());
        let elsewhere = second.is_empty() || draws.unit() < 0.5;
        if elsewhere {
            // Another row than this one, if there is one.
            let step = if others.len() > 1 { 1 + draws.below(others.len() - 1) } else { 0 };
            let other = others.start + (row - others.start + step) % others.len();
            second = self.sentences(other, &others, room.saturating_sub(first.len()).max(1), draws)?.concat();
        }
        let (mut first, mut second) = (&first[..], &second[..]);
        while first.len() + second.len() > room {
            let longer = if first.len() > second.len() { &mut first } else { &mut second };
            *longer = if draws.unit() < 0.5 { &longer[1..] } else { &longer[..longer.len() - 1] };
        }
        let Special { pad, cls, sep, .. } = self.special;
        let mut ids = vec![cls];
        ids.extend(first.iter().chain([&sep]));
        let in_first = ids.len();
        ids.extend(second.iter().chain([&sep]));
        let labels = self.mask(&mut ids, masking, draws);

        let (begin, padding) = (batch.input_ids.len(), self.seq - ids.len());
        let fill = |value: i32, of: usize| std::iter::repeat_n(value, of);
        batch
            .predicted_positions
            .extend((0..ids.len()).filter(|&at| labels[at] != IGNORED).map(|at| (begin + at) as i32));
        batch.token_type_ids.extend(fill(0, in_first).chain(fill(1, ids.len() - in_first)).chain(fill(0, padding)));
        batch.attention_mask.extend(fill(1, ids.len()).chain(fill(0, padding)));
        batch.labels.extend(labels.into_iter().chain(fill(IGNORED, padding)));
        batch.input_ids.extend(ids.into_iter().chain(fill(pad, padding)));
        batch.next_sentence_labels.push(elsewhere.into());
        Ok(())
    }

    /// Returns consecutive sentences of one document, of at least `room` tokens if it has that many. They start at a random
    /// sentence that begins in this row's part of the stream. Nothing outside of the rows `of` is read.
    fn sentences(&self, row: usize, of: &Range<usize>, room: usize, draws: &mut Draws) -> Result<Vec<Vec<i32>>> {
        let (width, sep) = (self.seq - MARKS, self.special.sep);
        let end = if of.end == self.rows { self.tokens.len() } else { of.end * width };
        // A row may have no sentence, if the text has many blank lines.
        for row in (row..of.end).chain(of.start..row) {
            let begin = row * width;
            // The token before tells whether a sentence begins.
            let from = begin.saturating_sub(1).max(of.start * width);
            let mut ids = vec![0; (begin + 2 * width).min(end) - from];
            self.tokens.read(from, &mut ids)?;
            let own = begin - from..begin - from + width;
            let begins = |at: &usize| ids[*at] != sep && at.checked_sub(1).is_none_or(|before| ids[before] == sep);
            let starts: Vec<usize> = own.clone().filter(begins).collect();
            // All of it may be one long sentence.
            let start = match starts.len() {
                0 => own.clone().find(|&at| ids[at] != sep),
                found => Some(starts[draws.below(found)]),
            };
            let Some(start) = start else { continue };
            let mut found: Vec<Vec<i32>> = Vec::new();
            let mut total = 0;
            for sentence in ids[start..].split(|&id| id == sep) {
                if sentence.is_empty() || total >= room {
                    break;
                }
                total += sentence.len();
                found.push(sentence.to_vec());
            }
            return Ok(found);
        }
        Err(wrong_data(Path::new("the text"), "has no sentences: expected lines of words"))
    }

    /// Masks tokens, and returns the labels. Of the chosen tokens, 80 % become `[MASK]`, 10 % a random token, and 10 % stay.
    fn mask(&self, ids: &mut [i32], masking: Masking, draws: &mut Draws) -> Vec<i32> {
        let Special { cls, sep, mask, .. } = self.special;
        let mut labels = vec![IGNORED; ids.len()];
        let mut words: Vec<Range<usize>> = Vec::new();
        for at in (0..ids.len()).filter(|&at| ids[at] != cls && ids[at] != sep) {
            match words.last_mut() {
                Some(word) if masking.whole_words && word.end == at && self.going_on[ids[at] as usize] => word.end += 1,
                _ => words.push(at..at + 1),
            }
        }
        draws.shuffle(&mut words);
        let mut left = ((ids.len() as f64 * masking.probability).round() as usize).max(1);
        for word in words {
            if word.len() > left {
                continue;
            }
            left -= word.len();
            for at in word {
                labels[at] = ids[at];
                match draws.below(10) {
                    0 => {}
                    1 => ids[at] = draws.below(self.vocabulary()) as i32,
                    _ => ids[at] = mask,
                }
            }
            if left == 0 {
                break;
            }
        }
        labels
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Returns documents of sentences, in which each word names its document and sentence: `d3s1w0`.
    fn text(documents: usize) -> String {
        let sentence = |d: usize, s: usize| (0..4 + (d + s) % 5).map(|w| format!("d{d}s{s}w{w} ")).collect::<String>();
        (0..documents)
            .map(|d| (0..3 + d % 4).map(|s| sentence(d, s) + "\n").collect::<String>() + "\n")
            .collect::<String>()
    }

    /// Returns pairs whose tokenizer has a vocabulary of full words.
    fn pairs(seq: usize) -> (SentencePairs, Tokenizer) {
        let text = text(40);
        let source = Source::Text(&text, "text");
        let dir = tempfile::tempdir().unwrap();
        let mut words: Vec<&str> = text.split_whitespace().collect();
        words.sort_unstable();
        words.dedup();
        let lines: String = SPECIAL.iter().chain(&words).map(|word| format!("{word}\n")).collect();
        std::fs::write(dir.path().join("vocab.txt"), lines).unwrap();
        let options = TokenizeOptions {
            seq: Some(seq),
            vocab_size: usize::MAX,
            n_positions: 512,
            tokenizer: Some(dir.path()),
            sentences: true,
            ..TokenizeOptions::default()
        };
        let tokenizer = Tokenizer::find(Path::new("text"), &options).unwrap();
        (SentencePairs::load(&source, &options, &tokenizer).unwrap(), tokenizer)
    }

    const MASKING: Masking = Masking { probability: 0.15, whole_words: false };

    /// Returns the two segments of a row before it was masked.
    fn segments(batch: &PairBatch, row: usize, seq: usize) -> [Vec<i32>; 2] {
        let at = row * seq..(row + 1) * seq;
        let ids: Vec<i32> = std::iter::zip(&batch.input_ids[at.clone()], &batch.labels[at.clone()])
            .map(|(&id, &label)| if label == IGNORED { id } else { label })
            .collect();
        let used = batch.attention_mask[at.clone()].iter().sum::<i32>() as usize;
        assert!(ids[used..].iter().all(|&id| id == 0), "padding is [PAD]");
        let types = &batch.token_type_ids[at];
        let first = types[..used].iter().filter(|&&of| of == 0).count();
        assert!(types[first..used].iter().all(|&of| of == 1) && types[used..].iter().all(|&of| of == 0));
        assert_eq!([ids[0], ids[first - 1], ids[used - 1]], [2, 3, 3], "[CLS] and [SEP]");
        [ids[1..first - 1].to_vec(), ids[first..used - 1].to_vec()]
    }

    #[test]
    fn a_second_segment_follows_the_first_or_is_from_elsewhere() {
        let (seq, (pairs, tokenizer)) = (32, pairs(32));
        let mut stream = vec![0; pairs.tokens.len()];
        pairs.tokens.read(0, &mut stream).unwrap();
        let stream: Vec<i32> = stream.into_iter().filter(|&id| id != 3).collect();
        let place =
            |part: &[i32]| stream.windows(part.len()).position(|window| window == part).expect("it is of the text");
        let rows: Vec<usize> = (0..pairs.rows()).collect();
        let mut elsewhere = 0;
        for epoch in 0..20u64 {
            let seeds: Vec<u64> = rows.iter().map(|&row| epoch << 32 | row as u64).collect();
            let batch = pairs.batch(&rows, &seeds, |_| 0..pairs.rows(), MASKING).unwrap();
            for &row in &rows {
                let [first, second] = segments(&batch, row, seq);
                assert!(!first.is_empty() && !second.is_empty() && first.len() + second.len() <= seq - MARKS);
                let (a, b) = (place(&first), place(&second));
                match batch.next_sentence_labels[row] {
                    // Trimmed between the two, if at all.
                    0 => assert!(b >= a + first.len() && b - a <= seq, "{a} {b}"),
                    _ => elsewhere += 1,
                }
            }
        }
        let part = elsewhere as f64 / (20 * rows.len()) as f64;
        assert!((0.45..0.65).contains(&part), "{part} from elsewhere, of which a few have nothing that follows");
        assert_eq!(pairs.vocabulary(), tokenizer.tokens());
    }

    #[test]
    fn text_that_is_held_out_stays_so() {
        let (pairs, seq) = (pairs(24).0, 24);
        let trained = pairs.rows() * 2 / 3;
        let width = seq - MARKS;
        let all: Vec<usize> = (0..pairs.rows()).collect();
        let split = |row: usize| if row < trained { 0..trained } else { trained..pairs.rows() };
        let mut begins = vec![0; (trained + 2) * width];
        pairs.tokens.read(0, &mut begins).unwrap();
        let seen: HashSet<i32> = begins.into_iter().collect();
        for seed in 0..50u64 {
            let batch = pairs.batch(&all[..trained], &vec![seed; trained], split, MASKING).unwrap();
            for row in 0..trained {
                assert!(segments(&batch, row, seq).concat().iter().all(|id| seen.contains(id)), "row {row}");
            }
        }
    }

    #[test]
    fn tokens_are_masked_as_often_as_the_paper_says() {
        let pairs = pairs(64).0;
        let rows: Vec<usize> = (0..pairs.rows()).collect();
        let (mut tokens, mut counts) = (0, [0.0; 3]);
        for epoch in 0..200u64 {
            let seeds: Vec<u64> = rows.iter().map(|&row| epoch << 32 | row as u64).collect();
            let batch = pairs.batch(&rows, &seeds, |_| 0..pairs.rows(), MASKING).unwrap();
            assert_eq!(batch, pairs.batch(&rows, &seeds, |_| 0..pairs.rows(), MASKING).unwrap());
            tokens += batch.attention_mask.iter().sum::<i32>();
            let labelled: Vec<i32> =
                (0..batch.labels.len() as i32).filter(|&at| batch.labels[at as usize] != IGNORED).collect();
            assert_eq!(labelled, batch.predicted_positions);
            for at in labelled {
                let (id, label) = (batch.input_ids[at as usize], batch.labels[at as usize]);
                assert!(label > 4, "special tokens are not predicted");
                counts[if id == 4 { 0 } else { 1 + usize::from(id != label) }] += 1.0;
            }
        }
        let all: f64 = counts.iter().sum();
        assert!((all / f64::from(tokens) - 0.15).abs() < 0.01, "{}", all / f64::from(tokens));
        for (count, part) in counts.iter().zip([0.8, 0.1, 0.1]) {
            assert!((count / all - part).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn whole_words_are_masked_together() {
        let text = "unbelievable unthinkable believable thinkable\n".repeat(60);
        let dir = tempfile::tempdir().unwrap();
        let words = ["un", "##believ", "##think", "##able", "believ", "think"];
        let lines: String = SPECIAL.iter().chain(&words).map(|word| format!("{word}\n")).collect();
        std::fs::write(dir.path().join("vocab.txt"), lines).unwrap();
        let options = TokenizeOptions {
            seq: Some(40),
            vocab_size: 11,
            n_positions: 40,
            tokenizer: Some(dir.path()),
            sentences: true,
            ..TokenizeOptions::default()
        };
        let tokenizer = Tokenizer::find(Path::new("text"), &options).unwrap();
        let pairs = SentencePairs::load(&Source::Text(&text, "text"), &options, &tokenizer).unwrap();
        let masking = Masking { probability: 0.3, whole_words: true };
        let mut masked = 0;
        for seed in 0..100 {
            let batch = pairs.batch(&[3], &[seed], |_| 0..pairs.rows(), masking).unwrap();
            let used = batch.attention_mask.iter().sum::<i32>() as usize;
            for at in 1..used {
                let (label, before) = (batch.labels[at], batch.labels[at - 1]);
                // A part that goes on with a word, unless the segment begins with it.
                let original = if label == IGNORED { batch.input_ids[at] } else { label };
                let original_before = if before == IGNORED { batch.input_ids[at - 1] } else { before };
                if (6..=8).contains(&original) && original_before > 4 {
                    assert_eq!(label == IGNORED, before == IGNORED, "all of a word or nothing of it");
                    masked += usize::from(label != IGNORED);
                }
            }
        }
        assert!(masked > 100, "{masked}");
    }
}
