//! Text from a file or a folder.

use std::fs;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use crate::compressed::{MARK, inner_extension, open, open_text, read_error};
use crate::encode::MAX_UNCUT_BYTES;
#[cfg(feature = "parquet")]
use crate::parquet::each_row;
use crate::{Corpus, DataError};

/// Extensions, in lower case, of the files that are read from a folder. A .json file is read only if its lines contain
/// texts, since most .json files are metadata.
const TEXT_EXTENSIONS: [&str; 7] = ["txt", "rs", "md", "jsonl", "ndjson", "json", "parquet"];

/// The most bytes of a line of .jsonl.
const LONGEST_LINE: u64 = 256 << 20;

/// The most files that the error for a folder without text names.
const MAX_NAMED: usize = 3;

impl Corpus {
    /// Reads one file, whatever its extension, or all text files below a folder, in sorted order:
    /// - Extensions are .txt, .rs, .md, .jsonl (or .ndjson), .json and .parquet, in any case. All except .parquet may
    ///   be followed by .gz or .zst; such files are decompressed.
    /// - Each line of a .jsonl or .json file is one document. Each row of a .parquet file is one document, from its
    ///   column `text`.
    /// - Links are followed. A byte-order mark is not part of a text.
    /// - Hidden files are skipped. So are folders that are marked as caches by a `CACHEDIR.TAG`, such as cargo's
    ///   `target`. In a folder, a .json file is skipped too if its first line has no text.
    ///
    /// # Errors
    /// Returns an error if
    /// - the path is missing, or a link has no target,
    /// - a single given file is not UTF-8 text (within a folder, such a file is skipped and counted),
    /// - a line or row has no text,
    /// - a .parquet file is read without the feature `parquet`, or
    /// - there is no text at all.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        let kind = fs::metadata(path).map_err(|error| DataError::read(path, error))?;
        let mut corpus = Self::default();
        if kind.is_dir() {
            for file in text_below(path)? {
                corpus.add_or_skip(&file)?;
            }
        } else {
            corpus.add_file(path)?;
        }
        if corpus.documents().is_empty() {
            return Err(no_text(path, kind.is_dir(), corpus.skipped())?);
        }
        Ok(corpus)
    }

    /// Adds a file's documents, or counts it as skipped if it is not text.
    pub(super) fn add_or_skip(&mut self, path: &Path) -> Result<(), DataError> {
        match self.add_file(path) {
            Err(DataError::Binary { path, reason }) => {
                tracing::debug!(path = %path.display(), reason, "skipped");
                self.count_skipped();
                Ok(())
            }
            other => other,
        }
    }

    fn add_file(&mut self, path: &Path) -> Result<(), DataError> {
        let name = path.display().to_string();
        if has_lines(path) {
            check_text(path)?;
            each_text(path, |number, text| {
                self.push(format!("{name}:{number}"), text);
                Ok(())
            })?;
        } else {
            self.push(name, read_text(path)?);
        }
        self.count_file();
        Ok(())
    }
}

/// Finds files of token ids: the given file, or the files of a folder that contains no text, sorted by name. Files for
/// validation come last. The number of these files is returned too. Returns `None` if there are no files of token ids.
pub(super) fn token_files(path: &Path) -> Result<Option<(Vec<PathBuf>, usize)>, DataError> {
    if !path.is_dir() {
        let is_bin = inner_extension(path).is_some_and(|extension| extension == "bin");
        return Ok(is_bin.then(|| (vec![path.to_owned()], 0)));
    }
    let files = text_files(path, &["bin"])?;
    if files.is_empty() || !text_files(path, &TEXT_EXTENSIONS)?.is_empty() {
        return Ok(None);
    }
    // nanoGPT writes train.bin and val.bin; llm.c writes NAME_train_000001.bin and NAME_val_000000.bin.
    let is_validation = |file: &PathBuf| {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        stem.split(|c: char| !c.is_alphanumeric()).any(|word| matches!(word, "val" | "validation"))
    };
    let (back, mut front): (Vec<_>, Vec<_>) = files.into_iter().partition(is_validation);
    // If the names of all files mark them as validation, the files are used like any other data.
    let validation = if front.is_empty() { 0 } else { back.len() };
    front.extend(back);
    Ok(Some((front, validation)))
}

