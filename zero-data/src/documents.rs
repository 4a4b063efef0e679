//! Documents in files, and their tokens, in the order of the files.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use parquet::basic::{ConvertedType, Type as Physical};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;
use rayon::prelude::*;
use serde_json::{Map, Value};
use zero_models::safetensors_file::LFS_POINTER;

use super::tokenizer::Tokenizer;
use crate::error::{DataError, Result, io, wrong, wrong_data};

/// Bytes of text that all threads tokenize at a time.
const PART: usize = 4 << 20;

/// Default key or column of a document's text.
const FIELD: &str = "text";

/// A file of documents.
#[derive(Debug, Clone, Hash, PartialEq, Eq)]
pub(super) struct DataFile {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    modified: Option<SystemTime>,
    kind: DataKind,
    packing: Packing,
    /// If set, the file's rows are held out.
    pub(super) is_held_out: bool,
}

/// The compression of a file.
#[derive(Debug, Clone, Copy, Hash, PartialEq, Eq)]
enum Packing {
    None,
    Gzip,
    Zstd,
}

impl DataFile {
    fn open(&self) -> Result<Box<dyn BufRead>> {
        let file = BufReader::new(File::open(&self.path).map_err(io("read", &self.path))?);
        Ok(match self.packing {
            Packing::None => Box::new(file),
            Packing::Gzip => Box::new(BufReader::new(flate2::bufread::MultiGzDecoder::new(file))),
            Packing::Zstd => {
                let unpacked = zstd::Decoder::with_buffer(file).map_err(io("read", &self.path))?;
                Box::new(BufReader::new(Damaged(unpacked)))
            }
        })
    }

    /// Returns whether the file has at most `most` bytes, so that its tokens are kept in memory. For a compressed file the
    /// limit is lower, since its contents may be many times as large.
    pub(super) fn is_small(&self, most: u64) -> bool {
        self.bytes <= if self.packing == Packing::None { most } else { most / PACKED }
    }
}

/// The assumed ratio of a file's size to its compressed size.
const PACKED: u64 = 16;

/// A reader that reports zstd's errors as those of a damaged file.
struct Damaged<R>(R);

impl<R: Read> Read for Damaged<R> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(bytes).map_err(|error| match error.kind() {
            ErrorKind::Other => std::io::Error::new(ErrorKind::InvalidData, error),
            _ => error,
        })
    }
}

/// The split that a dataset's file belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Split {
    Train,
    Validation,
    Test,
}

impl Split {
    /// Finds the split by the words of a path within the dataset's folder, like the package `datasets`.
    fn of(within: &Path) -> Option<Self> {
        let name = within.to_string_lossy().to_lowercase();
        name.split(|letter: char| !letter.is_alphabetic()).find_map(|word| match word {
            "train" | "training" => Some(Self::Train),
            "validation" | "valid" | "val" | "dev" => Some(Self::Validation),
            "test" | "testing" | "eval" | "evaluation" => Some(Self::Test),
            _ => None,
        })
    }
}

/// Depth of folders within a dataset's folder that are searched.
const DEPTH: usize = 3;

/// Prefixes of the names of files about a dataset, in lower case.
const ABOUT: [&str; 7] = ["readme", "license", "licence", "citation", "changelog", "dataset_info", "dataset_dict"];

/// Collects the files of a folder, and of its subfolders down to a depth, that are not hidden and not about the dataset.
fn walk(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).map_err(io("read", folder))?;
    for entry in entries {
        let path = entry.map_err(io("read", folder))?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
        if name.starts_with('.') || ABOUT.iter().any(|about| name.starts_with(about)) {
            continue;
        }
        if path.is_file() {
            found.push(path);
        } else if path.is_dir() && depth > 0 {
            walk(&path, depth - 1, found)?;
        }
    }
    Ok(())
}

/// Returns the files of a dataset's folder, each with whether its rows are held out. If the names of all files of a kind
/// name splits, `train` is trained on, `validation` is held out, and other splits are ignored. Otherwise all files directly
/// in the folder are trained on or, if there are none, those in its subfolders.
fn of_splits(folder: &Path) -> Result<Vec<(PathBuf, bool)>> {
    let mut found = Vec::new();
    walk(folder, DEPTH, &mut found)?;
    found.sort();
    let within = |path: &PathBuf| path.strip_prefix(folder).unwrap_or(path).to_path_buf();
    let split = |path: &PathBuf| Split::of(&within(path));
    let of = |wanted| found.iter().filter(move |path| split(path) == Some(wanted)).cloned();
    let kind = |path: &PathBuf| DataKind::of(path).ok();
    let Some(train) = of(Split::Train).next().filter(|train| {
        // A file next to them without a split counts as much as they do.
        !found.iter().any(|path| split(path).is_none() && kind(path) == kind(train))
    }) else {
        if found.iter().any(|path| path.parent() == Some(folder)) {
            found.retain(|path| path.parent() == Some(folder));
        }
        return Ok(found.into_iter().map(|path| (path, false)).collect());
    };
    // Without the numbers of parts: two names are two datasets.
    let named = |path: &PathBuf| {
        let name = within(path).to_string_lossy().to_lowercase();
        let words =
            name.split(|letter: char| !letter.is_alphabetic()).filter(|word| !matches!(*word, "" | "of" | "part"));
        words.collect::<Vec<_>>().join(" ")
    };
    if let Some(other) = of(Split::Train).find(|path| named(path) != named(&train)) {
        let [train, other] = [&train, &other].map(|path| within(path).display().to_string());
        let problem = format!("has several training sets, {train} and {other}: choose the folder or file of one");
        return Err(wrong_data(folder, problem));
    }
    let held_out = of(Split::Validation).map(|path| (path, true));
    Ok(of(Split::Train).map(|path| (path, false)).chain(held_out).collect())
}

