//! The commands that do not train.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{ArgGroup, Args, ValueEnum};
use zero_core::estimate::Precision as Bytes;
use zero_models::hf_export::{ExportDtype, ExportOptions, parse_bytes, side_files};
use zero_models::lora::merge;
use zero_models::{KeyMap, ModelConfig};
use zero_train::config::{Format, OffloadDevice, key_table};
use zero_train::data::{Source, Tokenizer};
use zero_train::estimate::{Links, NamedModel, cheapest, estimates, largest, layouts, layouts_table, table};
use zero_train::export::{Weights, export_checkpoint, merge_checkpoint};
use zero_train::language::{self, Options, Program};
use zero_train::memory::{available_bytes, format_bytes};
use zero_train::monitor::{RunReport, write_page};
use zero_train::trainer::{self, Dtype, Hyperparameters};
use zero_train_cli::wizard::Answers;

use crate::ask::Terminal;

/// Where something is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// On the device.
    None,
    /// In host memory.
    Cpu,
    /// On disk.
    Nvme,
}

// A field for each option.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The file to write
    #[arg(long, short, default_value = "zero.yaml")]
    output: PathBuf,
    /// Overwrite the file if it exists
    #[arg(long)]
    force: bool,
    /// Ask no questions, and use the default of every option that no flag sets
    #[arg(long)]
    defaults: bool,
    /// ZeRO stage, 0 to 3 [default: 2]
    #[arg(long, visible_alias = "zero-stage", value_parser = clap::value_parser!(u8).range(0..=3))]
    stage: Option<u8>,
    /// Number of ranks [default: 2]
    #[arg(long, value_parser = at_least_one)]
    ranks: Option<usize>,
    /// Micro-batches per step [default: 1]
    #[arg(long, visible_alias = "gradient-accumulation-steps", value_parser = at_least_one)]
    accumulation: Option<usize>,
    /// Clip gradients to this global norm; 0 for no clipping [default: 0]
    #[arg(long, value_name = "NORM", visible_alias = "max-grad-norm")]
    clip: Option<f64>,
    /// Where to offload optimizer state (from stage 1) [default: none]
    #[arg(long)]
    offload_optimizer: Option<Device>,
    /// Where to offload parameters (stage 3) [default: none]
    #[arg(long)]
    offload_param: Option<Device>,
    /// Folder for state that is offloaded to nvme
    #[arg(long, value_name = "DIR")]
    nvme_path: Option<PathBuf>,
    /// Save a 16-bit model at the end of training (stage 3)
    #[arg(long)]
    save_16bit: bool,
    /// Refer to this DeepSpeed JSON file for all ZeRO settings
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "stage", "accumulation", "clip", "offload_optimizer", "offload_param", "nvme_path", "save_16bit", "dtype",
    ])]
    deepspeed_config: Option<PathBuf>,
    /// Precision [default: fp32]
    #[arg(long, visible_alias = "mixed-precision")]
    dtype: Option<Dtype>,
}

pub(super) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("expected at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("expected a whole number".into()),
    }
}

/// Parses a number of parameters, also in the form 7e9.
fn count(text: &str) -> Result<u64, String> {
    let number: f64 = text.parse().map_err(|_| "expected a number, such as 7e9".to_string())?;
    match (1.0..=1e15).contains(&number) {
        true => Ok(number as u64),
        false => Err("expected 1 to 1e15".into()),
    }
}

