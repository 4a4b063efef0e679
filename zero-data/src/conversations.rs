//! Conversations, and prompts with completions: one per row, of which the model learns the answers. A row may also be a preference: a
//! chosen and a rejected completion of one prompt.
//!
//! * In: JSON, JSON lines, Parquet or a table, in the formats of TRL (<https://huggingface.co/docs/trl/dataset_formats>),
//!   ShareGPT and Stanford Alpaca.
//! * Out: batches that are padded to their longest row, with labels for the tokens that count in the loss. Rows may be packed: several
//!   conversations in one row.
//! * Memory: all tokens, 5 bytes each.

use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value};
use zero_models::loss::IGNORED_LABEL;

use super::documents::{self, DataFile, Place, kind_of};
use super::left_out::LeftOut;
use super::packing::packed;
use super::tokenizer::{ChatTemplate, MARK, Message, NO_TEMPLATE, Tokenizer};
use super::{Source, TokenBatch, TokenizeOptions, check_ids, is_tokens};
use crate::error::{Result, wrong_data};

/// Default limit of tokens per row, the same as TRL's `max_length`.
pub const LONGEST: usize = 1024;

/// Rows that all threads tokenize at a time.
const PART: usize = 4096;

/// The tokens over which the loss of a conversation is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum LossOn {
    /// Completions of prompts, and the assistant's messages
    #[default]
    Completions,
    /// All tokens
    All,
}

/// The format of a file of conversations, by its fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatFormat {
    /// `messages`: objects with `role` and `content`.
    Messages,
    /// `conversations`: objects with `from` and `value`, of ShareGPT.
    ShareGpt,
    /// `prompt` and `completion`: texts, or lists of messages.
    PromptCompletion,
    /// `instruction`, `input` and `output`: texts, of Stanford Alpaca.
    Alpaca,
    /// `chosen` and `rejected`, with or without `prompt`: texts, or lists of messages.
    Preference,
}

/// Formats, with the fields that identify them.
const FORMATS: [(ChatFormat, &[&str]); 5] = [
    (ChatFormat::Messages, &["messages"]),
    (ChatFormat::ShareGpt, &["conversations"]),
    (ChatFormat::PromptCompletion, &["prompt", "completion"]),
    (ChatFormat::Alpaca, &["instruction", "output"]),
    (ChatFormat::Preference, &["chosen", "rejected"]),
];

/// Fields of a row that would change its text, and are not supported.
const REFUSED: [&str; 4] = ["tools", "chat_template_kwargs", "system", "history"];

/// The same for the fields of a message.
const REFUSED_IN_MESSAGE: [&str; 7] =
    ["tool_calls", "tool_call_id", "function_call", "reasoning_content", "thinking", "weight", "train"];

/// Columns that are read.
const COLUMNS: [&str; 13] = [
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "chosen",
    "rejected",
    REFUSED[0],
    REFUSED[1],
    REFUSED[2],
    REFUSED[3],
];

impl ChatFormat {
    /// Returns the formats of a source's first row: several if it has the fields of several. Empty: it holds documents, or cannot be read.
    ///
    /// # Errors
    ///
    /// [`DataError`](crate::DataError) for a folder that cannot be used.
    pub fn of(source: &Source<'_>) -> Result<Vec<Self>> {
        let Source::File(path) = *source else { return Ok(Vec::new()) };
        if is_tokens(path) {
            return Ok(Vec::new());
        }
        let mut first = None;
        // An error of the file is reported when it is read for its rows.
        let _ = documents::objects(&documents::files(path)?[0], &COLUMNS, &mut |place, row| {
            first = Some(row);
            Err(place.wrong(path, "is the only one that is read"))
        });
        let has = |field: &&str| first.as_ref().is_some_and(|row| row.contains_key(*field));
        Ok(FORMATS.iter().filter(|(_, fields)| fields.iter().all(has)).map(|(format, _)| *format).collect())
    }
}

/// A row before it is tokenized.
enum Example {
    Conversation(Vec<Message>),
    /// A prompt and its completion.
    Messages([Vec<Message>; 2]),
    Texts([String; 2]),
}