/// Returns the files below `folder` with one of the extensions, sorted component by component.
pub(super) fn text_files(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>, DataError> {
    files_below(folder, |extension| extension.is_some_and(|extension| extensions.contains(&extension)))
}

/// Returns the files below `folder` for whose extension `counts` is true, sorted component by component.
fn files_below(folder: &Path, counts: impl Fn(Option<&str>) -> bool) -> Result<Vec<PathBuf>, DataError> {
    let walk = WalkDir::new(folder).follow_links(true).sort_by_file_name().into_iter().filter_entry(|entry| {
        let hidden = entry.depth() > 0 && entry.file_name().to_string_lossy().starts_with('.');
        let cache = entry.depth() > 0 && entry.file_type().is_dir() && entry.path().join("CACHEDIR.TAG").exists();
        !hidden && !cache
    });
    let mut files = Vec::new();
    for entry in walk {
        let entry = entry.map_err(|error| {
            let path = error.path().unwrap_or(folder).to_owned();
            DataError::Read { path, source: error.into() }
        })?;
        if entry.file_type().is_file() && counts(inner_extension(entry.path()).as_deref()) {
            files.push(entry.into_path());
        }
    }
    Ok(files)
}

/// The text files below a folder.
pub(super) fn text_below(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut files = text_files(folder, &TEXT_EXTENSIONS)?;
    files.retain(|file| {
        let is_text = !is_json(file) || begins_with_a_text(file);
        if !is_text {
            tracing::warn!(
                "skipping {}: its first line is not a JSON object with a string field \"text\"",
                file.display()
            );
        }
        is_text
    });
    Ok(files)
}

/// True if the first line of a .json file is an object with a text.
fn begins_with_a_text(path: &Path) -> bool {
    let mut begins = false;
    let ended = each_line(path, |_, line| {
        begins = text_of_line(line).is_ok();
        // This error stops the visit after the first line.
        Err(DataError::NoExamples { path: path.to_owned() })
    });
    begins && ended.is_err()
}

/// Returns the error for a path without text. It names some of the other files at the path.
pub(super) fn no_text(path: &Path, is_folder: bool, skipped: usize) -> Result<DataError, DataError> {
    let others = if is_folder { files_below(path, |_| true)? } else { Vec::new() };
    let is_read =
        |file: &PathBuf| inner_extension(file).is_some_and(|extension| TEXT_EXTENSIONS.contains(&&*extension));
    let others = others.into_iter().filter(|file| !is_read(file)).take(MAX_NAMED).collect();
    Ok(DataError::Empty { path: path.to_owned(), skipped, others })
}

pub(super) fn read_text(path: &Path) -> Result<String, DataError> {
    check_text(path)?;
    let mut text = String::new();
    open_text(path)?.read_to_string(&mut text).map_err(|error| read_error(path, error))?;
    Ok(text)
}

/// Checks that a file is UTF-8 without NUL bytes, and returns the size of its text in bytes. NUL bytes are refused,
/// because files in UTF-16 and in many binary formats would otherwise count as valid UTF-8. Only a part of the file is
/// in memory at a time. Parquet files are checked when they are read.
pub(super) fn check_text(path: &Path) -> Result<u64, DataError> {
    if is_parquet(path) {
        return Ok(0);
    }
    let binary = |reason| DataError::Binary { path: path.to_owned(), reason };
    let mut source = open(path)?;
    let (mut bytes, mut before, mut mark, mut line) = (Vec::new(), 0, 0, 0);
    let most = if has_lines(path) { LONGEST_LINE } else { MAX_UNCUT_BYTES as u64 };
    loop {
        let read = source.by_ref().take(1 << 20).read_to_end(&mut bytes).map_err(|error| read_error(path, error))?;
        if let Some(position) = bytes.iter().position(|&byte| byte == 0) {
            return Err(binary(format!("byte {} is NUL", before + position as u64)));
        }
        let valid = match str::from_utf8(&bytes) {
            Ok(_) => bytes.len(),
            // A character may continue in bytes that have not been read yet.
            Err(error) if error.error_len().is_none() && read > 0 => error.valid_up_to(),
            Err(error) => {
                return Err(binary(format!("byte {} is not valid UTF-8", before + error.valid_up_to() as u64)));
            }
        };
        line = bytes[..valid]
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(line + valid as u64, |at| (valid - at) as u64);
        if line > most {
            return Err(DataError::NoBreak { path: path.to_owned(), most });
        }
        if before == 0 && bytes.starts_with(MARK) {
            mark = MARK.len() as u64;
        }
        bytes.drain(..valid);
        before += valid as u64;
        if read == 0 {
            return Ok(before - mark);
        }
    }
}

/// True if each line or row of a file is a document of its own.
pub(super) fn has_lines(path: &Path) -> bool {
    inner_extension(path).is_some_and(|extension| matches!(&*extension, "jsonl" | "ndjson" | "json" | "parquet"))
}

fn is_json(path: &Path) -> bool {
    inner_extension(path).is_some_and(|extension| extension == "json")
}

fn is_parquet(path: &Path) -> bool {
    inner_extension(path).is_some_and(|extension| extension == "parquet")
}

/// Visits the non-empty texts of a .jsonl or .parquet file with their line numbers, counted from 1.
pub(super) fn each_text(
    path: &Path,
    mut visit: impl FnMut(usize, String) -> Result<(), DataError>,
) -> Result<(), DataError> {
    each_line(path, |number, line| {
        let text =
            text_of_line(line).map_err(|reason| DataError::Json { path: path.to_owned(), line: number, reason })?;
        if text.is_empty() { Ok(()) } else { visit(number, text) }
    })
}

/// Visits the non-blank lines of a .jsonl file with their numbers, counted from 1. Each row of a .parquet file is
/// visited as an equivalent line.
pub(super) fn each_line(
    path: &Path,
    mut visit: impl FnMut(usize, &str) -> Result<(), DataError>,
) -> Result<(), DataError> {
    if is_parquet(path) {
        return each_row(path, visit);
    }
    let wrong = |line, reason: &str| DataError::Json { path: path.to_owned(), line, reason: reason.to_owned() };
    let mut source = open_text(path)?;
    let (mut line, mut is_first) = (String::new(), true);
    for number in 1.. {
        line.clear();
        let read =
            source.by_ref().take(LONGEST_LINE + 1).read_line(&mut line).map_err(|error| read_error(path, error))?;
        if read == 0 {
            break;
        }
        if read as u64 > LONGEST_LINE {
            return Err(wrong(number, "the line has more than 256 MiB"));
        }
        let content = line.trim_end_matches(['\r', '\n']);
        if content.trim().is_empty() {
            continue;
        }
        if is_first && is_json(path) && !is_one_object(content) {
            return Err(wrong(
                number,
                "the file is one JSON value, not one line per document (jq -c '.[]' turns a list into lines)",
            ));
        }
        is_first = false;
        visit(number, content)?;
    }
    Ok(())
}

/// True if a line is exactly one JSON object.
fn is_one_object(line: &str) -> bool {
    line.trim_start().starts_with('{') && serde_json::from_str::<serde::de::IgnoredAny>(line).is_ok()
}

#[cfg(not(feature = "parquet"))]
fn each_row(path: &Path, _visit: impl FnMut(usize, &str) -> Result<(), DataError>) -> Result<(), DataError> {
    let reason = "this program was built without the feature \"parquet\"".to_owned();
    Err(DataError::Parquet { path: path.to_owned(), reason })
}

fn text_of_line(line: &str) -> Result<String, String> {
    #[derive(serde::Deserialize)]
    struct Line {
        text: String,
    }
    serde_json::from_str::<Line>(line).map(|line| line.text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes `files` into a new folder and reads `path` below it. Compares the texts with those expected, or checks
    /// that the error contains the expected message.
    fn check(files: &[(&str, &[u8])], path: &str, expected: Result<&[&str], &str>) {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            let file = folder.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, bytes).unwrap();
        }
        let corpus = Corpus::read(&folder.path().join(path));
        match (corpus, expected) {
            (Ok(corpus), Ok(texts)) => {
                assert_eq!(corpus.documents().iter().map(|d| d.text.as_str()).collect::<Vec<_>>(), texts);
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error} lacks {part}"),
            (got, expected) => panic!("got {got:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn files_and_folders() {
        check(&[("a.txt", b"one")], "a.txt", Ok(&["one"]));
        check(&[("a.py", b"any extension when named")], "a.py", Ok(&["any extension when named"]));
        check(&[("b/z.md", b"3"), ("a.rs", b"1"), ("b/a.txt", b"2"), ("c.py", b"no")], "", Ok(&["1", "2", "3"]));
        check(&[("a.txt", b"1"), (".git/b.txt", b"no"), ("t/CACHEDIR.TAG", b""), ("t/c.rs", b"no")], "", Ok(&["1"]));
        check(&[("a.txt", b"1"), ("b.txt", b"\xff\xfe"), ("c.txt", b"a\0b"), ("d.txt", b"")], "", Ok(&["1"]));
        check(&[("a.jsonl", b"{\"text\":\"x\",\"id\":1}\n\n{\"text\":\"y\"}\n")], "a.jsonl", Ok(&["x", "y"]));
        // The case of an extension does not matter, and .jsonl has other names.
        let lines = b"{\"text\":\"x\"}\n{\"text\":\"y\"}\n";
        for name in ["A.JSONL", "a.ndjson", "a.json", "a.Json"] {
            check(&[(name, lines)], name, Ok(&["x", "y"]));
            check(
                &[(name, lines), ("B.TXT", b"z")],
                "",
                Ok(if name == "A.JSONL" { &["x", "y", "z"] } else { &["z", "x", "y"] }),
            );
        }
        // In a folder, a .json file without texts counts as metadata and is skipped.
        check(&[("info.json", b"{\n\"features\": 1\n}"), ("a.txt", b"1")], "", Ok(&["1"]));
        check(&[("a.txt", b"\xef\xbb\xbfone"), ("b.txt", b"\xef\xbb\xbf"), ("c.md", b"\xef\xbb")], "", Ok(&["one"]));
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_what_is_no_file_is_refused() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let inside = |name: &str| folder.path().join(name);
        fs::create_dir_all(inside("real")).unwrap();
        fs::write(inside("real/x.txt"), "linked").unwrap();
        fs::create_dir(inside("data")).unwrap();
        symlink(inside("real/x.txt"), inside("data/a.txt")).unwrap();
        symlink(inside("real"), inside("data/b")).unwrap();
        let read = || Corpus::read(&inside("data")).map(|corpus| corpus.documents().len());
        assert_eq!(read().unwrap(), 2);
        symlink(inside("nowhere"), inside("data/c.txt")).unwrap();
        assert!(read().unwrap_err().to_string().contains("c.txt"));
        fs::remove_file(inside("data/c.txt")).unwrap();
        symlink(inside("data"), inside("data/d")).unwrap();
        assert!(read().unwrap_err().to_string().contains("loop"));
        let device = Corpus::read(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(device.contains("it is a pipe, a device or a socket"), "{device}");
    }

    #[test]
    fn bad_input_has_a_remedy() {
        check(&[], "nowhere.txt", Err("does not exist"));
        check(&[("a.txt", b"")], "a.txt", Err("no text in"));
        check(&[("a.txt", b"ab\0c")], "a.txt", Err("byte 2 is NUL"));
        check(&[("a.txt", b"abc\xff")], "a.txt", Err("byte 3 is not valid UTF-8"));
        check(&[("a.txt", b"\xff")], "", Err("(1 files skipped)"));
        check(&[("a.txt", b"\xff"), ("b.csv", b"x")], "", Err("(1 files skipped, and files of other types, such as "));
        check(&[("b.csv", b"x")], "", Err("b.csv); .txt, .rs"));
        check(&[("a.jsonl", b"{\"text\":\"x\"}\n{\"body\":\"y\"}")], "a.jsonl", Err("line 2: missing field `text`"));
        check(&[("a.jsonl", b"\xef\xbb\xbf{\"text\":\"x\"}\n")], "a.jsonl", Ok(&["x"]));
        check(&[("a.jsonl", b"{\"text\":3}")], "a.jsonl", Err("line 1"));
        for text in [&b"[{\"text\": \"x\"}]"[..], b"{\n\"text\": \"x\"\n}", b"3"] {
            check(&[("a.json", text)], "a.json", Err("line 1: the file is one JSON value"));
        }
    }

    #[test]
    fn the_hash_knows_order_and_borders_but_not_names() {
        let hash = |texts: &[&str]| Corpus::from_texts(texts.iter().copied()).report().hash;
        assert_eq!(hash(&["ab", "c"]), hash(&["ab", "", "c"]));
        assert_ne!(hash(&["ab", "c"]), hash(&["a", "bc"]));
        assert_ne!(hash(&["ab", "c"]), hash(&["c", "ab"]));
    }
}
