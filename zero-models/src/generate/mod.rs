//! Text generation, token by token: greedy, sampled, or by beam search, for any model that predicts the next token.
//!
//! * Input: a [`Reader`] (a model with a cache of keys and values), prompts as token ids, and [`Sampling`]. Output: the tokens that follow
//!   each prompt. With the feature `burn`, `CausalLm` is a model of Burn 0.21, and `KvCache` its cache.
//! * Prompts of different lengths share each pass over the model: shorter ones are padded on the left, and the padding is masked.
//! * Keys and values are cached, so that each token is read once.
//! * On a backend that shards parameters, they are gathered as in training, once per token for all prompts. Ranks that gather together
//!   must make the same number of passes: [`Hooks::goes_on`] lets them agree.

mod beams;
#[cfg(feature = "burn")]
mod cache;
#[cfg(feature = "burn")]
mod causal_lm;
mod choose;
mod rows;
mod settings;

use zero_core::config::Float;
use zero_core::random::Draws;

#[cfg(feature = "burn")]
pub use cache::KvCache;
#[cfg(feature = "burn")]
pub use causal_lm::{CausalLm, generate, generate_with};
pub use rows::CachedRows;

use crate::error::check_each;
use crate::{ModelError, Result};

/// A model that predicts the next token, with a cache of the rows that it has read.
pub trait Reader {
    /// Returns the maximum sequence length.
    fn positions(&self) -> usize;

    /// Returns the vocabulary size.
    fn vocabulary(&self) -> usize;

    /// Begins with new rows, of which nothing has been read.
    fn begin(&mut self, rows: CachedRows);

    /// Reads the next tokens `[b, t]` of each row, and returns the logits `[b, v]` of the tokens that follow. `t` is 1 except in the first
    /// pass.
    fn read(&mut self, ids: Vec<i32>, b: usize) -> Vec<f32>;

    /// Replaces the rows: row `i` continues from the state of row `rows[i]`.
    fn take(&mut self, rows: &[usize]);
}

/// Generation settings. The default is greedy: the most likely token, 64 times.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Maximum number of tokens that follow a prompt.
    pub max_new_tokens: usize,
    /// Maximum number of tokens of a prompt and its continuation together; `max_new_tokens` applies too.
    pub max_length: Option<usize>,
    /// Tokens that end a text; they are not part of it.
    pub stop: Vec<u32>,
    /// Minimum number of tokens that follow a prompt; before that, no `stop` token is chosen.
    pub min_new_tokens: usize,
    /// Minimum number of tokens of a prompt and its continuation together.
    pub min_length: usize,
    /// Divisor of the logits; 0 takes the most likely token.
    pub temperature: f64,
    /// Number of most likely tokens to sample from; all if `None`.
    pub top_k: Option<usize>,
    /// Probability that the most likely tokens to sample from must add up to; all tokens if `None`.
    pub top_p: Option<f64>,
    /// Penalty on tokens that have already occurred; above 1, they become less likely.
    pub repetition_penalty: f64,
    /// Length of token sequences that must not occur twice in a prompt and its continuation; 0 allows all.
    pub no_repeat_ngram_size: usize,
    /// Seed of the random draws. Each prompt has its own draws, by its number.
    pub seed: u64,
    /// Number of beams. Above 1, beam search looks for the most likely text.
    pub beams: usize,
    /// In beam search, a text's score is the sum of its log-probabilities divided by its length to this power.
    pub length_penalty: f64,
    /// Condition that ends beam search.
    pub early_stopping: EarlyStopping,
    /// The token that follows a prompt of one token, regardless of the logits: the first token that a BART generates.
    pub forced_first: Option<u32>,
    /// The last token of a text that reaches its maximum length, regardless of the logits.
    pub forced_last: Option<u32>,
    /// The type in which keys and values are cached; the model's own if `None`.
    pub cache_dtype: Option<Float>,
}