impl Example {
    /// Returns whether an answer has no text.
    fn has_empty_answer(&self) -> bool {
        let (Self::Conversation(messages) | Self::Messages([_, messages])) = self else {
            return matches!(self, Self::Texts([_, completion]) if completion.trim().is_empty());
        };
        messages.iter().any(|message| message.role == "assistant" && message.content.trim().is_empty())
    }
}

/// Rows of conversations.
#[derive(Debug)]
pub struct Conversations {
    ids: Vec<i32>,
    /// True for tokens that have a label.
    counts: Vec<bool>,
    /// The end of each conversation in `ids`.
    ends: Vec<usize>,
    /// The conversations of each row, if rows are packed or preferences; otherwise each is a row.
    packs: Option<Vec<Vec<usize>>>,
    /// True if the two conversations of a row are the chosen and the rejected one.
    are_preferences: bool,
    longest: usize,
    held_out: usize,
    left_out: LeftOut,
    tokenizer: Tokenizer,
}

impl Conversations {
    /// Reads and tokenizes the rows of a file or folder. The first `options.seq` tokens of each row are kept. If none of
    /// them has a label, the row is left out ([`left_out`](Self::left_out)).
    ///
    /// # Errors
    ///
    /// [`DataError`](crate::DataError) if a file cannot be read, or a row cannot be used, which the error names: a row in
    /// another format, one that the chat template refuses, or one with a token that the model does not know. With
    /// `options.skips_bad_rows` such a row is left out instead.
    pub fn load(
        path: &Path,
        format: ChatFormat,
        loss_on: LossOn,
        options: &TokenizeOptions<'_>,
        tokenizer: Tokenizer,
    ) -> Result<Self> {
        let seq = Some(options.seq.unwrap_or(LONGEST.min(options.n_positions)));
        let seq = TokenizeOptions { seq, ..options.clone() }.row_length(2)?;
        let text = tokenizer.chat_template_text();
        // An error of the template is reported by the first row that needs it.
        let template = text.as_deref().map(|text| tokenizer.chat_template(text));
        let (vocab_size, skips) = (options.vocab_size, options.skips_bad_rows);
        let encoder = Encoder { tokenizer: &tokenizer, template, loss_on, seq, vocab_size, skips };
        let files = documents::files(path)?;
        let split = files.partition_point(|file| !file.is_held_out);
        let mut rows = Rows { names_files: files.len() > 1, ..Rows::default() };
        for file in &files[..split] {
            rows.read(file, format, &encoder)?;
        }
        let trained = rows.ends.len();
        let skipped = |left_out: &LeftOut| match left_out.bad.first.first() {
            Some(problem) => format!("; {} rows cannot be used, the first one because: {problem}", left_out.bad.number),
            None => String::new(),
        };
        if trained == 0 {
            let problem = format!(
                "has no row with an answer in its first {seq} tokens, as tokenized by {}: expected prompts with \
                 completions, or messages of the assistant; if the answers start later, raise --seq{}",
                tokenizer.whose(),
                skipped(&rows.left_out)
            );
            return Err(wrong_data(path, problem));
        }
        for file in &files[split..] {
            rows.read(file, format, &encoder)?;
        }
        let found = rows.ends.len() - trained;
        if found == 0 && options.held_out != Some(0) && split < files.len() {
            let problem = format!(
                "has no row with an answer in its first {seq} tokens: expected at least one in the validation split; \
                 raise --seq, or set --eval 0{}",
                skipped(&rows.left_out)
            );
            return Err(wrong_data(&files[split].path, problem));
        }
        let begins = [0].into_iter().chain(rows.ends.iter().copied());
        let lengths: Vec<usize> = begins.zip(&rows.ends).map(|(begin, end)| end - begin).collect();
        let are_preferences = format == ChatFormat::Preference;
        let parts = [0..trained, trained..lengths.len()];
        let mut packs = match options.packing {
            true => Some(parts.map(|part| packed(&lengths, part, seq))),
            false => are_preferences.then(|| parts.map(|part| part.step_by(2).map(|at| vec![at, at + 1]).collect())),
        };
        let found = packs.as_ref().map_or(found, |[_, of_split]| of_split.len());
        let held_out = if split == files.len() { 0 } else { documents::held_out(options.held_out, found)? };
        rows.ends.truncate(if packs.is_some() { lengths.len() } else { trained + held_out });
        packs.iter_mut().for_each(|[_, of_split]| of_split.truncate(held_out));
        let packs = packs.map(|packs| packs.concat());
        let longest = match &packs {
            None => lengths[..rows.ends.len()].iter().copied().max(),
            Some(packs) if are_preferences => packs.iter().flatten().map(|&at| lengths[at]).max(),
            Some(packs) => packs.iter().map(|pack| pack.iter().map(|&at| lengths[at]).sum()).max(),
        };
        let Rows { ids, counts, ends, left_out, .. } = rows;
        let longest = longest.unwrap_or(0);
        Ok(Self { ids, counts, ends, packs, are_preferences, longest, held_out, left_out, tokenizer })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.packs.as_ref().map_or(self.ends.len(), Vec::len)
    }

