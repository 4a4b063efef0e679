//! Checks a tree against a key table: unknown keys, types, ranges, and handling of unsupported keys. Returns the same
//! tree with every alias under its canonical name.

use super::auto::Fill;
use super::error::{Findings, ProblemKind};
use super::node::Node;
use super::rule::{Gate, Key, Kind, Tagged, Treatment};

/// Limit on keys listed in a message; longer sections are not listed.
const SHORT_SECTION: usize = 12;

/// Checks `node` as a map of `keys`; `stage` determines which keys have an effect.
pub(super) fn walk(node: &Node, keys: &[Key], stage: u8, findings: &mut Findings) -> Node {
    let Node::Map(entries) = node else {
        findings.problem("", ProblemKind::value("a map of settings", node));
        return Node::Null;
    };
    Walk { findings, stage }.map(entries, keys, Place { path: "", active: true, auto_is_default: false })
}

struct Walk<'a> {
    findings: &'a mut Findings,
    stage: u8,
}

/// The current position in the tree.
#[derive(Clone, Copy)]
struct Place<'a> {
    path: &'a str,
    /// True if keys here have an effect; those of a disabled section do not.
    active: bool,
    /// True if DeepSpeed treats `"auto"` as "not given" here, as it does in the sections it validates.
    auto_is_default: bool,
}

