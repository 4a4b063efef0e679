//! `Zero<B>` forwards every operation of Burn's operation traits, those with a default body too: a default body that
//! stood in for a kernel of `B` would be correct and slow, and nothing else would show it.
//!
//! The first half reads the sources: Burn's traits as cargo has them, and ours. The second half runs a sample of what
//! Flex overrides, and compares bits with bare Flex.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions, InterpolateMode, InterpolateOptions,
    TransactionPrimitive, UnfoldOptions,
};
use burn_backend::quantization::{QuantScheme, QuantStore, QuantValue};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorData, try_read_sync};
use burn_flex::Flex;
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};
use zero_burn::config::ZeroConfig;
use zero_burn::launch::{LaunchOptions, launch};
use zero_burn::{Zero, ZeroDevice};
use zero_core::Stage;

// ---- the sources ----

/// One of Burn's traits, where it stands, and how many methods without and with a body it has.
struct Trait {
    name: &'static str,
    burn: &'static str,
    ours: &'static str,
    required: usize,
    default: usize,
}

const fn operations(
    name: &'static str,
    burn: &'static str,
    ours: &'static str,
    required: usize,
    default: usize,
) -> Trait {
    Trait { name, burn, ours, required, default }
}

/// The counts are those of docs/DESIGN.md; a new release of Burn that changes them is looked at, not waved through.
const TRAITS: [Trait; 9] = [
    operations("FloatTensorOps", "ops/tensor.rs", "ops/float.rs", 80, 44),
    operations("IntTensorOps", "ops/int_tensor.rs", "ops/int.rs", 67, 37),
    operations("BoolTensorOps", "ops/bool_tensor.rs", "ops/bool.rs", 28, 11),
    operations("QTensorOps", "ops/qtensor.rs", "ops/quantized.rs", 13, 67),
    operations("ModuleOps", "ops/modules/base.rs", "ops/module.rs", 18, 38),
    operations("ActivationOps", "ops/activation.rs", "ops/activation.rs", 0, 14),
    operations("TransactionOps", "ops/transaction.rs", "ops/transaction.rs", 0, 1),
    operations("Backend", "base.rs", "backend.rs", 4, 6),
    operations("DistributedBackend", "distributed/ops.rs", "backend.rs", 0, 9),
];

/// Methods whose default body is left standing, and why that replaces no kernel.
const KEPT_DEFAULTS: [(&str, &str); 2] =
    [("comm_device", "the default asks our own float_device"), ("float_from_ref", "the default clones our own handle")];

/// Written-out functions that hand `B`'s operation of the same name over in `crate::elementwise`.
const DELEGATED: [&str; 4] = ["float_cast", "float_mask_where", "float_mask_fill", "float_sum"];

/// Written-out functions that never call `B`'s operation of the same name, and why.
const INTERCEPTED: [(&str, &str); 9] = [
    ("float_random", "drawn by the rank's own generator: B's is one per process and ranks would race for it"),
    ("int_random", "as float_random"),
    ("start_communication_server", "Burn's server is not used"),
    ("close_communication_server", "Burn's server is not used"),
    ("register_sync_parameters", "a backward pass begins: handed to the reducer"),
    ("submit_sync_collective", "a backward pass ends: the rank waits for its reductions"),
    ("submit_gradient_sync", "a gradient is handed to the reducer"),
    ("all_reduce", "through the rank's own communicator; B need not be a DistributedBackend"),
    ("sync_collective", "our all_reduce has already waited"),
];

/// burn-backend's `src/backend` as cargo has it here.
fn burn_sources() -> &'static Path {
    static SOURCES: OnceLock<PathBuf> = OnceLock::new();
    SOURCES.get_or_init(|| {
        let output = |program: &str, arguments: &[&str]| {
            let output = Command::new(program)
                .args(arguments)
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .output()
                .unwrap_or_else(|error| panic!("{program} could not be started: {error}"));
            assert!(
                output.status.success(),
                "this test reads burn-backend's sources, and `{program} {}` does not tell where they are (run `cargo \
                 fetch` once while online):\n{}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr)
            );
            String::from_utf8(output.stdout).expect("cargo and rustc write UTF-8")
        };
        let program = |variable: &str, fallback: &str| std::env::var(variable).unwrap_or_else(|_| fallback.to_string());
        // Without a platform cargo asks for the sources of every platform's dependencies.
        let host = output(&program("RUSTC", "rustc"), &["--print", "host-tuple"]);
        let arguments = ["metadata", "--offline", "--format-version", "1", "--filter-platform", host.trim()];
        let metadata: serde_json::Value =
            serde_json::from_str(&output(&program("CARGO", "cargo"), &arguments)).expect("cargo metadata gives JSON");
        let package = metadata["packages"]
            .as_array()
            .expect("cargo metadata lists packages")
            .iter()
            .find(|package| package["name"] == "burn-backend" && package["version"] == "0.21.0")
            .expect("zero-burn depends on burn-backend 0.21.0");
        let manifest = Path::new(package["manifest_path"].as_str().expect("a package has a manifest"));
        let sources = manifest.with_file_name("src").join("backend");
        assert!(sources.is_dir(), "burn-backend's sources are not at {}", sources.display());
        sources
    })
}

