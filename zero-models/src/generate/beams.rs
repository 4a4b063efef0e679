//! Beam search, as in transformers: of each prompt's continuations, those with the highest sums of log-probabilities are continued.

use super::choose::process;
use super::{EarlyStopping, Hooks, Pass, Sampling};

/// A sequence and its score.
#[derive(Debug, Clone)]
struct Beam {
    tokens: Vec<u32>,
    score: f64,
}

/// The search for one prompt.
struct Search {
    /// Unfinished sequences, best first.
    running: Vec<Beam>,
    /// Finished sequences, best first, with scores by length; at most one per beam.
    ended: Vec<Beam>,
    open: bool,
}

impl Pass<'_> {
    pub(super) fn search(self, mut logits: Vec<f32>, hooks: Hooks<'_>) -> Vec<Vec<u32>> {
        let (prompts, how) = (self.prompts, self.how);
        let beams = how.beams;
        let width = logits.len() / prompts.len();
        let begin = |prompt: &Vec<u32>| Search {
            running: vec![Beam { tokens: prompt.clone(), score: 0.0 }],
            ended: Vec::new(),
            open: true,
        };
        let mut searches: Vec<Search> = prompts.iter().map(begin).collect();
        // Number of rows of `logits` per prompt: one per unfinished sequence.
        let mut rows = 1;
        // Other ranks may have more to search.
        for _ in 0..self.model.positions() {
            let mut from = Vec::with_capacity(prompts.len() * beams);
            let mut next = Vec::with_capacity(prompts.len() * beams);
            for (i, (search, prompt)) in searches.iter_mut().zip(prompts).enumerate() {
                let own = &mut logits[i * rows * width..][..rows * width];
                let parents = if search.open { search.step(own, width, prompt, how) } else { vec![0; beams] };
                from.extend(parents.iter().map(|parent| i * rows + parent));
                // A finished prompt reads a token too.
                let last = |beam: usize| search.running.get(beam).map_or(0, |beam| beam.tokens[beam.tokens.len() - 1]);
                next.extend((0..beams).map(|beam| last(beam) as i32));
            }
            let needs = searches.iter().any(|search| search.open);
            if !(hooks.goes_on)(needs) {
                break;
            }
            self.model.take(&from);
            rows = beams;
            logits = self.model.read(next, from.len());
        }
        let mut texts = Vec::with_capacity(prompts.len());
        for (row, (search, prompt)) in searches.iter().zip(prompts).enumerate() {
            // The last step has finished every sequence.
            let best = search.ended.first().map_or(&prompt[..], |best| &best.tokens);
            let text: Vec<u32> =
                best[prompt.len()..].iter().copied().filter(|token| !how.stop.contains(token)).collect();
            text.iter().for_each(|&token| (hooks.token)(row, token));
            texts.push(text);
        }
        texts
    }
}

impl Search {
    /// Adds one token to each sequence, by its logits. Returns for each unfinished sequence the index of its parent.
    fn step(&mut self, logits: &mut [f32], width: usize, prompt: &[u32], how: &Sampling) -> Vec<usize> {
        let (beams, most) = (how.beams, how.most(prompt));
        let made = self.running[0].tokens.len() - prompt.len() + 1;
        let mut found: Vec<(f64, usize, u32)> = Vec::new();
        for (at, (beam, logits)) in self.running.iter().zip(logits.chunks_exact_mut(width)).enumerate() {
            log_softmax(logits);
            process(logits, &beam.tokens, prompt, how);
            found.extend(logits.iter().enumerate().map(|(id, &p)| (beam.score + f64::from(p), at, id as u32)));
        }
        // Enough candidates even if each of the best sequences could also end.
        let kept = (beams * (1 + how.stop.len()).max(2)).min(found.len());
        let order =
            |a: &(f64, usize, u32), b: &(f64, usize, u32)| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2)));
        if kept < found.len() {
            found.select_nth_unstable_by(kept, order);
            found.truncate(kept);
        }
        found.sort_by(order);
        let last = made == most;
        let (mut running, mut parents) = (Vec::new(), Vec::new());
        for (rank, (score, at, token)) in found.into_iter().enumerate() {
            let mut tokens = self.running[at].tokens.clone();
            tokens.push(token);
            if last || how.stop.contains(&token) {
                // A sequence ends only if it is among the best.
                if rank < beams {
                    let length = made as f64;
                    self.ended.push(Beam { tokens, score: score / length.powf(how.length_penalty) });
                }
            } else if running.len() < beams {
                running.push(Beam { tokens, score });
                parents.push(at);
            }
        }
        self.ended.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.ended.truncate(beams);
        self.running = running;
        // No unfinished sequence can become better than the worst finished one.
        let length = if how.early_stopping == EarlyStopping::Never && how.length_penalty > 0.0 { most } else { made };
        let best = self.running.first().map(|best| best.score / (length as f64).powf(how.length_penalty));
        let worst = self.ended.get(beams - 1).map(|worst| worst.score);
        self.open = match (best, worst) {
            (None, _) => false,
            (Some(_), Some(_)) if how.early_stopping == EarlyStopping::Yes => false,
            (Some(best), Some(worst)) => best > worst,
            (Some(_), None) => true,
        };
        parents.resize(beams, 0);
        parents
    }
}

fn log_softmax(logits: &mut [f32]) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let log = sum.ln() as f32 + largest;
    logits.iter_mut().for_each(|logit| *logit -= log);
}