/// Condition that ends beam search, as `early_stopping` in transformers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EarlyStopping {
    /// Ends once as many texts have finished as there are beams, and the best unfinished one scores below all of these, by its length so
    /// far.
    #[default]
    No,
    /// Ends once as many texts have finished as there are beams.
    Yes,
    /// Same as [`No`](Self::No), but by the maximum length of a text if `length_penalty` is above 0.
    Never,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            max_new_tokens: 64,
            max_length: None,
            stop: Vec::new(),
            min_new_tokens: 0,
            min_length: 0,
            temperature: 0.0,
            top_k: None,
            top_p: None,
            repetition_penalty: 1.0,
            no_repeat_ngram_size: 0,
            seed: 0,
            beams: 1,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::No,
            forced_first: None,
            forced_last: None,
            cache_dtype: None,
        }
    }
}

/// Callbacks of generation.
pub struct Hooks<'a> {
    /// Called with a prompt's index and a token chosen for it. Beam search calls it only at the end.
    pub token: &'a mut dyn FnMut(usize, u32),
    /// Decides whether there is another pass; the argument is true if these prompts need one. There are at most as many passes as the
    /// model has positions.
    pub goes_on: &'a mut dyn FnMut(bool) -> bool,
    /// Returns the number of a prompt among those of all ranks, which determines its draws.
    pub number: &'a dyn Fn(usize) -> usize,
}

/// Calls `make` with [`Hooks`] of a single rank, which report nothing.
pub fn alone<R>(make: impl FnOnce(Hooks<'_>) -> R) -> R {
    make(Hooks { token: &mut |_, _| (), goes_on: &mut |needs| needs, number: &|row| row })
}

/// Generates the tokens that follow each prompt.
///
/// # Errors
/// If a prompt is empty, has a token outside the vocabulary, or exceeds the model's positions together with its new tokens, or if
/// [`Sampling`] holds an invalid value.
pub fn generate_by(
    model: &mut dyn Reader,
    prompts: &[Vec<u32>],
    how: &Sampling,
    hooks: Hooks<'_>,
) -> Result<Vec<Vec<u32>>> {
    how.check()?;
    let known = format!("below {}, the size of the vocabulary", model.vocabulary());
    let forced = [("forced_first", how.forced_first), ("forced_last", how.forced_last)];
    let forced = forced.iter().filter_map(|(field, token)| Some((*field, (*token)? as usize)));
    check_each(
        "sampling",
        forced.map(|(field, token)| (token < model.vocabulary(), field, token.to_string(), known.as_str())),
    )?;
    if let (Some(most), Some(row)) = (how.max_length, prompts.iter().position(|prompt| how.most(prompt) == 0)) {
        let length = prompts[row].len();
        let problem = format!(
            "has {length} tokens, but max_length is {most}, for prompt and new tokens together: shorten it or raise \
             max_length"
        );
        return Err(ModelError::Prompt { row, problem });
    }
    check(prompts, |prompt| how.most(prompt), model.positions(), model.vocabulary())?;
    let Some(longest) = prompts.iter().map(Vec::len).max() else { return Ok(Vec::new()) };
    let padding: Vec<usize> = prompts.iter().map(|prompt| longest - prompt.len()).collect();
    let filled: Vec<i32> = prompts
        .iter()
        .zip(&padding)
        .flat_map(|(prompt, &padding)| {
            std::iter::repeat_n(prompt[0], padding).chain(prompt.iter().copied()).map(|id| id as i32)
        })
        .collect();
    let room = prompts.iter().map(|prompt| how.most(prompt).saturating_add(longest)).max().unwrap_or(0);
    model.begin(CachedRows::new(padding, room, how.cache_dtype).within(model.positions()));
    let logits = model.read(filled, prompts.len());
    let pass = Pass { model, prompts, how };
    Ok(if how.beams == 1 { pass.one_by_one(logits, hooks) } else { pass.search(logits, hooks) })
}

/// A model that has read the prompts.
struct Pass<'a> {
    model: &'a mut dyn Reader,
    prompts: &'a [Vec<u32>],
    how: &'a Sampling,
}

