//! The vocabulary of the key tables: accepted values, default and handling of each key.

use super::auto::Fill;
use super::node::Node;

/// One known key.
#[derive(Debug, Clone, Copy)]
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// The default, as JSON.
    pub(super) default: &'static str,
    pub(super) fate: Fate,
}

/// Defines a table of keys. Each row lists keys with their defaults that share accepted values and handling.
macro_rules! keys {
    ($($($name:ident = $default:expr),+ => $kind:expr, $fate:expr;)+) => {
        &[$($($crate::rule::Key {
            name: stringify!($name),
            kind: $kind,
            default: stringify!($default),
            fate: $fate,
        }),+),+]
    };
}
pub(super) use keys;

/// Accepted values of a key. `null` is always accepted and means "not given".
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// `true` or `false`.
    Bool,
    /// A truth value that YAML files also write as `yes` or `no`.
    YesNo,
    /// A whole number from `min` to `max`.
    Int { min: i128, max: i128 },
    /// A finite number from `min` to `max`.
    Num { min: f64, max: f64 },
    /// A number in [0, 1): the decay of a running average.
    Decay,
    /// Two decays.
    Betas,
    /// A number of at least 0, or a list of equal ones, one per parameter group.
    Rates,
    /// A number in [0, 1), or a list of equal ones.
    Decays,
    /// A string.
    Text,
    /// A string or a list of strings.
    Texts,
    /// One of these words, in any case.
    OneOf(&'static str),
    /// Anything.
    Any,
    /// A map with these keys.
    Section(&'static [Key], Gate),
    /// A map whose `type` determines the accepted `params`.
    Tagged(&'static Tagged),
    /// A map whose keys are not checked, because the feature does not exist here.
    Open(Gate),
}

/// Returns `true` if all items are the same number.
fn alike(items: &[Node]) -> bool {
    items.first().and_then(Node::as_f64).is_some_and(|first| items.iter().all(|item| item.as_f64() == Some(first)))
}

/// Condition under which a section has an effect; a section without effect is never warned about or refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    /// The section is not empty.
    Given,
    /// Its `enabled` is true, or, for an open section, that of one of its parts.
    Enabled,
    /// Its `device` is not `none`.
    Device,
}

/// A section with a `type` and its `params`.
#[derive(Debug)]
pub(super) struct Tagged {
    /// Name of the section in messages.
    pub(super) what: &'static str,
    pub(super) variants: &'static [(&'static str, &'static [Key])],
    /// DeepSpeed types that are not supported here.
    pub(super) refused: &'static [&'static str],
    /// Keys other than `type` and `params`.
    pub(super) beside: &'static [Key],
}

/// The handling of a key.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fate {
    pub(super) treatment: Treatment,
    /// Source of the value for `"auto"`.
    pub(super) fill: Fill,
    /// First ZeRO stage at which the key has an effect.
    pub(super) from_stage: u8,
}

