//! cargo test -p zero-core --test checkpoint_fuzz
//!
//! Damaged and invented manifests and safetensors headers: each is read or refused. None makes a parser panic, and none
//! makes it allocate more than a few times the bytes of the input.
//!
//! # The bound
//!
//! For every input, mutated or crafted, accepted or refused: the sum of live allocations, including the result and the error
//! but not the input, is at most 16 bytes per byte of JSON plus 8 KiB (measured: at most 13 bytes). Files have a size limit (a
//! header 100 MB, a manifest 1 GiB). So a *declared* size (a header's length, a shape, a number of ranks) allocates nothing.
//!
//! The values of a state take up to 126 times its text. They are created when [`Checkpoint::state`] is called, not before.

mod common;
#[path = "common/counting.rs"]
mod counting;
#[path = "common/mutate.rs"]
mod mutate;
#[path = "common/tally.rs"]
mod tally;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use common::{save_specs, small_specs};
use counting::{Counting, Taken, taken};
use mutate::{Random, mutate, mutate_file, on};
use tally::{ACCEPTED, SMALL, Tally, outcome};
use zero_core::checkpoint::{Checkpoint, CheckpointError, Header, Manifest, SafetensorsWriter, SaveOptions, verify};

/// Numbers of mutated inputs, by kind.
const MANIFESTS: usize = 250_000;
const HEADERS: usize = 250_000;
const HEADER_FILES: usize = 20_000;
const CHECKPOINTS: usize = 10_000;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SEAL: usize = r#"{"crc32c":"00000000","#.len();

