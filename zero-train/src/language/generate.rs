//! `zero generate`: generates text with a trained model, from a Hugging Face folder or a checkpoint.
//!
//! [`run`] reads the options, finds model and tokenizer, and prints texts; a [`Generator`] runs the model, by one version of Burn.
//!
//! * In: a folder and prompts. Out: for each prompt, its continuation, or the output of a BART or a T5, on standard
//!   output. A single text is printed as it is generated.
//! * Parameters are sharded over the ranks or kept on a disk (`--offload disk`). On a disk, layers are read ahead of
//!   their use, and all prompts of a rank share each pass.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use clap::Args;
use serde_json::json;
use tempfile::TempDir;
use zero_core::Stage;
use zero_core::collective::launch::LaunchOptions;
use zero_core::config::{Tier, ZeroConfig};
use zero_kernels::quantized::Format;
use zero_models::generate::{EarlyStopping, Hooks, Sampling};
use zero_models::hf_export::ExportOptions;
use zero_models::lora::LoraConfig;
use zero_models::{AdaptedModel, ModelConfig, ModelError, Seq2SeqSettings};

use super::start::initial_adapter;
use crate::data::{Message, NO_TEMPLATE, TokenizeOptions, Tokenizer};
use crate::error::{Result, TrainError, io, wrong, wrong_data};
use crate::export::{Weights, export_checkpoint};
use crate::trainer::{BackendChoice, Dtype, InitialAdapter, OffloadTo};

/// Default limit on the tokens of an answer.
const ANSWER: usize = 512;

/// A version of Burn that can generate text.
pub trait Generator {
    /// Checks, before anything is read, that this version has what the options ask for.
    ///
    /// # Errors
    ///
    /// [`TrainError`] for a backend or an option that is missing.
    fn check(&self, options: &Options) -> Result<()>;

    /// Loads the job's model on each of its ranks, which are threads, and runs `body` there.
    ///
    /// # Errors
    ///
    /// An error of the model's files, or of a rank.
    fn launch(&self, job: &Job<'_>, body: &RankBody<'_>) -> Result<()>;
}

/// The function that each rank runs.
pub type RankBody<'a> = dyn Fn(&dyn TextModel) -> Result<()> + Sync + 'a;

/// A loaded model on one rank.
pub trait TextModel {
    /// Returns the rank.
    fn rank(&self) -> usize;

    /// Ends a pass over the model, and returns whether any rank needs another one: all ranks gather parameters equally often.
    fn goes_on(&self, needs: bool) -> bool;

