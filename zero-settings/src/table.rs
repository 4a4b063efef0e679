//! The known keys as a Markdown table: `zero check --keys`, and two pages of the book.

use std::fmt::Write;

use super::Format;
use super::auto::Fill;
use super::keys::{ACCELERATE, DEEPSPEED};
use super::rule::{Gate, Key, Kind, Treatment};

/// Returns every key of this format as a Markdown table: path, accepted values, default, handling.
pub fn key_table(format: Format) -> String {
    let mut text = String::from("| key | accepts | default | support |\n|---|---|---|---|\n");
    let keys = match format {
        Format::Json => DEEPSPEED,
        Format::Yaml => ACCELERATE,
    };
    rows(&mut text, "", keys, None);
    text
}

/// Returns `true` if this key, or one of its section, changes what a run does.
fn acts(key: &Key) -> bool {
    match key.kind {
        Kind::Section(keys, Gate::Given) => keys.iter().any(acts),
        _ => matches!(key.fate.treatment, Treatment::Acted),
    }
}

/// Writes the rows of the keys of a section. `switched` is the section's treatment if its `enabled` turns it on.
fn rows(text: &mut String, section: &str, keys: &[Key], switched: Option<Treatment>) {
    for key in keys {
        let path = format!("{section}{}", key.name);
        let takes = key.kind.expected().replace('|', "\\|");
        let default = if key.default == "null" { String::new() } else { format!("`{}`", key.default) };
        let auto = if matches!(key.fate.fill, Fill::None) { "" } else { "; `auto`" };
        let since = match key.fate.from_stage {
            0 => String::new(),
            stage => format!(" (from stage {stage})"),
        };
        let here = match key.fate.treatment {
            Treatment::Acted if !acts(key) => "see its keys".to_string(),
            Treatment::Acted => format!("supported{since}"),
            Treatment::Quiet if key.name == "enabled" && switched.is_some() => match switched {
                Some(Treatment::Acted) => "supported: turns the section on".to_string(),
                Some(Treatment::Refused(_)) => "the section is refused if this is true".to_string(),
                _ => "no effect; the section's warning is given if this is true".to_string(),
            },
            Treatment::Quiet => "no effect, no warning".to_string(),
            Treatment::NoEffect(why) => format!("no effect, with a warning: {why}"),
            Treatment::NotYet(why) => format!("not supported yet, with a warning: {why}"),
            Treatment::Refused(why) => format!("refused: {why}"),
            Treatment::Renamed { to, deprecated: true, .. } => format!("deprecated name of `{to}`, with a warning"),
            Treatment::Renamed { to, .. } => format!("alias of `{to}`"),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| `{path}` | {takes}{auto} | {default} | {here} |");
        match key.kind {
            // Aliases are listed once, without their keys.
            _ if matches!(key.fate.treatment, Treatment::Renamed { .. }) => {}
            Kind::Section(keys, gate) => {
                let switched = (gate == Gate::Enabled).then_some(key.fate.treatment);
                rows(text, &format!("{path}."), keys, switched);
            }
            Kind::Tagged(tagged) => {
                rows(text, &format!("{path}."), tagged.beside, None);
                for (kind, params) in tagged.variants {
                    rows(text, &format!("{path}[{kind}].params."), params, None);
                }
                for kind in tagged.refused {
                    let _ = writeln!(text, "| `{path}[{kind}]` | | | refused: this {} is not supported |", tagged.what);
                }
            }
            _ => {}
        }
    }
}