/// Returns a manifest: the correct checksum, then `body`.
fn seal(body: &[u8]) -> Vec<u8> {
    [format!(r#"{{"crc32c":"{:08x}","#, crc32c::crc32c(body)).as_bytes(), body].concat()
}

fn parse_manifest(bytes: &[u8]) -> Result<Manifest, CheckpointError> {
    Manifest::parse(bytes, Path::new("m"))
}

/// Returns the bytes of valid manifests, one with many tensors and one with few.
fn manifests() -> [Vec<u8>; 2] {
    let dir = tempfile::tempdir().unwrap();
    let few = small_specs().into_iter().take(2).collect::<Vec<_>>();
    [(1, small_specs(), 3), (2, few, 1)].map(|(step, specs, world)| {
        let saved = save_specs(&specs, dir.path(), step, world, &SaveOptions::default());
        fs::read(saved[0].path.join("manifest.json")).unwrap()
    })
}

/// Returns the bytes of valid safetensors files, one with many tensors and one with few.
fn files() -> [Vec<u8>; 2] {
    let dir = tempfile::tempdir().unwrap();
    let texts = BTreeMap::from([("rank".to_string(), "0".to_string()), ("wörld".to_string(), "\n\"2\"".to_string())]);
    [small_specs(), small_specs().into_iter().take(2).collect()].map(|specs| {
        let path = dir.path().join(format!("{}.safetensors", specs.len()));
        let mut writer = SafetensorsWriter::create(&path, &texts, specs.clone()).unwrap();
        for (name, dtype, shape) in &specs {
            writer.write(name, &vec![7; shape.iter().product::<usize>() * dtype.size()]).unwrap();
        }
        writer.finish().unwrap();
        fs::read(path).unwrap()
    })
}

/// Returns the header's JSON of a valid file, and the number of bytes after it.
fn header_of(file: &[u8]) -> (Vec<u8>, u64) {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (file[8..8 + length].to_vec(), (file.len() - 8 - length) as u64)
}

#[test]
fn mutated_manifests() {
    let (sound, mut random, mut tally) = (manifests(), Random(1), Tally::counting_from(512));
    for case in 0..MANIFESTS {
        let mut bytes = sound[case % sound.len()].clone();
        // Three in four have the right checksum, without which little is read.
        if case % 8 < 6 {
            let mut body = bytes.split_off(SEAL);
            mutate(&mut random, &mut body);
            bytes = seal(&body);
        } else {
            mutate(&mut random, &mut bytes);
        }
        let (result, taken) = on("a manifest", case, &bytes, || taken(|| parse_manifest(&bytes)));
        tally.add(&outcome(&result), bytes.len(), taken);
        if let Ok(manifest) = result {
            assert_eq!(manifest.file_bytes.len(), manifest.world);
            for tensor in manifest.tensors.values() {
                assert_eq!(tensor.crc32c.len(), manifest.world);
                assert!(tensor.numel().checked_mul(tensor.dtype.size()).is_some());
            }
        }
    }
    tally.print("mutated manifests");
}

#[test]
fn mutated_headers() {
    let (sound, mut random, mut tally) = (files().map(|file| header_of(&file)), Random(2), Tally::counting_from(512));
    for case in 0..HEADERS {
        let (mut json, mut data_bytes) = sound[case % sound.len()].clone();
        mutate(&mut random, &mut json);
        if random.below(8) == 0 {
            data_bytes = random.next() >> random.below(64);
        }
        let parse = || Header::parse(&json, data_bytes);
        let (result, taken) = on("a header", case, &json, || taken(parse));
        let result = result.map_err(|reason| CheckpointError::BadHeader { path: "h".into(), reason });
        tally.add(&outcome(&result), json.len(), taken);
        if let Ok(header) = result {
            let total: u64 = header.tensors.values().map(|entry| entry.data_offsets.1 - entry.data_offsets.0).sum();
            assert_eq!(total, data_bytes);
        }
    }
    tally.print("mutated headers");
}

/// Returns how many bytes of JSON a reader of the file may look at: 0 if the declared length is wrong.
fn json_bytes(file: &[u8]) -> usize {
    let Some((length, rest)) = file.split_first_chunk::<8>() else { return 0 };
    usize::try_from(u64::from_le_bytes(*length)).ok().filter(|length| *length <= rest.len()).unwrap_or(0)
}

/// Writes these bytes to a file, without `fs::write`, after which some file systems wait for the disk.
fn put(path: &Path, bytes: &[u8]) {
    let mut file = File::options().create(true).truncate(false).write(true).open(path).unwrap();
    file.write_all(bytes).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
}

/// Reads the header of a file with these bytes.
fn read_header(path: &Path, bytes: &[u8]) -> (Result<Header, CheckpointError>, Taken) {
    put(path, bytes);
    let file = File::open(path).unwrap();
    taken(|| Header::read(&file, path))
}

#[test]
fn mutated_files() {
    let (sound, mut random, mut tally) = (files(), Random(3), Tally::counting_from(512));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    for case in 0..HEADER_FILES {
        let mut bytes = sound[case % sound.len()].clone();
        mutate_file(&mut random, &mut bytes);
        let (result, taken) = on("a file", case, &bytes, || read_header(&path, &bytes));
        tally.add(&outcome(&result), json_bytes(&bytes), taken);
    }
    tally.print("mutated safetensors files");
}

#[test]
fn mutated_checkpoints() {
    let (mut random, mut tally) = (Random(4), Tally::counting_from(512));
    let dir = tempfile::tempdir().unwrap();
    let specs: Vec<_> = small_specs().into_iter().step_by(3).collect();
    let folder = save_specs(&specs, dir.path(), 1, 2, &SaveOptions::default()).swap_remove(0).path;
    let names = ["manifest.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"];
    let paths = names.map(|name| folder.join(name));
    let sound = paths.each_ref().map(|path| fs::read(path).unwrap());
    for case in 0..CHECKPOINTS {
        // One of the three, and in most cases the manifest says how large a mutated file is, so that it is looked into.
        let which = case % 3;
        let mut manifest = sound[0].clone();
        let mut body = manifest.split_off(SEAL);
        let mut file = Vec::new();
        if which == 0 {
            mutate(&mut random, &mut body);
        } else {
            file = sound[which].clone();
            mutate_file(&mut random, &mut file);
            put(&paths[which], &file);
            if random.below(8) > 0 {
                let size = |bytes: &[u8]| format!("{}\",\"bytes\":{}", names[which], bytes.len());
                let text = String::from_utf8(body).unwrap();
                body = text.replace(&size(&sound[which]), &size(&file)).into_bytes();
            }
        }
        let manifest = seal(&body);
        put(&paths[0], &manifest);
        on("a checkpoint", case, &[&manifest[..], &file].concat(), || {
            let files = [1, 2].map(|rank| if rank == which { &file } else { &sound[rank] });
            let json = manifest.len() + files.iter().map(|file| json_bytes(file)).sum::<usize>();
            let (result, opened) = taken(|| Checkpoint::open(&folder));
            tally.add(&outcome(&result), json, opened);
            // What is read of tensors is no more than what is in the files.
            let data = files.iter().map(|file| file.len()).sum::<usize>();
            let (problems, verified) = taken(|| verify(&folder));
            assert!(result.is_ok() || !problems.is_empty());
            assert!(verified.largest <= (manifest.len() + data).max(SMALL), "{verified:?}");
            if let Ok(checkpoint) = result {
                let ((), read) = taken(|| {
                    for (name, entry) in checkpoint.tensors().iter() {
                        let _ = checkpoint.read(name, 0..entry.numel());
                    }
                });
                assert!(read.largest <= data.max(SMALL), "{read:?}");
                assert!(checkpoint.verify().is_empty() || !problems.is_empty());
            }
        });
        if which > 0 {
            put(&paths[which], &sound[which]);
        }
    }
    put(&paths[0], &sound[0]);
    assert!(verify(&folder).is_empty());
    tally.print("mutated checkpoints");
}

const MILLION: usize = 1_000_000;

/// Returns `count` results of `entry`, separated by commas.
fn many(count: usize, entry: impl Fn(usize) -> String) -> String {
    (0..count).map(entry).collect::<Vec<_>>().join(",")
}

fn tensor(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"dtype":{dtype:?},"shape":{shape},"data_offsets":{offsets}}}"#)
}