fn read(path: PathBuf) -> String {
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    strip(&text)
}

fn burn_text(of: &Trait) -> String {
    read(burn_sources().join(of.burn))
}

fn our_text(path: &str) -> String {
    read(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(path))
}

/// The text without comments and without what stands in string and character literals.
fn strip(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if rest.starts_with("//") {
            rest = rest.find('\n').map_or("", |end| &rest[end..]);
        } else if rest.starts_with("/*") {
            let (mut depth, mut at) = (0usize, 0usize);
            loop {
                if rest[at..].starts_with("/*") {
                    (depth, at) = (depth + 1, at + 2);
                } else if rest[at..].starts_with("*/") {
                    (depth, at) = (depth - 1, at + 2);
                } else {
                    at += rest[at..].chars().next().expect("a block comment is closed").len_utf8();
                }
                if depth == 0 {
                    break;
                }
            }
            rest = &rest[at..];
        } else if c == '"' {
            let mut escaped = false;
            let end = rest[1..].find(|c| {
                let closes = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                closes
            });
            out.push_str("\"\"");
            rest = &rest[end.expect("a string literal is closed") + 2..];
        } else if c == '\'' && rest.chars().nth(2) == Some('\'') {
            // A character; a lifetime has no closing quote.
            out.push_str("' '");
            rest = &rest[2 + rest.chars().nth(1).expect("a character between quotes").len_utf8()..];
        } else {
            out.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    out
}

#[derive(Debug, Clone, PartialEq)]
struct Method {
    name: String,
    /// The body, when there is one.
    body: Option<String>,
}

/// What stands directly in a trait or an implementation.
#[derive(Debug, Default)]
struct Items {
    methods: Vec<Method>,
    /// Macro calls: the macro's name and the methods in it.
    calls: Vec<(String, Vec<Method>)>,
}

impl Items {
    fn names(&self) -> BTreeSet<String> {
        let called = self.calls.iter().flat_map(|(_, methods)| methods);
        self.methods.iter().chain(called).map(|method| method.name.clone()).collect()
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The text between the brace at the start of `text` and its partner.
fn braced(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[1..at];
        }
    }
    panic!("a brace is not closed: {}", &text[..text.len().min(80)]);
}

/// The methods and macro calls directly in `body`, which is stripped of comments.
fn items(body: &str) -> Items {
    let mut items = Items::default();
    // The method whose signature is being read, the nesting of parentheses and brackets (`[usize; 2]`), the last word.
    let (mut open, mut nesting, mut word) = (None::<String>, 0usize, String::new());
    let mut at = 0;
    while let Some(c) = body[at..].chars().next() {
        if is_word(c) {
            let end = body[at..].find(|c| !is_word(c)).map_or(body.len(), |len| at + len);
            let previous = std::mem::replace(&mut word, body[at..end].to_string());
            if previous == "fn" && nesting == 0 && open.is_none() {
                open = Some(word.clone());
            }
            at = end;
            continue;
        }
        at += c.len_utf8();
        match c {
            '(' | '[' => nesting += 1,
            ')' | ']' => nesting -= 1,
            ';' if nesting == 0 => {
                items.methods.extend(open.take().map(|name| Method { name, body: None }));
            }
            '{' if nesting == 0 => {
                let inner = braced(&body[at - 1..]);
                at += inner.len() + 1;
                match (open.take(), word.strip_suffix('!')) {
                    (Some(name), _) => items.methods.push(Method { name, body: Some(inner.to_string()) }),
                    (None, Some(name)) => items.calls.push((name.to_string(), self::items(inner).methods)),
                    (None, None) => {}
                }
            }
            '!' => word.push('!'),
            _ => {}
        }
        if !c.is_whitespace() && c != '!' {
            word.clear();
        }
    }
    items
}

/// What stands in the one block of `text` whose header `is_header` accepts.
fn block(text: &str, is_header: impl Fn(&str) -> bool) -> Option<Items> {
    let mut begin = 0;
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        at += c.len_utf8();
        match c {
            ';' => begin = at,
            '{' => {
                let inner = braced(&text[at - 1..]);
                let header: Vec<&str> = text[begin..at - 1].split_whitespace().collect();
                if is_header(&header.join(" ")) {
                    return Some(items(inner));
                }
                at += inner.len() + 1;
                begin = at;
            }
            _ => {}
        }
    }
    None
}