impl Pass<'_> {
    fn one_by_one(self, mut logits: Vec<f32>, hooks: Hooks<'_>) -> Vec<Vec<u32>> {
        let (prompts, how) = (self.prompts, self.how);
        let rows = prompts.len();
        let mut texts = prompts.to_vec();
        let mut draws: Vec<Draws> =
            (0..rows).map(|row| Draws::new(how.seed).fork((hooks.number)(row) as u64)).collect();
        let mut open = vec![true; rows];
        // Other ranks may have more to generate, but no longer texts than the model has positions.
        for made in 1..=self.model.positions() {
            let width = logits.len() / rows;
            let mut next = vec![0; rows];
            for (row, logits) in logits.chunks_exact_mut(width).enumerate() {
                if !open[row] {
                    continue;
                }
                let token = choose::choose(logits, &texts[row], &prompts[row], how, &mut draws[row]) as u32;
                next[row] = token as i32;
                open[row] = !how.stop.contains(&token);
                if open[row] {
                    texts[row].push(token);
                    (hooks.token)(row, token);
                    open[row] = made < how.most(&prompts[row]);
                }
            }
            // A finished row reads a token too.
            let needs = open.contains(&true);
            if !(hooks.goes_on)(needs) {
                break;
            }
            logits = self.model.read(next, rows);
        }
        texts.into_iter().zip(prompts).map(|(text, prompt)| text[prompt.len()..].to_vec()).collect()
    }
}

impl Sampling {
    /// Returns the maximum number of tokens that follow a prompt.
    fn most(&self, prompt: &[u32]) -> usize {
        let most = self.max_length.map_or(usize::MAX, |most| most.saturating_sub(prompt.len()));
        most.min(self.max_new_tokens)
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// [`ModelError`] that names the first one that cannot be used.
    pub fn check(&self) -> Result<()> {
        let Self { max_new_tokens: most, temperature: t, repetition_penalty: again, length_penalty: power, .. } = *self;
        let (p, beams, draws_nothing) = (self.top_p.unwrap_or(1.0), self.beams, self.beams <= 1 || t == 0.0);
        let values = [
            (most > 0, "max_new_tokens", most.to_string(), "at least 1"),
            (t.is_finite() && t >= 0.0, "temperature", t.to_string(), "0 (the most likely token) or above"),
            (self.top_k != Some(0), "top_k", "0".into(), "at least 1, or none"),
            (p > 0.0 && p <= 1.0, "top_p", p.to_string(), "above 0, at most 1"),
            (again.is_finite() && again > 0.0, "repetition_penalty", again.to_string(), "above 0"),
            (beams > 0, "beams", beams.to_string(), "at least 1"),
            (
                draws_nothing,
                "beams",
                beams.to_string(),
                "1, or set the temperature to 0, because beam search does not sample",
            ),
            (power.is_finite(), "length_penalty", power.to_string(), "a finite number"),
        ];
        check_each("sampling", values)
    }
}

/// Checks that a model with this many positions and tokens can continue each prompt by `new` tokens.
///
/// # Errors
/// [`ModelError::Prompt`] for the first prompt that is empty, too long, or has a token outside the vocabulary.
pub fn check(prompts: &[Vec<u32>], new: impl Fn(&[u32]) -> usize, positions: usize, vocabulary: usize) -> Result<()> {
    for (row, prompt) in prompts.iter().enumerate() {
        let problem = |problem: String| Err(ModelError::Prompt { row, problem });
        if prompt.is_empty() {
            return problem("is empty: expected at least one token".into());
        }
        if let Some(token) = prompt.iter().find(|token| **token as usize >= vocabulary) {
            return problem(format!(
                "has the token {token}, but the model has {vocabulary} tokens: use the tokenizer that was made for the \
                 model"
            ));
        }
        let (length, new) = (prompt.len(), new(prompt));
        if length.saturating_add(new) > positions {
            return problem(format!(
                "has {length} tokens, and with {new} new ones exceeds the model's {positions} positions: shorten it or \
                 lower max_new_tokens"
            ));
        }
    }
    Ok(())
}
