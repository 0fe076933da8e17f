//! Kills of a process that tokenizes text.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use gapless::engine::data::VocabularyChoice;
use gapless::{DataOptions, Dataset, Source};
use gapless_testing::slow_tests_enabled;

use crate::Draw;

/// Number of lines. Their text is more than twice the text that must be tokenized again after a kill.
const LINES: u64 = 3_000_000;

/// Tokenizes `text.txt` in a folder, with the subfolder `cache` for the results.
pub fn prepare(dir: &Path, cache: &str) -> anyhow::Result<Dataset> {
    let options = DataOptions { vocabulary: VocabularyChoice::Bytes, cache: dir.join(cache), ..DataOptions::default() };
    Ok(Dataset::prepare(&Source::Path(dir.join("text.txt")), &options)?)
}

/// Returns the contents of the progress file in a cache with one preparation, or `None` if there is no such file.
fn progress(cache: &Path) -> Option<String> {
    let folder = fs::read_dir(cache).ok()?.next()?.ok()?.path();
    fs::read_to_string(folder.join("tokens.bin.progress")).ok()
}

pub fn a_kill_loses_nothing() {
    if !slow_tests_enabled() {
        return;
    }
    let (dir, mut draw) = (tempfile::tempdir().unwrap(), Draw::new());
    let mut text = BufWriter::new(File::create(dir.path().join("text.txt")).unwrap());
    (0..LINES).for_each(|line| writeln!(text, "line {line} of a text that is long enough for kills").unwrap());
    text.into_inner().unwrap();
    let whole = prepare(dir.path(), "whole").unwrap();

    let progress = || progress(&dir.path().join("cache"));
    let mut kills = 0;
    for _ in 0..3 {
        let before = progress();
        let mut child =
            Command::new(std::env::current_exe().unwrap()).arg("--prepare").arg(dir.path()).spawn().unwrap();
        // Waits until the next 64 MiB of text are tokenized and saved.
        while progress() == before && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(draw.below(100) as u64));
        child.kill().unwrap();
        kills += u32::from(!child.wait().unwrap().success());
    }
    println!("{kills} kills");
    let again = prepare(dir.path(), "cache").unwrap();
    assert_eq!(again.hash(), whole.hash());
    let [again, whole] = [again, whole].map(|dataset| dataset.folder().unwrap().join("tokens.bin"));
    assert!(fs::read(again).unwrap() == fs::read(whole).unwrap());
}