    /// Generates the model's output tokens for each prompt.
    ///
    /// # Errors
    ///
    /// Same as [`zero_models::generate::generate_by`].
    fn generate(&self, prompts: &[Vec<u32>], how: &Sampling, hooks: Hooks<'_>) -> Result<Vec<Vec<u32>>, ModelError>;
}

/// Answers messages from standard input, one per line, as one conversation: `zero chat`.
///
/// # Errors
///
/// The errors of [`run`], and more than one rank: the others would wait for the input.
pub fn chat(generator: &dyn Generator, options: Options) -> Result<()> {
    let Options { ranks, prompt, prompts, .. } = &options;
    if *ranks != 1 {
        return Err(wrong("ranks", ranks, "expected 1: zero chat runs on one rank"));
    }
    let expected = "expected none: zero chat reads messages from standard input";
    if let Some(file) = prompts {
        return Err(wrong("prompts", file.display(), expected));
    }
    if !prompt.is_empty() {
        return Err(wrong("prompt", prompt.join(", "), expected));
    }
    run(generator, &Options { chat: true, dialogue: true, ..options })
}

/// Options of `zero generate`.
// A field for each option.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Model folder: a Hugging Face config.json with weights, a PEFT adapter, or a checkpoint
    pub model: PathBuf,
    /// Folder with the base weights of an adapter [default: the base that the adapter names]
    #[arg(long, value_name = "DIR")]
    pub base: Option<PathBuf>,
    /// The prompt, or for a BART or a T5 the source text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// A file with one prompt per line
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Answer each prompt as a user message, formatted by the chat template in the model's folder
    #[arg(long)]
    pub chat: bool,
    /// Put a system message before each prompt of --chat, or before the conversation in zero chat
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// A tokenizer.json, or its folder [default: the one in the model's folder; for a GPT-2 without one, GPT-2's own]
    #[arg(long, value_name = "FILE|DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Maximum number of new tokens per prompt [default: the folder's, or 64 (512 with --chat and in zero chat),
    /// limited by the model's positions]
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// Minimum number of new tokens per prompt [default: the folder's]
    #[arg(long, value_name = "N")]
    pub min_new_tokens: Option<usize>,
    /// Sample tokens with logits divided by T; 0 always selects the most likely token [default: the folder's, or 0]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,
    /// Sample from the K most likely tokens; 0 samples from all [default: the folder's]
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Sample from the most likely tokens whose probabilities add up to P [default: the folder's]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f64>,
    /// Make tokens that occurred before less likely, with a factor above 1 [default: the folder's, or 1]
    #[arg(long, value_name = "FACTOR")]
    pub repetition_penalty: Option<f64>,
    /// Never repeat a sequence of N tokens; 0 allows it [default: the folder's, or 0]
    #[arg(long, value_name = "N")]
    pub no_repeat_ngram_size: Option<usize>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Search for the most likely text with N beams [default: the folder's, or 1]
    #[arg(long, value_name = "N")]
    pub beams: Option<usize>,
    /// In beam search, divide a score by the text's length to this power [default: the folder's, or 1]
    #[arg(long, value_name = "POWER")]
    pub length_penalty: Option<f64>,
    /// End beam search when the number of finished texts reaches the number of beams: true or false [default: the
    /// folder's, or false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub early_stopping: Option<bool>,
    /// Stop a text at this token, given by name; may be given several times [default: eos_token_id of
    /// generation_config.json or config.json, and the tokenizer's end of text; for a BART or a T5, the model's
    /// eos_token_id]
    #[arg(long, value_name = "TOKEN")]
    pub stop: Vec<String>,
    /// Backend that ranks compute on: cpu, cuda or vulkan
    #[arg(long, value_name = "BACKEND", default_value = "cpu")]
    pub backend: BackendChoice,
    /// Recompile CUDA kernels, and do not store them in the user's cache folder
    #[arg(long)]
    pub no_kernel_cache: bool,
    /// Type of the parameters
    #[arg(long, default_value = "fp32")]
    pub dtype: Dtype,
    /// Type of the cached keys and values (KV cache) [default: --dtype]
    #[arg(long, value_name = "DTYPE")]
    pub kv_cache_dtype: Option<Dtype>,
    /// Quantize the weights of linear layers to 8 or 4 bits: int8, int4 or nf4
    #[arg(long, value_name = "FORMAT")]
    pub quantize: Option<Format>,
    /// Number of ranks that the parameters are sharded over and the prompts are distributed to
    #[arg(long, default_value_t = 1)]
    pub ranks: usize,
    /// Compute threads per rank [default: an equal share of the machine's cores]
    #[arg(long)]
    pub threads: Option<usize>,
    /// Offload the parameters to host memory (not with --backend cpu) or to a disk
    #[arg(long, value_name = "WHERE")]
    pub offload: Option<OffloadTo>,
    /// Folder for --offload disk, on a fast disk
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub swap: PathBuf,
    /// Print a JSON object for each prompt: prompt, text and tokens
    #[arg(long)]
    pub json: bool,
    /// Read messages of a user from standard input, each a line, and answer them as one conversation.
    #[arg(skip)]
    pub dialogue: bool,
}

/// Generates text and prints it.
///
/// # Errors
///
/// [`TrainError`] for an invalid folder, prompt or option.
pub fn run(generator: &dyn Generator, options: &Options) -> Result<()> {
    if options.prompt.is_empty() && options.prompts.is_none() && !options.dialogue {
        return Err(wrong("prompt", "(none)", "expected a prompt: --prompt TEXT, or --prompts FILE with one per line"));
    }
    if let Some(text) = options.system.as_ref().filter(|_| !options.chat) {
        return Err(wrong("system", text, "expected --chat as well"));
    }
    generator.check(options)?;
    if options.ranks == 0 {
        return Err(wrong("ranks", 0, "expected at least 1"));
    }
    if (options.offload, options.backend) == (Some(OffloadTo::Host), BackendChoice::Cpu) {
        return Err(wrong("offload", "host", OffloadTo::NOT_HOST));
    }
    let on_disk = options.offload == Some(OffloadTo::Disk);
    if on_disk && !options.swap.is_dir() {
        return Err(wrong("swap", options.swap.display(), "expected an existing folder on the disk to use"));
    }
    if !options.model.is_dir() {
        return Err(wrong_data(
            &options.model,
            "is not a folder: expected one with a config.json and weights, or a checkpoint",
        ));
    }
    // Export a checkpoint to a model folder first.
    let mut exported = None;
    let mut dir = if ["config.json", "adapter_config.json"].iter().any(|file| options.model.join(file).is_file()) {
        options.model.clone()
    } else {
        let there = tempfile::tempdir_in(&options.swap).map_err(io("write", &options.swap))?;
        let dir = there.path().join("model");
        let (dtype, _) = options.dtype.types();
        let export = ExportOptions { dtype, ..ExportOptions::default() };
        export_checkpoint(&options.model, &dir, &export, None, Weights::Trained).map_err(|error| {
            wrong_data(&options.model, format!("has no config.json, and is not a checkpoint: {error}"))
        })?;
        exported = Some(there);
        dir
    };
    let mut adapter = None;
    if let Some(known) = ModelConfig::adapter_base(&dir) {
        let Some(base) = options.base.clone().or(known) else {
            let problem = "is an adapter that does not name a base folder on this machine; name it with --base DIR";
            return Err(wrong_data(&options.model, problem));
        };
        adapter = Some(std::mem::replace(&mut dir, base));
    } else if let Some(base) = &options.base {
        return Err(wrong("base", base.display(), "expected an adapter as the model, got a full model; omit --base"));
    }
    let adapter = adapter.as_deref();
    let config = ModelConfig::from_file(&dir.join("config.json"))?;
    let vocab_size = match &config {
        ModelConfig::Gpt2(config) => Some(config.vocab_size),
        ModelConfig::Llama(config) => Some(config.vocab_size),
        ModelConfig::Bart(bart) => Some(bart.vocab_size).filter(|_| config.classes().is_empty()),
        ModelConfig::T5(config) => Some(config.vocab_size),
        _ => None,
    };
    let Some(vocab_size) = vocab_size else {
        let expected = "expected a GPT-2 or a Llama, which predict the next token, or a BART or a T5 without a \
                        classification head";
        return Err(wrong("model", options.model.display(), expected));
    };
    run_on_model(generator, options, (&dir, adapter), exported, &config, vocab_size)
}

/// Implements [`run`] for the model in `dir` and an optional adapter; `made_for_this` is the temporary folder that
/// holds one of them, if any.
fn run_on_model(
    generator: &dyn Generator,
    options: &Options,
    (dir, adapter): (&Path, Option<&Path>),
    made_for_this: Option<TempDir>,
    config: &ModelConfig,
    vocab_size: usize,
) -> Result<()> {
    config.check(dir)?;
    let folders: Vec<&Path> = adapter.into_iter().chain([dir]).collect();
    let tokenize = TokenizeOptions {
        vocab_size,
        tokenizer: options.tokenizer.as_deref(),
        folders: &folders,
        is_gpt2: matches!(config, ModelConfig::Gpt2(_)),
        ..TokenizeOptions::default()
    };
    let tokenizer = Tokenizer::find(Path::new("the prompt"), &tokenize)?;
    let mut texts = options.prompt.clone();
    if let Some(file) = &options.prompts {
        let lines = std::fs::read_to_string(file).map_err(io("read", file))?;
        // Some programs write a byte order mark at the start of a file.
        texts.extend(lines.trim_start_matches('\u{feff}').lines().map(str::to_string));
    }
    let encode = |text: &String| {
        if options.chat {
            let message = Message::new("user", text);
            let messages: Vec<Message> = system_message(options).into_iter().chain([message]).collect();
            return tokenizer.encode_chat(&messages).map_err(|problem| wrong_data(&options.model, problem));
        }
        let whose = options.tokenizer.as_deref().unwrap_or(dir).display();
        let ids = tokenizer
            .encode(text)
            .map_err(|problem| wrong("prompt", text, format!("{problem}; the tokenizer is from {whose}")))?;
        Ok::<_, TrainError>(match config.seq2seq() {
            // Same as in training.
            Some(settings) => [tokenizer.encoder_prefix(&settings), ids, vec![settings.end_token]].concat(),
            None => begun(&tokenizer, ids),
        })
    };
    if options.dialogue && !tokenizer.has_chat_template() {
        return Err(wrong_data(options.tokenizer.as_deref().unwrap_or(dir), NO_TEMPLATE));
    }
    let prompts: Vec<Vec<u32>> = texts.iter().map(encode).collect::<Result<_, _>>()?;
    if let Some(file) = options.prompts.as_ref().filter(|_| prompts.is_empty()) {
        return Err(wrong_data(file, "is empty: expected one prompt per line"));
    }
    if options.chat && config.seq2seq().is_some() {
        let expected = "expected a model that predicts the next token; this one has an encoder and a decoder";
        return Err(wrong("chat", options.model.display(), expected));
    }
    let how = sampling(options, dir, config, &tokenizer)?;
    how.check()?;
    let job = Job { options, dir, adapter, config, tokenizer: &tokenizer, prompts: &prompts, how };
    let made = job.run(generator)?;
    drop(made_for_this);
    let streamed = job.streams();
    for ((prompt, tokens), text) in prompts.iter().zip(&made).zip(&texts) {
        let prompt = if job.goes_on() { &prompt[..] } else { &[][..] };
        let (begins, all) = (tokenizer.decode(prompt), tokenizer.decode(&[prompt, tokens].concat()));
        let follows = all.strip_prefix(&begins).unwrap_or(&all);
        let printed = match streamed {
            _ if options.json => say(&json!({ "prompt": text, "text": follows, "tokens": tokens }).to_string()),
            true => Ok(()),
            false => say(&format!("{all}\n")),
        };
        // A closed pipe (`| head`) is not an error.
        if printed.is_err() {
            break;
        }
    }
    Ok(())
}

fn system_message(options: &Options) -> Option<Message> {
    options.system.as_ref().map(|text| Message::new("system", text))
}

/// Prepends the tokenizer's prefix to a prompt's tokens, unless they start with it. If both are empty, returns the
/// beginning-of-text token, if there is one.
fn begun(tokenizer: &Tokenizer, ids: Vec<u32>) -> Vec<u32> {
    let begin = tokenizer.prefix_ids();
    match ids.starts_with(begin) {
        true if ids.is_empty() => tokenizer.bos().into_iter().collect(),
        true => ids,
        false => [begin, &ids].concat(),
    }
}

/// Returns the sampling settings: from the options, with defaults from the folder.
fn sampling(options: &Options, dir: &Path, config: &ModelConfig, tokenizer: &Tokenizer) -> Result<Sampling> {
    let named = |token: &String| {
        let expected = "expected a token of the model's tokenizer, such as <|endoftext|>";
        tokenizer.id(token).ok_or_else(|| wrong("stop", token, expected))
    };
    let default = config.sampling();
    let mut how = match config.seq2seq() {
        Some(Seq2SeqSettings { positions, .. }) => {
            Sampling { max_new_tokens: default.max_new_tokens.min(positions - 1), ..default }
        }
        _ if options.chat => Sampling { max_new_tokens: ANSWER, ..default },
        _ => default,
    }
    .with_settings_of(dir)?;
    if config.seq2seq().is_none() {
        let end = tokenizer.end().filter(|end| !how.stop.contains(end));
        how.stop.extend(end);
    }
    if !options.stop.is_empty() {
        how.stop = options.stop.iter().map(named).collect::<Result<_, _>>()?;
    }
    // Default lengths do not exceed the model's positions.
    let positions = match config {
        ModelConfig::Gpt2(config) => Some(config.n_positions),
        ModelConfig::Llama(config) => Some(config.positions()),
        _ => None,
    };
    if let Some(positions) = positions {
        how.max_length = Some(how.max_length.unwrap_or(positions).min(positions));
    }
    if let Some(most) = options.max_new_tokens {
        (how.max_new_tokens, how.max_length) = (most, None);
    }
    if let Some(fewest) = options.min_new_tokens {
        (how.min_new_tokens, how.min_length) = (fewest, 0);
    }
    // Options override the folder: beam search does not sample.
    match (options.beams, options.temperature) {
        (Some(beams), None) if beams > 1 => how.temperature = 0.0,
        (None, Some(temperature)) if temperature > 0.0 => how.beams = 1,
        _ => {}
    }
    Ok(Sampling {
        temperature: options.temperature.unwrap_or(how.temperature),
        top_k: options.top_k.or(how.top_k).filter(|&k| k > 0),
        top_p: options.top_p.or(how.top_p),
        repetition_penalty: options.repetition_penalty.unwrap_or(how.repetition_penalty),
        no_repeat_ngram_size: options.no_repeat_ngram_size.unwrap_or(how.no_repeat_ngram_size),
        seed: options.seed,
        beams: options.beams.unwrap_or(how.beams),
        length_penalty: options.length_penalty.unwrap_or(how.length_penalty),
        early_stopping: match options.early_stopping {
            Some(true) => EarlyStopping::Yes,
            Some(false) => EarlyStopping::No,
            None => how.early_stopping,
        },
        cache_dtype: options.kv_cache_dtype.map(|dtype| dtype.types().1),
        ..how
    })
}

/// Texts to generate, and the model to generate them with.
pub struct Job<'a> {
    options: &'a Options,
    dir: &'a Path,
    adapter: Option<&'a Path>,
    config: &'a ModelConfig,
    tokenizer: &'a Tokenizer,
    prompts: &'a [Vec<u32>],
    how: Sampling,
}

impl Job<'_> {
    /// Returns the options.
    pub fn options(&self) -> &Options {
        self.options
    }