impl ConfigArgs {
    /// Returns the defaults, overridden by the given flags.
    fn answers(&self) -> Result<Answers> {
        let mut answers = Answers::default();
        answers.stage = self.stage.unwrap_or(answers.stage);
        answers.processes = self.ranks.unwrap_or(answers.processes);
        answers.accumulation = self.accumulation.unwrap_or(answers.accumulation);
        answers.clipping = self.clip.filter(|&clip| clip != 0.0);
        let clip = self.clip.unwrap_or(0.0);
        ensure!(clip.is_finite() && clip >= 0.0, "--clip {clip}: expected a norm above 0, or 0 for no clipping");
        let place = |device: Option<Device>, flag: &str, least: u8| -> Result<Option<OffloadDevice>> {
            let place = match (device, &self.nvme_path) {
                (None | Some(Device::None), _) => return Ok(None),
                (Some(Device::Cpu), _) => OffloadDevice::Cpu,
                (Some(Device::Nvme), Some(path)) => OffloadDevice::Nvme { path: path.clone() },
                (Some(Device::Nvme), None) => {
                    bail!("--{flag} nvme: expected a folder to offload to; name it with --nvme-path DIR")
                }
            };
            let stage = answers.stage;
            ensure!(stage >= least, "--{flag}: expected stage {least} or above, got stage {stage}; raise --stage");
            Ok(Some(place))
        };
        answers.offload_optimizer = place(self.offload_optimizer, "offload-optimizer", 1)?;
        answers.offload_param = place(self.offload_param, "offload-param", 3)?;
        let on_disk = |place: &Option<OffloadDevice>| matches!(place, Some(OffloadDevice::Nvme { .. }));
        if self.nvme_path.is_some() && !on_disk(&answers.offload_optimizer) && !on_disk(&answers.offload_param) {
            bail!("--nvme-path: nothing is offloaded to nvme; add --offload-optimizer nvme, or omit --nvme-path");
        }
        if self.save_16bit && answers.stage != 3 {
            bail!(
                "--save-16bit: at stage {} every rank holds the full weights anyway; omit --save-16bit",
                answers.stage
            );
        }
        answers.save_16bit = self.save_16bit;
        answers.zero_init = answers.stage == 3;
        answers.deepspeed_config = self.deepspeed_config.clone();
        answers.precision = self.dtype.unwrap_or(Dtype::Fp32).into();
        Ok(answers)
    }
}

pub fn config(args: &ConfigArgs) -> Result<()> {
    let path = &args.output;
    if path.exists() && !args.force {
        bail!("{} already exists: name another file with --output, or overwrite it with --force", path.display());
    }
    let mut answers = args.answers()?;
    if !args.defaults {
        if !std::io::stdin().is_terminal() {
            bail!("cannot ask questions without a terminal: use --defaults, and set other values with flags");
        }
        answers = answers.ask(&mut Terminal)?;
    }
    // Write the file completely or not at all.
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file =
        tempfile::NamedTempFile::new_in(dir).with_context(|| format!("cannot write to {}", dir.display()))?;
    file.write_all(answers.to_yaml().as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(path).with_context(|| format!("cannot write {}", path.display()))?;
    println!("Wrote the configuration to {}", path.display());
    Ok(())
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// A DeepSpeed JSON or an Accelerate YAML
    #[arg(required_unless_present = "keys")]
    file: Option<PathBuf>,
    /// Print all keys of this kind of file as a Markdown table, instead of checking a file
    #[arg(long, value_name = "KIND", conflicts_with = "file")]
    keys: Option<Keys>,
    /// Number of ranks, if the file does not set it [default: derived from its batch sizes, or 1]
    #[arg(long, value_parser = at_least_one)]
    ranks: Option<usize>,
    /// A preset or a folder with a config.json, to fill "auto" values that depend on the model
    #[arg(long, value_name = "PRESET|DIR")]
    model: Option<String>,
    /// Training steps
    #[arg(long, default_value_t = 20, value_parser = at_least_one)]
    steps: usize,
    #[command(flatten)]
    hyper: Hyperparameters,
}

/// A kind of configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Keys {
    /// DeepSpeed's JSON.
    Deepspeed,
    /// Accelerate's YAML.
    Accelerate,
}

