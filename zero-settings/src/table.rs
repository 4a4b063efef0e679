//! The known keys as a Markdown table: `zero check --keys`, and two pages of the book.

use std::fmt::Write;

use super::Format;
use super::auto::Fill;
use super::keys::{ACCELERATE, DEEPSPEED};
use super::rule::{Key, Kind, Treatment};

/// Returns every key of this format as a Markdown table: path, accepted values, default, handling.
pub fn key_table(format: Format) -> String {
    let mut text = String::from("| key | accepts | default | support |\n|---|---|---|---|\n");
    let keys = match format {
        Format::Json => DEEPSPEED,
        Format::Yaml => ACCELERATE,
    };
    rows(&mut text, "", keys);
    text
}

fn rows(text: &mut String, section: &str, keys: &[Key]) {
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
            Treatment::Acted => format!("supported{since}"),
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
            Kind::Section(keys, _) => rows(text, &format!("{path}."), keys),
            Kind::Tagged(tagged) => {
                rows(text, &format!("{path}."), tagged.beside);
                for (kind, params) in tagged.variants {
                    rows(text, &format!("{path}[{kind}].params."), params);
                }
                for kind in tagged.refused {
                    let _ = writeln!(text, "| `{path}[{kind}]` | | | refused: this {} is not supported |", tagged.what);
                }
            }
            _ => {}
        }
    }
}
