//! The questions of `zero config` and the file they produce: an Accelerate YAML in Accelerate's order and wording.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use zero_train::config::{MixedPrecision, OffloadDevice};

/// Asks a user. Each answer is one of the options or the default; [`Stopped`] if the user gives up or cannot be asked.
pub trait Ask {
    /// Asks for one of `options` and returns its index.
    fn choose(&mut self, question: &str, options: &[&str], default: usize) -> Result<usize, Stopped>;

    /// Asks for yes or no.
    fn yes(&mut self, question: &str, default: bool) -> Result<bool, Stopped>;

    /// Asks for a number in `range`.
    fn number(&mut self, question: &str, range: RangeInclusive<usize>, default: usize) -> Result<usize, Stopped>;

    /// Asks for a number above 0.
    fn fraction(&mut self, question: &str, default: f64) -> Result<f64, Stopped>;

    /// Asks for a non-empty line of text.
    fn text(&mut self, question: &str, default: &str) -> Result<String, Stopped>;
}

/// The user stopped before the last question; nothing has been written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("stopped before the last question ({0}); nothing was written")]
pub struct Stopped(pub String);

/// Indexed by [`MixedPrecision`].
const PRECISIONS: [&str; 3] = ["no", "fp16", "bf16"];
const DEVICES: [&str; 3] = ["none", "cpu", "nvme"];
const MACHINES: [&str; 3] = ["No distributed training", "multi-CPU", "multi-GPU"];

/// Answers to the questions.
// A field for each question.
#[derive(Debug, Clone, PartialEq)]
pub struct Answers {
    /// A DeepSpeed JSON that replaces all answers about ZeRO.
    pub deepspeed_config: Option<PathBuf>,
    /// ZeRO stage.
    pub stage: u8,
    /// Offload of optimizer state; `None` keeps it on the device.
    pub offload_optimizer: Option<OffloadDevice>,
    /// Offload of parameters (stage 3); `None` keeps them on the device.
    pub offload_param: Option<OffloadDevice>,
    /// Micro-batches per update.
    pub accumulation: usize,
    /// Maximum global gradient norm.
    pub clipping: Option<f64>,
    /// If true, 16-bit weights are saved (stage 3).
    pub save_16bit: bool,
    /// If true, the model is created as shards (stage 3).
    pub zero_init: bool,
    /// Number of machines.
    pub machines: usize,
    /// Index of this machine.
    pub machine_rank: usize,
    /// Address and port of the first machine.
    pub main_process: Option<(String, u16)>,
    /// Ranks over all machines.
    pub processes: usize,
    /// True if ranks compute on CPUs.
    pub use_cpu: bool,
    /// Comma-separated names of mixture-of-experts layers, for Accelerate.
    pub moe_layers: Option<String>,
    /// Precision.
    pub precision: MixedPrecision,
}

impl Default for Answers {
    /// Returns stage 2 on two ranks of one machine, in fp32.
    fn default() -> Self {
        Self {
            deepspeed_config: None,
            stage: 2,
            offload_optimizer: None,
            offload_param: None,
            accumulation: 1,
            clipping: None,
            save_16bit: false,
            zero_init: false,
            machines: 1,
            machine_rank: 0,
            main_process: None,
            processes: 2,
            use_cpu: false,
            moe_layers: None,
            precision: MixedPrecision::No,
        }
    }
}