pub fn check(args: &CheckArgs) -> Result<()> {
    let Some(file) = &args.file else {
        print!("{}", key_table(if args.keys == Some(Keys::Accelerate) { Format::Yaml } else { Format::Json }));
        return Ok(());
    };
    let model = args.model.as_deref().map(language::model).transpose()?;
    let width = model.and_then(|model| model.hidden_size());
    let (plan, filled) = trainer::outline(file, &args.hyper, args.steps, args.ranks, width)?;
    println!("{} is valid.", file.display());
    if !filled.is_empty() {
        println!("Values of \"auto\" in `zero train`, and the option that sets each:");
        let values: Vec<String> =
            filled.iter().map(|filled| filled.value.as_ref().map_or("?".into(), |value| value.to_string())).collect();
        let key = filled.iter().map(|filled| filled.path.len()).max().unwrap_or(0);
        let value = values.iter().map(String::len).max().unwrap_or(0);
        for (filled, shown) in filled.iter().zip(&values) {
            println!("  {:key$}  {shown:value$}  {}", filled.path, filled.by);
        }
    }
    println!("{}", plan.explain_filled(&filled));
    Ok(())
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("of").args(["model", "largest", "parameters"]).required(true)))]
pub struct EstimateArgs {
    /// Memory of this machine that the ranks may use, such as 6GiB [default: the available memory, without the reserve for
    /// other programs that `zero train` keeps]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// A preset (tiny, mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-10b; bert-tiny, bert-base, bert-large;
    /// llama-tiny, llama-3.2-1b, qwen2.5-0.5b, mistral-7b and so on), or a folder with a config.json
    #[arg(long, value_name = "PRESET|DIR")]
    model: Option<String>,
    /// Find the largest preset of a family (such as gpt2, llama, qwen2.5, qwen3, gemma, bert) that fits, instead of --model
    #[arg(long, value_name = "FAMILY", conflicts_with = "nodes")]
    largest: Option<String>,
    /// Number of parameters of any model, such as 7e9, instead of --model (a program that uses the trainer prints its
    /// own plan with --dry-run)
    #[arg(long, value_name = "N", value_parser = count)]
    parameters: Option<u64>,
    /// With --parameters, the number of elements of the largest parameter [default: 2 % of --parameters]
    #[arg(long, value_name = "N", value_parser = count, requires = "parameters")]
    largest_parameter: Option<u64>,
    /// Number of ranks over all nodes
    #[arg(long, default_value = "2", value_parser = at_least_one)]
    ranks: usize,
    /// Number of machines the ranks are spread over
    #[arg(long, default_value = "1", value_parser = at_least_one)]
    nodes: usize,
    /// With --nodes, the bandwidth from the other machines into each machine, in Gbit/s
    #[arg(long, value_name = "GBITS", default_value = "100", value_parser = gbits)]
    link: f64,
    /// With --nodes, the bandwidth from the other ranks of a machine into each rank, in Gbit/s
    #[arg(long, value_name = "GBITS", default_value = "400", value_parser = gbits)]
    local_link: f64,
    /// Precision: fp32, or 16 bit with fp32 master weights
    #[arg(long, default_value = "fp32", visible_alias = "mixed-precision")]
    dtype: Dtype,
}

/// Converts Gbit/s to bytes per second.
fn gbits(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(gbits) if gbits.is_finite() && gbits > 0.0 => Ok(gbits * 1e9 / 8.0),
        _ => Err("expected Gbit/s above 0, such as 100".into()),
    }
}

/// Returns a model's sizes.
fn sized(name: &str) -> Result<NamedModel> {
    let sizes: Vec<u64> = language::model(name)?.parameters().iter().map(|param| param.numel() as u64).collect();
    Ok((name.to_string(), sizes.iter().sum(), sizes.into_iter().max().unwrap_or(0)))
}

