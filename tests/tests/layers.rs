//! Checks the module structure: modules of a crate import each other without cycles: `cargo test -p zero-tests --test layers`.
//!
//! Imports are a module's `use` lines and its paths from `crate` and `super`; re-exports are resolved to the defining
//! module. A module and its submodules may import each other, and imports of the crate's root are ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

type Module = Vec<String>;

/// Modules, and the modules that each imports.
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// Source text of a crate's modules, and the names that each re-exports with the paths they refer to.
#[derive(Default)]
struct Source {
    text: BTreeMap<Module, String>,
    exports: BTreeMap<Module, BTreeMap<String, String>>,
}

impl Source {
    fn read(root: &Path) -> Self {
        let mut source = Self::default();
        source.add(root, &[]);
        for (module, text) in &source.text {
            for (public, path) in uses(text) {
                let name = path.rsplit("::").next().unwrap_or_default();
                if public {
                    source.exports.entry(module.clone()).or_default().insert(name.into(), path);
                }
            }
        }
        source
    }

    fn add(&mut self, dir: &Path, module: &[String]) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_string();
            let own = || module.iter().cloned().chain([name.clone()]).collect::<Module>();
            if path.is_dir() {
                if name != "bin" {
                    self.add(&path, &own());
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") && name != "tests" {
                let of = if ["mod", "lib"].contains(&name.as_str()) { module.to_vec() } else { own() };
                self.text.insert(of, plain(&fs::read_to_string(&path).unwrap()));
            }
        }
    }

    /// Returns the module that defines the item at `path`, as written in `module`.
    fn made_in(&self, module: &[String], path: &str) -> Module {
        self.follow(module, path, 0)
    }

    fn follow(&self, module: &[String], path: &str, depth: usize) -> Module {
        let mut at = module.to_vec();
        let mut names = path.split("::").peekable();
        match names.peek() {
            Some(&"crate") => {
                at.clear();
                names.next();
            }
            Some(&"self") => drop(names.next()),
            _ => {}
        }
        while names.next_if_eq(&"super").is_some() {
            at.pop();
        }
        while let Some(name) = names.peek() {
            at.push((*name).to_string());
            if !self.text.contains_key(&at) {
                at.pop();
                break;
            }
            names.next();
        }
        let exported = names.next().and_then(|name| self.exports.get(&at)?.get(name));
        match exported {
            // As deep as re-exports of re-exports go.
            Some(path) if depth < 6 => self.follow(&at, path, depth + 1),
            _ => at,
        }
    }

    /// Returns the imports of each module.
    fn graph(&self) -> Graph {
        let edges = |module: &Module, text: &str| -> BTreeSet<Module> {
            let used = uses(text).into_iter().map(|(_, path)| path).chain(paths(text));
            let made = used.map(|path| self.made_in(module, &path));
            made.filter(|made| !made.is_empty() && !made.starts_with(module) && !module.starts_with(made)).collect()
        };
        self.text.iter().map(|(module, text)| (module.clone(), edges(module, text))).collect()
    }
}

