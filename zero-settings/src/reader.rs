//! Reads checked values from a tree: the file's value, the value for `"auto"`, or the table's default.

use std::cell::RefCell;

use serde::de::DeserializeOwned;

use super::auto::{Auto, Fill};
use super::error::{Findings, ProblemKind};
use super::node::Node;
use super::rule::{Key, Kind, Treatment};

/// A section and the table that describes it. Only keys in the table are looked up.
pub(super) struct Reader<'a> {
    node: Option<&'a Node>,
    keys: &'static [Key],
    path: String,
    stage: u8,
    auto: &'a Auto,
    findings: &'a RefCell<Findings>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        node: &'a Node,
        keys: &'static [Key],
        stage: u8,
        auto: &'a Auto,
        findings: &'a RefCell<Findings>,
    ) -> Self {
        Self { node: Some(node), keys, path: String::new(), stage, auto, findings }
    }

    /// Returns the section `name`, empty if it is not given.
    pub(super) fn section(&self, name: &str) -> Self {
        let Kind::Section(keys, _) = self.key(name).kind else { unreachable!("`{name}` is a section in the table") };
        Self { node: self.node.and_then(|node| node.get(name)), keys, path: self.path(name), ..*self }
    }

    /// Returns the type and the parameters of the section `name`, if it is given.
    pub(super) fn tagged(&self, name: &str) -> Option<(&'static str, Self)> {
        let Kind::Tagged(tagged) = self.key(name).kind else { unreachable!("`{name}` has a type in the table") };
        let node = self.node?.get(name)?;
        let word = node.get("type")?.as_text()?;
        let (word, keys) = tagged.variants.iter().find(|(known, _)| *known == word)?;
        let path = format!("{}.params", self.path(name));
        Some((word, Self { node: node.get("params"), keys, path, ..*self }))
    }

    /// Returns `true` if the key has a value other than `"auto"`.
    pub(super) fn given(&self, name: &str) -> bool {
        self.raw(name).is_some_and(|value| !value.is_auto())
    }

    /// Returns `true` if the key is `"auto"`.
    pub(super) fn is_auto(&self, name: &str) -> bool {
        self.raw(name).is_some_and(Node::is_auto)
    }

    /// Returns `true` if the key is missing.
    pub(super) fn absent(&self, name: &str) -> bool {
        self.raw(name).is_none()
    }

    /// Returns the value of a key, words in lower case, or `T`'s default if it has none.
    pub(super) fn get<T: DeserializeOwned + Default>(&self, name: &str) -> T {
        self.value(name).to().unwrap_or_default()
    }

    /// Returns `known` and every other value that is acted on.
    pub(super) fn values(&self, known: Vec<(&str, Node)>) -> Node {
        let mut entries: Vec<_> = known.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        for key in self.keys.iter().filter(|key| matches!(key.fate.treatment, Treatment::Acted)) {
            if entries.iter().all(|(name, _)| name != key.name) {
                entries.push((key.name.to_owned(), self.value(key.name)));
            }
        }
        Node::Map(entries)
    }

    pub(super) fn problem(&self, name: &str, kind: impl Into<ProblemKind>) {
        self.findings.borrow_mut().problem(&self.path(name), kind);
    }

    pub(super) fn missing(&self, name: &str, what: &str) {
        self.problem(name, ProblemKind::Missing(what.to_owned()));
    }

    pub(super) fn conflict(&self, name: &str, message: &str) {
        self.problem(name, ProblemKind::Conflict(message.to_owned()));
    }

    pub(super) fn warn(&self, name: &str, message: &str) {
        self.findings.borrow_mut().warn(&self.path(name), message);
    }

    /// Records the value for an `"auto"`.
    pub(super) fn filled(&self, name: &str, by: &'static str, value: Option<Node>) {
        self.findings.borrow_mut().filled(&self.path(name), by, value);
    }

    fn raw(&self, name: &str) -> Option<&'a Node> {
        self.node?.get(name).filter(|value| **value != Node::Null)
    }

    fn value(&self, name: &str) -> Node {
        let key = self.key(name);
        let fate = key.fate;
        let Some(value) = self.raw(name) else { return key.default() };
        if !value.is_auto() || key.kind.accepts(value) {
            return match (key.kind, value) {
                (Kind::OneOf(_), Node::Text(word)) => Node::Text(word.to_ascii_lowercase()),
                _ => value.clone(),
            };
        }
        // The batch sizes are derived from one another.
        if fate.fill == Fill::Batch || self.stage < fate.from_stage {
            return key.default();
        }
        if fate.fill == Fill::None {
            self.filled(name, fate.fill.by(), Some(key.default()));
            return key.default();
        }
        let value = fate.fill.value(self.auto);
        self.filled(name, fate.fill.by(), value.as_ref().ok().cloned());
        match value {
            Ok(value) if key.kind.accepts(&value) => return value,
            Ok(value) => self.problem(name, ProblemKind::value(key.kind.expected(), value)),
            Err(supply) => self.problem(name, ProblemKind::Unfilled(supply.to_owned())),
        }
        key.default()
    }

    fn key(&self, name: &str) -> &'static Key {
        Key::find(self.keys, name).expect("only keys of the table are read")
    }

    fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }
}