    /// Returns whether a row may hold several conversations, which do not see each other.
    pub fn is_packed(&self) -> bool {
        self.packs.is_some() && !self.are_preferences
    }

    /// Returns whether each row is a preference.
    pub fn are_preferences(&self) -> bool {
        self.are_preferences
    }

    /// Returns the number of conversations.
    pub fn conversations(&self) -> usize {
        self.ends.len()
    }

    /// Returns the number of last rows that belong to a validation split.
    pub fn held_out(&self) -> usize {
        self.held_out
    }

    /// Returns the numbers of rows that were left out or cut.
    pub fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    /// Returns the texts of conversation `at` of a row: parts that are only read, and parts that count in the loss (`true`).
    pub fn parts(&self, row: usize, at: usize) -> Vec<(bool, String)> {
        let range = self.ranges(row).nth(at).unwrap_or_default();
        let (ids, mut begin) = (&self.ids[range.clone()], 0);
        let part = |counts: &[bool]| {
            let tokens: Vec<u32> = ids[begin..begin + counts.len()].iter().map(|&id| id as u32).collect();
            begin += counts.len();
            (counts[0], self.tokenizer.decode_with_special(&tokens))
        };
        self.counts[range].chunk_by(|a, b| a == b).map(part).collect()
    }

    /// Returns the number of tokens of the longest row; of preferences, of the longest prompt with a completion.
    pub fn seq(&self) -> usize {
        self.longest
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the tokens of the conversations in a row.
    fn ranges(&self, row: usize) -> impl Iterator<Item = Range<usize>> {
        let range = |at: usize| at.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[at];
        let pack = self.packs.as_ref().map(|packs| &packs[row][..]);
        let alone = pack.is_none().then_some(row);
        alone.into_iter().chain(pack.unwrap_or_default().iter().copied()).map(range)
    }

    /// Returns the total number of tokens of some rows, without padding.
    pub fn tokens(&self, rows: &[usize]) -> usize {
        rows.iter().flat_map(|&row| self.ranges(row)).map(|range| range.len()).sum()
    }

    /// Returns the number of labels of some rows that the model predicts: the first token of a conversation is not predicted.
    pub fn labels(&self, rows: &[usize]) -> usize {
        rows.iter().flat_map(|&row| self.ranges(row)).map(|range| self.labels_in(range)).sum()
    }

    /// Returns [`labels`](Self::labels) of each sequence of a batch of preferences.
    pub fn labels_of_each(&self, rows: &[usize]) -> Vec<usize> {
        self.sequences(rows).iter().flatten().map(|range| self.labels_in(range.clone())).collect()
    }

    fn labels_in(&self, range: Range<usize>) -> usize {
        self.counts[range][1..].iter().filter(|counts| **counts).count()
    }

    /// Returns the last answer of a row's first conversation, or its chosen answer, and the tokens before it: at least one.
    pub fn prompt_and_answer(&self, row: usize) -> [&[i32]; 2] {
        let range = self.ranges(row).next().unwrap_or_default();
        let (ids, counts) = (&self.ids[range.clone()], &self.counts[range]);
        let end = counts.iter().rposition(|counts| *counts).map_or(0, |last| last + 1);
        let length = counts[..end].iter().rev().take_while(|counts| **counts).count();
        let begin = (end - length).max(1).min(end);
        [&ids[..begin], &ids[begin..end]]
    }

    /// Returns a checksum of the tokens and labels of some rows, which identifies the data.
    pub fn checksum(&self, rows: Range<usize>) -> u32 {
        rows.flat_map(|row| self.ranges(row)).fold(0, |sum, range| {
            let sum = crc32c::crc32c_append(sum, &(range.len() as u64).to_le_bytes());
            let sum = crc32c::crc32c_append(sum, bytemuck::cast_slice(&self.ids[range.clone()]));
            crc32c::crc32c_append(sum, bytemuck::cast_slice(&self.counts[range]))
        })
    }

    /// Returns the conversations in each sequence of a batch: those of a row; of preferences, all chosen ones, then all rejected ones.
    fn sequences(&self, rows: &[usize]) -> Vec<Vec<Range<usize>>> {
        match self.are_preferences {
            false => rows.iter().map(|&row| self.ranges(row).collect()).collect(),
            true => {
                (0..2).flat_map(|at| rows.iter().map(move |&row| self.ranges(row).skip(at).take(1).collect())).collect()
            }
        }
    }

    /// Returns a batch of rows, padded at their ends to the longest. No token attends to padding, and it has no labels. A batch of
    /// preferences has two sequences for each row: all chosen ones come first, then all rejected ones.
    pub fn batch(&self, rows: &[usize]) -> TokenBatch {
        let sequences = self.sequences(rows);
        let length = |sequence: &Vec<Range<usize>>| sequence.iter().map(Range::len).sum();
        let width = sequences.iter().map(length).max().unwrap_or(0);
        let documents = self.is_packed().then(Vec::new);
        let mut batch = TokenBatch { width, documents, ..TokenBatch::default() };
        for (at, sequence) in sequences.into_iter().enumerate() {
            for range in sequence {
                let (ids, counts) = (&self.ids[range.clone()], &self.counts[range]);
                let labels = ids.iter().zip(counts).map(|(&id, &counts)| if counts { id } else { IGNORED_LABEL });
                let begin = batch.labels.len();
                batch.labels.extend(labels);
                // The token before it is of another conversation.
                if self.is_packed() {
                    batch.labels[begin] = IGNORED_LABEL;
                }
                batch.input_ids.extend(ids);
                batch.documents.iter_mut().for_each(|documents| documents.push(ids.len()));
            }
            let padding = (at + 1) * width - batch.input_ids.len();
            batch.labels.extend(std::iter::repeat_n(IGNORED_LABEL, padding));
            batch.input_ids.extend(std::iter::repeat_n(0, padding));
            batch.documents.iter_mut().filter(|_| padding > 0).for_each(|documents| documents.push(padding));
        }
        batch
    }
}

/// The rows read so far.
#[derive(Default)]
struct Rows {
    ids: Vec<i32>,
    counts: Vec<bool>,
    ends: Vec<usize>,
    left_out: LeftOut,
    /// True if a row is noted with the name of its file.
    names_files: bool,
}

impl Rows {
    fn read(&mut self, file: &DataFile, format: ChatFormat, encoder: &Encoder<'_>) -> Result<()> {
        let mut part: Vec<(Place, Map<String, Value>)> = Vec::new();
        let mut flush = |part: &mut Vec<(Place, Map<String, Value>)>| -> Result<()> {
            let encoded: Vec<EncodedRow> = std::mem::take(part)
                .into_par_iter()
                .map(|(place, row)| {
                    let encoded = encoder.examples(format, row).and_then(|examples| {
                        Ok((encoder.encode_all(&examples)?, examples.iter().any(Example::has_empty_answer)))
                    });
                    (place, encoded.map_err(|problem| place.wrong(&file.path, &problem)))
                })
                .collect();
            self.left_out.read += encoded.len();
            for (place, encoded) in encoded {
                let (mut sequences, is_empty) = match encoded {
                    Ok(encoded) => encoded,
                    Err(error) if encoder.skips => {
                        self.left_out.bad.add(|| error.to_string());
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                let name = || match self.names_files {
                    true => format!("{place} of {}", file.path.file_name().unwrap_or_default().display()),
                    false => place.to_string(),
                };
                let is_cut = sequences.iter().any(|(ids, _)| ids.len() > encoder.seq);
                for (ids, counts) in &mut sequences {
                    ids.truncate(encoder.seq);
                    counts.truncate(encoder.seq);
                }
                // The first token is not predicted.
                let has_labels = |counts: &Vec<bool>| counts.iter().skip(1).any(|counts| *counts);
                if !sequences.iter().all(|(_, counts)| has_labels(counts)) {
                    self.left_out.without_labels.add(name);
                    continue;
                }
                if is_cut {
                    self.left_out.cut.add(name);
                }
                if is_empty {
                    self.left_out.empty.add(name);
                }
                for (ids, counts) in sequences {
                    self.ids.extend(ids.iter().map(|&id| id as i32));
                    self.counts.extend(counts);
                    self.ends.push(self.ids.len());
                }
            }
            Ok(())
        };
        documents::objects(file, &COLUMNS, &mut |place, row| {
            part.push((place, row));
            if part.len() == PART { flush(&mut part) } else { Ok(()) }
        })?;
        flush(&mut part)
    }
}

/// An encoder that tokenizes rows.
struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<Result<ChatTemplate<'a>, String>>,
    loss_on: LossOn,
    seq: usize,
    vocab_size: usize,
    /// True if a row that cannot be used is skipped.
    skips: bool,
}

/// Tokens, and whether each has a label.
type Encoded = (Vec<u32>, Vec<bool>);

/// The place of a row, its sequences, and whether an answer has no text.
type EncodedRow = (Place, Result<(Vec<Encoded>, bool)>);

impl Encoder<'_> {
    /// Returns a row's example, or the two of a preference; or describes the problem with the row.
    fn examples(&self, format: ChatFormat, mut row: Map<String, Value>) -> Result<Vec<Example>, String> {
        if let Some(name) = REFUSED.iter().find(|name| is_given(row.get(**name))) {
            return Err(format!(
                "has a \"{name}\" field, which is not supported: move its content into the messages, or remove it"
            ));
        }
        let mut take = |name: &str| row.remove(name);
        Ok(vec![match format {
            ChatFormat::Messages => Example::Conversation(messages("messages", take("messages"))?),
            ChatFormat::ShareGpt => Example::Conversation(messages("conversations", take("conversations"))?),
            ChatFormat::PromptCompletion => match (take("prompt"), take("completion")) {
                (Some(Value::String(prompt)), Some(Value::String(completion))) => Example::Texts([prompt, completion]),
                (prompt @ Some(Value::Array(_)), completion) => {
                    Example::Messages([messages("prompt", prompt)?, messages("completion", completion)?])
                }
                (prompt, completion) => {
                    let [prompt, completion] = [prompt, completion].map(|value| got(value.as_ref()));
                    let expected = "expected two strings, or two lists of messages";
                    return Err(format!("its \"prompt\" {prompt} and its \"completion\" {completion}: {expected}"));
                }
            },
            ChatFormat::Alpaca => {
                let instruction = text("instruction", take("instruction"))?;
                let input = take("input").filter(|input| !input.is_null());
                let input = input.map_or(Ok(String::new()), |input| text("input", Some(input)))?;
                let output = text("output", take("output"))?;
                match self.template {
                    Some(_) => {
                        let parts = if input.is_empty() { vec![instruction] } else { vec![instruction, input] };
                        let user = Message::new("user", parts.join("\n\n"));
                        Example::Conversation(vec![user, Message::new("assistant", output)])
                    }
                    None => Example::Texts([alpaca(&instruction, &input), output]),
                }
            }
            ChatFormat::Preference => {
                return preference(take("prompt"), take("chosen"), take("rejected")).map(Vec::from);
            }
        }])
    }

