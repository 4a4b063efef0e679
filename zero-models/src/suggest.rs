//! "Did you mean": in goes what a user wrote and what is known, out comes the known word that is close to it.

/// The entry of `known` with the fewest edits from `got`, if that is few for a word of this length.
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
