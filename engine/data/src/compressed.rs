//! Reading files that may be compressed.
//!
//! In: a path, whose last extension determines the compression. Out: a reader of the decompressed bytes. Never: a whole
//! file in memory.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use crate::DataError;

/// Bytes that are read at once.
const BUFFER_BYTES: usize = 1 << 18;

/// Returns the extension of a file's uncompressed content, in lower case: `jsonl` for both `a.jsonl.gz` and `A.JSONL`.
pub(crate) fn inner_extension(path: &Path) -> Option<String> {
    let outer = extension(path)?;
    if !matches!(&*outer, "gz" | "zst") {
        return Some(outer);
    }
    extension(Path::new(path.file_stem()?))
}

fn extension(path: &Path) -> Option<String> {
    Some(path.extension()?.to_str()?.to_lowercase())
}

/// Opens a file and decompresses it if its extension is .gz (gzip, RFC 1952) or .zst (Zstandard, RFC 8878). Files of
/// several gzip members or Zstandard frames are allowed.
///
/// # Errors
/// Returns an error if the path is not a regular file. A pipe or a device cannot be read twice, and may never end.
pub(crate) fn open(path: &Path) -> Result<Box<dyn BufRead>, DataError> {
    let file = open_file(path)?;
    let file = BufReader::with_capacity(BUFFER_BYTES, file);
    Ok(match extension(path).as_deref() {
        Some("gz") => Box::new(BufReader::with_capacity(BUFFER_BYTES, MultiGzDecoder::new(file))),
        Some("zst") => Box::new(BufReader::with_capacity(BUFFER_BYTES, Frames::new(file))),
        _ => Box::new(file),
    })
}

/// Opens a regular file, which can be read repeatedly and has an end.
pub(crate) fn open_file(path: &Path) -> Result<File, DataError> {
    open_regular(path).map_err(|error| DataError::read(path, error))
}

/// Opens a regular file.
///
/// # Errors
/// Returns an error in the same cases as [`File::open`], or if the path is a pipe, a device or a socket. These are
/// refused, because opening a pipe would wait for a writer, and a device may never end.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // The kind is checked before the file is opened, because opening a pipe waits.
    let kind = fs::metadata(path)?;
    if !kind.is_file() && !kind.is_dir() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is a pipe, a device or a socket; copy it into a file",
        ));
    }
    File::open(path)
}

/// Reads bytes at a position of a file without the file's cursor, so several threads can read one file.
///
/// # Errors
/// Returns an error if the file cannot be read, or if it ends before the last byte.
#[cfg(unix)]
pub fn read_exact_at(file: &File, bytes: &mut [u8], position: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, position)
}

/// Reads bytes at a position of a file without the file's cursor, so several threads can read one file.
///
/// # Errors
/// Returns an error if the file cannot be read, or if it ends before the last byte.
#[cfg(windows)]
pub fn read_exact_at(file: &File, mut bytes: &mut [u8], mut position: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, position)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                bytes = &mut bytes[read..];
                position += read as u64;
            }
        }
    }
    Ok(())
}

/// Reads a regular file of UTF-8 text.
///
/// # Errors
/// Returns an error in the same cases as [`open_regular`] and [`fs::read_to_string`], or if the file has more than
/// `most` bytes.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    let mut text = String::new();
    open_regular(path)?.take(most + 1).read_to_string(&mut text)?;
    if text.len() as u64 > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {most} bytes")));
    }
    Ok(text)
}

/// Like [`open`], for text: skips a byte-order mark, which some editors write.
pub(crate) fn open_text(path: &Path) -> Result<Box<dyn BufRead>, DataError> {
    let mut source = open(path)?;
    let mut first = Vec::new();
    source.by_ref().take(MARK.len() as u64).read_to_end(&mut first).map_err(|error| read_error(path, error))?;
    if first == MARK {
        first.clear();
    }
    Ok(Box::new(io::Cursor::new(first).chain(source)))
}

/// The byte-order mark of UTF-8 (Unicode 16, section 23.8).
pub(crate) const MARK: &[u8] = "\u{feff}".as_bytes();

