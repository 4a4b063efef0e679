//! `Zero<B>` forwards every operation of Burn's operation traits, including those with a default body: a default body in place of a kernel
//! of `B` would be correct but slow, and nothing else would show it.
//!
//! These tests read the sources: Burn's traits from cargo's registry, and ours. `sample` runs some of the operations that Flex overrides,
//! and compares bits with bare Flex.

mod sample;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// One of Burn's traits, its file, and its numbers of methods without and with a body.
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

/// The counts are those of docs/DESIGN.md. If a new release of Burn changes them, review the change before updating them.
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

/// Methods that keep their default body, and why this replaces no kernel.
const KEPT_DEFAULTS: [(&str, &str); 2] =
    [("comm_device", "the default asks our own float_device"), ("float_from_ref", "the default clones our own handle")];

/// Hand-written functions that pass `B`'s operation of the same name to `crate::elementwise`.
const DELEGATED: [&str; 3] = ["float_mask_where", "float_mask_fill", "float_sum"];

/// Hand-written functions that never call `B`'s operation of the same name, and why.
const INTERCEPTED: [(&str, &str); 10] = [
    ("float_cast", "by zero_ops::cast, which rounds to nearest even where burn-flex does not, and is B's elsewhere"),
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

/// Returns the path of burn-backend's `src/backend` in cargo's registry.
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

/// Returns the text without comments and without the content of string and character literals.
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

/// The direct items of a trait or an implementation.
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

/// Returns the text between the brace at the start of `text` and its partner.
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

/// Returns the methods and macro calls directly in `body`, from which comments have been stripped.
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

/// Returns the items of the first block of `text` whose header `is_header` accepts.
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

/// Lists the names that `ours` lacks of `burns`, and those that it has in addition.
fn differences(burns: &BTreeSet<String>, ours: &BTreeSet<String>) -> Vec<String> {
    let missing = burns.difference(ours).map(|name| format!("{name} is not forwarded"));
    missing.chain(ours.difference(burns).map(|name| format!("{name} is not Burn's"))).collect()
}

/// Returns whether `text` calls `B::name`.
fn calls_inner(text: &str, name: &str) -> bool {
    let call = format!("B::{name}");
    text.match_indices(&call).any(|(at, _)| {
        !text[..at].ends_with(|c| is_word(c) || c == ':') && !text[at + call.len()..].starts_with(is_word)
    })
}

/// Returns the hand-written functions of `items` that do not do what their list says.
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
            // What is recorded is called at once outside of a block, and by what a block keeps.
            let (call, calls) = match name.as_str() {
                "recorded" => ("called!($name $(, $by)?)", 2),
                "forward" => ("called!($name $(, $by)?)", 1),
                _ => ("B::$name", 1),
            };
            assert_eq!(body.matches(call).count(), calls, "{name}!");
            assert!(methods.iter().all(|method| method.body.is_none()), "{name}! holds a written-out function");
        }
    }
    assert_eq!(bodies["called"].matches("B::$name").count(), 1, "called!");
    // By another function than the inner backend's: products, and reductions by that of the same name. Both ask the inner backend where the
    // tensors are not CubeCL's.
    let others: Vec<String> = TRAITS
        .iter()
        .flat_map(|of| our_text(of.ours).lines().map(str::to_string).collect::<Vec<_>>())
        .filter(|line| line.ends_with("::<B>;"))
        .collect();
    for line in &others {
        let (declared, by) = line.trim().split_once(" = ").expect("an operation and its function");
        let name = declared.strip_prefix("fn ").and_then(|rest| rest.split('(').next()).expect("a function");
        let expected = if name == "float_matmul" { "matmul".into() } else { format!("reductions::{name}") };
        assert_eq!(by, format!("{expected}::<B>;"), "{name}");
    }
    assert_eq!(others.len(), 26);
    assert_eq!(our_text("ops/float.rs").matches("B::float_matmul(lhs, rhs)").count(), 1);
    let reductions = strip(include_str!("../../../zero-ops/src/reductions.rs"));
    assert_eq!((reductions.matches("B::$name($x").count(), reductions.matches("B::layer_norm(x").count()), (1, 1));
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

/// Checks the tests above: without an operation, they report it.
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
