//! Reads checked values out of a tree: the file's, or what stands for `"auto"`, or the table's default.

use std::cell::RefCell;

use super::auto::{Auto, Fill};
use super::error::{Findings, ProblemKind};
use super::node::Node;
use super::rule::{Key, Kind};

/// One section, with the table that describes it. Only keys of the table are asked for, by name.
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

    /// The section `name`, empty when it is not given.
    pub(super) fn section(&self, name: &str) -> Reader<'a> {
        let Kind::Section(keys, _) = self.key(name).kind else { unreachable!("`{name}` is a section in the table") };
        self.inner(self.node.and_then(|node| node.get(name)), keys, self.path(name))
    }

    /// The type of the section `name` and its parameters, when it is given.
    pub(super) fn tagged(&self, name: &str) -> Option<(&'static str, Reader<'a>)> {
        let Kind::Tagged(tagged) = self.key(name).kind else { unreachable!("`{name}` has a type in the table") };
        let node = self.node?.get(name)?;
        let word = node.get("type")?.as_text()?;
        let (word, keys) = tagged.variants.iter().find(|(known, _)| *known == word)?;
        Some((word, self.inner(node.get("params"), keys, format!("{}.params", self.path(name)))))
    }

    /// Whether the key has a value other than `"auto"`.
    pub(super) fn given(&self, name: &str) -> bool {
        self.raw(name).is_some_and(|value| !value.is_auto())
    }

    /// Whether the key says `"auto"`.
    pub(super) fn is_auto(&self, name: &str) -> bool {
        self.raw(name).is_some_and(Node::is_auto)
    }

    pub(super) fn bool(&self, name: &str) -> bool {
        self.maybe_bool(name).unwrap_or_default()
    }

    pub(super) fn maybe_bool(&self, name: &str) -> Option<bool> {
        self.value(name).as_bool()
    }

    pub(super) fn usize(&self, name: &str) -> usize {
        self.maybe_usize(name).unwrap_or_default()
    }

    pub(super) fn maybe_usize(&self, name: &str) -> Option<usize> {
        self.value(name).as_usize()
    }

    pub(super) fn f64(&self, name: &str) -> f64 {
        self.maybe_f64(name).unwrap_or_default()
    }

    pub(super) fn maybe_f64(&self, name: &str) -> Option<f64> {
        self.value(name).as_f64()
    }

    /// Two numbers.
    pub(super) fn pair(&self, name: &str) -> (f64, f64) {
        match self.value(name) {
            Node::List(items) => match items.as_slice() {
                [first, second] => (first.as_f64().unwrap_or_default(), second.as_f64().unwrap_or_default()),
                _ => (0.0, 0.0),
            },
            _ => (0.0, 0.0),
        }
    }

    /// A word in lower case, or a string as it is for keys that take any.
    pub(super) fn text(&self, name: &str) -> String {
        let value = self.value(name);
        let text = value.as_text().unwrap_or_default();
        if matches!(self.key(name).kind, Kind::OneOf(_)) { text.to_ascii_lowercase() } else { text.to_owned() }
    }

    /// A string that is not empty.
    pub(super) fn maybe_text(&self, name: &str) -> Option<String> {
        Some(self.text(name)).filter(|text| !text.is_empty())
    }

    pub(super) fn problem(&self, name: &str, kind: impl Into<ProblemKind>) {
        self.findings.borrow_mut().problem(&self.path(name), kind);
    }

    pub(super) fn missing(&self, name: &str, what: &str) {
        self.problem(name, ProblemKind::Missing { what: what.to_owned() });
    }

    pub(super) fn conflict(&self, name: &str, message: impl Into<String>) {
        self.problem(name, ProblemKind::Conflict { message: message.into() });
    }

    pub(super) fn warn(&self, name: &str, message: impl Into<String>) {
        self.findings.borrow_mut().warn(&self.path(name), message);
    }

    /// What stands for an `"auto"`.
    pub(super) fn filled(&self, name: &str, by: &'static str, value: Option<Node>) {
        self.findings.borrow_mut().filled(&self.path(name), by, value);
    }

    fn inner(&self, node: Option<&'a Node>, keys: &'static [Key], path: String) -> Reader<'a> {
        Reader { node, keys, path, stage: self.stage, auto: self.auto, findings: self.findings }
    }

    fn raw(&self, name: &str) -> Option<&'a Node> {
        self.node?.get(name).filter(|value| **value != Node::Null)
    }

    fn value(&self, name: &str) -> Node {
        let key = self.key(name);
        let default = || key.default.node();
        let Some(value) = self.raw(name) else { return default() };
        if !value.is_auto() || key.kind.accepts(value) {
            return value.clone();
        }
        // The batch sizes fill one another.
        if key.fill == Fill::Batch || self.stage < key.from_stage {
            return default();
        }
        if key.fill == Fill::None {
            self.filled(name, Fill::None.by(), Some(default()));
            return default();
        }
        let value = key.fill.value(self.auto);
        self.filled(name, key.fill.by(), value.as_ref().ok().cloned());
        match value {
            Ok(value) if key.kind.accepts(&value) => value,
            Ok(value) => {
                self.problem(name, ProblemKind::Value { expected: key.kind.expected(), got: value.to_string() });
                default()
            }
            Err(supply) => {
                self.problem(name, ProblemKind::Unfilled { supply: supply.to_owned() });
                default()
            }
        }
    }

    fn key(&self, name: &str) -> &'static Key {
        Key::find(self.keys, name).expect("only keys of the table are read")
    }

    fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }
}
