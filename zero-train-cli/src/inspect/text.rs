//! Formats the findings for a terminal.

use std::borrow::Borrow;
use std::fmt::{self, Display, Formatter};

use serde_json::Value;

use super::describe::{Description, Inspection, Kind, ModelFacts, TensorFacts};
use super::facts::{EngineFacts, Group, OptimizerFacts};
use super::folder::{Folder, FolderEntry};
use super::time::utc;
use super::words::{count, grouped, precision};
use zero_train::memory::format_bytes;

/// Configuration keys that distinguish models, in the terms of GPT-2 and of BERT.
const SIZES: [&str; 6] = ["n_layer", "n_head", "n_embd", "num_hidden_layers", "num_attention_heads", "hidden_size"];

/// Maximum number of names shown.
const NAMES: usize = 5;

/// Describes the check level in words.
fn looked(checked: &str) -> &'static str {
    match checked {
        "contents" => "every checksum was computed",
        _ => "only manifest, sizes and headers were checked",
    }
}

/// Formats a time as `2026-03-01 12:00:00 UTC`.
fn moment(unix_ms: u64) -> String {
    utc(unix_ms).replace('T', " ").replace('Z', " UTC")
}

impl Display for Inspection {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.problems.len() {
            0 => writeln!(f, "{}: intact ({})", self.path, looked(self.checked))?,
            problems => {
                writeln!(f, "{}: damaged, {} ({})", self.path, count(problems, "problem"), looked(self.checked))?;
                self.problems.iter().try_for_each(|problem| writeln!(f, "  - {problem}"))?;
            }
        }
        let disk = format_bytes(self.disk_bytes);
        let Some(checkpoint) = &self.checkpoint else { return writeln!(f, "\nsize          {disk} on disk") };
        writeln!(f, "\n{checkpoint}")?;
        let Description { parameters, optimizer, other, .. } = checkpoint;
        write!(f, "size          parameters {}", format_bytes(parameters.bytes))?;
        write!(f, ", optimizer state {}", format_bytes(optimizer.all.bytes))?;
        if other.tensors > 0 {
            write!(f, ", {} {}", count(other.tensors, "other tensor"), format_bytes(other.bytes))?;
        }
        writeln!(f, "; {disk} on disk")?;

        let good_for = &checkpoint.good_for;
        writeln!(f, "\nresume        {}", good_for.resume)?;
        if let Some(words) = &good_for.bit_for_bit {
            writeln!(f, "bit for bit   {words}")?;
        }
        writeln!(f, "export        {}", good_for.export)?;
        if let Some(tensors) = &checkpoint.tensors {
            let width = tensors.iter().map(|tensor| tensor.name.chars().count()).max().unwrap_or(0);
            writeln!(f)?;
            for tensor in tensors {
                let TensorFacts { name, kind: of, bytes } = tensor;
                writeln!(f, "{name:<width$}  {:<20}  {:>11}", kind(of), format_bytes(*bytes))?;
            }
        }
        Ok(())
    }
}

impl Display for Description {
    /// Omits sizes, uses and tensors.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let saved = moment(self.saved_unix_ms);
        writeln!(f, "step          {}, saved {saved} by version {}", self.step, self.crate_version)?;
        write!(f, "run           {}", count(self.ranks, "rank"))?;
        match &self.engine {
            Some(engine) => writeln!(f, "{}", engine.run(&self.parameters))?,
            None => writeln!(f, ", not saved by the engine")?,
        }
        writeln!(f, "model         {}", model(self.model.as_ref(), &self.parameters))?;
        write!(f, "optimizer     {}", self.optimizer)?;
        if let Some(EngineFacts { loss_scale: Some(scale), loss_scale_dynamic, skipped, .. }) = &self.engine {
            let kind = if loss_scale_dynamic == &Some(true) { "dynamic" } else { "fixed" };
            write!(f, "\nloss scale    {scale} ({kind})")?;
            if let Some(skipped) = skipped {
                write!(f, ", {} skipped", count(*skipped as usize, "update"))?;
            }
        }
        let keys: Vec<&str> =
            self.state_keys.iter().map(String::as_str).filter(|key| !["engine", "model"].contains(key)).collect();
        if !keys.is_empty() {
            write!(f, "\nother state   {}", some(&keys))?;
        }
        Ok(())
    }
}