    /// Returns the tokens of a row's examples. Tokens that both completions of a preference share with the prompt have no label.
    fn encode_all(&self, examples: &[Example]) -> Result<Vec<Encoded>, String> {
        let mut all: Vec<Encoded> = examples.iter().map(|example| self.encode(example)).collect::<Result<_, _>>()?;
        let first = |(_, counts): &Encoded| counts.iter().position(|counts| *counts).unwrap_or(counts.len());
        if let [chosen, rejected] = &mut all[..] {
            let begin = first(chosen).min(first(rejected));
            chosen.1[begin..].fill(true);
            rejected.1[begin..].fill(true);
        }
        Ok(all)
    }

    /// Returns the tokens of an example.
    fn encode(&self, example: &Example) -> Result<Encoded, String> {
        let (ids, mut counts) = match example {
            Example::Texts([prompt, completion]) => self.continued(prompt, &format!("{prompt}{completion}"), true)?,
            Example::Messages([prompt, completion]) => {
                let template = self.template()?;
                let whole = template.render(&[&prompt[..], completion].concat(), false)?;
                let before = match self.loss_on {
                    LossOn::All => String::new(),
                    LossOn::Completions => template.render(prompt, true)?,
                };
                if !whole.starts_with(&before) {
                    return Err(self.unstable("the prompt differently when a completion follows", ""));
                }
                self.continued(&before, &whole, false)?
            }
            Example::Conversation(messages) => {
                let (text, answers) = self.answers(messages)?;
                let cut = self.tokenizer.encode_with_offsets(&text)?;
                let (ids, offsets) = (cut.get_ids().to_vec(), cut.get_offsets());
                let mut counts = vec![false; ids.len()];
                for answer in answers.into_iter().filter(|answer| !answer.is_empty()) {
                    let first = offsets.iter().position(|(_, end)| *end > answer.start);
                    let last = offsets.iter().rposition(|(begin, _)| *begin < answer.end);
                    if let (Some(first), Some(last)) = (first, last) {
                        counts[first..(last + 1).max(first)].fill(true);
                    }
                }
                (ids, counts)
            }
        };
        if self.loss_on == LossOn::All {
            counts.fill(true);
        }
        check_ids(&ids, self.vocab_size)?;
        Ok((ids, counts))
    }

