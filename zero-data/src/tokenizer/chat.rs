//! Renders a conversation as the text that a model was trained on. The inputs are messages and a folder's `chat_template`
//! (Jinja); the output is the same as that of transformers' `apply_chat_template`.
//!
//! A template is untrusted code: it reads no files, and its steps ([`STEPS`]) and depth are limited.

use std::collections::BTreeMap;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde_json::ser::Formatter;
use serde_json::{Map, Serializer};
use zero_core::checkpoint::SideFile;

use crate::caught::caught;

/// Most steps that a template may take: a conversation of a thousand messages takes fewer.
const STEPS: u64 = 5_000_000;

/// Size limit of templates, in bytes.
const LARGEST: usize = 1 << 20;

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Message {
    /// The author: `system`, `user` or `assistant`.
    pub role: String,
    /// Its text.
    pub content: String,
}

impl Message {
    /// Creates a message of `role`.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// Returns the template in a tokenizer's files, if there is one: from `chat_template.jinja`, `tokenizer_config.json`, or
/// `chat_template.json`; if there are several named ones, the one named `default`.
pub(super) fn template(files: &[SideFile]) -> Option<String> {
    source(files).map(|text| with_marks(&text))
}

fn source(files: &[SideFile]) -> Option<String> {
    let bytes = |name: &str| files.iter().find(|file| file.name == name).map(|file| &file.bytes);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
    if let Some(template) = bytes("chat_template.jinja").and_then(|bytes| text(bytes)) {
        return Some(template);
    }
    ["tokenizer_config.json", "chat_template.json"].iter().find_map(|name| {
        let bytes = bytes(name)?;
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        let keys: Map<String, serde_json::Value> = serde_json::from_slice(bytes).ok()?;
        match keys.get("chat_template")? {
            serde_json::Value::String(template) => Some(template.clone()),
            serde_json::Value::Array(named) => {
                let default = named.iter().find(|template| template["name"] == "default")?;
                default["template"].as_str().map(str::to_string)
            }
            _ => None,
        }
    })
}

/// A character around the assistant's text in the result of [`ChatTemplate::render_marked`]: a noncharacter of Unicode.
pub(crate) const MARK: char = '\u{fdd0}';

/// The variable that holds the [`MARK`], if marks are requested.
const MARK_NAME: &str = "zero_generation_mark";

/// A parsed chat template.
#[derive(Debug)]
pub(crate) struct ChatTemplate<'t> {
    jinja: Environment<'t>,
    /// The place that it was read from, for error messages.
    whose: &'t str,
    /// True if it marks the assistant's text by `{% generation %}`.
    pub(crate) is_marked: bool,
}

impl<'t> ChatTemplate<'t> {
    /// Parses the text of [`template`]. `special` has the texts of special tokens by name.
    pub(super) fn new(text: &'t str, special: &BTreeMap<&'static str, String>, whose: &'t str) -> Result<Self, String> {
        if text.len() > LARGEST {
            return Err(told(whose, format!("it has {} bytes: expected at most {LARGEST}", text.len())));
        }
        let made = caught(|| {
            let mut jinja = Environment::new();
            let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
            jinja.set_syntax(syntax.expect("the delimiters are the default ones"));
            jinja.set_fuel(Some(STEPS));
            jinja.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
            // Formats values like Python.
            jinja.set_formatter(|out, state, value| match value.kind() {
                ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }).map_err(Error::from),
                ValueKind::None => out.write_str("None").map_err(Error::from),
                _ => minijinja::escape_formatter(out, state, value),
            });
            jinja.add_filter("tojson", to_json);
            let refuse =
                |message: String| -> Result<Value, Error> { Err(Error::new(ErrorKind::InvalidOperation, message)) };
            jinja.add_function("raise_exception", refuse);
            // The same time for all texts, since parts of a conversation are compared.
            let now = chrono::DateTime::<chrono::Utc>::from(std::time::SystemTime::now());
            jinja.add_function("strftime_now", move |format: String| {
                // An invalid format gives an empty text.
                let mut text = String::new();
                let _ = std::fmt::Write::write_fmt(&mut text, format_args!("{}", now.format(&format)));
                text
            });
            for (name, token) in special {
                jinja.add_global(*name, Value::from(token.as_str()));
            }
            jinja.add_template(NAME, text)?;
            Ok(jinja)
        });
        Ok(Self { jinja: unwrapped(whose, made)?, whose, is_marked: text.contains(MARK_NAME) })
    }

    /// Renders a conversation like transformers' `apply_chat_template`. With `add_generation_prompt` the model's answer
    /// follows the text.
    pub(crate) fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, String> {
        self.render_with(messages, add_generation_prompt, context! {})
    }

    /// Renders a conversation, with [`MARK`]s around each `{% generation %}`.
    pub(crate) fn render_marked(&self, messages: &[Message]) -> Result<String, String> {
        self.render_with(messages, false, Value::from_pairs([(MARK_NAME, MARK.to_string())]))
    }

    fn render_with(&self, messages: &[Message], add_generation_prompt: bool, more: Value) -> Result<String, String> {
        let rendered = caught(|| {
            let messages: Vec<Value> = messages
                .iter()
                .map(|Message { role, content }| context! { role => role, content => content })
                .collect();
            let known = context! { messages, tools => (), documents => (), add_generation_prompt, ..more };
            self.jinja.get_template(NAME)?.render(known)
        });
        unwrapped(self.whose, rendered)
    }
}

