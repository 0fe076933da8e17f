//! Tokenizes generated text from disk to disk, and compares the rate with the parallel encoder of `tokenizers`, which
//! gets its text from memory.
//!
//! Run with `cargo bench -p gapless-data --bench tokenize -- 1024` for 1,024 MiB; the default is 64. Prints three
//! results:
//! - both rates and their ratio
//! - the ratio of CPU seconds, on which other work on the machine has little effect
//! - on Linux, the process's peak memory after tokenizing the text
//!
//! The peer encodes at most 1 GiB, sampled from all parts of the text.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use cpu_time::ProcessTime;
use gapless_data::{DataOptions, Dataset, Source, VocabularyChoice};

/// Bytes of text that the peer encodes per call.
const BATCH_BYTES: usize = 16 << 20;

/// Approximate bytes of text that the peer encodes in total.
const PEER_BYTES: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mebibytes: u64 = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(64);
    let folder = tempfile::tempdir_in(".")?;
    let text = folder.path().join("text.txt");

    // The vocabulary is trained on text of the same words.
    write_text(&text, 4 << 20)?;
    let cache = folder.path().join("cache");
    let options = DataOptions { vocabulary: VocabularyChoice::Bpe { size: 4096 }, cache, ..DataOptions::default() };
    let small = Dataset::prepare(&Source::Path(text.clone()), &options)?;
    let tokenizer = small.folder().ok_or("no folder")?.join("tokenizer.json");
    let options = DataOptions { vocabulary: VocabularyChoice::File(tokenizer.clone()), ..options };

    let bytes = write_text(&text, mebibytes << 20)?;
    let (start, cpu) = (Instant::now(), ProcessTime::now());
    let dataset = Dataset::prepare(&Source::Path(text.clone()), &options)?;
    let ours = Seconds { wall: start.elapsed().as_secs_f64(), cpu: cpu.elapsed().as_secs_f64() };
    let memory = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let memory = memory.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("VmHWM unknown").to_owned();

    let (theirs, theirs_bytes, tokens) = peer(&text, &tokenizer, bytes.div_ceil(PEER_BYTES))?;
    let rate = |bytes: u64, seconds: f64| bytes as f64 / f64::from(1 << 20) / seconds;
    let ratio = |ours: f64, theirs: f64| rate(bytes, ours) / rate(theirs_bytes, theirs);
    let count = dataset.training_tokens() + dataset.validation_tokens();
    println!("{mebibytes} MiB, {count} tokens: {:.2} MiB/s", rate(bytes, ours.wall));
    println!("encode_batch, {tokens} tokens: {:.2} MiB/s", rate(theirs_bytes, theirs.wall));
    println!("ratio {:.3}, by CPU seconds {:.3}, {memory}", ratio(ours.wall, theirs.wall), ratio(ours.cpu, theirs.cpu));
    Ok(())
}

/// Elapsed seconds, and CPU seconds of all threads.
struct Seconds {
    wall: f64,
    cpu: f64,
}

/// Encodes every n-th batch with `encode_batch`. Returns the time that it took (without reading), the bytes of text,
/// and the number of tokens.
fn peer(text: &Path, tokenizer: &Path, every: u64) -> Result<(Seconds, u64, usize), Box<dyn std::error::Error>> {
    let tokenizer: tokenizers::Tokenizer = fs::read_to_string(tokenizer)?.parse().map_err(|_| "no tokenizer")?;
    let (mut seconds, mut all_bytes, mut tokens) = (Seconds { wall: 0.0, cpu: 0.0 }, 0, 0);
    let mut text = BufReader::new(File::open(text)?);
    for index in 0.. {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        let mut line = String::new();
        while bytes < BATCH_BYTES && text.read_line(&mut line)? > 0 {
            bytes += line.len();
            batch.push(std::mem::take(&mut line));
        }
        if batch.is_empty() {
            break;
        }
        if index % every > 0 {
            continue;
        }
        let (start, cpu) = (Instant::now(), ProcessTime::now());
        let encoded = tokenizer.encode_batch(batch, false).map_err(|error| error.to_string())?;
        seconds.wall += start.elapsed().as_secs_f64();
        seconds.cpu += cpu.elapsed().as_secs_f64();
        tokens += encoded.iter().map(|encoding| encoding.len()).sum::<usize>();
        all_bytes += bytes as u64;
    }
    Ok((seconds, all_bytes, tokens))
}

/// Writes lines of words, some of them more frequent than others, and returns the number of bytes.
fn write_text(path: &Path, bytes: u64) -> std::io::Result<u64> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    let words: Vec<String> = (0..20_000)
        .map(|_| (0..2 + random() % 9).map(|_| char::from(b'a' + (random() % 26).min(random() % 26) as u8)).collect())
        .collect();
    let mut written = 0;
    while written < bytes {
        for _ in 0..12 {
            let most = 1 + random() as usize % words.len();
            let word = &words[random() as usize % most];
            written += word.len() as u64 + 1;
            write!(file, "{word} ")?;
        }
        written += 2;
        writeln!(file, ".")?;
    }
    file.flush()?;
    Ok(written)
}
