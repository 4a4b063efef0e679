//! A bag-of-words baseline: multinomial naive Bayes over the words of a text, in any order.

use std::collections::{BTreeMap, HashMap};

use crate::lines::{GAP, Row};

/// Word counts by label.
pub struct Bayes {
    labels: BTreeMap<String, Label>,
    vocabulary: HashMap<String, ()>,
    rows: usize,
    /// Pseudocount added to every word count.
    smoothing: f64,
}

#[derive(Default)]
struct Label {
    rows: usize,
    words: usize,
    count: HashMap<String, usize>,
}

/// Splits text into lower-case words without punctuation.
fn words(text: &str) -> impl Iterator<Item = String> + '_ {
    let letter = |c: char| c.is_alphanumeric() || c == '\'';
    text.split(GAP)
        .flat_map(move |part| part.split(move |c| !letter(c)))
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
}

impl Bayes {
    /// Learns from `rows`, with the smoothing that is best on `held_out`.
    pub fn learn(rows: &[Row], held_out: &[Row]) -> Self {
        let mut bayes = Self { labels: BTreeMap::new(), vocabulary: HashMap::new(), rows: rows.len(), smoothing: 1.0 };
        for row in rows {
            let label = bayes.labels.entry(row.label.clone()).or_default();
            label.rows += 1;
            for word in words(&row.text) {
                label.words += 1;
                *label.count.entry(word.clone()).or_default() += 1;
                bayes.vocabulary.insert(word, ());
            }
        }
        let mut best = (0.0, bayes.smoothing);
        for smoothing in [1.0, 0.3, 0.1, 0.03] {
            bayes.smoothing = smoothing;
            let accuracy = bayes.accuracy(held_out);
            if accuracy > best.0 {
                best = (accuracy, smoothing);
            }
        }
        bayes.smoothing = best.1;
        bayes
    }

    /// Returns the most likely label.
    pub fn tell(&self, text: &str) -> Option<&str> {
        let known: Vec<String> = words(text).filter(|word| self.vocabulary.contains_key(word)).collect();
        let score = |label: &Label| -> f64 {
            let all = label.words as f64 + self.smoothing * self.vocabulary.len() as f64;
            let of = |word: &String| (label.count.get(word).copied().unwrap_or(0) as f64 + self.smoothing) / all;
            (label.rows as f64 / self.rows as f64).ln() + known.iter().map(|word| of(word).ln()).sum::<f64>()
        };
        let best = self.labels.iter().max_by(|(_, a), (_, b)| score(a).total_cmp(&score(b)));
        best.map(|(name, _)| name.as_str())
    }

    /// Returns the share of rows that it labels correctly.
    pub fn accuracy(&self, rows: &[Row]) -> f64 {
        let right = rows.iter().filter(|row| self.tell(&row.text) == Some(&row.label)).count();
        right as f64 / rows.len().max(1) as f64
    }
}