    /// Returns the folder of the weights.
    pub fn dir(&self) -> &Path {
        self.dir
    }

    /// Returns the folder of an adapter that was trained on these weights, if there is one.
    pub fn adapter(&self) -> Option<&Path> {
        self.adapter
    }

    /// Returns the adapter's parameters, if there is one.
    ///
    /// # Errors
    ///
    /// If the adapter's folder cannot be read, or is of another model.
    pub fn initial_adapter(&self) -> Result<Option<InitialAdapter>> {
        let Some(dir) = self.adapter else { return Ok(None) };
        let lora = LoraConfig::from_dir(dir)?;
        let adapted = AdaptedModel::new(self.config.clone(), lora, Some(self.dir.to_path_buf()))?;
        initial_adapter(&adapted, Some(dir), 0).map(Some)
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.config
    }

    /// Returns the configuration of the ranks: sharded parameters, in the type and the memory that the options name.
    pub fn zero(&self) -> ZeroConfig {
        let mut zero = ZeroConfig::new(Stage::Parameters);
        (_, zero.param_dtype) = self.options.dtype.types();
        zero.offload.parameters = match self.options.offload {
            None => Tier::default(),
            Some(OffloadTo::Host) => Tier::Host,
            Some(OffloadTo::Disk) => Tier::Disk,
        };
        zero.offload.disk.path = self.options.swap.clone();
        zero
    }