#[derive(Debug, Clone, Copy, Hash, PartialEq, Eq)]
enum DataKind {
    Text,
    JsonLines,
    /// One array, or JSON lines.
    Json,
    /// A table with a header; this byte separates columns.
    Csv(u8),
    Parquet,
}

impl DataKind {
    /// Finds the kind by the extension of the file's name.
    fn of(path: &Path) -> Result<(Self, Packing)> {
        let ending = |path: &Path| path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
        let packing = match ending(path).as_deref() {
            Some("gz") => Packing::Gzip,
            Some("zst") => Packing::Zstd,
            _ => Packing::None,
        };
        let unpacked = if packing == Packing::None { path } else { Path::new(path.file_stem().unwrap_or_default()) };
        let kind = match ending(unpacked).as_deref() {
            None | Some("txt" | "text" | "md" | "markdown" | "rst" | "tex") => Self::Text,
            Some("jsonl" | "ndjson") => Self::JsonLines,
            Some("json") => Self::Json,
            Some("csv") => Self::Csv(b','),
            Some("tsv") => Self::Csv(b'\t'),
            Some("parquet") if packing == Packing::None => Self::Parquet,
            Some(_) => {
                let expected = "expected .txt, .md, .jsonl, .json, .csv or .tsv (optionally followed by .gz or .zst), \
                                .parquet or .safetensors";
                return Err(wrong_data(
                    path,
                    format!("has an unknown file extension: {expected}; rename it to .txt if it is text"),
                ));
            }
        };
        Ok((kind, packing))
    }
}

/// The bytes with which some programs begin a UTF-8 file.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Returns the file, or the files of a folder sorted by name; held-out files come last.
pub(super) fn files(path: &Path) -> Result<Vec<DataFile>> {
    let meta = std::fs::metadata(path).map_err(io("read", path))?;
    if !meta.is_dir() && !meta.is_file() {
        return Err(wrong_data(
            path,
            "is not a regular file, and data is read more than once: save it to a file first",
        ));
    }
    let paths = if meta.is_dir() { of_splits(path)? } else { vec![(path.to_path_buf(), false)] };
    let mut begin = Vec::new();
    for (path, _) in &paths {
        begin.clear();
        let file = File::open(path).map_err(io("read", path))?;
        file.take(LFS_POINTER.len() as u64).read_to_end(&mut begin).map_err(io("read", path))?;
        if begin == LFS_POINTER {
            return Err(wrong_data(path, "is a Git LFS pointer, not the file itself; run `git lfs pull`"));
        }
    }
    let mut files = Vec::with_capacity(paths.len());
    for (path, is_held_out) in paths {
        let (kind, packing) = DataKind::of(&path)?;
        let meta = std::fs::metadata(&path).map_err(io("read", &path))?;
        files.push(DataFile { bytes: meta.len(), modified: meta.modified().ok(), kind, packing, is_held_out, path });
    }
    match files.iter().find(|file| file.kind != files[0].kind) {
        Some(other) => {
            let problem = format!(
                "is not in the same format as {}: use a folder with files of one format",
                files[0].path.display()
            );
            Err(wrong_data(&other.path, problem))
        }
        None if files.is_empty() => {
            Err(wrong_data(path, "is a folder without data files: expected text, .jsonl, .json, .csv or .parquet"))
        }
        None => Ok(files),
    }
}

/// Passes the tokens of all files to `out`, in parts. Unless there is only a single text, every document is followed by the
/// token that ends one.
pub(super) fn encode(
    files: &[DataFile],
    field: Option<&str>,
    tokenizer: &Tokenizer,
    mut out: impl FnMut(&[u32]) -> Result<()>,
) -> Result<()> {
    let packs = files.len() > 1 || files[0].kind != DataKind::Text;
    let end = match tokenizer.end() {
        Some(end) if packs => Some(end),
        None if packs => {
            let problem = "holds several documents, but the tokenizer has no end-of-text token to separate them: set \
                           eos_token in a tokenizer_config.json next to the tokenizer";
            return Err(wrong_data(&files[0].path, problem));
        }
        _ => None,
    };
    let begin = tokenizer.prefix_ids();
    for file in files {
        let is_text = file.kind == DataKind::Text;
        if is_text && !begin.is_empty() {
            out(begin)?;
        }
        let mut part: Vec<String> = Vec::new();
        let mut bytes = 0;
        let mut flush = |part: &mut Vec<String>| -> Result<()> {
            let cut: Result<Vec<Vec<u32>>, String> = part.par_iter().map(|text| tokenizer.encode(text)).collect();
            for mut ids in cut.map_err(|problem| wrong_data(&file.path, problem))? {
                // A text is one document, and these are its parts. Without sentences there is no document.
                if !is_text {
                    ids.splice(0..0, begin.iter().copied());
                }
                ids.extend(end.filter(|_| !(is_text || tokenizer.sentences && ids.is_empty())));
                out(&ids)?;
            }
            part.clear();
            Ok(())
        };
        texts(file, field, &mut |text| {
            bytes += text.len();
            part.push(text);
            if bytes >= PART {
                bytes = 0;
                flush(&mut part)?;
            }
            Ok(())
        })?;
        flush(&mut part)?;
        if let (DataKind::Text, Some(end)) = (file.kind, end) {
            out(&[end])?;
        }
    }
    Ok(())
}

type Each<'a> = &'a mut dyn FnMut(String) -> Result<()>;

/// A value of a row, with its type in the file.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Cell {
    Text(String),
    /// An integer, as written in the file.
    Whole(String),
    /// A number with a fraction.
    Fraction(f64),
    /// A cell of a table whose columns have no types.
    Untyped(String),
    List(Vec<Cell>),
}

