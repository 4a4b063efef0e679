//! Selection of the next token from its logits, by transformers' logits processors and warpers, in their order.

use zero_core::random::Draws;

use super::Sampling;

/// Returns the most likely token; among equal ones, the first.
pub(super) fn best(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// Applies the logits processors of `how` to the logits of the token after `seen`, which begins with `prompt`.
pub(super) fn process(logits: &mut [f32], seen: &[u32], prompt: &[u32], how: &Sampling) {
    let (made, width) = (seen.len() - prompt.len() + 1, logits.len());
    penalise(logits, seen, how.repetition_penalty);
    repeat_nothing(logits, seen, how.no_repeat_ngram_size);
    if seen.len() < how.min_length || made <= how.min_new_tokens {
        for &token in how.stop.iter().filter(|token| (**token as usize) < width) {
            logits[token as usize] = f32::NEG_INFINITY;
        }
    }
    force(logits, [made, how.most(prompt), seen.len()], how);
}

/// Excludes tokens that would repeat a sequence of `n` tokens, <https://arxiv.org/abs/1705.04304>, section 2.5.
fn repeat_nothing(logits: &mut [f32], seen: &[u32], n: usize) {
    if n == 0 || seen.len() + 1 < n {
        return;
    }
    let last = &seen[seen.len() + 1 - n..];
    for row in seen.windows(n).filter(|row| row[..n - 1] == *last) {
        logits[row[n - 1] as usize] = f32::NEG_INFINITY;
    }
}

/// Makes tokens that have already occurred less likely (<https://arxiv.org/abs/1909.05858>, section 4.1).
fn penalise(logits: &mut [f32], seen: &[u32], penalty: f64) {
    if penalty == 1.0 {
        return;
    }
    let mut seen: Vec<usize> = seen.iter().map(|&token| token as usize).collect();
    seen.sort_unstable();
    seen.dedup();
    for token in seen {
        let logit = &mut logits[token];
        *logit = if *logit < 0.0 { *logit * penalty as f32 } else { *logit / penalty as f32 };
    }
}

/// Leaves only the forced token, if the `made`th new token of at most `most` is forced.
fn force(logits: &mut [f32], [made, most, seen]: [usize; 3], how: &Sampling) {
    let last = how.forced_last.filter(|_| made == most);
    if let Some(token) = last.or(how.forced_first.filter(|_| seen == 1)) {
        logits.fill(f32::NEG_INFINITY);
        logits[token as usize] = 0.0;
    }
}

/// Chooses the token that follows `seen`, which begins with `prompt`.
pub(super) fn choose(logits: &mut [f32], seen: &[u32], prompt: &[u32], how: &Sampling, draws: &mut Draws) -> usize {
    process(logits, seen, prompt, how);
    if how.temperature == 0.0 {
        return best(logits);
    }
    // By descending logits; ties keep the order of the tokens.
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if let Some(k) = how.top_k.filter(|&k| k < order.len()) {
        // Tokens with the same logit as the last one stay.
        let least = logits[order[k - 1]];
        order.retain(|&token| logits[token] >= least);
    }
    let largest = f64::from(logits[order[0]]);
    let weight = |token: &usize| ((f64::from(logits[*token]) - largest) / how.temperature).exp();
    let mut weights: Vec<f64> = order.iter().map(weight).collect();
    let mut total: f64 = weights.iter().sum();
    if let Some(p) = how.top_p {
        // The fewest whose probabilities add up to p (<https://arxiv.org/abs/1904.09751>).
        let mut sum = 0.0;
        let enough = weights.iter().position(|weight| {
            sum += weight;
            sum >= p * total
        });
        weights.truncate(enough.map_or(weights.len(), |last| last + 1));
        total = weights.iter().sum();
    }
    let mut left = draws.unit() * total;
    let drawn = weights.iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    order[drawn.unwrap_or(weights.len() - 1)]
}
