//! `zero generate`: text by a trained model, from a Hugging Face folder or a checkpoint.
//!
//! * In: a folder and prompts. Out: for each prompt the text that follows it, or that a BART makes of it, on standard output, as it is
//!   made where there is one.
//! * Parameters are sharded over the ranks, or kept on a disk (`--offload disk`): then layers are read ahead of their use, and
//!   all prompts of a rank share each pass.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use clap::Args;
use serde_json::{Value, json};
use tempfile::TempDir;
use zero_burn::launch::{LaunchOptions, launch};
use zero_burn::module::end_pass;
use zero_burn::stats::all_gather;
use zero_burn::{Zero, ZeroDevice};
use zero_core::Stage;
use zero_core::config::{Tier, ZeroConfig};
use zero_models::generate::{Hooks, Sampling};
use zero_models::hf_export::ExportOptions;
use zero_models::lora;
use zero_models::quantize::{self, Format};
use zero_models::safetensors_file::Checkpoint;
use zero_models::{ModelConfig, TextFamily};
use zero_ops::FusedBackend;

use crate::data::{Cutting, Tokenizer};
use crate::error::{Result, TrainError, io, wrong, wrong_data};
use crate::export::{Weights, export_checkpoint};
use crate::trainer::{BackendChoice, Dtype, OffloadTo};

/// Options of `zero generate`.
// A field for each option.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// A folder with a Hugging Face config.json and its weights, or with an adapter of PEFT, or a checkpoint
    pub model: PathBuf,
    /// The folder with the weights that an adapter was trained for [default: what the adapter names]
    #[arg(long, value_name = "DIR")]
    pub base: Option<PathBuf>,
    /// A text to go on with, or for a BART to make another of; may be given several times
    #[arg(long, value_name = "TEXT", required_unless_present = "prompts")]
    pub prompt: Vec<String>,
    /// A file with a prompt in each line
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// A tokenizer.json, or the folder that it is in [default: one in the model's folder, else GPT-2's own for a GPT-2]
    #[arg(long, value_name = "FILE|DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Most tokens that are made of a prompt [default: 64; of a BART no more than it has positions]
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// Draw tokens, by their logits divided by this; 0 takes the most likely one
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f64,
    /// Draw among the K most likely tokens only
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Draw among the most likely tokens that come to this probability together
    #[arg(long, value_name = "P")]
    pub top_p: Option<f64>,
    /// Above 1, tokens that were there already are less likely
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub repetition_penalty: f64,
    /// Seed of the draws
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Look for the text that is the most likely as a whole, among so many
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub beams: usize,
    /// By beam search, a score is divided by the text's length to this power
    #[arg(long, value_name = "POWER", default_value_t = 1.0)]
    pub length_penalty: f64,
    /// A token that ends a text, by its name; may be given several times [default: eos_token_id of
    /// generation_config.json or config.json, and the tokenizer's end of text; a BART's own]
    #[arg(long, value_name = "TOKEN")]
    pub stop: Vec<String>,
    /// Where ranks compute: cpu, cuda or vulkan
    #[arg(long, value_name = "BACKEND", default_value = "cpu")]
    pub backend: BackendChoice,
    /// Compile CUDA kernels anew, and do not keep them in the user's cache folder
    #[arg(long)]
    pub no_kernel_cache: bool,
    /// Type of the parameters
    #[arg(long, default_value = "fp32")]
    pub dtype: Dtype,
    /// What keys and values of the tokens so far are kept as [default: --dtype]
    #[arg(long, value_name = "DTYPE")]
    pub kv_cache_dtype: Option<Dtype>,
    /// Hold the weights of linear layers in 8 or 4 bit: int8, int4 or nf4
    #[arg(long, value_name = "FORMAT")]
    pub quantize: Option<Format>,
    /// Number of ranks that the parameters are sharded over; prompts are shared out among them
    #[arg(long, default_value_t = 1)]
    pub ranks: usize,
    /// Compute threads per rank [default: the machine's cores, shared evenly]
    #[arg(long)]
    pub threads: Option<usize>,
    /// Keep the parameters elsewhere than where the backend computes
    #[arg(long, value_name = "WHERE")]
    pub offload: Option<OffloadTo>,
    /// The folder for --offload disk, on a fast one
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub swap: PathBuf,
    /// Print a JSON object for each prompt: prompt, text and tokens
    #[arg(long)]
    pub json: bool,
}