impl Cell {
    /// Returns the text, or the number as text.
    pub(super) fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Whole(text) | Self::Untyped(text) => text,
            other => other.to_string(),
        }
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(text) | Self::Untyped(text) => write!(f, "{text:?}"),
            Self::Whole(number) => f.write_str(number),
            // Written with a decimal point even if it is an integer.
            Self::Fraction(number) => write!(f, "{number:?}"),
            Self::List(items) => {
                let items: Vec<String> = items.iter().map(Self::to_string).collect();
                write!(f, "[{}]", items.join(", "))
            }
        }
    }
}

/// The values of a row, in the order of the fields; `None` only if the field allows it.
pub(super) type RowOf = Vec<Option<Cell>>;

type EachRow<'a> = &'a mut dyn FnMut(Place, RowOf) -> Result<()>;

/// The type of a field's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holds {
    Text,
    /// A text, a boolean, a number, or a list of these.
    Label,
    /// A text, a boolean or an integer, or nothing in rows that follow one with a label.
    TextOrNothing,
}

/// A key of a JSON line, or a column of a Parquet file.
#[derive(Debug, Clone, Copy)]
pub(super) struct FieldOf<'a> {
    pub(super) name: &'a str,
    /// The command-line option that names it.
    pub(super) option: &'static str,
    pub(super) holds: Holds,
}

/// Passes the documents of a file to `each`; a text is passed in parts that give the same tokens as the full text.
pub(super) fn texts(file: &DataFile, field: Option<&str>, each: Each<'_>) -> Result<()> {
    if file.kind == DataKind::Text {
        return text_parts(file, each);
    }
    let field = FieldOf { name: field.unwrap_or(FIELD), option: "text-field", holds: Holds::Text };
    rows(file, &[field], &mut |_, row| row.into_iter().flatten().try_for_each(|cell| each(cell.into_text())))
}

/// The file of each row, and its place there.
pub(super) struct Places {
    files: Vec<DataFile>,
    rows: Vec<(usize, Place)>,
}

impl Places {
    /// Creates the error, with the name of the row's file.
    pub(super) fn wrong(&self, WrongRow { row, problem }: WrongRow) -> DataError {
        let (file, place) = self.rows[row];
        place.wrong(&self.files[file].path, &problem)
    }
}

/// An unusable row, by its index among all rows, and the problem.
#[derive(Debug)]
pub(super) struct WrongRow {
    pub(super) row: usize,
    pub(super) problem: String,
}

/// Reads these fields of every row of a file, or of the files of a folder. Returns the rows, their places, and the number of
/// last rows that belong to a validation split: at most `held_out`.
pub(super) fn read_rows(
    path: &Path,
    fields: &[FieldOf<'_>],
    held_out: Option<usize>,
) -> Result<(Vec<RowOf>, Places, usize)> {
    let mut read = [Vec::new(), Vec::new()];
    let files = files(path)?;
    let has_split = files.iter().any(|file| file.is_held_out);
    for (number, file) in files.iter().enumerate() {
        let of_split = &mut read[usize::from(file.is_held_out)];
        rows(file, fields, &mut |place, row| {
            of_split.push((row, (number, place)));
            Ok(())
        })?;
    }
    let [mut trained, mut validation] = read;
    if trained.is_empty() {
        return Err(wrong_data(path, "has no rows: expected a text and a label in each"));
    }
    let mut rows = 0;
    if has_split {
        // Rows without a label stay at the end.
        let is_labelled = |row: &RowOf| row.iter().all(Option::is_some);
        let labelled = validation.iter().take_while(|(row, _)| is_labelled(row)).count();
        rows = self::held_out(held_out, labelled)?;
        validation.drain(rows..labelled);
    }
    trained.append(&mut validation);
    let (trained, places) = trained.into_iter().unzip();
    Ok((trained, Places { files, rows: places }, rows))
}

/// Returns the number of rows of a validation split to hold out: all, or as many as `--eval` requests.
pub(super) fn held_out(asked: Option<usize>, found: usize) -> Result<usize> {
    match asked {
        Some(rows) if rows > found => {
            Err(wrong("eval", rows, format!("expected at most {found}, the rows of the data's validation split")))
        }
        Some(rows) => Ok(rows),
        None => Ok(found),
    }
}

/// Passes these fields of every row to `each`.
pub(super) fn rows(file: &DataFile, fields: &[FieldOf<'_>], each: EachRow<'_>) -> Result<()> {
    match file.kind {
        DataKind::Text => {
            Err(wrong_data(&file.path, "is text: expected .jsonl, .json, .csv or .parquet, with a label in each row"))
        }
        DataKind::JsonLines | DataKind::Json => {
            let expected = format!("an object with a key \"{}\"", fields[0].name);
            let mut labelled = false;
            json_values(file, &expected, &mut |place, value| {
                let row = json_row(value, fields, labelled).map_err(|problem| place.wrong(&file.path, &problem))?;
                labelled = true;
                each(place, row)
            })
        }
        DataKind::Csv(delimiter) => csv_rows(file, delimiter, fields, each),
        DataKind::Parquet => parquet_rows(&file.path, fields, each),
    }
}

/// Parses JSON and Python's extensions of it: `NaN` and `Infinity` are read as null, and the escape of an unpaired surrogate as U+FFFD.
fn parse_json(text: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice(text).or_else(|error| serde_json::from_slice(&mended(text)).map_err(|_| error))
}

fn mended(text: &[u8]) -> Vec<u8> {
    const NO_NUMBERS: [&[u8]; 3] = [b"NaN", b"-Infinity", b"Infinity"];
    let unit = |at: usize| {
        let digits = text.get(at..at + 6)?.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let (mut out, mut at, mut in_text) = (Vec::with_capacity(text.len()), 0, false);
    while at < text.len() {
        let rest = &text[at..];
        let (put, taken): (&[u8], usize) = match (in_text, rest[0]) {
            (true, b'\\') => match (unit(at), unit(at + 6)) {
                (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => (&rest[..12], 12),
                (Some(0xd800..=0xdfff), _) => (b"\\ufffd", 6),
                _ => (&rest[..rest.len().min(2)], 2),
            },
            (false, _) if NO_NUMBERS.iter().any(|word| rest.starts_with(word)) => {
                let word = NO_NUMBERS.iter().find(|word| rest.starts_with(word)).expect("one of them begins here");
                (b"null", word.len())
            }
            (_, byte) => {
                in_text ^= byte == b'"';
                (&rest[..1], 1)
            }
        };
        out.extend_from_slice(put);
        at += taken;
    }
    out
}

/// The place of a row in its file, for error messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    unit: &'static str,
    number: usize,
}

impl Place {
    fn row(number: usize) -> Self {
        Self { unit: "row", number }
    }

    /// Returns the error for this row of a file.
    pub(super) fn wrong(self, path: &Path, problem: &str) -> DataError {
        wrong_data(path, format!("{self}: {problem}"))
    }
}

impl core::fmt::Display for Place {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} {}", self.unit, self.number)
    }
}

type EachValue<'a> = &'a mut dyn FnMut(Place, Value) -> Result<()>;

/// Passes all rows of a file to `each` as objects with their keys, and stops at its first error. From Parquet only these
/// columns are read.
pub(super) fn objects(
    file: &DataFile,
    columns: &[&str],
    each: &mut dyn FnMut(Place, Map<String, Value>) -> Result<()>,
) -> Result<()> {
    match file.kind {
        DataKind::Text => Ok(()),
        DataKind::JsonLines | DataKind::Json => json_values(file, "an object", &mut |place, value| match value {
            Value::Object(object) => each(place, object),
            other => Err(place.wrong(&file.path, &format!("is {}: expected an object", kind_of(&other)))),
        }),
        DataKind::Csv(delimiter) => {
            let (header, mut reader) = table(file, delimiter)?;
            for (number, record) in reader.records().enumerate() {
                let record = record.map_err(|error| bad_table(&file.path, error))?;
                let cells = record.iter().map(|text| Value::String(text.into()));
                each(Place::row(number), header.iter().map(str::to_string).zip(cells).collect())?;
            }
            Ok(())
        }
        DataKind::Parquet => {
            let reader = parquet(&file.path)?;
            parquet_records(
                &file.path,
                &reader,
                |name| columns.contains(&name),
                |number, found| {
                    each(Place::row(number), found.into_iter().map(|(name, field)| (name, json_of(field))).collect())
                },
            )
        }
    }
}

/// Passes the rows of a file of JSON lines or of a single array to `each`.
fn json_values(file: &DataFile, expected: &str, each: EachValue<'_>) -> Result<()> {
    if file.kind == DataKind::JsonLines {
        json_lines(file.open()?, &file.path, expected, each)
    } else {
        json(file, expected, each)
    }
}

fn json_lines(mut lines: impl BufRead, path: &Path, expected: &str, each: EachValue<'_>) -> Result<()> {
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if lines.read_until(b'\n', &mut line).map_err(io("read", path))? == 0 {
            break;
        }
        let text = if number == 1 { line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&line) } else { &line };
        if text.trim_ascii().is_empty() {
            continue;
        }
        let place = Place { unit: "line", number };
        let value = parse_json(text)
            .map_err(|error| place.wrong(path, &format!("is not valid JSON ({error}): expected {expected}")))?;
        each(place, value)?;
    }
    Ok(())
}