/// Strips comments, and the test module at the end.
fn plain(text: &str) -> String {
    let end =
        text.find("\n#[cfg(test)]\nmod ").filter(|&at| text[at..].lines().nth(2).is_some_and(|l| l.ends_with('{')));
    let lines = text[..end.unwrap_or(text.len())].lines();
    lines.map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Returns the path of each `use` line and a flag for re-exports.
fn uses(text: &str) -> Vec<(bool, String)> {
    let mut found = Vec::new();
    for line in statements(text) {
        let line = line.trim();
        let (public, rest) = match line.strip_prefix("pub") {
            Some(rest) => (true, rest.trim_start_matches("(crate)").trim_start_matches("(super)")),
            None => (false, line),
        };
        if let Some(tree) = rest.trim_start().strip_prefix("use ") {
            expand("", tree, &mut |path| found.push((public, path)));
        }
    }
    found
}

/// Returns statements from a line that starts with `use` or `pub` to its semicolon.
fn statements(text: &str) -> impl Iterator<Item = String> {
    let mut lines = text.lines();
    std::iter::from_fn(move || {
        let first = lines.by_ref().map(str::trim).find(|line| {
            let rest = line.strip_prefix("pub").map_or(*line, |rest| rest.split_once(' ').map_or("", |(_, rest)| rest));
            rest.starts_with("use ")
        })?;
        let mut statement = first.to_string();
        while !statement.contains(';') {
            statement += lines.next()?.trim();
        }
        Some(statement.split(';').next().unwrap_or_default().to_string())
    })
}

fn expand(prefix: &str, tree: &str, each: &mut impl FnMut(String)) {
    let tree = tree.trim();
    let Some((head, rest)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        return each(format!("{prefix}{path}"));
    };
    let (mut depth, mut begin) = (0, 0);
    let inner = &rest[..rest.rfind('}').unwrap_or(rest.len())];
    for (at, sign) in inner.char_indices().chain([(inner.len(), ',')]) {
        match sign {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !inner[begin..at].trim().is_empty() {
                    expand(&format!("{prefix}{head}"), &inner[begin..at], each);
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
}

/// Returns paths from `crate` and `super` outside of `use` lines.
fn paths(text: &str) -> Vec<String> {
    let word = |sign: char| sign.is_alphanumeric() || sign == '_' || sign == ':';
    let all = text.split(|sign| !word(sign)).filter(|path| path.starts_with("crate::") || path.starts_with("super::"));
    all.map(|path| path.trim_end_matches(':').to_string()).collect()
}

/// Merges the graph into the modules directly below the crate's root, each with its submodules.
fn of_folders(graph: &Graph) -> Graph {
    let first = |module: &Module| module[..module.len().min(1)].to_vec();
    let mut folders = Graph::new();
    for (module, used) in graph {
        let own = first(module);
        let others: Vec<Module> = used.iter().map(first).filter(|other| *other != own && !own.is_empty()).collect();
        folders.entry(own).or_default().extend(others);
    }
    folders
}

/// Returns a cycle of modules, if there is one.
fn circle(graph: &Graph) -> Option<Vec<String>> {
    fn visit<'g>(
        graph: &'g Graph,
        module: &'g Module,
        way: &mut Vec<&'g Module>,
        done: &mut BTreeSet<&'g Module>,
    ) -> Option<Vec<String>> {
        if let Some(at) = way.iter().position(|&on| on == module) {
            return Some(way[at..].iter().chain([&module]).map(|module| module.join("::")).collect());
        }
        if done.contains(module) {
            return None;
        }
        way.push(module);
        let found = graph.get(module)?.iter().find_map(|next| visit(graph, next, way, done));
        way.pop();
        done.insert(module);
        found
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| visit(graph, module, &mut Vec::new(), &mut done))
}

#[test]
fn modules_import_without_circles() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for name in [
        "zero-core",
        "zero-kernels",
        "zero-ops",
        "zero-engine",
        "zero-settings",
        "zero-data",
        "zero-models",
        "zero-burn",
        "zero-train",
        "zero-train-cli",
        "zero-param",
    ] {
        let source = Source::read(&root.join(name).join("src"));
        assert!(source.text.len() > 10, "{name} is not read");
        let graph = source.graph();
        for graph in [&graph, &of_folders(&graph)] {
            let found = circle(graph);
            assert!(found.is_none(), "{name} has a circle of modules: {}", found.unwrap_or_default().join(" -> "));
        }
    }
}

/// Adapters for several versions of Burn use the kernels.
#[test]
fn the_processors_kernels_know_nothing_of_burn() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("zero-kernels");
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    assert!(manifest.contains("gemm") && !manifest.contains("burn-") && !manifest.contains("zero-ops"), "{manifest}");
    let source = Source::read(&folder.join("src"));
    assert!(source.text.len() > 10, "the kernels are read");
    for (module, text) in &source.text {
        assert!(!text.contains("burn"), "{} names Burn", module.join("::"));
    }
}

#[test]
fn a_circle_is_found() {
    let mut source = Source::default();
    let mut add = |module: &[&str], text: &str| {
        source.text.insert(module.iter().map(ToString::to_string).collect(), plain(text));
    };
    add(&[], "pub mod a;\npub use b::{Two as Other, c::Three};");
    add(&["a"], "use crate::{\n    Three,\n    x::{self},\n};\nmod d; // super::b");
    add(&["b"], "pub mod c;");
    add(&["b", "c"], "fn f() -> super::super::a::One { todo!() }\n#[cfg(test)]\nmod tests {\n    use crate::d::E;\n}");
    let mut exports = BTreeMap::new();
    exports.insert("Three".to_string(), "b::c::Three".to_string());
    source.exports.insert(Vec::new(), exports);
    assert_eq!(circle(&source.graph()).unwrap(), ["a", "b::c", "a"]);
}