/// The handling of a key that is set to a non-default value.
#[derive(Debug, Clone, Copy)]
pub(super) enum Treatment {
    /// The plan uses it.
    Acted,
    /// No effect and no loss: no warning.
    Quiet,
    /// No meaning here: a warning with the reason.
    NoEffect(&'static str),
    /// Not implemented yet, and training is correct without it: a warning with the reason.
    NotYet(&'static str),
    /// Training without it would give another result: an error with the reason.
    Refused(&'static str),
    /// Another name of a key of the same section. The value is converted to that key's; deprecated names give a warning.
    Renamed { to: &'static str, change: fn(&Node) -> Node, deprecated: bool },
}

impl Fate {
    pub(super) const ACTED: Fate = Fate::of(Treatment::Acted);
    pub(super) const QUIET: Fate = Fate::of(Treatment::Quiet);

    const fn of(treatment: Treatment) -> Self {
        Self { treatment, fill: Fill::None, from_stage: 0 }
    }

    pub(super) const fn no_effect(reason: &'static str) -> Self {
        Self::of(Treatment::NoEffect(reason))
    }

    pub(super) const fn not_yet(reason: &'static str) -> Self {
        Self::of(Treatment::NotYet(reason))
    }

    pub(super) const fn refused(reason: &'static str) -> Self {
        Self::of(Treatment::Refused(reason))
    }

    /// Makes a deprecated name for `to`.
    pub(super) const fn renamed(to: &'static str, change: fn(&Node) -> Node) -> Self {
        Self::of(Treatment::Renamed { to, change, deprecated: true })
    }

    /// Makes another name for `to`.
    pub(super) const fn alias(to: &'static str) -> Self {
        Self::of(Treatment::Renamed { to, change: Node::clone, deprecated: false })
    }

    pub(super) const fn auto(self, fill: Fill) -> Self {
        Self { fill, ..self }
    }

    pub(super) const fn since_stage(self, from_stage: u8) -> Self {
        Self { from_stage, ..self }
    }
}

impl Key {
    pub(super) fn find<'a>(keys: &'a [Key], name: &str) -> Option<&'a Key> {
        keys.iter().find(|key| key.name == name)
    }

    pub(super) fn default(&self) -> Node {
        serde_json::from_str(self.default).expect("defaults in the tables are JSON")
    }

    /// Returns `true` if `value` has the same meaning as leaving the key out.
    pub(super) fn is_default(&self, value: &Node) -> bool {
        match (value, self.default()) {
            (Node::Null, _) => true,
            (Node::Text(value), Node::Text(default)) => value.eq_ignore_ascii_case(&default),
            (value, Node::List(default)) if default.is_empty() => value.is_empty(),
            (value, default) => match (value.as_f64(), default.as_f64()) {
                (Some(value), Some(default)) => value == default,
                _ => *value == default,
            },
        }
    }
}

impl Kind {
    /// A count that may be 0.
    pub(super) const COUNT: Kind = Kind::Int { min: 0, max: i64::MAX as i128 };
    /// A count of at least 1.
    pub(super) const ONE_UP: Kind = Kind::Int { min: 1, max: i64::MAX as i128 };
    /// Any whole number.
    pub(super) const INT: Kind = Kind::Int { min: i64::MIN as i128, max: i64::MAX as i128 };
    /// A number that is not negative.
    pub(super) const POSITIVE: Kind = Kind::Num { min: 0.0, max: f64::MAX };
    /// A number from 0 to 1.
    pub(super) const FRACTION: Kind = Kind::Num { min: 0.0, max: 1.0 };
    /// Any number.
    pub(super) const NUM: Kind = Kind::Num { min: f64::MIN, max: f64::MAX };

    /// Makes a map of `keys` that has an effect unless empty.
    pub(super) const fn section(keys: &'static [Key]) -> Self {
        Kind::Section(keys, Gate::Given)
    }

    /// Makes a map of `keys` that has an effect if enabled.
    pub(super) const fn switch(keys: &'static [Key]) -> Self {
        Kind::Section(keys, Gate::Enabled)
    }

    /// Normalizes YAML's spellings of no and yes in `value`, and lists of equal numbers.
    pub(super) fn normal(self, value: &Node) -> Node {
        let word = |word: &str| word.to_ascii_lowercase();
        match (self, value) {
            (Kind::YesNo, Node::Text(text)) if ["yes", "true", "on"].contains(&&*word(text)) => Node::Bool(true),
            (Kind::YesNo, Node::Text(text)) if ["no", "false", "off"].contains(&&*word(text)) => Node::Bool(false),
            (Kind::Rates | Kind::Decays, Node::List(items)) if alike(items) => items[0].clone(),
            // YAML 1.1 parses a bare `no` as false.
            (Kind::OneOf(words), Node::Bool(false)) if words.split(' ').any(|word| word == "no") => "no".into(),
            _ => value.clone(),
        }
    }

    /// Returns `true` if the key accepts `value`. The contents of containers are not checked.
    pub(super) fn accepts(self, value: &Node) -> bool {
        let is_decay = |value: &Node| value.as_f64().is_some_and(|value| (0.0..1.0).contains(&value));
        match (self, value) {
            (_, Node::Null) | (Kind::Any, _) => true,
            (Kind::Bool | Kind::YesNo, Node::Bool(_)) => true,
            (Kind::Int { min, max }, Node::Int(value)) => (min..=max).contains(value),
            (Kind::Num { min, max }, value) => value.as_f64().is_some_and(|value| (min..=max).contains(&value)),
            (Kind::Rates, value) => value.as_f64().is_some_and(|value| (0.0..=f64::MAX).contains(&value)),
            (Kind::Decay | Kind::Decays, value) => is_decay(value),
            (Kind::Betas, Node::List(items)) => items.len() == 2 && items.iter().all(is_decay),
            (Kind::Text | Kind::Texts, Node::Text(_)) => true,
            (Kind::Texts, Node::List(items)) => items.iter().all(|item| item.as_text().is_some()),
            (Kind::OneOf(words), Node::Text(word)) => words.split(' ').any(|known| known.eq_ignore_ascii_case(word)),
            (Kind::Section(..) | Kind::Tagged(_) | Kind::Open(_), Node::Map(_)) => true,
            // An open section of Accelerate may hold anything, and an empty list counts as absent.
            (Kind::Open(_), value) => value.is_empty() || matches!(value, Node::Bool(_)),
            _ => false,
        }
    }

    /// Describes the accepted values in words.
    pub(super) fn expected(self) -> String {
        match self {
            Kind::Bool | Kind::YesNo => "true or false".to_owned(),
            Kind::Int { min, max } if max < 1_000_000 => format!("a whole number from {min} to {max}"),
            Kind::Int { min, .. } if min > i128::from(i64::MIN) => format!("a whole number of at least {min}"),
            Kind::Int { .. } => "a whole number".to_owned(),
            Kind::Num { min, max } if max < f64::MAX => format!("a number from {min} to {max}"),
            Kind::Num { min: f64::MIN_POSITIVE, .. } => "a number above 0".to_owned(),
            Kind::Num { min, .. } if min > f64::MIN => format!("a number of at least {min}"),
            Kind::Num { .. } => "a number".to_owned(),
            Kind::Decay => "a number of at least 0 and below 1".to_owned(),
            Kind::Rates => {
                "a number of at least 0, or a list of equal numbers (all parameter groups share one schedule)"
                    .to_owned()
            }
            Kind::Decays => "a number of at least 0 and below 1, or a list of equal numbers".to_owned(),
            Kind::Betas => "two numbers of at least 0 and below 1".to_owned(),
            Kind::Text => "a string".to_owned(),
            Kind::Texts => "a string or a list of strings".to_owned(),
            Kind::OneOf(words) => format!("one of {}", words.replace(' ', ", ")),
            Kind::Any => "anything".to_owned(),
            Kind::Section(..) | Kind::Tagged(_) | Kind::Open(_) => "a map".to_owned(),
        }
    }
}
