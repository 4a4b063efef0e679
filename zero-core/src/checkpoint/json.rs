//! JSON that nobody vouches for: in goes text, out come the pieces that it is made of, borrowed from it.
//!
//! serde_json says where a value begins and ends; for what it is taken is decided here. So nothing of a text is copied,
//! allocated for or quoted in full before it is known to be what is expected there, which the usual reader does: it copies
//! texts and numbers while their size doubles, and an error quotes a text of any length. What is allocated here beside the
//! input and the results is a few hundred bytes.

use core::fmt::{self, Display, Formatter, Write};

use serde::de::{Deserializer as _, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Levels of brackets that serde_json reads values in; without a bound, it takes a byte for each level.
const MAX_DEPTH: usize = 127;
/// Bytes of a text that an error shows.
const BRIEF: usize = 100;

/// The text that `bytes` are, if it is short and flat enough for the functions below.
pub(super) fn check(bytes: &[u8]) -> Result<&str, String> {
    // Places in it are kept in 32 bits.
    if u32::try_from(bytes.len()).is_err() {
        return Err(format!("it has {} bytes, expected less than 4 GiB", bytes.len()));
    }
    let json = core::str::from_utf8(bytes).map_err(|error| format!("it is no text: {error}"))?;
    let (mut depth, mut in_text, mut escaped) = (0usize, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b'[' | b'{' if depth == MAX_DEPTH => {
                return Err(format!("recursion limit exceeded: it has more than {MAX_DEPTH} levels of brackets"));
            }
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    Ok(json)
}

/// Calls `each` with name and value of every member of an object, both as they are written; `what` is for the error.
pub(super) fn members<'j>(
    json: &'j str,
    what: &str,
    each: impl FnMut(&'j str, &'j str) -> Result<(), String>,
) -> Result<(), String> {
    visit(json, b'{', what, each)
}

/// Calls `each` with every element of an array, as it is written.
pub(super) fn elements<'j>(
    json: &'j str,
    what: &str,
    mut each: impl FnMut(&'j str) -> Result<(), String>,
) -> Result<(), String> {
    visit(json, b'[', what, |_, element| each(element))
}

fn visit<'j>(
    json: &'j str,
    bracket: u8,
    what: &str,
    mut each: impl FnMut(&'j str, &'j str) -> Result<(), String>,
) -> Result<(), String> {
    if json.trim_start_matches([' ', '\n', '\t', '\r']).as_bytes().first() != Some(&bracket) {
        return Err(unexpected(json, what));
    }
    let mut refused = None;
    let visitor = Each(|name, value| each(name, value).map_err(|reason| refused = Some(reason)));
    let mut reader = serde_json::Deserializer::from_str(json);
    let read = if bracket == b'{' { reader.deserialize_map(visitor) } else { reader.deserialize_seq(visitor) };
    let read = read.and_then(|()| reader.end());
    // Without the place that serde_json adds, which would be one in this piece only.
    refused.map_or_else(|| read.map_err(|error| error.to_string()), Err)
}

/// Visits an object's members, or an array's elements, which have no name.
struct Each<F>(F);

impl<'j, F: FnMut(&'j str, &'j str) -> Result<(), ()>> Visitor<'j> for Each<F> {
    type Value = ();

    fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }

    fn visit_map<A: MapAccess<'j>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some((name, value)) = map.next_entry::<&RawValue, &RawValue>()? {
            (self.0)(name.get(), value.get()).map_err(|()| A::Error::custom("refused"))?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'j>>(mut self, mut seq: A) -> Result<(), A::Error> {
        while let Some(element) = seq.next_element::<&RawValue>()? {
            (self.0)("", element.get()).map_err(|()| A::Error::custom("refused"))?;
        }
        Ok(())
    }
}

/// The number of members of an object.
pub(super) fn count_members(json: &str, what: &str) -> Result<usize, String> {
    let mut count = 0;
    members(json, what, |_, _| {
        count += 1;
        Ok(())
    })?;
    Ok(count)
}