/// Generates and prints.
///
/// # Errors
///
/// [`TrainError`] for a folder, a prompt or an option that cannot be used.
pub fn run(options: &Options) -> Result<()> {
    options.backend.check()?;
    if options.ranks == 0 {
        return Err(wrong("ranks", 0, "expected at least 1"));
    }
    let on_disk = options.offload == Some(OffloadTo::Disk);
    if on_disk && !options.swap.is_dir() {
        return Err(wrong("swap", options.swap.display(), "expected a folder, on the disk that is to be used"));
    }
    if !options.model.is_dir() {
        return Err(wrong_data(
            &options.model,
            "is no folder: expected one with a config.json and weights, or a checkpoint",
        ));
    }
    // A checkpoint is brought into the form of a folder first.
    let mut exported = None;
    let mut dir = if ["config.json", "adapter_config.json"].iter().any(|file| options.model.join(file).is_file()) {
        options.model.clone()
    } else {
        let there = tempfile::tempdir_in(&options.swap).map_err(io("write", &options.swap))?;
        let dir = there.path().join("model");
        let (dtype, ..) = options.dtype.types();
        let export = ExportOptions { dtype, ..ExportOptions::default() };
        export_checkpoint(&options.model, &dir, &export, None, Weights::Trained).map_err(|error| {
            wrong_data(&options.model, format!("has no config.json, and is no checkpoint: {error}"))
        })?;
        exported = Some(there);
        dir
    };
    let mut adapter = None;
    if let Some(known) = ModelConfig::adapter_base(&dir) {
        let Some(base) = options.base.clone().or(known) else {
            let problem = "is an adapter, which does not name a folder that is here: give its base with --base DIR";
            return Err(wrong_data(&options.model, problem));
        };
        adapter = Some(std::mem::replace(&mut dir, base));
    } else if let Some(base) = &options.base {
        return Err(wrong("base", base.display(), "expected an adapter beside it; this is a whole model"));
    }
    let adapter = adapter.as_deref();
    match ModelConfig::from_file(&dir.join("config.json"))? {
        ModelConfig::Gpt2(config) => run_on_model(options, &dir, adapter, exported, &config, config.vocab_size),
        ModelConfig::Llama(config) => run_on_model(options, &dir, adapter, exported, &config, config.vocab_size),
        ModelConfig::Bart(config) => run_on_model(options, &dir, adapter, exported, &config, config.vocab_size),
        _ => {
            let expected = "expected a GPT-2 or a Llama, which predict the next token, or a BART";
            Err(wrong("model", options.model.display(), expected))
        }
    }
}

/// As [`run`], with the model in the folder `dir` and what was trained beside it; one may lie in a folder that was made for this.
fn run_on_model<F: TextFamily>(
    options: &Options,
    dir: &Path,
    adapter: Option<&Path>,
    made_for_this: Option<TempDir>,
    family: &F,
    vocab_size: usize,
) -> Result<()> {
    let config: ModelConfig = family.clone().into();
    let folders: Vec<&Path> = adapter.into_iter().chain([dir]).collect();
    let cutting = Cutting {
        vocab_size,
        tokenizer: options.tokenizer.as_deref(),
        folders: &folders,
        is_gpt2: matches!(config, ModelConfig::Gpt2(_)),
        ..Cutting::default()
    };
    let tokenizer = Tokenizer::find(Path::new("the prompt"), &cutting)?;
    let mut texts = options.prompt.clone();
    if let Some(file) = &options.prompts {
        let lines = std::fs::read_to_string(file).map_err(io("read", file))?;
        // Some programs begin a file with a byte order mark.
        texts.extend(lines.trim_start_matches('\u{feff}').lines().map(str::to_string));
    }
    let encode = |text: &String| {
        let ids = tokenizer.encode(text).map_err(|problem| wrong("prompt", text, problem))?;
        Ok::<_, TrainError>(match &config {
            // As in training.
            ModelConfig::Bart(bart) => tokenizer.begin().into_iter().chain(ids).chain([bart.eos_token_id]).collect(),
            _ => begun(&tokenizer, ids),
        })
    };
    let prompts: Vec<Vec<u32>> = texts.iter().map(encode).collect::<Result<_, _>>()?;
    let job = Job { options, dir, adapter, family, config: &config, tokenizer: &tokenizer, prompts: &prompts };
    let run_on = match options.backend {
        #[cfg(feature = "cuda")]
        BackendChoice::Cuda => Job::<F>::run::<burn_cuda::Cuda>,
        #[cfg(feature = "vulkan")]
        BackendChoice::Vulkan => Job::<F>::run::<burn_wgpu::Vulkan>,
        _ => Job::<F>::run::<burn_flex::Flex>,
    };
    let made = run_on(&job)?;
    drop(made_for_this);
    let streamed = job.streams();
    for ((prompt, tokens), text) in prompts.iter().zip(&made).zip(&texts) {
        let prompt = if job.goes_on() { &prompt[..] } else { &[][..] };
        let (begins, all) = (tokenizer.decode(prompt), tokenizer.decode(&[prompt, tokens].concat()));
        let follows = all.strip_prefix(&begins).unwrap_or(&all);
        if options.json {
            println!("{}", json!({ "prompt": text, "text": follows, "tokens": tokens }));
        } else if !streamed {
            println!("{all}\n");
        }
    }
    Ok(())
}