    /// Returns the tokens of `whole`. Tokens that differ from those of `prompt` have a label, as in TRL. Documents get the
    /// tokens that begin and end one.
    fn continued(&self, prompt: &str, whole: &str, are_documents: bool) -> Result<Encoded, String> {
        let begin = if are_documents { self.tokenizer.prefix_ids() } else { &[] };
        let encode = |text| Ok::<_, String>([begin, &self.tokenizer.encode(text)?].concat());
        let (before, mut ids) = (encode(prompt)?, encode(whole)?);
        if are_documents {
            let problem = "the tokenizer has no end-of-text token: set eos_token in a tokenizer_config.json next to \
                           the tokenizer";
            let end = self.tokenizer.end().ok_or(problem)?;
            if ids.last() != Some(&end) {
                ids.push(end);
            }
        }
        let same = before.iter().zip(&ids).take_while(|(a, b)| a == b).count();
        let counts = (0..ids.len()).map(|at| at >= same).collect();
        Ok((ids, counts))
    }

    fn template(&self) -> Result<&ChatTemplate<'_>, String> {
        match &self.template {
            Some(template) => template.as_ref().map_err(String::clone),
            None => Err(format!("holds messages, but {} {NO_TEMPLATE}", self.tokenizer.whose())),
        }
    }