pub fn estimate(args: &EstimateArgs) -> Result<()> {
    let (ranks, nodes) = (args.ranks, args.nodes);
    ensure!(ranks.is_multiple_of(nodes), "--ranks {ranks}: expected a multiple of the {nodes} nodes");
    let precision = if args.dtype == Dtype::Fp32 { Bytes::FP32_ADAMW } else { Bytes::MIXED_ADAMW };
    if let Some(family) = &args.largest {
        let models: Vec<NamedModel> = ModelConfig::presets(family)
            .into_iter()
            .filter(|_| !family.is_empty())
            .map(sized)
            .collect::<Result<_>>()?;
        ensure!(
            !models.is_empty(),
            "--largest {family}: no preset begins with it: expected a family such as gpt2, llama, qwen3 or bert"
        );
        let memory = args.memory.or(available_bytes()).context("the available memory is unknown: set --memory SIZE")?;
        println!("{family}: {ranks} ranks on this machine, AdamW, {} of memory\n", format_bytes(memory));
        println!("{}", largest(&models, ranks as u64, ranks as u64, precision, memory));
        return Ok(());
    }
    let (name, parameters, largest) = match (&args.model, args.parameters) {
        (_, Some(parameters)) => {
            ("a model".to_string(), parameters, args.largest_parameter.unwrap_or(parameters / 50).min(parameters))
        }
        (name, None) => {
            let name = name.clone().unwrap_or_default();
            sized(&name)?
        }
    };
    let here = (ranks / nodes) as u64;
    let rows = estimates(parameters, largest, ranks as u64, precision);
    let available = available_bytes();
    println!("{name}: {parameters} parameters, AdamW, {ranks} ranks, {here} on this machine");
    let bytes = |bytes: Option<u64>| bytes.map_or("unknown".into(), format_bytes);
    match args.memory {
        Some(_) => println!("memory limit: {} (available here: {})\n", bytes(args.memory), bytes(available)),
        None => println!("memory available here: {}\n", bytes(available)),
    }
    let memory = args.memory.or(available);
    println!("{}", table(&rows, here, memory));
    if let Some(memory) = memory {
        println!("{}", cheapest(&rows, here, memory));
    }
    if nodes > 1 && here > 1 {
        let links = Links { across: args.link, within: args.local_link };
        let laid = layouts(parameters, here, nodes as u64, precision, links);
        println!("\n{}", layouts_table(&laid, memory.map(|memory| memory / here)));
    }
    Ok(())
}

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// A checkpoint folder (step-...), or its parent folder, whose newest valid checkpoint is exported
    #[arg(value_name = "CKPT")]
    checkpoint: PathBuf,
    /// The folder to write; it must be empty or not exist
    out: PathBuf,
    /// Type of the elements: bf16, fp16 or fp32
    #[arg(long, default_value = "bf16")]
    dtype: ExportDtype,
    /// Maximum size of the tensors in one file, such as 5GB or 512MiB
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_bytes)]
    max_shard_size: u64,
    /// For a model of another family, rename parameters from their paths in the module: `layers\.(\d+)=>h.$1`; may be
    /// given several times, and each rule applies to the result of the previous ones
    #[arg(long, value_name = "REGEX=>NAME")]
    rename: Vec<String>,
    /// Merge a LoRA adapter into its base weights, and write the full model; without this option, only the adapter is
    /// written, in PEFT's format. CKPT may also be a folder in PEFT's format
    #[arg(long, conflicts_with_all = ["rename", "transpose"])]
    merge: bool,
    /// Write the moving averages of a run with --ema-decay instead of the weights
    #[arg(long)]
    ema: bool,
    /// Folder with the base weights, for --merge [default: the folder that was used in training]
    #[arg(long, value_name = "DIR", requires = "merge")]
    base: Option<PathBuf>,
    /// Transpose matrices whose new names match: Burn's Linear stores its weight as [in, out], PyTorch's as [out, in]
    #[arg(long, value_name = "REGEX")]
    transpose: Vec<String>,
}

