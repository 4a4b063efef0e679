//! A generic tree for both formats: keeps the order of the file and has no duplicate keys.

use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::{Serialize, Serializer};

/// A supported file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// JSON, as DeepSpeed writes it.
    Json,
    /// YAML, as Accelerate writes it.
    Yaml,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Json => "JSON",
            Format::Yaml => "YAML",
        })
    }
}

/// Maximum size of a configuration in bytes; real ones have a few thousand.
pub(super) const MAX_BYTES: usize = 1 << 20;

/// A value of a JSON or YAML file. Any whole number is an [`Int`](Node::Int), including `5e8` and `1.0`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Node {
    /// `null`, `~` or nothing.
    #[default]
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    #[serde(serialize_with = "int")]
    Int(i128),
    /// Any other number.
    Float(f64),
    /// A string.
    Text(String),
    /// A list.
    List(Vec<Node>),
    /// Keys and values in the order of the file; a key occurs once.
    #[serde(serialize_with = "entries")]
    Map(Vec<(String, Node)>),
}

/// Replaces comments, and tabs, by a blank: from `#` or `//` to the end of a line, and between `/*` and `*/`, but not in quotes.
fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut quote) = (text.trim_start_matches('\u{feff}'), None);
    while let Some(c) = rest.chars().next() {
        let ends = match quote {
            Some(_) => None,
            None if rest.starts_with('#') || rest.starts_with("//") => Some("\n"),
            None if rest.starts_with("/*") => Some("*/"),
            None => None,
        };
        if let Some(end) = ends {
            let length = rest.find(end).map_or(rest.len(), |at| at + if end == "\n" { 0 } else { end.len() });
            out.push(' ');
            rest = &rest[length..];
            continue;
        }
        let mut length = c.len_utf8();
        match quote {
            Some('"') if c == '\\' => length += rest[length..].chars().next().map_or(0, char::len_utf8),
            Some(open) if c == open => quote = None,
            None if c == '"' || c == '\'' => quote = Some(c),
            _ => {}
        }
        // YAML has no tabs between values.
        out.push_str(if quote.is_none() && c == '\t' { " " } else { &rest[..length] });
        rest = &rest[length..];
    }
    out
}

impl Node {
    /// Parses `text`.
    ///
    /// # Errors
    ///
    /// The parser's message, with the position: bad syntax, a duplicate key, too much nesting or too many aliases.
    pub fn parse(format: Format, text: &str) -> Result<Self, String> {
        if text.len() > MAX_BYTES {
            return Err(format!("expected at most {MAX_BYTES} bytes, got {} or more", text.len()));
        }
        if text.trim().is_empty() {
            return Err("the file is empty".to_owned());
        }
        match format {
            Format::Json => serde_json::from_str(text.trim_start_matches('\u{feff}')).or_else(|error| {
                let line = text.lines().nth(error.line().saturating_sub(1)).unwrap_or_default();
                let there = line.get(error.column().saturating_sub(1)..).unwrap_or_default();
                // As Python's json writes them.
                match ["Infinity", "NaN"].into_iter().find(|word| there.starts_with(word)) {
                    Some(word) => Err(format!("{error}: JSON has no {word}; give a finite number")),
                    // DeepSpeed reads Hjson, which has comments, trailing commas and single quotes. YAML has the last two.
                    None if error.is_syntax() => {
                        let plain = without_comments(text);
                        let map = Some(plain).filter(|plain| plain.trim_start().starts_with('{'));
                        map.and_then(|plain| Self::parse(Format::Yaml, &plain).ok()).ok_or_else(|| error.to_string())
                    }
                    None => Err(error.to_string()),
                }
            }),
            Format::Yaml => {
                // YAML 1.2 booleans: `no` stays the word, as Accelerate's keys mean it.
                let options = serde_saphyr::options! {
                    strict_booleans: true,
                    with_snippet: false,
                    merge_keys: serde_saphyr::options::MergeKeyPolicy::Error,
                    budget: serde_saphyr::budget! {
                        max_events: 50_000,
                        max_aliases: 100,
                        max_anchors: 100,
                        max_recorded_anchor_events: 10_000,
                        max_depth: 32,
                        max_documents: 1,
                        max_nodes: 20_000,
                        max_total_scalar_bytes: MAX_BYTES,
                    },
                    alias_limits: serde_saphyr::alias_limits! {
                        max_total_replayed_events: 10_000,
                        max_replay_stack_depth: 8,
                    },
                };
                serde_saphyr::from_str_with_options(text, options).map_err(|error| error.to_string())
            }
        }
    }