    /// Returns the text of a conversation, and the assistant's parts of it: those that the template marks by
    /// `{% generation %}`; or everything after the text with `add_generation_prompt` up to the end of the message.
    fn answers(&self, messages: &[Message]) -> Result<(String, Vec<Range<usize>>), String> {
        let template = self.template()?;
        let mut answers = Vec::new();
        if self.loss_on == LossOn::All {
            return Ok((template.render(messages, false)?, answers));
        }
        if template.is_marked {
            if messages.iter().any(|message| message.content.contains(MARK)) {
                return Err(format!("holds the noncharacter {}: remove it", MARK.escape_unicode()));
            }
            let mut text = String::new();
            for (at, part) in template.render_marked(messages)?.split(MARK).enumerate() {
                let begin = text.len();
                text.push_str(part);
                if at % 2 == 1 {
                    answers.push(begin..text.len());
                }
            }
            if text != template.render(messages, false)? {
                return Err(format!(
                    "the chat template of {} changes the text inside {{% generation %}} (with a filter, for example): \
                     put the tags where the final text is output, or use --loss-on all",
                    self.tokenizer.whose()
                ));
            }
            return Ok((text, answers));
        }
        let text = template.render(messages, false)?;
        for (at, _) in messages.iter().enumerate().filter(|(_, message)| message.role == "assistant") {
            let before = match template.render(&messages[..at], true) {
                Err(_) if at == 0 => {
                    return Err(self.unstable("no prompt for an assistant message that comes first", MARKS));
                }
                before => before?,
            };
            let through = match at + 1 == messages.len() {
                true => &text,
                false => &template.render(&messages[..=at], false)?,
            };
            let end = match through.starts_with(&before) && text.starts_with(through) {
                true => Some(through.len()),
                false => answer_end(template, messages, at, &text)?.filter(|_| text.starts_with(&before)),
            };
            let end = end
                .filter(|end| before.len() <= *end)
                .ok_or_else(|| self.unstable(&format!("message {at} differently when others follow"), MARKS))?;
            answers.push(before.len()..end);
        }
        Ok((text, answers))
    }