impl Answers {
    /// Asks all questions, in Accelerate's order and wording. The values of `self` are the defaults.
    ///
    /// # Errors
    ///
    /// [`Stopped`] if the user gives up.
    pub fn ask(mut self, ask: &mut dyn Ask) -> Result<Self, Stopped> {
        let defaults = self.clone();
        let machine =
            ask.choose("Which type of machine are you using?", &MACHINES, usize::from(!defaults.use_cpu) + 1)?;
        self.use_cpu = machine != 2;
        if machine > 0 {
            let question = "How many different machines will you use (use more than 1 for multi-node training)?";
            self.machines = ask.number(question, 1..=usize::MAX, defaults.machines)?;
        } else {
            let question = "Do you want to run your training on CPU only (even if a GPU / Apple Silicon / Ascend NPU device is available)?";
            self.use_cpu = ask.yes(question, defaults.use_cpu)?;
        }
        if self.machines > 1 {
            let ranks: Vec<String> = (0..self.machines).map(|rank| rank.to_string()).collect();
            let ranks: Vec<&str> = ranks.iter().map(String::as_str).collect();
            self.machine_rank = ask.choose("What is the rank of this machine?", &ranks, defaults.machine_rank)?;
            let question = "What is the IP address of the machine that will host the main process?";
            let address = ask.text(question, "localhost")?;
            let question = "What is the port you will use to communicate with the main process?";
            let port = ask.number(question, 1..=usize::from(u16::MAX), 29500)?;
            self.main_process = Some((address, port as u16));
        }
        let given = self.deepspeed_config.take();
        if ask.yes("Do you want to specify a json file to a DeepSpeed config?", given.is_some())? {
            let default = given.unwrap_or("ds_config.json".into());
            let question = "Please enter the path to the json DeepSpeed config file:";
            self.deepspeed_config = Some(ask.text(question, &default.display().to_string())?.into());
        } else {
            let question = "What should be your DeepSpeed's ZeRO optimization stage?";
            self.stage = ask.choose(question, &["0", "1", "2", "3"], usize::from(defaults.stage))? as u8;
            if self.stage >= 2 {
                let optimizer = ask.choose("Where to offload optimizer states?", &DEVICES, 0)?;
                let parameters = match self.stage {
                    3 => ask.choose("Where to offload parameters?", &DEVICES, 0)?,
                    _ => 0,
                };
                self.offload_param = place(ask, parameters, "Nvme Path to offload parameters?")?;
                self.offload_optimizer = place(ask, optimizer, "Nvme Path to offload optimizer states?")?;
            }
            let question = "How many gradient accumulation steps you're passing in your script?";
            self.accumulation = ask.number(question, 1..=usize::MAX, defaults.accumulation)?;
            if ask.yes("Do you want to use gradient clipping?", defaults.clipping.is_some())? {
                let norm = ask.fraction("What is the gradient clipping value?", defaults.clipping.unwrap_or(1.0))?;
                self.clipping = Some(norm);
            }
            if self.stage == 3 {
                let question = "Do you want to save 16-bit model weights when using ZeRO Stage-3?";
                self.save_16bit = ask.yes(question, defaults.save_16bit)?;
                let question = "Do you want to enable `deepspeed.zero.Init` when using ZeRO Stage-3 for constructing massive models?";
                self.zero_init = ask.yes(question, true)?;
            }
        }
        if ask.yes("Do you want to enable Mixture-of-Experts training (MoE)?", false)? {
            let question = "Specify the comma-separated list of transformers MoE layer class names (case-sensitive), e.g : \
                            `MixtralSparseMoeBlock`, `Qwen2MoeSparseMoeBlock`, `JetMoEAttention,JetMoEBlock` ...";
            self.moe_layers = Some(ask.text(question, "MixtralSparseMoeBlock")?);
        }
        if machine > 0 {
            let what = if self.use_cpu { "CPU(s)" } else { "GPU(s)" };
            let ranks = defaults.processes.max(self.machines);
            let question = format!("How many {what} should be used for distributed training?");
            self.processes = ask.number(&question, self.machines..=usize::MAX, ranks)?;
        } else {
            self.processes = 1;
        }
        // A DeepSpeed file sets this itself.
        if self.deepspeed_config.is_none() {
            self.precision =
                match ask.choose("Do you wish to use mixed precision?", &PRECISIONS, defaults.precision as usize)? {
                    1 => MixedPrecision::Fp16,
                    2 => MixedPrecision::Bf16,
                    _ => MixedPrecision::No,
                };
        }
        Ok(self)
    }

    /// Returns the file as Accelerate's own `accelerate config` writes it.
    pub fn to_yaml(&self) -> String {
        let Self { stage, accumulation, zero_init, save_16bit, machines, machine_rank, processes, use_cpu, .. } = self;
        let mut yaml = String::from("compute_environment: LOCAL_MACHINE\ndebug: false\ndeepspeed_config:\n");
        match &self.deepspeed_config {
            Some(path) => {
                let path = quoted(&path.display().to_string());
                yaml += &format!("  deepspeed_config_file: {path}\n");
                yaml += &self.moe_line();
                yaml += &format!("  zero3_init_flag: {zero_init}\n");
            }
            None => {
                yaml += &self.moe_line();
                // 0 is DeepSpeed's "no clipping"; a missing key means 1.
                let clipping = self.clipping.unwrap_or(0.0);
                yaml += &format!("  gradient_accumulation_steps: {accumulation}\n  gradient_clipping: {clipping:?}\n");
                for (what, place) in [("optimizer", &self.offload_optimizer), ("param", &self.offload_param)] {
                    let device = match place {
                        None => DEVICES[0],
                        Some(OffloadDevice::Cpu) => DEVICES[1],
                        Some(OffloadDevice::Nvme { .. }) => DEVICES[2],
                    };
                    yaml += &format!("  offload_{what}_device: {device}\n");
                    if let Some(OffloadDevice::Nvme { path }) = place {
                        yaml += &format!("  offload_{what}_nvme_path: {}\n", quoted(&path.display().to_string()));
                    }
                }
                yaml += &format!("  zero3_init_flag: {zero_init}\n");
                if *stage == 3 {
                    yaml += &format!("  zero3_save_16bit_model: {save_16bit}\n");
                }
                yaml += &format!("  zero_stage: {stage}\n");
            }
        }
        yaml += &format!("distributed_type: DEEPSPEED\ndowncast_bf16: 'no'\nmachine_rank: {machine_rank}\n");
        if let Some((address, port)) = &self.main_process {
            yaml += &format!("main_process_ip: {}\nmain_process_port: {port}\n", quoted(address));
        }
        yaml += "main_training_function: main\n";
        if self.deepspeed_config.is_none() {
            yaml += &format!("mixed_precision: {}\n", quoted(PRECISIONS[self.precision as usize]));
        }
        yaml += &format!("num_machines: {machines}\nnum_processes: {processes}\n");
        yaml + "rdzv_backend: static\nsame_network: true\n" + &format!("use_cpu: {use_cpu}\n")
    }