    /// Returns the options of the ranks' launch.
    pub fn launch_options(&self) -> LaunchOptions {
        LaunchOptions {
            threads_per_rank: self.options.threads.unwrap_or(0),
            kernel_cache: !self.options.no_kernel_cache,
            ..LaunchOptions::default()
        }
    }

    /// Returns `true` if the generated text continues the prompt and is printed after it.
    fn goes_on(&self) -> bool {
        self.config.seq2seq().is_none() && !self.options.chat
    }

    /// Returns `true` if tokens are printed as they are generated. Beam search prints at its end.
    fn streams(&self) -> bool {
        self.prompts.len() == 1 && self.how.beams == 1 && !self.options.json
    }

    /// Returns the tokens that follow each prompt.
    fn run(&self, generator: &dyn Generator) -> Result<Vec<Vec<u32>>> {
        let ranks = self.options.ranks;
        self.zero().validate(ranks).map_err(|error| wrong("ranks", ranks, error.to_string()))?;
        let made: Vec<Mutex<Vec<u32>>> = self.prompts.iter().map(|_| Mutex::default()).collect();
        generator.launch(self, &|model| self.run_rank(model, &made))?;
        Ok(made.into_iter().map(|tokens| tokens.into_inner().expect("no rank has panicked")).collect())
    }