    fn unstable(&self, what: &str, remedy: &str) -> String {
        format!(
            "the chat template of {} renders {what}, so the assistant's tokens cannot be identified: {remedy}use \
             --loss-on all",
            self.tokenizer.whose()
        )
    }
}

/// Returns the end of message `at` in the text of a conversation, for a template that renders it otherwise when it is the last one, as
/// Qwen3's adds an empty thought then. With a mark in place of the message, the same text must surround the mark, and what follows it must
/// begin as in a conversation that ends with the mark. `None` if it does not.
fn answer_end(
    template: &ChatTemplate<'_>,
    messages: &[Message],
    at: usize,
    text: &str,
) -> Result<Option<usize>, String> {
    if text.contains(MARK) {
        return Ok(None);
    }
    let mut messages = messages.to_vec();
    messages[at].content = MARK.into();
    let (all, last) = (template.render(&messages, false)?, template.render(&messages[..=at], false)?);
    let (Some((before, after)), Some((_, end))) = (all.split_once(MARK), last.split_once(MARK)) else {
        return Ok(None);
    };
    let is_same = text.len() >= before.len() + after.len() && text.starts_with(before) && text.ends_with(after);
    Ok((is_same && after.starts_with(end)).then(|| text.len() - after.len() + end.len()))
}

/// Advice for a template that does not mark the assistant's tokens.
const MARKS: &str = "put {% generation %} and {% endgeneration %} around them in the template, or ";

/// Returns Alpaca's prompt, for models without a chat template, in Alpaca-LoRA's version:
/// <https://github.com/tloen/alpaca-lora>.
fn alpaca(instruction: &str, input: &str) -> String {
    let (about, input) = match input {
        "" => (". Write", String::new()),
        input => (", paired with an input that provides further context. Write", format!("### Input:\n{input}\n\n")),
    };
    format!(
        "Below is an instruction that describes a task{about} a response that appropriately completes the request.\n\n\
         ### Instruction:\n{instruction}\n\n{input}### Response:\n"
    )
}