pub fn export(args: &ExportArgs) -> Result<()> {
    let names = KeyMap::new(&args.rename, &args.transpose)?;
    let names = (!(args.rename.is_empty() && args.transpose.is_empty())).then_some(&names);
    let options = ExportOptions { dtype: args.dtype, max_shard_bytes: args.max_shard_size, ..ExportOptions::default() };
    if let Some(known) = ModelConfig::adapter_base(&args.checkpoint).filter(|_| args.merge) {
        let Some(base) = args.base.clone().or(known) else {
            bail!(
                "--merge {}: the adapter does not name a base folder on this machine; name it with --base DIR",
                args.checkpoint.display()
            );
        };
        let options = ExportOptions { files: side_files(&base)?, ..options };
        let written = merge(&base, &args.checkpoint, &args.out, &options)?;
        println!(
            "Wrote {} merged with the adapter, {} tensors, to {}",
            base.display(),
            written.tensors,
            written.path.display()
        );
        return Ok(());
    }
    let weights = if args.ema { Weights::Averaged } else { Weights::Trained };
    let exported = match args.merge {
        true => merge_checkpoint(&args.checkpoint, args.base.as_deref(), &args.out, &options, weights)?,
        false => export_checkpoint(&args.checkpoint, &args.out, &options, names, weights)?,
    };
    for (path, reason) in &exported.skipped {
        eprintln!("warning: {} was skipped: {reason}", path.display());
    }
    let written = &exported.written;
    println!(
        "{}, step {}: wrote {} with {} tensors in {}, {} in {} file(s), to {}",
        exported.checkpoint.display(),
        exported.step,
        match &exported.model {
            ModelConfig::Adapted(_) => "an adapter",
            model => model.architecture().unwrap_or("a module"),
        },
        written.tensors,
        options.dtype,
        format_bytes(written.bytes),
        written.files.len(),
        written.path.display()
    );
    Ok(())
}

pub fn train(options: &Options) -> ExitCode {
    if options.data.is_none() {
        eprintln!(
            "error: --data is missing: name a text file, a .jsonl or .parquet file, a folder of such files, or a \
             .safetensors file with an int tensor `input_ids`"
        );
        return ExitCode::from(2);
    }
    let program = Program { model: "gpt2", data: Source::Text("", "no data"), allocator: Some(&crate::ALLOCATOR) };
    language::main(options, &program)
}

#[derive(Debug, Args)]
pub struct TokenizerArgs {
    /// The folder to write tokenizer.json, vocab.txt and tokenizer_config.json into
    out: PathBuf,
    /// Training texts: a text file, .jsonl or .parquet with a document in each row, or a folder of such files
    #[arg(long, value_name = "FILE|DIR")]
    data: PathBuf,
    /// JSON key or Parquet column with the text [default: text]
    #[arg(long, value_name = "NAME")]
    text_field: Option<String>,
    /// Number of tokens of the vocabulary; smaller if the texts do not yield as many
    #[arg(long, value_name = "N", default_value = "30522", value_parser = at_least_one)]
    vocab_size: usize,
    /// Distinguish upper and lower case, and keep accents
    #[arg(long)]
    cased: bool,
}

pub fn tokenizer(args: &TokenizerArgs) -> Result<()> {
    let source = Source::File(&args.data);
    let learned = Tokenizer::learn(&source, args.text_field.as_deref(), args.vocab_size, !args.cased)?;
    learned.save(&args.out)?;
    println!("Wrote a WordPiece tokenizer with {} tokens to {}", learned.tokens(), args.out.display());
    Ok(())
}

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The --out folders of runs
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The page to write
    #[arg(long, short, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
}

pub fn report(args: &ReportArgs) -> Result<()> {
    let runs: Result<Vec<RunReport>, _> = args.runs.iter().map(|run| RunReport::read(run)).collect();
    write_page(&args.output, &runs?)?;
    println!("Wrote the report to {}", args.output.display());
    Ok(())
}