#[test]
fn crafted_headers() {
    let mut tally = Tally::counting_from(1 << 16);
    let mut case = |what: &str, json: String, data_bytes: u64, accepted: bool| {
        let (result, taken) = taken(|| Header::parse(json.as_bytes(), data_bytes));
        let got = result.as_ref().map(|_| "accepted").map_err(|reason| reason.get(..300).unwrap_or(reason));
        assert_eq!(result.is_ok(), accepted, "{what}: {got:?}");
        drop(result);
        tally.add(if accepted { ACCEPTED } else { what }, json.len(), taken);
    };
    let u8s = |shape: &str| format!(r#"{{"a":{}}}"#, tensor("U8", shape, "[0,2]"));
    case("huge shape", u8s("[9223372036854775807,2]"), 2, false);
    case("shape whose product wraps to 2", u8s("[9223372036854775809,2]"), 2, false);
    case("shape whose product wraps to 0", u8s("[4294967296,4294967296]"), 0, false);
    case("huge shape with a 0", u8s("[9223372036854775807,4,0]"), 0, false);
    case("dimension above 64 bits", u8s("[18446744073709551616]"), 2, false);
    case("64 dimensions", u8s(&format!("[2,{}]", many(63, |_| "1".into()))), 2, true);
    case("65 dimensions", u8s(&format!("[2,{}]", many(64, |_| "1".into()))), 2, false);
    let largest = many(64, |_| u64::MAX.to_string());
    case("64 dimensions of 20 digits", u8s(&format!("[{largest}]")), 2, false);
    case("million dimensions of 1", u8s(&format!("[2,{}]", many(MILLION, |_| "1".into()))), 2, false);
    case("dimensions of 0, a full vector", u8s(&format!("[{}]", many((1 << 20) + 1, |_| "0".into()))), 2, false);
    case("end before begin", format!(r#"{{"a":{}}}"#, tensor("U8", "[2]", "[2,0]")), 2, false);
    case(
        "offsets at the end of 64 bits",
        u8s("[2]").replace("[0,2]", "[18446744073709551613,18446744073709551615]"),
        2,
        false,
    );
    case("offsets out of range", u8s("[3]").replace("[0,2]", "[0,3]"), 2, false);
    case("overlapping", format!(r#"{{"a":{0},"b":{0}}}"#, tensor("U8", "[2]", "[0,2]")), 2, false);
    case("the same name twice", format!(r#"{{"a":{0},"a":{0}}}"#, tensor("U8", "[0]", "[0,0]")), 0, false);
    case(
        "the same name twice, of two tensors",
        format!(r#"{{"a":{},"a":{}}}"#, tensor("U8", "[1]", "[0,1]"), tensor("U8", "[1]", "[1,2]")),
        2,
        false,
    );
    case("the texts twice", r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0, false);
    // 7 tensors of 2^61 - 1 bytes, so that sums of ends and lengths come near 2^64.
    let huge = many(7, |at| {
        let (begin, bytes) = (at as u64 * ((1 << 61) - 1), (1u64 << 61) - 1);
        format!(r#""{at}":{}"#, tensor("U8", &format!("[{bytes}]"), &format!("[{begin},{}]", begin + bytes)))
    });
    case("sums near 2^64", format!("{{{huge}}}"), u64::MAX, false);
    for (open, close) in [("[", "]"), (r#"{"a":"#, "}"), (r#"{"a":{"x":"#, "}}"), (r#"{"__metadata__":{"a":"#, "}}")] {
        let what = format!("million times {open}");
        case(&what, open.repeat(MILLION), 0, false);
        case(&what, format!("{}0{}", open.repeat(MILLION), close.repeat(MILLION)), 0, false);
    }
    let nested = format!(
        r#"{{"a":{{"x":{}{},"dtype":"U8","shape":[0],"data_offsets":[0,0]}}}}"#,
        "[".repeat(100),
        "]".repeat(100)
    );
    case("an unknown key of 100 brackets", nested.clone(), 0, true);
    case("an unknown key of a million brackets", nested.replace(&"[".repeat(100), &"[".repeat(MILLION)), 0, false);
    let empty = tensor("U8", "[0]", "[0,0]");
    case("an entry that is a list", r#"{"a":["U8",[0],[0,0]]}"#.into(), 0, true);
    case("million tensors", format!("{{{}}}", many(MILLION, |at| format!(r#""{at:x}":{empty}"#))), 0, true);
    case(
        "million texts",
        format!(r#"{{"__metadata__":{{{}}}}}"#, many(MILLION, |at| format!(r#""{at:x}":"""#))),
        0,
        true,
    );
    case(
        "million texts of one name",
        format!(r#"{{"__metadata__":{{{}}}}}"#, many(MILLION, |_| r#""":"""#.into())),
        0,
        true,
    );
    let unprintable = "\u{7f}".repeat(MILLION);
    case("a text for a shape", u8s(&format!("\"{unprintable}\"")), 2, false);
    case("a text for a tensor", format!(r#"{{"a":"{unprintable}"}}"#), 0, false);
    case("a text for a type", format!(r#"{{"a":{}}}"#, empty.replace("U8", &unprintable)), 0, false);
    case("a long name", format!(r#"{{"{unprintable}":{}}}"#, tensor("U8", "[1]", "[0,0]")), 0, false);
    case("a name of escapes", format!(r#"{{"{}":{empty}}}"#, r"\u007f".repeat(MILLION)), 0, true);
    // Into a buffer that doubles, the first would go when its size is nearly twice the text's.
    let escapes = (0..18).map(|bits| format!(r"\n{}", "x".repeat(1 << bits))).collect::<String>() + r"\n";
    for text in [&escapes, &r"\n".repeat(MILLION / 4), &format!(r"\n{}", "x".repeat(MILLION))] {
        case("a long name with escapes", format!(r#"{{"{text}":{empty}}}"#), 0, true);
        case("a long name with escapes, twice", format!(r#"{{"{text}":{empty},"{text}":{empty}}}"#), 0, false);
        case("a long name with escapes of no tensor", format!(r#"{{"{text}":0}}"#), 0, false);
        case("a long text with escapes", format!(r#"{{"__metadata__":{{"a":"{text}","{text}":""}}}}"#), 0, true);
        case("half a pair after escapes", format!(r#"{{"__metadata__":{{"a":"{text}\ud800"}}}}"#), 0, false);
        case("a long key with escapes", format!(r#"{{"a":{{"{text}":0,{}}}"#, &empty[1..]), 0, true);
        case("a type with escapes", format!(r#"{{"a":{}}}"#, empty.replace("U8", text)), 0, false);
        case("a text with escapes for a header", format!("\"{text}\""), 0, false);
    }
    case("a number of a million digits", u8s(&format!("[{}]", "9".repeat(MILLION))), 2, false);
    case("no JSON", "\0".repeat(MILLION), 0, false);
    tally.print("crafted headers");
}

#[test]
fn lengths_that_are_lies() {
    let (sound, dir) = (files()[1].clone(), tempfile::tempdir().unwrap());
    let mut tally = Tally::counting_from(512);
    let bytes = sound.len() as u64;
    let true_length = bytes - 8 - header_of(&sound).1;
    for length in
        [0, 1, true_length - 1, true_length + 1, bytes - 9, bytes - 8, bytes - 7, bytes, 100_000_000, 100_000_001]
            .into_iter()
            .chain((31..64).flat_map(|bits| [(1u64 << bits) - 8, 1 << bits]))
            .chain([u64::MAX - 8, u64::MAX - 7, u64::MAX])
    {
        let file = [&length.to_le_bytes(), &sound[8..]].concat();
        let (result, taken) = read_header(&dir.path().join("x"), &file);
        assert!(matches!(result, Err(CheckpointError::BadHeader { .. })), "{length}");
        tally.add("refused", json_bytes(&file), taken);
    }
    tally.print("false lengths");
}

#[test]
fn crafted_manifests() {
    let mut tally = Tally::counting_from(1 << 16);
    let sound = |state: &str, tensors: &str, world: &str, files: &str| {
        format!(
            r#""format_version":1,"crate_version":"0","id":"","step":1,"world":{world},"saved_unix_ms":0,"files":[{files}],"tensors":{{{tensors}}},"state":{state}}}"#
        )
    };
    let file = r#"{"name":"rank-00000-of-00001.safetensors","bytes":0}"#;
    let of_state = |state: &str| sound(state, "", "1", file);
    let of_tensors = |tensors: &str| sound("0", tensors, "1", file);
    let of_shape = |shape: &str| of_tensors(&format!(r#""a":{{"dtype":"U8","shape":{shape},"crc32c":[0]}}"#));
    let mut case = |what: &str, body: String, accepted: bool| {
        let bytes = seal(body.as_bytes());
        drop(body);
        let (result, taken) = taken(|| parse_manifest(&bytes));
        assert_eq!(result.is_ok(), accepted, "{what}: {}", outcome(&result));
        drop(result);
        tally.add(if accepted { ACCEPTED } else { what }, bytes.len(), taken);
    };
    case("state of integers, a full vector", of_state(&format!("[{}]", many((1 << 20) + 1, |_| "0".into()))), true);
    case("state of small objects", of_state(&format!("[{}]", many(MILLION / 4, |_| r#"{"":0}"#.into()))), true);
    let chain = format!("{}0{}", r#"{"":"#.repeat(100), "}".repeat(100));
    case("state of chains of objects", of_state(&format!("[{}]", many(MILLION / 400, |_| chain.clone()))), true);
    let chain = format!("{}{}", "[".repeat(100), "]".repeat(100));
    case("state of chains of arrays", of_state(&format!("[{}]", many(MILLION / 400, |_| chain.clone()))), true);
    case("state of a million keys", of_state(&format!("{{{}}}", many(MILLION, |at| format!(r#""{at:x}":0"#)))), true);
    // Which shows when somebody asks for it.
    case("state of a long number", of_state(&"9".repeat(MILLION)), true);
    assert!(parse_manifest(&seal(of_state("1e999").as_bytes())).unwrap().state(Path::new("x")).is_err());
    case("state of a long fraction", of_state(&format!("0.{}", "9".repeat(MILLION))), true);
    for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
        let what = format!("state of a million {open}");
        case(&what, of_state(&format!("{}0{}", open.repeat(MILLION), close.repeat(MILLION))), false);
        case(&what, of_state(&open.repeat(MILLION)), false);
    }
    case("an unknown key of a million brackets", of_state(&format!("0,\"x\":{}", "[".repeat(MILLION))), false);
    case("a size of no file", of_shape("[9223372036854775807,2]"), false);
    case("a size that wraps to 1", of_shape("[9223372036854775809,2]"), false);
    case("a size that wraps to 0", of_shape("[4294967296,4294967296,0]"), false);
    case("the largest size", of_shape("[9223372036854775807]"), true);
    case("64 dimensions", of_shape(&format!("[{}]", many(64, |_| "1".into()))), true);
    case("million dimensions", of_shape(&format!("[{}]", many(MILLION, |_| "1".into()))), false);
    case(
        "million ranks in a tensor",
        of_shape("[1]").replace("[0]", &format!("[{}]", many(MILLION, |_| "0".into()))),
        false,
    );
    let empty = |at| format!(r#""{at:x}":{{"dtype":"U8","shape":[0],"crc32c":[null]}}"#);
    case("million tensors", of_tensors(&many(MILLION, empty)), true);
    case("the same tensor twice", of_tensors(&many(2, |_| empty(1))), false);
    for world in ["0", "2", "4294967296", "18446744073709551615", "18446744073709551616", "-1", "1.0", "null", "[1]"] {
        case("ranks without files", sound("0", "", world, file), false);
    }
    let file_of = |at: usize| format!(r#"{{"name":"rank-{at:05}-of-1000000.safetensors","bytes":0}}"#);
    case("million ranks", sound("0", "", "1000000", &many(MILLION, file_of)), true);
    let files = many(1000, |at| format!(r#"{{"name":"rank-{at:05}-of-01000.safetensors","bytes":0}}"#));
    for (sum, shape) in [("0", "1000"), ("4294967295", "1000"), ("null", "0")] {
        let tensor =
            |at| format!(r#""{at:x}":{{"dtype":"U8","shape":[{shape}],"crc32c":[{}]}}"#, many(1000, |_| sum.into()));
        case("tensors of a thousand ranks", sound("0", &many(300, tensor), "1000", &files), true);
    }
    let few = many(MILLION / 2, file_of);
    case("half a million files of a million ranks", sound("0", "", "1000000", &few), false);
    case("a file elsewhere", of_state("0").replace("rank-00000-of-00001", "../../etc/passwd"), false);
    let unprintable = "\u{7f}".repeat(MILLION);
    case("a text for a number", of_state("0").replace("\"step\":1", &format!("\"step\":\"{unprintable}\"")), false);
    case("a long name of a file", of_state("0").replace("rank-", &unprintable), false);
    let escapes = (0..18).map(|bits| format!(r"\n{}", "x".repeat(1 << bits))).collect::<String>() + r"\n";
    for text in [&escapes, &r"\n".repeat(MILLION / 4), &unprintable] {
        let of_text = |from: &str, to: &str| of_state("0").replace(&format!("{from}\""), &format!("{to}{text}\""));
        case("a long state", of_state(&format!("\"{text}\"")), true);
        case("a long key", of_state(&format!("0,\"{text}\":1")), true);
        case("a long id", of_text("\"id\":\"", "\"id\":\""), true);
        case("a long version of a program", of_text("\"crate_version\":\"0", "\"crate_version\":\""), true);
        case(
            "a later format and a long version of a program",
            of_text("\"crate_version\":\"0", "\"crate_version\":\"")
                .replace("format_version\":1", "format_version\":2"),
            false,
        );
        case("a long name", of_tensors(&format!(r#""{text}":{{"dtype":"U8","shape":[],"crc32c":[0]}}"#)), true);
        case("a long name of a tensor of none", of_tensors(&format!(r#""{text}":0"#)), false);
    }
    case(
        "a number of a million digits",
        of_state("0").replace("\"step\":1", &format!("\"step\":{}", "9".repeat(MILLION))),
        false,
    );
    case("the same key a million times", of_state(&format!("0,{}", many(MILLION, |_| "\"step\":1".into()))), false);
    tally.print("crafted manifests");
}