impl EngineFacts {
    /// Returns the text after the number of ranks.
    fn run(&self, parameters: &Group) -> String {
        let mut text = String::new();
        if let Some(stage) = self.stage {
            text += &format!(", stage {stage}");
        }
        if let Some(dtype) = &self.param_dtype {
            text += &format!(", {}", precision(dtype));
            let masters = parameters.dtypes.get("F32").copied().unwrap_or(0);
            match parameters.tensors - masters {
                _ if dtype == "F32" => {}
                0 => text += " with fp32 master weights",
                without => text += &format!(", {} without fp32 master weights", count(without, "parameter")),
            }
        }
        if let Some(steps) = self.steps {
            text += &format!(", {}", count(steps as usize, "update"));
        }
        text
    }
}

fn model(model: Option<&ModelFacts>, parameters: &Group) -> String {
    let mut text = match model {
        Some(ModelFacts { family: Some(family), name: Some(name), .. }) if name != family => {
            format!("{family} ({name}), ")
        }
        Some(ModelFacts { family: Some(family), .. }) => format!("{family}, "),
        Some(_) => "of an unnamed family, ".to_string(),
        None => "unnamed, ".to_string(),
    };
    let number = grouped(parameters.elements);
    text += &format!("{number} parameters in {}", count(parameters.tensors, "tensor"));
    let config = model.map_or(&Value::Null, |model| &model.config);
    let sizes: Vec<String> =
        SIZES.iter().filter_map(|key| Some(format!("{key} {}", config.get(*key)?.as_u64()?))).collect();
    if !sizes.is_empty() {
        text += &format!(" ({})", sizes.join(", "));
    }
    text
}

impl Display for OptimizerFacts {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(self.name.as_deref().unwrap_or("unnamed"))?;
        if self.states.is_empty() {
            return f.write_str(", without state");
        }
        let states: Vec<&str> = self.states.keys().map(String::as_str).collect();
        write!(f, ": {}", states.join(", "))?;
        match self.without.as_slice() {
            [] => f.write_str(" for every parameter")?,
            without => write!(f, ", not all of them for {}: {}", count(without.len(), "parameter"), some(without))?,
        }
        match self.updates {
            Some([least, most]) if least == most => write!(f, ", after {}", count(most as usize, "update")),
            Some([least, most]) => write!(f, ", after {} to {} updates", grouped(least), grouped(most)),
            None => Ok(()),
        }
    }
}

/// Returns the first of many names.
fn some<S: Borrow<str>>(names: &[S]) -> String {
    match names.len().checked_sub(NAMES) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..NAMES].join(", ")),
    }
}

impl Display for Folder {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} ({})", self.path, count(self.checkpoints.len(), "checkpoint"), looked(self.checked))?;
        self.problems.iter().try_for_each(|problem| writeln!(f, "  - {problem}"))?;
        let width = self.checkpoints.iter().map(|entry| entry.name.len()).max().unwrap_or(0);
        writeln!(f, "\n{:<width$}  {:<23}  {:>5}  {:>11}", "checkpoint", "saved", "ranks", "size")?;
        for entry in &self.checkpoints {
            let FolderEntry { name, saved_unix_ms, ranks, disk_bytes, problems, .. } = entry;
            let saved = saved_unix_ms.map_or_else(|| "?".to_string(), moment);
            let ranks = ranks.map_or_else(|| "?".to_string(), |ranks| ranks.to_string());
            write!(f, "{name:<width$}  {saved:<23}  {ranks:>5}  {:>11}  ", format_bytes(*disk_bytes))?;
            match problems.len() {
                0 => write!(f, "intact")?,
                problems => write!(f, "damaged, {}", count(problems, "problem"))?,
            }
            let is = |which: &Option<String>| which.as_ref() == Some(name);
            let latest = if is(&self.latest) { "; named by `latest`" } else { "" };
            let resume = if is(&self.resume) { "; used by `--resume auto`" } else { "" };
            writeln!(f, "{latest}{resume}")?;
            problems.iter().try_for_each(|problem| writeln!(f, "  - {problem}"))?;
        }
        if self.resume.is_none() {
            writeln!(f, "\n`--resume auto` uses none of them")?;
        }
        if !self.remains.is_empty() {
            writeln!(f, "\nremains of incomplete saves, or a save in progress; the next save removes the remains:")?;
            let size = |bytes| format_bytes(bytes);
            self.remains.iter().try_for_each(|one| writeln!(f, "  {}  {}", one.name, size(one.disk_bytes)))?;
        }
        Ok(())
    }
}

fn kind(kind: &Kind) -> String {
    format!("{} {:?}", kind.dtype, kind.shape)
}