    /// Returns the value of `key`, if this is a map that has it.
    pub fn get(&self, key: &str) -> Option<&Node> {
        let Node::Map(entries) = self else { return None };
        entries.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// Returns the value at a dotted path of maps.
    pub(super) fn at(&self, path: &str) -> Option<&Node> {
        path.split('.').try_fold(self, |node, key| node.get(key))
    }

    /// Sets the value at a dotted path of maps and creates missing maps.
    pub(super) fn set(&mut self, path: &str, value: Node) {
        let (key, rest) = path.split_once('.').map_or((path, None), |(key, rest)| (key, Some(rest)));
        if !matches!(self, Node::Map(_)) {
            *self = Node::Map(Vec::new());
        }
        let Node::Map(entries) = self else { return };
        let index = entries.iter().position(|(name, _)| name == key).unwrap_or_else(|| {
            entries.push((key.to_owned(), Node::Null));
            entries.len() - 1
        });
        match rest {
            Some(rest) => entries[index].1.set(rest, value),
            None => entries[index].1 = value,
        }
    }

    pub(super) fn map<'k>(entries: impl IntoIterator<Item = (&'k str, Node)>) -> Self {
        Node::Map(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// Removes the value at a dotted path of maps.
    pub(super) fn remove(&mut self, path: &str) -> Option<Node> {
        let Node::Map(entries) = self else { return None };
        let (key, rest) = path.split_once('.').map_or((path, None), |(key, rest)| (key, Some(rest)));
        let index = entries.iter().position(|(name, _)| name == key)?;
        match rest {
            Some(rest) => entries[index].1.remove(rest),
            None => Some(entries.remove(index).1),
        }
    }

    /// Converts `value` to its form in a file. JSON writes `null` for a non-finite number; here it becomes NaN, so that
    /// it is rejected.
    pub(super) fn of(value: &impl Serialize) -> Self {
        fn finite(node: Node) -> Node {
            match node {
                Node::Null => Node::Float(f64::NAN),
                Node::Map(entries) => Node::Map(entries.into_iter().map(|(key, node)| (key, finite(node))).collect()),
                other => other,
            }
        }
        let value = serde_json::to_value(value).expect("settings are numbers and words under names");
        finite(Self::deserialize(value).expect("JSON is a tree"))
    }

    /// Deserializes this node, if it fits `T`.
    pub(super) fn to<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_value(serde_json::to_value(self).ok()?).ok()
    }

    /// Returns the number, if this is one.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Node::Int(value) => Some(*value as f64),
            Node::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns the whole number, if this is one that fits `usize`.
    pub fn as_usize(&self) -> Option<usize> {
        let Node::Int(value) = self else { return None };
        usize::try_from(*value).ok()
    }

    /// Returns the string, if this is one.
    pub fn as_text(&self) -> Option<&str> {
        let Node::Text(value) = self else { return None };
        Some(value)
    }

    fn is_scalar(&self) -> bool {
        !matches!(self, Node::List(_) | Node::Map(_))
    }

    pub(super) fn is_auto(&self) -> bool {
        self.as_text() == Some("auto")
    }

    /// Returns `true` for no value or an empty list, map or string.
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Node::Null => true,
            Node::Text(text) => text.is_empty(),
            Node::List(items) => items.is_empty(),
            Node::Map(entries) => entries.is_empty(),
            Node::Bool(_) | Node::Int(_) | Node::Float(_) => false,
        }
    }
}

/// Formats for messages: scalars and short lists as JSON, other containers by kind only.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Node::Null => f.write_str("null"),
            Node::Bool(value) => write!(f, "{value}"),
            Node::Int(value) => write!(f, "{value}"),
            Node::Float(value) => write!(f, "{value}"),
            Node::Text(value) if value.chars().count() > 60 => {
                write!(f, "{:?}...", value.chars().take(60).collect::<String>())
            }
            Node::Text(value) => write!(f, "{value:?}"),
            Node::List(items) if items.len() <= 4 && items.iter().all(Node::is_scalar) => {
                let items: Vec<_> = items.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", items.join(", "))
            }
            Node::List(items) => write!(f, "a list of {}", items.len()),
            Node::Map(_) => f.write_str("a map"),
        }
    }
}

macro_rules! node_from {
    ($($from:ty => |$value:ident| $node:expr;)+) => {$(
        impl From<$from> for Node {
            fn from($value: $from) -> Self {
                $node
            }
        }
    )+};
}

node_from! {
    bool => |value| Node::Bool(value);
    i64 => |value| Node::Int(i128::from(value));
    u64 => |value| Node::Int(i128::from(value));
    // `usize` has at most 64 bits on every platform Rust supports.
    usize => |value| Node::Int(value as i128);
    i128 => |value| Node::Int(value);
    f64 => |value| whole(value).map_or(Node::Float(value), Node::Int);
    &str => |value| Node::Text(value.to_owned());
    String => |value| Node::Text(value);
}