impl Walk<'_> {
    fn map(&mut self, entries: &[(String, Node)], keys: &[Key], place: Place<'_>) -> Node {
        let mut out: Vec<(String, Node)> = Vec::new();
        for (name, value) in entries {
            let parent = place.path;
            let path = join(parent, name);
            let place = Place { path: &path, ..place };
            let Some(key) = Key::find(keys, name) else {
                let useful =
                    |key: &&Key| !matches!(key.fate.treatment, Treatment::Renamed { .. } | Treatment::Refused(_));
                self.unknown(place.path, name, keys.iter().filter(useful).map(|key| key.name).collect());
                continue;
            };
            let value = &key.kind.normal(value);
            let Treatment::Renamed { to, change, deprecated } = key.fate.treatment else {
                out.push((name.clone(), self.entry(key, value, place)));
                continue;
            };
            if *value == Node::Null || !value.is_auto() && !self.fits(key, value, place) {
                continue;
            }
            let given = |entries: &[(String, Node)]| entries.iter().any(|(name, v)| name == to && *v != Node::Null);
            if given(entries) || given(&out) {
                self.findings
                    .conflict(place.path, format!("is another name for `{to}`, which is also given: remove one"));
                continue;
            }
            if deprecated && place.active {
                self.findings.warn(place.path, format!("deprecated; write `{to}`"));
            }
            let Some(target) = Key::find(keys, to) else { continue };
            let changed = change(value);
            // A switch that became a section has no keys to name.
            let unfolded = matches!(changed, Node::Map(_)) && !matches!(value, Node::Map(_));
            let path = if unfolded { join(parent, to) } else { path.clone() };
            out.push((to.to_owned(), self.entry(target, &changed, Place { path: &path, ..place })));
        }
        Node::Map(out)
    }

    fn entry(&mut self, key: &Key, value: &Node, place: Place<'_>) -> Node {
        if *value == Node::Null {
            return Node::Null;
        }
        if value.is_auto() && !key.kind.accepts(value) {
            if key.fate.fill == Fill::None && !place.auto_is_default {
                let supply = "this key has no automatic value; give a value".to_owned();
                self.findings.problem(place.path, ProblemKind::Unfilled(supply));
            }
            return value.clone();
        }
        if !self.fits(key, value, place) {
            return Node::Null;
        }
        let acts = place.active
            && match key.kind {
                Kind::Section(_, gate) | Kind::Open(gate) => is_on(gate, value),
                Kind::Tagged(_) => false,
                _ => !key.is_default(value),
            };
        if acts {
            self.treat(key, value, place.path);
        }
        match (key.kind, value) {
            (Kind::Section(keys, _), Node::Map(entries)) => {
                let auto_is_default =
                    place.auto_is_default || matches!(key.name, "zero_optimization" | "fp16" | "bf16");
                let active = acts && self.stage >= key.fate.from_stage;
                self.map(entries, keys, Place { active, auto_is_default, ..place })
            }
            (Kind::Tagged(tagged), Node::Map(entries)) => self.tagged(tagged, entries, place),
            _ => value.clone(),
        }
    }

    fn tagged(&mut self, tagged: &Tagged, entries: &[(String, Node)], place: Place<'_>) -> Node {
        if entries.is_empty() {
            return Node::Null;
        }
        let given = entries.iter().find(|(key, _)| key == "type").map_or(&Node::Null, |(_, value)| value);
        let is = |name: &str| given.as_text().is_some_and(|word| name.eq_ignore_ascii_case(word));
        let Some((name, keys)) = tagged.variants.iter().find(|(name, _)| is(name)) else {
            let names = tagged.variants.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            let kind = match given {
                Node::Null => ProblemKind::Missing(format!("the {} needs a type, one of {names}", tagged.what)),
                word if tagged.refused.iter().any(|name| is(name)) => {
                    ProblemKind::refused(word.to_string(), &format!("use one of {names}"))
                }
                other => ProblemKind::value(format!("one of {names}"), other),
            };
            self.findings.problem(&join(place.path, "type"), kind);
            return Node::Null;
        };
        let mut out = vec![("type".to_owned(), Node::from(*name))];
        for (field, value) in entries {
            let path = join(place.path, field);
            let place = Place { path: &path, ..place };
            match (field.as_str(), value) {
                ("type", _) | ("params", Node::Null) => {}
                ("params", Node::Map(params)) => out.push((field.clone(), self.map(params, keys, place))),
                ("params", other) => self.findings.problem(&path, ProblemKind::value("a map", other)),
                _ => match Key::find(tagged.beside, field) {
                    Some(key) => out.push((field.clone(), self.entry(key, value, place))),
                    None => self.unknown(&path, field, vec!["type", "params"]),
                },
            }
        }
        Node::Map(out)
    }

    /// Checks that the value is of the key's type; reports it otherwise.
    fn fits(&mut self, key: &Key, value: &Node, place: Place<'_>) -> bool {
        let fits = key.kind.accepts(value);
        if !fits {
            self.findings.problem(place.path, ProblemKind::value(key.kind.expected(), value));
        }
        fits
    }

    fn treat(&mut self, key: &Key, value: &Node, path: &str) {
        let message = match key.fate.treatment {
            Treatment::Refused(reason) => {
                let got = if matches!(value, Node::Map(_)) { "this section".to_owned() } else { value.to_string() };
                return self.findings.problem(path, ProblemKind::refused(got, reason));
            }
            _ if self.stage < key.fate.from_stage => {
                format!("has no effect at stage {}, only from stage {}", self.stage, key.fate.from_stage)
            }
            Treatment::NoEffect(reason) => format!("has no effect: {reason}"),
            Treatment::NotYet(reason) => format!("not supported yet: {reason}"),
            Treatment::Acted | Treatment::Quiet | Treatment::Renamed { .. } => return,
        };
        self.findings.warn(path, message);
    }

    fn unknown(&mut self, path: &str, name: &str, known: Vec<&'static str>) {
        let suggestion = suggestion(name, known.iter().copied());
        let known = if known.len() <= SHORT_SECTION { known } else { Vec::new() };
        self.findings.problem(path, ProblemKind::UnknownKey { suggestion, known });
    }
}

fn is_on(gate: Gate, section: &Node) -> bool {
    match gate {
        Gate::Given => !section.is_empty() && *section != Node::Bool(false),
        Gate::Device => section.get("device").is_some_and(|device| {
            !device.is_empty() && !device.as_text().is_some_and(|word| matches!(word, "auto") || is_none(word))
        }),
        Gate::Enabled => match section {
            Node::Map(entries) => entries.iter().any(|(name, value)| match (name.as_str(), value) {
                ("enabled", Node::Bool(on)) => *on,
                (_, Node::Map(_)) => is_on(gate, value),
                _ => false,
            }),
            other => *other == Node::Bool(true),
        },
    }
}

/// Accelerate's and DeepSpeed's word for "not offloaded".
pub(super) fn is_none(word: &str) -> bool {
    word.eq_ignore_ascii_case("none")
}

