//! Loads a [`Config`] from a file: detects the format and the kind of configuration, and checks everything that does
//! not depend on the number of ranks.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use zero_core::Stage;

use super::accelerate::{self, Accelerate};
use super::deepspeed;
use super::error::{ConfigError, Findings, Format, ProblemKind, Warning};
use super::node::{MAX_BYTES, Node};

/// A configuration with valid keys and types; [`resolve`](Config::resolve) turns it into a plan.
#[derive(Debug, Clone)]
pub struct Config {
    /// DeepSpeed's keys, checked, under their canonical names.
    pub(super) tree: Node,
    pub(super) stage: Stage,
    /// The file of `tree`, the names to show for its keys, and the warnings so far.
    pub(super) findings: Findings,
    /// Number of ranks that the file asks for.
    pub(super) processes: Option<usize>,
}

impl Config {
    /// Reads a DeepSpeed JSON or an Accelerate YAML (or either in the other format). The keys determine the kind of
    /// configuration. The extension determines the format, or the first character if there is none.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every problem found.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        Self::from_file_or(path.as_ref(), &Node::Null)
    }

    /// Reads a file; a key that it does not give has its value in `others`, if there is one.
    pub(super) fn from_file_or(path: &Path, others: &Node) -> Result<Self, ConfigError> {
        let text = read(path)?;
        let format = match path.extension().and_then(OsStr::to_str).map(str::to_ascii_lowercase).as_deref() {
            Some("json") => Format::Json,
            Some("yaml" | "yml") => Format::Yaml,
            _ if text.trim_start().starts_with('{') => Format::Json,
            _ => Format::Yaml,
        };
        Self::of_text(path, format, &text, others)
    }

    /// Like [`from_file`](Self::from_file), for text already in memory. `path` is used in messages. A relative
    /// `deepspeed_config_file` is looked up in the working directory, as in Accelerate, then next to `path`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every problem found.
    pub fn from_text(path: impl AsRef<Path>, format: Format, text: &str) -> Result<Self, ConfigError> {
        Self::of_text(path.as_ref(), format, text, &Node::Null)
    }

    /// Returns settings accepted without their documented effect, as far as known without the number of ranks.
    pub fn warnings(&self) -> &[Warning] {
        &self.findings.warnings
    }

    /// Returns the ZeRO stage.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Returns the number of ranks that the file asks for (Accelerate's `num_processes`).
    pub fn processes(&self) -> Option<usize> {
        self.processes
    }

    /// Checks a tree of DeepSpeed's keys.
    pub(super) fn from_tree(file: &str, node: &Node) -> Result<Self, ConfigError> {
        Self::checked(node, Findings::new(file), None)
    }

    fn of_text(path: &Path, format: Format, text: &str, others: &Node) -> Result<Self, ConfigError> {
        let file = path.display().to_string();
        let node = parse(&file, format, text)?;
        if accelerate::is_accelerate(&node) {
            Self::from_accelerate(path, &node, others)
        } else {
            Self::checked(&deepspeed::filled(node, others), Findings::new(&file), None)
        }
    }

    fn from_accelerate(path: &Path, node: &Node, others: &Node) -> Result<Self, ConfigError> {
        let file = path.display().to_string();
        let mut findings = Findings::new(&file);
        let Accelerate { mut tree, defaults, names, processes, deepspeed_file } =
            accelerate::convert(&file, node, &mut findings);
        findings.names = names;
        if let Some(name) = deepspeed_file {
            // The working directory, as in Accelerate; else next to the YAML: both may have been copied together.
            let beside = path.parent().unwrap_or(Path::new("")).join(&name);
            let inner = if Path::new(&name).is_file() { PathBuf::from(name) } else { beside };
            findings.file = inner.display().to_string();
            let text = read(&inner).map_err(|error| match error {
                ConfigError::Io { path, source } => {
                    let looked = format!("{source}; looked in the working directory, then next to {file}");
                    ConfigError::Io { path, source: std::io::Error::new(source.kind(), looked) }
                }
                other => other,
            })?;
            tree = parse(&findings.file, Format::Json, &text)?;
            if tree.get("zero_optimization").is_none() {
                let what = "Accelerate requires this section in a deepspeed_config_file";
                findings.problem("zero_optimization", ProblemKind::Missing(what.to_owned()));
            }
        }
        let tree = deepspeed::filled(deepspeed::filled(tree, others), &defaults);
        Self::checked(&tree, findings, processes)
    }

    fn checked(node: &Node, mut findings: Findings, processes: Option<usize>) -> Result<Self, ConfigError> {
        let (tree, stage) = deepspeed::check(node, &mut findings);
        Ok(Self { tree, stage, findings: findings.finish()?, processes })
    }
}

fn parse(file: &str, format: Format, text: &str) -> Result<Node, ConfigError> {
    Node::parse(format, text).map_err(|message| ConfigError::Syntax { file: file.to_owned(), format, message })
}

/// Reads the file, up to slightly more than the maximum size of a configuration.
fn read(path: &Path) -> Result<String, ConfigError> {
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_BYTES as u64 + 1).read_to_string(&mut text))
        .map_err(|source| ConfigError::Io { path: path.to_owned(), source })?;
    Ok(text)
}