fn declared(of: &Trait, text: &str) -> Items {
    let declaration = format!("trait {}", of.name);
    block(text, |header| {
        header.split_once(&declaration).is_some_and(|(_, rest)| !rest.starts_with(is_word) && header.contains("pub "))
    })
    .unwrap_or_else(|| panic!("{} declares no trait {}", of.burn, of.name))
}

fn implemented(of: &Trait, text: &str) -> Items {
    block(text, |header| {
        [format!("> {}<Self> for Zero<B>", of.name), format!("> {} for Zero<B>", of.name)]
            .iter()
            .any(|implementation| header.ends_with(implementation.as_str()))
    })
    .unwrap_or_else(|| panic!("{} implements no {} for Zero<B>", of.ours, of.name))
}

/// What `ours` lacks of `burns`, and what it has beyond it.
fn differences(burns: &BTreeSet<String>, ours: &BTreeSet<String>) -> Vec<String> {
    let missing = burns.difference(ours).map(|name| format!("{name} is not forwarded"));
    missing.chain(ours.difference(burns).map(|name| format!("{name} is not Burn's"))).collect()
}

/// Whether `text` names `B::name`.
fn calls_inner(text: &str, name: &str) -> bool {
    let call = format!("B::{name}");
    text.match_indices(&call).any(|(at, _)| {
        !text[..at].ends_with(|c| is_word(c) || c == ':') && !text[at + call.len()..].starts_with(is_word)
    })
}

/// Written-out functions of `items` that do not do what their list says.
fn strays(items: &Items, elementwise: &str) -> Vec<String> {
    let mut strays = Vec::new();
    for Method { name, body } in &items.methods {
        let body = body.as_deref().expect("a function of an implementation has a body");
        let delegated = DELEGATED.contains(&name.as_str());
        let intercepted = INTERCEPTED.iter().any(|(intercepted, _)| intercepted == name);
        let through = body.contains("elementwise::") && calls_inner(elementwise, name);
        match (delegated, intercepted, calls_inner(body, name)) {
            (false, false, false) => strays.push(format!("{name} does not call B::{name} and is in no list")),
            (true, _, false) if !through => strays.push(format!("{name} does not reach B::{name} by elementwise")),
            (true, _, true) | (_, true, true) => {
                strays.push(format!("{name} calls B::{name}: its list is out of date"))
            }
            _ => {}
        }
    }
    strays
}

#[test]
fn every_operation_is_forwarded() {
    for of in &TRAITS {
        let burns = declared(of, &burn_text(of)).names();
        let mut ours = implemented(of, &our_text(of.ours)).names();
        if of.name == "DistributedBackend" {
            for (name, reason) in KEPT_DEFAULTS {
                assert!(ours.insert(name.to_string()), "{name} is written out, but listed as kept: {reason}");
            }
        }
        assert_eq!(differences(&burns, &ours), [""; 0], "{}", of.name);
    }
}

#[test]
fn counts_are_those_of_the_design() {
    for of in &TRAITS {
        let items = declared(of, &burn_text(of));
        assert!(items.calls.is_empty(), "{} makes methods by macros, which the scanner does not see", of.name);
        let required = items.methods.iter().filter(|method| method.body.is_none()).count();
        assert_eq!((required, items.methods.len() - required), (of.required, of.default), "{}", of.name);
    }
}

#[test]
fn written_out_operations_call_the_inner_one_or_are_listed() {
    let elementwise = our_text("elementwise.rs");
    let mut seen = BTreeSet::new();
    for of in &TRAITS {
        let items = implemented(of, &our_text(of.ours));
        assert_eq!(strays(&items, &elementwise), [""; 0], "{}", of.name);
        seen.extend(items.methods.into_iter().map(|method| method.name));
    }
    let listed = DELEGATED.iter().copied().chain(INTERCEPTED.map(|(name, _)| name));
    for name in listed {
        assert!(seen.contains(name), "{name} is listed, but not written out");
    }
}

#[test]
fn macros_call_the_inner_operation_of_the_same_name() {
    let text = our_text("ops/mod.rs");
    let mut bodies = BTreeMap::new();
    for (at, _) in text.match_indices("macro_rules! ") {
        let rest = &text[at + "macro_rules! ".len()..];
        let brace = rest.find('{').expect("a macro has a body");
        bodies.insert(rest[..brace].trim(), braced(&rest[brace..]));
    }
    for of in &TRAITS {
        for (name, methods) in implemented(of, &our_text(of.ours)).calls {
            let body = bodies.get(name.as_str()).unwrap_or_else(|| panic!("{name}! is not in ops/mod.rs"));
            assert_eq!(body.matches("fn $name(").count(), 1, "{name}!");
            assert_eq!(body.matches("B::$name").count(), 1, "{name}!");
            assert!(methods.iter().all(|method| method.body.is_none()), "{name}! holds a written-out function");
        }
    }
}