pub(super) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Returns a known name that starts with `name`, or else the nearest one with edits in at most a third of it.
fn suggestion(name: &str, known: impl Iterator<Item = &'static str>) -> Option<String> {
    let begins = |key: &str| name.len() >= 6 && key.starts_with(name);
    known
        .map(|key| (!begins(key), strsim::osa_distance(name, key), key))
        .filter(|(far, distance, key)| !far || distance * 3 <= name.chars().count().max(key.len()))
        .min()
        .map(|(_, _, key)| key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Format;
    use crate::keys::{ACCELERATE, DEEPSPEED};

    fn check(json: &str) -> (Vec<String>, Vec<String>) {
        let mut findings = Findings::new("ds.json");
        walk(&Node::parse(Format::Json, json).unwrap(), DEEPSPEED, 3, &mut findings);
        (
            findings.problems.iter().map(ToString::to_string).collect(),
            findings.warnings.iter().map(ToString::to_string).collect(),
        )
    }

    fn keys_of(keys: &[Key], visit: &mut dyn FnMut(&Key, &[Key])) {
        for key in keys {
            visit(key, keys);
            match key.kind {
                Kind::Section(inner, _) => keys_of(inner, visit),
                Kind::Tagged(tagged) => {
                    keys_of(tagged.beside, visit);
                    tagged.variants.iter().for_each(|(_, keys)| keys_of(keys, visit));
                }
                _ => {}
            }
        }
    }

    #[test]
    fn tables_are_consistent() {
        let mut check = |key: &Key, siblings: &[Key]| {
            let name = key.name;
            assert_eq!(siblings.iter().filter(|other| other.name == name).count(), 1, "{name} stands twice");
            if let Treatment::Renamed { to, .. } = key.fate.treatment {
                let target = Key::find(siblings, to).unwrap_or_else(|| panic!("{name} points at no key: {to}"));
                assert!(!matches!(target.fate.treatment, Treatment::Renamed { .. }), "{name} points at another alias");
            } else {
                let default = key.default();
                let auto = default.is_auto();
                assert!(auto || key.kind.accepts(&default), "the default of {name} is not of its type");
                assert!(key.is_default(&default), "{name}");
            }
        };
        keys_of(DEEPSPEED, &mut check);
        keys_of(ACCELERATE, &mut check);
    }

    #[test]
    fn a_disabled_section_is_checked_but_harmless() {
        assert_eq!(check(r#"{"wandb": {"enabled": false, "project": "x"}, "elasticity": {"min_gpus": 2}}"#).1, [""; 0]);
        let (problems, _) = check(r#"{"wandb": {"enabled": false, "projet": "x"}}"#);
        assert_eq!(problems, ["ds.json: wandb.projet: unknown key; did you mean `project`?"]);
        let (problems, warnings) = check(r#"{"wandb": {"enabled": true, "project": "x"}}"#);
        assert!(problems.is_empty());
        assert_eq!(
            warnings,
            ["wandb: not supported yet: this logger is not implemented; use tensorboard or csv_monitor"]
        );
    }

    #[test]
    fn open_sections_are_refused_only_when_on() {
        let nested = r#"{"compression_training": {"row_pruning": {"shared_parameters": {"enabled": X}}}}"#;
        assert!(check(&nested.replace('X', "false")).0.is_empty());
        assert_eq!(
            check(&nested.replace('X', "true")).0,
            [
                "ds.json: compression_training: this section is not supported: models are not compressed; remove the section"
            ]
        );
        assert!(check(r#"{"weight_quantization": {}}"#).0.is_empty());
        assert_eq!(check(r#"{"weight_quantization": {"shared_parameters": {}}}"#).0.len(), 1);
    }

    #[test]
    fn suggestions_are_only_made_when_close() {
        assert_eq!(check(r#"{"lr": 1}"#).0, ["ds.json: lr: unknown key"]);
        assert_eq!(
            check(r#"{"zero_optimisation": {}}"#).0,
            ["ds.json: zero_optimisation: unknown key; did you mean `zero_optimization`?"]
        );
        assert_eq!(
            check(r#"{"scheduler": {"type": "WarmupLR", "parms": {}, "zzz": 1}}"#).0,
            [
                "ds.json: scheduler.parms: unknown key; did you mean `params`?",
                "ds.json: scheduler.zzz: unknown key; known keys: type, params"
            ]
        );
    }
}