/// The name of the only template.
const NAME: &str = "chat_template";

/// Returns the library's result, or its error as text.
fn unwrapped<T>(whose: &str, result: Result<Result<T, Error>, String>) -> Result<T, String> {
    let problem = |error: Error| match error.detail() {
        _ if error.kind() == ErrorKind::OutOfFuel => format!("it takes more than {STEPS} steps"),
        Some(detail) if error.kind() == ErrorKind::InvalidOperation => detail.to_string(),
        _ => error.to_string(),
    };
    result.and_then(|result| result.map_err(problem)).map_err(|problem| told(whose, problem))
}

fn told(whose: &str, problem: String) -> String {
    format!("the chat template of {whose} cannot be used: {problem}")
}

/// Replaces the tags that mark an assistant's text by a variable, which is empty or the [`MARK`].
fn with_marks(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(begin) = rest.find("{%") {
        let Some(length) = rest[begin + 2..].find("%}").map(|at| at + 2) else { break };
        let tag = &rest[begin..begin + length + 2];
        let (before, after) = (if tag.starts_with("{%-") { "{%-" } else { "{%" }, tag.ends_with("-%}"));
        let word = tag[2..tag.len() - 2].trim_matches('-').trim();
        out.push_str(&rest[..begin]);
        let after = if after { "-%}" } else { "%}" };
        // Tags on both sides, so that blanks are trimmed as around a single tag.
        let mark = ["{{ ", MARK_NAME, " }}"].concat();
        match word {
            "generation" => out.extend([before, " if true %}", &mark, "{% if true ", after]),
            "endgeneration" => out.extend([before, " endif %}", &mark, "{% endif ", after]),
            _ => out.push_str(tag),
        }
        rest = &rest[begin + length + 2..];
    }
    out + rest
}

/// Serializes like Python's `json.dumps`, with transformers' default `ensure_ascii=False`.
fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let bad = |error: String| Error::new(ErrorKind::BadSerialization, error);
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let indent = indent.map(|width| " ".repeat(width.min(MOST_BLANKS)));
    let separators = separators.unwrap_or_else(|| vec![if indent.is_none() { ", " } else { "," }.into(), ": ".into()]);
    let [item, key]: [String; 2] = separators.try_into().map_err(|_| bad("separators: expected two texts".into()))?;
    let is_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let is_sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let style = PythonStyle { item, key, indent, is_ascii, depth: 0, has_items: false };
    let mut out = Vec::new();
    let mut out_as = Serializer::with_formatter(&mut out, style);
    let written = match is_sorted {
        // Its maps are sorted.
        true => serde_json::to_value(&value).and_then(|value| serde::Serialize::serialize(&value, &mut out_as)),
        false => serde::Serialize::serialize(&value, &mut out_as),
    };
    written.map_err(|error| bad(error.to_string()))?;
    Ok(Value::from_safe_string(String::from_utf8_lossy(&out).into_owned()))
}

/// Most blanks of an indent.
const MOST_BLANKS: usize = 64;

/// The format of Python's `json.dumps`.
struct PythonStyle {
    /// Separators of items, and of a key and its value.
    item: String,
    key: String,
    indent: Option<String>,
    is_ascii: bool,
    depth: usize,
    /// True if the list or map that ends next has an item.
    has_items: bool,
}

impl PythonStyle {
    fn begin<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        out.write_all(bracket)
    }

    fn begin_item<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.begin_line(out)
    }

    fn begin_line<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        match &self.indent {
            Some(indent) => write!(out, "\n{}", indent.repeat(self.depth)),
            None => Ok(()),
        }
    }

    fn end<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_items {
            self.begin_line(out)?;
        }
        // It is an item itself.
        self.has_items = true;
        out.write_all(bracket)
    }
}

impl Formatter for PythonStyle {
    fn write_f64<W: ?Sized + io::Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        let text = serde_json::Number::from_f64(value).map_or("null".into(), |number| number.to_string());
        match text.split_once('e') {
            // 1e+16, 5e-07
            Some((digits, exponent)) => {
                let exponent = exponent.trim_start_matches('+');
                let (sign, power) = exponent.strip_prefix('-').map_or(('+', exponent), |power| ('-', power));
                write!(out, "{digits}e{sign}{power:0>2}")
            }
            None => out.write_all(text.as_bytes()),
        }
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, out: &mut W, text: &str) -> io::Result<()> {
        if !self.is_ascii {
            return out.write_all(text.as_bytes());
        }
        text.encode_utf16().try_for_each(|unit| match u8::try_from(unit) {
            Ok(byte) if byte.is_ascii() => out.write_all(&[byte]),
            _ => write!(out, "\\u{unit:04x}"),
        })
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.begin_item(out, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.begin_item(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }
}