/// A prompt's tokens behind what the tokenizer puts before a text, unless they begin with it; of an empty one the token that begins
/// a text.
fn begun(tokenizer: &Tokenizer, ids: Vec<u32>) -> Vec<u32> {
    let begin = tokenizer.put_before();
    match ids.starts_with(begin) {
        true if ids.is_empty() => tokenizer.bos().into_iter().collect(),
        true => ids,
        false => [begin, &ids].concat(),
    }
}

/// The tokens that end a text by the model's folder: `eos_token_id`, a number or a list, of `generation_config.json` or else of
/// `config.json`.
fn ends(dir: &Path) -> Result<Vec<u32>> {
    for file in ["generation_config.json", "config.json"] {
        let path = dir.join(file);
        let Ok(bytes) = std::fs::read(&path) else { continue };
        let settings: Value = serde_json::from_slice(&bytes)
            .map_err(|error| wrong_data(&path, format!("is not a whole JSON file ({error}): write it again")))?;
        let numbers = match &settings["eos_token_id"] {
            Value::Null => continue,
            Value::Array(numbers) => numbers.iter().collect(),
            number => vec![number],
        };
        let number = |number: &Value| {
            let found = number.as_u64().and_then(|number| u32::try_from(number).ok());
            found.ok_or_else(|| {
                wrong_data(&path, format!("has an eos_token_id of {number}: expected numbers of tokens"))
            })
        };
        return numbers.into_iter().map(number).collect();
    }
    Ok(Vec::new())
}

struct Job<'a, F> {
    options: &'a Options,
    dir: &'a Path,
    /// What was trained beside the weights in `dir`.
    adapter: Option<&'a Path>,
    family: &'a F,
    config: &'a ModelConfig,
    tokenizer: &'a Tokenizer,
    prompts: &'a [Vec<u32>],
}