#[test]
fn the_scanner_reads_what_rust_reads() {
    let text = strip(
        r##"
        /* a /* nested */ fn comment() {} */
        pub trait OtherOps<B> { fn other(); }
        /// fn doc();
        pub trait SomeOps<B: Backend>: Sized {
            const NAME: &'static str = "fn quoted() { \" }";
            type Output;
            fn required(sizes: [usize; 2], f: impl Fn(usize) -> [u8; 3]); // fn trailing();
            #[inline(always)]
            fn defaulted<'a, F: Fn() + Send>(c: char) -> bool where F: Clone {
                fn inner() {}
                if c == '{' { B::defaulted(c); }
                true
            }
            /// A macro's.
            forward! { fn called(x: float) -> float; fn called_too(y: ([usize; 2])) -> int; }
            unsafe fn last();
        }
        "##,
    );
    let items = block(&text, |header| header.contains("trait SomeOps")).unwrap();
    let names: Vec<&str> = items.methods.iter().map(|method| method.name.as_str()).collect();
    assert_eq!(names, ["required", "defaulted", "last"]);
    assert_eq!(items.methods.iter().map(|m| m.body.is_some()).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(items.calls.len(), 1);
    assert_eq!(items.calls[0].0, "forward");
    assert_eq!(items.calls[0].1.iter().map(|m| m.name.as_str()).collect::<Vec<_>>(), ["called", "called_too"]);
    assert!(calls_inner("let y = B::float_max(x);", "float_max"));
    assert!(!calls_inner("let y = B::float_max_abs(x);", "float_max"));
    assert!(!calls_inner("let y = A::B::float_max(x);", "float_max"));
}

/// What the tests above rest on: take one operation away, and they say so.
#[test]
fn a_missing_operation_is_reported() {
    let of = &TRAITS[0];
    let (burns, text) = (declared(of, &burn_text(of)).names(), our_text(of.ours));
    // One line of a macro call, one written-out function, one of Burn's side.
    let without_line = text.replace("fn float_sort(tensor: float, dim: (usize), descending: (bool)) -> float;", "");
    assert_ne!(text, without_line);
    assert_eq!(differences(&burns, &implemented(of, &without_line).names()), ["float_sort is not forwarded"]);
    let renamed = text.replace("fn float_slice(", "fn float_slices(");
    assert_eq!(
        differences(&burns, &implemented(of, &renamed).names()),
        ["float_slice is not forwarded", "float_slices is not Burn's"]
    );
    let mut fewer = burns.clone();
    assert!(fewer.remove("float_unfold"));
    assert_eq!(differences(&fewer, &implemented(of, &text).names()), ["float_unfold is not Burn's"]);

    let elementwise = our_text("elementwise.rs");
    let detoured = text.replace("B::float_permute(", "permute_by_hand(");
    assert_eq!(
        strays(&implemented(of, &detoured), &elementwise),
        ["float_permute does not call B::float_permute and is in no list"]
    );
    let undelegated = elementwise.replace("B::float_sum", "sum_by_hand");
    assert_eq!(strays(&implemented(of, &text), &undelegated), ["float_sum does not reach B::float_sum by elementwise"]);
}

// ---- the behaviour ----

/// Numbers that are the same everywhere, of both signs, without ties.
fn numbers(len: usize, salt: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + salt * 104_729 + 13) % 10_007) as f32 / 2_503.0 - 1.9).collect()
}

fn floats<B: Backend>(shape: impl Into<Shape>, salt: usize, device: &B::Device) -> FloatTensor<B> {
    let shape = shape.into();
    B::float_from_data(TensorData::new(numbers(shape.num_elements(), salt), shape), device)
}

/// As [`floats`], as a module's parameter: on [`Zero`] a shard, and at stage 3 one that has to be gathered.
fn weights<B: Backend>(shape: impl Into<Shape>, salt: usize, device: &B::Device) -> FloatTensor<B> {
    let shape = shape.into();
    B::memory_persistent_allocations(device, shape, |shape| floats::<B>(shape, salt, device))
}

fn ints<B: Backend>(values: &[i64], shape: impl Into<Shape>, device: &B::Device) -> IntTensor<B> {
    B::int_from_data(TensorData::new(values.to_vec(), shape.into()).convert::<B::IntElem>(), device)
}

