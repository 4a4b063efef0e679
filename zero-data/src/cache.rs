//! The token cache: tokenized text on a disk, written once for all runs and ranks of a machine.
//!
//! A file's name is derived from its inputs (the files with their sizes and times, the tokenizer, the field). It is a
//! safetensors file with one long row of ids, like one that a user can provide. One process writes it, under a temporary
//! name, and renames it at the end; the others wait as long as it grows.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde_json::json;

use super::TokenizeOptions;
use super::documents::{self, DataFile};
use super::token_file::TokenFile;
use super::tokenizer::Tokenizer;
use crate::error::{Result, io, wrong_data};

/// Version of the files' format and of the tokenization.
const VERSION: u32 = 2;

/// The longest wait for a cache file of another process that does not grow.
const PATIENCE: Duration = Duration::from_secs(600);

const POLL: Duration = Duration::from_millis(200);

/// Bytes of a file's header, padded with blanks as the format allows: the number of ids is only known at the end.
const HEADER: usize = 256;

/// Opens the tokens of `files` in the cache, and creates them first if they are missing.
pub(super) fn open(
    source: &Path,
    files: &[DataFile],
    options: &TokenizeOptions<'_>,
    tokenizer: &Tokenizer,
) -> Result<TokenFile> {
    let folder = match options.cache {
        Some(folder) => folder.to_path_buf(),
        None => default_folder(source)?,
    };
    std::fs::create_dir_all(&folder).map_err(io("create", &folder))?;
    let mut hasher = DefaultHasher::new();
    let absolute = std::fs::canonicalize(source).map_err(io("read", source))?;
    (
        VERSION,
        absolute,
        files,
        tokenizer.checksum,
        tokenizer.tokens(),
        tokenizer.end(),
        options.field,
        options.sentences,
    )
        .hash(&mut hasher);
    let stem = source.file_stem().unwrap_or_default().to_string_lossy();
    let name = format!("{stem}-{:016x}", hasher.finish());
    let path = folder.join(format!("{name}.safetensors"));
    if !path.is_file() {
        let aside = folder.join(format!("{name}.making"));
        let made =
            File::options().create(true).truncate(false).write(true).open(&aside).map_err(io("write", &aside))?;
        lock(&made, &aside)?;
        // Another process may have created it meanwhile.
        if !path.is_file() {
            make(made, &aside, files, options, tokenizer)?;
            std::fs::rename(&aside, &path).map_err(io("write", &path))?;
        } else {
            // Opened after that process had renamed its own: nobody writes this one.
            let _ = std::fs::remove_file(&aside);
        }
    }
    TokenFile::open(&path)
}

fn default_folder(source: &Path) -> Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    cache.map(|cache| cache.join("zero")).ok_or_else(|| {
        let problem = "is large, so its tokens are cached on disk, but neither XDG_CACHE_HOME nor HOME is set: choose \
                       a folder with --token-cache DIR";
        wrong_data(source, problem)
    })
}

/// Waits for the lock while its holder writes.
fn lock(made: &File, path: &Path) -> Result<()> {
    let (mut size, mut since) = (0, Instant::now());
    while let Err(error) = flock(made, FlockOperation::NonBlockingLockExclusive) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(io("lock", path)(error.into()));
        }
        let now = made.metadata().map_err(io("read", path))?.len();
        if now != size {
            (size, since) = (now, Instant::now());
        } else if since.elapsed() > PATIENCE {
            let problem = "is being written by another process, which has made no progress for ten minutes: stop that \
                           process, or use another --token-cache";
            return Err(wrong_data(path, problem));
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

fn make(
    made: File,
    path: &Path,
    files: &[DataFile],
    options: &TokenizeOptions<'_>,
    tokenizer: &Tokenizer,
) -> Result<()> {
    let bytes: u64 = files.iter().map(|file| file.bytes).sum();
    eprintln!(
        "tokenizing {} of text into {} (once; later runs read this file)",
        zero_core::estimate::format_bytes(bytes),
        path.with_extension("safetensors").display()
    );
    // Remains of a process that was killed.
    made.set_len(0).map_err(io("write", path))?;
    let mut out = BufWriter::new(made);
    let write = io("write", path);
    out.write_all(&[b' '; HEADER]).map_err(&write)?;
    let narrow = tokenizer.tokens() <= usize::from(u16::MAX) + 1;
    let mut count = 0usize;
    documents::encode(files, options.field, tokenizer, |ids| {
        count += ids.len();
        let mut ids = ids.iter();
        match narrow {
            true => ids.try_for_each(|&id| out.write_all(&(id as u16).to_le_bytes())),
            false => ids.try_for_each(|&id| out.write_all(&id.to_le_bytes())),
        }
        .map_err(&write)
    })?;
    let (dtype, width) = if narrow { ("U16", 2) } else { ("U32", 4) };
    let header =
        json!({ "input_ids": { "dtype": dtype, "shape": [count], "data_offsets": [0, count * width] } }).to_string();
    let length = ((HEADER - 8) as u64).to_le_bytes();
    out.seek(SeekFrom::Start(0)).and_then(|_| out.write_all(&length)).map_err(&write)?;
    out.write_all(header.as_bytes()).map_err(&write)?;
    let made = out.into_inner().map_err(|error| write(error.into_error()))?;
    made.sync_all().map_err(&write)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_once_and_again_when_the_text_has_changed() {
        let dir = tempfile::tempdir().unwrap();
        let (text, cache) = (dir.path().join("book.txt"), dir.path().join("cache"));
        let options =
            TokenizeOptions { vocab_size: 50257, n_positions: 8, cache: Some(&cache), ..TokenizeOptions::default() };
        let ids = |content: &str| {
            std::fs::write(&text, content).unwrap();
            let tokenizer = Tokenizer::find(&text, &options).unwrap();
            // At once, as ranks do.
            let opened = std::thread::scope(|scope| {
                let open = || open(&text, &documents::files(&text).unwrap(), &options, &tokenizer).unwrap();
                [0; 4].map(|_| scope.spawn(open)).map(|thread| thread.join().unwrap())
            });
            opened.map(|file| {
                let mut ids = vec![0; file.len()];
                file.read(0, &mut ids).unwrap();
                ids
            })
        };
        let names = || std::fs::read_dir(&cache).unwrap().count();
        assert_eq!(ids("Hello world"), [0; 4].map(|_| vec![15496, 995]));
        assert_eq!(names(), 1);
        assert_eq!(ids("Hello world!"), [0; 4].map(|_| vec![15496, 995, 0]));
        assert_eq!(names(), 2);
        // The remains of a process that was killed are replaced.
        for entry in std::fs::read_dir(&cache).unwrap() {
            let path = entry.unwrap().path();
            std::fs::rename(&path, path.with_extension("making")).unwrap();
        }
        assert_eq!(ids("Hello world!"), [0; 4].map(|_| vec![15496, 995, 0]));
    }
}