impl<F: TextFamily> Job<'_, F> {
    /// Whether the text that is made goes on with the prompt.
    fn goes_on(&self) -> bool {
        !matches!(self.config, ModelConfig::Bart(_))
    }

    /// Whether tokens are printed as they come.
    fn streams(&self) -> bool {
        self.prompts.len() == 1 && self.options.beams == 1 && !self.options.json
    }

    fn sampling(&self) -> Result<Sampling> {
        let options = self.options;
        let named = |token: &String| {
            let expected = "expected a token of the model's tokenizer, such as <|endoftext|>";
            self.tokenizer.id(token).ok_or_else(|| wrong("stop", token, expected))
        };
        let default = match self.config {
            ModelConfig::Bart(bart) => {
                let default = bart.sampling();
                Sampling { max_new_tokens: default.max_new_tokens.min(bart.max_position_embeddings - 1), ..default }
            }
            _ => {
                let mut stop = ends(self.dir)?;
                stop.extend(self.tokenizer.end().filter(|end| !stop.contains(end)));
                Sampling { stop, ..Sampling::default() }
            }
        };
        let stop = match options.stop.len() {
            0 => default.stop,
            _ => options.stop.iter().map(named).collect::<Result<_, _>>()?,
        };
        Ok(Sampling {
            max_new_tokens: options.max_new_tokens.unwrap_or(default.max_new_tokens),
            stop,
            temperature: options.temperature,
            top_k: options.top_k,
            top_p: options.top_p,
            repetition_penalty: options.repetition_penalty,
            seed: options.seed,
            beams: options.beams,
            length_penalty: options.length_penalty,
            cache_dtype: options.kv_cache_dtype.map(|dtype| dtype.types().2),
            ..default
        })
    }

    fn zero(&self) -> ZeroConfig {
        let mut zero = ZeroConfig::new(Stage::Parameters);
        (_, zero.param_dtype, _) = self.options.dtype.types();
        zero.offload.parameters = match self.options.offload {
            None => Tier::default(),
            Some(OffloadTo::Host) => Tier::Host,
            Some(OffloadTo::Disk) => Tier::Disk,
        };
        zero.offload.disk.path = self.options.swap.clone();
        zero
    }

    /// The tokens that follow each prompt.
    fn run<I: FusedBackend>(&self) -> Result<Vec<Vec<u32>>> {
        let (how, zero) = (self.sampling()?, self.zero());
        let ranks = self.options.ranks;
        let launched = LaunchOptions {
            threads_per_rank: self.options.threads.unwrap_or(0),
            kernel_cache: !self.options.no_kernel_cache,
            ..LaunchOptions::default()
        };
        zero.validate(ranks).map_err(|error| wrong("ranks", ranks, error.to_string()))?;
        let made: Vec<Mutex<Vec<u32>>> = self.prompts.iter().map(|_| Mutex::default()).collect();
        launch::<I, _, TrainError>(ranks, &zero, &launched, |device| self.run_rank::<I>(&device, &how, &made))?;
        Ok(made.into_iter().map(|tokens| tokens.into_inner().expect("no rank has panicked")).collect())
    }

    fn run_rank<I: FusedBackend>(
        &self,
        device: &ZeroDevice<I::Device>,
        how: &Sampling,
        made: &[Mutex<Vec<u32>>],
    ) -> Result<()> {
        let model = self.family.init::<Zero<I>>(device);
        let mut model = match self.options.quantize {
            Some(format) => {
                quantize::load(model, self.dir, format, |_| false, |model, from| F::load(model, from, device))?
            }
            None => F::load(model, &Checkpoint::open(self.dir)?, device)?,
        };
        if let Some(adapter) = self.adapter {
            model = lora::load(model, self.config, adapter, device)?;
        }
        let mine: Vec<usize> = (device.rank()..self.prompts.len()).step_by(self.options.ranks).collect();
        // In place of prompts that only other ranks have.
        let rows = if mine.is_empty() { &[0][..] } else { &mine };
        let prompts: Vec<Vec<u32>> = rows.iter().map(|&row| self.prompts[row].clone()).collect();
        let begins = if self.goes_on() { &self.prompts[0][..] } else { &[] };
        let mut shown = self.streams().then(|| Shown::new(self.tokenizer, begins));
        let mut token = |_: usize, token: u32| {
            if let Some(shown) = shown.as_mut().filter(|_| device.rank() == 0) {
                shown.add(token);
            }
        };
        // All gather as often.
        let mut goes_on = |needs: bool| {
            end_pass::<I>();
            all_gather::<I>(&[needs.into()]).iter().any(|rank| rank[0] != 0.0)
        };
        let hooks = Hooks { token: &mut token, goes_on: &mut goes_on, number: &|row| rows[row] };
        let texts = F::generate(&model, &prompts, how, device, hooks)?;
        for (&row, text) in mine.iter().zip(texts) {
            *made[row].lock().expect("no other rank has this row") = text;
        }
        if let Some(shown) = shown.as_mut().filter(|_| device.rank() == 0) {
            shown.end();
        }
        Ok(())
    }
}

/// A text on standard output, as it is made.
struct Shown<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// Bytes of the text that are printed.
    printed: usize,
}

impl<'a> Shown<'a> {
    fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Self {
        let mut shown = Self { tokenizer, tokens: prompt.to_vec(), printed: 0 };
        shown.print();
        shown
    }

    fn add(&mut self, token: u32) {
        self.tokens.push(token);
        self.print();
    }

    fn print(&mut self) {
        let text = self.tokenizer.decode(&self.tokens);
        // The rest of a character may be in the next token.
        if text.ends_with('\u{fffd}') {
            return;
        }
        if let Some(new) = text.get(self.printed..) {
            let mut out = std::io::stdout();
            // That nobody reads it any more (`| head`) is no error.
            let _ = out.write_all(new.as_bytes()).and_then(|()| out.flush());
            self.printed = text.len();
        }
    }

    fn end(&mut self) {
        println!();
    }
}
