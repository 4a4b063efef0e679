//! "Did you mean": in goes what a user wrote and what is known, out comes the known word that is close to it.

/// The entry of `known` with the fewest edits from `got`, if that is few for a word of this length.
pub(crate) fn closest(got: &str, known: &[&'static str]) -> Option<&'static str> {
    let allowed = (got.chars().count() / 3).max(2);
    known
        .iter()
        .map(|&word| (edits(&got.to_lowercase(), word), word))
        .filter(|&(distance, _)| distance <= allowed)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, word)| word)
}

/// Levenshtein distance, one row at a time.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_edits() {
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("same", "same"), 0);
    }

    #[test]
    fn suggests_only_what_is_close() {
        let known = ["gpt2", "gpt2-medium", "gpt2-xl"];
        assert_eq!(closest("gtp2-medium", &known), Some("gpt2-medium"));
        assert_eq!(closest("GPT2-XL", &known), Some("gpt2-xl"));
        assert_eq!(closest("llama", &known), None);
    }
}