struct Sample<B: Backend>(Vec<(&'static str, TensorData)>, std::marker::PhantomData<B>);

impl<B: Backend> Sample<B> {
    fn float(&mut self, name: &'static str, tensor: FloatTensor<B>) {
        let data = try_read_sync(B::float_into_data(tensor)).expect("CPU backends read synchronously").unwrap();
        self.0.push((name, data));
    }

    fn int(&mut self, name: &'static str, tensor: IntTensor<B>) {
        let data = try_read_sync(B::int_into_data(tensor)).expect("CPU backends read synchronously").unwrap();
        self.0.push((name, data));
    }

    fn bool(&mut self, name: &'static str, tensor: BoolTensor<B>) {
        let data = try_read_sync(B::bool_into_data(tensor)).expect("CPU backends read synchronously").unwrap();
        self.0.push((name, data));
    }
}

/// The results of operations that Flex has kernels of its own for, on fixed data.
fn sample<B: Backend>(device: &B::Device) -> Vec<(&'static str, TensorData)> {
    let mut out = Sample::<B>(Vec::new(), std::marker::PhantomData);
    let f = |shape: &[usize], salt| floats::<B>(Shape::from(shape.to_vec()), salt, device);
    let w = |shape: &[usize], salt| weights::<B>(Shape::from(shape.to_vec()), salt, device);
    let (native, i64_) = (BoolDType::Native, IntDType::I64);
    let mask = || B::float_greater_elem(f(&[5, 37], 3), 0f32.into(), native);

    // Activations.
    out.float("softmax", B::softmax(f(&[5, 37], 1), 1));
    out.float("softmax of another dimension", B::softmax(f(&[5, 37], 1), 0));
    out.float("log_softmax", B::log_softmax(f(&[5, 37], 1), 1));
    out.float("softmin", B::softmin(f(&[5, 37], 1), 1));
    out.float("relu", B::relu(f(&[5, 37], 1)));
    out.float("relu_backward", B::relu_backward(f(&[5, 37], 1), f(&[5, 37], 2)));
    out.float("gelu", B::gelu(f(&[5, 37], 1)));
    out.float("gelu_backward", B::gelu_backward(f(&[5, 37], 1), f(&[5, 37], 2)));
    out.float("sigmoid", B::sigmoid(f(&[5, 37], 1)));
    out.float("sigmoid_backward", B::sigmoid_backward(f(&[5, 37], 1), f(&[5, 37], 2)));
    out.float("log_sigmoid", B::log_sigmoid(f(&[5, 37], 1)));
    out.float("leaky_relu", B::leaky_relu(f(&[5, 37], 1), 0.1f32.into()));
    out.float("hard_sigmoid", B::hard_sigmoid(f(&[5, 37], 1), 0.2f32.into(), 0.5f32.into()));
    out.float("prelu", B::prelu(f(&[5, 37], 1), f(&[5, 37], 2)));

    // Modules, on parameters.
    out.float("linear", B::linear(f(&[2, 6, 10], 1), w(&[10, 7], 2), Some(w(&[7], 3))));
    out.float("linear_x_backward", B::linear_x_backward(w(&[10, 7], 2), f(&[2, 6, 7], 1)));
    out.float("linear_weight_backward", B::linear_weight_backward(f(&[2, 6, 10], 1), f(&[2, 6, 7], 2)));
    out.float("linear_bias_backward", B::linear_bias_backward(f(&[2, 6, 7], 2)));
    let indices = || ints::<B>(&[0, 3, 10, 3, 5, 0], [2, 3], device);
    out.float("embedding", B::embedding(w(&[11, 6], 1), indices()));
    out.float("embedding_backward", B::embedding_backward(w(&[11, 6], 1), f(&[2, 3, 6], 2), indices()));
    out.float("layer_norm", B::layer_norm(f(&[5, 37], 1), w(&[37], 2), Some(w(&[37], 3)), 1e-5));
    out.float("layer_norm without beta", B::layer_norm(f(&[5, 37], 1), w(&[37], 2), None, 1e-5));
    for (name, is_causal) in [("attention", false), ("causal attention", true)] {
        let qkv = |salt| f(&[2, 3, 9, 8], salt);
        let options = AttentionModuleOptions { is_causal, ..Default::default() };
        out.float(name, B::attention(qkv(1), qkv(2), qkv(3), None, None, options));
    }
    let bias = Some(f(&[2, 3, 9, 9], 4));
    let options = AttentionModuleOptions { scale: Some(0.3), ..Default::default() };
    let attention = B::attention(f(&[2, 3, 9, 8], 1), f(&[2, 3, 9, 8], 2), f(&[2, 3, 9, 8], 3), None, bias, options);
    out.float("attention with a bias", attention);
    let one = || ConvOptions::new([2], [1], [1], 1);
    out.float("conv1d", B::conv1d(f(&[2, 3, 12], 1), w(&[4, 3, 3], 2), Some(w(&[4], 3)), one()));
    out.float("conv1d_x_backward", B::conv1d_x_backward(f(&[2, 3, 12], 1), w(&[4, 3, 3], 2), f(&[2, 4, 6], 3), one()));
    let backward = B::conv1d_weight_backward(f(&[2, 3, 12], 1), w(&[4, 3, 3], 2), f(&[2, 4, 6], 3), one());
    out.float("conv1d_weight_backward", backward);
    out.float("conv1d_bias_backward", B::conv1d_bias_backward(f(&[2, 3, 12], 1), w(&[4], 2), f(&[2, 4, 6], 3)));
    for (name, groups) in [("one group", 1), ("two groups", 2)] {
        let two = || ConvOptions::new([1, 2], [1, 0], [1, 1], groups);
        let kernel = || w(&[6, 4 / groups, 3, 3], 2);
        let forward = B::conv2d(f(&[2, 4, 8, 9], 1), kernel(), Some(w(&[6], 3)), two());
        out.float(name, forward);
        out.float(name, B::conv2d_x_backward(f(&[2, 4, 8, 9], 1), kernel(), f(&[2, 6, 8, 4], 3), two()));
        out.float(name, B::conv2d_weight_backward(f(&[2, 4, 8, 9], 1), kernel(), f(&[2, 6, 8, 4], 3), two()));
        out.float(name, B::conv2d_bias_backward(f(&[2, 4, 8, 9], 1), w(&[6], 2), f(&[2, 6, 8, 4], 3)));
    }
    let three = || ConvOptions::new([1; 3], [0; 3], [1; 3], 1);
    out.float("conv3d", B::conv3d(f(&[1, 2, 4, 5, 4], 1), w(&[3, 2, 2, 2, 2], 2), Some(w(&[3], 3)), three()));
    let grad = || f(&[1, 3, 3, 4, 3], 3);
    let backward = B::conv3d_weight_backward(f(&[1, 2, 4, 5, 4], 1), w(&[3, 2, 2, 2, 2], 2), grad(), three());
    out.float("conv3d_weight_backward", backward);
    let up = || ConvTransposeOptions::new([2, 2], [1, 1], [1, 1], [1, 1], 1);
    out.float(
        "conv_transpose2d",
        B::conv_transpose2d(f(&[1, 3, 4, 4], 1), w(&[3, 2, 3, 3], 2), Some(w(&[2], 3)), up()),
    );
    let grad = || f(&[1, 2, 8, 8], 3);
    let backward = B::conv_transpose2d_weight_backward(f(&[1, 3, 4, 4], 1), w(&[3, 2, 3, 3], 2), grad(), up());
    out.float("conv_transpose2d_weight_backward", backward);
    out.float("conv_transpose2d_x_backward", B::conv_transpose2d_x_backward(w(&[3, 2, 3, 3], 2), grad(), up()));
    out.float(
        "conv_transpose2d_bias_backward",
        B::conv_transpose2d_bias_backward(f(&[1, 3, 4, 4], 1), w(&[2], 2), grad()),
    );
    let deform = || DeformConvOptions::new([1, 1], [1, 1], [1, 1], 1, 1);
    let (x, offset, kernel) = (|| f(&[1, 2, 5, 5], 1), || f(&[1, 18, 5, 5], 2), || w(&[3, 2, 3, 3], 3));
    out.float("deform_conv2d", B::deform_conv2d(x(), offset(), kernel(), None, Some(w(&[3], 4)), deform()));
    let grads =
        B::deform_conv2d_backward(x(), offset(), kernel(), None, Some(w(&[3], 4)), f(&[1, 3, 5, 5], 5), deform());
    out.float("deform_conv2d_backward, x", grads.x_grad);
    out.float("deform_conv2d_backward, offset", grads.offset_grad);
    out.float("deform_conv2d_backward, weight", grads.weight_grad);
    out.float("deform_conv2d_backward, bias", grads.bias_grad.expect("a bias was given"));
    let image = || f(&[2, 3, 7, 8], 1);
    out.float("max_pool1d", B::max_pool1d(f(&[2, 3, 11], 1), 3, 2, 1, 1, false));
    out.float("max_pool2d", B::max_pool2d(image(), [2, 3], [2, 2], [1, 1], [1, 1], true));
    let pooled = B::max_pool2d_with_indices(image(), [2, 3], [2, 2], [1, 1], [1, 1], false);
    let grad = B::float_mul_scalar(pooled.output.clone(), 0.5f32.into());
    out.float("max_pool2d_with_indices", pooled.output);
    out.int("max_pool2d_with_indices, indices", pooled.indices.clone());
    let backward =
        B::max_pool2d_with_indices_backward(image(), [2, 3], [2, 2], [1, 1], [1, 1], false, grad, pooled.indices);
    out.float("max_pool2d_with_indices_backward", backward.x_grad);
    out.float("avg_pool2d", B::avg_pool2d(image(), [3, 2], [2, 1], [1, 1], false, false));
    out.float("adaptive_avg_pool2d", B::adaptive_avg_pool2d(image(), [3, 5]));
    out.float("adaptive_avg_pool2d_backward", B::adaptive_avg_pool2d_backward(image(), f(&[2, 3, 3, 5], 2)));
    for mode in [InterpolateMode::Nearest, InterpolateMode::Bilinear, InterpolateMode::Bicubic] {
        out.float("interpolate", B::interpolate(image(), [10, 5], InterpolateOptions::new(mode)));
    }
    out.float("unfold4d", B::unfold4d(image(), [2, 2], UnfoldOptions::new([1, 2], [1, 0], [1, 1])));
    let (re, im) = B::rfft(f(&[3, 16], 1), 1, None);
    out.float("rfft, real", re.clone());
    out.float("rfft, imaginary", im.clone());
    out.float("irfft", B::irfft(re, im, 1, None));

    // Float tensors.
    let m = || f(&[5, 37], 1);
    out.float("float_cat", B::float_cat(vec![m(), w(&[2, 37], 2), f(&[1, 37], 3)], 0));
    out.float("float_matmul", B::float_matmul(f(&[3, 9, 17], 1), f(&[3, 17, 5], 2)));
    out.float("float_sort", B::float_sort(m(), 1, false));
    let (sorted, indices) = B::float_sort_with_indices(m(), 1, true, i64_);
    out.float("float_sort_with_indices", sorted);
    out.int("float_sort_with_indices, indices", indices);
    out.int("float_argsort", B::float_argsort(m(), 0, false, i64_));
    out.int("float_argmax", B::float_argmax(m(), 1, i64_));
    out.int("float_argmin", B::float_argmin(m(), 0, i64_));
    out.float("float_topk", B::float_topk(m(), 1, 3));
    let (largest, indices) = B::float_max_dim_with_indices(m(), 1, i64_);
    out.float("float_max_dim_with_indices", largest);
    out.int("float_max_dim_with_indices, indices", indices);
    out.float("float_max_abs_dim", B::float_max_abs_dim(m(), 1));
    out.float("float_sum", B::float_sum(m()));
    out.float("float_sum of a parameter", B::float_sum(w(&[5, 37], 1)));
    out.float("float_sum_dim", B::float_sum_dim(m(), 1));
    out.float("float_mean", B::float_mean(m()));
    out.float("float_mean_dim", B::float_mean_dim(m(), 0));
    out.float("float_prod", B::float_prod(f(&[9], 1)));
    out.float("float_max", B::float_max(m()));
    out.float("float_min of a parameter", B::float_min(w(&[5, 37], 1)));
    out.float("float_max_abs", B::float_max_abs(m()));
    out.float("float_cumsum", B::float_cumsum(m(), 1));
    out.float("float_cummax", B::float_cummax(m(), 1));
    out.float("float_repeat_dim", B::float_repeat_dim(m(), 0, 3));
    out.float("float_flip", B::float_flip(m(), &[1]));
    out.float("float_unfold", B::float_unfold(m(), 1, 5, 3));
    out.float("float_erf", B::float_erf(m()));
    out.float("float_clamp", B::float_clamp(m(), (-0.5f32).into(), 1.25f32.into()));
    out.float("float_powi", B::float_powi_scalar(m(), 3i64.into()));
    out.float("float_mask_fill", B::float_mask_fill(m(), mask(), 7f32.into()));
    out.float("float_mask_fill of a parameter", B::float_mask_fill(w(&[5, 37], 1), mask(), 7f32.into()));
    out.float("float_mask_where", B::float_mask_where(m(), mask(), f(&[5, 37], 2)));
    out.float("float_mask_where of parameters", B::float_mask_where(w(&[5, 37], 1), mask(), w(&[5, 37], 2)));
    out.float("float_cast", B::float_cast(m(), FloatDType::F16));
    out.float("float_cast of a parameter", B::float_cast(w(&[5, 37], 1), FloatDType::F64));
    let slices = [Slice::from(1..4), Slice::from(5..30)];
    let viewed =
        |x| B::float_expand(B::float_reshape(B::float_slice(x, &slices), Shape::new([75, 1])), Shape::new([75, 4]));
    out.float("views", viewed(B::float_swap_dims(B::float_transpose(m()), 0, 1)));
    out.float("views of a parameter", viewed(B::float_swap_dims(B::float_transpose(w(&[5, 37], 1)), 0, 1)));
    out.bool("float_is_nan", B::float_is_nan(B::float_sqrt(m()), native));
    out.bool("float_any_dim", B::float_any_dim(m(), 1, native));
    let chosen = || ints::<B>(&[4, 0, 4], [3], device);
    out.float("float_select", B::float_select(m(), 0, chosen()));
    out.float("float_select of a parameter", B::float_select(w(&[5, 37], 1), 0, chosen()));
    out.float("float_select_add", B::float_select_add(m(), 0, chosen(), f(&[3, 37], 2)));

    // Other tensors.
    let whole = || ints::<B>(&[5, -3, 9, 0, 2, 2, -8, 1], [2, 4], device);
    out.int("int_sort", B::int_sort(whole(), 1, true));
    out.int("int_argsort", B::int_argsort(whole(), 1, false));
    out.int("int_cat", B::int_cat(vec![whole(), whole()], 1));
    out.int("int_cumsum", B::int_cumsum(whole(), 0));
    out.int("int_arange_step", B::int_arange_step(3..40, 7, device, i64_));
    out.float("int_into_float", B::int_into_float(whole(), FloatDType::F32));
    out.bool("bool_any_dim", B::bool_any_dim(mask(), 1));
    out.bool("bool_xor", B::bool_xor(mask(), B::bool_not(mask())));
    let places = try_read_sync(B::bool_argwhere(mask(), i64_)).expect("CPU backends read synchronously");
    out.int("bool_argwhere", places);
    let scheme = QuantScheme::default().with_value(QuantValue::Q8S).with_store(QuantStore::Native);
    let quantized = || B::quantize_dynamic(w(&[4, 32], 1), &scheme);
    out.float("dequantize", B::dequantize(quantized(), FloatDType::F32));
    let transposed = B::q_transpose(quantized());
    out.float("q_transpose", B::dequantize(transposed, FloatDType::F32));
    let transaction = TransactionPrimitive::<B>::new(vec![m(), w(&[5, 37], 4)], vec![], vec![whole()], vec![mask()]);
    let read = try_read_sync(B::tr_execute(transaction)).expect("CPU backends read synchronously").unwrap();
    for data in read.read_floats.into_iter().chain(read.read_ints).chain(read.read_bools) {
        out.0.push(("tr_execute", data));
    }
    out.0
}

fn assert_same_bits(expected: &[(&'static str, TensorData)], got: &[(&'static str, TensorData)], on: &str) {
    assert_eq!(expected.len(), got.len());
    for ((name, expected), (_, got)) in expected.iter().zip(got) {
        assert_eq!((expected.dtype, &expected.shape), (got.dtype, &got.shape), "{name}, {on}");
        assert!(expected.as_bytes() == got.as_bytes(), "{name}, {on}: {expected} became {got}");
    }
}

#[test]
fn results_are_the_inner_backends_bit_for_bit() {
    let bare = sample::<Flex>(&Default::default());
    // Outside of a launch, a lone rank; then ranks that hold the parameters in pieces.
    let alone = sample::<Zero<Flex>>(&ZeroDevice::default());
    assert_same_bits(&bare, &alone, "a lone rank");
    let options = LaunchOptions { threads_per_rank: 1, deadline: Duration::from_secs(60), ..LaunchOptions::default() };
    for (world, stage) in
        [(1, Stage::Parameters), (3, Stage::DataParallel), (3, Stage::Gradients), (3, Stage::Parameters)]
    {
        let config = ZeroConfig { param_persistence_threshold: 0, ..ZeroConfig::new(stage) };
        let ranks = launch::<Flex, _, String>(world, &config, &options, |device| Ok(sample::<Zero<Flex>>(&device)));
        for got in ranks.unwrap_or_else(|error| panic!("{error}")) {
            assert_same_bits(&bare, &got, &format!("{world} ranks at stage {stage}"));
        }
    }
}

/// That the comparison above can tell a native kernel from a composition of other operations.
#[test]
fn a_composed_softmax_has_other_bits_than_the_native_one() {
    let x = || floats::<Flex>([64, 67], 1, &Default::default());
    let shifted = Flex::float_sub(x(), Flex::float_max_dim(x(), 1));
    let exp = Flex::float_exp(shifted);
    let composed = Flex::float_div(exp.clone(), Flex::float_sum_dim(exp, 1));
    let bytes = |tensor| try_read_sync(Flex::float_into_data(tensor)).unwrap().unwrap().as_bytes().to_vec();
    use burn_backend::ops::{ActivationOps, FloatTensorOps};
    assert_ne!(bytes(composed), bytes(Flex::softmax(x(), 1)));
}