    fn run_rank(&self, model: &dyn TextModel, made: &[Mutex<Vec<u32>>]) -> Result<()> {
        if self.options.dialogue {
            return self.converse(model);
        }
        let rank = model.rank();
        let mine: Vec<usize> = (rank..self.prompts.len()).step_by(self.options.ranks).collect();
        // Placeholder on a rank without prompts.
        let rows = if mine.is_empty() { &[0][..] } else { &mine };
        let prompts: Vec<Vec<u32>> = rows.iter().map(|&row| self.prompts[row].clone()).collect();
        let begins = if self.goes_on() { &self.prompts[0][..] } else { &[] };
        let mut shown = self.streams().then(|| Shown::new(self.tokenizer, begins));
        let mut token = |_: usize, token: u32| {
            if let Some(shown) = shown.as_mut().filter(|_| rank == 0) {
                shown.add(token);
            }
        };
        let hooks = Hooks { token: &mut token, goes_on: &mut |needs| model.goes_on(needs), number: &|row| rows[row] };
        let texts = model.generate(&prompts, &self.how, hooks).map_err(|error| match error {
            // The cause may be the folder.
            ModelError::Prompt { .. } => wrong_data(&self.options.model, error.to_string()),
            _ => error.into(),
        })?;
        for (&row, text) in mine.iter().zip(texts) {
            *made[row].lock().expect("no other rank has this row") = text;
        }
        if let Some(shown) = shown.as_mut().filter(|_| rank == 0) {
            let _ = shown.end();
        }
        Ok(())
    }