/// The number of elements of an array.
pub(super) fn count_elements(json: &str, what: &str) -> Result<usize, String> {
    let mut count = 0;
    elements(json, what, |_| {
        count += 1;
        Ok(())
    })?;
    Ok(count)
}

/// The values of the members with these names, where they are; each may come once. Others are passed over.
pub(super) fn fields<'j, const N: usize>(
    json: &'j str,
    what: &str,
    names: [&str; N],
) -> Result<[Option<&'j str>; N], String> {
    let mut found = [None; N];
    members(json, what, |name, value| match names.iter().position(|known| is(name, known)) {
        Some(at) if found[at].replace(value).is_some() => Err(format!("duplicate field `{}`", names[at])),
        _ => Ok(()),
    })?;
    Ok(found)
}

/// What [`fields`] found, all of them.
pub(super) fn required<'j, const N: usize>(
    names: [&str; N],
    found: [Option<&'j str>; N],
) -> Result<[&'j str; N], String> {
    match found.iter().position(Option::is_none) {
        Some(at) => Err(format!("missing field `{}`", names[at])),
        None => Ok(found.map(Option::unwrap_or_default)),
    }
}

/// The whole number that is the value of `name`.
pub(super) fn number<T: TryFrom<u64>>(json: &str, name: &str) -> Result<T, String> {
    let number = json.parse::<u64>().ok().and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| format!("`{name}`: {}", unexpected(json, "a whole number of its size")))
}

/// Whether the text written as `json` is `text`.
pub(super) fn is(json: &str, text: &str) -> bool {
    let Some(inner) = inner(json) else { return false };
    if !inner.contains('\\') {
        return inner == text;
    }
    // An escape takes up to 6 bytes for each that it stands for.
    let mut plain = Vec::new();
    inner.len() <= 6 * text.len() && unescape(json, &mut plain).is_ok() && plain == text.as_bytes()
}

/// The text that is written as `json`.
pub(super) fn text(json: &str) -> Result<String, String> {
    let mut plain = Vec::with_capacity(json.len());
    unescape(json, &mut plain)?;
    String::from_utf8(plain).map_err(|error| error.to_string())
}

/// Adds the text that is written as `json`, which is never shorter.
pub(super) fn unescape(json: &str, out: &mut Vec<u8>) -> Result<(), String> {
    let mut rest = inner(json).ok_or_else(|| unexpected(json, "a text"))?;
    while let Some(at) = rest.find('\\') {
        let (plain, escape) = rest.split_at(at);
        out.extend_from_slice(plain.as_bytes());
        // Two of `\u` may stand for one sign together. Which, serde_json knows.
        let sizes = if escape.starts_with("\\u") { [6, 12] } else { [2, 2] };
        let sign = |size: usize| {
            let mut quoted = [b'"'; 14];
            quoted[1..=size].copy_from_slice(escape.as_bytes().get(..size)?);
            Some((serde_json::from_slice::<char>(&quoted[..size + 2]).ok()?, size))
        };
        let (sign, size) = sizes.into_iter().find_map(sign).ok_or("a text has half of a pair of \\u")?;
        out.extend_from_slice(sign.encode_utf8(&mut [0; 4]).as_bytes());
        rest = &escape[size..];
    }
    out.extend_from_slice(rest.as_bytes());
    Ok(())
}

fn inner(json: &str) -> Option<&str> {
    json.strip_prefix('"')?.strip_suffix('"')
}

/// Says that something else was expected.
pub(super) fn unexpected(json: &str, what: &str) -> String {
    format!("invalid type: {}, expected {what}", brief(json))
}

/// The beginning of a text as it is written, without its quotes.
pub(super) fn shown(json: &str) -> String {
    brief(inner(json).unwrap_or(json))
}