/// Returns a prompt with two completions. Without a prompt of the same kind, the prompt is what both completions begin with, as in TRL.
fn preference(prompt: Option<Value>, chosen: Option<Value>, rejected: Option<Value>) -> Result<[Example; 2], String> {
    match (chosen, rejected) {
        (Some(Value::String(chosen)), Some(Value::String(rejected))) => {
            if chosen == rejected {
                return Err(SAME.into());
            }
            let [prompt, chosen, rejected] = match prompt {
                Some(prompt) => [text("prompt", Some(prompt))?, chosen, rejected],
                None => {
                    let same = chosen.chars().zip(rejected.chars()).take_while(|(a, b)| a == b);
                    let common = &chosen[..same.map(|(char, _)| char.len_utf8()).sum()];
                    let at = match common.len() == chosen.len().min(rejected.len()) {
                        // The shorter answer gets its last character.
                        true => common.len() - common.chars().next_back().map_or(0, char::len_utf8),
                        // The space before a word belongs to its token.
                        false => common.strip_suffix(' ').unwrap_or(common).len(),
                    };
                    [chosen[..at].into(), chosen[at..].into(), rejected[at..].into()]
                }
            };
            Ok([Example::Texts([prompt.clone(), chosen]), Example::Texts([prompt, rejected])])
        }
        (chosen @ Some(Value::Array(_)), rejected) => {
            let (mut chosen, mut rejected) = (messages("chosen", chosen)?, messages("rejected", rejected)?);
            if chosen == rejected {
                return Err(SAME.into());
            }
            let prompt = match prompt {
                prompt @ Some(Value::Array(_)) => messages("prompt", prompt)?,
                // It repeats the first message, or is all of the prompt.
                prompt => {
                    let same = chosen.iter().zip(&rejected).take_while(|(a, b)| a == b).count();
                    let same = same.min(chosen.len().min(rejected.len()) - 1);
                    rejected.drain(..same);
                    match (chosen.drain(..same).collect::<Vec<_>>(), prompt) {
                        (common, Some(Value::String(prompt))) if common.is_empty() => {
                            vec![Message::new("user", prompt)]
                        }
                        (common, _) => common,
                    }
                }
            };
            for (name, messages) in [("prompt", &prompt), ("chosen", &chosen), ("rejected", &rejected)] {
                if messages.is_empty() {
                    return Err(format!(
                        "its \"{name}\" has no messages of its own: expected a prompt, and two different answers"
                    ));
                }
            }
            Ok([Example::Messages([prompt.clone(), chosen]), Example::Messages([prompt, rejected])])
        }
        (chosen, rejected) => {
            let [chosen, rejected] = [chosen, rejected].map(|value| got(value.as_ref()));
            let expected = "expected two strings, or two lists of messages";
            Err(format!("its \"chosen\" {chosen} and its \"rejected\" {rejected}: {expected}"))
        }
    }
}

/// Problem of a preference without one.
const SAME: &str = "has the same \"chosen\" and \"rejected\": expected two different answers";

/// Returns whether a field exists and is not empty.
fn is_given(value: Option<&Value>) -> bool {
    !matches!(value, None | Some(Value::Null)) && value != Some(&Value::Array(Vec::new())) && value != Some(&"".into())
}

/// Describes a field, for error messages.
fn got(value: Option<&Value>) -> String {
    value.map_or("is missing".into(), |value| format!("is {}", kind_of(value)))
}

fn text(name: &str, value: Option<Value>) -> Result<String, String> {
    match value {
        Some(Value::String(text)) => Ok(text),
        other => Err(format!("its \"{name}\" {}: expected a string", got(other.as_ref()))),
    }
}

/// Returns the messages of a field, with `role` and `content` or ShareGPT's `from` and `value`.
fn messages(name: &str, value: Option<Value>) -> Result<Vec<Message>, String> {
    let Some(Value::Array(list)) = value else {
        return Err(format!("its \"{name}\" {}: expected a list of messages", got(value.as_ref())));
    };
    if list.is_empty() {
        return Err(format!("its \"{name}\" has no messages: expected at least one"));
    }
    let message = |(at, value): (usize, Value)| {
        let problem = |problem: String| format!("message {at} of its \"{name}\": {problem}");
        let Value::Object(mut message) = value else {
            return Err(problem(format!("is {}: expected an object with a role and a content", kind_of(&value))));
        };
        if let Some(key) = REFUSED_IN_MESSAGE.iter().find(|key| is_given(message.get(**key))) {
            return Err(problem(format!(
                "has a \"{key}\" field, which is not supported: move it into the content, or remove it"
            )));
        }
        let keys = if message.contains_key("from") { ["from", "value"] } else { ["role", "content"] };
        let [role, content] = keys.map(|key| text(key, message.remove(key)).map_err(problem));
        let role = match &*role? {
            "human" => "user".into(),
            "gpt" => "assistant".into(),
            role if keys[0] == "role" || ["system", "user", "assistant", "tool"].contains(&role) => role.to_string(),
            role => return Err(problem(format!("is from {role:?}: expected human, gpt or system"))),
        };
        Ok(Message { role, content: content? })
    };
    list.into_iter().enumerate().map(message).collect()
}
