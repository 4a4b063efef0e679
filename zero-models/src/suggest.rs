//! "Did you mean" suggestions: the known word that is closest to a user's.

/// Returns the entry of `known` with the fewest edits from `got`, if there are few for a word of this length.
pub(crate) fn closest<'a>(got: &str, known: &[&'a str]) -> Option<&'a str> {
    let allowed = (got.chars().count() / 3).max(2);
    known
        .iter()
        .map(|&word| (strsim::levenshtein(&got.to_lowercase(), word), word))
        .filter(|&(distance, _)| distance <= allowed)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, word)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggests_only_what_is_close() {
        let known = ["gpt2", "gpt2-medium", "gpt2-xl"];
        assert_eq!(closest("gtp2-medium", &known), Some("gpt2-medium"));
        assert_eq!(closest("GPT2-XL", &known), Some("gpt2-xl"));
        assert_eq!(closest("llama", &known), None);
    }
}