    fn moe_line(&self) -> String {
        let line = |layers: &String| format!("  deepspeed_moe_layer_cls_names: {}\n", quoted(layers));
        self.moe_layers.as_ref().map_or(String::new(), line)
    }
}

/// Converts an index into [`DEVICES`]; asks for the folder if there is one.
fn place(ask: &mut dyn Ask, device: usize, question: &str) -> Result<Option<OffloadDevice>, Stopped> {
    Ok(match device {
        1 => Some(OffloadDevice::Cpu),
        2 => Some(OffloadDevice::Nvme { path: ask.text(question, "/nvme")?.into() }),
        _ => None,
    })
}

/// Quotes text so that YAML reads it unchanged.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_train::config::{Auto, Config, Context, Format};

    /// Answers from a list; what was asked is kept.
    struct Script {
        answers: Vec<&'static str>,
        asked: Vec<String>,
    }

    impl Script {
        fn next(&mut self, question: &str) -> Result<&'static str, Stopped> {
            self.asked.push(question.into());
            if self.answers.is_empty() { Err(Stopped(question.into())) } else { Ok(self.answers.remove(0)) }
        }
    }

    impl Ask for Script {
        fn choose(&mut self, question: &str, options: &[&str], _default: usize) -> Result<usize, Stopped> {
            let answer = self.next(question)?;
            Ok(options.iter().position(|option| option.starts_with(answer)).expect("an option"))
        }

        fn yes(&mut self, question: &str, _default: bool) -> Result<bool, Stopped> {
            Ok(self.next(question)? == "yes")
        }

        fn number(&mut self, question: &str, range: RangeInclusive<usize>, _default: usize) -> Result<usize, Stopped> {
            let number = self.next(question)?.parse().unwrap();
            // A terminal asks again.
            if range.contains(&number) { Ok(number) } else { Err(Stopped(format!("{number} of {range:?}"))) }
        }

        fn fraction(&mut self, question: &str, _default: f64) -> Result<f64, Stopped> {
            Ok(self.next(question)?.parse().unwrap())
        }

        fn text(&mut self, question: &str, _default: &str) -> Result<String, Stopped> {
            Ok(self.next(question)?.into())
        }
    }

    fn answered(answers: &[&'static str]) -> (Answers, Vec<String>) {
        let mut script = Script { answers: answers.to_vec(), asked: Vec::new() };
        let answers = Answers::default().ask(&mut script).unwrap();
        assert!(script.answers.is_empty(), "not asked for: {:?}", script.answers);
        (answers, script.asked)
    }

    #[test]
    fn the_whole_of_stage_3() {
        let (answers, asked) = answered(&[
            "multi-GPU",
            "1",
            "no",
            "3",
            "cpu",
            "nvme",
            "/fast's disk",
            "4",
            "yes",
            "0.5",
            "yes",
            "yes",
            "no",
            "8",
            "bf16",
        ]);
        assert_eq!(asked.len(), 15);
        assert!(asked.iter().any(|question| question.starts_with("How many GPU(s)")), "{asked:?}");
        let yaml = answers.to_yaml();
        insta::assert_snapshot!(yaml, @r"
        compute_environment: LOCAL_MACHINE
        debug: false
        deepspeed_config:
          gradient_accumulation_steps: 4
          gradient_clipping: 0.5
          offload_optimizer_device: cpu
          offload_param_device: nvme
          offload_param_nvme_path: '/fast''s disk'
          zero3_init_flag: true
          zero3_save_16bit_model: true
          zero_stage: 3
        distributed_type: DEEPSPEED
        downcast_bf16: 'no'
        machine_rank: 0
        main_training_function: main
        mixed_precision: 'bf16'
        num_machines: 1
        num_processes: 8
        rdzv_backend: static
        same_network: true
        use_cpu: false
        ");
        let config = Config::from_text("wizard.yaml", Format::Yaml, &yaml).unwrap();
        let auto = Auto { micro_batch: Some(1), ..Auto::default() };
        let plan = config.resolve(&Context { auto, ..Context::default() }).unwrap();
        assert_eq!((plan.world, plan.batch.accumulation, plan.gradient_clipping), (8, 4, Some(0.5)));
    }

    #[test]
    fn lower_stages_ask_less() {
        let (answers, asked) = answered(&["multi-CPU", "1", "no", "1", "1", "no", "no", "2", "no"]);
        assert_eq!(answers, Answers { stage: 1, use_cpu: true, ..Answers::default() });
        assert!(asked.iter().all(|question| !question.contains("offload")), "{asked:?}");
        assert!(asked.contains(&"How many CPU(s) should be used for distributed training?".to_string()), "{asked:?}");
        assert!(answers.to_yaml().ends_with("use_cpu: true\n"));
        let config = Config::from_text("wizard.yaml", Format::Yaml, &answers.to_yaml()).unwrap();
        let auto = Auto { micro_batch: Some(1), ..Auto::default() };
        let plan = config.resolve(&Context { auto, ..Context::default() }).unwrap();
        assert_eq!(plan.gradient_clipping, None);
        assert_eq!(plan.warnings, []);
    }

    #[test]
    fn several_machines_and_a_file() {
        let (answers, _) = answered(&["multi-GPU", "2", "1", "10.0.0.1", "4242", "yes", "ds.json", "no", "4"]);
        let yaml = answers.to_yaml();
        for line in [
            "  deepspeed_config_file: 'ds.json'",
            "machine_rank: 1",
            "main_process_ip: '10.0.0.1'",
            "main_process_port: 4242",
            "num_machines: 2",
        ] {
            assert!(yaml.lines().any(|got| got == line), "{line} in\n{yaml}");
        }
        // Accelerate refuses it beside a file.
        assert!(!yaml.contains("mixed_precision"));
    }

    #[test]
    fn a_file_given_by_flag_is_asked_about_and_can_be_left() {
        let given = Answers { deepspeed_config: Some("ds.json".into()), ..Answers::default() };
        let mut script =
            Script { answers: vec!["multi-GPU", "1", "no", "1", "1", "no", "no", "2", "no"], asked: Vec::new() };
        let answers = given.ask(&mut script).unwrap();
        assert_eq!(answers.deepspeed_config, None);
        assert!(!answers.to_yaml().contains("deepspeed_config_file"));
    }

    #[test]
    fn a_port_is_none_beyond_65535() {
        let mut script = Script { answers: vec!["multi-GPU", "2", "1", "10.0.0.1", "70000"], asked: Vec::new() };
        let stopped = Answers::default().ask(&mut script).unwrap_err();
        assert!(stopped.to_string().contains("70000 of 1..=65535"), "{stopped}");
    }

    #[test]
    fn with_a_file_the_precision_is_not_asked_for() {
        let (answers, asked) = answered(&["multi-GPU", "1", "yes", "ds.json", "no", "4"]);
        assert!(asked.iter().all(|question| !question.contains("precision")), "{asked:?}");
        assert!(answers.to_yaml().contains("deepspeed_config_file: 'ds.json'"));
    }

    #[test]
    fn one_process_and_layers_with_experts() {
        let (answers, _) = answered(&["No", "yes", "no", "2", "none", "1", "no", "yes", "MixtralSparseMoeBlock", "no"]);
        let yaml = answers.to_yaml();
        assert!(yaml.contains("num_processes: 1\n") && yaml.contains("use_cpu: true\n"), "{yaml}");
        assert!(yaml.contains("  deepspeed_moe_layer_cls_names: 'MixtralSparseMoeBlock'\n"), "{yaml}");
        Config::from_text("wizard.yaml", Format::Yaml, &yaml).unwrap();
    }

    #[test]
    fn giving_up_writes_nothing() {
        let mut script = Script { answers: vec!["multi-CPU", "1", "no"], asked: Vec::new() };
        let stopped = Answers::default().ask(&mut script).unwrap_err();
        assert_eq!(
            stopped.to_string(),
            "stopped before the last question (What should be your DeepSpeed's ZeRO optimization stage?); nothing was written"
        );
    }
}