/// The beginning of what is shown, for errors about what may be of any length.
pub(super) fn brief(shown: impl Display) -> String {
    struct Cut(String);
    impl Write for Cut {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let end = text.floor_char_boundary(BRIEF - self.0.len().min(BRIEF));
            self.0.push_str(&text[..end]);
            if end < text.len() {
                self.0.push_str("...");
                return Err(fmt::Error);
            }
            Ok(())
        }
    }
    let mut cut = Cut(String::new());
    // An error is the sign that there is no more room.
    let _ = write!(cut, "{shown}");
    cut.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn brackets_in_texts_are_no_levels() {
        assert!(check(format!("{}{}", "[".repeat(127), "]".repeat(127)).as_bytes()).is_ok());
        assert!(check("[".repeat(128).as_bytes()).unwrap_err().contains("recursion limit"));
        assert!(check(format!(r#"["\"{}"]"#, "[".repeat(1000)).as_bytes()).is_ok());
        assert!(check("[],".repeat(1000).as_bytes()).is_ok());
        assert!(check(b"\"\xff\"").unwrap_err().contains("no text"));
    }

    #[test]
    fn fields_come_once_and_others_are_passed_over() {
        let of = |json| fields(json, "a thing", ["a", "b"]).and_then(|found| required(["a", "b"], found));
        assert_eq!(of(r#" {"b" : [1, 2] ,"x":{"a":0},"a":"t"} "#), Ok([r#""t""#, "[1, 2]"]));
        assert_eq!(of(r#"{"\u0061":1,"b":2}"#), Ok(["1", "2"]));
        assert_eq!(of(r#"{"a":1,"\u0061":1}"#), Err("duplicate field `a`".into()));
        assert_eq!(of(r#"{"a":1}"#), Err("missing field `b`".into()));
        assert_eq!(of("[1,2]"), Err("invalid type: [1,2], expected a thing".into()));
        assert!(of(r#"{"a":1"#).unwrap_err().contains("EOF"));
        assert!(of(r#"{"a":1} x"#).unwrap_err().contains("trailing"));
    }

    #[test]
    fn numbers_are_whole_and_have_their_size() {
        assert_eq!(number("18446744073709551615", "n"), Ok(u64::MAX));
        for json in ["18446744073709551616", "-1", "-0", "1.0", "1e2", "\"1\"", "null", "[1]"] {
            assert!(number::<u64>(json, "n").unwrap_err().contains("expected a whole number"), "{json}");
        }
        assert!(number::<u32>("4294967296", "n").is_err());
    }

    #[test]
    fn half_pairs_are_no_text() {
        for json in [r#""\ud800""#, r#""\ude00""#, r#""\ud800x\ude00""#, r#""\ud800\u0041""#, r#""\ud83düüüüü""#, "1"]
        {
            assert!(text(json).is_err(), "{json}");
        }
        assert_eq!(text(r#""a\ud83d\ude00\n\/\u0000ü""#).unwrap(), "a\u{1f600}\n/\0ü");
    }

    #[test]
    fn errors_are_brief() {
        assert_eq!(brief("short"), "short");
        assert_eq!(brief("ü".repeat(1000)), format!("{}...", "ü".repeat(50)));
        assert_eq!(brief(format_args!("{:?}", [1u64 << 63; 64])).len(), BRIEF + 3);
    }

    proptest! {
        #[test]
        fn texts_are_what_serde_json_reads(of in ".*", ascii in any::<bool>()) {
            let mut json = serde_json::to_string(&of).unwrap();
            if ascii {
                let units = |sign: char| sign.encode_utf16(&mut [0; 2]).iter().map(|u| format!("\\u{u:04x}")).collect();
                json = format!("\"{}\"", of.chars().map(units).collect::<Vec<String>>().concat());
            }
            prop_assert_eq!(&text(&json).unwrap(), &of);
            prop_assert!(is(&json, &of) && !is(&json, "another") && json.len() >= of.len() + 2);
        }
    }
}