    /// Answers each line of standard input, as one conversation.
    fn converse(&self, model: &dyn TextModel) -> Result<()> {
        let options = self.options;
        let mut messages: Vec<Message> = system_message(options).into_iter().collect();
        let mut lines = std::io::stdin().lines();
        loop {
            if std::io::stdin().is_terminal() {
                let _ = write!(std::io::stderr(), "> ");
            }
            let Some(line) = lines.next() else { return Ok(()) };
            let line = line.map_err(io("read", Path::new("standard input")))?;
            if line.trim().is_empty() {
                continue;
            }
            messages.push(Message::new("user", line.as_str()));
            let prompt = match self.tokenizer.encode_chat(&messages) {
                Ok(prompt) => prompt,
                Err(problem) => {
                    messages.pop();
                    go_on(wrong_data(&options.model, problem))?;
                    continue;
                }
            };
            let mut shown = (self.how.beams == 1 && !options.json).then(|| Shown::new(self.tokenizer, &[]));
            let mut token = |_: usize, token: u32| {
                if let Some(shown) = shown.as_mut() {
                    shown.add(token);
                }
            };
            let hooks = Hooks { token: &mut token, goes_on: &mut |needs| model.goes_on(needs), number: &|row| row };
            let tokens = match model.generate(&[prompt], &self.how, hooks) {
                Ok(mut tokens) => tokens.pop().unwrap_or_default(),
                // The conversation is too long.
                Err(error @ ModelError::Prompt { .. }) => {
                    messages.pop();
                    go_on(error.into())?;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let text = self.tokenizer.decode(&tokens);
            let printed = match shown.as_mut() {
                Some(shown) => shown.end(),
                None if options.json => say(&json!({ "prompt": line, "text": text, "tokens": tokens }).to_string()),
                None => say(&text),
            };
            // The reader closed the pipe.
            if printed.is_err() {
                return Ok(());
            }
            messages.push(Message::new("assistant", text));
        }
    }
}

/// Prints a line; fails if the pipe is closed.
fn say(line: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{line}")
}

/// Shows an error in a message to an interactive user; otherwise returns it.
fn go_on(error: TrainError) -> Result<()> {
    if !std::io::stdin().is_terminal() {
        return Err(error);
    }
    eprintln!("error: {error}");
    Ok(())
}

/// A text printed to standard output while it is generated.
struct Shown<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// Number of bytes already printed.
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
        // The next token may complete the character.
        if text.ends_with('\u{fffd}') {
            return;
        }
        if let Some(new) = text.get(self.printed..) {
            let mut out = std::io::stdout();
            // A closed pipe (`| head`) is not an error.
            let _ = out.write_all(new.as_bytes()).and_then(|()| out.flush());
            self.printed = text.len();
        }
    }

    fn end(&mut self) -> std::io::Result<()> {
        say("")
    }
}