/// Serializes as JSON: a number beyond its integers is written as a float.
fn int<S: Serializer>(value: &i128, serializer: S) -> Result<S::Ok, S::Error> {
    match i64::try_from(*value) {
        Ok(value) => serializer.serialize_i64(value),
        Err(_) => serializer.serialize_f64(*value as f64),
    }
}

fn entries<S: Serializer>(entries: &[(String, Node)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(entries.iter().map(|(key, value)| (key, value)))
}

/// Converts `value` to an integer if it is whole and below 1e30 in magnitude.
fn whole(value: f64) -> Option<i128> {
    (value.fract() == 0.0 && value.abs() < 1e30).then_some(value as i128)
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

macro_rules! visit {
    ($($visit:ident: $from:ty;)+) => {$(
        fn $visit<E: Error>(self, value: $from) -> Result<Node, E> {
            Ok(value.into())
        }
    )+};
}

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_none<E: Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        Node::deserialize(deserializer)
    }

    visit! {
        visit_bool: bool;
        visit_i64: i64;
        visit_u64: u64;
        visit_i128: i128;
        visit_f64: f64;
        visit_str: &str;
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Node::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        let mut seen = HashSet::new();
        while let Some(key) = pairs.next_key::<String>()? {
            if !seen.insert(key.clone()) {
                return Err(A::Error::custom(format_args!("the key `{key}` is given twice")));
            }
            entries.push((key, pairs.next_value()?));
        }
        Ok(Node::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_whole_when_their_value_is() {
        let node = Node::parse(Format::Json, r#"{"a": 5e8, "b": 1.0, "c": 1e-3, "d": 18446744073709551615}"#).unwrap();
        assert_eq!(node.get("a"), Some(&Node::Int(500_000_000)));
        assert_eq!(node.get("b"), Some(&Node::Int(1)));
        assert_eq!(node.get("c"), Some(&Node::Float(1e-3)));
        assert_eq!(node.get("d"), Some(&Node::Int(u64::MAX.into())));
        let node = Node::parse(Format::Yaml, "a: 5e8\nb: 1e-3\nc: no\nd: 'no'\ne: NO\nf: ~\ng:\nh: False\n").unwrap();
        assert_eq!(node.get("a"), Some(&Node::Int(500_000_000)));
        assert_eq!(node.get("b"), Some(&Node::Float(1e-3)));
        for key in ["c", "d"] {
            assert_eq!(node.get(key).and_then(Node::as_text), Some("no"));
        }
        assert_eq!(node.get("e").and_then(Node::as_text), Some("NO"));
        assert_eq!(node.get("f"), Some(&Node::Null));
        assert_eq!(node.get("g"), Some(&Node::Null));
        assert_eq!(node.get("h"), Some(&Node::Bool(false)));
    }

    #[test]
    fn duplicate_keys_are_refused_at_any_depth() {
        let message = Node::parse(Format::Json, r#"{"a": {"b": 1, "b": 2}}"#).unwrap_err();
        assert_eq!(message, "the key `b` is given twice at line 1 column 18");
        let message = Node::parse(Format::Yaml, "a:\n  b: 1\n  b: 2\n").unwrap_err();
        assert!(message.contains("duplicate") && message.contains('b'), "{message}");
    }

    #[test]
    fn bombs_are_errors() {
        let deep = "[".repeat(200_000);
        assert!(Node::parse(Format::Json, &deep).unwrap_err().contains("recursion limit"));
        assert!(Node::parse(Format::Yaml, &deep).is_err());
        let block: String = (0..200).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect();
        assert!(Node::parse(Format::Yaml, &block).is_err());
        let mut aliases = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..10 {
            let items = vec![format!("*a{}", level - 1); 10].join(", ");
            aliases.push_str(&format!("a{level}: &a{level} [{items}]\n"));
        }
        assert!(Node::parse(Format::Yaml, &aliases).is_err());
        let huge = format!("\"{}\"", "x".repeat(MAX_BYTES));
        assert!(Node::parse(Format::Json, &huge).unwrap_err().contains("at most 1048576"));
    }

    #[test]
    fn set_makes_the_maps_on_the_way() {
        let mut node = Node::Null;
        node.set("a.b", Node::Int(1));
        node.set("a.c", Node::Int(2));
        node.set("a.b", Node::Int(3));
        assert_eq!(node.at("a.b"), Some(&Node::Int(3)));
        assert_eq!(node.at("a.c"), Some(&Node::Int(2)));
        assert_eq!(node.at("a.c.d"), None);
    }
}