/// Reads a file that is one array of objects, or JSON lines with another extension.
fn json(file: &DataFile, expected: &str, each: EachValue<'_>) -> Result<()> {
    let path = &file.path;
    let mut bytes = Vec::new();
    file.open()?.read_to_end(&mut bytes).map_err(io("read", path))?;
    let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&bytes);
    if !text.trim_ascii_start().starts_with(b"[") {
        return json_lines(text, path, expected, each);
    }
    let rows = match parse_json(text) {
        Ok(Value::Array(rows)) => rows,
        Ok(_) => unreachable!("it begins with a bracket"),
        Err(error) => return Err(wrong_data(path, format!("is not a valid JSON array of objects ({error})"))),
    };
    rows.into_iter().enumerate().try_for_each(|(number, value)| each(Place { unit: "element", number }, value))
}

/// Returns these fields of an object, or describes the problem with it.
fn json_row(mut value: Value, fields: &[FieldOf<'_>], labelled: bool) -> Result<RowOf, String> {
    let mut row = Vec::with_capacity(fields.len());
    for FieldOf { name, option, holds } in fields {
        row.push(match value.get_mut(*name).map(Value::take) {
            Some(Value::String(text)) => Some(Cell::Text(text)),
            None | Some(Value::Null) if *holds == Holds::TextOrNothing && labelled => None,
            Some(found) if *holds != Holds::Text && json_cell(&found, *holds).is_some() => json_cell(&found, *holds),
            found => {
                let got = found.map_or("is missing".into(), |found| format!("is {}", kind_of(&found)));
                let keys: Vec<_> = value.as_object().into_iter().flat_map(|object| object.keys()).collect();
                let other = format!("choose another key with --{option} (keys: {keys:?})");
                return Err(format!("its \"{name}\" {got}: expected {}; {other}", expected(*holds)));
            }
        });
    }
    Ok(row)
}

/// Converts the value to a cell, if its type is allowed.
fn json_cell(value: &Value, holds: Holds) -> Option<Cell> {
    Some(match value {
        Value::String(text) => Cell::Text(text.clone()),
        Value::Bool(is) => Cell::Text(is.to_string()),
        Value::Number(number) if !number.is_f64() => Cell::Whole(number.to_string()),
        Value::Number(number) if holds == Holds::Label => Cell::Fraction(number.as_f64()?),
        Value::Array(items) if holds == Holds::Label => {
            let item = |item: &Value| json_cell(item, holds).filter(|item| !matches!(item, Cell::List(_)));
            Cell::List(items.iter().map(item).collect::<Option<_>>()?)
        }
        _ => return None,
    })
}

fn bad_table(path: &Path, error: csv::Error) -> DataError {
    wrong_data(path, format!("cannot be read as a table ({error})"))
}

/// Returns the first record, which names the columns, and a reader of the others.
fn table(file: &DataFile, delimiter: u8) -> Result<(csv::StringRecord, csv::Reader<Box<dyn BufRead>>)> {
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(file.open()?);
    let header = reader.headers().map_err(|error| bad_table(&file.path, error))?.clone();
    Ok((header, reader))
}

fn csv_rows(file: &DataFile, delimiter: u8, fields: &[FieldOf<'_>], each: EachRow<'_>) -> Result<()> {
    let path = &file.path;
    let (header, mut reader) = table(file, delimiter)?;
    let mut columns = Vec::with_capacity(fields.len());
    for FieldOf { name, option, .. } in fields {
        let Some(column) = header.iter().position(|column| column == *name) else {
            let all: Vec<&str> = header.iter().collect();
            let problem = format!("has no column \"{name}\" (columns: {all:?}): choose one with --{option}");
            return Err(wrong_data(path, problem));
        };
        columns.push(column);
    }
    for (number, record) in reader.records().enumerate() {
        let record = record.map_err(|error| bad_table(path, error))?;
        let place = Place::row(number);
        let cell = |(field, &column): (&FieldOf<'_>, &usize)| {
            let text = record.get(column).unwrap_or_default();
            let text = if field.holds == Holds::Label { text.trim() } else { text };
            // An empty cell is a text, but not a label.
            match (text.is_empty(), field.holds) {
                (true, Holds::TextOrNothing) if number > 0 => Ok(None),
                (true, Holds::Label | Holds::TextOrNothing) => {
                    Err(place.wrong(path, &format!("its \"{}\" is empty: expected a label", field.name)))
                }
                _ => Ok(Some(Cell::Untyped(text.to_string()))),
            }
        };
        each(place, fields.iter().zip(&columns).map(cell).collect::<Result<_>>()?)?;
    }
    Ok(())
}

fn expected(holds: Holds) -> &'static str {
    match holds {
        Holds::Text => "a string",
        Holds::Label => "a string, a finite number, or a list of these",
        Holds::TextOrNothing => "a string or a whole number",
    }
}

/// Names the type of a value, for error messages.
pub(super) fn kind_of(value: &Value) -> &'static str {
    match value {
        // NaN in JSON is read as null.
        Value::Null => "null or NaN",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(items) if items.iter().any(Value::is_null) => "a list with null or NaN",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn bad_parquet(path: &Path) -> impl Fn(ParquetError) -> DataError {
    move |error| {
        let advice = match error.to_string().contains("Disabled feature") {
            true => ": write the file with the compression snappy, zstd or gzip, or without",
            false => "",
        };
        wrong_data(path, format!("cannot be read as Parquet ({error}){advice}"))
    }
}

fn parquet(path: &Path) -> Result<SerializedFileReader<File>> {
    SerializedFileReader::new(File::open(path).map_err(io("read", path))?).map_err(bad_parquet(path))
}

/// Passes the wanted columns of every row to `each`.
fn parquet_records(
    path: &Path,
    reader: &SerializedFileReader<File>,
    wanted: impl Fn(&str) -> bool,
    mut each: impl FnMut(usize, Vec<(String, Field)>) -> Result<()>,
) -> Result<()> {
    let schema = reader.metadata().file_metadata().schema();
    let columns = schema.get_fields().iter().filter(|column| wanted(column.name())).cloned().collect();
    let only = Type::group_type_builder(schema.name()).with_fields(columns).build().map_err(bad_parquet(path))?;
    for (number, row) in reader.get_row_iter(Some(only)).map_err(bad_parquet(path))?.enumerate() {
        each(number, row.map_err(bad_parquet(path))?.into_columns())?;
    }
    Ok(())
}

/// Converts a Parquet value to JSON; to null if JSON has no such value.
fn json_of(field: Field) -> Value {
    match field {
        Field::Str(text) => Value::String(text),
        Field::Group(row) => {
            Value::Object(row.into_columns().into_iter().map(|(name, field)| (name, json_of(field))).collect())
        }
        Field::ListInternal(list) => list.elements().iter().cloned().map(json_of).collect(),
        other => serde_json::from_str(&other.to_string()).unwrap_or_default(),
    }
}

fn parquet_rows(path: &Path, fields: &[FieldOf<'_>], each: EachRow<'_>) -> Result<()> {
    let reader = parquet(path)?;
    let schema = reader.metadata().file_metadata().schema().clone();
    let columns: Vec<&str> = schema.get_fields().iter().map(|column| column.name()).collect();
    for FieldOf { name, option, holds } in fields {
        let label = *holds != Holds::Text;
        let is_list =
            |column: &Type| column.is_group() && column.get_basic_info().converted_type() == ConvertedType::LIST;
        let fits = |column: &Type| {
            column.name() == *name
                && (is_bytes(column) || label && column.is_primitive() || *holds == Holds::Label && is_list(column))
        };
        if !schema.get_fields().iter().any(|column| fits(column)) {
            let what = if label { "labels" } else { "texts" };
            let problem =
                format!("has no column \"{name}\" with {what} (columns: {columns:?}): choose one with --{option}");
            return Err(wrong_data(path, problem));
        }
    }
    let wanted = |name: &str| fields.iter().any(|field| field.name == name);
    parquet_records(path, &reader, wanted, |number, found| {
        let mut row = Vec::with_capacity(fields.len());
        for FieldOf { name, holds, .. } in fields {
            let field = found.iter().find(|(column, _)| column == name).map_or(&Field::Null, |(_, field)| field);
            let text = utf8(field);
            row.push(match field {
                _ if text.is_some() => text.map(Cell::Text),
                Field::Null if *holds == Holds::TextOrNothing && number > 0 => None,
                value if *holds != Holds::Text && field_cell(value, *holds).is_some() => field_cell(value, *holds),
                other => {
                    let got = match other {
                        Field::Null => "null".into(),
                        Field::Float(_) | Field::Double(_) => "a floating-point number".into(),
                        Field::Bytes(_) => "binary data that is not UTF-8 text".into(),
                        value => value.to_string(),
                    };
                    let problem = format!("its \"{name}\" is {got}: expected {}", expected(*holds));
                    return Err(Place::row(number).wrong(path, &problem));
                }
            });
        }
        each(Place::row(number), row)
    })
}

/// Returns the text of a string, or of bytes that some programs write for one.
fn utf8(value: &Field) -> Option<String> {
    match value {
        Field::Str(text) => Some(text.clone()),
        Field::Bytes(bytes) => String::from_utf8(bytes.data().to_vec()).ok(),
        _ => None,
    }
}

/// Converts the value to a cell, if its type is allowed.
fn field_cell(value: &Field, holds: Holds) -> Option<Cell> {
    use Field::{Byte, Int, Long, Short, UByte, UInt, ULong, UShort};
    Some(match value {
        Field::Null => return None,
        Field::Str(_) | Field::Bytes(_) => Cell::Text(utf8(value)?),
        Byte(_) | Short(_) | Int(_) | Long(_) | UByte(_) | UShort(_) | UInt(_) | ULong(_) => {
            Cell::Whole(value.to_string())
        }
        Field::Float(_) | Field::Double(_) | Field::ListInternal(_) if holds != Holds::Label => return None,
        // Has the digits of the shorter type.
        Field::Float(number) => Cell::Fraction(number.to_string().parse().expect("it is a number")),
        Field::Double(number) => Cell::Fraction(*number),
        Field::Float16(_) | Field::Decimal(_) if holds == Holds::Label => {
            Cell::Fraction(value.to_string().parse().ok()?)
        }
        Field::ListInternal(items) => {
            let item = |item: &Field| field_cell(item, holds).filter(|item| !matches!(item, Cell::List(_)));
            Cell::List(items.elements().iter().map(item).collect::<Option<_>>()?)
        }
        Field::Bool(is) => Cell::Text(is.to_string()),
        // The class of a time or a group is undefined.
        _ if holds == Holds::Label => return None,
        other => Cell::Text(other.to_string()),
    })
}

fn is_bytes(column: &Type) -> bool {
    column.is_primitive() && column.get_physical_type() == Physical::BYTE_ARRAY
}

/// Splits a text after line ends that are not part of a run of blanks. There the tokens of the parts are those of the full
/// text, with GPT-2's tokenizer and all that split text into words first.
fn text_parts(file: &DataFile, each: Each<'_>) -> Result<()> {
    let (path, mut file) = (&file.path, file.open()?);
    let (mut text, mut begin) = (Vec::new(), 0);
    loop {
        let before = text.len();
        let read = file.by_ref().take(PART as u64).read_to_end(&mut text).map_err(io("read", path))?;
        let cut = match read {
            0 => text.len(),
            _ => {
                // The last such place; the text searched before has none.
                let blank = |at: usize| text[at].is_ascii_whitespace();
                let from = before.saturating_sub(2).max(1);
                let place = (from..text.len().saturating_sub(1)).rev().find(|&at| {
                    text[at] == b'\n' && !blank(at - 1) && !blank(at + 1) && text[at + 1] < 0x80 && text[at - 1] < 0x80
                });
                match place {
                    Some(place) => place + 1,
                    None => continue,
                }
            }
        };
        let rest = text.split_off(cut);
        let mut part = String::from_utf8(std::mem::replace(&mut text, rest)).map_err(|error| {
            let byte = begin + error.utf8_error().valid_up_to();
            let expected = "expected text, or a file that ends in .jsonl, .json, .csv, .parquet or .safetensors";
            wrong_data(path, format!("is not UTF-8 text (byte {byte}): {expected}"))
        })?;
        begin += part.len();
        if begin == part.len() && part.as_bytes().starts_with(BYTE_ORDER_MARK) {
            part.drain(..BYTE_ORDER_MARK.len());
        }
        if !part.is_empty() {
            each(part)?;
        }
        if read == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parquet::data_type::{ByteArray, ByteArrayType, FloatType, Int32Type};
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;
    use crate::TokenizeOptions;

    fn gpt2() -> Tokenizer {
        Tokenizer::find(Path::new("t"), &TokenizeOptions { vocab_size: 50257, ..TokenizeOptions::default() }).unwrap()
    }

    fn ids(path: &Path, field: Option<&str>) -> Result<Vec<u32>, String> {
        let mut all = Vec::new();
        let files = files(path).map_err(|error| error.to_string())?;
        let cut = encode(&files, field, &gpt2(), |part| {
            all.extend_from_slice(part);
            Ok(())
        });
        cut.map(|()| all).map_err(|error| error.to_string())
    }

    #[test]
    fn a_text_in_parts_is_cut_as_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text.txt");
        // Line ends in every combination, on both sides of the ends of parts.
        let line = "It was the best of times,\nit was  \n\n the worst\tof times,\r\n\u{e9}t\u{e9}\n\u{2003}\nwe  \n";
        let text = line.repeat(2 * PART / line.len() + 3);
        std::fs::write(&path, &text).unwrap();
        let whole = tiktoken_rs::r50k_base_singleton().encode_ordinary(&text);
        assert!(ids(&path, None).unwrap() == whole, "the same tokens");
        std::fs::write(&path, b"no \xff text").unwrap();
        assert!(ids(&path, None).unwrap_err().contains("is not UTF-8 text (byte 3)"));
    }

    #[test]
    fn packed_files_are_unpacked() {
        let dir = tempfile::tempdir().unwrap();
        let text = "{\"text\": \"Hello world\"}\n".repeat(3);
        let write = |name: &str, bytes: &[u8]| {
            std::fs::write(dir.path().join(name), bytes).unwrap();
            ids(&dir.path().join(name), None)
        };
        let expected = write("plain.jsonl", text.as_bytes()).unwrap();
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut packed, text.as_bytes()).unwrap();
        let gzip = packed.finish().unwrap();
        // Two members, one after the other, are one text.
        assert_eq!(write("a.jsonl.gz", &gzip.repeat(2)).unwrap(), expected.repeat(2));
        let zstd = zstd::encode_all(text.as_bytes(), 1).unwrap();
        assert_eq!(write("a.json.zst", &zstd).unwrap(), expected);
        assert!(write("a.csv.gz", &gzip).unwrap_err().contains("has no column \"text\""));
        for (name, bytes) in [("cut.jsonl.gz", &gzip[..gzip.len() / 2]), ("cut.json.zst", &zstd[..zstd.len() / 2])] {
            assert!(write(name, bytes).unwrap_err().contains(name));
        }
        assert!(write("a.parquet.gz", &gzip).unwrap_err().contains("has an unknown file extension"));
    }

    #[test]
    fn a_datasets_folder_has_splits() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("data");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(dir.path().join("README.md"), "About it.").unwrap();
        let write = |name: &str, text: &str| {
            std::fs::write(folder.join(name), format!("{{\"text\": \"{text}\", \"label\": 0}}\n")).unwrap();
        };
        for (name, text) in
            [("train-00001-of-2", "b"), ("train-00000-of-2", "a"), ("test-0", "t"), ("validation-0", "v")]
        {
            write(&format!("{name}.jsonl"), text);
        }
        write("dev.latest.jsonl", "w");
        let names = |path: &Path| -> Vec<(String, bool)> {
            let name = |file: &DataFile| file.path.file_stem().unwrap().to_string_lossy().into_owned();
            files(path).unwrap().iter().map(|file| (name(file), file.is_held_out)).collect()
        };
        let expected =
            [("train-00000-of-2", false), ("train-00001-of-2", false), ("dev.latest", true), ("validation-0", true)];
        let expected = expected.map(|(name, held_out)| (name.to_string(), held_out));
        assert_eq!(names(dir.path()), expected);
        assert_eq!(names(&folder), expected);
        let fields = [FieldOf { name: "text", option: "text-field", holds: Holds::Text }];
        let read = |most| {
            let (rows, _, held_out) = read_rows(&folder, &fields, most)?;
            let text = |row: RowOf| row.into_iter().flatten().map(Cell::into_text).collect::<String>();
            Ok::<_, crate::DataError>((rows.into_iter().map(text).collect::<String>(), held_out))
        };
        assert_eq!(read(None).unwrap(), ("abwv".to_string(), 2));
        assert_eq!(read(Some(1)).unwrap(), ("abw".to_string(), 1));
        assert!(
            read(Some(3))
                .unwrap_err()
                .to_string()
                .contains("expected at most 2, the rows of the data's validation split")
        );
        // Several training sets are reported.
        write("train_gen-00000-of-2.jsonl", "g");
        let told = files(&folder).unwrap_err().to_string();
        assert!(told.contains("has several training sets") && told.contains("train_gen-00000-of-2.jsonl"), "{told}");
        std::fs::remove_file(folder.join("train_gen-00000-of-2.jsonl")).unwrap();
        // A file next to them without a split counts as much as they do.
        write("more.jsonl", "m");
        assert!(names(&folder).iter().all(|(_, held_out)| !held_out) && names(&folder).len() == 6);
        std::fs::remove_file(folder.join("more.jsonl")).unwrap();
        // Words within words are not splits, and a folder without a training split is trained on.
        for name in ["train-00000-of-2", "train-00001-of-2"] {
            std::fs::rename(folder.join(format!("{name}.jsonl")), folder.join(format!("con{name}.jsonl"))).unwrap();
        }
        assert_eq!(names(dir.path()), names(&folder), "what lies about it is no data");
        assert!(names(&folder).iter().all(|(_, held_out)| !held_out) && names(&folder).len() == 5);
    }

    #[test]
    fn rows_of_tokens_do_not_go_across_splits() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("train.txt"), "Hello world Hello world Hello").unwrap();
        std::fs::write(dir.path().join("valid.txt"), "world world world world world").unwrap();
        let options = TokenizeOptions { vocab_size: 50257, n_positions: 8, seq: Some(2), ..TokenizeOptions::default() };
        let source = crate::Source::File(dir.path());
        let rows = crate::TokenRows::load(&source, &options).unwrap();
        let (hello, world) = (15496, 995);
        assert_eq!((rows.rows(), rows.held_out()), (4, 2));
        let all = rows.tokens(&[0, 1, 2, 3]).unwrap();
        assert_eq!(all, [hello, world, 18435, world, 6894, world, world, world]);
        let one = crate::TokenRows::load(&source, &TokenizeOptions { held_out: Some(1), ..options }).unwrap();
        assert_eq!((one.rows(), one.held_out()), (3, 1));
        assert_eq!(one.checksum(0..3).unwrap(), rows.checksum(0..3).unwrap());
        assert_eq!(one.tokens(&[2]).unwrap(), all[4..6]);
    }

    #[test]
    fn documents_end_with_their_token() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("all.jsonl");
        std::fs::write(&path, "{\"text\": \"Hello world\", \"n\": 1}\n\n{\"text\": \"\"}\n{\"text\": \"Hello\"}")
            .unwrap();
        assert_eq!(ids(&path, None).unwrap(), [15496, 995, 50256, 50256, 15496, 50256]);
        let told = ids(&path, Some("n")).unwrap_err();
        assert!(told.contains("line 1: its \"n\" is a number: expected a string"), "{told}");
        // A number that is NaN, and half a surrogate pair, in fields that are read and in fields that are not.
        let odd = "{\"text\": \"Hello world\", \"n\": NaN, \"m\": [-Infinity], \"s\": \"NaN \\ud83d\"}\n{\"text\": \"\\ud83dHello \\\\ud83d\"}";
        std::fs::write(&path, odd).unwrap();
        let cut = gpt2().encode("\u{fffd}Hello \\ud83d").unwrap();
        assert_eq!(ids(&path, None).unwrap(), [&[15496, 995, 50256], &cut[..], &[50256]].concat());
        std::fs::write(&path, "{\"text\": \"a\"}\n{\"text\"\n").unwrap();
        assert!(ids(&path, None).unwrap_err().contains("line 2: is not valid JSON"));

        // A folder of texts: each is a document.
        for (name, text) in [("b.txt", "world"), ("a.txt", "Hello")] {
            std::fs::create_dir_all(dir.path().join("texts")).unwrap();
            std::fs::write(dir.path().join("texts").join(name), text).unwrap();
        }
        assert_eq!(ids(&dir.path().join("texts"), None).unwrap(), [15496, 50256, 6894, 50256]);
        assert!(ids(dir.path(), None).is_err_and(|told| told.contains("line 2")));
        std::fs::write(dir.path().join("c.txt"), "x").unwrap();
        assert!(ids(dir.path(), None).unwrap_err().contains("is not in the same format as"));
    }

    #[test]
    fn tables_arrays_and_byte_order_marks_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let expected = [15496, 995, 50256, 15496, 50256];
        for (name, text) in [
            ("a.json", "[{\"text\": \"Hello world\"},\n {\"n\": 1, \"text\": \"Hello\"}]"),
            ("b.json", "\u{feff}[{\"text\": \"Hello world\"}, {\"text\": \"Hello\"}]"),
            ("c.JSON", "{\"text\": \"Hello world\"}\n{\"text\": \"Hello\"}\n"),
            ("d.jsonl", "\u{feff}{\"text\": \"Hello world\"}\r\n{\"text\": \"Hello\"}"),
            ("e.csv", "n,text\n1,Hello world\n2,\"Hello\"\n"),
            ("f.csv", "\u{feff}text\nHello world\nHello\n"),
            ("g.tsv", "text\tn\nHello world\t1\nHello\t2\n"),
        ] {
            assert_eq!(ids(&write(name, text), None).unwrap(), expected, "{name}");
        }
        assert_eq!(ids(&write("h.txt", "\u{feff}Hello world"), None).unwrap(), [15496, 995]);
        for (name, text, told) in [
            ("i.csv", "body\nx\n", "has no column \"text\" (columns: [\"body\"]): choose one with --text-field"),
            ("j.csv", "text,n\nx\n", "cannot be read as a table"),
            ("k.json", "[{\"text\": 1}]", "element 0: its \"text\" is a number"),
            ("l.json", "[1", "is not a valid JSON array of objects"),
            ("m.bin", "x", "has an unknown file extension"),
            ("n.zip", "x", "rename it to .txt if it is text"),
        ] {
            let got = ids(&write(name, text), None).unwrap_err();
            assert!(got.contains(told) && got.contains(name), "{name}: {got}");
        }
        // What can be read only once.
        assert!(ids(Path::new("/dev/null"), None).unwrap_err().contains("is not a regular file"));
    }

    #[test]
    fn a_column_of_a_parquet_file_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("all.parquet");
        let schema = "message schema { required int32 n; required byte_array body (utf8); required byte_array raw; }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut writer = SerializedFileWriter::new(File::create(&path).unwrap(), schema, Arc::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int32Type>().write_batch(&[1, 2], None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let texts = ["Hello world", "Hello"].map(ByteArray::from);
        column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let texts = ["Hello", " world"].map(ByteArray::from);
        column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        // Once with the mark of a text, once without.
        assert_eq!(ids(&path, Some("body")).unwrap(), [15496, 995, 50256, 15496, 50256]);
        assert_eq!(ids(&path, Some("raw")).unwrap(), [15496, 50256, 995, 50256]);
        let told = ids(&path, None).unwrap_err();
        assert!(told.contains("no column \"text\" with texts (columns: [\"n\", \"body\", \"raw\"])"), "{told}");
        std::fs::write(&path, "PAR1").unwrap();
        assert!(ids(&path, None).unwrap_err().contains("cannot be read as Parquet"));
    }

    #[test]
    fn lists_and_fractions_of_a_parquet_file_are_labels() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("all.parquet");
        let schema = "message schema { required group tags (LIST) { repeated group list { required byte_array element (utf8); } } \
                      required float score; }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut writer = SerializedFileWriter::new(File::create(&path).unwrap(), schema, Arc::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let tags = ["a", "b", "c"].map(ByteArray::from);
        // The second row has none.
        let levels = [[1, 1, 0, 1], [0, 1, 0, 0]];
        column.typed::<ByteArrayType>().write_batch(&tags, Some(&levels[0]), Some(&levels[1])).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<FloatType>().write_batch(&[0.1, 2.0, f32::NAN], None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        let read = |name, holds| -> Result<Vec<String>, String> {
            let (rows, ..) = read_rows(&path, &[FieldOf { name, option: "label-field", holds }], None)
                .map_err(|error| error.to_string())?;
            Ok(rows.into_iter().flatten().flatten().map(|cell| cell.to_string()).collect())
        };
        assert_eq!(read("tags", Holds::Label).unwrap(), ["[\"a\", \"b\"]", "[]", "[\"c\"]"]);
        assert_eq!(read("score", Holds::Label).unwrap(), ["0.1", "2.0", "NaN"]);
        assert!(read("tags", Holds::TextOrNothing).unwrap_err().contains("has no column \"tags\" with labels"));
        assert!(read("score", Holds::TextOrNothing).unwrap_err().contains("its \"score\" is a floating-point number"));
    }
}