/// Turns an error of a reader from [`open`] into a [`DataError`].
pub(crate) fn read_error(path: &Path, source: io::Error) -> DataError {
    match extension(path).as_deref() {
        Some("gz" | "zst") => DataError::Compressed { path: path.to_owned(), source },
        _ => DataError::read(path, source),
    }
}

/// Decompresses consecutive Zstandard frames and verifies their checksums.
struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
    inside: bool,
}

impl<R: BufRead> Frames<R> {
    fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new(), inside: false }
    }

    /// Begins the next frame. A skippable frame is skipped, since it has no data.
    fn begin(&mut self) -> io::Result<()> {
        match self.decoder.reset(&mut self.source) {
            Ok(()) => self.inside = true,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                let skipped = io::copy(&mut self.source.by_ref().take(length.into()), &mut io::sink())?;
                if skipped < length.into() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            Err(error) => return Err(io::Error::other(error)),
        }
        Ok(())
    }

    fn check_end(&self) -> io::Result<()> {
        let stored = self.decoder.get_checksum_from_data();
        if stored.is_some() && stored != self.decoder.get_calculated_checksum() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the checksum does not match"));
        }
        Ok(())
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if out.is_empty() || !self.inside && self.source.fill_buf()?.is_empty() {
                return Ok(0);
            }
            if !self.inside {
                self.begin()?;
            } else if self.decoder.can_collect() > 0 {
                return self.decoder.read(out);
            } else if self.decoder.is_finished() {
                self.check_end()?;
                self.inside = false;
            } else {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, one).map_err(io::Error::other)?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use crate::Corpus;

    const LINES: &str = "{\"text\": \"one\"}\n{\"text\": \"two\"}\n";

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(text: &str) -> Vec<u8> {
        compress_to_vec(text.as_bytes(), CompressionLevel::Fastest)
    }

    #[test]
    fn compressed_files_are_what_is_in_them() {
        let folder = tempfile::tempdir().unwrap();
        let hash = |name: &str, bytes: &[u8]| {
            fs::write(folder.path().join(name), bytes).unwrap();
            Corpus::read(&folder.path().join(name)).map(|corpus| corpus.report().hash)
        };
        let long = "a line of the text, and é\n".repeat(40_000);
        for (extension, text) in [("jsonl", LINES), ("txt", &long)] {
            let plain = hash(&format!("a.{extension}"), text.as_bytes()).unwrap();
            for (compressed, compress) in [("gz", gzip as fn(&str) -> Vec<u8>), ("zst", zstd)] {
                let name = format!("a.{extension}.{compressed}");
                let whole = compress(text);
                assert_eq!(hash(&name, &whole).unwrap(), plain, "{name}");
                // The same text in two members or frames.
                let (one, two) = text.split_at(text.len() / 2);
                let both = [compress(one), compress(two)].concat();
                assert_eq!(hash(&name, &both).unwrap(), plain, "{name}");
                let flipped: Vec<u8> =
                    whole.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at == whole.len() - 3)).collect();
                for damaged in [&whole[..whole.len() / 2], &whole[..whole.len() - 1], &flipped, b"no such format"] {
                    let error = hash(&name, damaged).unwrap_err().to_string();
                    assert!(error.contains(&name) && error.contains("damaged"), "{error}");
                }
            }
        }
        let skippable = [b"\x52\x2a\x4d\x18\x03\0\0\0abc".as_slice(), &zstd("text")].concat();
        assert_eq!(hash("b.txt.zst", &skippable).unwrap(), hash("b.txt", b"text").unwrap());
        // Compressed files in a folder are selected by their inner extension.
        fs::write(folder.path().join("c.csv.gz"), gzip("no")).unwrap();
        fs::remove_file(folder.path().join("a.txt.gz")).unwrap();
        fs::remove_file(folder.path().join("a.jsonl.gz")).unwrap();
        fs::remove_file(folder.path().join("a.jsonl.zst")).unwrap();
        fs::remove_file(folder.path().join("a.txt.zst")).unwrap();
        assert_eq!(Corpus::read(folder.path()).unwrap().report().files, 4);
    }
}
